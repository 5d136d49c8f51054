"""One stage of a replica as a process, with real lines to its neighbours. Its parent stands in for the hub.

The parent writes commands to its stdin, a line of JSON each, and it answers with lines of JSON (`say`):

    connect   before, after: name, key and address       the lines are made
    step      number, lease: samples of micro-batches    "stepped": what its part of the gradient took
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
from cocktail_cli.extensions.stages.lines import Neighbour, StageLink, StageMessage
from recipes.data import Sample
from recipes.training import FlatParameters
from scripts.swarms.processes import say
from transport.protocol import CurveKeys
from transport.wire import RouterWire

LOOK_S = 0.05  # between two looks at what the parent says
FORWARD, BACK = 1 / 3, 2 / 3  # of a micro-batch's compute; the head is left out
VOCABULARY = 512
LIMIT = 1 << 28  # bytes of a message


def config_of(asked: dict[str, Any]) -> LlamaConfig:
    width = asked["width"]
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": max(1, width // 64), "max_position_embeddings": asked["length"]}
    return LlamaConfig(num_hidden_layers=asked["layers"], **sizes)


def sample_of(number: int, length: int) -> Sample:
    """Make the sample of this number."""
    tokens = np.random.default_rng(number).integers(0, VOCABULARY, length).astype(np.int32)
    return Sample(tokens, np.arange(length) > 0)


def resident() -> int:
    """Bytes of this process in memory, after freed ones were given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stage:
    """The stage, its lines and what it has been told.

    Args:
        asked: number, stages, layers, width, length; bits, gradient_bits, places; host, gone_s; token_s:
            seconds of compute a token, slept.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.number = asked, asked["number"]
        torch.manual_seed(0)
        model = LlamaForCausalLM(config_of(asked)).eval()
        layers = partition_layers(parameter_costs(model), [1.0] * asked["stages"])[self.number]
        stage = StageModel(model, layers, first=self.number == 0)
        self.flat = FlatParameters(stage.model)
        width, places = asked["width"], (asked["places"], asked["length"])
        ends = [ActivationMemory(*places, width) for _ in range(2)]
        line = Line(
            ActivationEncoder(asked["bits"], ends[0]),
            ActivationDecoder(asked["bits"], ends[1]),
            asked["gradient_bits"],
        )
        self.worker = StageWorker(stage, line)
        keys = CurveKeys.generate()
        wire = RouterWire(asked["host"], 0, keys, 1, allowed=lambda key: self.link.knows(key))
        self.link = StageLink(wire, keys, limit=LIMIT, gone_s=asked["gone_s"])

    def run(self) -> None:
        say("ready", key=self.link.key, port=self.link.port)
        for text in sys.stdin:
            command = json.loads(text)
            getattr(self, command.pop("do"))(**command)
        self.link.close()

    # ---- commands ------------------------------------------------------------------------------------------

    def connect(self, before: dict[str, str], after: dict[str, str]) -> None:
        self.link.connect(Neighbour(**before), Neighbour(**after), f"{self.asked['host']}:{self.link.port}")

    def step(self, number: int, lease: Sequence[Sequence[int]], in_flight: int) -> None:
        """Compute this stage's part of a gradient."""
        self.flat.grad.zero_()
        worker, busy, sent = self.worker, 0.0, self.link.bytes_up
        if self.number == 0:
            parts = [[sample_of(one, self.asked["length"]) for one in part] for part in lease]
            worker.begin(number, parts, sum(one.count for part in parts for one in part), in_flight)
        tokens = len(lease[0]) * self.asked["length"]
        first = 0.0
        while not (worker.step == number and worker.finished):
            if self._receive(0.0):
                continue
            start = time.monotonic()
            made = worker.work()
            if made is None:
                self._receive(LOOK_S)
                continue
            first = first or start
            self._sleep(made, start, tokens)
            busy += time.monotonic() - start
            for message in made:
                self.link.send(StageMessage(**vars(message)))
        ended = time.monotonic()
        say("stepped", first=first, ended=ended, busy=busy, sent=self.link.bytes_up - sent)

    def _sleep(self, made: Sequence[StageMessage], start: float, tokens: int) -> None:
        """Sleep until this piece of work has taken as long as on the machine that it stands for."""
        kinds = {message.kind for message in made}
        loss = self.number == 0 and "gradients" in kinds
        share = 0.0 if loss else FORWARD if "activations" in kinds else BACK
        until = start + share * tokens * self.asked["token_s"]
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)

    def _receive(self, timeout: float) -> bool:
        """Take what the lines have; returns whether there was anything."""
        came = self.link.receive(timeout)
        if isinstance(came, StageMessage):
            for answer in self.worker.receive(StageMessage(**vars(came))):
                self.link.send(StageMessage(**vars(answer)))
        return came is not None


def main() -> None:
    torch.set_num_threads(1)
    Stage(json.loads(sys.argv[2])).run()


if __name__ == "__main__":
    main()
