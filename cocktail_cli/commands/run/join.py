"""`cocktail join`: lend this machine to a run, until it is over or Ctrl-C."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Annotated, cast

import typer

from cocktail_cli.errors import EXIT, Failure, explain
from cocktail_cli.host import hold_life_line, log_to
from cocktail_cli.machine import (
    cache,
    check_trust,
    door_at,
    limit_memory,
    next_at,
    own_keys,
    own_modules,
    own_name,
    pick_devices,
    under,
)
from cocktail_cli.options import (
    CacheDir,
    Device,
    Gpus,
    Json,
    LendHours,
    Listen,
    MaxDisk,
    MaxDown,
    MaxTemp,
    MaxUp,
    MicroBatch,
    NoColor,
    OnlyIdle,
    PeerAdvertise,
    ProgressOption,
    Quiet,
    TrustCode,
    Until,
    Verbose,
    VramLimit,
)
from cocktail_cli.signals import LEAVE_WITHIN, PAUSE_WITHIN, Asked, Wish, leave_in_time, leave_on_signal
from cocktail_cli.ui import (
    Display,
    Joined,
    Left,
    Progressed,
    View,
    Warning,
    counted,
    megabytes,
    open_view,
    poll_status,
    printable,
)
from cocktail_cli.volunteer import (
    Has,
    Lent,
    OwnSteps,
    Preparation,
    Ranks,
    Terms,
    Watch,
    check,
    checkpoint_store,
    digest_of,
    fitted,
    read_url,
    says_yes,
    screen,
    stays,
    taken,
    to_fetch,
)

if TYPE_CHECKING:
    from cocktail_cli.volunteer import RunLink
    from recipes.config import Recipe
    from recipes.training import Link, Peer
    from transport import PeerLink, RunURL
    from transport.aggregators import ShardServer
    from transport.protocol import CurveKeys, Welcome

CONNECT_TIMEOUT = 5.0  # seconds for the hub to answer, where --wait says nothing
LOOK_WITHIN = 5.0  # seconds for the hub to say how all peers are
RETURN_WITHIN = 600.0  # after a pause nobody may be there to try again


def join(
    run_url: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_URL",
            envvar="COCKTAIL_RUN_URL",
            help="The line the run's owner passed on; @FILE to read it from a file, - from stdin.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", envvar="COCKTAIL_NAME", help="Shown to the others (default: this machine's name)."
        ),
    ] = None,
    device: Device = "auto",
    gpus: Gpus = 1,
    micro_batch_size: MicroBatch = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    vram_limit: VramLimit = None,
    max_disk: MaxDisk = None,
    cache_dir: CacheDir = None,  # acted upon where it is read
    hours: LendHours = None,
    until: Until = None,
    only_idle: OnlyIdle = False,
    max_temp: MaxTemp = None,
    listen: Listen = None,
    advertise: PeerAdvertise = None,
    trust_remote_code: TrustCode = False,
    wait: Annotated[
        str,
        typer.Option(
            "--wait", metavar="TIME", help="Keep trying this long while the run cannot be reached: 10m."
        ),
    ] = "0s",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", envvar="COCKTAIL_YES", help="Do not ask before joining.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_color: NoColor = False,
    progress: ProgressOption = "auto",
    life_line: Annotated[bool, typer.Option("--life-line", hidden=True)] = False,
) -> None:
    """Join a run: fetch its model, train, exchange, until the run is over or you press Ctrl-C.

    The run's owner cannot run code here: a recipe is data, weights are tensors. Outside --hours, and where
    --only-idle or --max-temp say so, this machine leaves, keeps its work, and joins again by itself.

    Examples: cocktail join cocktail://...
    echo "$URL" | cocktail join - -y
    cocktail join @url.txt --hours 22:00-07:00 --max-up 5mbit --vram-limit 20GiB

    With --json every line of stdout is an event: {"v":1,"t":...,"event":"step","step":3,"loss":4.1,...}
    """
    from recipes.config import parse_duration
    from transport import parse_url

    url = parse_url(read_url(run_url))
    try:
        patience = float(parse_duration(wait))
    except ValueError as error:
        raise Failure("usage", f"--wait: {error}") from error
    if not yes and not sys.stdin.isatty():
        raise Failure("usage", "there is no terminal to ask on", hints=("-y joins without being asked",))
    log_to(None, verbose)
    own_modules(trust_remote_code)
    lends = max_up, max_down, listen, advertise, vram_limit, max_disk, trust_remote_code
    lent = Lent(name or own_name(), pick_devices(device, gpus), micro_batch_size, not yes, *lends)
    if gpus == 1:
        limit_memory(lent.devices, vram_limit)
    terms = Terms(hours, next_at(until, datetime.now()) if until else None, only_idle, max_temp)
    with open_view(Display(as_json, quiet, verbose, not no_color, progress)) as view:
        watch = Watch(terms, lent.devices, lambda what: view.show(Warning(what)))

        def stay(again: bool) -> Membership:
            member = Membership(url, replace(lent, ask=lent.ask and not again), view, watch)
            member.last(max(patience, RETURN_WITHIN) if again else patience, life_line)
            return member

        status = stays(watch, stay, lent.ask, view.show)
    if status:
        raise typer.Exit(status)


class Membership:
    """One stay in a run, from the first word to the goodbye."""

    def __init__(self, url: RunURL, lent: Lent, view: View, watch: Watch) -> None:
        self.url, self.lent, self.view, self.watch = url, lent, view, watch
        self.steps = 0
        self.leave_asked, self.leave_by = "", inf  # why, and until when on the monotonic clock
        self.run: RunLink | None = None  # once the hub has welcomed this peer and its owner has said yes
        self.peer: Peer | None = None  # once it is built
        self.keeping = False  # its state is being written
        self.door: ShardServer | None = None  # where others can reach it

    @property
    def status(self) -> int:
        """The exit status of a stay that ended in good order; 75 where there may be more to do for it: this
        machine was taken from it, or the run has failed and its owner may start it again.
        """
        if self.run is not None and self.run.ended is not None:
            return EXIT["lost"] if self.run.resumable else 0
        return EXIT["lost"] if self.leave_asked == "SIGTERM" or self.paused else 0

    @property
    def paused(self) -> bool:
        """It left because the terms of its machine do not allow to take part just now."""
        ended = self.run is not None and self.run.ended is not None
        return bool(self.watch.mood.pause) and self.leave_asked == self.watch.mood.pause and not ended

    def last(self, patience: float, life_line: bool) -> None:
        """Join, train and leave. `patience`: seconds to keep trying while the hub cannot be reached."""
        from cocktail_cli.host import versions
        from transport import Bandwidth, PeerLink

        lent, keys = self.lent, own_keys()
        with under(self.url.run, lent.name) as alone:
            reachable = self.open_door(keys)
            link = PeerLink(
                self.url,
                lent.name,
                lent.hardware,
                versions(),
                keys=keys,
                alone=alone,
                owns=bool(reachable),
                reachable=reachable,
                bandwidth=Bandwidth(lent.max_up, lent.max_down),
                told=self.warn,
            )
            try:
                self.come_and_go(link, patience, life_line)
            finally:
                if self.door is not None:
                    self.door.close()

    def open_door(self, keys: CurveKeys) -> str:
        """Listen, where that is wanted; the address as others dial it. Raises AddressInUse, Failure."""
        from cocktail_cli.volunteer import open_door

        if self.lent.listen is None:
            return ""
        place = door_at(self.lent.listen, self.lent.advertise)
        self.door, port = open_door(place.bind, place.port, keys, self.url)
        return place.dialled(port)

    def own(self, run: RunLink, peer: Peer, recipe: Recipe) -> None:
        """Shards have owners: reach those that are peers, and be one where this machine can be reached."""
        from cocktail_cli.volunteer import half_of, to_owners
        from transport.aggregators import AggregatorThread

        run.shards = recipe.compression.shards
        if recipe.swarm.owners == "hub":
            if self.door is not None:
                self.warn("in this run the hub owns all shards: nobody dials this machine")
            return
        run.direct = to_owners(run.link, own_keys())
        if self.door is not None:
            kept = checkpoint_store.of_shards(self.url.run, run.name, self.url.key)
            half = half_of(recipe, peer.local.layout.size, kept, self.warn)
            run.owning = AggregatorThread(run.link, half, self.door, self.warn)
            run.owning.start()

    def come_and_go(self, link: PeerLink, patience: float, life_line: bool) -> None:
        """Take part, and tell the hub in the end why this peer leaves."""
        from transport.protocol import Leaving

        leave = partial(self.leave, link)
        with closing(link), leave_on_signal(leave, link.abandon) as wish:
            if life_line:
                hold_life_line(leave, lambda: self.keeping)
            goodbye = partial(link.leave, "asked to leave", 1.0)
            with leave_in_time(lambda: self.leave_by, goodbye, lambda: self.status):
                try:
                    if not self.take_part(link, patience, wish):
                        link.leave("declined")
                        return
                except (Leaving, Asked):  # before there was anything to finish
                    link.leave(self.leave_asked)
                except Exception as error:
                    link.leave(explain(error).code.replace("_", " "))  # the others read why: "out of memory"
                    raise
                self.view.show(self.goodbye(link))

    def leave(self, link: PeerLink, why: str) -> None:
        """Ask the work that is going on to end."""
        self.leave_asked = why
        pauses = why == self.watch.mood.pause
        self.leave_by = time.monotonic() + (PAUSE_WITHIN if pauses else LEAVE_WITHIN)
        if pauses and self.run is not None:
            self.run.why = why  # for the others to read
        link.leave_requested.set()

    def take_part(self, link: PeerLink, patience: float, wish: Wish) -> bool:
        """From the first word to the end of the run, or of this stay; False where it is not wanted."""
        from cocktail_cli.volunteer import RunLink

        self.view.show(Progressed(f"dialling {self.url.address}"))
        welcome = link.connect(max(CONNECT_TIMEOUT, patience))
        with wish.ending():
            kept = checkpoint_store.find(*self.which(welcome), self.warn)
            lent, show = self.lent, self.view.show
            wanted = lent.devices[0], lent.micro_batch_size, show, wish.ending, kept, lent.max_disk
            preparation = Preparation(link, *wanted)
            check_trust(preparation.recipe, lent.trust_remote_code, "rejected")
            files, folder = preparation.files, preparation.folder
            held = sum(file.size for file in files) - to_fetch(files, folder)
            rates, room = (lent.max_up, lent.max_down), (lent.vram_limit, lent.max_disk)
            check(preparation.recipe, Has.here(lent.devices, held, *rates, vram=room[0], disk=room[1]))
            if len(lent.devices) > 1:
                from recipes.multi_gpu import check_spreadable

                check_spreadable(preparation.recipe)
            if not self.agreed(welcome, preparation):
                return False
        self.run = RunLink(link)
        with ExitStack() as stack:
            ours = {os.getpid()}
            if len(lent.devices) > 1:
                ranks = Ranks(lent.devices, lambda: self.leave(link, "rank lost"), lent.vram_limit)
                preparation.ranks = stack.enter_context(closing(ranks))
                ours |= {process.pid for process in ranks.processes}
            stack.enter_context(self.watch.during(ours, partial(self.leave, link)))
            self.stay(self.run, welcome, preparation)
            if preparation.ranks is not None and self.run.ended is None:
                preparation.ranks.check()
        return True

    def stay(self, run: RunLink, welcome: Welcome, preparation: Preparation) -> None:
        """From the welcome to the goodbye; then keep what is this peer's own, in case it comes back."""
        from transport.protocol import Leaving, LinkLost, RunOver

        try:
            prepared = preparation.carry_out()
            run.holds, run.name, self.peer = prepared.holds, run.link.name, prepared.peer
            self.own(run, prepared.peer, preparation.recipe)
            self.train(run, prepared.peer)
        except RunOver as over:
            run.ended, run.finished, run.resumable = str(over), over.finished, over.resumable
        except Leaving:
            run.link.leave(self.leave_asked)
        except LinkLost:
            self.keep(run, welcome)
            raise
        self.keep(run, welcome)

    def keep(self, run: RunLink, welcome: Welcome) -> None:
        """The run may go on without this peer, which may come back; or it is over, and nothing is of use."""
        if run.ended is not None and not run.resumable:
            checkpoint_store.forget(welcome.run)
        elif self.peer is not None:
            self.keeping = True
            most = self.lent.max_disk
            room = None if most is None else most - taken(cache())
            size = checkpoint_store.keep(self.peer, *self.which(welcome), self.warn, room)
            self.keeping = False
            if size:
                self.view.show(Progressed(f"kept {megabytes(size)} for its return", size, unit="bytes"))

    def which(self, welcome: Welcome) -> tuple[str, str, str, str]:
        """Run, peer, recipe and base: what is kept of one is of no use to another."""
        return welcome.run, welcome.name, welcome.recipe_hash, digest_of(welcome.base)

    def warn(self, what: str) -> None:
        self.view.show(Warning(what))

    def goodbye(self, link: PeerLink) -> Left:
        ended = self.run.ended if self.run else None
        up, down = self.run.traffic if self.run else (link.bytes_up, link.bytes_down)
        return Left(
            run=self.url.run,
            peer=self.run.name if self.run else self.lent.name,
            reason=ended or f"left ({self.leave_asked})",
            finished=bool(self.run and self.run.finished),
            steps=self.steps,
            up_bytes=up,
            down_bytes=down,
        )

    def agreed(self, welcome: Welcome, preparation: Preparation) -> bool:
        """Tell what the run is and will do here, and ask whether that is wanted."""
        from transport import ask_status

        recipe, wanted = preparation.recipe, preparation.bytes
        if self.lent.ask:
            for line in screen(self.url, preparation, self.lent, self.watch.terms.lines()):
                for part in fitted(line, shutil.get_terminal_size().columns):
                    typer.echo(part, err=True)
            if not says_yes(f'Join as "{welcome.name}"?'):
                return False
        every = recipe.logging.logging_steps
        self.view.show(Joined(welcome.run, welcome.name, recipe.name, welcome.recipe_hash, wanted, every))
        poll_status(self.view, partial(ask_status, self.url, LOOK_WITHIN))
        return True

    def train(self, run: RunLink, peer: Peer) -> None:
        """Take part, and show what this machine does; again from the start of a session where one is
        renewed.
        """
        from transport.protocol import SessionRenewed

        while True:
            try:
                self.follow(run, peer)
                return
            except SessionRenewed as renewed:
                # What was not delivered in the old session is the work of others now. x and x' stay as they
                # are.
                peer.undelivered.clear()
                run.name = run.link.name
                self.view.show(Warning(str(renewed)))

    def follow(self, run: RunLink, peer: Peer) -> None:
        from recipes.training import CaughtUp, HandedOver, Lowered, StepDone, finetune

        steps = OwnSteps(run)
        # The cast: messages are frozen, and a Protocol's plain attributes promise that they can be set.
        for event in finetune(cast("Link", run), peer, run.link.welcome.round):
            if isinstance(event, CaughtUp) and event.packets:
                packets = counted(event.packets, "packet")
                self.view.show(Progressed(f"caught up to round {event.round} with {packets}"))
            elif isinstance(event, Lowered):
                said = f"memory is full: micro-batches of {event.micro_batch} from now on ({event.why})"
                self.view.show(Warning(said))
            elif isinstance(event, HandedOver):
                did = {True: "handed over", False: "could not hand over", None: "may have handed over"}
                share = f"{event.smaller:.0%} of its residual's length"
                said = f"{did[event.taken]} {megabytes(event.size)}, {share}"
                self.view.show(Progressed(said, event.size, unit="bytes"))
            elif isinstance(event, StepDone):
                self.steps += event.loss is not None
                if event.refused:
                    said = f"the owner refused this peer's packet of round {event.round}: {event.refused}"
                    self.view.show(Warning(printable(said, 1000)))
                self.view.show(steps.told(event, peer))
