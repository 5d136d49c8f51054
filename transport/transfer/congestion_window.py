"""Congestion control of one direction: enough bytes under way to fill the line, too few to fill its queues.

Bytes under way beyond rate x round trip wait in a queue: in this machine, or in the router that heartbeats
and the rest of the house use as well. So, for each direction of a peer,

    window   = rate x (1.25 x round trip + 30 ms)    at least two fragments, at most the hub's credit
    fragment = the largest power of two within rate x 30 ms, from 16 to 256 KiB; 4 where 16 take over .25 s

- On so thin a line all else waits behind a fragment: a lease, the word that an update has arrived.
- The rate is the best that the answers of this period and the one before have shown: the bytes answered
  between sending a fragment and its own answer, over that time; or over the last half second (early on: a
  quarter of the time since the start), if that is longer. A busy computer answers all it has at once: over
  one round trip that would look like a faster line, and cause a larger burst.
- The round trip is the shortest of the last three clean samples and of all since. Clean samples are the
  answer to an Attach, and to a fragment that met no other of ours in a queue. While there is more to do, the
  window is drained every 6 s to get one; else a round trip that grew longer would be taken for a queue. If
  the window lets only one fragment go at a time there is no queue either, and each answer counts: a large
  fragment can take two round trips where an Attach takes one, as the remote buffer holds less.
- When there is nothing more to do, answers tell how much there was, not how fast the line is: periods pause,
  unless an answer took several times as long as that rate explains. So a line that has become slower is
  noticed also where all of a packet is one fragment.

The clock is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MIN_FRAGMENT, MAX_FRAGMENT = 16 * 1024, 256 * 1024  # bytes
THIN_FRAGMENT, THIN_S = 4 * 1024, 0.25  # at least, where MIN_FRAGMENT occupies the line for longer
FIRST_FRAGMENT = 64 * 1024  # bytes, before a rate is known
FRAGMENT_S = 0.03  # a fragment occupies the line for no longer
QUEUE_S = 0.03  # what may wait in queues, beside a quarter of the round trip
MARGIN = 1.25  # rates vary, and can grow only if there is room
RATE_S = 2.0  # one period of the best rate
CLEAN_S, CLEAN = 6.0, 3  # seconds between two clean samples; number remembered, since one may be delayed
STEADY_S, EARLY = 0.5, 0.25  # a rate is measured over these seconds, or this share of those since the start
HELD_S = 1.0  # of silence: what is still under way is stuck on its connection, not in a queue
SLOWER = 4.0  # times what rate and round trip explain: the line has become slower, or its other end is busy
DRAINED = 0.75  # of rate x round trip: with no more under way than this the line is idle at times


@dataclass(frozen=True)
class Sent:
    """A fragment under way, sent or requested."""

    flow: int
    size: int  # bytes, if known
    expected: int  # of these, bytes that will certainly come down
    at: float
    answered: int  # bytes answered before, all fragments together
    clean: bool  # no other fragment was in a queue


class CongestionWindow:
    """The congestion window of one direction. `least`: minimum bytes of a fragment."""

    def __init__(self, least: int = MIN_FRAGMENT) -> None:
        self._least = least
        self.under = 0  # bytes under way
        self.most = 0  # the hub's credit
        self._clean: deque[float] = deque(maxlen=CLEAN)  # seconds
        self._answered = 0
        self._idle, self._last = 0.0, 0.0  # seconds idle; when a fragment was last sent or answered
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])  # (busy seconds, bytes answered until then)
        self._best, self._best_before = 0.0, 0.0  # bytes a second, this period and the one before
        self.rate = 0.0  # the better of them; 0: not known
        self._newest = 0.0
        self._since = 0.0  # when this period began
        self._clean_at = 0.0
        self._draining = False

    @property
    def rtt(self) -> float | None:
        """Return the round trip in seconds; None: not known."""
        return min(self._clean, default=None)

    @property
    def fragment(self) -> int:
        """Return the bytes to send or request in one message."""
        if not self.rate:
            return FIRST_FRAGMENT
        thin = self._least > self.rate * THIN_S
        least = min(THIN_FRAGMENT, self._least) if thin else self._least
        within = max(least, min(MAX_FRAGMENT, int(self.rate * FRAGMENT_S)))
        return 1 << (within.bit_length() - 1)

    @property
    def limit(self) -> int:
        """Return the bytes that may be under way."""
        if self._draining:
            return max(1, int(DRAINED * self._newest * (self.rtt or 0.0)))
        filled = self.rate * (MARGIN * (self.rtt or 0.0) + QUEUE_S)
        return min(self.most, max(2 * self.fragment, int(filled)))

    @property
    def room(self) -> bool:
        """True if another fragment may go; its end may exceed the limit."""
        return self.under < self.limit

    def sent(self, flow: int, size: int, expected: int, now: float) -> Sent:
        if not self.under:
            self._idle += now - self._last
        self._last = now
        sent = Sent(flow, size, expected, now, self._answered, self._draining or self.under == 0)
        self.under += size
        return sent

    def look(self, now: float) -> None:
        """Stop draining for a clean sample if no answers arrive."""
        if self._draining and now >= self._last + HELD_S:
            self._clean_at, self._draining = now, False

    def lost(self, sent: Sent) -> None:
        """Note that no answer is awaited any more."""
        self.under -= sent.size
        if not self.under:
            self._draining = False

    def answered(self, sent: Sent, size: int, now: float, *, more: bool) -> None:
        """Note an answer that completes `size` bytes. `more`: more is waiting than the window allows."""
        self.under -= sent.size
        self._last = now
        self._answered += size
        took = max(1e-4, now - sent.at)
        explained = sent.size / self.rate + (self.rtt or 0.0) if self.rate else took
        slower = size >= min(self._least, self.fragment) and took > SLOWER * explained
        rate = self._newest = self._rate_of(sent, now)
        if (more or slower) and now >= self._since + RATE_S:  # only what fills the line ends a period
            self._best, self._best_before, self._since = rate, self._best, now
        self._best = max(self._best, rate)
        self.rate = max(self._best, self._best_before)
        alone = more and not self.under
        if sent.clean and (self._draining or alone or self.rtt is None):
            self.clean(took, now)
        elif self._clean:
            self._clean[-1] = min(self._clean[-1], took)
        if more and now >= self._clean_at + CLEAN_S:
            self._draining = True

    def clean(self, rtt: float, now: float) -> None:
        """Add a sample of the round trip without a queue of ours."""
        self._clean.append(rtt)
        self._clean_at, self._draining = now, False

    def _rate_of(self, sent: Sent, now: float) -> float:
        """Return bytes a second, over the time this fragment was under way or longer, without idle time."""
        busy, marks = now - self._idle, self._marks
        marks.append((busy, self._answered))
        while len(marks) > 2 and marks[1][0] <= busy - min(STEADY_S, EARLY * busy):
            marks.popleft()
        since, answered = min(marks[0], (sent.at - self._idle, sent.answered))
        return (self._answered - answered) / max(1e-4, busy - since)
