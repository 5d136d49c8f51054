"""A peer that lies in the numbers of its packets, in a whole run whose owner probes."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Member, Swarm, recipe_of, rows, save_tiny

from cocktail_cli.extensions.trust.contribution_score import Evidence, HarmScore, ProbeThread
from cocktail_cli.host import RunDelegate
from recipes.algorithm import DecodedPacket, Worker
from recipes.training import Event, StepDone
from transport import Ledger
from transport.protocol import events as hub

pytestmark = pytest.mark.slow


class Liar(Worker):
    """Sends ten times the opposite of what it found."""

    def start(self, *asked: Any) -> DecodedPacket:
        part = super().start(*asked)
        [piece] = part.shard_updates
        return replace(part, packet=self.global_model.compressor.encode(-10 * piece.update.dense()).packet)


def error_of(work: RunDelegate) -> torch.Tensor:
    return torch.cat([owner.error for owner in work.aggregator.assigned.values()])


def test_who_undoes_the_work_of_others_is_put_out_with_the_reason_and_e_is_replayed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[None] = []
    add = Evidence.add

    def counted(self: Evidence, *said: Any) -> dict[str, HarmScore]:
        verdicts = add(self, *said)
        judged.append(None)
        return verdicts

    monkeypatch.setattr(Evidence, "add", counted)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(126)))
    recipe = recipe_of(
        save_tiny("gpt_neox", tmp_path / "neox"),
        data,
        training={"max_steps": 24, "global_batch_size": 5},
        trust={"probe_batch_size": 4},
        compression={"random_ratio": 0.5},
        checkpoint={"eval_steps": None},
    )
    with Swarm(recipe, tmp_path / "run", min_peers=4) as swarm:
        [probing] = swarm.work.judges
        assert isinstance(probing, ProbeThread)
        assert probing.ready.wait(120)

        def pace(member: Member, event: Event) -> None:
            """So that each round is judged: they are shorter here than a gradient takes."""
            until = time.monotonic() + 60
            while isinstance(event, StepDone) and time.monotonic() < until:
                if len(judged) > event.round and probing.ready.is_set():
                    return
                time.sleep(0.002)

        names = ("eve", "ann", "bob", "cat", "dan")
        for member in [swarm.prepare(name) for name in names]:
            if member.name == "eve":
                worker = member.peer.worker
                member.peer.worker = Liar(worker.x, worker.global_model, worker.name_at)
            swarm.go(member, pace)
        events = swarm.wait()
        error = error_of(swarm.work)

    eve = swarm.members["eve"]
    refusals = [step.refused for step in eve.steps if step.refused]
    assert refusals
    assert all("raise the loss of the host's probe batch" in why for why in refusals)
    left = {event.peer: event.reason for event in events if isinstance(event, hub.PeerLeft)}
    assert "3 unusable packets, the last: its last" in left["eve"]
    for name in names[1:]:
        swarm.members[name].join()
        assert not any(step.refused for step in swarm.members[name].steps)
    again = RunDelegate(recipe, swarm.base, swarm.corpus, tmp_path / "run" / "ledger")
    with Ledger(tmp_path / "run" / "ledger", run="test-run", samples=len(swarm.corpus)) as ledger:
        again.durable.recover(ledger)
    again.durable.close()
    assert torch.equal(error_of(again).view(torch.int32), error.view(torch.int32))
