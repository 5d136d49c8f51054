"""Peers that aggregate shards, over a whole hub without sockets: each update is in the run once."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from errno import ENOSPC
from functools import partial
from os import strerror
from pathlib import Path
from typing import cast

import msgspec
import pytest
from toy_aggregators import (
    SHARDS,
    AggregatingPeer,
    ShardedSwarm,
    ShardedWork,
    ToyHalf,
    links,
    sharded_settings,
)
from toy_swarm import trained
from waiting import until

from cocktail_cli.extensions.aggregators import begin
from cocktail_cli.extensions.aggregators.bodies import NAME, AggregatorInfo, Done, Order, Unmoved, digest_of
from cocktail_cli.extensions.aggregators.hub import ShardCoordinator
from cocktail_cli.extensions.aggregators.residual_handoffs import HandoffStore, PendingHandoff
from cocktail_cli.extensions.aggregators.shard_placement import assign
from cocktail_cli.extensions.aggregators.shard_round import ShardBarrier, ShardRound
from transport.actions import Abandoned, Tell
from transport.hub import HubState
from transport.ledger import Ledger
from transport.membership import Session
from transport.protocol import LedgerError, UpdateRejected, Warned, messages
from transport.scheduling import CommitSeconds, Exchange, Lines, Sums
from transport.transfer import ChunkBuffer, ObjectStore

# ---- assignment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_shard_has_one_aggregator_and_none_has_more_than_its_share(count: int) -> None:
    owned = assign(64, [f"peer-{i}" for i in range(count)])

    assert sorted(shard for mine in owned.values() for shard in mine) == list(range(64))
    assert max(map(len, owned.values())) <= -(-64 // count)


def test_the_assignment_does_not_depend_on_order() -> None:
    assert assign(16, ["ann", "bob", "cat"]) == assign(16, ["cat", "ann", "bob"])


def test_few_shards_move_when_an_aggregator_comes_or_goes() -> None:
    names = [f"peer-{i}" for i in range(8)]
    before, after = assign(64, names), assign(64, names[:-1])
    kept = sum(len(set(before[name]) & set(after.get(name, []))) for name in names[:-1])

    assert kept >= 0.75 * (64 - len(before[names[-1]]))


def test_the_hub_aggregates_all_shards_where_no_peer_can() -> None:
    assert assign(16, []) == {}


def test_a_handoff_is_gone_once_the_aggregators_of_all_its_shards_have_it(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        store = HandoffStore(ledger)
        number = store.add(PendingHandoff("ann", 0.5, frozenset(range(4))), b"what ann left")
        assert store.rows[number].shards == {0, 1, 2, 3}

        store.mark_merged({number: [0, 1], 99: [2]})
        assert store.rows[number].shards == {2, 3}
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        store = HandoffStore(ledger)
        [left] = store.rows.values()
        assert (left.peer, left.share, left.shards) == ("ann", 0.5, {2, 3})
        store.settle()
        assert store.packet(number) == b"what ann left"
        store.mark_merged({number: [2, 3]})
        store.settle()
        assert store.rows == {}
        assert list(store.folder.iterdir()) == []
        assert store.add(PendingHandoff("bob", 1.0, frozenset({0})), b"") > number, "numbers are given once"


def test_a_handoff_whose_packet_is_damaged_is_dropped_and_named(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        HandoffStore(ledger).add(PendingHandoff("cem", 0.5, frozenset({0, 1})), b"a residual")
        (tmp_path / "handoffs" / "1").write_bytes(b"another one")
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        state, _ = a_coordinator(store := HandoffStore(ledger), ShardedWork())

        assert store.rows == {}
        [told] = [action.event.message for action in state.tick(0.0) if isinstance(action, Tell)]
        lost = f"{tmp_path}/handoffs/1 is damaged or gone: what cem left to the aggregators is lost"
        assert told == lost
        assert store.add(PendingHandoff("dan", 0.5, frozenset({1})), b"another") == 2


def test_the_rows_of_handoffs_that_cannot_be_read_are_an_error_of_the_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        ledger.note(NAME, '{"rows": 3}')
        with pytest.raises(LedgerError, match="the handoffs in the ledger cannot be read"):
            HandoffStore(ledger)


# ---- state of the hub-------------------------------------------------------------------------------------


def a_round() -> ShardRound:
    """Round 3, in which ann aggregates all shards and bob is a member."""
    of = ShardRound(3, {"s-ann": "ann", "s-bob": "bob"}, (), {"s-ann": AggregatorInfo("ann", [0, 1])})
    of.parts["s-bob"] = {"ann": digest_of(b"new")}
    return of


def a_coordinator(store: HandoffStore, work: ShardedWork) -> tuple[HubState, ShardCoordinator]:
    extensions = [partial(begin, store, work, SHARDS, 0)]
    state = HubState(sharded_settings(), "token", "secret", 0.0, None, extensions)
    [coordinator] = state.rounds.extensions
    assert isinstance(coordinator, ShardCoordinator)
    return state, coordinator


class PartlyMerged:
    """Round 3 of a hub with a leaver's handoff that shard 0 has merged already; ann aggregates 0 and 1, bob
    2 and 3, the hub 4 and 5."""

    def __init__(self, ledger: Ledger, packet: bytes) -> None:
        self.work, self.warned = ShardedWork(), list[str]()
        store = HandoffStore(ledger)
        self.number = store.add(PendingHandoff("cat", 0.5, frozenset(range(SHARDS))), packet)
        store.mark_merged({self.number: [0]})
        members, hubs = {"s-ann": "ann", "s-bob": "bob"}, (4, 5)
        mine = {"s-ann": AggregatorInfo("ann", [0, 1]), "s-bob": AggregatorInfo("bob", [2, 3])}
        _, coordinator = a_coordinator(store, self.work)
        coordinator.now = self.round = ShardRound(3, members, hubs, mine)
        coordinator.closes(Exchange(3, 3, members, 8, 0.0, 9.0))
        self.work.half.own(hubs)
        self.work.packets = [b""] * 3
        self.objects = ObjectStore(ledger, self.work, lambda session, round: None)
        coordinator.serve(self.objects)
        coordinator.watch(cast("Lines", self))
        work = self.work
        self.sums = coordinator.sums(Sums(work.aggregate, work.inherit, work.committed))

    def fetched(self, session: str) -> bytes:
        data = self.objects.find(session, f"handoff/{self.number}").data
        assert isinstance(data, bytes)
        return data

    def hub_merges(self) -> None:
        self.sums.committed(3, b"[3, [], []]")

    def apply(self, change: Callable[[float], object]) -> None:
        change(0.0)

    def later(self, job: Callable[[], object]) -> None:
        job()

    def warn(self, peer: str, message: str) -> None:
        self.warned.append(message)

    def fail(self, error: Exception, reason: str, exit_code: int) -> None:
        raise error


def test_a_shard_merges_a_handoff_once_though_others_still_lack_it(tmp_path: Path) -> None:
    """Shards whose aggregator was lost stay behind the others; they may go to one that has merged its own.
    So each aggregator gets what its shards lack, and a handoff goes over the hub's line once in all."""
    residual = {str(shard): [shard] * 1000 for shard in range(SHARDS)}
    with Ledger(tmp_path, run="toy-run", samples=9) as ledger:
        hub = PartlyMerged(ledger, json.dumps(residual).encode())
        parts = {session: hub.fetched(session) for session in hub.round.aggregators}
        hub.hub_merges()

        assert sorted(json.loads(parts["s-ann"])) == ["1"]
        assert sorted(json.loads(parts["s-bob"])) == ["2", "3"]
        assert {shard for shard, rounds in hub.work.half.errors.items() if rounds} == {4, 5}
        assert sum(map(len, parts.values())) <= 0.51 * len(json.dumps(residual)), "three of six shards"


