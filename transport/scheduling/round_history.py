"""Memory of committed rounds: answers for peers that come back, loss curves, sums."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from transport import actions as do
from transport.ledger import HEADER_SIZE, Recovered
from transport.protocol import hash_of_names, messages

from .exchange import Exchange
from .figures import middle_norm

OFFERED = 2  # snapshots: the newest, and the previous one for peers that are still fetching it
REASON, REASONS = 200, 100  # characters of a refusal, and refusals per message, so that it stays small
POINTS = 128  # of the loss curve
KEPT = 64  # rounds whose commit stays in memory


class Curve:
    """(step, loss) of a whole run at evenly spread rounds: beyond POINTS every second one is dropped."""

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        self.points: list[tuple[int, float]] = []
        self.seen, self.every = 0, 1
        for step, loss in points:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        if self.seen % self.every == 0:
            self.points.append((step, loss))
        if len(self.points) > POINTS:
            del self.points[1::2]
            self.every *= 2
        self.seen += 1

    @property
    def rounded(self) -> list[tuple[int, float]]:
        return [(step, round(loss, 4)) for step, loss in self.points]


class Commit:
    """A durable round, as each peer hears of it."""

    def __init__(self, message: messages.Committed) -> None:
        self.message = message
        self._accepted = frozenset(message.accepted)
        self._unnamed: messages.Committed | None = None  # of a round with many: without any name
        if len(message.accepted) > messages.NAMED:
            many, names = len(message.accepted), hash_of_names(message.accepted)
            self._unnamed = replace(message, accepted=[], refused={}, count=many, names=names)

    def to(self, name: str) -> messages.Committed:
        """Return the message for one peer: of many names its own at most."""
        if self._unnamed is None:
            return self.message
        message = replace(self._unnamed, accepted=[name] if name in self._accepted else [])
        why = self.message.refused.get(name)
        return message if why is None else replace(message, refused={name: why})


class RoundHistory:
    """Committed rounds of a run since its beginning, or since the hub was restarted."""

    def __init__(self, recovered: Recovered) -> None:
        last, evaluation = recovered.last, recovered.evaluation
        self.commits: dict[int, Commit] = {}
        self.loss = last.loss if last else None  # of the newest round that trained
        self.curve, self.held_out = Curve(recovered.losses), Curve(recovered.held_out)
        self.eval_loss = evaluation.loss if evaluation else None
        self.grad_norm: float | None = None  # before clipping, median over the peers of the newest round
        self.tokens = 0  # counted since this hub started
        self.log_bytes = last.record.end if last else 0  # of the packet log
        self.snapshots: list[messages.SnapshotOffer] = []  # what a joiner may begin with
        if last is not None:
            names = list(last.accepted)
            message = messages.Committed(last.round, last.length, last.sha256.hex(), names)
            self.commits[last.round] = Commit(message)

    def add(self, ex: Exchange, accepted: list[str], done: do.CommitDone) -> Commit:
        """Add a durable round with the updates of these sessions."""
        reports = [ex.reports[s] for s in accepted]
        if done.loss is not None:
            self.loss = done.loss
            self.curve.add(ex.step, self.loss)
        self.tokens += sum(done.tokens.values())
        norm = middle_norm((r.grad_norm for r in reports), self.grad_norm)
        self.grad_norm = self.grad_norm if norm is None else norm
        names = [ex.members[s] for s in accepted]
        refused = {name: why[:REASON] for name, why in sorted(done.rejected.items())[:REASONS]}
        message = messages.Committed(ex.round, done.size, done.sha256.hex(), names, refused)
        self.commits[ex.round] = commit = Commit(message)
        self.commits.pop(ex.round - KEPT, None)
        self.log_bytes += HEADER_SIZE + done.size
        return commit

    def evaluated(self, step: int, loss: float) -> None:
        """Add a held-out loss of x'."""
        self.eval_loss = loss
        self.held_out.add(step, loss)

    def offer(self, offers: Iterable[messages.SnapshotOffer]) -> None:
        """Announce the newest of these snapshots from now on."""
        self.snapshots = sorted(offers, key=lambda o: o.round)[-OFFERED:]
