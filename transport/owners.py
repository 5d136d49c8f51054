"""Which peer owns which shard, and what is to be added to the errors of those who own.

The hub is the owner of what no peer owns. Who owns follows from the shards and the peers alone (rendezvous
hashing), so a restarted hub comes to the same answer, and few shards change hands when a peer comes or goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field


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


@dataclass
class Left:
    """What somebody has left to the owners: a legacy, or the error of shards that changed hands."""

    peer: str
    share: float
    shards: set[int]  # whose owners do not have it yet


@dataclass
class Estates:
    """All that is left and not yet in an error. Numbers are given once."""

    left: dict[int, Left] = field(default_factory=dict)
    _next: int = 0

    def add(self, peer: str, share: float, shards: Iterable[int]) -> int:
        self._next += 1
        self.left[self._next] = Left(peer, share, set(shards))
        return self._next

    def of(self, shards: Iterable[int]) -> dict[int, Left]:
        """What the owner of these shards is to have."""
        wanted = set(shards)
        return {number: left for number, left in self.left.items() if left.shards & wanted}

    def given(self, numbers: Iterable[int], shards: Iterable[int]) -> None:
        """The owner of these shards adds these estates to its error, now that the round is committed."""
        has = set(shards)
        for number in numbers:
            if number in self.left:
                self.left[number].shards -= has
                if not self.left[number].shards:
                    del self.left[number]
