"""One machine of a replica as a process, as a lent machine of a run is, and what it holds.

    stage   serves; "weigh" on its stdin: says its peak
    head    loads all machines, takes a step and exchanges a packet with itself, and says its peak
    whole   an ordinary peer, which does the same

A peak is of resident memory, beyond what the process had when its libraries and compiled loops were there.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from cocktail_cli.assembly import recipe_type
from cocktail_cli.extensions.stages.compute import (
    StageMachine,
    StageServer,
    cut_of,
    load_replica,
    parameter_costs,
)
from cocktail_cli.extensions.stages.lines import Neighbour, StageLink
from cocktail_cli.extensions.stages.stage_ring import StageRing
from compress import Cocktail
from recipes.config import recipe_from_json
from recipes.data import Sample
from recipes.models import load_trained, meta_trained_model
from recipes.training import Peer, build_peer
from scripts.swarms.processes import say, status_bytes
from scripts.swarms.stage_process import resident, sample_of
from transport.protocol import CurveKeys, parse_address


def clear() -> int:
    """Begin to measure; returns the bytes in memory now."""
    Cocktail(0.1, 0.2, 4).encode(torch.ones(1 << 22))
    empty = resident()
    Path("/proc/self/clear_refs").write_text("5")
    return empty


def samples(asked: dict[str, Any]) -> list[list[Sample]]:
    return [[sample_of(one, asked["length"])] for one in range(asked["micro_batches"])]


def exercise(peer: Peer, parts: list[list[Sample]]) -> float:
    """Take a step, and a round of one peer; returns the loss."""
    terms = sum(sample.count for part in parts for sample in part)
    peer.trainer.zero()
    found = peer.trainer.backward(parts, terms) if peer.trainer.at_once > 1 else None
    if found is None:
        found = peer.trainer.backward(parts[:1], terms)
        for part in parts[1:]:
            found += peer.trainer.backward([part], terms)
    peer.trainer.clip(1.0)
    peer.trainer.step(1e-3)
    worker = peer.worker
    sent = worker.start(0, True, 0, [])
    aggregate = worker.global_model.decode(sent.packet)
    worker.global_model.move(aggregate)
    worker.follow(aggregate, sent)
    return found.mean


def lines_of(asked: dict[str, Any]) -> StageLink:
    """Open this machine's lines to its neighbours: `addresses` and `keys` (public, secret) are by stage."""
    addresses, number = asked["addresses"], asked["number"]
    keys = [CurveKeys(*pair) for pair in asked["keys"]]

    def neighbour(stage: int) -> Neighbour:
        return Neighbour(f"stage {stage % len(keys)}", keys[stage].public, addresses[stage])

    lines = StageLink.open(keys[number], port=parse_address(addresses[number])[1])
    lines.connect(neighbour(number - 1), neighbour((number + 1) % len(addresses)), addresses[number])
    return lines


def main() -> None:
    torch.set_num_threads(1)
    role, asked = sys.argv[1], json.loads(sys.argv[2])
    recipe, base = recipe_from_json(Path(asked["recipe"]).read_text(), recipe_type), Path(asked["base"])
    if role == "whole":
        empty = clear()
        peer = build_peer(load_trained(recipe, base), recipe, 1)
        loss = exercise(peer, samples(asked))
        say("weighed", peak=status_bytes("VmHWM") - empty, parameters=peer.trainer.layout.size, loss=loss)
        return
    number, stages = asked["number"], len(asked["addresses"])
    if role == "head":
        layers = cut_of(parameter_costs(meta_trained_model(recipe, base)), stages, recipe)
        ring = StageRing(lines_of(asked), "cpu", layers)
        with closing(ring.lines), closing(ring.head):
            empty = clear()
            peer = ring.peer(lambda head: load_replica(head, recipe, base), 1)
            loss = exercise(peer, samples(asked))
            share = ring.head.part.share
            say("weighed", peak=status_bytes("VmHWM") - empty, parameters=share, loss=loss)
        return
    with closing(lines_of(asked)) as lines:
        machine = StageMachine(number)
        server, empty = StageServer(machine, lines, stages), clear()
        say("ready")
        threading.Thread(target=server.run, daemon=True).start()
        sys.stdin.readline()
        say("weighed", peak=status_bytes("VmHWM") - empty, parameters=machine.part.share)
        server.stop.set()


if __name__ == "__main__":
    main()
