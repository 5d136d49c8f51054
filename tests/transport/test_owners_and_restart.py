"""A hub that is killed while peers own shards: the owners are found again, with what they hold."""

from __future__ import annotations

import json
from pathlib import Path

from test_hub_and_peer import FAST, Running, kill
from toy_owners import SHARDS, OwnersWork, OwningPeer, owners_settings
from toy_swarm import trained

from transport import PeerLink
from transport.events import RoundCommitted


def test_owners_keep_their_shards_and_errors_when_the_hub_is_killed(tmp_path: Path) -> None:
    settings = owners_settings(samples=160, first_peers=2, min_peers=2, **FAST)
    first = Running(tmp_path, settings, work=OwnersWork())
    peers = [OwningPeer(PeerLink(first.url, name, owns=True)) for name in ("ann", "bob")]
    threads = [peer.start() for peer in peers]
    first.until(lambda events: sum(isinstance(e, RoundCommitted) for e in events) >= 4)
    kill(first)

    work = OwnersWork(packets=list(first.work.packets))
    again = Running(tmp_path, settings, first.keys, first.hub.port, work)
    work.packets[:] = [packet for _, packet in again.ledger.packets()]
    work.moved = [json.loads(packet)[2] for packet in work.packets]
    again.ended(30)
    for thread in threads:
        thread.join(10)
    again.close()

    assert [peer.error for peer in peers] == [None, None]
    assert trained(work) == list(range(160))
    for shard in range(SHARDS):
        moved = [round for round, those in enumerate(work.moved) if shard in those]
        held = sorted(r for peer in peers for r in peer.half.errors.get(shard, []))
        assert held == moved, f"shard {shard}"
    assert {tuple(mine) for mine in peers[0].owned} == {tuple(peers[0].owned[0])}
