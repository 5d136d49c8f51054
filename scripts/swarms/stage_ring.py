"""The stages of one replica in one process: real stages, codecs and messages; deques instead of lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from cocktail_cli.extensions.stages.compute import (
    ActivationDecoder,
    ActivationEncoder,
    ActivationMemory,
    Line,
    StageModel,
    StageWorker,
    parameter_costs,
    partition_layers,
)
from cocktail_cli.extensions.stages.lines import StageMessage
from recipes.data import Sample
from recipes.objectives import Measured


@dataclass(frozen=True)
class LineSetting:
    """How the lines of a ring code what they carry."""

    bits: int = 32  # of activations; 32: unquantised
    gradient_bits: int = 32
    places: int = 1  # samples that an end remembers
    rows: int = 1  # tokens of the longest of them


class StageRing:
    """Stages cut from copies of `model`, connected as a ring.

    Args:
        repeats: how often each message arrives.
    """

    def __init__(self, model: PreTrainedModel, stages: int, setting: LineSetting, repeats: int = 1) -> None:
        self.repeats = repeats
        self.sent = {"activations": 0, "gradients": 0, "mismatch": 0}  # bytes
        self.columns, self.setting = int(model.config.hidden_size), setting
        self.workers = []
        for number, layers in enumerate(partition_layers(parameter_costs(model), [1.0] * stages)):
            stage = StageModel(deepcopy(model), layers, first=number == 0)
            encoder = ActivationEncoder(setting.bits, self.memory())
            decoder = ActivationDecoder(setting.bits, self.memory())
            self.workers.append(StageWorker(stage, Line(encoder, decoder, setting.gradient_bits)))
        self.lines: list[deque[StageMessage]] = [deque() for _ in self.workers]  # on their way to each stage

    def memory(self) -> ActivationMemory:
        """Make an end's memory, empty."""
        return ActivationMemory(self.setting.places, self.setting.rows, self.columns)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, of all stages."""
        return {name: p for worker in self.workers for name, p in worker.stage.model.named_parameters()}

    def gradient(self, micro_batches: Sequence[Sequence[Sample]], terms: int, in_flight: int) -> Measured:
        """Add the gradient of a step to the parameters of all stages; returns its losses."""
        first = self.workers[0]
        step = first.step + 1
        first.begin(step, micro_batches, terms, in_flight)
        while not all(worker.step == step and worker.finished for worker in self.workers):
            moved = [self._turn(number) for number in range(len(self.workers))]
            assert any(moved), "no stage has anything to do"
        return first.measured

    def _turn(self, number: int) -> bool:
        """Let a stage take one message, and do one piece of work."""
        worker, answers = self.workers[number], list[StageMessage]()
        came = bool(self.lines[number])
        if came:
            answers += worker.receive(self.lines[number].popleft())
        made = worker.work()
        for message in answers + (made or []):
            self.sent[message.kind] += len(message.body)
            step = 1 if message.kind == "activations" else -1
            self.lines[(number + step) % len(self.workers)] += [message] * self.repeats
        return came or made is not None
