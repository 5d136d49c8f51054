"""The hub's error feedback survives a kill at any step of a round."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail_cli.assembly import UpdateJudge
from cocktail_cli.host import DurableAggregator, RunDelegate
from compress import Cocktail, join
from recipes.algorithm import Aggregator, handoff_compressor
from recipes.config import load_recipe
from recipes.errors import ModelError
from recipes.models import Base
from transport import Ledger
from transport.ledger import ERROR_FEEDBACK as ERROR
from transport.ledger import UPDATES, RoundRow, read_rounds
from transport.protocol import LedgerDamaged, LedgerError, UpdateRejected, WeightedPacket

P, SEED, ROUNDS = 400, 7, 8
MIX = Cocktail(random_ratio=0.25, topk_ratio=0.2, quant_bits=4, block_size=16, shards=2)


def updates_of(round: int, salt: int = 0) -> list[WeightedPacket]:
    """Updates that two peers send."""
    generator = torch.Generator().manual_seed(1000 * salt + round)
    samples = [MIX.draw(shard.size, shard.seed, round) for shard in MIX.cut(P, SEED)]
    packets = [
        join([MIX.encode(torch.randn(s.m, generator=generator)).packet for s in samples]) for _ in range(2)
    ]
    return [WeightedPacket("ann", packets[0], 3.0), WeightedPacket("bob", packets[1], 0.7)]


def handoffs_before(round: int) -> list[WeightedPacket]:
    """The handoffs before a round: in every third one two peers leave."""
    if round % 3 != 2:
        return []
    generator = torch.Generator().manual_seed(50 + round)
    whole = handoff_compressor(MIX, 0.1)

    def handoff() -> bytes:
        return join([whole.encode(torch.randn(s.size, generator=generator)).packet for s in MIX.cut(P, SEED)])

    return [WeightedPacket(name, handoff(), 0.3) for name in ("eve", "dan")]


def error_of(durable: DurableAggregator) -> torch.Tensor:
    return torch.cat([shard.error for shard in durable.aggregator.assigned.values()])


def undisturbed() -> list[bytes]:
    aggregator, packets = Aggregator(P, MIX, SEED), []
    for round in range(ROUNDS):
        for handoff in handoffs_before(round):
            aggregator.merge_handoff(*handoff)
        packets.append(aggregator.step(round, updates_of(round)))
    return packets


def commit(ledger: Ledger, round: int, packet: bytes) -> None:
    ledger.commit(RoundRow(round, round, 0.0, 0.0, 0, ("ann", "bob"), ("ann", "bob"), None, 0), packet, ())


class Killed(BaseException):
    """The process is no more."""


class Life:
    """One process of a hub, from its start to kill -9: its files are closed, nothing else is done."""

    def __init__(self, folder: Path, least: int) -> None:
        self.ledger = Ledger(folder, run="toy", samples=9)
        self.durable = DurableAggregator(Aggregator(P, MIX, SEED), folder, least)
        self.durable.recover(self.ledger)
        self.round = len(self.ledger.rounds())

    def live(self, dies: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounds to the end; in the second one it dies at the step called `dies`."""
        for round in range(self.round, ROUNDS):
            mortal = round == self.round + 1
            for handoff in handoffs_before(round):
                self.durable.inherit(*handoff)
            if mortal and dies == "logged":  # never committed, and done again with other updates
                self.durable.aggregate(round, updates_of(round, salt=1))
                raise Killed
            packet = self.durable.aggregate(round, updates_of(round))
            commit(self.ledger, round, packet)
            if mortal and dies == "committed":
                raise Killed
            if mortal and dies in ("saving", "saved"):
                monkeypatch.setattr(self.durable, "longest", 0)
                step = (self.durable.aggregator, "save") if dies == "saving" else (self.durable.log, "clear")
                monkeypatch.setattr(*step, die)
            self.durable.committed(round)
        raise Killed

    def end(self) -> None:
        self.durable.close()
        self.ledger.close()


def die(*_: Any) -> None:
    raise Killed


@pytest.mark.parametrize("saves", [set(), {2}, {2, 6}])
def test_who_repeats_each_round_as_it_comes_has_the_error_feedback_and_nothing_left_to_repeat(
    tmp_path: Path, saves: set[int]
) -> None:
    """A standby: to repeat all rounds when the hub is lost would take seconds."""
    life = Life(tmp_path, 1 << 30)
    standby = DurableAggregator(Aggregator(P, MIX, SEED), tmp_path)
    for round in range(ROUNDS):
        for handoff in handoffs_before(round):
            life.durable.inherit(*handoff)
        commit(life.ledger, round, life.durable.aggregate(round, updates_of(round)))
        life.durable.longest = 0 if round in saves else 1 << 30
        life.durable.committed(round)
        if round not in (4, 5):  # rounds may come several at a time
            standby.follow(life.ledger, round + 1)
            assert torch.equal(error_of(standby), error_of(life.durable))
    life.end()
    (tmp_path / UPDATES).write_bytes(b"")

    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        standby.recover(ledger)
    assert torch.equal(error_of(standby), error_of(life.durable))
    standby.close()


