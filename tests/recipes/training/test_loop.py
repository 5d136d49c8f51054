"""The training loop against a hub made of lists: what it sends, when, and how it goes when told to."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipes.algorithm import Aggregator, GlobalModel, Worker, compressor_of, replay
from recipes.config import Recipe
from recipes.data import Sample, pack_samples
from recipes.errors import ForeignPacket, ForeignSamples
from recipes.objectives import Measured
from recipes.training import (
    CaughtUp,
    Delivery,
    EvaluatedPart,
    HandedOver,
    Interrupted,
    Peer,
    StepDone,
    build_peer,
    finetune,
    restore,
)
from recipes.training.loop import settle
from recipes.training.peer_checkpoint import keep
from recipes.training.types import Left

VOCABULARY, LENGTH, SAMPLES = 11, 5, 4


class Bigram(nn.Module):
    """The smallest language model: the next token's scores are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        self.micro_batches = 0

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        self.micro_batches += self.training
        return SimpleNamespace(logits=self.table[input_ids])


@dataclass
class OneRound:
    round: int
    step: int
    steps: int = 6
    samples: int = SAMPLES
    exchange: bool = True
    eval_part: int = 0
    eval_parts: int = 0
    spans: int = 1
    rung: int = 0
    peers: int = 1
    extra: Mapping[str, bytes] = field(default_factory=dict)


@dataclass
class FakeHub:
    """A link to nobody: rounds from a list, this peer's packet aggregated with nobody else's."""

    recipe: Recipe
    rounds: list[OneRound]
    late: frozenset[int] = frozenset()  # rounds whose packet comes too late
    hold: threading.Event | None = None  # exchanges do not end before it is set
    name: str = "ann"
    leaving: threading.Event = field(default_factory=threading.Event)
    ended: str | None = None
    fits: int = 0
    deliveries: list[Delivery] = field(default_factory=list)
    aggregates: list[bytes] = field(default_factory=list)
    said: list[tuple[object, ...]] = field(default_factory=list)
    room: int = 0
    takes: bool | None = True  # whether it has what is handed over
    handoffs: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = VOCABULARY * VOCABULARY
        self.aggregator = Aggregator(
            parameters, compressor_of(self.recipe.compression), self.recipe.training.seed
        )

    def fetch(self, name: str) -> bytes:
        kind, _, number = name.partition("/")
        if kind == "packet":
            return self.aggregates[int(number)]
        tokens = np.arange(LENGTH, dtype=np.int32)
        return pack_samples([Sample(tokens, tokens > 0)] * SAMPLES)

    def fetched(self, name: str) -> AbstractContextManager[BinaryIO]:
        return BytesIO(self.fetch(name))

    def packets(self, start: int, stop: int) -> Iterator[bytes]:
        return iter(self.aggregates[start:stop])

    def ready(self, round: int, fingerprint: int) -> None:
        self.said.append(("ready", round))

    def next_round(self) -> OneRound | None:
        if self.leaving.is_set():
            return None
        if not self.rounds:
            self.ended = "every sample was counted"
            return None
        return self.rounds.pop(0)

    def exchange(self, packet: bytes, delivery: Delivery) -> SimpleNamespace:
        if self.hold is not None:
            assert self.hold.wait(120), "the compute waits for the exchange"
        self.deliveries.append(delivery)
        late = delivery.round in self.late
        updates = [] if late else [(self.name, packet, 1.0)]
        self.aggregates.append(self.aggregator.step(delivery.round, updates))
        return SimpleNamespace(accepted=[] if late else [self.name], refused={})

    def evaluated(self, round: int, part: int, found: Measured) -> None:
        self.said.append(("evaluated", round, part, found.terms))

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        self.handoffs.append(packet)
        return self.takes

    def leave(self, reason: str) -> None:
        self.said.append(("leave", reason))


def recipe(**compression: object) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": "none"},
            "datasets": [{"path": "none"}],
            "training": {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "warmup_steps": 0},
            "compression": {"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32, **compression},
        }
    )


def peer_for(hub: FakeHub, micro_batch: int = 1) -> Peer:
    return build_peer(Bigram(), hub.recipe, micro_batch=micro_batch)


def steps(hub: FakeHub, peer: Peer) -> list[StepDone]:
    return [event for event in finetune(hub, peer, now=0) if isinstance(event, StepDone)]


