"""The base model from a stranger's hub: names checked, contents checked, nothing fetched twice."""

import hashlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest
from local_hub import OTHER, TOKEN, LocalHub, ask_only
from msgspec.structs import replace

from cocktail_cli.errors import Failure
from cocktail_cli.machine import cache, locked_folder, remove_unlocked
from cocktail_cli.volunteer import (
    base_folder,
    base_weights,
    bytes_to_fetch,
    check_files,
    fetch_base,
    spool_within,
)
from cocktail_cli.volunteer.base_weights import (
    DiskAllowance,
    check_free,
    check_headers,
    damaged,
    fetch_files,
    fetch_gated,
    fetched_snapshot,
    missing_files,
)
from recipes.config import Model
from transport import WantedFile
from transport.ledger import lock_exclusively
from transport.protocol import LedgerBusy, NoRoom, NotServed, TooLong, messages

OFFER = messages.SnapshotOffer(7, 5, "ab" * 32, 0)


@dataclass
class FakeHub:
    """Serves these files and counts what was asked for; `dies` after the first half of that file."""

    contents: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    begun: list[bytes] = field(default_factory=list)  # what was there before
    dies: str = ""

    def files(self) -> list[messages.File]:
        return [messages.File(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in self.contents.items()]

    def fetch(self, wanted: Sequence[WantedFile]) -> None:
        for file in wanted:
            self.asked.append(file.name)
            data = self.contents[file.path.name]
            part = file.path.with_name(file.path.name + ".part")
            self.begun += [p.read_bytes() for p in (part, file.path) if p.exists()]
            if file.path.name == self.dies:
                part.write_bytes(data[: len(data) // 2])
                raise NotServed("died")
            file.path.write_bytes(data)
            part.unlink(missing_ok=True)


def go_on() -> None:
    return None


def fetched(hub: FakeHub) -> Path:
    """The folder with what the hub has."""
    folder = base_folder(hub.files())
    fetch_base(hub.files(), folder, hub.fetch)
    return folder


def test_a_base_is_fetched_once_and_found_the_second_time() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})

    folder = fetched(hub)
    assert fetched(hub) == folder

    assert hub.asked == ["base/config.json", "base/model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_damaged_file_is_found_and_mended_from_what_is_left_of_it() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})
    folder = fetched(hub)
    (folder / "model.safetensors").write_bytes(b"weighty")
    bad = damaged(hub.files(), folder, go_on)
    fetch_files(bad, folder, hub.fetch)

    assert [file.name for file in bad] == ["model.safetensors"]
    assert hub.asked[2:] == ["base/model.safetensors"]
    assert hub.begun == [b"weighty"], "whoever fetches has what was there, to keep what is right of it"
    assert damaged(hub.files(), folder, go_on) == []


def test_an_attempt_that_ended_early_is_gone_on_with() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"}, dies="model.safetensors")
    with pytest.raises(NotServed):
        fetched(hub)
    hub.dies, folder = "", base_folder(hub.files())

    assert bytes_to_fetch(hub.files()[1:], folder) == 4, "three bytes are here"
    fetched(hub)
    assert hub.begun == [b"wei"] or hub.begun == [b"{}", b"wei"]
    assert not missing_files(hub.files(), folder)


def test_two_peers_of_one_machine_do_not_meet_in_one_file(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "w") as first, locked_folder(tmp_path / "w") as second:
        names = [first.name, second.name]
    with locked_folder(tmp_path / "w") as third:
        assert third == first, "what the first left is the third's to go on with"

    assert names == ["w", "w-2"]


def test_a_lock_goes_while_it_is_held_so_two_peers_never_hold_one_each_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is unlinked is still a lock to whoever holds it, and to nobody else."""

    def unlink(path: Path) -> None:
        with pytest.raises(LedgerBusy):
            lock_exclusively(path)
        gone.append(path.name)
        fine(path)

    gone, fine = list[str](), Path.unlink
    monkeypatch.setattr(Path, "unlink", unlink)
    with locked_folder(tmp_path / "w") as first:
        waiting = sqlite3.connect(tmp_path / "w.lock", isolation_level=None, timeout=0)
        shutil.rmtree(first)
    with pytest.raises(sqlite3.OperationalError):
        waiting.execute("BEGIN EXCLUSIVE")
    for name in ("old", "mine"):
        with locked_folder(tmp_path / name):
            pass
    with locked_folder(tmp_path / "busy"):
        remove_unlocked(tmp_path, keep="mine")

    assert gone == ["w.lock", "old.lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "busy.lock", "mine", "mine.lock"]


def test_a_base_that_another_peer_is_fetching_is_fetched_beside_it() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})
    folder = base_folder(hub.files())
    with locked_folder(folder / ".fetching") as others:
        (others / "model.safetensors.part").write_bytes(b"wei")
        fetched(hub)

        assert (others / "model.safetensors.part").read_bytes() == b"wei"
    assert hub.begun == []
    assert not missing_files(hub.files(), folder)


def test_what_another_peer_of_this_machine_made_whole_is_not_taken_from_it() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})
    folder = base_folder(hub.files())
    folder.mkdir(parents=True)
    wanted = missing_files(hub.files(), folder)

    def fetch(files: Sequence[WantedFile]) -> None:
        """Another peer is done first, and reads its model, while this one is at it."""
        fetch_files(wanted, folder, hub.fetch)
        others.append((folder / "model.safetensors").open("rb"))
        hub.fetch(files)
        assert (folder / "model.safetensors").read_bytes() == b"weights"

    others: list[BinaryIO] = []
    fetch_files(wanted, folder, fetch)
    count = len(hub.asked)
    fetch_files(wanted, folder, hub.fetch)  # which was found lacking before anybody was done

    assert others[0].read() == b"weights"
    others[0].close()
    assert len(hub.asked) == count, "what is there is not fetched"
    assert damaged(hub.files(), folder, go_on) == []


def test_a_file_under_repair_stays_where_it_is() -> None:
    hub = FakeHub({"model.safetensors": b"weights"})
    folder = fetched(hub)
    (folder / "model.safetensors").write_bytes(b"weighty")

    def fetch(files: Sequence[WantedFile]) -> None:
        assert (folder / "model.safetensors").read_bytes() == b"weighty"
        hub.fetch(files)

    fetch_files(hub.files(), folder, fetch)
    assert damaged(hub.files(), folder, go_on) == []


def test_a_snapshot_stands_beside_the_small_files_and_goes_when_it_is_loaded() -> None:
    hub = FakeHub(
        {"config.json": b"{}", "model-1-of-1.safetensors": b"base", "model.safetensors": b"trained"}
    )
    files = [file for file in hub.files() if file.name != "model.safetensors"]
    old = cache() / "snapshots" / "old"
    old.mkdir(parents=True)
    with fetched_snapshot(OFFER, files, hub.fetch) as folder:
        there = {path.name: path.read_bytes() for path in folder.iterdir()}

    assert there == {"config.json": b"{}", "model.safetensors": b"trained"}
    assert hub.asked == ["base/config.json", "snapshot/7/model.safetensors"], "no weights of the base"
    assert list((cache() / "snapshots").iterdir()) == [], "nor what an older attempt left"


def test_a_snapshot_that_did_not_come_whole_stays_for_the_next_attempt() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"trained"}, dies="model.safetensors")
    with pytest.raises(NotServed), fetched_snapshot(OFFER, hub.files()[:1], hub.fetch):
        pass
    hub.dies = ""
    with fetched_snapshot(OFFER, hub.files()[:1], hub.fetch):
        pass

    assert hub.begun[-1] == b"tra"


def test_a_model_that_does_not_fit_is_refused_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub({"model.safetensors": b"weights"})
    monkeypatch.setattr(base_weights, "free_bytes", lambda most=None: 6)
    with pytest.raises(Failure, match="the model needs") as caught:
        fetched(hub)

    assert (caught.value.exit, hub.asked) == (8, [])


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/etc/passwd",
        "a/b.json",
        "modeling.py",
        "weights.bin",
        ".hidden.json",
        "c:x.json",
        "x" * 200,
        "",
    ],
)
def test_a_file_that_could_leave_the_folder_or_be_code_is_refused(name: str) -> None:
    with pytest.raises(Failure) as caught:
        check_files([messages.File(name, 1, "")])

    assert caught.value.exit == 6


def test_a_file_may_come_once_only() -> None:
    with pytest.raises(Failure):
        check_files([messages.File("config.json", 1, ""), messages.File("config.json", 2, "")])


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("config.json", 1 << 20),
        ("generation_config.json", 1 << 20),
        ("model.safetensors.index.json", (2 << 20) + (1 << 16)),
        ("tokenizer_config.json", 4 << 20),
        ("chat_template.jinja", 4 << 20),
        ("tokenizer.json", 64 << 20),
        ("vocab.txt", 64 << 20),
    ],
)
def test_a_file_that_is_read_whole_is_no_longer_than_one_of_its_kind(name: str, most: int) -> None:
    weights = messages.File("model.safetensors", 1 << 30, "")
    check_files([weights, messages.File(name, most, "")])

    with pytest.raises(Failure, match="one of this kind has") as caught:
        check_files([weights, messages.File(name, most + 1, "")])
    assert caught.value.exit == 6


def test_a_model_has_no_more_files_than_one_can_have() -> None:
    with pytest.raises(Failure, match="offers 1,025 files as its model, 1,024 at most"):
        check_files([messages.File(f"m{n}.safetensors", 1, "") for n in range(1025)])


@pytest.mark.parametrize(("length", "right"), [(2 << 20, True), ((2 << 20) + 1000, False), (1 << 60, False)])
def test_a_list_of_tensors_that_would_fill_the_memory_is_found_by_its_length(
    tmp_path: Path, length: int, right: bool
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + bytes(3 << 20))
    (tmp_path / "other.json").write_bytes(b"")

    if right:
        check_headers([path, tmp_path / "other.json"])
    else:
        with pytest.raises(Failure, match=f"the run's model.safetensors has a header of {length} bytes"):
            check_headers([path])


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (NotServed("gone"), True),
        (Failure("out_of_disk", "full"), True),
        (TooLong("a lie"), False),
        (Failure("rejected", "a lie"), False),
    ],
)
def test_of_a_download_that_the_hub_lies_about_nothing_is_left(error: Exception, stays: bool) -> None:
    hub = FakeHub({"config.json": b"{}"})
    folder = base_folder(hub.files())

    def begins(wanted: Sequence[WantedFile]) -> None:
        wanted[0].path.with_name("config.json.part").write_bytes(b"{")
        raise error

    with pytest.raises(type(error)):
        fetch_base(hub.files(), folder, begins)
    assert (folder / ".fetching" / "config.json.part").exists() == stays


def test_what_is_no_sha256_is_no_name_of_a_folder() -> None:
    with pytest.raises(Failure, match="as a sha256"):
        check_files([messages.File("config.json", 1, "../..")])
    with (
        pytest.raises(Failure, match="as a sha256"),
        fetched_snapshot(messages.SnapshotOffer(1, 1, "../../../etc", 0), [], FakeHub({}).fetch),
    ):
        pass


# ---- objects without a name --------------------------------------------------------------------------------


def test_objects_on_the_disk_take_of_the_room_that_the_model_leaves_and_give_it_back() -> None:
    folder = fetched(FakeHub({"model.safetensors": bytes(600)}))
    room = DiskAllowance(1000)
    assert room.free == 400

    room.take(300, "eval")
    with pytest.raises(NoRoom, match=r"--max-disk .*: packets needs") as full:
        room.take(101, "packets")
    assert full.value.hints
    room.take(100, "packets")
    assert room.free == 0
    room.give_back(300)
    assert room.free == 300

    assert folder.exists()


def test_a_run_that_needs_nothing_more_is_within_any_limit() -> None:
    fetched(FakeHub({"model.safetensors": bytes(600)}))
    check_free(0, most=100)

    with pytest.raises(Failure, match="--max-disk leaves 0 B: the model needs 1 B"):
        check_free(1, most=100)


def test_an_object_of_a_run_is_stored_without_a_name() -> None:
    """So it is gone with the process that has it, however that ends."""
    with closing(spool_within(None).open("packets/0-1", 5, b"", 5)) as stored:
        stored.add(0, b"bytes")
        assert stored.finish().read() == b"bytes"
        assert [path for path in cache().rglob("*") if path.is_file()] == []


# ---- gated bases -------------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalHub, Model]]:
    """A hub with a gated model, and the model as a run names it."""
    with LocalHub() as hub:
        ask_only(hub, monkeypatch, tmp_path / "hugging face")
        repo = hub.add("meta/otter", GATED, gated=True)
        commit = repo.branches["main"]
        yield hub, Model(model_name_or_path="meta/otter", model_revision=commit)


GATED = {"config.json": b"{}", "model.safetensors": b"weights"}


def announced(contents: dict[str, bytes]) -> list[messages.File]:
    return [replace(file, gated=True) for file in FakeHub(contents).files()]


def fetch_own(model: Model, files: Sequence[messages.File]) -> Path:
    folder = base_folder(files)
    fetch_base(files, folder, lambda wanted: fetch_gated(model, wanted, lambda done, total: None))
    return folder


def test_who_may_read_a_gated_base_fetches_it_with_its_own_token_and_stores_it_once(
    hugging_face: tuple[LocalHub, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, model = hugging_face
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    files = announced(GATED)
    folder = fetch_own(model, files)
    fetch_own(model, files)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == GATED
    assert (folder / "model.safetensors").stat().st_nlink == 2, "the hub's cache has the same bytes"
    assert sorted(hub.repos["models/meta/otter"].asked) == sorted(GATED)


def test_a_gated_base_counts_among_what_a_run_may_take_of_the_disk(
    hugging_face: tuple[LocalHub, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    files = announced(GATED)

    with pytest.raises(Failure, match=r"--max-disk .*: the model needs"):
        fetch_base(files, base_folder(files), lambda _: pytest.fail("asked"), most=5)


@pytest.mark.parametrize("token", [None, OTHER])
def test_who_may_not_is_told_where_to_accept_the_licence(
    hugging_face: tuple[LocalHub, Model], monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)

    with pytest.raises(Failure) as refused:
        fetch_own(hugging_face[1], announced(GATED))

    hint = "(hint: accept the licence at https://huggingface.co/meta/otter, then `hf auth login`)"
    assert str(refused.value).endswith(f"meta/otter: access is gated {hint}")


@pytest.mark.parametrize(
    ("changed", "contents", "said"),
    [
        ({}, {**GATED, "model.safetensors": b"weighty"}, "model.safetensors of meta/otter is not the one"),
        ({}, {**GATED, "merges.txt": b""}, "merges.txt of meta/otter is not the one"),
        ({"model_name_or_path": "/home/dana/otter"}, GATED, "names no commit of it on the hub"),
        ({"model_revision": "main"}, GATED, "names no commit of it on the hub"),
    ],
)
def test_a_gated_base_is_a_commit_of_the_hub_with_the_hashes_that_the_run_names(
    hugging_face: tuple[LocalHub, Model],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
    contents: dict[str, bytes],
    said: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    with pytest.raises(Failure, match=said):
        fetch_own(hugging_face[1].model_copy(update=changed), announced(contents))
