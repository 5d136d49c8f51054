import json
from collections import Counter
from functools import partial
from math import ceil
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_swarm import STOP, TOKEN, SimSwarm
from test_hub_state import drawn_history, lives_through
from toy_swarm import toy_settings

from cocktail_cli.extensions.turns.hub import AHEAD, FEWEST, NEAR, SHORTEST, Turns
from transport.hub import HubState
from transport.membership import Session, State
from transport.protocol import events


class Line:
    """Peers that wait, catch up when called, compute a lease in each round of their turn, and deliver it.
    Sessions and their order are drawn anew by `shuffle`; names are what counts."""

    def __init__(self, peers: int, places: int, rounds: int, shuffle: int = 0, min_peers: int = 1) -> None:
        self.random, self.places, self.run = Random(shuffle), places, rounds
        usual = toy_settings(samples=8 * rounds, global_batch=8, min_peers=min_peers)
        (turns,) = HubState(usual, TOKEN, STOP, 0.0, None, [partial(Turns, places=places)]).rounds.extensions
        assert isinstance(turns, Turns)
        self.turns = turns
        self.sessions = [self.session(f"p{number:03}") for number in range(peers)]
        self.holding = set[str]()  # sessions that have computed a lease of the last round
        self.called = list[Session]()
        self.packets = Counter[str]()  # fetched by each peer
        self.rounds: list[list[str]] = []

    def session(self, name: str) -> Session:
        return Session(f"{self.random.random()}", name, name, "", b"", State.READY, 0.0, 0.0)

    @property
    def bound(self) -> int:
        """Rounds within which each peer has its turn."""
        others = max(self.places, len(self.sessions) - self.places // 2)
        length = max(SHORTEST, self.run * self.places // others)
        return length * (ceil(len(self.sessions) / self.places) + 2)

    def round(self) -> list[Session]:
        """One round."""
        number = len(self.rounds)
        for session in self.called:
            self.fetch(session, number)
            self.turns.caught_up(session)
        self.random.shuffle(self.sessions)
        had = {session.id: session.at for session in self.sessions}
        chosen = self.turns.members(number, self.sessions, self.holding, len(self.sessions))
        self.called = self.turns.to_call(number, self.sessions)
        for session in chosen:
            lacked, session.at = number - had[session.id], had[session.id]
            assert lacked <= NEAR or number == 0, f"{session.name} lacks {lacked} packets"
            self.fetch(session, number)
            session.accepted += session.id in self.holding
        assert len(chosen) <= self.places
        assert self.holding <= {session.id for session in chosen}, "who holds a lease delivers it"
        self.holding = {session.id for session in chosen} - self.turns.last
        self.rounds.append([session.name for session in chosen])
        return chosen

    def fetch(self, session: Session, to: int) -> None:
        self.packets[session.name] += to - session.at
        session.at = to


sizes = st.tuples(st.integers(1, 5), st.integers(0, 12)).map(lambda one: (one[0], sum(one)))


@settings(max_examples=15)
@given(sizes, st.integers(8, 60))
def test_nobody_who_follows_waits_longer_than_the_turns_of_all_and_who_holds_a_lease_delivers_it(
    size: tuple[int, int], rounds: int
) -> None:
    places, peers = size
    line = Line(peers, places, rounds)
    line.round()
    since = {session.name: 0 for session in line.sessions}
    for number in range(1, 2 * line.bound):
        for session in line.round():
            since[session.name] = number
        late = {name: number - last for name, last in since.items() if number - last > line.bound}
        assert not late


@settings(max_examples=8)
@given(sizes, st.integers(1, 1000))
def test_members_follow_from_names_recipe_and_rounds_not_from_the_order_in_which_peers_came(
    size: tuple[int, int], shuffle: int
) -> None:
    one, other = Line(size[1], size[0], 40), Line(size[1], size[0], 40, shuffle)
    for _ in range(60):
        one.round()
        other.round()

    assert one.rounds == other.rounds


def test_all_who_are_there_at_the_beginning_have_their_turn_before_the_run_is_over() -> None:
    line = Line(peers=64, places=8, rounds=320)
    for _ in range(320):
        line.round()

    assert len({name for members in line.rounds for name in members}) == 64
    assert all(len(members) == 8 for members in line.rounds), "no place is empty"


def test_places_change_hands_one_after_the_other_and_few_peers_catch_up_at_once() -> None:
    line = Line(peers=64, places=16, rounds=500)
    changes = []
    for number in range(400):
        line.round()
        if number:
            changes.append(len({*line.rounds[-1]} - {*line.rounds[-2]}))
        assert len(line.called) <= max(FEWEST, ceil(AHEAD * 16))

    assert max(changes) <= 2
    assert sum(changes) in range(40, 50), "16 in each 142 rounds"


def test_a_long_turn_costs_fewer_packets_than_members_drawn_for_each_round() -> None:
    """With 8 times as many peers as places. A member fetches packets of its turn and those it has missed."""
    line = Line(peers=64, places=8, rounds=320)
    for _ in range(320):
        line.round()

    assert sum(line.packets.values()) < 0.65 * 64 * 320


def test_a_peer_whose_updates_come_late_is_a_member_for_fewer_rounds() -> None:
    line = Line(peers=24, places=4, rounds=240)
    poor = {f"p{number:03}" for number in range(0, 24, 2)}
    had = Counter[bool]()
    for _ in range(1000):
        for session in line.round():
            had[session.name in poor] += 1
            if session.name in poor:  # three of four are missed
                session.accepted, session.left_out = 0, 3

    assert 0.1 * had[False] < had[True] < 0.6 * had[False], "each has its turn"


def test_with_fewer_peers_than_places_all_are_members_of_every_round() -> None:
    line = Line(peers=5, places=8, rounds=50)

    assert all(len(line.round()) == 5 for _ in range(50))


def swarm_of(peers: int, places: int, **changes: object) -> SimSwarm:
    settings = toy_settings(**({"samples": 240, "peer_timeout": 90.0} | changes))
    swarm = SimSwarm(1, settings, extensions=[partial(Turns, places=places)])
    for _ in range(peers):
        swarm.join()
    return swarm


def test_a_run_of_which_each_round_samples_some_counts_every_sample_once_and_all_take_part() -> None:
    """Real hub and peers' state machines, each message encoded, one update in flight."""
    swarm = swarm_of(9, 3, eval=True, eval_every=5)
    ended = swarm.settle()
    opened = [event for event in swarm.events if isinstance(event, events.RoundOpened)]

    assert ended.finished
    assert sorted(swarm.trained) == list(range(240))
    assert all(len(event.members) <= 3 for event in opened)
    assert {name for event in opened for name in event.members} == {f"p{i}" for i in range(9)}
    assert len(opened) <= 30 + 3, "farewells cost no rounds of their own"


def test_a_restarted_hub_goes_on_with_the_members_of_the_last_round() -> None:
    swarm = swarm_of(9, 3)
    while len(swarm.books.rounds) < 6:
        swarm.step()
    before = set(swarm.books.rounds[-1].members)
    swarm.restart_hub()
    count = len(swarm.books.rounds)
    ended = swarm.settle()

    assert ended.finished
    assert sorted(swarm.trained) == list(range(240))
    assert len(before & set(swarm.books.rounds[count].members)) >= 2


def test_a_round_is_not_closed_by_less_than_half_of_those_sampled_before_the_longest_wait_is_over() -> None:
    swarm = swarm_of(8, 4, min_peers=2, step_timeout=60.0, ping_s=200.0)
    while len(swarm.books.rounds) < 5:
        swarm.step()
    members = set(swarm.hub.rounds.exchange.members.values()) if swarm.hub.rounds.exchange else set()
    silent = sorted(members)[:3]
    for peer in swarm.peers:
        peer.dead = peer.state.hello.name in silent
    swarm.step()
    rounds = len(swarm.books.rounds)
    for _ in range(40):
        swarm.pass_time(1.0)
        swarm.step()
    waited = len(swarm.books.rounds) - rounds
    for _ in range(40):
        swarm.pass_time(1.0)
        swarm.step()

    assert len(silent) == 3
    assert waited <= 1
    assert len(swarm.books.rounds) > rounds + 1, "the longest wait is over"


def test_whatever_happens_each_sample_is_counted_once_where_one_or_two_are_members() -> None:
    for seed in range(300):
        random = Random(seed)
        taking_turns = partial(Turns, places=random.choice([1, 2]))
        swarm = SimSwarm(random.choice([0, 1, 3]), extensions=[taking_turns])
        lives_through(swarm, random.randint(1, 4), drawn_history(random), f"seed {seed}")


def test_a_peer_that_waits_is_in_line_in_the_status() -> None:
    swarm = swarm_of(5, 2)
    while len(swarm.books.rounds) < 5:
        swarm.step()
    peers = json.loads(swarm.hub.status(swarm.now))["peers"]
    waiting = [peer for peer in peers if peer["state"] == "in line"]

    assert sorted(peer["turn"] for peer in waiting) == list(range(1, 1 + len(waiting)))
    assert len(waiting) >= 2
    assert {peer["turn"] for peer in peers if peer not in waiting} == {None}
