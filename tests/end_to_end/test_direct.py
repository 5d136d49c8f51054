"""Peers that own shards and reach each other, on real sockets: what each of them sends and receives."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import recipe_of, rows, run_link_of

from cocktail_cli.host import CommittedModel, RunDelegate, settings_of
from cocktail_cli.volunteer.run_link import RunLink
from cocktail_cli.volunteer.shard_aggregator_link import (
    connect_aggregators,
    exchange_by_shard,
    open_shard_server,
    shard_backend,
)
from recipes.data import build_corpus
from recipes.models import load_model, load_tokenizer, prepare_base
from recipes.training import StepDone, build_peer, finetune
from transport import Hub, Ledger, PeerLink, RunKeys
from transport.aggregators import AggregatorThread
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys
from transport.protocol import events as hub

NAMES = ("ann", "bob", "cat", "dan")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(66)))
    return path


class Member:
    """A peer with a door, that takes part in a thread."""

    def __init__(self, name: str, url: Any, work: RunDelegate, folder: Path) -> None:
        keys = CurveKeys.generate()
        self.door, port = open_shard_server("127.0.0.1", 0, keys, url)
        self.link = PeerLink(url, PeerIdentity(name, keys=keys, owns=True, reachable=f"127.0.0.1:{port}"))
        self.work, self.keys, self.folder = work, keys, folder
        self.steps: list[StepDone] = []
        self.run: RunLink | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.take_part, daemon=True)

    def take_part(self) -> None:
        try:
            recipe = self.work.recipe
            self.link.connect(10)
            run = self.run = run_link_of(self.link, self.work, self.folder)
            kept = self.folder / "kept" / run.name
            half = shard_backend(recipe, self.work.parameters, kept, pytest.fail)
            aggregator = AggregatorThread(self.link, half, self.door)
            aggregator.start()
            clients = connect_aggregators(self.link, self.keys)
            run.sharded = exchange_by_shard(self.link, recipe.compression.shard_count, clients, aggregator)
            self.peer = build_peer(load_model(self.work.base.folder), recipe, micro_batch=2, name=run.name)
            for event in finetune(run, self.peer, self.link.welcome.round):
                if isinstance(event, StepDone):
                    self.steps.append(event)
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        if self.run is not None and self.run.sharded is not None:
            self.run.sharded.leave(hand_over=False)
        self.link.close()


def test_four_owners_send_and_receive_what_the_paper_says(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    # One process has them all, on a machine that may be busy: all four are in every round, and none that is
    # silent for seconds is dialled anew, and sent a window of bytes again.
    monkeypatch.setattr("transport.peer.connection_manager.BACKED_OFF_S", 60.0)
    monkeypatch.setattr("transport.peer.connection_manager.STALLED_S", 60.0)
    everything = {"preset": "allreduce", "staleness": 1, "shards": 8}
    recipe = recipe_of(
        Path("builtin:tiny-gpt-neox"),
        data,
        compression=everything,
        checkpoint={"eval_steps": 1000},
        training={"optim": "sgd", "learning_rate": 0.05, "global_batch_size": 8},
        swarm={"owners": "peers", "min_peers": 4, "step_timeout": 60.0, "peer_timeout": 60.0},
    )
    base = prepare_base(recipe, tmp_path / "base")
    corpus = build_corpus(recipe, load_tokenizer(recipe.model, base.folder))
    work = RunDelegate(recipe, base, corpus, tmp_path / "ledger")
    settings = replace(settings_of(work, "test-run"), min_peers=4, first_peers=4, ping_s=1.0, linger_s=1.0)
    keys = RunKeys.generate()
    with Ledger(tmp_path / "ledger", run="test-run", samples=settings.samples) as ledger:
        work.durable.recover(ledger)
        running = Hub(("127.0.0.1", 0), keys, ledger, settings, work)
        running.start()
        url = keys.url("127.0.0.1", running.port, "test-run")
        members = [Member(name, url, work, tmp_path) for name in NAMES]
        for member in members:
            member.thread.start()
        events = list(running.events())
        for member in members:
            member.thread.join(20)
            member.close()
        running.join(20)
        work.durable.close()

    assert [member.error for member in members] == [None] * 4
    assert not [event for event in events if isinstance(event, hub.Warned)]
    truth = CommittedModel(recipe, base.folder, tmp_path).load().global_model.vector
    assert all(torch.equal(member.peer.worker.global_model.vector, truth) for member in members)
    # Each keeps its own part and sends three; an aggregate goes to the hub and to two members, to the third
    # from the hub. Shards here are not alike (embeddings of tokens that never come), so sums are compared.
    own = sum(step.sent_bytes for member in members for step in member.steps)
    committed = [event for event in events if isinstance(event, hub.RoundCommitted)]
    bound = 3 / 4 * own + 3 * sum(event.size for event in committed)
    up, down = (
        sum(member.run.traffic[way] for member in members if member.run is not None) for way in (0, 1)
    )
    print(f"up {up / bound:.4f}, down {down / bound:.4f} of {bound:,.0f} bytes")
    assert up <= 1.02 * bound
    assert down <= 1.02 * bound
    through = sum(sum(event.down.values()) for event in committed)
    print(f"hub {through:,} down, {sum(event.size for event in committed):,} aggregated")