def test_the_exchange_is_under_way_while_every_micro_batch_is_computed() -> None:
    """The exchange ends once the last micro-batch has begun: a loop that waits for it first stops here."""
    hub = FakeHub(recipe(), [OneRound(t, t) for t in range(3)], hold=threading.Event())
    peer = peer_for(hub)
    assert hub.hold is not None
    hold, model = hub.hold, peer.trainer.model
    model.register_forward_hook(lambda *_: hold.set() if model.micro_batches % SAMPLES == 0 else hold.clear())

    done = steps(hub, peer)

    assert [step.round for step in done] == [0, 1, 2]
    assert model.micro_batches == 3 * SAMPLES


def test_a_peer_whose_lease_spans_rounds_says_when_it_is_done_and_keeps_what_it_has_not_sent() -> None:
    hub = FakeHub(recipe(), [OneRound(0, 0, spans=3)])
    peer = peer_for(hub)

    (done,) = steps(hub, peer)

    assert done.round == 0
    assert [what for what in hub.said if what[0] == "ready"] == [("ready", 0), ("ready", 1)]
    assert [lease.round for lease in peer.undelivered] == [0]


@dataclass
class BreakingHub(FakeHub):
    """Another peer sends what this one would have, which is late; the connection breaks once x' has moved."""

    worker: Worker | None = None

    def exchange(self, packet: bytes, delivery: Delivery) -> SimpleNamespace:
        self.aggregates.append(self.aggregator.step(delivery.round, [("bob", packet, 1.0)]))
        return SimpleNamespace(accepted=[], refused={})

    def fetch(self, name: str) -> bytes:
        if name == "lease/1" and self.worker is not None:
            deadline = time.monotonic() + 10
            while self.worker.global_model.round < 2 and time.monotonic() < deadline:
                self.leaving.wait(0.001)
            raise ConnectionError(name)
        return super().fetch(name)


def test_a_session_that_breaks_between_exchange_and_join_leaves_x_i_with_x() -> None:
    """x' has moved in the exchange's thread: x_i follows before anything else, or their difference would be
    no residual."""
    hub = BreakingHub(recipe(), [OneRound(0, 0), OneRound(1, 1)])
    peer = peer_for(hub)
    hub.worker = peer.worker
    with pytest.raises(ConnectionError):
        steps(hub, peer)
    steps(hub, peer)
    moved = peer.worker.global_model.vector

    assert peer.worker.global_model.round == 2
    assert moved.abs().sum() > 0
    assert torch.equal(peer.worker.x, 2 * moved)  # what bob sent, and what this peer has still to send


def test_a_packet_delivers_the_lease_of_the_round_before() -> None:
    """Staleness is exactly one round: packet t holds the step of round t-1, and says so."""
    hub = FakeHub(recipe(), [OneRound(t, t) for t in range(3)] + [OneRound(3, 3, samples=0)])
    steps(hub, peer_for(hub))

    assert [delivery.delivers for delivery in hub.deliveries] == [[], [0], [1], [2]]
    assert [delivery.tokens for delivery in hub.deliveries] == [0, 16, 16, 16]


