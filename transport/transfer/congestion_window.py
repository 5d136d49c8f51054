"""How much of a transfer is under way at once: enough to fill the line, too little to fill the queues on it.

What is under way beyond rate x round trip waits in a queue: in this machine, or in the router that heartbeats
and the rest of the house go through as well. So, for each direction of a peer,

    window = rate x (1.25 x round trip + 30 ms)    at least two pieces, at most the hub's credit
    piece  = the largest power of two within rate x 30 ms, from 16 to 256 KiB

- The rate is the best that the answers of this period and the one before have shown: the bytes that were
  answered between the sending of a piece and its own answer, by that time; or in the last half second (early
  on: a quarter of the time since the start), where that is longer. A computer that was busy answers all that
  it has at once: over a round trip alone that would look like a faster line, and let more go, which then
  comes in a larger burst.
- The round trip is the shortest of the last three clean answers and of all since: clean is the answer to an
  Attach, and to a piece that met no other of ours in a queue. While there is more to do, every 6 s so much is
  let come in that there is none: else a round trip that grew longer would be taken for one. Where a window
  lets one piece go at a time there is none either, and each answer counts: a large piece can take two round
  trips where an Attach takes one, as the buffer over there holds less, and would stay alone for ever.
- Where there is not more to do, answers say how much there was, not how fast the line is: periods stand
  still.

The clock is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MIN_FRAGMENT, MAX_FRAGMENT, FIRST_FRAGMENT = (
    16 * 1024,
    256 * 1024,
    64 * 1024,
)  # bytes of a piece; FIRST: before a rate is known
FRAGMENT_S = 0.03  # a piece is on the line for no longer
QUEUE_S = 0.03  # what may wait in queues, beside a quarter of the round trip
MARGIN = 1.25  # rates differ from moment to moment, and grow only where there is room
RATE_S = 2.0  # one period of the best rate
CLEAN_S, CLEAN = 6.0, 3  # between two clean answers; so many are remembered, since one may be held up
STEADY_S, EARLY = 0.5, 0.25  # a rate is of no less time: seconds, or so much of the time since the start
HELD_S = 1.0  # of silence: what is still under way is held up on its connection, not in a queue
DRAINED = 0.75  # of rate x round trip: with no more than this under way the line itself is idle at times


@dataclass(frozen=True)
class Sent:
    """A piece on its way, or asked for."""

    flow: int
    size: int  # bytes, as far as known
    expected: int  # of these, bytes that are sure to come down
    at: float
    answered: int  # bytes answered until then, all pieces together
    clean: bool  # what was under way was in no queue


class CongestionWindow:
    """One direction. `least`: bytes of a piece, at least."""

    def __init__(self, least: int = MIN_FRAGMENT) -> None:
        self._least = least
        self.under = 0  # bytes under way
        self.most = 0  # what the hub allows
        self._clean: deque[float] = deque(maxlen=CLEAN)  # seconds
        self._answered = 0
        self._idle, self._last = 0.0, 0.0  # seconds nothing was under way; when a piece went or was answered
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])  # (busy seconds, bytes answered until then)
        self._best, self._best_before = 0.0, 0.0  # bytes a second, this period and the one before
        self._newest = 0.0
        self._since = 0.0  # when this period began
        self._clean_at = 0.0
        self._draining = False

    @property
    def rtt(self) -> float | None:
        """Seconds; None: not known."""
        return min(self._clean, default=None)

    @property
    def rate(self) -> float:
        """Bytes a second; 0: not known."""
        return max(self._best, self._best_before)

    @property
    def piece(self) -> int:
        """Bytes to send, or to ask for, at once."""
        if not self.rate:
            return FIRST_FRAGMENT
        within = max(self._least, min(MAX_FRAGMENT, int(self.rate * FRAGMENT_S)))
        return 1 << (within.bit_length() - 1)

    @property
    def limit(self) -> int:
        """Bytes that may be under way."""
        if self._draining:
            return max(1, int(DRAINED * self._newest * (self.rtt or 0.0)))
        filled = self.rate * (MARGIN * (self.rtt or 0.0) + QUEUE_S)
        return min(self.most, max(2 * self.piece, int(filled)))

    @property
    def room(self) -> bool:
        """May another piece go? It may go beyond the limit with its end."""
        return self.under < self.limit

    def sent(self, flow: int, size: int, expected: int, now: float) -> Sent:
        if not self.under:
            self._idle += now - self._last
        self._last = now
        sent = Sent(flow, size, expected, now, self._answered, self._draining or self.under == 0)
        self.under += size
        return sent

    def look(self, now: float) -> None:
        """Do not wait for a clean round trip where nothing comes in."""
        if self._draining and now >= self._last + HELD_S:
            self._clean_at, self._draining = now, False

    def lost(self, sent: Sent) -> None:
        """Nobody waits for its answer any more."""
        self.under -= sent.size
        if not self.under:
            self._draining = False

    def answered(self, sent: Sent, size: int, now: float, *, more: bool) -> None:
        """Its answer came, with `size` bytes done. `more`: there is more to do than the window lets go."""
        self.under -= sent.size
        self._last = now
        self._answered += size
        took = max(1e-4, now - sent.at)
        self._faster(self._rate_since(sent, now), now, more)
        alone = more and not self.under
        if sent.clean and (self._draining or alone or self.rtt is None):
            self.clean(took, now)
        elif self._clean:
            self._clean[-1] = min(self._clean[-1], took)
        if more and now >= self._clean_at + CLEAN_S:
            self._draining = True

    def clean(self, rtt: float, now: float) -> None:
        """The round trip without a queue of ours."""
        self._clean.append(rtt)
        self._clean_at, self._draining = now, False

    def _rate_since(self, sent: Sent, now: float) -> float:
        """Bytes a second, while this piece was under way or for longer; idle times do not count."""
        busy, marks = now - self._idle, self._marks
        marks.append((busy, self._answered))
        while len(marks) > 2 and marks[1][0] <= busy - min(STEADY_S, EARLY * busy):
            marks.popleft()
        since, answered = min(marks[0], (sent.at - self._idle, sent.answered))
        return (self._answered - answered) / max(1e-4, busy - since)

    def _faster(self, rate: float, now: float, more: bool) -> None:
        if more and now >= self._since + RATE_S:
            self._best, self._best_before, self._since = rate, self._best, now
        self._best, self._newest = max(self._best, rate), rate
