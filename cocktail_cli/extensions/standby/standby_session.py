"""A standby from its first dial to the end of the run: it follows, and hosts the run once the hub is lost.

DIR/                 as a host's output folder; run.json is written when it takes over
DIR/standby.json     the key pair by which peers know this machine, for its user alone
DIR/manifest.json    the files of the host's folder, and its run.json but for secrets
DIR/take-over        the host's order, until it is obeyed
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cocktail_cli import machine
from cocktail_cli.assembly import Server, leads
from cocktail_cli.errors import Failure
from cocktail_cli.host import HostSession, LocalSettings, check_format, run_folder
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import Event, Progressed, View, Warning

from .bodies import NAME, Follow

if TYPE_CHECKING:
    from recipes.algorithm import PacketLimits
    from transport import RunKeys, RunURL

    from .follower import Follower
    from .ledger_copy import LedgerCopy
    from .succession import Lookout, Succession

KEYS, ORDER = "standby.json", "take-over"
LOOK_S = 0.1
GATED = 1 << 34  # bytes of a packet of a model that is not here to be counted
GOODBYE_S = 10.0  # seconds for the hub's last words, once its end was told


def ask_take_over(folder: Path) -> None:
    """Order the standby in this folder to take over. Raises Failure where there is none."""
    if not (folder / KEYS).is_file():
        hints = ("-o: the folder of `cocktail standby`",)
        raise Failure("run_unknown", f"{folder} holds no standby (no {KEYS})", hints=hints)
    (folder / ORDER).touch()


class StandbySession:
    """Follows a run into a folder; `run` does all of it.

    Args:
        listen: where peers find it.
        secrets: of the host's run.json, if it gave them: signing, stop.
    """

    def __init__(
        self,
        url: RunURL,
        folder: Path,
        listen: machine.ListenAddress,
        secrets: dict[str, str],
        view: View,
        verbose: int = 0,
    ) -> None:
        self.url, self.folder, self.listen = url, folder, listen
        self.secrets, self.view, self.verbose = secrets, view, verbose
        self.asked_to_leave = threading.Event()
        self.keys: RunKeys
        self.place = ""
        self.session: HostSession | None = None  # once it is prepared to host the run
        self._limits: PacketLimits | None = None  # of the run's packets, once its files are here
        self._importing = threading.Lock()  # libraries of models, which no two threads may import at once

    def show(self, event: Event) -> None:
        self.view.show(event)

    def warn(self, what: str) -> None:
        self.show(Warning(what))

    def run(self) -> None:
        """Follow, and take over when told to or elected. Raises Failure and the errors of transport."""
        from cocktail_cli.host import versions
        from transport.peer import PeerIdentity

        from .follower import Follower
        from .succession import Lookout, Succession

        url, listen = self.url, self.listen
        self.folder.mkdir(parents=True, exist_ok=True)
        run_folder.log_to(self.folder / run_folder.LOG, self.verbose)
        self.keys = self._own_keys()
        state = Succession(url.run, url.token)
        followed: list[Follower] = []  # who follows is known by the port that the lookout has
        lookout = Lookout(
            (listen.bind, listen.port),
            self.keys.pair,
            state,
            lambda: followed[0].silence if followed else inf,
        )
        with closing(lookout), ExitStack() as reachable:
            with ExitStack() as stack:
                reach = machine.reach_of(listen.bind, lookout.port, listen.advertise)
                self.place = "+".join((machine.joined(reach.host, reach.port), *listen.places))
                identity = PeerIdentity(
                    f"standby-{machine.default_peer_name()}",
                    f"standby at {self.place}",
                    versions(),
                    keys=self.keys.pair,
                    extra={NAME: msgspec.msgpack.encode(Follow(self.place, self.secrets.get("stop", "")))},
                )

                def watch(copy: LedgerCopy) -> None:
                    if follower.manifest is not None:
                        self._note_voters(state, follower)
                    self._keep_ready(copy)

                follower = Follower(url, identity, self.folder, watch, self.warn, self._longest)
                followed.append(follower)
                stack.callback(follower.close)
                here = Server(self.keys.pair, machine.local_host(listen.bind), lookout.port, self.warn)
                for lead in leads(listen.places, here):
                    # also once this is the hub: a new claim would cost peers a redial or two
                    reachable.enter_context(closing(lead))
                stack.enter_context(leave_on_signal(lambda why: self.asked_to_leave.set()))
                self.show(
                    Progressed(f"following {url.run} into {self.folder}; peers would find it at {self.place}")
                )
                follower.start()
                why = self._wait(follower, lookout, state)
            if why:
                self.warn(f"taking over the run {url.run}: {why}")
                self._take_over(follower, lookout)

    def _own_keys(self) -> RunKeys:
        """Read or make the keys of this standby; secrets of the run as far as its host gave them."""
        from transport import RunKeys

        path, given = self.folder / KEYS, self.secrets
        made = RunKeys.generate()
        if path.is_file():
            made = RunKeys(**json.loads(path.read_text(encoding="utf-8")))
        keys = replace(made, token=self.url.token, signing=given.get("signing", ""))
        keys = replace(keys, stop=given.get("stop", keys.stop))
        machine.write_private(path, json.dumps(asdict(keys)))
        return keys

    # ---- waiting -------------------------------------------------------------------------------------------

    def _wait(self, follower: Follower, lookout: Lookout, state: Succession) -> str:
        """Follow until the run is over or this standby is to take over; return why, "" if it is not."""
        order, told = self.folder / ORDER, False
        while not self.asked_to_leave.is_set():
            if order.exists():
                order.unlink()
                if follower.synced.is_set() or follower.copy.rounds:
                    return "its host says so"
                self.warn("there is nothing to take over yet: the copy is not whole")
            if lookout.elected.is_set():
                return "the hub is lost, and a majority of the peers is here"
            if follower.ended.is_set():
                if follower.error is not None:
                    raise follower.error
                self.show(Progressed(f"the run is over: {follower.over.reason if follower.over else ''}"))
                return ""
            if follower.synced.is_set() and not told:
                told = True
                self.show(Progressed(f"the copy is whole: {follower.copy.rounds} rounds"))
                self._prepare(follower)
                self._note_voters(state, follower)
                state.synced = True
                self.show(Progressed("standing by for the hub"))
            time.sleep(LOOK_S)
        return ""

    def _longest(self, round: int) -> int:
        """Return the most bytes of a round's packet, by the recipe and the base model, which are here."""
        base = self.folder / run_folder.BASE
        if not base.is_dir():  # it is gated: nothing of it is here
            return GATED
        if (limits := self._limits) is None:
            from recipes.algorithm import PacketLimits
            from recipes.models import count_trainable

            with self._importing:
                recipe = run_folder.recipe_in(self.folder)
                limits = self._limits = PacketLimits(recipe.compression, count_trainable(recipe, base))
        return limits.packet(round)

    @staticmethod
    def _note_voters(state: Succession, follower: Follower) -> None:
        """Note who elects a hub, and in which term, as the copy says."""
        assert follower.manifest is not None
        state.voters, state.term = follower.copy.voters - {follower.manifest.own_key}, follower.copy.term

    def _record(self, follower: Follower) -> machine.RunRecord:
        """Describe the run as this machine would host it."""
        manifest = follower.manifest
        assert manifest is not None
        url = str(self.url.at(self.place, self.keys.public))
        known: dict[str, Any] = dict(manifest.record)
        base = self.folder / run_folder.BASE
        known |= {"url": url, "keys": asdict(self.keys), "pid": os.getpid(), "bind": self.listen.bind}
        known |= {"output_dir": str(self.folder), "base": str(base), "arguments": {"peers": 0}, "port": 0}
        return machine.RunRecord.of(known)

    def _prepare(self, follower: Follower) -> None:
        """Do beforehand what takes seconds: import, load the tokenizer, read the data, trace the model."""
        self._longest(0)  # by now, or it would be counted beside the imports below
        from recipes import snapshots, training  # noqa: F401 - they take seconds, which the takeover has not

        record = self._record(follower)
        check_format(record)
        recipe = run_folder.recipe_in(self.folder)
        self.session = HostSession(recipe, self.folder, [self.view], record)
        if not recipe.data.streaming:  # the position in a stream moves on
            prepared = self.session.prepare()
            _ = prepared.memory, prepared.prepared, prepared.data_digest  # seconds, which a takeover has not
            self.session.prepared = prepared

    def _keep_ready(self, copy: LedgerCopy) -> None:
        """Repeat the newest rounds: to repeat hundreds of them once the hub is lost would take seconds."""
        from transport import Ledger

        work = None if self.session is None else self.session.prepared
        if work is not None:
            with Ledger(self.folder / run_folder.LEDGER, write=False) as ledger:
                work.durable.follow(ledger, copy.rounds)

    # ---- taking over ---------------------------------------------------------------------------------------

    def _take_over(self, follower: Follower, lookout: Lookout) -> None:
        """Host the run: from now on this folder is the run's."""
        from .ledger_copy import LedgerCopy

        if self.session is None:
            self._prepare(follower)
        assert self.session is not None
        with LedgerCopy(self.folder / run_folder.LEDGER) as copy:
            term = copy.take_over(self.keys.public, NAME)
        port = lookout.port
        record = replace(self._record(follower), port=port)
        machine.save_run(record)
        self.session.free_port = lookout.close
        self.session.resumed, self.session.asked_hash = record, record.asked_hash
        self.show(Progressed(f"hosting {record.run} in term {term}"))
        recipe = self.session.recipe
        recorder = run_folder.Recorder(self.folder, lambda what: self.show(Warning(what)), recipe)
        listen = replace(self.listen, port=port, typed=True)
        with closing(recorder):
            self.session.views = [self.view, recorder]
            self.session.run(listen, LocalSettings(), 0)
