"""A run with a standby has one history, whatever dies, is cut off, wakes up, and in which order."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_swarm import STOP, TOKEN, Books, SimPeer, SimSwarm
from toy_swarm import toy_settings

from cocktail_cli.extensions.standby import StandbyPeer
from cocktail_cli.extensions.standby.bodies import NAME, Follow, Grown, Stored
from cocktail_cli.extensions.standby.hub import Replication
from cocktail_cli.extensions.standby.ledger_copy import VOTING_ROUNDS
from cocktail_cli.extensions.standby.succession import Succession
from transport import actions as do
from transport.peer import Elsewhere, PeerState
from transport.protocol import messages
from transport.scheduling import CommitSeconds, Phase

PEERS = ("ann", "bob", "cyd")
ACT = st.one_of(
    st.tuples(st.just("work"), st.integers(1, 30)),
    st.tuples(st.sampled_from(["away", "back"]), st.sampled_from(PEERS)),
    st.tuples(st.sampled_from(["standby away", "standby back", "order"]), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 6.0])),
    st.tuples(st.just("wake"), st.just(0)),
)


def voters_in(books: Books) -> frozenset[str]:
    """Keys of the members of the newest counting round of which a recent round counted samples."""
    members, _ = books.keys[-1] if books.keys else ((), {})
    recent = [pair for _, keys in books.keys[-VOTING_ROUNDS:] for pair in keys.items()]
    return frozenset(key for peer, key in recent if peer in members)


class Follower(SimPeer):
    """A standby's session: its disk is a copy of the hub's books, as of the newest Grown that it obeyed."""

    rounds = 0
    voters: frozenset[str] = frozenset()
    term = 0

    def __init__(self, swarm: StandbySwarm) -> None:
        super().__init__(swarm, "standby", 1)
        follow = msgspec.msgpack.encode(Follow("b:2", STOP))
        hello = messages.Hello(messages.PROTOCOL, TOKEN, swarm.settings.run, "standby", extra={NAME: follow})
        self.state = PeerState(hello)
        self.state.listen({NAME: self.hear})
        self.grown: Grown | None = None
        self.number = 0

    def hear(self, body: bytes) -> None:
        self.grown = msgspec.msgpack.decode(body, type=Grown)

    def work(self) -> None:
        grown = self.grown
        if self.cable is not None and grown is not None and grown.number != self.number:
            assert isinstance(self.swarm, StandbySwarm)
            self.number = grown.number
            self.rounds = len(self.swarm.books.rounds)
            self.voters = voters_in(self.swarm.books)
            stored = msgspec.msgpack.encode(Stored(grown.number, self.rounds))
            self.say([messages.Extension(NAME, stored)])


class Line:
    """A peer's link, as its part of the standby uses it."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer = peer

    @property
    def elsewhere(self) -> Elsewhere | None:
        return self.peer.state.elsewhere

    @elsewhere.setter
    def elsewhere(self, place: Elsewhere | None) -> None:
        self.peer.state.elsewhere = place

    def say(self, name: str, body: bytes) -> None:
        self.peer.say([messages.Extension(name, body)])


class Process:
    """The hub's process: it writes and asks nothing."""

    recorded = ""

    def __init__(self, swarm: StandbySwarm) -> None:
        self.voters = lambda: voters_in(swarm.books)
        self.record = self.ask = lambda *_: None


