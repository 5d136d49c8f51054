"""Places shards on peers by the links between them: how many each aggregates. Pure, and exact.

Peer i sends the part of each aggregator j to it, then j sends the packet of its shards to each i. With a
share f_j of the shards at j, a link B_ij from i to j, and lines as fast as their fastest link, the seconds
for a byte of a packet are the sum of both ways, each as long as its slowest link or line:

    to aggregators      f_j / B_ij      (1 - f_i) / up_i        (N - 1) f_j / down_j
    from aggregators    f_j / B_ji      (1 - f_i) / down_i      (N - 1) f_j / up_j

Within given seconds for each way a peer can have some counts of shards and no others: at most as many as its
own links carry, at least as many as it need not send elsewhere. So all pairs of such seconds are compared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import neg

Matrix = Sequence[Sequence[float]]  # bytes a second from row to column


@dataclass(frozen=True)
class Way:
    """Seconds of one way by peer and count of its shards: what grows with the count, and what shrinks."""

    grows: list[list[float]]
    shrinks: list[list[float]]

    def longest(self, counts: Sequence[int]) -> float:
        return max(max(self.grows[i][n], self.shrinks[i][n]) for i, n in enumerate(counts))

    def allowed(self, peer: int, seconds: float) -> tuple[int, int]:
        """Return the least and the most shards with which a peer takes no longer; least > most: none."""
        least = bisect_left(self.shrinks[peer], -seconds, key=neg)
        return least, bisect_right(self.grows[peer], seconds) - 1

    @property
    def all(self) -> list[float]:
        """List all seconds that may be the longest, ascending."""
        return sorted({one for table in (self.grows, self.shrinks) for peer in table for one in peer})


class Placement:
    """Shards to place on peers.

    Args:
        links: of at least two peers, rates above 0.
        able: the peers that can aggregate; None: all.
    """

    def __init__(self, shards: int, links: Matrix, able: Collection[int] | None = None) -> None:
        self.shards, n = shards, len(links)
        self.able = sorted(range(n) if able is None else able)
        self._peers = range(n)
        back = [[links[j][i] for j in range(n)] for i in range(n)]
        self._ways = self._way(links), self._way(back)

    def _way(self, links: Matrix) -> Way:
        """Compute the way to aggregators; the other one is the same on the links turned round."""
        peers, grows, shrinks = self._peers, [], []
        for peer in peers:
            others = [i for i in peers if i != peer]
            up, down = max(links[peer][i] for i in others), max(links[i][peer] for i in others)
            a_share = max(1 / min(links[i][peer] for i in others), len(others) / down) / self.shards
            grows.append([count * a_share for count in range(self.shards + 1)])
            shrinks.append([(1 - count / self.shards) / up for count in range(self.shards + 1)])
        return Way(grows, shrinks)

    def cost(self, counts: Sequence[int]) -> float:
        """Return the seconds for a byte of a packet, both ways, if peers aggregate so many shards."""
        return sum(way.longest(counts) for way in self._ways)

    def equal(self) -> list[int]:
        """Return counts that differ by one at most."""
        whole, rest = divmod(self.shards, len(self.able))
        return [whole + (self.able.index(i) < rest) if i in self.able else 0 for i in self._peers]

    def best(self) -> list[int]:
        """Return the counts of least cost."""
        found = self.equal()
        least, second = self.cost(found), self._ways[1].all
        for there in self._ways[0].all:  # the longer one way may take, the less the other needs
            while second and (fitting := self._fitting(there, second[-1])) is not None:
                if there + second[-1] < least:
                    found, least = fitting, there + second[-1]
                second.pop()
        return found

    def _fitting(self, there: float, back: float) -> list[int] | None:
        """Return counts with which neither way takes longer than that, None if there are none."""
        counts, room = [], []
        for peer in self._peers:
            (low, high), (also_low, also_high) = (
                way.allowed(peer, within) for way, within in zip(self._ways, (there, back), strict=True)
            )
            low, high = max(low, also_low), min(high, also_high) if peer in self.able else 0
            if low > high:
                return None
            counts.append(low)
            room.append(high - low)
        left = self.shards - sum(counts)
        for peer in self._peers:
            more = min(max(left, 0), room[peer])
            counts[peer] += more
            left -= more
        return counts if left == 0 else None
