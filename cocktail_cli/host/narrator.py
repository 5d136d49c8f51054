"""The translation of the hub's events into those that views show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from cocktail_cli.machine import INTERNET, network_of
from cocktail_cli.ui import Baseline, Named, counted, rung_text
from cocktail_cli.ui import events as ours
from transport import Ledger
from transport.protocol import events as theirs


class Narrator:
    """Translates events, and keeps the totals that no single event has.

    Args:
        parameters: P, the trained parameters, all of which the FP16 baseline sends each step, both ways.
        named: names the objective's further figures.
    """

    def __init__(self, parameters: int, named: Named = lambda figures: {}) -> None:
        self.baseline, self.named = Baseline(parameters), named
        self.local_steps, self.rung = 0, ""  # of the newest round; 0: there was none
        self.rate_at: Callable[[int], float] | None = None  # step -> learning rate, once the length is known
        self.tokens = 0
        self.step = 0
        self.rounds = 0
        self.present: set[str] = set()  # peers that are in the run
        self.met: set[str] = set()  # peers that have been in it since this hub started
        self.eval_loss: float | None = None
        self.evaluated = 0  # rounds in the model that it is of
        self.base_loss: float | None = None
        self.reached = ""  # where a peer has joined from: this network or the internet

    def recall(self, ledger: Ledger) -> None:
        """Read the totals of a resumed run."""
        rows, evaluations = ledger.rounds(), ledger.evaluations()
        self.rounds, self.tokens = len(rows), sum(row.tokens for row in rows)
        self.step = rows[-1].step if rows else 0
        if evaluations:
            self.evaluation(evaluations[0].round, evaluations[0].loss)
            self.evaluation(evaluations[-1].round, evaluations[-1].loss)

    def evaluation(self, rounds: int, loss: float) -> None:
        """Note the loss of the model after so many rounds."""
        self.eval_loss, self.evaluated = loss, rounds
        self.base_loss = self.base_loss if rounds else loss

    def tell(self, event: theirs.Event) -> Iterator[ours.Event]:
        """Yield the events to show for one of the hub's."""
        if isinstance(event, theirs.PeerJoined):
            self.present.add(event.peer)
            self.met.add(event.peer)
            yield ours.PeerJoined(event.peer, event.hardware)
            where = network_of(event.origin)
            if where and self.reached not in (where, INTERNET):
                self.reached = where
                yield ours.Reached(event.peer, where)
        elif isinstance(event, theirs.PeerDeciding):
            yield ours.PeerDeciding(event.peer, event.hardware)
        elif isinstance(event, theirs.PeerDeclined):
            yield ours.PeerDeclined(event.peer)
        elif isinstance(event, theirs.PeerReady):
            yield ours.PeerReady(event.peer, event.round, round(event.joining_s, 1))
        elif isinstance(event, theirs.PeerAsks):
            yield ours.PeerAsks(event.peer, event.key, event.hardware)
        elif isinstance(event, theirs.PeerLeft):
            self.present.discard(event.peer)
            yield ours.PeerLeft(event.peer, event.reason, event.legacy, event.how)
        elif isinstance(event, theirs.RoundCommitted):
            before, self.local_steps = self.local_steps, event.local_steps
            if self.rung not in ("", event.rung):
                since = f"from round {event.round} on, with {counted(len(event.members), 'peer')}"
                yield ours.Progressed(f"{since}, {rung_text(event.rung, event.need)}")
            self.rung = event.rung
            yield self.committed(event, before or event.local_steps)
        elif isinstance(event, theirs.OfExtension):
            yield event.told
        elif isinstance(event, theirs.EvaluationDone):
            self.evaluation(event.round, event.loss)
            extra = dict(self.named(event.figures))
            yield ours.Eval(event.step, event.round, event.loss, event.tokens, extra)
        elif isinstance(event, theirs.Warned):
            who = f"{event.peer}: " if event.peer else ""
            yield ours.Warning(who + event.message)

    def committed(self, event: theirs.RoundCommitted, computed: int) -> ours.Step:
        """Describe a round. `computed`: steps of the round before, whose compute its members report."""
        self.tokens += event.tokens
        self.step = event.step
        self.rounds += 1
        members, fetched, steps = list(event.members), event.fetched, event.local_steps
        exchanged = {peer: many - fetched.get(peer, 0) for peer, many in event.down.items()}
        full = self.baseline.whole * steps
        up, down = ratios(full, event.up, members), ratios(full, exchanged, members)
        moved = sum(event.up.get(peer, 0) + exchanged.get(peer, 0) for peer in members)
        both = self.baseline.add(event.size, len(members) * steps)
        return ours.Step(
            step=event.step,
            steps=event.steps,
            round=event.round,
            loss=event.loss,
            peers=len(members),
            tokens=self.tokens,
            accepted=list(event.accepted),
            up_bytes=dict(event.up),
            down_bytes=dict(event.down),
            fetched_bytes=dict(fetched),
            ratio_up=up,
            ratio_down=down,
            ratio_fp16=round(both / moved, 2) if moved else 0.0,
            packet_bytes=event.size,
            fingerprint=f"{event.fingerprint:016x}" if event.fingerprint else "",
            step_s=round(event.seconds / steps, 3),
            compute_s=per_step(event.compute_s, computed),
            wait_s=per_step(event.wait_s, computed),
            tokens_by_peer=dict(event.tokens_by_peer),
            local_steps=steps,
            rung=event.rung,
            need=round(event.need, 2),
            lr=self.rate_at(max(0, event.step - 1)) if self.rate_at and event.loss is not None else None,
            grad_norm=event.norm,
            samples=event.counted,
            eta_s=None if event.eta_s is None else round(event.eta_s, 1),
            extra={**self.named(event.figures), **event.extra},
        )


def ratios(full: int, moved: Mapping[str, int], members: list[str]) -> dict[str, float]:
    """Return each member's compression ratio over `full` bytes."""
    return {peer: round(full / moved[peer], 2) for peer in members if moved.get(peer)}


def per_step(seconds: Mapping[str, float], steps: int) -> dict[str, float]:
    """Divide the seconds of a round by its steps, to the millisecond."""
    return {peer: round(value / steps, 3) for peer, value in seconds.items()}
