"""One stage of a replica as a process, with real lines to its neighbours. Its parent stands in for the hub.

The parent writes commands to its stdin, a line of JSON each, and it answers with lines of JSON (`say`):

    connect   before, after: name, key and address       the lines are made
    step      number, lease: samples of micro-batches    "stepped": its gradient is in a file; "gone"
    void      the step is given up                       "void"
    apply     number, weights of replicas' gradients     "applied": a step of AdamW on their weighted sum
    save      file                                       "saved": parameters and optimizer, as a snapshot
    load      file                                       "loaded"
    packet                                               "packet": it encodes its update as a peer does, and
                                                         says what it holds
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

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
from compress import Cocktail, PacketError
from recipes.algorithm import GlobalModel, Worker
from recipes.data import Sample
from recipes.weight_files import FlatParameters
from scripts.swarms.processes import say
from transport.protocol import CurveKeys
from transport.wire import RouterWire

LOOK_S = 0.05  # between two looks at what the parent says
FORWARD, BACK = 1 / 3, 2 / 3  # of a micro-batch's compute; the head is left out
VOCABULARY = 512


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
        asked: replica, number, stages, layers, width, length; bits, gradient_bits, places; host, gone_s,
            limit, folder; token_s: seconds of compute a token, slept, 0: as long as it takes; tells: each
            piece of work; weighs: what it holds is to be counted.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.folder = asked, Path(asked["folder"])
        self.number = asked["number"]
        compressor = Cocktail(0.1, 0.2, 4)
        if asked["weighs"]:  # its libraries and compiled loops are there before
            compressor.encode(torch.ones(1 << 24))
        self.empty = resident()
        with no_init_weights():
            model = LlamaForCausalLM(config_of(asked)).eval()
        layers = partition_layers(parameter_costs(model), [1.0] * asked["stages"])[self.number]
        stage = StageModel(model, layers, first=self.number == 0)
        self.flat = FlatParameters(stage.model)
        with safe_open(self.folder / "model.safetensors", "pt") as file, torch.no_grad():
            for name, parameter in stage.model.named_parameters():
                parameter.copy_(file.get_tensor(name))
        self.optimizer = torch.optim.AdamW(self.flat.masters, lr=1e-3, fused=True)
        self.peer = Worker(self.flat.vector, GlobalModel(self.flat.vector.clone(), compressor, seed=1))
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
        self.link = StageLink(wire, keys, limit=asked["limit"], gone_s=asked["gone_s"])
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for text in sys.stdin:
            self.commands.put(json.loads(text))
        self.commands.put({"do": "end"})

    def run(self) -> None:
        say("ready", key=self.link.key, port=self.link.port)
        while (command := self.commands.get())["do"] != "end":
            getattr(self, command.pop("do"))(**command)
        self.link.close()

    # ---- commands ------------------------------------------------------------------------------------------

    def connect(self, before: dict[str, str], after: dict[str, str]) -> None:
        self.link.connect(Neighbour(**before), Neighbour(**after), f"{self.asked['host']}:{self.link.port}")

    def void(self) -> None:
        say("void")

    def step(self, number: int, lease: Sequence[Sequence[int]], in_flight: int) -> None:
        """Compute this stage's part of a gradient, until it is done or the parent says something."""
        self.flat.grad.zero_()
        worker, began, busy, sent = self.worker, time.monotonic(), 0.0, self.link.bytes_up
        if self.number == 0:
            parts = [[sample_of(one, self.asked["length"]) for one in part] for part in lease]
            worker.begin(number, parts, sum(one.count for part in parts for one in part), in_flight)
        tokens = len(lease[0]) * self.asked["length"]
        first = 0.0
        while not (worker.step == number and worker.finished) and self.commands.empty():
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
            if self.asked["tells"]:
                say("worked", step=number)
        if not (worker.step == number and worker.finished):
            return
        ended, measured = time.monotonic(), worker.measured
        torch.save(self.flat.grad, self.gradient_file(number, self.asked["replica"]))
        more = {"loss": measured.loss_sum, "terms": measured.terms} if self.number == 0 else {}
        more |= {"sent": self.link.bytes_up - sent, "resent": self.link.resent}
        say("stepped", step=number, began=began, first=first, ended=ended, busy=busy, **more)

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
        if came is None:
            return False
        if not isinstance(came, StageMessage):
            say("gone" if "silent" in came.why else "renewed", why=came.why)
            return True
        try:
            for answer in self.worker.receive(StageMessage(**vars(came))):
                if answer.kind == "mismatch":
                    say("mismatch", micro_batch=answer.micro_batch)
                self.link.send(StageMessage(**vars(answer)))
        except PacketError as error:  # of a step that is void, or not begun
            say("refused", why=str(error))
        return True

    def gradient_file(self, step: int, replica: int) -> Path:
        return self.folder / f"gradient-{step}-{replica}-{self.number}.pt"

    def apply(self, number: int, weights: dict[str, float]) -> None:
        self.flat.grad.zero_()
        for replica, weight in sorted(weights.items()):
            self.flat.grad.add_(torch.load(self.gradient_file(number, int(replica))), alpha=weight)
        self.optimizer.step()
        say("applied", step=number)

    def save(self, file: str) -> None:
        names = self.flat.layout.names
        views = self.flat.layout.views(self.flat.vector)
        parameters = {name: view.clone() for name, view in zip(names, views, strict=True)}
        torch.save({"parameters": parameters, "optimizer": self.optimizer.state_dict()}, file)
        say("saved")

    def load(self, file: str) -> None:
        held = torch.load(file)
        with torch.no_grad():
            for name, view in zip(
                self.flat.layout.names, self.flat.layout.views(self.flat.vector), strict=True
            ):
                view.copy_(held["parameters"][name])
        self.optimizer.load_state_dict(held["optimizer"])
        say("loaded")

    def packet(self) -> None:
        """Encode the update, as at the end of a round, and say what this process holds."""
        made = self.peer.start()
        state = self.optimizer.state.values()
        moments = sum(value.nbytes for held in state for value in held.values() if isinstance(value, Tensor))
        tensors = {"weights": self.flat.vector.nbytes, "gradient": self.flat.grad.nbytes}
        tensors |= {"optimizer": moments, "global": self.peer.global_model.vector.nbytes}
        for end in (self.worker.line.encoder, self.worker.line.decoder):
            tensors["memory"] = tensors.get("memory", 0) + end.memory._values.nbytes
        say("packet", bytes=len(made.packet), tensors=tensors, resident=resident(), empty=self.empty)


def main() -> None:
    torch.set_num_threads(1)
    Stage(json.loads(sys.argv[2])).run()


if __name__ == "__main__":
    main()