@pytest.mark.parametrize("shorter", ["packets", "what they come to"])
@pytest.mark.parametrize("least", [0, 1 << 30], ids=["e is saved often", "e is never saved"])
@pytest.mark.parametrize("dies", ["logged", "committed", "saving", "saved"])
def test_killed_at_any_step_the_run_is_what_it_would_have_been(
    tmp_path: Path, dies: str, least: int, shorter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Aggregator, "step_bytes", lambda *_: 1 << 30 if shorter == "packets" else 0)
    for _ in range(ROUNDS):
        life = Life(tmp_path, least)
        life.durable.longest = least and life.durable.longest  # small: after every round
        with pytest.raises(Killed):
            life.live(dies, monkeypatch)
        life.end()

    with Ledger(tmp_path, write=False) as ledger:
        assert [packet for _, packet in ledger.packets()] == undisturbed()
    assert (tmp_path / ERROR).exists() == (least == 0 or dies == "saved")


def test_e_is_not_saved_with_a_handoff_that_the_next_rounds_record_is_to_have(tmp_path: Path) -> None:
    """Else it would be in e twice after a replay."""
    life = Life(tmp_path, 0)
    life.durable.longest = 0
    commit(life.ledger, 0, life.durable.aggregate(0, updates_of(0)))
    for handoff in handoffs_before(2):
        life.durable.inherit(*handoff)
    life.durable.committed(0)
    assert not (tmp_path / ERROR).exists()
    commit(life.ledger, 1, life.durable.aggregate(1, updates_of(1)))
    error = error_of(life.durable)
    life.end()

    again = Life(tmp_path, 0)
    assert torch.equal(error_of(again.durable), error)
    with pytest.raises(UpdateRejected):
        again.durable.inherit("mallory", b"junk", 0.5)
    assert again.durable.inherited == []
    assert torch.equal(error_of(again.durable), error)
    again.end()


def test_a_round_done_again_without_a_rejected_peer_is_replayed_as_it_was_committed(tmp_path: Path) -> None:
    life = Life(tmp_path, 1 << 30)
    updates = updates_of(0)
    with pytest.raises(UpdateRejected):
        life.durable.aggregate(0, [*updates, WeightedPacket("mallory", b"junk", 9.0)])
    commit(life.ledger, 0, life.durable.aggregate(0, updates))
    error = error_of(life.durable)
    life.end()

    again = Life(tmp_path, 1 << 30)
    assert torch.equal(error_of(again.durable), error)
    again.end()


def test_a_handoff_that_was_shortened_is_shortened_again_after_a_restart(tmp_path: Path) -> None:
    """The bound is that of the round before, whether that round is replayed or older than the saved e."""
    life = Life(tmp_path, 1 << 30)
    for round in range(4):
        life.durable.longest = 0 if round == 1 else 1 << 30  # e is saved after round 1
        if round:
            assert life.durable.inherit(*too_long(round)) < 1
        updates = [*updates_of(round), WeightedPacket("cat", updates_of(round, salt=1)[0][1], 1.0)]
        commit(life.ledger, round, life.durable.aggregate(round, updates))
        life.durable.committed(round)
    error = error_of(life.durable)
    life.end()

    again = Life(tmp_path, 1 << 30)
    assert torch.equal(error_of(again.durable).view(torch.int32), error.view(torch.int32))
    assert again.durable.inherit(*too_long(4)) == life.durable.inherit(*too_long(4))
    again.end()


def too_long(round: int) -> WeightedPacket:
    generator = torch.Generator().manual_seed(round)
    whole, values = handoff_compressor(MIX, 1.0), 20 * torch.randn(P, generator=generator)
    return WeightedPacket(
        "mallory", join([whole.encode(shard.of(values)).packet for shard in MIX.cut(P, SEED)]), 0.3
    )


def test_an_error_that_cannot_be_had_is_not_taken_for_zero(tmp_path: Path) -> None:
    life = Life(tmp_path, 1 << 30)
    for round in range(2):
        commit(life.ledger, round, life.durable.aggregate(round, updates_of(round)))
    life.end()
    data = (tmp_path / UPDATES).read_bytes()

    other = tmp_path / "other"
    stranger = Life(other, 1 << 30)
    for round in range(2):
        commit(stranger.ledger, round, stranger.durable.aggregate(round, updates_of(round, salt=1)))
    stranger.end()
    for damaged, message in (
        (b"", "lacks the updates of round 0"),
        (data[:-1], "lacks the updates of round 1"),
        ((other / UPDATES).read_bytes(), "round 0 are not those it was committed with"),
    ):
        (tmp_path / UPDATES).write_bytes(damaged)
        with Ledger(tmp_path, run="toy", samples=9) as ledger, pytest.raises(LedgerError, match=message):
            DurableAggregator(Aggregator(P, MIX, SEED), tmp_path).recover(ledger)