def test_nobody_but_its_aggregators_may_fetch_a_handoff(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="toy-run", samples=9) as ledger:
        hub = PartlyMerged(ledger, b"{}")
        for name in (f"handoff/{hub.number}", f"handoff/{hub.number + 1}"):
            with pytest.raises(KeyError):
                hub.objects.find("s-eve", name)


def test_a_handoff_of_noise_costs_no_round(tmp_path: Path) -> None:
    """A leaver may upload anything. Aggregators get it, find that it does not decode, and go on."""
    with Ledger(tmp_path, run="toy-run", samples=9) as ledger:
        hub = PartlyMerged(ledger, b"\x00noise")
        hub.work.restricted = refused  # type: ignore[method-assign]

        assert hub.fetched("s-ann") == b"\x00noise"
        hub.hub_merges()
        assert hub.warned == ["its handoff cannot be used: not a packet"]


def refused(peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
    raise UpdateRejected(peer, "not a packet")


def test_a_stale_part_is_not_the_one_that_was_reported() -> None:
    """The aggregator has the part that bob sent before the round was reopened, or in another session."""
    of = a_round()
    of.delivered["s-ann", "s-bob"] = digest_of(b"old")
    assert not of.whole("s-bob")

    of.at_hub["s-ann", "s-bob"] = digest_of(b"new")
    assert of.whole("s-bob")
    of.parts["s-bob"] = {"ann": digest_of(b"new"), "cat": digest_of(b"old")}
    assert not of.whole("s-bob"), "cat was an aggregator before the restart"
    del of.parts["s-bob"]
    assert not of.whole("s-bob"), "it has reported no part"


def test_an_aggregator_that_is_lost_after_its_packet_came_has_done_its_part(tmp_path: Path) -> None:
    with Ledger(tmp_path, run="toy-run", samples=9) as ledger:
        _, coordinator = a_coordinator(HandoffStore(ledger), ShardedWork())
        coordinator.now = a_round()
        coordinator.now.lost.add("s-ann")

        def unmoved(moved: dict[str, str]) -> list[str]:
            coordinator.moved = moved
            bodies = coordinator.counted(3, (), CommitSeconds(0.0, 0.0))
            assert bodies.keys() == {"s-ann", "s-bob"}
            return msgspec.msgpack.decode(bodies["s-bob"], type=Unmoved).aggregators

        assert unmoved({"s-ann": "digest"}) == []
        assert unmoved({}) == ["ann"]


def test_a_new_session_may_hand_over_error_feedback_of_the_old_one(tmp_path: Path) -> None:
    hello = messages.Hello(messages.PROTOCOL, "token", "toy-run", "ann")
    with Ledger(tmp_path, run="toy-run", samples=9) as ledger:
        state, coordinator = a_coordinator(HandoffStore(ledger), ShardedWork())

        def begun(conn: bytes) -> Session:
            state.receive(conn, hello, 0.0)
            session = state.members.by_conn(conn)
            assert session is not None
            return session

        def may_hand_over(session: Session) -> bool:
            return state.uploads.refusal(session.id, "error/1", 1) is None

        old = begun(b"a-key.1")
        coordinator._aggregated[old.id] = {1, 2}
        state.members.end(old, "connection lost", "lost")

        assert not may_hand_over(begun(b"other-key.2"))
        back = begun(b"a-key.3")
        assert may_hand_over(back)
        assert not may_hand_over(begun(b"a-key.4")), "once"


def test_the_barrier_skips_lost_aggregators_and_an_ending_run_abandons_its_round() -> None:
    gather = ShardBarrier(patience=60.0)
    gather.begin()
    gather.lose("s-ann", "gone")
    gather.ask(["s-ann"])

    assert gather.wait({}) == {}
    gather.ask(["s-bob"])
    gather.end()
    with pytest.raises(Abandoned):
        gather.wait({})


def test_an_aggregator_whose_bytes_move_is_awaited_beyond_the_patience_with_a_silent_one() -> None:
    gather, done = ShardBarrier(patience=0.2), threading.Event()
    gather.begin()
    attempt = gather.ask(["s-thin", "s-silent"])
    part = ChunkBuffer(1, hashlib.sha256(b"p").digest(), 1)
    part.add(0, b"p")

    def fetch_and_send() -> None:
        while "s-silent" not in gather.lost and not done.wait(0.01):
            gather.moves("s-thin")
        gather.came("s-thin", attempt, part)

    thread = threading.Thread(target=fetch_and_send)
    thread.start()
    found = gather.wait({})
    done.set()
    thread.join()

    assert found == {"s-thin": b"p"}
    assert gather.lost == {"s-silent": "nothing came of it for 0 s"}


# ---- runs --------------------------------------------------------------------------------------------------


def ended(work: ShardedWork, peers: list[AggregatingPeer], swarm: ShardedSwarm) -> None:
    """Assert that each sample is in the run once, each round of a shard in one error feedback or handoff."""
    assert trained(work) == list(range(swarm.settings.samples))
    where: dict[int, Counter[int]] = {shard: Counter() for shard in range(SHARDS)}
    for half in [work.half, *(peer.half for peer in peers)]:
        for shard, rounds in half.errors.items():
            where[shard].update(rounds)
    for number, left in swarm.coordinator.handoffs.items():
        for shard, rounds in json.loads(swarm.coordinator.store.packet(number)).items():
            if int(shard) in left.shards:
                where[int(shard)].update(rounds)
    for shard in range(SHARDS):
        moved = [round for round, those in enumerate(work.moved) if shard in those]
        assert where[shard] == Counter(moved), f"shard {shard}"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_update_goes_through_the_aggregators_once(count: int, tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=count), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob", "cat")[:count]]
        swarm.train(*peers)

        assert [peer.error for peer in peers] == [None] * count
        assert all(len(moved) == SHARDS for moved in work.moved)
        assert {len(peer.owned[-1]) for peer in peers} == {SHARDS // count}
        assert peers[0].packets == work.packets
        ended(work, peers, swarm)


def test_a_peer_that_cannot_aggregate_sends_its_parts(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=2), work, tmp_path) as swarm:
        aggregator, other = AggregatingPeer(swarm.able("ann")), AggregatingPeer(swarm.link("bob"))
        swarm.train(aggregator, other)

        assert aggregator.error is other.error is None
        assert aggregator.owned[-1] == list(range(SHARDS))
        assert not other.half.errors
        ended(work, [aggregator, other], swarm)


def test_an_aggregator_that_leaves_hands_over_its_error_feedback_and_costs_no_round(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=3, samples=120), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob", "cat")]

        def leave(opened: object) -> None:
            if len(peers[1].rounds) == 4:
                peers[1].link.leave_requested.set()
                until(lambda: swarm.coordinator._resigned)

        peers[1].before_exchange = leave
        swarm.train(*peers)

        assert [peer.error for peer in peers] == [None] * 3
        assert peers[1].handed_over
        assert peers[1].half.errors == {}
        assert {len(peer.owned[-1]) for peer in (peers[0], peers[2])} == {SHARDS // 2}
        assert all(len(moved) == SHARDS for moved in work.moved), "the hub knew in time"
        ended(work, peers, swarm)


def test_a_killed_aggregator_costs_one_round_of_its_shards_and_their_error_feedback(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=3, samples=120), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob", "cat")]

        def die(opened: object) -> None:
            if len(peers[1].rounds) == 4:
                peers[1].link.close()

        peers[1].before_exchange = die
        swarm.train(*peers)

        assert peers[0].error is peers[2].error is None
        short = [round for round, moved in enumerate(work.moved) if len(moved) < SHARDS]
        assert len(short) <= 1
        assert {len(peer.owned[-1]) for peer in (peers[0], peers[2])} == {SHARDS // 2}
        assert trained(work) == list(range(120))


def test_a_killed_aggregator_that_is_back_has_its_error_feedback(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=3, samples=120, grace_s=0.1), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob", "cat")]
        back: list[AggregatingPeer] = []

        def die(opened: object) -> None:
            if len(peers[1].rounds) == 4:
                peers[1].link.close()
                assert peers[1].owning is not None
                peers[1].owning.close()
                back.append(AggregatingPeer(swarm.able("bob"), half=peers[1].half))
                back[0].start()

        peers[1].before_exchange = die
        swarm.train(*peers)

        assert peers[0].error is peers[2].error is back[0].error is None
        assert back[0].owned[-1]
        until(lambda: back[0].half.pending is None)
        ended(work, [peers[0], *back, peers[2]], swarm)


def test_a_round_whose_aggregators_are_all_lost_counts_nothing_and_is_opened_again(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=2), work, tmp_path) as swarm:
        aggregator, other = AggregatingPeer(swarm.able("ann")), AggregatingPeer(swarm.link("bob"))
        swarm.coordinator.barrier.patience = 0.3
        put = aggregator.link.put

        def drop(name: str, data: bytes) -> bool | None:
            return None if name.startswith("shard/2/") else put(name, data)

        aggregator.link.put = drop  # type: ignore[method-assign, assignment]
        swarm.train(aggregator, other)

        assert aggregator.error is other.error is None
        assert all(len(moved) == SHARDS for moved in work.moved)
        assert [bool(mine) for mine in aggregator.owned[:5]] == [True, True, True, False, False]
        assert [e.message for e in swarm.events if isinstance(e, Warned)] == [
            "its shards have not moved in round 2: nothing came of it for 0 s"
        ]
        ended(work, [aggregator, other], swarm)


def test_an_aggregator_with_a_full_disk_hands_over_and_aggregates_no_more(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=2, samples=60), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob")]

        def fill(opened: object) -> None:
            peers[1].half.full = len(peers[1].rounds) > 3

        peers[1].before_exchange = fill
        swarm.train(*peers)

        assert [peer.error for peer in peers] == [None, None]
        assert peers[1].told == [f"this peer aggregates no shards any more: [Errno 28] {strerror(ENOSPC)}"]
        assert len([moved for moved in work.moved if len(moved) < SHARDS]) == 1
        assert not peers[1].half.errors
        assert peers[1].half.handed_over == 1
        ended(work, peers, swarm)


def test_a_part_that_an_aggregator_refuses_is_in_no_shard(tmp_path: Path) -> None:
    """The round is closed again without this peer. One peer's word stands against the other's, so there is no
    strike, and for a while the hub aggregates those shards."""
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=3), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob", "cat")]
        peers[0].half = ToyHalf(refuses={2: "cat"})
        swarm.train(*peers)

        assert [peer.error for peer in peers] == [None] * 3
        assert peers[2].refused == ["not a part"]
        assert [peer for peer, _, _ in json.loads(work.packets[2])[1]] == ["ann", "bob"]
        assert all(known.strikes == 0 for known in swarm.hub._state.admission.known.values())
        assert [bool(mine) for mine in peers[0].owned[:4]] == [True, True, True, False]
        assert all(len(moved) == SHARDS for moved in work.moved)
        ended(work, peers, swarm)


def test_a_round_that_all_aggregators_refuse_is_cut_anew_for_others(tmp_path: Path) -> None:
    """The only update is refused by the only aggregator: the hub aggregates the reopened round."""
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(), work, tmp_path) as swarm:
        peer = AggregatingPeer(swarm.able("ann"), half=ToyHalf(refuses={2: "ann"}))
        swarm.train(peer)

        assert peer.error is None
        assert [bool(mine) for mine in peer.owned[:5]] == [True, True, True, False, False]
        assert all(len(moved) == SHARDS for moved in work.moved)
        ended(work, [peer], swarm)


