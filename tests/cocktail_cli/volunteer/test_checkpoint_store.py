"""A leaving peer's checkpoint: only the same peer of the same run finds it, and it is deleted once
useless.
"""

import os
import signal
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cocktail_cli.errors import Failure
from cocktail_cli.ui import Event
from cocktail_cli.volunteer import VolunteerLimits, VolunteerSession, checkpoint_store
from cocktail_cli.volunteer.base_weights import digest_of
from cocktail_cli.volunteer.bootstrap import Prepared
from cocktail_cli.volunteer.checkpoint_store import CheckpointKey
from cocktail_cli.volunteer.run_link import RunLink
from recipes.config import Recipe
from recipes.training import Peer, build_peer, peer_checkpoint
from transport.protocol import Leaving, LinkLost, RunOver

KEY = CheckpointKey("amber-otter-42", "ann", "recipe-hash", "base-digest")


def peer(moved: bool = True) -> Peer:
    model = torch.nn.Linear(6, 5)
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": "none"},
            "datasets": [{"path": "none"}],
            "training": {"optim": "adamw_torch"},
        }
    )
    made = build_peer(model, recipe, micro_batch=1)
    if moved:
        made.trainer.flat.grad.fill_(0.5)
        made.trainer.optimizer.step()
    return made


@pytest.fixture
def told() -> list[str]:
    return []


def test_the_same_peer_of_the_same_run_restores_its_checkpoint_once(told: list[str]) -> None:
    left, back = peer(), peer(moved=False)
    assert checkpoint_store.store(left, KEY, told.append) > 0
    kept = checkpoint_store.find(KEY, told.append)
    assert kept is not None
    kept.restore(back)

    assert torch.equal(back.worker.x, left.worker.x)
    assert (kept.round, kept.fingerprint) == (0, left.worker.global_model.fingerprint)
    assert checkpoint_store.find(KEY, told.append) is None, "or a crash later on would bring it back twice"
    assert told == []


@pytest.mark.parametrize(
    ("changed", "what"),
    [("run", None), ("peer", None), ("recipe", "another recipe"), ("base", "another base")],
)
def test_no_other_peer_run_recipe_or_base_finds_it(changed: str, what: str | None, told: list[str]) -> None:
    checkpoint_store.store(peer(), KEY, told.append)
    other = replace(KEY, **{changed: "other"})

    assert checkpoint_store.find(other, told.append) is None
    assert checkpoint_store.find(KEY, told.append) is not None
    assert what is None or (len(told) == 1 and what in told[0])


def test_a_damaged_checkpoint_is_a_warning_and_removed(told: list[str]) -> None:
    checkpoint_store.store(peer(), KEY, told.append)
    path = KEY.path
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)

    assert checkpoint_store.find(KEY, told.append) is None
    assert "damaged and removed" in told[0]
    assert not path.exists()


def test_a_full_disk_is_a_warning_and_nothing_is_written(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=checkpoint_store.SPARE)
    monkeypatch.setattr(checkpoint_store.shutil, "disk_usage", lambda _: usage)

    assert checkpoint_store.store(peer(), KEY, told.append) == 0
    assert "residual is not kept: it takes" in told[0]
    assert not list(checkpoint_store.folder().rglob("*.*"))


needs_children = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no process")


