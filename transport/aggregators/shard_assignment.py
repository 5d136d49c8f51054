"""Which peer owns which shard.

The hub is the owner of what no peer owns. Who owns follows from the shards and the peers alone (rendezvous
hashing), so a restarted hub comes to the same answer, and few shards change hands when a peer comes or goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def assign(shards: int, peers: Iterable[str]) -> dict[str, list[int]]:
    """Peer -> the shards that it owns, ascending; of those that own any. No peer owns more than its share.

    A shard goes to the peer whose hash with it is highest among those that have room: by the hash alone one
    of four peers would own a tenth more than another.
    """
    owned: dict[str, list[int]] = {peer: [] for peer in sorted(peers)}
    most = -(-shards // len(owned)) if owned else 0
    for shard in range(shards if owned else 0):
        free = [peer for peer, mine in owned.items() if len(mine) < most]
        owned[max(free, key=lambda peer: rank(shard, peer))].append(shard)
    return {peer: mine for peer, mine in owned.items() if mine}


def digest_of(part: bytes) -> str:
    """By which a part is told from another of the same member: of a round that was opened before with other
    owners, of a session before."""
    return short(hashlib.sha256(part).digest())


def short(sha256: bytes) -> str:
    return sha256.hex()[:16]


def rank(shard: int, peer: str) -> bytes:
    return hashlib.sha256(f"{shard} {peer}".encode()).digest()