@pytest.mark.parametrize("staleness", [2, 3, 4])
def test_with_rounds_in_flight_a_packet_delivers_the_lease_before_it_and_nobody_waits_for_its_aggregate(
    staleness: int,
) -> None:
    """The aggregate of round t comes down when round t + S - 1 has gone up: a loop that waits for it before
    stops here. After the last round all of it is joined."""

    class Thin(FakeHub):
        def fetch(self, name: str) -> bytes:
            kind, _, number = name.partition("/")
            if kind == "packet":
                wanted = min(int(number) + staleness, last)
                in_time = wait_until(lambda: len(self.deliveries) >= wanted)
                assert in_time, "the compute waits for an aggregate that is not due"
            return super().fetch(name)

    last = 8
    hub = Thin(recipe(staleness=staleness), [OneRound(t, t, steps=last) for t in range(last)])
    peer = peer_for(hub)
    done = steps(hub, peer)

    assert [delivery.delivers for delivery in hub.deliveries] == [[], *([t] for t in range(last - 1))]
    assert [delivery.behind for delivery in hub.deliveries] == [min(t, staleness - 1) for t in range(last)]
    assert [step.round for step in done] == list(range(last))
    assert peer.worker.global_model.round == last
    assert not peer.flights


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return true()


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("late", [frozenset(), frozenset({1, 2}), frozenset({3})])
def test_what_a_peer_leaves_behind_is_all_it_did_whenever_it_stops_and_x_prime_is_the_hubs(
    staleness: int, late: frozenset[int], tmp_path: Path
) -> None:
    """A peer is asked to leave with rounds in flight, whose aggregates do not come any more. Its checkpoint
    goes on elsewhere from the ledger: x' to the bit; e and the residual have the rest of every step, once."""

    class Cut(FakeHub):
        def fetch(self, name: str) -> bytes:
            if name.startswith("packet/") and (self.leaving.is_set() or int(name[7:]) >= 5 - staleness):
                wait_until(self.leaving.is_set)
                raise Interrupted("asked to leave")
            return super().fetch(name)

    hub = Cut(recipe(staleness=staleness, **LOSSY), [OneRound(t, t) for t in range(9)], late=late)
    peer = leaver(hub, SAMPLES * 5 - 2)  # in its fifth lease
    joined = steps(hub, peer)
    keep(peer, tmp_path / "kept", {})
    back, again = peer_for(hub), FakeHub(hub.recipe, [])
    restore(back, tmp_path / "kept")
    again.aggregates = hub.aggregates
    list(finetune(again, back, now=len(again.aggregates)))

    assert len(joined) == 5 - staleness
    compression, seed = hub.recipe.compression, hub.recipe.training.seed
    ledger = GlobalModel(torch.zeros(VOCABULARY**2), compressor_of(compression), seed)
    assert torch.equal(back.worker.global_model.vector, [*replay(ledger, hub.aggregates)][-1].vector)
    torch.testing.assert_close(
        back.worker.x + hub.aggregator.assigned[0].error, alone(hub, 4), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("known", [True, False], ids=["taken", "dropped by the hub with its session"])
def test_a_session_that_is_renewed_with_rounds_in_flight_has_each_update_once(known: bool) -> None:
    """Updates that the aggregator took come with the ledger; the undecided ones are still to be sent."""

    class Renewed(FakeHub):
        broken = threading.Event()

        def fetch(self, name: str) -> bytes:
            kind, _, number = name.partition("/")
            if name == "lease/3":
                wait_until(lambda: len(self.aggregates) == 3 + known)
                self.broken.set()
                raise ConnectionError(name)
            if kind == "packet" and int(number) > 0:
                wait_until(self.broken.is_set)
                raise ConnectionError(name)
            return super().fetch(name)

        def exchange(self, packet: bytes, delivery: Delivery) -> SimpleNamespace:
            if delivery.round == 3 and not known:
                wait_until(self.broken.is_set)
                raise ConnectionError("update/3")
            return super().exchange(packet, delivery)

    hub = Renewed(recipe(staleness=3, **LOSSY), [OneRound(t, t) for t in range(4)])
    peer = peer_for(hub)
    with pytest.raises(ConnectionError):
        steps(hub, peer)
    in_flight = [(flight.round, flight.taken) for flight in peer.flights]
    again = FakeHub(hub.recipe, [])
    again.aggregates = hub.aggregates
    list(finetune(again, peer, now=len(hub.aggregates)))

    assert in_flight == [(1, True), (2, True), (3, True if known else None)]
    assert peer.worker.global_model.round == len(hub.aggregates)
    whole = peer.worker.x + hub.aggregator.assigned[0].error
    torch.testing.assert_close(whole, alone(hub, 3), rtol=0, atol=1e-5)


def test_without_staleness_a_packet_delivers_its_own_lease() -> None:
    hub = FakeHub(recipe(staleness=0), [OneRound(t, t) for t in range(3)])
    steps(hub, peer_for(hub))

    assert [delivery.delivers for delivery in hub.deliveries] == [[0], [1], [2]]


def test_what_came_too_late_is_delivered_with_the_next_packet() -> None:
    """And the peer says that it is there again, as it is no member of the round that goes on without it."""
    hub = FakeHub(recipe(), [OneRound(t, t) for t in range(4)], late=frozenset({1, 2}))
    done = steps(hub, peer_for(hub))

    assert [step.accepted for step in done] == [True, False, False, True]
    assert [delivery.delivers for delivery in hub.deliveries] == [[], [0], [0, 1], [0, 1, 2]]
    assert ("ready", 2) in hub.said
    assert ("ready", 3) in hub.said


def test_of_two_members_each_takes_half_a_step_where_the_aggregate_is_a_sum_and_says_the_swarms_rate() -> (
    None
):
    moved = []
    for asked, members in [("packets", 1), ("packets", 2), (1.0, 2)]:
        hub = FakeHub(recipe(outer_learning_rate=asked), [OneRound(0, 0, peers=members)])
        peer = peer_for(hub)
        before = peer.worker.x.clone()
        steps(hub, peer)
        moved.append(peer.worker.x - before)
        assert peer.rate == 0.1

    assert torch.equal(moved[1], moved[0] / 2)
    assert torch.equal(moved[2], moved[0])


def test_asked_to_leave_it_finishes_the_exchange_in_flight_and_says_goodbye() -> None:
    """The lease it was at is not claimed; the packet that was under way is joined."""
    hub = FakeHub(recipe(), [OneRound(t, t) for t in range(9)])
    peer = peer_for(hub)
    leave_at = 6  # micro-batches: in the middle of the second lease
    peer.trainer.model.register_forward_hook(
        lambda model, *_: hub.leaving.set() if model.micro_batches == leave_at else None
    )

    events = list(finetune(hub, peer, now=0))

    assert isinstance(events[-1], Left)
    assert not events[-1].finished
    assert peer.worker.global_model.round == len(hub.deliveries) == 2
    assert [delivery.delivers for delivery in hub.deliveries] == [[], [0]]
    assert hub.said[-1] == ("leave", "left on request")
    assert peer.undelivered == []


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
def test_a_request_to_leave_is_seen_within_a_micro_batch(where: str) -> None:
    """An exchange in flight is finished all the same; gradients computed by then are dropped."""
    evaluates = where == "evaluation"
    hub = FakeHub(recipe(), [OneRound(t, t, eval_parts=evaluates * (t == 2)) for t in range(9)])
    peer = peer_for(hub)
    model, name, done = peer.trainer.model, "evaluate" if evaluates else "backward", list[bool]()
    compute = getattr(peer.trainer, name)

    def ask(*_: object) -> None:
        if model.micro_batches == 2 * SAMPLES + (where == "backward") and model.training != evaluates:
            hub.leaving.set()

    def watched(*given: Any) -> Any:
        found = compute(*given)
        done.append(hub.leaving.is_set())
        return found

    setattr(peer.trainer, name, watched)
    if where == "backward":
        next(model.parameters()).register_hook(ask)
    else:
        model.register_forward_pre_hook(ask)
    events = list(finetune(hub, peer, now=0))

    assert hub.leaving.is_set()
    assert not any(done), "what was under way did not end"
    assert isinstance(events[-1], Left)
    assert peer.undelivered == []
    assert [delivery.delivers for delivery in hub.deliveries] == [[], [0], [1]]


LOSSY: dict[str, object] = {"random_ratio": 0.5, "topk_ratio": 0.2}


def leaver(hub: FakeHub, after: int) -> Peer:
    """A peer that is asked to leave in its micro-batch `after`."""
    peer = peer_for(hub)
    peer.trainer.model.register_forward_hook(
        lambda model, *_: hub.leaving.set() if model.micro_batches == after else None
    )
    return peer


@pytest.mark.parametrize("after", [10, 12], ids=["in the middle of a lease", "with a gradient at hand"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_leaver_hands_over_what_it_delivered_the_lease_of_and_nothing_else(
    staleness: int, after: int
) -> None:
    """The gradient it was at is dropped: its lease is done again by others."""
    hub = FakeHub(recipe(staleness=staleness, **LOSSY), [OneRound(t, t) for t in range(9)], room=10**6)
    peer = leaver(hub, after)
    events = list(finetune(hub, peer, now=0))

    (handed_over,) = [event for event in events if isinstance(event, HandedOver)]
    assert handed_over.smaller > 0.99, "32 bits, and room for all of it"
    assert hub.said[-1] == ("leave", "left on request")
    leases = sorted({lease for delivery in hub.deliveries for lease in delivery.delivers})
    steps = sum(event.loss is not None for event in events if isinstance(event, StepDone))
    assert leases == [0, 1]
    assert steps == 2, "each step that was made is delivered, no other was made"
    hub.aggregator.merge_handoff("ann", hub.handoffs[0], 1.0)
    assert hub.aggregator.assigned[0].error.any()
    common = peer.worker.global_model.vector
    torch.testing.assert_close(
        common + hub.aggregator.assigned[0].error, alone(hub, steps), rtol=0, atol=1e-5
    )


def alone(hub: FakeHub, count: int) -> Tensor:
    """x_i after so many steps: of a peer that is alone it is plain SGD, whatever is exchanged."""
    again = FakeHub(hub.recipe, [OneRound(t, t) for t in range(count)])
    peer = peer_for(again)
    steps(again, peer)
    return peer.trainer.flat.vector


def test_work_that_others_will_do_again_is_not_handed_over() -> None:
    """Its packet came too late: the step is in x_i, its lease is not delivered."""
    hub = FakeHub(recipe(**LOSSY), [OneRound(t, t) for t in range(9)], late=frozenset({2}), room=10**6)
    peer = leaver(hub, 10)
    events = list(finetune(hub, peer, now=0))

    assert [lease.round for lease in peer.undelivered] == [1]
    assert not any(isinstance(event, HandedOver) for event in events)
    assert hub.handoffs == []


@pytest.mark.parametrize("takes", [True, False, None])
def test_what_the_aggregator_has_or_may_have_is_in_the_residual_no_more(takes: bool | None) -> None:
    hub = FakeHub(recipe(**LOSSY), [OneRound(t, t) for t in range(9)], room=10**6, takes=takes)
    peer = leaver(hub, 10)
    list(finetune(hub, peer, now=0))

    assert (peer.worker.residual_norm() < 1e-6) == (takes is not False)


def test_a_small_room_is_kept_and_no_room_takes_nothing() -> None:
    hub = FakeHub(recipe(**LOSSY), [OneRound(t, t) for t in range(9)], room=120)
    events = list(finetune(hub, leaver(hub, 10), now=0))

    (handed_over,) = [event for event in events if isinstance(event, HandedOver)]
    assert handed_over.size == len(hub.handoffs[0]) <= 120
    assert 0 < handed_over.smaller < 0.99
    nothing = FakeHub(recipe(**LOSSY), [OneRound(t, t) for t in range(9)], room=20)
    list(finetune(nothing, leaver(nothing, 10), now=0))
    assert nothing.handoffs == []


@pytest.mark.parametrize("arrived", [True, False, None])
def test_a_packet_whose_commit_was_not_waited_for_is_in_the_run_at_most_once(arrived: bool | None) -> None:
    """Asked to leave in a long round: what the hub has, or may have, is not this peer's any more."""

    class Slow(FakeHub):
        def exchange(self, packet: bytes, delivery: Delivery) -> SimpleNamespace:
            if delivery.round == 2:
                self.leaving.set()
                raise Interrupted("asked to leave", arrived)
            return super().exchange(packet, delivery)

    hub = Slow(recipe(**LOSSY), [OneRound(t, t) for t in range(9)], room=10**6)
    peer = peer_for(hub)
    events = list(finetune(hub, peer, now=0))
    handed_over = [event for event in events if isinstance(event, HandedOver)]

    assert len(handed_over) == (arrived is True), "else its leases may be done again"
    assert not peer.flights
    untouched = Slow(recipe(**LOSSY), [OneRound(t, t) for t in range(9)])
    other = peer_for(untouched)
    with_packet = residual_before_settling(untouched, other)
    if arrived is False:
        torch.testing.assert_close(peer.worker.x - peer.worker.global_model.vector, with_packet)
    elif arrived is None:
        lost = torch.dist(with_packet, peer.worker.x - peer.worker.global_model.vector)
        assert 0 < lost < with_packet.norm()


def residual_before_settling(hub: FakeHub, peer: Peer) -> Tensor:
    """d_i as the interrupted exchange saw it."""
    before: list[Tensor] = []
    exchange = hub.exchange

    def seen(packet: bytes, delivery: Delivery) -> SimpleNamespace:
        before[:] = [peer.worker.x - peer.worker.global_model.vector]
        return exchange(packet, delivery)

    hub.exchange = seen  # type: ignore[method-assign]
    list(finetune(hub, peer, now=0))
    settle(peer)
    return before[0]


def test_a_peer_that_slept_applies_what_it_missed_before_it_goes_on() -> None:
    hub = FakeHub(recipe(), [OneRound(t, t) for t in range(3)])
    awake = peer_for(hub)
    steps(hub, awake)
    hub.rounds, hub.ended = [OneRound(1, 1), OneRound(3, 3)], None
    sleeper = peer_for(hub)

    events = list(finetune(hub, sleeper, now=1))

    assert next(event for event in events if isinstance(event, CaughtUp)) == CaughtUp(1, 1)
    assert CaughtUp(3, 1) in events
    assert sleeper.worker.global_model.round == 4


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_the_gradient_does_not_depend_on_the_micro_batch(micro_batch: int) -> None:
    hub, other = (FakeHub(recipe(staleness=0), [OneRound(0, 0)]) for _ in range(2))
    peer, whole = peer_for(hub, micro_batch), peer_for(other, SAMPLES)
    steps(hub, peer)
    steps(other, whole)

    torch.testing.assert_close(peer.trainer.flat.vector, whole.trainer.flat.vector)


def test_x_prime_and_not_the_local_model_is_evaluated() -> None:
    hub = FakeHub(recipe(), [OneRound(0, 0), OneRound(1, 1, eval_parts=2, eval_part=1)])
    peer = peer_for(hub)
    losses = [e.measured.mean for e in finetune(hub, peer, now=0) if isinstance(e, EvaluatedPart)]

    assert ("evaluated", 1, 1, 8) in hub.said
    assert losses == [pytest.approx(np.log(VOCABULARY))]  # x' has not moved yet, the local model has


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_what_is_evaluated_is_x_prime_of_that_very_round_whatever_is_in_flight(staleness: int) -> None:
    """Parts of one evaluation are other peers', whose rounds in flight are not the same."""
    seen: list[int] = []

    class Watched(FakeHub):
        def evaluated(self, round: int, part: int, found: Measured) -> None:
            seen.append(peer.worker.global_model.round)

    hub = Watched(recipe(staleness=staleness), [OneRound(t, t, eval_parts=int(t == 3)) for t in range(6)])
    hub.rounds.append(OneRound(6, 6, samples=0, exchange=False, eval_parts=1))
    peer = peer_for(hub)
    steps(hub, peer)

    assert seen == [3, 6]


@dataclass
class LyingHub(FakeHub):
    """A hub that serves other bytes of some kinds of object."""

    lies: dict[str, bytes] = field(default_factory=dict)
    abandoned: bool = False

    def fetch(self, name: str) -> bytes:
        return self.lies.get(name.partition("/")[0]) or super().fetch(name)

    def abandon(self) -> None:
        self.abandoned = True


def long_samples(count: int, length: int = LENGTH) -> bytes:
    tokens = np.arange(length, dtype=np.int32) % VOCABULARY
    return pack_samples([Sample(tokens, np.arange(length) > 0)] * count)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("lease", long_samples(SAMPLES + 1), f"{SAMPLES + 1} samples came, {SAMPLES} were announced"),
        ("lease", long_samples(SAMPLES, 10_000), "a sample of 10,000 tokens, this run has at most"),
        ("lease", b"CKT1", "samples of 4 bytes"),
        ("packet", bytes(100), "an aggregate cannot be used"),
        ("eval", long_samples(3, 10_000), "a sample of 10,000 tokens"),
        ("eval", b"CKT1\2\0\xff\xff\xff\xff", "4,294,967,295 samples"),
    ],
)
def test_what_is_none_of_the_run_ends_the_training_and_no_thread_waits_for_that_hub(
    kind: str, data: bytes, said: str
) -> None:
    hub = LyingHub(recipe(), [OneRound(t, t, eval_parts=1) for t in range(4)], lies={kind: data})

    with pytest.raises((ForeignSamples, ForeignPacket), match=said):
        steps(hub, peer_for(hub))
    assert hub.abandoned
    assert not [t for t in threading.enumerate() if t.name.startswith("exchange")]


def test_a_packet_that_was_missed_and_is_none_of_the_run_is_the_hubs_fault() -> None:
    hub = LyingHub(recipe(), [OneRound(1, 1)])
    hub.aggregates = [bytes(100)]

    with pytest.raises(ForeignPacket):
        list(finetune(hub, peer_for(hub), now=1))
