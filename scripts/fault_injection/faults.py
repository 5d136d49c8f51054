"""Do the faults of a schedule to a swarm, and see to it that all peers come back.

Each target has a thread that works through its faults in order. It does the harm, waits, undoes only what a
person would (start the process again, plug the cable in), then waits until a packet of the peer is in a
committed round. What comes of it is a `Record`; a broken promise is its `problem`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.fault_injection.schedule import JOINER, KINDS, Fault
from scripts.swarms.commands import GUEST, HUB, RELAY, STARTS, Child, Stopped, Swarm, Told
from scripts.swarms.tcp_link import Link
from transport import Ledger, ask_status, parse_url
from transport.protocol.errors import TransportError

SILENT = 0.5  # dose above which a lost hub closes no connection
LEAVES = 25.0  # seconds from the signal to the end of the process
GIVEN_UP = 60.0  # seconds until one that does not is killed, so that the run can go on
BACK = 60.0  # seconds of hub time until a peer that can come back has a packet in a committed round
RECONNECTS = 10.0  # seconds from the hub's listening until the peers are there again
PEER_TIMEOUT = 15.0  # for so long a hub waits for a peer that is away, whatever the cap of a round
HUNG = 120.0  # seconds of hub time without a commit
SLOW = (0.18, 0.02)  # seconds stopped and running in turn: a tenth of the speed
# exit status of a peer that is asked to leave: 75 is "start me again"
LEFT = {"SIGINT": 0, "SIGTERM": 75, "SIGHUP": 0}
EARLY = {0, 75, 130, 143, -2, -15, -1}  # the same before it has joined
DISK = 'mount -t tmpfs -o size=256k tmpfs {home} && exec "$@"'  # in a user namespace of its own


@dataclass
class Record:
    """The outcome of a fault. Times are monotonic seconds, None where it did not come to that."""

    fault: Fault
    began: float
    ended: float = 0.0  # when the harm was undone
    commit_s: float | None = None  # from the beginning (hub: from its listening) to the next committed round
    back_s: float | None = None  # from the end until the peer works (hub: from its listening, all peers)
    said: str = ""
    problem: str = ""
    gap_s: float | None = None  # without a commit, where the hub's machine was lost
    lost: int = 0  # committed rounds that went with it
    may_lose: int = 0
    hub: str = ""  # key of the hub when it began


class Failed(Exception):
    """A promise was broken by this fault; the message says which."""


class Chaos:
    """The faults of one run."""

    def __init__(self, swarm: Swarm, faults: Sequence[Fault], log: Path) -> None:
        self.swarm, self.faults, self.records = swarm, list(faults), list[Record]()
        self.ending = threading.Event()  # no new faults; those that last are cut short
        self.busy: dict[str, Fault] = {}
        self._log, self._lock = log.open("a", encoding="utf-8"), threading.Lock()
        self._threads: list[threading.Thread] = []
        for fault in self.faults:
            self.write("planned", fault)
        self.started = 0.0

    def write(self, what: str, fault: Fault | None = None, **more: object) -> None:
        line = {"t": round(time.time(), 3), "what": what} | (asdict(fault) if fault else {}) | more
        with self._lock:
            if not self._log.closed:  # by an interruption, while a fault still lasts
                self._log.write(json.dumps(line) + "\n")
                self._log.flush()

    def start(self) -> None:
        """Begin now, with a thread for each target."""
        self.started = time.monotonic()
        for target in sorted({fault.target for fault in self.faults}):
            self._threads.append(threading.Thread(target=self._lane, args=(target,), daemon=True))
            self._threads[-1].start()

    @property
    def idle(self) -> bool:
        """True once every thread has ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        with self._lock:
            self._log.close()

    # ---- one target ------------------------------------------------------------------------------------

    def _lane(self, target: str) -> None:
        try:
            for fault in [fault for fault in self.faults if fault.target == target]:
                if self.ending.wait(max(0.0, self.started + fault.at - time.monotonic())):
                    return
                self._inflict(fault)
        except Stopped:
            return

    def _inflict(self, fault: Fault) -> None:
        record = Record(fault, time.monotonic(), hub=self._hub_key)
        self.busy[fault.target] = fault
        self.write("begins", fault)
        try:
            getattr(self, "do_" + fault.kind.replace("-", "_"))(fault, record)
        except Failed as failed:
            record.problem = str(failed)
            peer = self.swarm.peers.get(fault.target)
            if peer is not None and not peer.alive:  # the faults to come need it
                self.swarm.peers[fault.target] = self.swarm.join(fault.target)
        finally:
            record.ended = record.ended or time.monotonic()
            self.records.append(record)
            found = {key: getattr(record, key) for key in ("commit_s", "back_s", "said", "problem")}
            self.write("ended", fault, **found)
            del self.busy[fault.target]

    def _lasts(self, seconds: float) -> None:
        """Wait while the harm lasts; shorter where the run is about to end."""
        self.ending.wait(seconds)

    def _undone(self, record: Record, child: Child, *, again: bool = False) -> None:
        """Wait for the next commit, and for a packet of this process in one. Where it was started `again`, a
        packet of the one before may still be on its way into a round. Errors: Failed where one of the two
        does not come.
        """
        record.ended = record.ended or time.monotonic()
        name = record.fault.target

        def accepted() -> Told | None:
            if name in self.swarm.lent:
                return self.swarm.accepted(name, 0, record.ended)
            first = child.first_round if again else 0
            return None if first is None else self.swarm.accepted(child.given, first, record.ended)

        def there() -> bool:
            return bool(not child.alive or self.swarm.finished or accepted())

        came = self.swarm.wait_for(there, BACK, hub_time=True)
        self._note_commit(record, record.began)
        if told := accepted():
            record.back_s = round(told.at - record.ended, 2)
        elif self.swarm.finished or child.saw_the_end:
            record.said += " the run was over before it was back"
        elif not child.alive:
            raise Failed(f"{name} ended with exit {child.exit} instead of coming back: {child.last_words()}")
        elif not came and record.ended > record.began + PEER_TIMEOUT and record.hub != self._hub_key:
            record.said += " a standby that it did not know has taken over: started with the new URL"
            child.kill()
            self._again(name, record)
        elif not came:
            raise Failed(f"{name} had no packet in a round for {BACK:.0f} s after the fault was over")

    def _note_commit(self, record: Record, since: float) -> None:
        if told := self.swarm.first_step(since):
            record.commit_s = round(told.at - since - self.swarm.without_hub(since, told.at), 2)

    def _again(self, name: str, record: Record, command: Sequence[str] | None = None) -> None:
        """Start the peer again, and wait until it works."""
        how = {"command": command} if command else {}
        while True:
            child = self.swarm.peers[name] = self.swarm.join(name, **how)  # type: ignore[arg-type]
            if not self._is_lost(child):
                break
            child.kill()  # whose person types the new URL
        record.ended = child.started
        self._undone(record, child, again=True)

    @property
    def _hub_key(self) -> str:
        return parse_url(self.swarm.url).key

    def _is_lost(self, child: Child) -> bool:
        """Wait until a joiner has a session. True: a standby has taken over before, and it knows only the URL
        of the hub that was replaced."""
        key = self._hub_key

        def replaced() -> bool:
            return not child.heard("joined") and self._hub_key != key

        self.swarm.wait_for(
            lambda: child.heard("joined") or not child.alive or replaced() or self.swarm.finished, STARTS
        )
        return child.alive and not self.swarm.finished and replaced()

    def _leaves(self, child: Child, fault: Fault, record: Record, why: str = "") -> None:
        """Ask it to leave: it must end within LEAVES, with the right status."""
        child.expects = {LEFT[fault.signal]} if child.heard("joined") else EARLY
        child.why = why or f"asked to leave by {fault.signal}"
        asked = time.monotonic()
        child.signal(getattr(signal, fault.signal))
        try:
            child.end(GIVEN_UP)
        except subprocess.TimeoutExpired:
            child.kill()
        if child.saw_the_end:  # before it had left
            child.expects = {0}
        took = time.monotonic() - asked
        record.said += f" {fault.signal} -> exit {child.exit} in {took:.1f} s"
        if took > LEAVES:
            said = f"{took:.1f} s to leave after {fault.signal}"
            raise Failed(f"{child.name} took {said}: {child.last_words()}")

    # ---- peers -----------------------------------------------------------------------------------------

    def do_kill(self, fault: Fault, record: Record) -> None:
        self.swarm.peers[fault.target].kill()
        self._lasts(fault.pause)
        self._again(fault.target, record)

    def do_leave(self, fault: Fault, record: Record, command: Sequence[str] | None = None) -> None:
        self._leaves(self.swarm.peers[fault.target], fault, record)
        self._lasts(fault.pause)
        self._again(fault.target, record, command)

    def do_clock(self, fault: Fault, record: Record) -> None:
        self.do_leave(fault, record, (*GUEST, "--hours", str(fault.hours), "--"))

    def do_leave_early(self, fault: Fault, record: Record) -> None:
        self._leaves(self.swarm.peers[fault.target], fault, record)
        child = self.swarm.peers[fault.target] = self.swarm.join(fault.target)
        self._lasts(fault.lasts)
        when = "after" if child.heard("joined") else "before"
        self._leaves(child, fault, record, f"{fault.signal} {when} it had joined")
        self._again(fault.target, record)

    def do_stop(self, fault: Fault, record: Record) -> None:
        child = self.swarm.peers[fault.target]
        child.signal(signal.SIGSTOP)
        self._lasts(fault.lasts)
        child.signal(signal.SIGCONT)
        self._undone(record, child)

    def do_slow(self, fault: Fault, record: Record) -> None:
        child, stopped, runs = self.swarm.peers[fault.target], *SLOW
        until = time.monotonic() + fault.lasts
        while time.monotonic() < until and not self.ending.is_set():
            child.signal(signal.SIGSTOP)
            time.sleep(stopped)
            child.signal(signal.SIGCONT)
            time.sleep(runs)
        self._undone(record, child)

    def do_dark(self, fault: Fault, record: Record) -> None:
        """Let a line be dark, deaf or thin for a while."""
        lines = self.swarm.links_of(fault.target)
        for line in lines:
            getattr(line, fault.kind)()
        self._lasts(fault.lasts)
        for line in lines:
            line.mend()
        self._undone(record, self.swarm.peers[fault.target])

    do_deaf = do_thin = do_dark

    def do_half_open(self, fault: Fault, record: Record) -> None:
        for line in self.swarm.links_of(fault.target):
            line.swallow()
        self._undone(record, self.swarm.peers[fault.target])

    def do_cut(self, fault: Fault, record: Record) -> None:
        for line in self.swarm.links_of(fault.target):
            assert isinstance(line, Link)  # `possible` has no such fault in a lab
            line.cut()
        self._undone(record, self.swarm.peers[fault.target])

    def do_twice(self, fault: Fault, record: Record) -> None:
        """Join a second process under the same name: it must be given another, and the first must not
        notice."""
        name, first = fault.target, self.swarm.peers[fault.target]
        if not first.alive:
            raise Failed(f"{name} had ended with exit {first.exit}: {first.last_words()}")
        second = self.swarm.join(name)
        while self._is_lost(second):
            second.kill()
            second = self.swarm.join(name)
        self._lasts(fault.lasts)
        given = next((joined["peer"] for joined in second.heard("joined")), "")
        if not second.alive:
            raise Failed(f"the second {name} ended with exit {second.exit}: {second.last_words()}")
        if given in ("", name):
            raise Failed(f"the second {name} goes by the name {given!r}")
        self._leaves(second, fault, record)
        self._undone(record, first)

    # ---- joiners that never get far --------------------------------------------------------------------

    def do_memory(self, fault: Fault, record: Record) -> None:
        size = round((300 + 2200 * fault.dose) * 2**20)
        command = (*GUEST, "--memory", str(size), "--")
        # Without memory a library may end the process before Python can say a word: C++ so, OpenBLAS with 1.
        ends = {8, -signal.SIGABRT, 1}
        self._fails(fault, record, f"{size >> 20} MiB of memory", ends, command=command)

    def do_disk(self, fault: Fault, record: Record) -> None:
        home = self.swarm.folder / "homes" / f"{JOINER}-{fault.number}"
        home.mkdir(parents=True)
        mount = DISK.format(home=home)
        unshare = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
        self._fails(fault, record, "a full disk", {8}, before=unshare, COCKTAIL_HOME=str(home))

    def _fails(self, fault: Fault, record: Record, with_what: str, statuses: set[int], **how: object) -> None:
        """Start a joiner that must end with one of these statuses; where it can work after all, send it
        home."""
        peer = sorted(self.swarm.links)[fault.number % len(self.swarm.links)]
        child = self.swarm.join(peer, name=f"{JOINER}-{fault.number}", **how)  # type: ignore[arg-type]
        child.expects, child.why = statuses, with_what
        self.swarm.wait_for(lambda: not child.alive or child.heard("step") or self.ending.is_set(), STARTS)
        record.said = f"{with_what}: "
        record.ended = time.monotonic()
        if child.alive:
            self._leaves(child, fault, record, f"{with_what} was enough")
        else:
            record.said += f"exit {child.exit}, {child.last_words()}"
        self._note_commit(record, record.began)

    # ---- the hub ---------------------------------------------------------------------------------------

    def _kill_hub(self) -> None:
        assert self.swarm.hub is not None
        self.swarm.hub_gone()
        self.swarm.hub.kill()

    def _commits(self, record: Record) -> None:
        """Wait for the next commit after the fault."""
        since = record.ended
        self.swarm.wait_for(lambda: self.swarm.finished or self.swarm.first_step(since), HUNG)
        self._note_commit(record, since)

    def _resume(self, record: Record, hours: float = 0.0) -> None:
        """Start the hub again: the peers must be there within RECONNECTS of its listening."""
        started = time.monotonic()
        steady = self._steady() - (self.swarm.relayed if RELAY in self.busy else set())
        hub = self.swarm.start_hub(resume=True, hours=hours)
        self.swarm.wait_for(lambda: self.swarm.hub_up.is_set() or not hub.alive, STARTS)
        if hub is not self.swarm.hub:
            self._stands_down(hub, record)
            return
        if self.swarm.was_over:
            hub.expects, hub.why = {4}, "the run was over, only not told"
            self.swarm.tell_the_end()
            record.said += " the run was over, its end had not been told"
            return
        if not hub.alive:
            raise Failed(f"the hub ended with exit {hub.exit} at resume: {hub.last_words()}")
        record.ended = time.monotonic()
        record.said += f" listens {record.ended - started:.1f} s after its start;"
        self._all_back(record, steady, "hub")
        self._commits(record)

    def _stands_down(self, hub: Child, record: Record) -> None:
        """Wait until a hub that was away for too long, and whose standby has taken over, ends by itself."""
        record.said += " its standby has taken over;"
        record.ended = time.monotonic()
        self.swarm.wait_for(lambda: not hub.alive, BACK)
        if hub.alive:
            hub.kill()
            raise Failed(f"a hub whose standby has taken over had not ended after {BACK:.0f} s")
        self._commits(record)

    def _all_back(self, record: Record, steady: set[str], whose: str) -> None:
        """Wait until these peers are at the hub again: within RECONNECTS of the fault's end."""
        listens, missing = record.ended, set(steady)
        while missing and time.monotonic() < listens + BACK and not self.swarm.finished:
            if record.fault.target != HUB and HUB in self.busy:
                record.said += " the hub was away as well"
                return
            missing &= self._steady()
            there = self._there()
            missing -= {name for name, child in self.swarm.peers.items() if child.given in there}
            self.swarm.over.wait(0.1)
        took = time.monotonic() - listens
        record.back_s = round(took, 2)
        if took > RECONNECTS:
            names = ", ".join(sorted(missing)) or "all of them by now"
            raise Failed(f"{took:.1f} s after the {whose} listened again not all peers were back: {names}")

    def _steady(self) -> set[str]:
        """The peers that no other fault has taken from the hub."""
        return {name for name, child in self.swarm.peers.items() if child.alive and name not in self.busy}

    def _there(self) -> set[str]:
        """Ask the hub for the names of the peers that have a connection to it."""
        try:
            peers = ask_status(parse_url(self.swarm.url), 3.0)["peers"]
        except TransportError:
            return set()
        return {peer["name"] for peer in peers if peer["state"] != "lost"}

    def do_hub_kill(self, fault: Fault, record: Record) -> None:
        self._lasts(fault.lasts)
        if self.swarm.finished:
            return
        record.began = time.monotonic()
        self._kill_hub()
        self._lasts(fault.pause)
        self._resume(record)

    def do_hub_lost(self, fault: Fault, record: Record) -> None:
        swarm = self.swarm
        standby = swarm.start_standby()
        self._lasts(fault.lasts)
        if swarm.finished:
            standby.kill()
            return
        if not standby.alive:
            raise Failed(f"the standby ended with exit {standby.exit}: {standby.last_words()}")
        record.began, at = time.monotonic(), time.time()
        silent = fault.dose > SILENT
        gone = swarm.lose_hub(silent=silent)
        swarm.wait_for(lambda: swarm.hub_up.is_set() or not standby.alive, STARTS)
        gone.kill()
        record.said += " without a word," if silent else ""
        if not standby.alive:
            raise Failed(f"the standby ended with exit {standby.exit}: {standby.last_words()}")
        first = standby.heard("run_started")[0]["round"]  # the next one that it commits
        record.ended = time.monotonic()
        self._commits(record)
        warnings = [one for peer in swarm.peers.values() for one in peer.heard("warning")]
        lacked = [one for one in warnings if "took over without round" in str(one.get("message", ""))]
        if any(one["came"] >= record.began for one in lacked):
            swarm.lost.setdefault(first, record.ended)
        lost = [round for round, at in swarm.lost.items() if record.began <= at <= record.ended]
        # when it was told is later on a busy machine
        with Ledger(swarm.out / "ledger", write=False) as ledger:
            gap = next((row.committed - at for row in ledger.rounds(first)), None)
        record.gap_s, record.lost = None if gap is None else round(gap, 2), len(lost)
        record.said += f" took over before round {first}, {len(lost)} lost, gap {gap or 0:.1f} s"
        record.may_lose = 0 if "durability=replicated" in swarm.launch else 1

    def do_relay_kill(self, fault: Fault, record: Record) -> None:
        """Kill the relay: its peers must be there within RECONNECTS of its listening."""
        swarm = self.swarm
        assert swarm.relay is not None
        steady = self._steady() & swarm.relayed
        swarm.relay.kill()
        self._lasts(fault.pause)
        relay = swarm.start_relay()
        if not relay.alive:
            raise Failed(f"the relay ended with exit {relay.exit}: {relay.last_words()}")
        record.ended = time.monotonic()
        self._all_back(record, steady, "relay")
        self._commits(record)

    def do_hub_clock(self, fault: Fault, record: Record) -> None:
        self._kill_hub()
        self._resume(record, hours=fault.hours)

    def do_hub_kill_again(self, fault: Fault, record: Record) -> None:
        self._kill_hub()
        hub = self.swarm.start_hub(resume=True)
        self._lasts(fault.lasts)
        if hub is not self.swarm.hub:
            self._stands_down(hub, record)
            return
        if not hub.alive:
            raise Failed(f"the hub ended with exit {hub.exit} at resume: {hub.last_words()}")
        self._kill_hub()
        self._resume(record)

    def do_hub_stop(self, fault: Fault, record: Record) -> None:
        hub = self.swarm.hub
        assert hub is not None
        self.swarm.hub_gone()
        hub.signal(signal.SIGSTOP)
        self._lasts(fault.lasts)
        hub.signal(signal.SIGCONT)
        if hub is not self.swarm.hub:
            self._stands_down(hub, record)
            return
        self.swarm.hub_back()
        record.ended = time.monotonic()
        self._commits(record)


def possible(lab: bool = False) -> list[str]:
    """List the kinds of faults that can be done on this machine; in a lab nothing cuts connections."""
    if not hasattr(signal, "SIGSTOP"):
        return []
    probe = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    can_mount = shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0
    return [kind for kind in KINDS if (can_mount or kind != "disk") and not (lab and kind == "cut")]
