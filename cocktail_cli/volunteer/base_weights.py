"""Weights of a run on a peer's disk: fetched by hash, kept in the cache, checked before every use.

The base lives in the cache, one folder for each set of files; what is under way lies in `.fetching` there. A
snapshot is a guest: its folder goes when the model is loaded. Peers of one machine share what is whole, and
work each in a folder of its own on what is not (slots.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cocktail_cli.errors import Failure, writing_to
from cocktail_cli.machine import cache, claimed, clear
from cocktail_cli.ui import megabytes

if TYPE_CHECKING:
    from transport import WantedFile
    from transport.protocol import SnapshotOffer

# What a base may consist of: data only. No pickle (an owner writes `.bin` anew before it is served), and no
# Python but where this machine's owner trusts it.
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
KINDS = (".json", ".safetensors", ".model", ".txt", ".jinja")
WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?")
SHA256 = re.compile(r"[0-9a-f]{64}")
SPARE = 256 << 20  # bytes that stay free on the disk
FETCHING = ".fetching"


class File(Protocol):
    """One file as the hub announces it (transport.File)."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def hashes(self) -> str: ...


class Fetch(Protocol):
    """Fetches files; of what is at their paths already only what is wrong (transport.Supply.files)."""

    def __call__(self, wanted: Sequence[WantedFile]) -> None: ...


def check_names(files: Sequence[File], code: bool = False) -> None:
    """The hub names the files: none may leave the folder, be code, or come twice. Raises Failure
    (rejected).
    """
    times, kinds = Counter(file.name for file in files), (*KINDS, ".py") if code else KINDS
    for name in times:
        if not PLAIN.fullmatch(name) or not name.endswith(kinds) or times[name] > 1:
            raise Failure("rejected", f"the run offers a file {name[:80]!r} as part of its model")
    for digest in [digest for file in files for digest in (file.sha256, file.hashes) if digest]:
        if not SHA256.fullmatch(digest):
            raise Failure("rejected", f"the run announces {digest[:80]!r} as a sha256, which is none")


def is_weights(file: File) -> bool:
    return WEIGHTS.fullmatch(file.name) is not None


def folder_of(files: Sequence[File]) -> Path:
    """Where this very set of files lives in the cache."""
    return cache() / "base" / digest_of(files)[:32]


def digest_of(files: Sequence[File]) -> str:
    """One sha256, hex, for names and hashes of all files: recipes.Base.digest of them."""
    listed = "\n".join(f"{file.sha256} {file.name}" for file in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(listed.encode()).hexdigest()


def lacking(files: Sequence[File], folder: Path) -> list[File]:
    """The files that are not there, by their size. Whether one is what it should be, `damaged` finds out."""
    return [file for file in files if size_of(folder / file.name) != file.size]


def to_fetch(files: Sequence[File], folder: Path) -> int:
    """Bytes of `files` to fetch, as far as sizes tell; what was begun earlier counts as here."""
    begun = folder / FETCHING
    parts = {file.name: size_of(begun / f"{file.name}.part") for file in files}
    return sum(max(0, file.size - (parts[file.name] or 0)) for file in lacking(files, folder))


def size_of(path: Path) -> int | None:
    """None: no such file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:  # gone in between
        return None


def damaged(files: Sequence[File], folder: Path, go_on: Callable[[], object]) -> list[File]:
    """The files whose content is not what was announced. Reads them whole; `go_on` may raise."""
    return [file for file in files if not is_whole(folder / file.name, file, go_on)]


def is_whole(path: Path, file: File, go_on: Callable[[], object] = lambda: None) -> bool:
    if size_of(path) != file.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(1 << 20):
            go_on()
            digest.update(block)
    return digest.hexdigest() == file.sha256


def room(most: int | None = None) -> int:
    """Bytes of the disk that may be filled. `most`: that all fetched models together may take."""
    place = cache()
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free - SPARE
    return free if most is None else min(free, most - taken(place))


def taken(place: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(size_of(path) or 0 for path in place.rglob("*"))


def check_room(needed: int, most: int | None = None) -> None:
    """Raises Failure (out_of_disk)."""
    free = room(most)
    if most is not None and room() >= needed > free:
        raise Failure(
            "out_of_disk",
            f"--max-disk {megabytes(most)}: the model needs {megabytes(needed)} at {cache()}, where "
            f"{megabytes(taken(cache()))} are taken",
            hints=(f"allow more, or remove what no run needs any more from {cache()}",),
        )
    if needed > max(0, free):
        raise Failure(
            "out_of_disk",
            f"the disk is too full: the model needs {megabytes(needed)} at {cache()}; "
            f"{megabytes(free + SPARE)} are free, of which {megabytes(SPARE)} must stay free",
            hints=("make room there, or say where there is some: COCKTAIL_HOME=DIR",),
        )


def fetch_base(
    files: Sequence[File],
    folder: Path,
    fetch: Fetch,
    go_on: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> None:
    """Fetch what of `files` is not in the folder, by their size. `most`: as for `room`.

    Raises:
        Failure: out_of_disk, and what `fetch` and `go_on` raise.
    """
    check_room(to_fetch(files, folder), most)
    bring(lacking(files, folder), folder, fetch, go_on)


def bring(
    files: Sequence[File], folder: Path, fetch: Fetch, go_on: Callable[[], object] = lambda: None
) -> None:
    """Fetch files into the folder; of one that is there in part, or damaged, only what is wrong.

    Nothing is taken away from there: another peer of this machine may have made it whole a moment ago, and
    be loading it.
    """
    from transport import WantedFile

    bad = damaged(files, folder, go_on)
    if not bad:
        return
    with claimed(folder / FETCHING) as slot:
        bad = damaged(bad, folder, go_on)  # once more: this slot may have been another's until now
        wanted = [WantedFile(f"base/{f.name}", slot / f.name, f.size, f.sha256, f.hashes) for f in bad]
        for file in wanted:
            there = folder / file.path.name
            if there.exists() and not file.path.with_name(file.path.name + ".part").exists():
                shutil.copyfile(there, file.path)
        with writing_to(folder):
            fetch(wanted)
        for file in wanted:
            os.replace(file.path, folder / file.path.name)
        shutil.rmtree(slot)


def snapshot_files(files: Sequence[File]) -> list[File]:
    """What of a base stands beside the weights of a snapshot."""
    return [file for file in files if not is_weights(file)]


@contextmanager
def fetched_snapshot(
    offer: SnapshotOffer,
    files: Sequence[File],
    fetch: Fetch,
    go_on: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> Iterator[Path]:
    """A folder with the snapshot and the small files of the base, while it is wanted; then it is gone.

    Where fetching fails what is here stays, for the next attempt; snapshots that nobody works on go.

    Raises:
        Failure: rejected, out_of_disk, and what `fetch` raises.
    """
    from transport import WantedFile

    if not SHA256.fullmatch(offer.sha256):
        raise Failure("rejected", f"the run announces {offer.sha256[:80]!r} as a sha256, which is none")
    small = snapshot_files(files)
    base = folder_of(files)
    bring(small, base, fetch, go_on)
    place = cache() / "snapshots" / offer.sha256[:32]
    clear(place.parent, keep=place.name)
    check_room(offer.size - sum(part.stat().st_size for part in place.glob("*.part")), most)
    with claimed(place) as folder:
        name = f"snapshot/{offer.round}/model.safetensors"
        with writing_to(folder):
            fetch([WantedFile(name, folder / "model.safetensors", offer.size, hashes=offer.sha256)])
        for file in small:
            shutil.copyfile(base / file.name, folder / file.name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