class StandbySwarm(SimSwarm):
    """A hub, peers, a standby, and what each of them can reach."""

    def __init__(self, durability: str, *, late: bool = False) -> None:
        lag = 0 if durability == "replicated" else 1
        super().__init__(
            extensions=[lambda hub: Replication(hub, lag, Process(self))],  # type: ignore[arg-type]
            settings=toy_settings(
                samples=4000,
                global_batch=4,
                eval=False,
                start_timeout=1e6,
                peer_timeout=90.0,
                lease_timeout=1e6,
            ),
        )
        self.succession = Succession(self.settings.run, TOKEN)
        self.succession.hub(0.0, self.now)
        self.there: dict[str, bytes] = {}  # peers at the standby
        self.taken: int | None = None  # rounds of the copy with which the standby took over
        self.announced = 0
        self.ordered = False  # the takeover, by the host
        self.voting: dict[str, StandbyPeer] = {}
        self.standby = Follower(self)
        self.assured: list[bool] = []  # whether each session knew of the standby when the host was told so
        if not late:
            self.follow()
            self.rest()
        for name in PEERS:
            self.join(name)

    def follow(self) -> None:
        """The standby finds the hub for the first time."""
        self.peers.append(self.standby)
        self.standby.dial()

    @property
    def replication(self) -> Replication:
        (found,) = self.hub.rounds.extensions
        assert isinstance(found, Replication)
        return found

    def new_peer(self, name: str) -> SimPeer:
        peer = super().new_peer(name)
        self.voting[name] = StandbyPeer(Line(peer))
        peer.state.listen({NAME: self.voting[name].received})
        return peer

    def commit(self, job: do.Commit) -> None:
        before = len(self.books.rounds)
        super().commit(job)
        if len(self.books.rounds) > before:
            self.replication.counted(job.round, (), CommitSeconds(0.0, 0.0))

    @property
    def alone(self) -> bool:
        """Tell whether the hub has gone on without its standby."""
        return self.replication.standby is None and self.hub.rounds.phase is not Phase.ENDED

    def rest(self, steps: int = 6) -> None:
        for _ in range(steps):
            self.step()

    def act(self, actions: list[do.Action]) -> None:
        for action in actions:
            if isinstance(action, do.Send) and isinstance(action.message, messages.Committed):
                conn = self.cables.get(action.conn)
                if conn is not None and conn[1] is not self.standby:
                    self.announced = max(self.announced, action.message.round + 1)
            if isinstance(action, do.Tell) and "all peers know" in getattr(action.event, "message", ""):
                known = {p.state.hello.name for p in self.peers if p.state.elsewhere is not None}
                self.assured.append(known >= {s.name for s in self.hub.members if s.role != "standby"})
        super().act(actions)

    # ---- what may happen -----------------------------------------------------------------------------------

    def half_open(self, name: str) -> None:
        """A peer's cable brings nothing more either way, and neither end notices yet."""
        peer = self.peer(name)
        peer.cable, peer.dead = None, True
        peer.state.disconnected()

    def peer(self, name: str) -> SimPeer:
        return next(peer for peer in self.peers if peer.state.hello.name == name)

    def away(self, name: str) -> None:
        """A peer loses the hub, and dials the standby if it knows one."""
        peer = self.peer(name)
        if name in self.there or peer.dead:
            return
        self.cut(peer, noticed=False)
        peer.dead = True  # for the hub
        if (elsewhere := peer.state.elsewhere) is not None:
            elsewhere.dialled()
            self.there[name] = conn = f"{name}.1".encode()
            assert peer.state.welcome is not None
            resume = messages.Resume(messages.PROTOCOL, self.settings.run, name, "s")
            self.succession.receive(conn, resume, self.now)

    def back(self, name: str) -> None:
        """It finds the hub again, unless the standby is its hub now."""
        if self.taken is None or name not in self.there:
            self.there.pop(name, None)
            self.peer(name).dead = False

    def cut_standby(self) -> None:
        self.cut(self.standby, noticed=True)
        self.standby.dead = True
        self.succession.hub(inf, self.now)

    def restore_standby(self) -> None:
        if self.taken is None:
            self.standby.dead = False
            self.standby.dial()
            self.now += 0.01  # the peers that are there came before
            for conn, _ in self.succession.hub(0.0, self.now):
                self.there.pop(conn.partition(b".")[0].decode(), None)
                self.peer(conn.partition(b".")[0].decode()).dead = False

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.pass_time(0.5)
            for conn in self.there.values():
                self.succession.receive(conn, messages.Pong(self.now), self.now)
            self.succession.tick(self.now)
            self.succession.voters = self.standby.voters
            self.succession.synced = self.standby.rounds > 0
            if self.taken is None and self.succession.elected(self.now):
                self.take_over()
            self.step()

    def wake(self) -> None:
        """The old hub reaches the standby's machine again, and is told its term."""
        self.apply(lambda _: self.replication.visited(1 << 20))

    def take_over(self) -> None:
        self.cut_standby()
        self.taken = self.standby.rounds


