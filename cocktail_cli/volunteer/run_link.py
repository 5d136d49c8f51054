"""Adapts transport's PeerLink to the Link that the training loop of recipes asks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

from transport.ledger import HEADER_SIZE, read_packets
from transport.peer import OF_SAMPLES
from transport.protocol import Leaving, LedgerError, NotServed, ProtocolError, RunOver, messages
from transport.transfer import BandwidthBudget, Spool

if TYPE_CHECKING:
    from cocktail_cli.assembly import Exchange, PeerExtension
    from recipes.config import Compression, Recipe
    from recipes.objectives import Measured
    from recipes.training import Delivery
    from transport import PeerLink

AT_ONCE, MOST = 64, 8 << 20  # packets of the ledger fetched as one object, and bytes


class RunBounds:
    """Bounds the objects of a run by its recipe and its model (a transport.peer.SizeBounds).

    Args:
        parameters: P, the length of the vector that is trained.
        vocabulary: token ids are below it; None: not known.
    """

    def __init__(self, recipe: Recipe, parameters: int, vocabulary: int | None) -> None:
        from recipes.algorithm import PacketLimits
        from recipes.data import MOST, SampleLimits

        self._samples = SampleLimits.of(recipe, vocabulary)
        self.packet = PacketLimits(recipe.compression, parameters).packet  # of a round
        self.rungs, self._batch = recipe.compression.rungs, recipe.training.global_batch_size
        self.evaluation = self._samples.packed(MOST)  # bytes

    def rung(self, opened: messages.Round) -> Compression:
        """Return the setting of a round. Raises ProtocolError where the recipe has none such."""
        if opened.rung >= len(self.rungs):
            said = f"round {opened.round} is on rung {opened.rung}"
            raise ProtocolError(f"{said}, and the recipe has {len(self.rungs)}, from 0 on")
        return self.rungs[opened.rung]

    def lease(self, opened: messages.Round) -> int:
        steps = self.rung(opened).local_steps
        if opened.samples > (most := self._batch * steps):
            said = f"round {opened.round} gives this peer {opened.samples:,} samples"
            raise ProtocolError(
                f"{said} in {steps:,} local steps: by the recipe a round has {most:,} at most"
            )
        return self._samples.packed(opened.samples)

    def samples(self, count: int) -> int:
        return self._samples.packed(count)


class RunLink:
    """A peer's link to its run, as `recipes.training.finetune` calls it once it `knows` the bounds.

    Args:
        spool: where objects are received that memory is not to hold.
    """

    bounds: RunBounds

    def __init__(self, link: PeerLink, spool: Spool, extensions: Sequence[PeerExtension] = ()) -> None:
        self.link, self.spool = link, spool
        self.name = link.name  # known once the hub has welcomed this peer
        self.leaving: threading.Event = link.leave_requested
        self.holds: dict[str, str] = {}  # what this peer's model was made from
        self.round: messages.Round | None = None  # the newest that was announced
        self.ended: str | None = None  # why the run is over, once it is
        self.finished = False  # whether it reached its end
        self.resumable = False  # whether it failed and may be started again
        self.why = ""  # this peer leaves, if there is more to say than that it was asked to
        self.extensions = extensions
        self.through: Exchange = link
        for one in self.extensions:
            self.through = one.exchange_by(self.through)
        self.measuring = threading.Lock()  # of the next three: one round goes up while another comes down
        self.budget = BandwidthBudget()  # what the line carries beside the compute
        self.opened_at: dict[int, float] = {}  # of the rounds in flight
        self.committed_s: dict[int, float] = {}  # seconds from there to the commit
        self.steps = 1  # local steps of the rounds that the lease before the newest one was to last

    def knows(self, bounds: RunBounds) -> None:
        """Compare all that the hub announces with these bounds, from now on."""
        self.bounds = self.link.bounds = bounds

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far: to and from the hub, and other peers."""
        each = [(self.link.bytes_up, self.link.bytes_down), *(one.traffic for one in self.extensions)]
        return sum(up for up, _ in each), sum(down for _, down in each)

    @property
    def is_fetched_from(self) -> bool:
        """Tell whether other peers fetch from this one, where they can dial it."""
        return any(one.serves for one in self.extensions)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Turn the end of the run and the request to leave into the loop's Interrupted."""
        from recipes.training import Interrupted

        try:
            yield
        except RunOver as over:
            self.ended, self.finished, self.resumable = str(over), over.finished, over.resumable
            raise Interrupted(self.ended) from over
        except Leaving as leaving:
            raise Interrupted(str(leaving), leaving.arrived) from leaving

    @contextmanager
    def _served(self) -> Iterator[None]:
        """Turn an object that the hub does not have into NotServed. Then, and where it is none of the run's,
        no thread of this peer waits for that hub any more."""
        try:
            yield
        except KeyError as error:
            self.abandon()
            raise NotServed(str(error.args[0])) from error
        except ProtocolError:
            self.abandon()
            raise

    @property
    def fits(self) -> int:
        return self.budget.up

    def fetch(self, name: str) -> bytes:
        started = time.monotonic()
        kind, _, number = name.partition("/")
        round = int(number)
        with self.waiting(), self._served():
            if kind == "packet":
                passed = (one.fetch(round) for one in self.extensions)  # None: it is the hub's
                packet = next(filter(None, passed), None) or self.link.fetch(name, self.bounds.packet(round))
            else:
                assert self.round is not None, "a round is announced before its lease is fetched"
                packet = self.link.fetch(name, self.bounds.lease(self.round))
        now = time.monotonic()
        for one in self.extensions:
            one.fetched(kind, started, now)
        if kind == "packet":
            with self.measuring:
                took, committed = now - self.opened_at.pop(round, now), self.committed_s.pop(round, 0.0)
                self.budget = self.budget.received(len(packet), now - started).ended(took, committed)
        return packet

    def fetch_samples(self, name: str, count: int) -> bytes:
        self.link.bounds_of_extensions[f"{name.partition('/')[0]}/"] = OF_SAMPLES
        with self.waiting(), self._served():
            return self.link.fetch(name, self.bounds.samples(count))

    def fetched(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Fetch the evaluation set into a file, which is there until the block ends."""
        return self._spooled(name, self.bounds.evaluation)

    @contextmanager
    def _spooled(self, name: str, most: int) -> Iterator[BinaryIO]:
        """Fetch an object of at most `most` bytes into a file, which is there until the block ends."""
        with self.waiting():
            download = self.link.begin_spooled(name, most, self.spool)
        try:
            with self.waiting(), self._served():
                file = self.link.finish_spooled(download)
            yield file
        finally:
            self.link.forget(download)

    def packets(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the committed packets of rounds start .. stop-1, in order, their checksums verified."""
        while start < stop:
            many = min(AT_ONCE, max(1, MOST // self.bounds.packet(start)))
            rounds = range(start, min(start + many, stop))
            most = sum(HEADER_SIZE + self.bounds.packet(round) for round in rounds)
            with self._spooled(f"packets/{start}-{rounds.stop}", most) as records:
                yield from self._in_order(records, rounds)
            start = rounds.stop

    def _in_order(self, records: BinaryIO, rounds: range) -> Iterator[bytes]:
        """Yield the packets of these rounds. Raises NotServed where they are not those."""
        expected, named = iter(rounds), f"the packets of rounds {rounds.start}-{rounds.stop}"
        try:
            for round, packet in read_packets(records, self.bounds.packet):
                if round != next(expected, None):
                    raise NotServed(f"{named} have one of round {round}")
                yield packet
        except LedgerError as error:
            raise NotServed(f"{named} come damaged: {error}") from error
        if (lacking := next(expected, None)) is not None:
            raise NotServed(f"{named} lack that of round {lacking}")

    def ready(self, round: int, fingerprint: int) -> None:
        self.link.ready(round, fingerprint, self.holds)

    def next_round(self) -> messages.Round | None:
        """Wait for the next round of this peer; None when the run is over or this peer was asked to leave."""
        asked = time.monotonic()
        message = self.link.next_round()
        if isinstance(message, messages.Over):
            if not self.leaving.is_set():
                self.ended, self.finished = message.reason, message.finished
                self.resumable = message.resumable
            return None
        if not message.exchange:
            return message
        now = time.monotonic()
        for one in self.extensions:
            one.took_round(message, asked, now)
        with self._served():
            rung = self.bounds.rung(message)
            self.link.leases_first(rung.staleness > 1)
        before = self.round
        self.steps = before.spans * self.bounds.rung(before).local_steps if before is not None else 1
        self.round, oldest = message, message.round - messages.MOST_IN_FLIGHT
        with self.measuring:
            self.budget = self.budget.opened(rung.local_steps, rung.staleness)
            in_flight = {at: when for at, when in self.opened_at.items() if at > oldest}
            self.opened_at = {**in_flight, message.round: now}
        return message

    def exchange(self, packet: bytes, delivery: Delivery) -> messages.Committed:
        opened, said = self.opened_at.get(delivery.round), asdict(delivery)
        usual = said.pop("usual")
        with self.measuring:
            encoding = 0.0 if opened is None else time.monotonic() - opened
            self.budget = self.budget.computed(delivery.compute_s / self.steps, encoding)
        needs = self.budget.needs(usual) if len(self.bounds.rungs) > 1 else 0.0
        sent = time.monotonic()
        said["extra"] |= {one.name: body for one in self.extensions if (body := one.report(delivery, sent))}
        report = messages.Report(**said, fits=self.budget.down, needs=needs)
        for one in reversed(self.extensions):
            report = one.changed(report)
        with self.waiting():
            committed = self.through.exchange(delivery.round, packet, report)
            upload_s = self.through.upload_s
        now = time.monotonic()
        for one in self.extensions:
            one.exchanged(sent + upload_s, now)
        with self.measuring:
            if opened is not None:  # waiting for others would last as long whatever this peer sends
                opened += committed.waited
                self.opened_at[delivery.round], self.committed_s[delivery.round] = opened, now - opened
            self.budget = self.budget.sent(len(packet), upload_s)
        for one in self.extensions:
            one.committed(committed)
        return committed

    def evaluated(self, round: int, part: int, found: Measured) -> None:
        self.link.evaluated(round, part, found.loss_sum, found.terms, found.figures)

    @property
    def room(self) -> int:
        return self.link.room

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        with self.waiting():
            return self.link.hand_over(round, packet)

    def abandon(self) -> None:
        self.link.abandon()

    def leave(self, reason: str) -> None:
        for one in self.extensions:
            one.leave()
        self.link.leave(self.why or reason)
