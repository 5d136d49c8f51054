"""Division of a packet among the peers that pass it on. Pure.

The hub sends each stripe to its helper alone, and the chunks of no stripe to all. With N peers, a share f of
such chunks, an uplink h of the hub and uplinks of U in all of the helpers, these lines are busy for

    hub  (1 + (N - 1) f) s / h        helpers  (N - 1) (1 - f) s / U

f makes the two equal, within f >= 0 and a hub that sends no more than MOST packets. A stripe is as long as
the uplink of its helper is fast. So N helpers with the hub's line take the time of one download.
"""

from __future__ import annotations

from collections.abc import Mapping

CHUNKS = 32  # of a packet, at least: helpers pass each on while the next one comes
LEAST, LONGEST = 4 * 1024, 256 * 1024  # bytes of a chunk
MOST = 1.8  # packets over the hub's line in a round; messages and what is asked for twice stay within 2


def divide(chunks: int, uplinks: Mapping[str, float], peers: int, turn: int = 0) -> dict[str, range]:
    """Return helper -> the chunks that it passes on, for helpers that have any. The hub sends all others.

    Args:
        uplinks: helper -> bytes a second, above 0; the hub's own is taken for their mean.
        peers: those that fetch the packet, the helpers too.
        turn: rotates the helpers, so that small packets are passed on by each in turn.
    """
    if not uplinks or peers < 2:
        return {}
    names = sorted(uplinks)
    names = names[turn % len(names) :] + names[: turn % len(names)]
    passed = chunks - int(chunks * share_of_hub(uplinks, peers))
    total, sent, first = sum(uplinks.values()), 0.0, 0
    stripes = {}
    for name in names:
        sent += uplinks[name]
        stop = round(passed * sent / total) if name != names[-1] else passed
        if stop > first:
            stripes[name] = range(first, stop)
        first = stop
    return stripes


def chunk_of(size: int) -> int:
    """Return the bytes of a chunk of a packet of `size` bytes, a power of two."""
    return min(LONGEST, max(LEAST, 1 << max(0, (size // CHUNKS).bit_length() - 1)))


def packets_over(helpers: int, peers: int) -> tuple[float, float]:
    """Return how many packets a round sends over the hub's line, and over each helper's, where uplinks are
    alike."""
    share = share_of_hub({str(number): 1.0 for number in range(helpers)}, peers)
    return 1 + (peers - 1) * share, (peers - 1) * (1 - share) / helpers


def share_of_hub(uplinks: Mapping[str, float], peers: int) -> float:
    """Return f, the share of a packet that the hub sends to every peer."""
    helpers, others = sum(uplinks.values()), peers - 1
    hub = helpers / len(uplinks)
    equal = (hub * others - helpers) / (others * (helpers + hub))
    return min(max(0.0, equal), (MOST - 1) / others)
