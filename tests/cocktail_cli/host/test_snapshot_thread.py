"""Snapshots beside a run: made when due, checked, offered, served, and never in the way of the training."""

import errno
import hashlib
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from cocktail_cli.assembly import ModelOnDisk
from cocktail_cli.host import CommittedModel
from cocktail_cli.host.snapshot_thread import SnapshotThread, snapshot_object
from cocktail_cli.ui import Checkpoint, Event, Progressed, Warning
from compress import fingerprint
from recipes.algorithm import GlobalModel, compressor_of
from recipes.config import load_recipe
from recipes.models import load_model, open_tokenizer, prepare_base
from recipes.snapshots import Fold
from recipes.training import FlatParameters
from transport import Ledger
from transport.ledger import RoundRow
from transport.protocol import messages

PATIENCE = 60.0  # seconds for a fold on a busy machine
RECIPE = load_recipe("smoke", ["save_steps=4", "max_steps=40"])


@dataclass
class Story:
    """A run's folder, as a hub would have left it, and x' as every peer had it."""

    folder: Path
    ledger: Ledger
    common: GlobalModel
    before: dict[int, torch.Tensor] = field(default_factory=dict)  # x' before each round

    @property
    def model(self) -> CommittedModel:
        return CommittedModel(RECIPE, self.folder / "base", self.folder)

    def commit(self, rounds: int, says: Callable[[int], int] = lambda number: number) -> None:
        """Commit more rounds of one step each; `says` maps a round's fingerprint to the one that peers
        report.
        """
        common = self.common
        for round in range(common.round, common.round + rounds):
            [(_, sample)] = common.samples()
            packet = common.compressor.encode(0.01 * torch.randn(sample.m)).packet
            self.before[round] = common.vector.clone()
            row = RoundRow(round, round, 0.0, 0.0, says(common.fingerprint), ("a",), ("a",), 1.0, 8)
            self.ledger.commit(row, packet, ())
            common.apply(packet)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_base(RECIPE, tmp_path_factory.mktemp("made") / "base").folder


@pytest.fixture
def story(base: Path, tmp_path: Path) -> Iterator[Story]:
    shutil.copytree(base, tmp_path / "base")
    open_tokenizer(base).save_pretrained(tmp_path / "tokenizer")
    vector = FlatParameters(load_model(base)).vector
    with Ledger(tmp_path / "ledger", run="a-run", samples=10_000) as ledger:
        yield Story(
            tmp_path, ledger, GlobalModel(vector, compressor_of(RECIPE.compression), RECIPE.training.seed)
        )


@contextmanager
def minding(
    story: Story, every: int = 4
) -> Iterator[tuple[SnapshotThread, list[list[messages.SnapshotOffer]]]]:
    offers: list[list[messages.SnapshotOffer]] = []
    snapshots = SnapshotThread(story.model, every, 40, offers.append)
    snapshots.start()
    try:
        yield snapshots, offers
    finally:
        snapshots.close()
        assert not snapshots.thread.is_alive()


def told(snapshots: SnapshotThread) -> Event:
    """Wait for its next event; how far it is, which a slow machine is told, is passed over."""
    while isinstance(event := snapshots.news.get(timeout=PATIENCE), Progressed):
        pass
    return event


def here(story: Story) -> list[str]:
    folder = story.folder / "snapshots"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def vector_of(folder: Path) -> torch.Tensor:
    return FlatParameters(load_model(folder)).vector


def test_snapshots_are_made_when_due_and_are_what_the_peers_had(story: Story) -> None:
    with minding(story) as (snapshots, offers):
        for _ in range(13):
            story.commit(1)
            snapshots.committed(story.common.round - 1, story.common.round)
            if story.common.round % 4 == 0:
                checkpoint = told(snapshots)
                assert isinstance(checkpoint, Checkpoint)
                assert checkpoint.round == story.common.round - 1
                assert torch.equal(vector_of(Path(checkpoint.model)), story.before[checkpoint.round])
        assert snapshots.news.empty()

    assert here(story) == ["11", "7"], "the newest two of 3, 7, 11"
    assert [[offer.round for offer in offer] for offer in offers] == [[3], [3, 7], [7, 11]]


