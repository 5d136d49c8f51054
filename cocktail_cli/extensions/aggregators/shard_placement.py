"""Assigns shards to aggregators by rendezvous hashing, as many to each as its line is fit for.

The assignment follows from the shards and the peers alone, so a restarted hub comes to the same one, and few
shards move when a peer comes or goes. The hub aggregates what no peer does.

How many shards: places them on peers by the links between them: how many each aggregates. Pure, exact.

Peer i sends the part of each aggregator j to it, then j sends the packet of its shards to each i. With a
share f_j of the shards at j, a link B_ij from i to j, and lines as fast as their fastest link, the seconds
for a byte of a packet are the sum of both ways, each as long as its slowest link or line:

    to aggregators      f_j / B_ij      (1 - f_i) / up_i        (N - 1) f_j / down_j
    from aggregators    f_j / B_ji      (1 - f_i) / down_i      (N - 1) f_j / up_j

Within given seconds for each way a place can have some counts of shards and no others: at most as many as its
own links carry, at least as many as it need not send elsewhere. So all pairs of such seconds are compared.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import neg

Matrix = Sequence[Sequence[float]]  # bytes a second from row to column


@dataclass(frozen=True)
class Way:
    """Seconds of one way by place and count of its shards: what grows with the count, and what shrinks."""

    grows: list[list[float]]
    shrinks: list[list[float]]
    least: float  # of the peers that can have no shard

    def longest(self, counts: Sequence[int]) -> float:
        return max(self.least, *(max(self.grows[i][n], self.shrinks[i][n]) for i, n in enumerate(counts)))

    def allowed(self, place: int, seconds: float) -> tuple[int, int]:
        """Return the least and the most shards with which a place takes no longer; least > most: none."""
        least = bisect_left(self.shrinks[place], -seconds, key=neg)
        return least, bisect_right(self.grows[place], seconds) - 1

    @property
    def all(self) -> list[float]:
        """List all seconds that may be the longest, ascending."""
        found = {one for table in (self.grows, self.shrinks) for place in table for one in place}
        return sorted({max(self.least, one) for one in found})


class Placement:
    """Shards to place on peers. Counts are by peer.

    Args:
        links: of at least two peers, rates above 0.
        able: the peers that can aggregate; None: all.
    """

    def __init__(self, shards: int, links: Matrix, able: Collection[int] | None = None) -> None:
        self.shards, self._count = shards, len(links)
        self.able = sorted(range(self._count) if able is None else able)
        self._ways = self._way(links), self._way([*zip(*links, strict=True)])

    def _way(self, links: Matrix) -> Way:
        """Compute the way to aggregators; on the links turned round, the way from them."""
        grows, shrinks, least = list[list[float]](), list[list[float]](), 0.0
        for peer in range(self._count):
            others = [i for i in range(self._count) if i != peer]
            up, down = max(links[peer][i] for i in others), max(links[i][peer] for i in others)
            if peer not in self.able:
                least = max(least, 1 / up)
                continue
            slowest = min(links[i][peer] for i in others)
            a_share = max(1 / slowest, (self._count - 1) / down) / self.shards
            grows.append([count * a_share for count in range(self.shards + 1)])
            shrinks.append([(1 - count / self.shards) / up for count in range(self.shards + 1)])
        return Way(grows, shrinks, least)

    def cost(self, counts: Sequence[int]) -> float:
        """Return the seconds for a byte of a packet, both ways, if the places aggregate so many shards."""
        return sum(way.longest([counts[place] for place in self.able]) for way in self._ways)

    def equal(self) -> list[int]:
        """Return counts that differ by one at most."""
        whole, rest = divmod(self.shards, len(self.able))
        return self._by_place([whole + (i < rest) for i in range(len(self.able))])

    def best(self) -> list[int]:
        """Return the counts of least cost."""
        found = self.equal()
        least, second = self.cost(found), self._ways[1].all
        for there in self._ways[0].all:  # the longer one way may take, the less the other needs
            while second and (fitting := self._fitting(there, second[-1])) is not None:
                if there + second[-1] < least:
                    found, least = self._by_place(fitting), there + second[-1]
                second.pop()
        return found

    def _by_place(self, counts: Sequence[int]) -> list[int]:
        """Spread counts of the able places over all of them."""
        found = [0] * self._count
        for place, count in zip(self.able, counts, strict=True):
            found[place] = count
        return found

    def _fitting(self, there: float, back: float) -> list[int] | None:
        """Return counts with which neither way takes longer than that, None if there are none."""
        counts, room = [], []
        for place in range(len(self.able)):
            (low, high), (also_low, also_high) = (
                way.allowed(place, within) for way, within in zip(self._ways, (there, back), strict=True)
            )
            low, high = max(low, also_low), min(high, also_high)
            if low > high:
                return None
            counts.append(low)
            room.append(high - low)
        left = self.shards - sum(counts)
        for place, free in enumerate(room):
            more = min(max(left, 0), free)
            counts[place] += more
            left -= more
        return counts if left == 0 else None


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


def rank(shard: int, peer: str) -> bytes:
    return hashlib.sha256(f"{shard} {peer}".encode()).digest()
