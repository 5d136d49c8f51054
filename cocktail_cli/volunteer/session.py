"""A session of a volunteer in a run, from the handshake to the goodbye, and its steps."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from math import inf
from typing import TYPE_CHECKING, cast

from cocktail_cli import signals
from cocktail_cli.assembly import Joining, PeerParts, peer_extensions
from cocktail_cli.errors import EXIT, Failure, explain, is_fault
from cocktail_cli.host import LifeLine
from cocktail_cli.machine import (
    cache,
    check_trust,
    own_keys,
    parse_listen,
    registered_as,
    return_freed_memory,
)
from cocktail_cli.ui import Baseline, View, counted, events, megabytes, poll_status

from . import checkpoint_store
from .base_weights import folder_bytes
from .bootstrap import Bootstrap
from .limits import CONNECT_TIMEOUT, Resources, VolunteerLimits

if TYPE_CHECKING:
    from recipes.training import Link, Peer, StepDone
    from transport import PeerLink, RunURL
    from transport.direct import PeerServer
    from transport.protocol import CurveKeys, messages

    from .run_link import RunLink

PACE = 32  # steps over which the run's pace is measured


class StepMeter:
    """Measures each step from bytes and time at the end of the previous one."""

    def __init__(self, run: RunLink) -> None:
        self.run, self.before = run, run.traffic
        self.baseline: Baseline | None = None  # with the first step
        self.at: float | None = None  # end of the previous step; None: the start of the first is unknown
        # (monotonic seconds, step of the run) at the end of the last steps
        self.pace = deque[tuple[float, int]](maxlen=PACE)

    def measure(self, done: StepDone, peer: Peer) -> events.Step:
        now, (up, down) = time.monotonic(), self.run.traffic
        seconds = 0.0 if self.at is None else now - self.at
        sent, received = up - self.before[0], down - self.before[1]
        self.before, self.at = (up, down), now
        self.pace.append((now, done.step))
        name, announced = self.run.name, self.run.round
        self.baseline = self.baseline or Baseline(peer.trainer.layout.size)
        full = self.baseline.whole * done.local_steps
        both = self.baseline.add(done.sent_bytes, done.local_steps)
        # at the pace of the run's steps, which are not this machine's alone
        (began, first), eta_s = self.pace[0], None
        if announced and done.step > first:
            eta_s = round((announced.steps - done.step) * (now - began) / (done.step - first), 1)
        return events.Step(
            step=done.step,
            steps=announced.steps if announced else 0,
            round=done.round,
            loss=done.loss,
            peers=announced.peers if announced else 0,
            tokens=done.tokens,
            accepted=[name] if done.accepted else [],
            up_bytes={name: sent},
            down_bytes={name: received},
            ratio_up={name: round(full / sent, 2)} if sent else {},
            ratio_down={name: round(full / received, 2)} if received else {},
            ratio_fp16=round(both / (sent + received), 2) if sent + received else 0.0,
            packet_bytes=done.sent_bytes,
            fingerprint=f"{done.fingerprint:016x}",
            step_s=round(seconds / done.local_steps, 3),
            compute_s={name: round(peer.compute_s / done.local_steps, 3)},
            wait_s={name: round(peer.wait_s / done.local_steps, 3)},
            local_steps=done.local_steps,
            lr=done.lr if done.loss is not None else None,
            grad_norm=done.grad_norm,
            eta_s=eta_s,
        )


KEPT_S = 2.0  # seconds that a person waits for the checkpoint, which is written further without him
LAST_WORDS_S = 3.0  # seconds for the last line
STATUS_TIMEOUT = 5.0  # seconds for the hub to answer how all peers are
GOODBYE_TIMEOUT = 1.0  # seconds for its last answer


class VolunteerSession:
    """Takes part in a run once; `take_part` does all of it."""

    def __init__(
        self, url: RunURL, limits: VolunteerLimits, view: View, joining: Sequence[Joining] = ()
    ) -> None:
        self.url, self.limits, self.view, self.joining = url, limits, view, joining
        self.steps, self.since = 0, time.monotonic()
        self.leave_reason, self.leave_by = "", (inf, inf, inf)  # asked, the goodbye, the end: monotonic
        self.run: RunLink | None = None  # from the user's yes on
        self.peer: Peer | None = None  # once it is built
        self.storing = False  # its checkpoint is being written
        self.said = False  # its last line is written
        self.server: PeerServer | None = None  # where other peers reach it

    @property
    def status(self) -> int:
        """The exit status after an orderly end; 75 where a later start may go on with the run."""
        if self.run is not None and self.run.ended is not None:
            return EXIT["lost"] if self.run.resumable else 0
        return EXIT["lost"] if self.leave_reason == "SIGTERM" or self.returns else 0

    @property
    def returns(self) -> bool:
        """True where it left for a while: another session is to follow."""
        return (self.run is None or self.run.ended is None) and self._pauses(self.leave_reason)

    def _pauses(self, reason: str) -> bool:
        return any(one.returns_after(reason) for one in self.joining)

    def warn(self, what: str) -> None:
        self.view.show(events.Warning(what))

    def take_part(
        self, patience: float, life_line: LifeLine | None, welcomed: Callable[[], None] | None = None
    ) -> None:
        """Join, train and leave.

        Args:
            patience: seconds to keep trying while the hub cannot be reached.
            life_line: asks to leave when stdin ends, as the process that started this one has ended then.
            welcomed: called once the hub has begun a session.
        """
        from cocktail_cli.host import versions
        from transport import Bandwidth, PeerLink
        from transport.peer import LinkLimits, PeerIdentity

        limits, keys = self.limits, own_keys()
        with ExitStack() as stack:
            alone = stack.enter_context(registered_as(self.url.run, limits.name))
            reachable = self._open_server(keys)
            if self.server is not None:
                stack.enter_context(closing(self.server))
            link = PeerLink(
                self.url,
                PeerIdentity(
                    limits.name,
                    limits.hardware,
                    versions(),
                    keys=keys,
                    alone=alone,
                    reachable=reachable,
                ),
                LinkLimits(bandwidth=Bandwidth(limits.max_up, limits.max_down)),
                notify=self.warn,
            )
            stack.enter_context(closing(link))
            leave = partial(self.leave, link)
            request = stack.enter_context(signals.leave_on_signal(leave, link.abandon))
            if life_line is not None:
                stack.enter_context(life_line.leaving(leave, lambda: self.storing))
            goodbye = lambda: link.leave(self.leave_reason, 1.0)  # noqa: E731 - its reason is not known yet
            words = self._say_leaving, goodbye, partial(self._end_late, link)
            if all(one.process for one in self.joining):
                stack.enter_context(signals.leave_in_time(lambda: self.leave_by, words, lambda: self.status))
            self._say_goodbye_after(link, partial(self._joined, link, patience, welcomed), request)

    def _say_goodbye_after(
        self, link: PeerLink, join: Callable[[], messages.Welcome], request: signals.LeaveRequest
    ) -> None:
        """Take part, and tell the hub in the end why this peer leaves."""
        from recipes.errors import PartLost
        from transport.protocol import Leaving, RolledBack

        try:
            self._prepare_and_train(link, join(), request)
        except (Leaving, signals.StopAsked):  # before there was anything to finish
            link.leave(self.leave_reason)
        except (RolledBack, PartLost):
            self.url = link.url
            link.leave(self.leave_reason or "joins anew")
            if not self.leave_reason:  # else it leaves, whatever became of the run
                raise
        except Exception as error:
            code = explain(error).code  # the others read why: "out of memory"
            link.leave("an error" if code == "unexpected" else code.replace("_", " "))
            raise
        self._end(link)

    def _end(self, link: PeerLink) -> None:
        """Write the last line."""
        for one in self.run.extensions if self.run is not None else ():
            if said := one.farewell():
                self.view.show(events.Progressed(said))
        self.said = True
        self.view.show(self._left(link))

    def _say_leaving(self) -> None:
        if not self.said:
            within = self.leave_by[-1] - self.leave_by[0]
            self.view.show(events.Progressed(f"leaving ({self.leave_reason}), within {within:.0f} s"))

    def _end_late(self, link: PeerLink) -> None:
        """Write the last line from beside work that cannot be interrupted."""
        if not self.said:
            what = "writing what it keeps" if self.storing else "what this machine was at"
            self.warn(f"{what} took too long: others do this step again, and what was not written is lost")
            self._end(link)

    def leave(self, link: PeerLink, why: str) -> None:
        """Ask the training under way to end."""
        self.leave_reason = why
        pauses = self._pauses(why)
        within = signals.PAUSE_WITHIN if pauses else signals.LEAVE_WITHIN
        goodbye = min(within, signals.GOODBYE_WITHIN) if why == "Ctrl-C" else within
        link.leave_requested.share, now = goodbye / within, time.monotonic()
        self.leave_by = now, now + goodbye, now + within
        if self.run is not None:
            self.run.why = why  # for the other peers to read
        link.leave_requested.set()

    # ---- before training -----------------------------------------------------------------------------------

    def _open_server(self, keys: CurveKeys) -> str:
        """Listen for other peers, if wanted; return the address they dial. Raises AddressInUse, Failure."""
        if self.limits.listen is None:
            return ""
        from transport.direct import PeerServer  # no run of peers that nobody dials imports it

        place = parse_listen(self.limits.listen, self.limits.advertise)
        self.server, port = PeerServer.open((place.bind, place.port), keys, self.url)
        return place.dialled(port)

    def _joined(
        self, link: PeerLink, patience: float, welcomed: Callable[[], None] | None
    ) -> messages.Welcome:
        from transport.wire import routes_to

        self.view.show(events.Progressed(f"joining the run at {self.url.address}"))
        welcome = link.connect(max(CONNECT_TIMEOUT, patience))
        if len(routes_to(self.url)) > 1:
            by = "at" if link.way.startswith(self.url.address) else "through"
            way = "directly" if link.way == self.url.address else f"{by} {link.way}"
            self.view.show(events.Progressed(f"reached the hub {way}"))
        self.since = time.monotonic()
        if welcomed is not None:
            welcomed()
        return welcome

    def _prepare_and_train(
        self, link: PeerLink, welcome: messages.Welcome, request: signals.LeaveRequest
    ) -> None:
        """Check what the run asks for, and train to the end of the run or session."""
        from .run_link import RunLink

        limits = self.limits
        given = next((model for one in self.joining if (model := one.model()) is not None), None)
        with request.raising():
            checkpoint = None
            if all(one.keeps for one in self.joining):
                checkpoint = checkpoint_store.find(checkpoint_store.CheckpointKey.of(welcome), self.warn)
            bootstrap = Bootstrap(link, limits, self.view.show, request.raising, checkpoint)
            check_trust(bootstrap.recipe, limits.trust_remote_code, "rejected")
            Resources.of(limits, bootstrap.downloads.bytes_here).check(bootstrap.recipe, given)
            for around in self.joining:
                around.check(bootstrap.recipe)
            self._show_joined(welcome, bootstrap)
        key, recipe = own_keys().public, bootstrap.recipe
        bootstrap.imports.given = given
        parts = PeerParts(recipe, self.url, key, self.warn, limits.devices, link, self.server)
        extensions = bootstrap.extensions = peer_extensions(parts)
        link.listen({one.name: one.received for one in extensions})
        self.run = RunLink(link, bootstrap.spool, extensions)
        bootstrap.stays = self.server is not None and self.run.is_fetched_from
        with ExitStack() as stack:
            stack.enter_context(bootstrap.kept)
            ours = {os.getpid()}
            leave = partial(self.leave, link)
            builders = (around.builder(link, leave, limits.vram_limit) for around in self.joining)
            if (builder := next(filter(None, builders), None)) is not None:
                bootstrap.builder = stack.enter_context(closing(builder))
                ours |= builder.pids
            for around in self.joining:
                stack.enter_context(around.beside(ours, leave))
            for one in self.run.extensions:
                stack.enter_context(one.beside(ours))
            self.train_and_store(self.run, welcome, bootstrap)
            if builder is not None and self.run.ended is None:
                builder.check()

    def _show_joined(self, welcome: messages.Welcome, bootstrap: Bootstrap) -> None:
        from transport import ask_status

        recipe = bootstrap.recipe
        every, size = recipe.logging.logging_steps, bootstrap.downloads.bytes
        joined = events.Joined(welcome.run, welcome.name, recipe.name, welcome.recipe_hash, size, every)
        self.view.show(joined)
        poll_status(self.view, partial(ask_status, self.url, STATUS_TIMEOUT))

    # ---- training ------------------------------------------------------------------------------------------

    def train_and_store(self, run: RunLink, welcome: messages.Welcome, bootstrap: Bootstrap) -> None:
        """Train from the welcome to the goodbye, then store a checkpoint in case this peer returns."""
        from transport.protocol import Leaving, RolledBack, RunOver

        try:
            prepared = bootstrap.carry_out()
            run.holds, run.name, self.peer = prepared.holds, run.link.name, prepared.peer
            run.knows(prepared.bounds)
            for one in run.extensions:
                one.built(bootstrap.files_here, prepared.peer)
            if self.server is not None and not run.is_fetched_from:
                self.warn("in this run the hub sends all packets itself: nobody dials this machine")
            self.train(run, prepared.peer)
        except RunOver as over:
            run.ended, run.finished, run.resumable = str(over), over.finished, over.resumable
        except Leaving:
            run.link.leave(self.leave_reason)
        except Exception as error:
            # Not where the hub is at fault; as where memory ran out or the line is lost, it may return.
            if not isinstance(error, Failure | RolledBack) and not is_fault(error):
                self._store(run, welcome)
            raise
        self._store(run, welcome)

    def train(self, run: RunLink, peer: Peer) -> None:
        """Train until the end, going on in a renewed session where the hub was restarted."""
        from recipes.training import finetune
        from transport.protocol import SessionRenewed

        while True:
            steps = StepMeter(run)
            try:
                # The cast: messages are frozen, and a Protocol's plain attributes promise to be settable.
                for event in finetune(cast("Link", run), peer, run.link.welcome.round):
                    self._show(event, steps, peer)
                return
            except SessionRenewed as renewed:
                peer.undelivered.clear()  # the hub leases to others what the old session did not deliver
                run.name = run.link.name
                self.warn(str(renewed))

    def _show(self, event: object, steps: StepMeter, peer: Peer) -> None:
        from recipes.training import CaughtUp, HandedOver, Lowered, NotHandedOver, StepDone

        if isinstance(event, CaughtUp) and event.packets:
            packets = counted(event.packets, "packet")
            self.view.show(events.Progressed(f"caught up to round {event.round} with {packets}"))
        elif isinstance(event, Lowered):
            self.warn(f"memory is full: micro-batches of {event.micro_batch} from now on ({event.why})")
        elif isinstance(event, HandedOver):
            did = {True: "handed over", False: "could not hand over", None: "may have handed over"}
            said = f"{did[event.taken]} {megabytes(event.size)}, {event.smaller:.0%} of its residual's length"
            self.view.show(events.Progressed(said, event.size, unit="bytes"))
        elif isinstance(event, NotHandedOver):
            self.warn(f"memory ran out while the residual was handed over: it stays here ({event.why})")
        elif isinstance(event, StepDone):
            self.steps += event.loss is not None
            if event.refused:
                self.warn(
                    f"the aggregator refused this peer's packet of round {event.round}: {event.refused}"
                )
            self.view.show(steps.measure(event, peer))

    # ---- afterwards ----------------------------------------------------------------------------------------

    def _store(self, run: RunLink, welcome: messages.Welcome) -> None:
        """Store a checkpoint while the run goes on without this peer; delete it where the run is over."""
        if run.ended is not None and not run.resumable:
            checkpoint_store.delete_run(welcome.run)
        elif self.peer is not None and all(one.keeps for one in self.joining):
            self.storing = True
            most = self.limits.max_disk
            room = None if most is None else most - folder_bytes(cache())
            key = checkpoint_store.CheckpointKey.of(welcome)
            by = self.leave_by[-1] - time.monotonic() - LAST_WORDS_S
            wait = min(by, KEPT_S) if self.leave_reason == "Ctrl-C" else by
            size = checkpoint_store.store(self.peer, key, self.warn, room, wait)
            self.storing = False
            if size:
                did = "kept" if key.path.is_file() else "a process of its own writes"
                self.view.show(
                    events.Progressed(f"{did} {megabytes(size)} for its return", size, unit="bytes")
                )

    def _left(self, link: PeerLink) -> events.Left:
        run = self.run
        up, down = run.traffic if run else (link.bytes_up, link.bytes_down)
        name = run.name if run else self.limits.name
        return events.Left(
            run=self.url.run,
            peer=name,
            reason=(run.ended if run else None) or f"left ({self.leave_reason})",
            finished=bool(run and run.finished),
            steps=self.steps,
            up_bytes=up,
            down_bytes=down,
            share=self._share(name) if self.steps else None,
            seconds=round(time.monotonic() - self.since, 1),
            returns=run is None or run.ended is None or run.resumable,
        )

    def _share(self, name: str) -> float | None:
        """Ask the hub for this peer's share of the run; None where it does not answer any more."""
        from transport import ask_status
        from transport.protocol import TransportError

        try:
            status = ask_status(self.url, GOODBYE_TIMEOUT)
        except TransportError:
            return None
        people = [*status.get("others", ()), *status["peers"]]
        return next((peer.get("share") for peer in people if peer["name"] == name), None)


def take_turns(
    joining: Sequence[Joining],
    session: Callable[[bool], VolunteerSession],
    join_first: bool,
    show: Callable[[events.Event], None],
) -> int:
    """Run one session after the other as long as it is to return; return the exit status.

    Args:
        session: joins, takes part and leaves; its argument tells whether it is a return.
        join_first: the first session does not wait: a person at the terminal answers its prompt.
    """
    from recipes.errors import PartLost
    from transport.protocol import RefusedByHub, RolledBack

    again = False
    while True:
        for one in joining if again or not join_first else ():
            if (status := one.wait(show)) is not None:
                return status
        try:
            ended = session(again)
            if not ended.returns:
                return ended.status
            del ended
        except (PartLost, RolledBack) as error:
            show(events.Warning(f"{error}: joining anew"))
        except RefusedByHub as refused:
            if not again or refused.code != "over":
                raise
            show(events.Progressed("the run has ended meanwhile"))
            return 0
        again = True
        gc.collect()
        return_freed_memory()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()
