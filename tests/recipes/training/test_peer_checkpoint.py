"""The checkpoint of a peer between two sessions: the same bits again, or nothing at all."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_loop import Bigram, FakeHub, OneRound, recipe, steps

from recipes.config import Recipe
from recipes.training import Peer, build_peer, read, restore, restore_residual
from recipes.training.peer_checkpoint import anything_of, keep, size_of
from recipes.training.types import Flight

ABOUT = {"run": "amber-otter-42", "peer": "ann"}


def recipe_with(optim: str) -> Recipe:
    plain = recipe(random_ratio=0.5, topk_ratio=0.2, auto=False)  # a line is measured anew
    return plain.model_copy(update={"training": plain.training.model_copy(update={"optim": optim})})


def trained(optim: str = "adamw_torch", rounds: int = 4) -> tuple[Peer, FakeHub]:
    """A peer after some rounds, and its hub, which waits for more."""
    hub = FakeHub(recipe_with(optim), [OneRound(t, t) for t in range(rounds)])
    peer = build_peer(Bigram(), hub.recipe, micro_batch=2)
    steps(hub, peer)
    hub.ended = None
    return peer, hub


def fresh(optim: str = "adamw_torch") -> Peer:
    return build_peer(Bigram(), recipe_with(optim), micro_batch=2)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_a_peer_that_comes_back_is_what_it_was_to_the_bit_and_goes_on_alike(
    tmp_path: Path, optim: str
) -> None:
    peer, hub = trained(optim)
    keep(peer, tmp_path / "kept", ABOUT)
    other = fresh(optim)
    stay = read(tmp_path / "kept")
    restore(other, tmp_path / "kept")

    assert (stay.round, stay.fingerprint, dict(stay.about)) == (
        4,
        peer.worker.global_model.fingerprint,
        ABOUT,
    )
    assert (other.worker.global_model.round, other.worker.global_model.fingerprint) == (4, stay.fingerprint)
    assert torch.equal(other.worker.x, peer.worker.x)
    assert torch.equal(other.worker.global_model.vector, peer.worker.global_model.vector)
    assert same_state(peer, other)
    assert abs((tmp_path / "kept").stat().st_size - size_of(peer)) < 4000
    error = hub.aggregator.assigned[0].error.clone()
    ends = []
    for each in (peer, other):
        hub.aggregator.assigned[0].error.copy_(error)
        del hub.aggregates[4:]
        hub.rounds, hub.ended = [OneRound(t, t) for t in range(4, 8)], None
        steps(hub, each)
        ends.append(each)
    assert torch.equal(ends[0].worker.x, ends[1].worker.x)
    assert torch.equal(ends[0].worker.global_model.vector, ends[1].worker.global_model.vector)


def same_state(a: Peer, b: Peer) -> bool:
    mine, theirs = (peer.trainer.optimizer.state_dict()["state"] for peer in (a, b))
    return mine.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(mine[n][what]), torch.as_tensor(theirs[n][what]))
        for n in mine
        for what in mine[n]
    )


def test_with_x_prime_from_elsewhere_the_residual_comes_on_top_of_it(tmp_path: Path) -> None:
    peer, _ = trained()
    residual = peer.worker.x - peer.worker.global_model.vector
    keep(peer, tmp_path / "kept", ABOUT)
    other = fresh()
    moved = torch.randn(residual.shape, generator=torch.Generator().manual_seed(1))
    other.worker.global_model.vector.copy_(moved)
    restore_residual(other, tmp_path / "kept")

    assert torch.equal(other.worker.global_model.vector, moved)
    torch.testing.assert_close(other.worker.x - moved, residual, rtol=0, atol=1e-6)
    assert same_state(peer, other)


@pytest.mark.parametrize("why", ["no room", "killed"])
def test_the_optimizers_state_is_left_out_first(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk has no room for it, and where the process is killed before all is written."""
    peer, _ = trained()
    residual = peer.worker.x - peer.worker.global_model.vector
    monkeypatch.setattr("recipes.training.peer_checkpoint.LONG", 0)
    least, replace = size_of(peer, optimizer=False), os.replace
    assert least < size_of(peer)

    def killed(part: Path, path: Path) -> None:
        if path.exists():
            raise KeyboardInterrupt
        replace(part, path)

    if why == "killed":
        monkeypatch.setattr("recipes.weight_files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            keep(peer, tmp_path / "kept", ABOUT)
    else:
        keep(peer, tmp_path / "kept", ABOUT, most=least)
    other = fresh()
    read(tmp_path / "kept")
    restore(other, tmp_path / "kept")

    assert torch.equal(other.worker.x - other.worker.global_model.vector, residual)
    assert not other.trainer.stepped


def test_a_packet_whose_fate_is_unknown_is_not_kept(tmp_path: Path) -> None:
    peer, _ = trained()
    sent = peer.worker.start()
    before = peer.worker.residual_norm()
    peer.flights.append(Flight(0, [], 0.0, sent))
    keep(peer, tmp_path / "kept", ABOUT)
    other = fresh()
    restore(other, tmp_path / "kept")

    assert other.worker.residual_norm() < before


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("kept") / "kept"
    keep(trained()[0], path, ABOUT)
    return path.read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_known_before_anything_of_it_is_used(
    written: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(written) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip"]))
    bit = 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "kept"
    path.write_bytes(written[:at] if kind == "cut" else flipped(written, at, bit))
    try:
        stay = read(path)
    except ValueError:
        return
    # JSON has more than one way to say the same
    assert (stay.round, stay.fingerprint, dict(stay.about)) == (4, fingerprint_of(written), ABOUT)


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


def fingerprint_of(data: bytes) -> int:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return int(header["__metadata__"]["fingerprint"], 16)


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, _ = trained(rounds=2)
    keep(peer, tmp_path / "kept", ABOUT)
    before = (tmp_path / "kept").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recipes.weight_files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        keep(peer, tmp_path / "kept", ABOUT)

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == before


def test_a_model_that_diverged_is_not_kept_and_one_that_did_nothing_has_nothing(tmp_path: Path) -> None:
    peer, _ = trained()
    assert anything_of(peer)
    assert not anything_of(fresh())
    peer.worker.x[3] = float("nan")

    with pytest.raises(ValueError, match="not finite"):
        keep(peer, tmp_path / "kept", ABOUT)


def test_a_state_of_another_model_or_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    peer, _ = trained()
    keep(peer, tmp_path / "kept", ABOUT)

    class Other(Bigram):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(3, 3))

    other = build_peer(Other(), recipe_with("adamw_torch"), micro_batch=1)
    with pytest.raises(ValueError, match="has the shape"):
        restore(other, tmp_path / "kept")

    assert other.worker.global_model.round == 0