def test_the_base_and_each_snapshot_are_used_and_a_warning_of_the_user_is_told_once(story: Story) -> None:
    used: list[ModelOnDisk] = []

    def use(model: ModelOnDisk) -> None:
        used.append(model)
        model.tell(Warning("no room"))

    snapshots = SnapshotThread(story.model, 4, 40, lambda offers: None, use)
    snapshots.start()
    assert told(snapshots) == Warning("no room")
    story.commit(5)
    snapshots.committed(4, 5)
    made = told(snapshots)
    snapshots.close()

    assert isinstance(made, Checkpoint)
    assert snapshots.news.empty()
    assert [(one.round, one.step, one.folder) for one in used] == [
        (0, 0, story.model.base),
        (4, 5, Path(made.model)),
    ]


def test_an_offer_says_what_to_fetch_and_how_to_check_it_and_nothing_else_is_served(story: Story) -> None:
    story.commit(9)
    with minding(story) as (snapshots, offers):  # found due at its start
        assert isinstance(told(snapshots), Checkpoint)

    [[offer]] = offers
    weights = snapshot_object(story.model.snapshots, "snapshot/8/model.safetensors")
    hashes = snapshot_object(story.model.snapshots, "hashes/snapshot/8/model.safetensors")
    assert isinstance(weights, Path)
    assert isinstance(hashes, bytes)
    data = weights.read_bytes()
    chunks = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
    assert hashes == b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    assert offer == messages.SnapshotOffer(
        8, len(data), hashlib.sha256(hashes).hexdigest(), story.ledger.rounds()[8].offset
    )
    for name in ("snapshot/9/model.safetensors", "snapshot/8/config.json", "snapshot/../8", "anything"):
        with pytest.raises(KeyError):
            snapshot_object(story.model.snapshots, name)


def test_whole_snapshots_are_offered_again_and_half_ones_cleared_away(story: Story) -> None:
    story.commit(9)
    with minding(story) as (snapshots, first):
        told(snapshots)
    (story.folder / "snapshots" / ".9.part").mkdir()

    with minding(story) as (snapshots, second):
        assert second == first
        assert here(story) == ["8"]
    assert snapshots.news.empty(), "it was not made again"


def test_a_snapshot_of_another_past_is_not_offered(story: Story, base: Path) -> None:
    """The ledger was put back from a copy, say: its round 8 is another one."""
    story.commit(9)
    with minding(story) as (snapshots, _):
        told(snapshots)
    story.ledger.close()
    shutil.rmtree(story.folder / "ledger")
    with Ledger(story.folder / "ledger", run="a-run", samples=10_000) as ledger:
        other = replace(
            story,
            ledger=ledger,
            common=GlobalModel(vector_of(base), story.common.compressor, story.common.seed),
        )
        other.commit(9)
        with minding(other, every=0) as (_, offers):
            assert offers == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.sha256", "config.json", "tokenizer.json", "SHA256SUMS"]
)
@pytest.mark.parametrize("how", ["flipped", "halved", "removed"])
def test_a_damaged_snapshot_is_removed_and_told_and_another_one_is_folded(
    story: Story, name: str, how: str
) -> None:
    """A damaged snapshot is neither offered to joiners nor folded into the next one."""
    story.commit(5)
    with minding(story) as (snapshots, _):
        first = told(snapshots)
    assert isinstance(first, Checkpoint)
    path = Path(first.model) / name
    data = path.read_bytes()
    path.unlink()
    if how != "removed":
        middle = len(data) // 2
        path.write_bytes(
            data[:middle] + (bytes([data[middle] ^ 4]) + data[middle + 1 :]) * (how == "flipped")
        )
    story.commit(1)
    with minding(story) as (snapshots, offers):
        news = [told(snapshots)]
        while not isinstance(news[-1], Checkpoint):
            news.append(told(snapshots))

    if (name, how) != ("model.safetensors", "removed"):  # as of a hub that was killed before it was written
        damaged, removed = (event.message for event in news[:2] if isinstance(event, Warning))
        assert name in damaged
        assert removed == f"the snapshot {path.parent} was removed, as the ledger has all that is in it"
    assert (here(story), [one.round for one in offers[-1]]) == (["5"], [5])
    assert torch.equal(vector_of(story.folder / "snapshots" / "5"), story.before[5])