@given(st.floats(0, 1), st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_of_the_saved_error_feedback_is_found(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
) -> None:
    """Its numbers had no checksum: the run went on with others."""
    folder = tmp_path_factory.mktemp("run")
    life = Life(folder, 0)
    commit(life.ledger, 0, life.durable.aggregate(0, updates_of(0)))
    life.durable.longest = 0
    life.durable.committed(0)
    life.end()
    data = bytearray((folder / ERROR).read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << bit
    (folder / ERROR).write_bytes(data)

    with Ledger(folder, run="toy", samples=9) as ledger, pytest.raises(LedgerDamaged, match=ERROR):
        DurableAggregator(Aggregator(P, MIX, SEED), folder).recover(ledger)


@pytest.mark.parametrize("lost", [UPDATES, ERROR])
@pytest.mark.parametrize("how", ["removed", "emptied", "halved"])
def test_error_feedback_that_is_lost_is_dropped_where_its_host_says_so_and_only_then(
    tmp_path: Path, lost: str, how: str
) -> None:
    life = Life(tmp_path, 1 << 30)
    for round in range(4):
        commit(life.ledger, round, life.durable.aggregate(round, updates_of(round)))
        life.durable.longest = 0 if round == 1 else 1 << 30
        life.durable.committed(round)
    life.end()
    data = (tmp_path / lost).read_bytes()
    (tmp_path / lost).unlink()
    if how != "removed":
        (tmp_path / lost).write_bytes(data[: len(data) // 2 if how == "halved" else 0])
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        with pytest.raises(LedgerDamaged, match=lost) as refused:
            DurableAggregator(Aggregator(P, MIX, SEED), tmp_path).recover(ledger)
        assert ledger.next_round == 4
    assert refused.value.hints[-1] == "or go on without it: cocktail resume RUN --drop-error-feedback"

    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        durable = DurableAggregator(Aggregator(P, MIX, SEED), tmp_path)
        (said,) = durable.recover(ledger, drop=True)
        assert lost in said
        assert not error_of(durable).any()
        commit(ledger, 4, durable.aggregate(4, updates_of(4)))
        error = error_of(durable)
        durable.close()
    again = Life(tmp_path, 1 << 30)
    assert torch.equal(error_of(again.durable), error)
    again.end()
    if how != "removed":
        assert (tmp_path / "aside" / "1" / lost).exists()


def test_a_hub_killed_as_it_logs_the_first_round_after_e_was_saved_goes_on(tmp_path: Path) -> None:
    life = Life(tmp_path, 0)
    commit(life.ledger, 0, life.durable.aggregate(0, updates_of(0)))
    life.durable.longest = 0
    life.durable.committed(0)
    assert life.durable.log is not None
    life.durable.log.begin(1, updates_of(1))
    life.durable.log.flush()
    error = error_of(life.durable)
    life.end()
    assert (tmp_path / UPDATES).stat().st_size, "a torn record, where there is no whole one"

    again = Life(tmp_path, 0)
    assert torch.equal(error_of(again.durable), error)
    again.end()


def test_a_run_that_is_over_leaves_no_error_behind(tmp_path: Path) -> None:
    life = Life(tmp_path, 1 << 30)
    commit(life.ledger, 0, life.durable.aggregate(0, updates_of(0)))
    life.end()

    life.durable.forget()

    assert not (tmp_path / UPDATES).exists()


class Doubting(UpdateJudge):
    def weight(self, peer: str) -> float:
        return 0.25 if peer == "bob" else 1.0


def test_what_counts_for_less_is_logged_with_the_weight_that_it_had_and_judged_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.models.count_trainable", lambda recipe, folder: P)
    monkeypatch.setattr(Aggregator, "step_bytes", lambda *_: 1 << 30)
    nothing: Any = SimpleNamespace(pack_held_out=lambda: b"")
    work = RunDelegate(load_recipe("smoke", []), Base(tmp_path, ()), nothing, tmp_path)
    work.durable = DurableAggregator(Aggregator(P, MIX, SEED), tmp_path)
    work.judges = [Doubting()]
    with Ledger(tmp_path, run="toy", samples=9) as ledger:
        work.durable.recover(ledger)
        work.inherit("bob", handoffs_before(2)[0][1], 0.4)
        work.aggregate(0, updates_of(0))
        assert work.durable.log is not None
        [logged] = read_rounds(work.durable.log.path, 0, 1)
    work.close()

    assert [(peer, weight) for peer, _, weight in logged.updates] == [("ann", 3.0), ("bob", 0.25 * 0.7)]
    assert [(peer, weight) for peer, _, weight in logged.inherited] == [("bob", 0.25 * 0.4)]
    assert work.taken == updates_of(0)


def test_more_shards_than_the_model_has_parameters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.models.count_trainable", lambda recipe, base: 2)
    recipe: Any = load_recipe("smoke", ["compression.shards=3"])
    nothing: Any = None
    with pytest.raises(ModelError, match=r"compression.shards is 3, more than the model's 2 parameters"):
        RunDelegate(recipe, Base(tmp_path, ()), nothing, tmp_path)