@pytest.mark.parametrize("lost", [False, True])
def test_an_aggregator_that_missed_the_end_of_a_round_fetches_it(lost: bool, tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=2), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob")]
        put = peers[0].link.put
        swarm.coordinator.barrier.patience = 0.3

        def listen_badly(opened: object) -> None:
            assert peers[0].owning is not None
            orders = peers[0].owning.orders
            hear = orders.next

            def deaf() -> Order | None:
                while isinstance(order := hear(), Done) and order.round == 2:
                    pass
                return order

            if len(peers[0].rounds) == 1:
                orders.next = deaf  # type: ignore[method-assign]

        def drop(name: str, data: bytes) -> bool | None:
            return None if name.startswith("shard/2/") else put(name, data)

        peers[0].before_exchange = listen_badly
        if lost:
            peers[0].link.put = drop  # type: ignore[method-assign, assignment]
        swarm.train(*peers)

        assert [peer.error for peer in peers] == [None] * 2
        assert (len(work.moved[2]) < SHARDS) == lost
        ended(work, peers, swarm)


# ---- what an aggregator may hand over ----------------------------------------------------------------------


class Greedy(ToyHalf):
    """Hands over an error of every shard, whatever it owned."""

    def own(self, shards: Sequence[int]) -> bytes:
        given = super().own(shards)
        return json.dumps({shard: [99] for shard in range(SHARDS)}).encode() if given else b""