def test_what_the_peers_did_not_have_is_not_published_and_told(story: Story) -> None:
    story.commit(6)
    story.commit(3, says=lambda number: number ^ 1)
    with minding(story) as (snapshots, offers):
        warning = told(snapshots)

    assert isinstance(warning, Warning)
    right = fingerprint(story.before[8])
    assert f"{right:016x}" in warning.message
    assert f"{right ^ 1:016x}" in warning.message
    assert (here(story), offers) == ([], [])


def test_a_full_disk_is_told_once_and_the_run_goes_on(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.commit(5)
    room, asked = shutil.disk_usage(story.folder), queue.SimpleQueue[int]()
    free = iter([1000, 1000, room.free])

    def usage(path: Path) -> object:
        asked.put(1)
        return room._replace(free=next(free))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with minding(story) as (snapshots, _):
        warning = told(snapshots)
        assert isinstance(warning, Warning)
        assert "no snapshots while the disk is full: a model of" in warning.message
        for _ in range(2):
            asked.get(timeout=PATIENCE)
            story.commit(4)
            snapshots.committed(story.common.round - 1, story.common.round)
        assert isinstance(told(snapshots), Checkpoint), "the second warning was not told"

    assert here(story) == ["12"]


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.commit(5)

    def full(file: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("recipes.snapshots._write", full)
    with minding(story) as (snapshots, _):
        assert isinstance(told(snapshots), Warning)
    assert here(story) == []


def test_ctrl_c_does_not_wait_for_a_fold(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold is cancelled between two windows, and nothing of it stays."""
    story.commit(9)
    plain, begun = Fold._poll, threading.Event()

    def poll(fold: Fold) -> None:
        begun.set()
        fold.stop.__self__.wait(PATIENCE)  # the event that it asks: the fold stands here until it is set
        plain(fold)

    monkeypatch.setattr("recipes.snapshots.Fold._poll", poll)
    with minding(story) as (snapshots, offers):
        assert begun.wait(PATIENCE)
        assert here(story) == [".8.part"]

    assert snapshots.news.empty()
    assert here(story) == []
    assert offers == []


def test_x_is_folded_from_the_newest_snapshot_that_is_not_after_the_wanted_round(
    story: Story, base: Path
) -> None:
    story.commit(9)
    with minding(story) as (snapshots, _):
        told(snapshots)
    story.commit(3)

    for round, wanted in ((5, story.before[5]), (8, story.before[8]), (11, story.before[11])):
        assert torch.equal(CommittedModel(RECIPE, base, story.folder).load(round).global_model.vector, wanted)
    with story.model.fold(11) as late, story.model.fold(7) as early:
        assert (late.start, early.start) == (8, 0)


def test_an_export_is_the_last_fold_with_the_runs_tokenizer(story: Story) -> None:
    story.commit(9)
    with minding(story) as (snapshots, _):
        told(snapshots)
    story.commit(2)

    assert story.model.write_model(story.folder / "out") == 11

    assert torch.equal(vector_of(story.folder / "out"), story.common.vector)
    assert open_tokenizer(story.folder / "out").decode([65, 66]) == open_tokenizer(
        story.folder / "base"
    ).decode([65, 66])
