"""A machine that lends its memory to a run (`join --layers`): the hub gives it a place in a ring.

A thread takes places from the hub. This one serves as a stage, or takes part in the run as a ring's head; a
machine that holds the whole model is a ring of its own, which is an ordinary peer. Neighbours know each other
by the keys that the hub names, so there is no secret of a ring. Where a neighbour is replaced the lines go to
the new one, and this machine keeps its layers.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cocktail_cli.assembly import Server, TakingPart, leads, line_extensions, machine_routes, recipe_type
from cocktail_cli.errors import EXIT, Failure
from cocktail_cli.host import versions
from cocktail_cli.machine import RUNTIME, local_host, memory_of, own_keys, parse_listen, registered_as
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import Progressed, Warning, megabytes
from cocktail_cli.volunteer import (
    CONNECT_TIMEOUT,
    DownloadPlan,
    Imports,
    check_files,
    fetch_base,
    spool_within,
)
from recipes.config import parse_size, recipe_from_json
from transport import Bandwidth, CatchUpDownloads, PeerIdentity, PeerLink
from transport.peer import LinkLimits
from transport.protocol import (
    CurveKeys,
    Leaving,
    NotServed,
    RunOver,
    SessionRenewed,
    TransportError,
    Unreachable,
    UrlError,
    messages,
    read_msgpack,
)

from .bodies import NAME, Lends, OtherMachine, Placed, Probed, packed
from .compute import CONFIG, StageFailed, StageMachine, StageServer
from .events import layers_text
from .hub import UNDIVIDED
from .lines import ANYWHERE, Neighbour, StageLink
from .stage_ring import PATIENCE, RingDissolved, StageRing

LOOK_S = 0.1  # between two looks at what has changed
PLACE_S = 3600.0  # until it is asked for again
PROBE_S = 2.5  # for a connection: a lost SYN is sent again after 1 s
CLAIM_S = 10.0  # for a place of the run URL to lead here


class PlaceEnded(Exception):
    """This machine has another place by now, or is to leave."""


class LentMachine:
    """One machine from its first dial to the end of the run; `run` does all of it.

    Raises AddressInUse, and Failure where `limits.listen` is no address.

    Args:
        lends: bytes of its memory.
    """

    def __init__(self, me: TakingPart, lends: int) -> None:
        self.me, self.show = me, me.show
        self.url, self.limits, self.lends = me.url, me.limits, lends
        limits = me.limits
        self.keys = own_keys()
        self.address = ""
        if limits.listen is None:
            self.lines = StageLink.open(self.keys, hub=self.url.key)
        else:
            place = parse_listen(limits.listen, limits.advertise)
            self.lines = StageLink.open(self.keys, place.bind, place.port, self.url.key)
            self.address = place.dialled(self.lines.port)
        self.lines.routes_to = machine_routes
        self.lines.lost = lambda why: self.show(Warning(why))
        self.lines.refused = lambda neighbour: self._refuse(neighbour.address)
        self.place = self._newest = Placed("", 0, [])  # that is followed, and that has come
        self._lock = threading.Lock()
        self._refused = set[str]()  # addresses of machines that send what no stage would send
        self._to_measure: queue.SimpleQueue[list[str]] = queue.SimpleQueue()  # addresses
        self._to_rate: queue.SimpleQueue[list[OtherMachine]] = queue.SimpleQueue()
        self.lines.dialled = lambda neighbour, why: self._to_measure.put([neighbour.address])
        self.leave_reason = ""
        self.ended: TransportError | None = None  # what has ended its session
        self.base: Path | None = None  # folder of the base model, once it was fetched
        self.server: StageServer | None = None  # while it serves as a stage
        self.ring: StageRing | None = None  # while it is a head

    def run(self) -> int:
        """Lend this machine until the run is over or its user asks to leave; return the exit status."""
        limits = self.limits
        with ExitStack() as stack:
            alone = stack.enter_context(registered_as(self.url.run, limits.name))
            stack.enter_context(closing(self.lines))
            if not self.address:
                self._claim(stack)
            identity = PeerIdentity(
                limits.name,
                f"{limits.hardware}, lends {megabytes(self.lends)}",
                versions(),
                keys=self.keys,
                alone=alone,
                reachable=self.address,
                extra={NAME: packed(Lends(self.lends))},
            )
            bandwidth = LinkLimits(bandwidth=Bandwidth(limits.max_up, limits.max_down))
            link = PeerLink(self.url, identity, bandwidth, notify=lambda what: self.show(Warning(what)))
            stack.enter_context(closing(link))
            self.lines.rate_limits = link.rate_limits

            def leave(why: str) -> None:
                self.leave_reason = why
                link.leave_requested.set()
                if self.server is not None:
                    self.server.stop.set()

            stack.enter_context(leave_on_signal(leave, link.abandon))
            self.show(Progressed(f"dialling {self.url.address}, to lend {megabytes(self.lends)} for layers"))
            try:
                link.connect(max(CONNECT_TIMEOUT, self.me.patience))
                self.me.welcomed()
                recipe = recipe_from_json(link.welcome.recipe, recipe_type)
                if NAME not in recipe.extensions:
                    link.leave("an error")
                    raise Failure("rejected", UNDIVIDED)
                takers = {one.name: one.received for one in line_extensions(link)}
                link.listen({**takers, NAME: partial(self._placed, link)})
                with Imports(recipe) as imports:
                    self._warm_up(link, imports)
            except (Leaving, RunOver) as error:
                self.ended = error
            for work in (self._watch, self._measure, self._rate):
                threading.Thread(target=work, args=(link,), name=work.__name__, daemon=True).start()
            status = self._take_places(link)
            link.leave(self.leave_reason or "done")
        return status

    def _claim(self, stack: ExitStack) -> None:
        """Let neighbours reach this machine at the first place of the run URL that leads here in time. The
        key is one of its own: this machine may lend itself more than once."""
        place, port = ", ".join(self.url.places), self.lines.port
        if place:
            self.show(Progressed(f"asking {place} to lead neighbours here"))

        def warn(why: str) -> None:
            self.show(Warning(why))

        server = Server(CurveKeys.generate(), local_host(ANYWHERE), port, warn, "this machine")
        for lead in leads(self.url.places, server):
            stack.enter_context(closing(lead))
            if not self.address and lead.claimed.wait(CLAIM_S):
                self.address = lead.address

    def _take_part(self, ring: StageRing | None) -> int:
        """Take part in the run as the head of a ring; None: as an ordinary peer. The port is of the lines."""
        machines = 0 if ring is None else ring.head.stages
        name = f"{self.limits.name}-ring"
        apart = replace(self.limits, listen=None, advertise=None, machines=machines, name=name)
        return self.me.take_part(apart, () if ring is None else (ring,))

    def _warm_up(self, link: PeerLink, imports: Imports) -> None:
        """Import and compile what the model needs, so that this machine can be in a ring at once."""
        self.show(Progressed("importing and compiling what the model needs"))
        config = b""
        while not config:
            try:
                config = link.fetch(f"base/{CONFIG}", size_of_config(link.welcome))
            except KeyError:  # of a gated model, which the head fetches with its own account
                return
            except SessionRenewed:  # the hub was restarted, or has lost sight of this machine
                continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(config)
            imports.read(Path(folder))
            imports.wait(link.raise_if_leaving)

    # ---- places --------------------------------------------------------------------------------------------

    def _placed(self, link: PeerLink, body: bytes) -> None:
        """Take this machine's place, in the link's thread, and say it to a hub that knows of no ring yet."""
        self._newest = read_msgpack(body, Placed, "this machine's place")
        link.introduce(NAME, packed(Lends(self.lends, self._newest)))

    def _wait(self, link: PeerLink, place: Placed) -> None:
        """Wait for another place than this one. Raises RunOver at the end of the run, and as `wait`."""
        link.wait("a place in a ring", lambda: self._newest != place or bool(link.over), PLACE_S)
        if link.over is not None:
            raise RunOver.of(link.over)

    def _watch(self, link: PeerLink) -> None:
        """Follow the places until the session ends; in a thread of its own."""
        place = self.place
        while self.ended is None:
            try:
                self._wait(link, place)
            except SessionRenewed:
                self._to_measure.put([])  # the new hub is to know, too, that this machine is prepared
                continue
            except TransportError as error:
                self.ended = error
                self._stop()
                return
            asked, place = place.probe, self._newest
            self._moved(place)
            if place.probe != asked:
                self.lines.admit(one.key for one in place.probe if not one.address)
                self._to_measure.put([one.address for one in place.probe if one.address])
                self._to_rate.put(place.probe)

    def _measure(self, link: PeerLink) -> None:
        """Tell the hub how far off other machines are: those that it asks about, and each neighbour whenever
        the line to it was made, lost, or not to be had; in a thread of its own. First, that this machine is
        prepared."""
        self._to_measure.put([])
        while self.ended is None:
            wanted = {*self._to_measure.get()}
            while not self._to_measure.empty():
                wanted |= {*self._to_measure.get()}
            found = {one: -1.0 if one in self._refused else seconds_to(one) for one in sorted(wanted)}
            link.say(NAME, packed(Probed(found)))

    def _refuse(self, address: str) -> None:
        """Let the hub give the place of a neighbour to another machine, as if this one did not reach it."""
        if address:  # one that nobody reaches has no name for it
            self._refused.add(address)
            self._to_measure.put([address])

    def _rate(self, link: PeerLink) -> None:
        """Measure the lines to machines that the hub names, one after the other, each once while it is named;
        in a thread of its own."""
        measured = set[OtherMachine]()
        while self.ended is None:
            asked = self._to_rate.get()
            measured &= {*asked}
            for other in asked:
                if not other.address or other in measured or other not in self.place.probe:
                    continue
                measured.add(other)
                try:
                    rates = self.lines.measure(other.key, other.address)
                except UrlError:
                    continue  # it is told as not reached
                if rates is not None:
                    link.say(NAME, packed(Probed({}, {other.address: rates})))

    def _moved(self, place: Placed) -> None:
        before, self.place = self.place, place
        if self._moved_on(before):
            self._stop()
        elif self.server is not None or self.ring is not None:
            self._connect()

    def _moved_on(self, place: Placed) -> bool:
        """Tell whether this machine has another place by now."""
        now = self.place
        return (now.ring, now.number) != (place.ring, place.number)

    def _stop(self) -> None:
        """End what this machine does in its present ring."""
        server, ring = self.server, self.ring
        if server is not None:
            server.stop.set()
        if ring is not None:
            ring.dissolve()

    def _connect(self) -> None:
        """Connect to the neighbours of the newest place, once both of them are there."""
        with self._lock:  # or an older place might come last
            place = self.place
            stages = len(place.machines)
            if stages < 2:
                return

            def neighbour(step: int) -> Neighbour:
                number = (place.number + step) % stages
                one = place.machines[number]
                return Neighbour(f"stage {number} ({one.name})", one.key, one.address, place.ring)

            before, after = neighbour(-1), neighbour(1)
            if before.key and after.key:
                self.lines.connect(before, after, place.machines[place.number].address)

    def _take_places(self, link: PeerLink) -> int:
        """Do what each place asks for, one after the other; return the exit status."""
        waits, fetches = threading.Event(), True
        told = ""
        while not self.leave_reason and self.ended is None:
            place = self.place
            if not place.ring:
                if place.reason != told:
                    told = place.reason
                    self.show(Progressed(told))
                if place.spare and fetches:
                    fetches = self._fetch_base(link, place)
                waits.wait(LOOK_S)
            elif len(place.machines) == 1:
                self.show(Progressed("this machine holds the whole model: it is a peer of its own"))
                return self._take_part(None)
            elif place.number == 0:
                try:
                    return self._lead(place)
                except RingDissolved as dissolved:
                    self.show(Warning(str(dissolved)))
            else:
                self._serve(place)
        return self._status()

    def _fetch_base(self, link: PeerLink, place: Placed) -> bool:
        """Fetch the base model while this machine stands by, so that it reads its layers from its own disk.

        Returns whether the download is to go on when it stands by again.
        """

        def go_on(_: object = None) -> None:
            if self._moved_on(place) or self.leave_reason or self.ended is not None:
                raise PlaceEnded

        plan, most = DownloadPlan(link.welcome, self.limits.max_disk), self.limits.max_disk
        if any(file.gated for file in plan.files):
            return False  # its user may have no account for it
        self.show(Progressed(f"fetching the base model meanwhile, {megabytes(plan.bytes)}"))
        try:
            with closing(CatchUpDownloads(link, plan.machine, spool_within(most), go_on)) as supply:
                fetch_base(plan.files, plan.folder, supply.files, go_on, most)
            self.base = plan.folder
        except PlaceEnded:
            return True
        except (NotServed, Failure) as error:  # as where the disk has no room: the head gives it its layers
            self.show(Warning(f"the base model is not fetched: {error}"))
        except TransportError:
            return False  # `_watch` has met what has ended the session
        return False

    def _lead(self, place: Placed) -> int:
        """Take part in the run as the head of a ring."""
        layers = tuple(range(one.first, one.stop) for one in place.machines)
        self.show(Progressed(f"head of {len(layers)} machines: {said(place)}"))
        ring = StageRing(self.lines, self.limits.devices[0], layers)
        ring.show = self.show
        with closing(ring.head):
            self.ring = ring
            try:
                self._connect()
                if self._moved_on(place):  # while this was set up
                    ring.dissolve()
                ring.check_ring()
                while not self.leave_reason and self.ended is None:
                    try:
                        return self._take_part(ring)
                    except StageFailed as failed:
                        self._await_another(ring, failed)
                return self._status()
            finally:
                self.ring = None

    def _await_another(self, ring: StageRing, failed: StageFailed) -> None:
        """Refuse a machine, and wait until another has its place, or this one leaves. Raises RingDissolved,
        and `failed` where no other comes in time."""
        until, before = time.monotonic() + PATIENCE, self.place.machines
        self.show(Warning(f"{failed}: waiting for another machine in its place"))
        for one in before[failed.stage : failed.stage + 1]:  # none, where this one has no place any more
            self._refuse(one.address)
        while not self.leave_reason and self.ended is None:
            ring.check_ring()
            now = self.place.machines
            there = failed.stage < len(now) == len(before)
            if there and now[failed.stage].key != before[failed.stage].key:
                return
            if time.monotonic() > until:
                raise failed
            time.sleep(LOOK_S)

    def _serve(self, place: Placed) -> None:
        """Serve as a stage until this machine's place is another."""
        machine = StageMachine(place.number, self.limits.devices[0], base=self.base)
        self.server = StageServer(machine, self.lines, len(place.machines))
        try:
            self._connect()
            if not self._moved_on(place) and self.ended is None and not self.leave_reason:
                mine = place.machines[place.number]
                which = f"stage {place.number} of {len(place.machines)}"
                self.show(Progressed(f"{which}, with {layers_text((mine.first, mine.stop))}: {said(place)}"))
                self.server.run()
        finally:
            self.server = None

    def _status(self) -> int:
        """Return the exit status; 75 where a later start may go on with the run. Raises what ended it."""
        if isinstance(self.ended, RunOver):
            self.show(Progressed(str(self.ended)))
            return EXIT["lost"] if self.ended.resumable else 0
        if self.ended is not None and not isinstance(self.ended, Leaving):
            raise self.ended
        self.show(Progressed(f"left ({self.leave_reason})"))
        return EXIT["lost"] if self.leave_reason == "SIGTERM" else 0


def lent_bytes(layers: str, me: TakingPart) -> int:
    """Return the bytes that --layers lends. Raises Failure (usage)."""
    here = memory_of(me.limits.devices[0])
    here = min(here, me.limits.vram_limit or here)
    if layers == "auto":
        return max(1, here - RUNTIME)
    try:
        return min(int(parse_size(layers)), here)
    except ValueError as error:
        raise Failure("usage", f"--layers: {error}") from error


def size_of_config(welcome: messages.Welcome) -> int:
    """Return the bytes of the model's config. Raises Failure (rejected) where it is longer than one is."""
    check_files(welcome.base, code=True)
    return next((file.size for file in welcome.base if file.name == CONFIG), 0)


def seconds_to(address: str) -> float:
    """Measure how long another machine takes to accept a connection; below 0: it does not."""
    with suppress(UrlError):
        for route in machine_routes(address):
            with suppress(Unreachable):
                return route.seconds(PROBE_S)
    return -1.0


def said(place: Placed) -> str:
    """Say who has which layers."""
    return ", ".join(
        f"{one.name or 'nobody yet'} has {layers_text((one.first, one.stop))}" for one in place.machines
    )