def test_an_aggregator_hands_over_error_feedback_of_its_own_shards_only(tmp_path: Path) -> None:
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=2, samples=60), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob")]
        peers[1].half = Greedy()

        def leave(opened: object) -> None:
            if len(peers[1].rounds) == 3:
                peers[1].link.leave_requested.set()

        peers[1].before_exchange = leave
        swarm.train(*peers)

        assert peers[1].handed_over
        bent = {shard for half in (work.half, peers[0].half) for shard, e in half.errors.items() if 99 in e}
        bent |= {s for left in swarm.coordinator.handoffs.values() for s in left.shards}
        assert bent == set(peers[1].owned[-1])


def test_a_peer_that_hands_over_its_error_feedback_aggregates_no_more(tmp_path: Path) -> None:
    """Else it would have another error to hand over each round."""
    work = ShardedWork()
    with ShardedSwarm(sharded_settings(first_peers=2, samples=60), work, tmp_path) as swarm:
        peers = [AggregatingPeer(link) for link in links(swarm, "ann", "bob")]
        told: list[bool | None] = []

        def hand_over(opened: object) -> None:
            if len(peers[1].rounds) == 2:
                errors = json.dumps({shard: [] for shard in peers[1].owned[0]}).encode()
                told.extend(peers[1].link.put(f"error/{n}", errors) for n in range(2))

        peers[1].before_exchange = hand_over
        swarm.train(*peers)

        assert told == [True, False]
        assert not any(peers[1].owned[3:])
        assert {len(mine) for mine in peers[0].owned[3:]} == {SHARDS}
