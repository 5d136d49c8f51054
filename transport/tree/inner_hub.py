"""An inner hub of a tree: a hub to its children, a peer of its parent. Design and laws: transport/SCALE.md.

    the parent opens round r, with a lease        the children share it, in a round r of this hub
    the round closes here                         d_h <- d_h + D_h; C[d_h] goes up, with what it delivers
    the parent commits r                          accepted: d_h <- d_h - C[d_h]; else it stays
    its packet is durable here                    the children hear `Committed`, and fetch it

Only the root decides what x' is, so rounds have the root's numbers and packets at each level. Threads:

    inner thread    follows the parent: rounds, leases, what was committed without this hub
    commit thread   of the Hub: `aggregate` goes up and waits for the parent's commit
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from transport.actions import Abandoned
from transport.hub import Hub
from transport.ledger import Ledger
from transport.peer import PeerLink, SizeBounds
from transport.protocol import (
    RunOver,
    SampleRanges,
    SessionRenewed,
    ShardPacket,
    TransportError,
    UpdateRejected,
    WeightedPacket,
    messages,
    read_json,
    sample_ids,
)
from transport.scheduling import Exchange, Leases, fitting

from .inner_work import InnerWork, LeasedSample
from .parent_leases import ParentLeases

LOST = "the parent hub is lost"
MOST_NAMES = 1 << 20  # bytes of the names of a round's peers
LOOK_S = 0.2  # seconds between two looks at the parent, while nothing comes from the children
KEPT = 8  # rounds of a parent's lease; a parent takes it back after fewer


class InnerHub:
    """An inner hub between `link`, connected to the parent, and the children of `hub`.

    `start`, iterate `hub.events()`, which ends with the run above or with the parent's loss; then `close`.
    Implements HubDelegate for its Hub, and scheduling.Upstream. The ledger has room for TOTAL samples.

    Args:
        make_hub: makes the Hub, from this delegate.
    """

    def __init__(
        self, link: PeerLink, ledger: Ledger, work: InnerWork, make_hub: Callable[[InnerHub], Hub]
    ) -> None:
        self.link, self.work, self._residual, self._ledger = link, work, work.residual, ledger
        self.hub = make_hub(self)
        self.hub.follow(self)
        self._round = -1  # the newest that the parent has opened
        self._taken: messages.Round | None = None  # announced while a packet was being delivered
        self._member_of = -1  # round of which the present session is a member
        self._leases, self._lock = ParentLeases(ledger.term), threading.Lock()
        self._closed: dict[str, tuple[messages.Report, SampleRanges]] = {}  # by child, of the closed exchange
        self._children_ready, self._round_over = threading.Event(), threading.Event()
        self._delivers = False  # a closed round is on its way up, or not yet committed here
        self._over: messages.Over | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._follow, name="cocktail-inner", daemon=True)

    def start(self) -> None:
        self.hub.start()
        self._thread.start()

    def close(self) -> None:
        """End the hub here, at once. The parent takes it for lost, and its leases back."""
        self._stopping = True
        self._children_ready.set()
        self._round_over.set()
        self.link.abandon()
        self.hub.stop(now=True, reason="the inner hub was stopped")
        self._thread.join()
        self.link.close()

    # ---- the inner thread ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._finish_pending()
            self._await(self._children_ready)
            joined = False
            while not self._stopping:
                try:
                    if not joined:
                        self._join()
                        joined = True
                    self._take_part(self._next())
                except SessionRenewed:
                    self._renew()
                    joined = False
        except RunOver as over:
            self._over = self._over or messages.Over(str(over), over.finished, over.resumable)
        except (TransportError, KeyError, Abandoned) as error:
            reason = f"{LOST}: {error}" if str(error) else LOST
            self._over = self._over or messages.Over(reason, False, True)
        if self._over is not None and self._over.finished:
            self._pass_on_last()
        self.hub.end(self._over or messages.Over("the inner hub was stopped", False, True))

    def _pass_on_last(self) -> None:
        """Commit the rounds that the run ended with, of which this hub may not have heard: its children end
        with x'."""
        try:
            while True:
                self._pass_on(self._ledger_round() + 1)
        except KeyError:  # the parent has no more
            return
        except (TransportError, Abandoned) as error:
            reason = f"the run has ended, and its last packets did not come here: {error}"
            self._over = messages.Over(reason, False)

    def _next(self) -> messages.Round:
        """Wait for the parent's next round. Raises RunOver, and as PeerLink.next_round."""
        taken, self._taken = self._taken, None
        opened = taken or self.link.next_round()
        if isinstance(opened, messages.Over):
            raise RunOver.of(opened)
        return opened

    def _join(self) -> None:
        """Catch up with the parent, then be a member of its next round."""
        self._pass_on(self.link.welcome.round)
        round = self._ledger_round()
        self.link.ready(round, self.work.fingerprint(round))

    def _take_part(self, opened: messages.Round) -> None:
        """Have the children do one round, and wait until it is committed at each level."""
        self._pass_on(opened.round)
        if not opened.exchange:
            self.hub.evaluate_above(opened)
            return
        samples: Sequence[LeasedSample] = ()
        if opened.samples:
            lease = self.link.fetch(f"lease/{opened.round}", self._bounds.lease(opened))
            samples = self.work.unpack(lease)
        if opened.fits:
            self._residual.fits(opened.fits)
        with self._lock:
            self._leases.ended_before(opened.round - KEPT)
            numbers = self._leases.add(opened.round, samples)
        self._member_of = opened.round
        self._round_over.clear()
        self._round = opened.round
        self._in_commit_thread(lambda: self.hub.open_above(opened, numbers))
        self._await(self._round_over)
        if self._over is not None:
            raise RunOver(self._over.reason, self._over.finished, self._over.resumable)
        if (
            not self._stopping and self._ledger_round() == opened.round
        ):  # it was over before a child was ready
            self._pass_on(opened.round + 1)
            self._await(self._children_ready)
            self.link.ready(opened.round + 1, self.work.fingerprint(opened.round + 1))

    def _await(self, event: threading.Event) -> None:
        """Wait for the children. Raises where the parent ends the run or is lost, unless a packet is on its
        way: its round is finished first."""
        while not event.wait(LOOK_S):
            if not self._delivers and self.link.over is not None:
                raise RunOver.of(self.link.over)
            if not self._delivers and self.link.lost:
                raise Abandoned

    def _pass_on(self, stop: int) -> None:
        """Commit the parent's rounds before `stop`, of which this hub has closed no exchange."""
        for round in range(self._ledger_round(), stop):
            self._commit_above(round, self._fetch_packet(round))

    def _commit_above(self, round: int, packet: bytes, accepted: tuple[str, ...] = ()) -> None:
        self._in_commit_thread(lambda: self.hub.pass_on(round, packet, accepted))

    def _ledger_round(self) -> int:
        """Return the next round of the ledger, which only the commit thread may read."""
        found: list[int] = []
        self._in_commit_thread(lambda: found.append(self._ledger.next_round))
        return found[0]

    def _in_commit_thread(self, job: Callable[[], object]) -> None:
        done = threading.Event()

        def do() -> None:
            job()
            done.set()

        try:
            self.hub.later(do)
        except RuntimeError as error:  # its thread has ended
            raise Abandoned from error
        while not done.wait(1.0):
            if self._stopping or self.hub.error is not None:
                raise Abandoned

    def _finish_pending(self) -> None:
        """Finish the round in which this hub was killed: its updates are in d_h, and no child knows it."""
        if (sent := self._residual.pending) is None:
            return
        if sent.accepted is None:
            accepted = self._deliver(sent.packet, messages.Report(sent.round, 0, []), {sent.sender})
            self._in_commit_thread(lambda: self._residual.settle(accepted))
        self._commit_above(sent.round, self._fetch_packet(sent.round), sent.peers)

    def _renew(self) -> None:
        """Forget what belonged to a session that the parent has ended."""
        self._member_of, self._taken = -1, None
        with self._lock:
            self._leases.clear()

    # ---- to the parent; in either thread -------------------------------------------------------------------

    @property
    def _bounds(self) -> SizeBounds:
        assert self.link.bounds is not None, "the link knows the bounds before an inner hub starts"
        return self.link.bounds

    def _fetch_packet(self, round: int) -> bytes:
        """Fetch what any session may have."""
        while True:
            try:
                return self.link.fetch(f"packet/{round}", self._bounds.packet(round))
            except SessionRenewed:
                self._renew()

    def _deliver(self, packet: bytes, report: messages.Report, names: set[str]) -> bool:
        """Send an update until its round is committed; returns whether it is in there.

        `names`: of this hub, in sessions in which it was sent before. An update of a session that is over may
        still be accepted, so then the parent's ledger is asked.
        """
        round = report.round
        while True:
            try:
                taken = self._taken
                if self._member_of == round:
                    names.add(self.link.name)
                    return self.link.name in self.link.exchange(round, packet, report).accepted
                if self.link.welcome.round > round or (taken is not None and taken.round > round):
                    accepted = self.link.fetch(f"accepted/{round}", MOST_NAMES)
                    return not names.isdisjoint(read_json(accepted, list[str], "the list of updates"))
                self.link.ready(round, self.work.fingerprint(round))
                self._taken = self._next()
                self._member_of = self._taken.round
            except SessionRenewed:
                self._renew()
                report = replace(report, delivers=[], partly={})

    # ---- Upstream: the I/O thread of the hub ---------------------------------------------------------------

    def may_open(self, ready: int, opened: bool) -> bool:
        """Tell whether to open the round with so many peers, if it is `opened` above."""
        self._delivers = False
        if ready:
            self._children_ready.set()
        else:
            self._children_ready.clear()
        if opened and self.link.newest_round >= self._round:  # the parent went on before a child was ready
            self._round_over.set()
            return False
        return opened

    def closes(self, ex: Exchange, leases: Leases) -> None:
        """Note what the children have delivered, and what they report."""
        self._delivers = True
        reports = {ex.members[s]: ex.reports[s] for s in ex.claims}
        claimed = {s: [leases.claimed(s, r) for r in rounds] for s, rounds in ex.claims.items()}
        numbers = {ex.members[s]: tuple(run for ids in each for run in ids) for s, each in claimed.items()}
        self._closed = {name: (report, numbers[name]) for name, report in reports.items()}

    def evaluated(self, m: messages.Evaluated) -> None:
        """Pass a child's evaluation on: it had this hub's part."""
        self.link.evaluated(m.round, m.part, m.loss_sum, m.tokens, m.rewards)

    # ---- HubDelegate ---------------------------------------------------------------------------------------

    def samples(self, ids: Sequence[int]) -> bytes:
        known = self._known(ids)
        if len(known) < len(ids):
            raise KeyError("this lease is over: the parent has given its samples to others")
        return self.work.pack(known)

    def tokens(self, ids: Sequence[int]) -> int:
        return sum(sample.tokens for sample in self._known(ids))

    def weight(self, ids: Sequence[int]) -> float:
        return sum(sample.weight for sample in self._known(ids))

    def _known(self, ids: Sequence[int]) -> list[LeasedSample]:
        with self._lock:
            found = [self._leases.sample(number) for number in ids]
        return [sample for sample in found if sample is not None]

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self._residual.arrived(round, peer, packet)

    def fits(self, size: int) -> None:
        """Ignore the children's limit: the root has that of all, see `_take_part`."""

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """Send the children's updates up as one, and return the packet that the root has committed."""
        packet = self._residual.aggregate(round, updates, self.link.name)
        taken = {one.peer: self._closed[one.peer] for one in updates}
        with self._lock:
            for _, numbers in taken.values():
                self._leases.trained(sample_ids(numbers))
            delivers, partly = self._leases.delivered()
        report = replace(joint_report(round, [each for each, _ in taken.values()]), delivers=delivers)
        try:
            accepted = self._deliver(packet, replace(report, partly=partly), set())
            self._residual.settle(accepted)
            if accepted:
                with self._lock:
                    self._leases.accepted(delivers)
            return self._fetch_packet(round)
        except RunOver as over:
            self._give_up(messages.Over(str(over), over.finished, over.resumable))
        except (TransportError, KeyError) as error:
            self._give_up(messages.Over(f"{LOST}: {error}", False, True))
        raise Abandoned

    def _give_up(self, over: messages.Over) -> None:
        self._over = over
        self._round_over.set()

    def own(self, round: int, shards: Sequence[int], keep: Callable[[bytes], int]) -> bool:
        return False

    def joined(self, round: int, hubs: Sequence[int], own: bytes, parts: Sequence[ShardPacket]) -> bytes:
        return own

    def restricted(self, peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
        raise UpdateRejected(peer, "an inner hub serves packets whole")

    def merged(self, peer: str, packets: Sequence[bytes]) -> bytes:
        raise UpdateRejected(peer, "below an inner hub all packets of a replica pass its head")

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        self._residual.inherit(peer, packet, share)

    def committed(self, round: int, packet: bytes) -> None:
        self._residual.committed(round)
        self._round_over.set()

    def fingerprint(self, round: int) -> int:
        return self.work.fingerprint(round)

    def object(self, name: str) -> bytes | Path:
        return self.work.object(name)


def joint_report(round: int, reports: Sequence[messages.Report]) -> messages.Report:
    """Report of the children together what a parent asks of one peer: its slowest, and all of its tokens."""
    newest = min(reports, key=lambda report: report.behind)
    return messages.Report(
        round,
        newest.fingerprint,
        [],
        loss_sum=sum(report.loss_sum for report in reports),
        tokens=sum(report.tokens for report in reports),
        compute_s=max(report.compute_s for report in reports),
        wait_s=min(report.wait_s for report in reports),
        fits=fitting([report.fits for report in reports if report.fits]),
        grad_norm=median(report.grad_norm for report in reports),
        behind=newest.behind,
        needs=max(report.needs for report in reports),
    )
