"""Assignment of shards to aggregators by rendezvous hashing.

It follows from the shards and the peers alone, so a restarted hub comes to the same answer, and few shards
move when a peer comes or goes. The hub aggregates what no peer does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping


def assign(
    shards: int, peers: Iterable[str], counts: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """Return peer -> its shards, ascending, for peers that get any. No peer gets more than its share: that
    of all, or as many as `counts` says, which are as many as there are shards.

    A shard goes to the peer whose hash with it is highest among those that have room: by the hash alone one
    of four peers would get a tenth more than another.
    """
    assigned: dict[str, list[int]] = {peer: [] for peer in sorted(peers)}
    share = -(-shards // len(assigned)) if assigned else 0
    most = dict.fromkeys(assigned, share) if counts is None else counts
    for shard in range(shards if assigned else 0):
        free = [peer for peer, mine in assigned.items() if len(mine) < most[peer]]
        assigned[max(free, key=lambda peer: rank(shard, peer))].append(shard)
    return {peer: mine for peer, mine in assigned.items() if mine}


def digest_of(part: bytes) -> str:
    """Digest a part, to tell it from an earlier one of the same member, cut for other aggregators."""
    return short(hashlib.sha256(part).digest())


def short(sha256: bytes) -> str:
    return sha256.hex()[:16]


def rank(shard: int, peer: str) -> bytes:
    return hashlib.sha256(f"{shard} {peer}".encode()).digest()