@example("replicated", [("work", 5), ("order", 0), ("wake", 0), ("wait", 2.0)])
@example("asynchronous", [("order", 0), ("wait", 6.0), ("wait", 6.0)])
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["replicated", "asynchronous"]), st.lists(ACT, max_size=25))
def test_no_kill_and_no_partition_makes_a_second_history(
    durability: str, acts: list[tuple[str, object]]
) -> None:
    """What the old hub announces, before and after a takeover, the standby has: all rounds where the run is
    replicated, all but one where it is asynchronous.

    Except where the host orders a takeover out of sight of an asynchronous hub that lives: it goes on alone,
    with the promises of a majority of its peers, and none of its peers dials the standby.
    """
    swarm = StandbySwarm(durability)
    for act, value in acts:
        if act == "work":
            swarm.rest(int(str(value)))
        elif act == "away":
            swarm.away(str(value))
        elif act == "back":
            swarm.back(str(value))
        elif act == "standby away":
            swarm.cut_standby()
        elif act == "standby back":
            swarm.restore_standby()
        elif act == "wait":
            swarm.wait(float(str(value)))
        elif act == "order" and swarm.taken is None and swarm.replication.standby:
            swarm.take_over()
            swarm.ordered = True
        elif act == "wake" and swarm.taken is not None:
            swarm.wake()
            if swarm.replication.standby is not None:
                assert swarm.hub.rounds.phase is Phase.ENDED
    swarm.rest(20)
    if swarm.ordered and swarm.alone:
        assert durability == "asynchronous"
        assert all(peer.state.elsewhere is None for peer in map(swarm.peer, PEERS) if not peer.dead)
    elif swarm.taken is not None:
        lag = 0 if durability == "replicated" else 1
        assert swarm.announced <= swarm.taken + lag


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["half-open", "back"]), st.sampled_from(PEERS), st.integers(0, 3))),
    st.integers(0, 8),
)
def test_a_host_hears_that_its_machine_may_be_lost_once_every_peer_knows_of_the_standby(
    acts: list[tuple[str, str, int]], begins: int
) -> None:
    """Whenever lines are cut while the standby becomes whole: a peer that has a session then finds it."""
    swarm = StandbySwarm("asynchronous", late=True)
    swarm.rest(20)
    for number, (act, name, seconds) in enumerate([*acts, *[("back", name, 0) for name in PEERS]]):
        if number == min(begins, len(acts)):
            swarm.follow()
        if act == "back":
            swarm.peer(name).dead = False
        elif not swarm.peer(name).dead:
            swarm.half_open(name)
        for _ in range(seconds):
            swarm.rest(1)
            swarm.pass_time(1.0)
    for _ in range(5):
        swarm.rest()
        swarm.pass_time(1.0)

    assert swarm.assured == [True]


@pytest.mark.parametrize("returns", [True, False])
def test_a_host_waits_for_a_peer_whose_session_ended_before_it_knew_of_the_standby(returns: bool) -> None:
    """The host waits for such a peer for `peer_timeout`: it might come back to a hub that is gone."""
    swarm = StandbySwarm("asynchronous", late=True)
    swarm.rest(20)
    swarm.half_open("ann")
    swarm.follow()
    swarm.rest()
    session = next(s for s in swarm.hub.members if s.name == "ann")
    swarm.hub.members.kick(session, "session", "delivered nothing")
    for _ in range(10):
        swarm.rest()
        swarm.pass_time(1.0)
    assert swarm.assured == []
    if returns:
        swarm.peer("ann").dead = False
    for _ in range(20 if returns else 90):
        swarm.rest(2)
        swarm.pass_time(1.0)

    assert swarm.assured == [True]
    assert (swarm.peer("ann").state.elsewhere is not None) is returns


