"""A swarm of machines without sockets, threads or clock: the real HubState and PeerState, every message
encoded.

A history is a list of small decisions (who is heard next, whose cable is pulled, who dies, when time passes).
After any history `settle` lets honest peers finish the run; the laws are checked all the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dc_replace

from msgspec.structs import replace
from toy_swarm import toy_settings

from transport import actions as do
from transport.hub import Extend, HubState
from transport.ledger import RECENT, EvaluationRow, KnownPeer, OpenSession, Recovered, RoundRow, RungRow
from transport.peer import PeerState, SessionState
from transport.protocol import (
    Event,
    RunEnded,
    RunSettings,
    SamplePool,
    decode_to_hub,
    decode_to_peer,
    encode,
    messages,
    sample_ids,
)
from transport.scheduling import Phase

TOKEN, STOP = "token", "stop-secret"
TOKENS = 10


@dataclass
class Books:
    """Contents of a ledger: only what was written before the hub died."""

    rounds: list[RoundRow] = field(default_factory=list)
    counted: SamplePool = field(default_factory=SamplePool)
    # of each round that counted: its members, and peer -> key
    keys: list[tuple[tuple[str, ...], dict[str, str]]] = field(default_factory=list)
    sessions: dict[str, OpenSession] = field(default_factory=dict)
    evaluation: EvaluationRow | None = None
    peers: dict[str, KnownPeer] = field(default_factory=dict)
    rungs: list[RungRow] = field(default_factory=list)

    def recovered(self) -> Recovered:
        last = self.rounds[-1] if self.rounds else None
        sessions = tuple(self.sessions.values())
        peers = tuple(k for k in self.peers.values() if k.standing != "stranger")
        recent = tuple(self.rounds[-RECENT:])
        known = Recovered(
            len(self.rounds), self.counted.ranges, sessions, peers, last, self.evaluation, recent
        )
        return dc_replace(known, rungs=tuple(self.rungs))


@dataclass
class Cable:
    """One control connection: two queues of encoded messages."""

    name: bytes
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)


class SimPeer:
    """A volunteer at any staleness, one step at a time."""

    def __init__(self, swarm: SimSwarm, name: str, staleness: int) -> None:
        self.swarm, self.staleness = swarm, staleness
        self.state = PeerState(messages.Hello(messages.PROTOCOL, TOKEN, swarm.settings.run, name))
        self.key = name  # that the wire proves
        self.cable: Cable | None = None
        self.pending: dict[int, list[int]] = {}  # leases trained, not delivered
        self.round: messages.Round | None = None  # in exchange
        self.sent: list[int] = []  # rounds the packet of this exchange delivers
        self.session = 0
        self.dead = False
        self.uploaded = False
        self.compute_s, self.fits, self.grad_norm, self.needs = 0.0, 0, 0.0, 0.0  # as it says
        self.rungs: dict[int, int] = {}  # by round, as announced
        self.skew = 0  # makes its fingerprints wrong
        self.ready_at = 0  # round of x' when it was last ready: nothing was in flight

    def say(self, said: list[messages.Message]) -> None:
        if self.cable is not None:
            self.cable.up.extend(encode(m) for m in said)

    def fingerprint(self, round: int) -> int:
        return 1000 + round + self.skew

    def work(self) -> None:
        """Whatever its training thread can do now."""
        state = self.state
        if self.dead or state.link is not SessionState.JOINED:
            return
        if state.sessions != self.session:
            self.session = state.sessions
            self.pending.clear()
            self.round = None
            self.ready()
        committed = None if self.round is None else state.commits.get(self.round.round)
        if self.round is not None and committed is not None:
            assert state.welcome is not None
            if state.welcome.name in committed.accepted:
                for r in self.sent:
                    del self.pending[r]
            if self.round.spans > 1:
                self.ready()
            self.round = None
        if state.offer_again:
            state.offer_again = self.uploaded = False
        if self.round is None:
            self.begin()
        elif not self.uploaded:
            self.upload()

    def ready(self) -> None:
        self.ready_at = self.state.newest + 1
        self.say(self.state.ready(messages.Ready(self.ready_at, self.fingerprint(self.ready_at))))

    def begin(self) -> None:
        opened = self.state.take_round()
        if opened is None:
            return
        if opened.eval_parts:
            self.say(self.state.evaluated(messages.Evaluated(opened.round, opened.eval_part, 2.0, 1)))
        if not opened.exchange:
            if not opened.eval_parts:  # a call: it catches up
                self.ready()
            return
        self.rungs[opened.round] = opened.rung
        self.sent = sorted(self.pending)
        if opened.samples:
            assert self.state.welcome is not None
            ids = self.swarm.hub.rounds.leases.ids(self.state.welcome.session, opened.round)
            if ids is None:  # the session is over, and this peer will hear of it
                return
            self.pending[opened.round] = sample_ids(ids)
        if self.staleness == 0:
            self.sent = sorted(self.pending)
        self.round, self.uploaded = opened, False
        self.say(self.state.report(self.report(opened)))

    def report(self, opened: messages.Round) -> messages.Report:
        many = len(self.sent)
        behind = min(max(self.staleness, 1) - 1, max(0, opened.round - self.ready_at))
        known = self.fingerprint(opened.round - behind)
        said = messages.Report(opened.round, known, self.sent, 1.0 * many, many, behind=behind)
        said = replace(said, compute_s=self.compute_s, fits=self.fits, grad_norm=self.grad_norm)
        return replace(said, needs=self.needs)

    def upload(self) -> None:
        assert self.round is not None
        assert self.state.welcome is not None
        session, r = self.state.welcome.session, self.round.round
        if self.swarm.hub.uploads.refusal(session, f"update/{r}", 100) is None:
            self.swarm.packets[session, r] = [i for lease in self.sent for i in self.pending[lease]]
            self.swarm.apply(lambda now: self.swarm.hub.rounds.uploaded(session, r, now))
            self.uploaded = True

    def dial(self) -> None:
        if not self.dead and self.cable is None and self.state.link is SessionState.OFFLINE:
            self.cable = self.swarm.connect(self)
            self.say(self.state.connected(self.swarm.now))


class SimSwarm:
    """Hub, peers, cables, ledger, clock."""

    def __init__(
        self, staleness: int = 1, settings: RunSettings | None = None, extensions: Sequence[Extend] = ()
    ) -> None:
        self.settings = settings or toy_settings(
            samples=13,
            global_batch=4,
            longest_lease=3 if staleness else 1,
            eval=True,
            eval_every=2,
            step_timeout=20.0,
            start_timeout=300.0,
            peer_timeout=90.0,
        )
        self.staleness, self.extensions = staleness, extensions
        self.now = 100.0
        self.books = Books()
        self.hub = HubState(self.settings, TOKEN, STOP, self.now, None, self.extensions)
        self.peers: list[SimPeer] = []
        self.cables: dict[bytes, tuple[Cable, SimPeer]] = {}
        self.jobs: deque[do.Action] = deque()  # of the commit thread
        self.packets: dict[tuple[str, int], list[int]] = {}
        self.events: list[Event] = []
        self._told = 0  # events of earlier hubs
        self.trained: list[int] = []  # every sample in x', as often as it is
        self.said: list[messages.Message] = []  # answers to the host
        self.reject: str = ""
        self.came: set[str] = set()  # aggregators whose packets are in the round (sim_aggregators.py)
        self._cables = 0

    # ---- decisions -----------------------------------------------------------------------------------------

    def new_peer(self, name: str) -> SimPeer:
        return SimPeer(self, name, self.staleness)

    def join(self, name: str = "", key: str = "") -> SimPeer:
        peer = self.new_peer(name or f"p{len(self.peers)}")
        peer.key = key or peer.key
        self.peers.append(peer)
        peer.dial()
        return peer

    def connect(self, peer: SimPeer) -> Cable:
        self._cables += 1
        cable = Cable(b"%s.%d" % (peer.key.encode(), self._cables))
        self.cables[cable.name] = (cable, peer)
        return cable

    def up(self, peer: SimPeer) -> None:
        """The hub hears the next message of this peer."""
        if peer.cable is not None and peer.cable.up:
            message = decode_to_hub(peer.cable.up.popleft())
            self.act(self.hub.receive(peer.cable.name, message, self.now))

    def down(self, peer: SimPeer) -> None:
        if peer.cable is not None and peer.cable.down:
            message = decode_to_peer(peer.cable.down.popleft())
            peer.say(peer.state.receive(message, self.now))

    def chat(self, peer: SimPeer) -> None:
        """All that the two have to say to each other, while the peer's training thread is busy."""
        for _ in range(20):
            self.up(peer)
            self.down(peer)

    def cut(self, peer: SimPeer, *, noticed: bool = True) -> None:
        """The cable is pulled: what was under way is lost. The peer notices; the hub at once, or when it next
        sends."""
        if peer.cable is not None:
            cable, peer.cable = peer.cable, None
            del self.cables[cable.name]
            peer.state.disconnected()
            if noticed:
                self.act(self.hub.lost(cable.name, self.now))

    def kill(self, peer: SimPeer, *, noticed: bool = True) -> None:
        self.cut(peer, noticed=noticed)
        peer.dead = True

    def leave(self, peer: SimPeer) -> None:
        welcome = peer.state.welcome
        if welcome is not None and self.hub.uploads.refusal(welcome.session, "handoff/0", 100) is None:
            self.apply(lambda _: self.hub.uploads.handed_over(welcome.session, 100))
        peer.say(peer.state.leave(messages.Leave("enough")))

    def job(self) -> None:
        """The commit thread does its next job."""
        if not self.jobs:
            return
        job = self.jobs.popleft()
        self._do(job)
        if self.extensions:  # as the shell tells of each change
            self.apply(lambda _: self.hub.rounds.wrote(len(self.books.rounds)))

    def _do(self, job: do.Action) -> None:
        if isinstance(job, do.Lease):
            self.books.sessions |= {new.session: dc_replace(new, leases={}) for new in job.sessions}
            for session, ids in job.leases.items():
                if session in self.books.sessions:
                    self.books.sessions[session].leases[job.round] = ids
            self.apply(lambda _: self.hub.rounds.leased(job.round))
        elif isinstance(job, do.Commit):
            self.commit(job)
        elif isinstance(job, do.FindFingerprint):
            self.apply(lambda now: self.hub.rounds.fingerprinted(job.round, 1000 + job.round, "", now))
        elif isinstance(job, do.RecordFingerprint):
            if job.round < len(self.books.rounds):
                row = dc_replace(self.books.rounds[job.round], fingerprint=job.fingerprint)
                self.books.rounds[job.round] = row
        elif isinstance(job, do.RecordStanding):
            self.books.peers[job.known.key] = job.known
        elif isinstance(job, do.SendDurably):
            self.said.append(job.message)
        elif isinstance(job, do.Forget):
            self.books.sessions.pop(job.session, None)
        elif isinstance(job, do.GiveBack):
            if job.session in self.books.sessions:
                self.books.sessions[job.session].leases.pop(job.round, None)
        elif isinstance(job, do.RecordEvaluation):
            self.books.evaluation = job.row

    def commit(self, job: do.Commit) -> None:
        assert job.round == len(self.books.rounds), "rounds follow each other"
        assert list(job.claims) == sorted(job.claims, key=lambda c: c.peer)
        rejected = job.refused | {c.peer: "unusable" for c in job.claims if c.peer == self.reject}
        good = [c for c in job.claims if c.peer not in rejected]
        for claim in good:
            ids = sorted(i for runs in claim.leases.values() for i in sample_ids(runs))
            assert sorted(self.packets[claim.session, job.round]) == ids, (
                "what is counted is what was trained"
            )
            for runs in claim.leases.values():
                self.books.counted.put(runs)  # raises where a sample is counted twice
            for lease in claim.leases:
                if claim.session in self.books.sessions:
                    self.books.sessions[claim.session].leases.pop(lease, None)
            self.trained += ids
        if good:
            for i, row in enumerate(self.books.rounds):
                if not row.fingerprint:
                    self.books.rounds[i] = dc_replace(row, fingerprint=job.fingerprints.get(row.round, 0))
            names = tuple(c.peer for c in good)
            self.books.rungs += [job.rung] if job.rung is not None else []
            self.books.rounds.append(
                RoundRow(
                    job.round,
                    job.step,
                    0.0,
                    0.0,
                    job.fingerprints.get(job.round, 0),
                    job.members,
                    names,
                    None,
                    0,
                    length=9,
                    sha256=b"\1" * 32,
                )
            )
        if keys := {c.peer: c.key for c in good if c.leases}:
            self.books.keys.append((job.members, keys))
        sizes, tokens = {c.peer: 9 for c in good}, {c.peer: TOKENS for c in good}
        done = do.CommitDone(
            round=job.round,
            size=9 if good else 0,
            sha256=b"\1" * 32,
            packets=sizes,
            tokens=tokens,
            weights={peer: float(count) for peer, count in tokens.items()},
            rejected=rejected,
        )
        self.apply(lambda now: self.hub.rounds.committed(done, now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.hub.tick(self.now))

    def restart_hub(self) -> None:
        """kill -9 of the hub: its memory, its cables and the jobs not done are gone, the ledger is not."""
        for peer in self.peers:
            self.cut(peer, noticed=False)
        self.jobs.clear()
        self.packets.clear()
        self._told = len(self.events)
        self.hub = HubState(self.settings, TOKEN, STOP, self.now, self.books.recovered(), self.extensions)

    # ---- between -------------------------------------------------------------------------------------------

    def apply(self, change: Callable[[float], object]) -> None:
        """Change the hub's state, as its shell does it."""
        self.act(self.hub.apply(change, self.now))

    def act(self, actions: list[do.Action]) -> None:
        lost: list[bytes] = []
        for action in actions:
            if isinstance(action, do.Send):
                end = self.cables.get(action.conn)
                if end is not None:
                    end[0].down.append(encode(action.message))
                else:
                    lost.append(action.conn)
            elif isinstance(action, do.Tell):
                ended = len(self.events) > self._told and isinstance(self.events[-1], RunEnded)
                assert not ended, f"RunEnded is the last event, and not {action.event}"
                self.events.append(action.event)
            elif not isinstance(action, do.End):
                self.jobs.append(action)
        for conn in lost:  # after all that was to be said and done, as the shell does it
            self.act(self.hub.lost(conn, self.now))
        assert sum(self.hub.rounds.leases.places()) == self.settings.samples
        assert self.hub.deadline() > self.now - 1e6

    @property
    def ended(self) -> RunEnded | None:
        return next((e for e in self.events if isinstance(e, RunEnded)), None)

    def step(self) -> None:
        """Everybody does what they can, once."""
        for peer in self.peers:
            peer.dial()
            for _ in range(8):
                if peer.cable is None or not (peer.cable.up or peer.cable.down):
                    break
                self.up(peer)
                self.down(peer)
            peer.work()
            self.up(peer)
        self.job()

    def settle(self, steps: int = 2000) -> RunEnded:
        """Let the run end without further faults. Time passes only as far as the hub asks for."""
        for _ in range(steps):
            if self.hub.rounds.phase is Phase.ENDED:
                break
            before = self.fingerprint()
            self.step()
            if self.fingerprint() == before:
                self.pass_time(min(1.0, max(0.001, self.hub.deadline() - self.now)))
        assert self.ended is not None, (
            f"stuck in {self.hub.rounds.phase} of round {self.hub.rounds.round}: {self.hub.rounds.exchange}"
        )
        for _ in range(20):
            self.job()
        return self.ended

    def fingerprint(self) -> object:
        queues = [(len(p.cable.up), len(p.cable.down)) if p.cable else None for p in self.peers]
        states = [(p.state.link, p.round is not None, p.uploaded, len(p.pending)) for p in self.peers]
        return self.hub.rounds.phase, self.hub.rounds.round, len(self.jobs), queues, states