@needs_children
def test_a_checkpoint_is_written_on_without_this_process_and_whoever_comes_back_waits_for_it(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, back, (begun, begins), (go, goes) = peer(), peer(moved=False), os.pipe(), os.pipe()
    write, wait = os.fsync, checkpoint_store.lock_of

    def held(file: int) -> None:
        os.write(begins, b".")
        os.read(go, 1)
        write(file)

    def waiting(path: Path) -> Path:
        os.write(goes, b"..")
        return wait(path)

    monkeypatch.setattr(os, "fsync", held)
    size = checkpoint_store.store(left, KEY, told.append, patience=0.0)
    os.read(begun, 1)
    assert (size, KEY.path.exists()) == (peer_checkpoint.size_of(left), False)

    monkeypatch.setattr(checkpoint_store, "lock_of", waiting)
    kept = checkpoint_store.find(KEY, told.append)
    assert kept is not None
    kept.restore(back)
    assert torch.equal(back.worker.x, left.worker.x)
    assert told == []
    assert not list(checkpoint_store.folder().rglob("*.*"))


@needs_children
def test_a_checkpoint_that_its_child_could_not_write_is_a_warning(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: os.kill(os.getpid(), signal.SIGKILL))

    assert checkpoint_store.store(peer(), KEY, told.append) == 0
    assert told == [
        "this peer's residual is not kept: the process that wrote it has failed, perhaps as the disk is full"
    ]


def test_a_peer_without_state_of_its_own_stores_nothing(told: list[str]) -> None:
    assert checkpoint_store.store(peer(moved=False), KEY, told.append) == 0
    assert (told, checkpoint_store.folder().exists()) == ([], False)


def test_checkpoints_of_ended_and_long_silent_runs_are_deleted(told: list[str]) -> None:
    checkpoint_store.store(peer(), KEY, told.append)
    checkpoint_store.store(peer(), replace(KEY, run="old-newt-7"), told.append)
    checkpoint_store.delete_run(KEY.run)
    assert checkpoint_store.find(KEY, told.append) is None

    old = checkpoint_store.path_of("old-newt-7", "ann")
    os.utime(old, (0, 0))
    checkpoint_store.store(peer(), KEY, told.append)
    assert not old.exists()
    checkpoint_store.delete_run("never-heard-of")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other rights")
def test_no_other_user_of_the_machine_can_read_it(told: list[str]) -> None:
    checkpoint_store.store(peer(), KEY, told.append)
    path = KEY.path

    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("name", ["../ann", "", "a/b", "a\nb", "\u202eann", "x" * 300])
def test_a_name_that_no_hub_gives_is_refused(name: str, told: list[str]) -> None:
    with pytest.raises(Failure, match="the hub gives the name"):
        checkpoint_store.find(replace(KEY, peer=name), told.append)


class Shown:
    """A view that collects events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def show(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Do nothing, as nothing is open."""


class FakeLink:
    """A link whose run ends with this error."""

    name = "ann"
    leave_requested = threading.Event()

    def __init__(self, end: Exception) -> None:
        self.end, self.left = end, ""

    def leave(self, reason: str) -> None:
        self.left = reason

    def divide_packets(self, part_of: object) -> None:
        """No packet comes."""


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (LinkLost("the hub has not answered for 600 s"), True),
        (Leaving("asked to leave while waiting"), True),
        (RunOver("the hub's disk is full", False, resumable=True), True),
        (RunOver("every sample was counted", True), False),
        (RunOver("stopped by its host", False), False),
    ],
    ids=["hub lost", "Ctrl-C", "run failed", "run finished", "run stopped"],
)
def test_a_session_stores_a_checkpoint_unless_the_run_is_over(
    end: Exception, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier checkpoint of a run that is over is deleted as well."""
    view, link = Shown(), FakeLink(end)
    limits = VolunteerLimits("ann", ["cpu"])
    session = VolunteerSession(SimpleNamespace(run="amber-otter-42"), limits, view)  # type: ignore[arg-type]
    welcome = SimpleNamespace(run="amber-otter-42", name="ann", recipe_hash="r", base=[], round=0)
    old = checkpoint_store.path_of("amber-otter-42", "ann")
    mine = peer()
    key = CheckpointKey("amber-otter-42", "ann", "r", digest_of([]))
    checkpoint_store.store(mine, key, lambda _: None)
    kept_of = checkpoint_store.find(key, lambda _: None)

    def carry_out() -> Prepared:
        back = peer(moved=False)
        kept_of.restore(back)
        return Prepared(back, {}, None)  # type: ignore[arg-type]

    def train(*_: object) -> None:
        assert not old.exists(), "it is in use"
        raise end

    monkeypatch.setattr(session, "train", train)
    bootstrap = SimpleNamespace(carry_out=carry_out, recipe=mine.recipe, traffic=(0, 0))
    try:
        session.train_and_store(RunLink(link, None), welcome, bootstrap)  # type: ignore[arg-type]
    except LinkLost:
        assert isinstance(end, LinkLost)

    assert old.exists() == kept
    assert session.peer is not None
    assert torch.equal(session.peer.worker.x, mine.worker.x), "it was found"
    assert not session.storing


@pytest.mark.parametrize("name", ["ann", "ömer-3090", "東京", "-ann", ".ann", "con.x"])
def test_a_name_in_any_script_has_a_file_of_its_own_with_a_plain_name(name: str) -> None:
    path = checkpoint_store.path_of("amber-otter-42", name)

    assert path.parent == checkpoint_store.folder() / "amber-otter-42"
    assert path.name.isascii()
    assert path != checkpoint_store.path_of("amber-otter-42", name + "-2")
    assert ("@" in path.name) == (name not in ("ann", "con.x")), "as before where it is plain"