@pytest.mark.parametrize(("durability", "lag"), [("replicated", 0), ("asynchronous", 1)])
def test_a_hub_without_its_standby_stops_and_goes_on_when_it_is_back(durability: str, lag: int) -> None:
    swarm = StandbySwarm(durability)
    swarm.rest(40)
    before = swarm.announced
    assert before > 2
    swarm.cut_standby()
    for name in PEERS:
        swarm.voting[name].voted = 99  # none promises anything
    swarm.wait(120)
    assert swarm.announced <= swarm.standby.rounds + lag
    stopped = swarm.announced
    swarm.restore_standby()
    swarm.rest(60)
    assert swarm.announced > stopped + 2


def test_an_asynchronous_hub_goes_on_alone_once_a_majority_promises_not_to_elect_the_standby() -> None:
    swarm = StandbySwarm("asynchronous")
    swarm.rest(40)
    swarm.cut_standby()
    swarm.wait(120)
    alone = swarm.announced
    assert alone > swarm.standby.rounds + 3
    for name in PEERS:
        assert swarm.peer(name).state.elsewhere is None, "nobody dials the standby any more"
        swarm.away(name)
    assert not swarm.there


def test_a_standby_is_elected_by_a_majority_of_those_whose_samples_counted_and_only_without_the_hub() -> None:
    state = Succession("a-run", "token")
    state.synced, state.voters = True, frozenset({"ann", "bob", "cyd"})
    resume = messages.Resume(messages.PROTOCOL, "a-run", "ann", "s")
    state.hub(0.5, 0.0)
    assert isinstance(state.receive(b"ann.1", resume, 0.0)[0][1], messages.Wait)
    assert not state.hub(0.6, 0.5), "the hub was not heard since this peer came"
    assert isinstance(state.hub(0.1, 1.0)[0][1], messages.Refused)
    state.hub(inf, 1.0)
    for conn in (b"ann.1", b"ann.2", b"eve.1"):  # one identity twice, and a stranger
        assert isinstance(state.receive(conn, resume, 3.0)[0][1], messages.Wait)
    assert not state.elected(4.0)
    state.receive(b"bob.1", resume, 4.0)
    assert state.elected(4.5)
    assert not state.elected(9.0), "answers to pings are votes"
    state.receive(b"ann.1", resume, 8.0)
    assert state.hub(0.5, 9.0)
    assert not state.waiting


@given(stall=st.floats(0.0, 4.8), came=st.floats(0.0, 4.8))
def test_a_hub_that_stalls_for_less_than_five_seconds_keeps_its_run(stall: float, came: float) -> None:
    """However early the peers doubt it: all of them may wait at the standby, which decides."""
    state = Succession("a-run", "token")
    state.synced, state.voters = True, frozenset({"ann", "bob", "cyd"})
    resume = messages.Resume(messages.PROTOCOL, "a-run", "ann", "s")
    for tick in range(100):
        now, heard = 0.1 * tick, 0.1 * tick > stall
        sent = state.hub(0.05 if heard else now, now)
        if now >= came and not state.waiting and not heard:
            for conn in (b"ann.1", b"bob.1", b"cyd.1"):
                state.receive(conn, resume, now)
        for conn in state.waiting:
            state.receive(conn, messages.Pong(now), now)
        assert not state.elected(now)
    assert not state.waiting, f"sent back: {sent}"


def test_a_hub_that_is_gone_is_replaced_five_seconds_after_it_was_heard() -> None:
    state = Succession("a-run", "token")
    state.synced, state.voters = True, frozenset({"ann", "bob", "cyd"})
    elected = []
    for tick in range(100):
        now = 0.1 * tick
        state.hub(now, now)
        if tick == 40:
            for conn in (b"ann.1", b"bob.1"):
                state.receive(conn, messages.Resume(messages.PROTOCOL, "a-run", "ann", "s"), now)
        for conn in state.waiting:
            state.receive(conn, messages.Pong(now), now)
        elected += [now] * state.elected(now)
    assert 4.9 < elected[0] < 5.2
