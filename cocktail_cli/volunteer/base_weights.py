"""A run's weights on a peer's disk: what is to be fetched, by hash into the cache, and verified before use.

The cache has one folder for each set of base files; downloads under way are in its `.fetching`. The folder of
a snapshot is deleted once the model is loaded. Peers of one machine share complete files, and each downloads
into a folder of its own (machine.local_files).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.assembly import recipe_type
from cocktail_cli.errors import Failure, hubs_fault, is_fault, writing_to
from cocktail_cli.machine import cache, hashed_files, locked_folder, remove_unlocked
from cocktail_cli.ui import megabytes

if TYPE_CHECKING:
    from recipes.config import Model
    from recipes.downloads import Progress
    from transport import WantedFile
    from transport.protocol import messages
    from transport.transfer import Spool

    Fetch = Callable[[Sequence[WantedFile]], None]  # of files at their paths already only what is wrong

# A base consists of data only: no pickle (a host converts `.bin` before serving it), and no Python unless
# this machine's user trusts it.
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
KINDS = (".json", ".safetensors", ".model", ".txt", ".jinja")
WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?")
# Files beside the weights are read whole, and JSON takes many times its bytes in memory. Of those that a
# volunteer reads, the configs are short and the list of weights is a small part of them; it reads no
# vocabulary, of which the longest that are published have 35 MB.
LONG = re.compile(r"tokenizer\.json|.*vocab.*|merges\.txt|tekken\.json|.*\.model")
CONFIG = re.compile(r"(generation_)?config\.json")
INDEX = re.compile(r".*\.index\.json")
MOST_LONG, MOST_SMALL, MOST_CONFIG, MOST_INDEX = 64 << 20, 4 << 20, 1 << 20, 2 << 20  # bytes
INDEX_SHARE = 1 << 14  # bytes of weights for a further one of their list
MOST_FILES = 1024
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
SPARE = 256 << 20  # bytes that stay free on the disk
FETCHING = ".fetching"
SPOOL = "spool"  # folder of files without a name


def check_files(files: Sequence[messages.File], code: bool = False) -> None:
    """Raise Failure (rejected) where a file name of the hub leaves the folder, is code, or comes twice, or a
    file is longer than one of its kind is."""
    if len(files) > MOST_FILES:
        raise hubs_fault(f"the run offers {len(files):,} files as its model, {MOST_FILES:,} at most")
    times, kinds = Counter(file.name for file in files), (*KINDS, ".py") if code else KINDS
    for name in times:
        if not PLAIN.fullmatch(name) or not name.endswith(kinds) or times[name] > 1:
            raise hubs_fault(f"the run offers a file {name[:80]!r} as part of its model")
    for file in files:
        most = most_of(file.name, sum(file.size for file in files if file.name.endswith(".safetensors")))
        if file.size > most:
            said = f"the run offers a file {file.name} of {megabytes(file.size)}"
            raise hubs_fault(f"{said}; one of this kind has {megabytes(most)} at most")
    for digest in [digest for file in files for digest in (file.sha256, file.hashes) if digest]:
        if not SHA256.fullmatch(digest):
            raise hubs_fault(f"the run announces {digest[:80]!r} as a sha256, which is none")


def most_of(name: str, weights: int) -> int:
    """Return the most bytes of a model's file that has `weights` bytes of weights."""
    if name.endswith(".safetensors"):
        return weights
    kinds = {LONG: MOST_LONG, CONFIG: MOST_CONFIG, INDEX: MOST_INDEX + weights // INDEX_SHARE}
    return next((most for kind, most in kinds.items() if kind.fullmatch(name)), MOST_SMALL)


def check_headers(files: Sequence[Path]) -> None:
    """Raise Failure (rejected) where the list of tensors in a file of weights is longer than one can be."""
    from recipes.weight_files import header_length

    for path in files:
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                try:
                    header_length(file)
                except ValueError as error:
                    raise hubs_fault(f"the run's {path.name} has {error}") from error


def is_weights(file: messages.File) -> bool:
    return WEIGHTS.fullmatch(file.name) is not None


def base_folder(files: Sequence[messages.File]) -> Path:
    """Return the cache folder of this set of files."""
    return cache() / "base" / digest_of(files)[:32]


def digest_of(files: Sequence[messages.File]) -> str:
    """Hash the names and hashes of all files into one sha256, hex, equal to recipes' Base.digest."""
    listed = "\n".join(f"{file.sha256} {file.name}" for file in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(listed.encode()).hexdigest()


def missing_files(files: Sequence[messages.File], folder: Path) -> list[messages.File]:
    """List the files that are missing or of another size; `damaged` compares the contents."""
    return [file for file in files if size_of(folder / file.name) != file.size]


def bytes_to_fetch(files: Sequence[messages.File], folder: Path) -> int:
    """Count the bytes to fetch, by file sizes; partial downloads count as present."""
    begun = folder / FETCHING
    parts = {file.name: size_of(begun / f"{file.name}.part") for file in files}
    return sum(max(0, file.size - (parts[file.name] or 0)) for file in missing_files(files, folder))


def size_of(path: Path) -> int | None:
    """Return the size in bytes; None where there is no such file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:  # gone in between
        return None


def damaged(files: Sequence[messages.File], folder: Path, go_on: Callable[[], object]) -> list[messages.File]:
    """List the files whose content is not what was announced. Reads those whole that have changed since they
    were last read; `go_on` may raise."""
    return [file for file in files if not is_intact(folder / file.name, file, go_on)]


def is_intact(
    path: Path, file: messages.File | WantedFile, go_on: Callable[[], object] = lambda: None
) -> bool:
    """Compare a file with what was announced: by its blocks, which are hashed on all cores, or a short one as
    a whole."""
    from recipes.file_hashes import HASH_BLOCK, hash_file

    if size_of(path) != file.size:
        return False
    by_blocks = file.size > HASH_BLOCK and file.hashes
    found = hash_file(path, hashed_files(), not by_blocks, go_on)
    if by_blocks:
        return hashlib.sha256(found.blocks).hexdigest() == file.hashes
    return found.sha256 == file.sha256


def free_bytes(most: int | None = None) -> int:
    """Return the bytes of disk that may be filled. `most`: that the cache may grow to."""
    place = cache()
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free - SPARE
    return free if most is None else min(free, most - folder_bytes(place))


def folder_bytes(place: Path) -> int:
    """Sum the bytes of the files in a folder."""
    return sum(size_of(path) or 0 for path in place.rglob("*"))


def check_free(needed: int, most: int | None = None, what: str = "the model") -> None:
    """Raise Failure (out_of_disk) where `needed` bytes do not fit."""
    free, wants = free_bytes(most), f"{what} needs {megabytes(needed)} at {cache()}"
    if needed <= max(0, free):
        return
    room = f"{megabytes(free + SPARE)} are free, of which {megabytes(SPARE)} must stay free"
    said = f"the disk is too full: {wants}; {room}"
    hint = "make room there, or say where there is some: COCKTAIL_HOME=DIR"
    if most is not None and free_bytes() >= needed:
        said = f"--max-disk leaves {megabytes(max(0, free))}: {wants}"
        hint = f"allow more, or remove what no run needs any more from {cache()}"
    raise Failure("out_of_disk", said, hints=(hint,))


class DiskAllowance:
    """The room for objects of a run that are received into files without a name (transport.transfer.Spool).

    Args:
        most: bytes that all that is fetched may take, the cache included; None: what is free.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most, self._taken, self._lock = most, 0, threading.Lock()

    @property
    def free(self) -> int:
        return max(0, free_bytes(self._left))

    @property
    def _left(self) -> int | None:
        return None if self._most is None else self._most - self._taken

    def take(self, size: int, what: str) -> None:
        from transport.protocol import NoRoom

        with self._lock:
            try:
                check_free(size, self._left, what)
            except Failure as error:
                raise NoRoom(error.message, error.hints) from None
            self._taken += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._taken -= size


def spool_within(most: int | None) -> Spool:
    """Return the place for objects that memory is not to hold, within --max-disk."""
    from transport.transfer import Spool

    return Spool(cache() / SPOOL, DiskAllowance(most))


def fetch_base(
    files: Sequence[messages.File],
    folder: Path,
    fetch: Fetch,
    go_on: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> None:
    """Fetch the files missing by size. Raises Failure (out_of_disk), and what `fetch` and `go_on` raise."""
    # What is gated comes out of the Hugging Face hub's cache where it is there, and takes no room twice.
    counted = [file for file in files if most is not None or not file.gated]
    check_free(bytes_to_fetch(counted, folder), most)
    fetch_files(missing_files(files, folder), folder, fetch, go_on)


def fetch_files(
    files: Sequence[messages.File], folder: Path, fetch: Fetch, go_on: Callable[[], object] = lambda: None
) -> None:
    """Fetch files into the folder; of partial or damaged ones only the wrong chunks.

    A file there is replaced, never removed: another peer of this machine may have completed it a moment ago
    and be loading it.
    """
    from transport import WantedFile

    bad = damaged(files, folder, go_on)
    if not bad:
        return
    with locked_folder(folder / FETCHING) as slot:
        bad = damaged(bad, folder, go_on)  # once more: another peer may have had this folder until now
        wanted = [WantedFile(f"base/{f.name}", slot / f.name, f.size, f.sha256, f.hashes) for f in bad]
        for file in wanted:
            there = folder / file.path.name
            if there.exists() and not file.path.with_name(file.path.name + ".part").exists():
                shutil.copyfile(there, file.path)
        with writing_to(folder), nothing_left(slot):
            fetch(wanted)
            for file in wanted:
                check_readable(file.path)
        for file in wanted:
            os.replace(file.path, folder / file.path.name)
        shutil.rmtree(slot)


def check_readable(path: Path) -> None:
    """Raise Failure (rejected) where a file that has come is no JSON, or would take its readers' stack or
    memory."""
    from recipes.foreign_json import check_json_file

    try:
        if path.suffix == ".json":
            check_json_file(path)
    except ValueError as error:
        raise hubs_fault(f"the run's {path.name} cannot be used: {error}") from None


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Remove a download under way where the hub lies about it: nobody goes on with that one."""
    try:
        yield
    except Exception as error:
        if is_fault(error) or (isinstance(error, Failure) and error.code == "rejected"):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def fetch_gated(model: Model, wanted: Sequence[WantedFile], progress: Progress) -> None:
    """Fetch files of a gated base from the Hugging Face hub, with this machine's token, into the hub's cache,
    and link them to where they are wanted.

    Raises:
        Failure: rejected, where the run names no commit of the hub, or other files than are there;
            model_invalid, where the hub refuses them.
        HubUnreachable.
    """
    from recipes.config import is_repository_id
    from recipes.downloads import fetch_model_files
    from recipes.errors import ModelError

    name, commit = model.model_name_or_path, model.model_revision or ""
    if not is_repository_id(name) or not COMMIT.fullmatch(commit):
        raise hubs_fault(f"the run calls {name[:80]!r} gated, and names no commit of it on the hub")
    try:
        here = fetch_model_files(name, commit, [file.path.name for file in wanted], progress=progress)
    except ModelError as error:
        said = f"each peer of this run fetches its base with its own account: {error}"
        hints = ("accept the licence on the model's page, then `hf auth login`",)
        raise Failure("model_invalid", said, hints=hints) from error
    for file in wanted:
        source = (here / file.path.name).resolve()
        if not is_intact(source, file):
            hints = ("remove it from the Hugging Face cache and try again; else tell the run's host",)
            said = f"{file.path.name} of {name} is not the one that this run trains"
            raise Failure("rejected", said, hints=hints)
        file.path.unlink(missing_ok=True)
        try:
            os.link(source, file.path)
        except OSError:  # on another disk, or a file system without links
            shutil.copyfile(source, file.path)


def snapshot_files(files: Sequence[messages.File]) -> list[messages.File]:
    """List the base files that go beside a snapshot's weights."""
    return [file for file in files if not is_weights(file)]


@contextmanager
def fetched_snapshot(
    offer: messages.SnapshotOffer,
    files: Sequence[messages.File],
    fetch: Fetch,
    go_on: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> Iterator[Path]:
    """Yield a folder with the snapshot and the small files of the base, which is deleted afterwards.

    A partial download stays for the next attempt; other snapshots that no process uses are deleted.

    Raises:
        Failure: rejected, out_of_disk, and what `fetch` raises.
    """
    from transport import WantedFile

    if not SHA256.fullmatch(offer.sha256):
        raise hubs_fault(f"the run announces {offer.sha256[:80]!r} as a sha256, which is none")
    small = snapshot_files(files)
    base = base_folder(files)
    fetch_files(small, base, fetch, go_on)
    place = cache() / "snapshots" / offer.sha256[:32]
    remove_unlocked(place.parent, keep=place.name)
    check_free(offer.size - sum(part.stat().st_size for part in place.glob("*.part")), most)
    with locked_folder(place) as folder:
        name = f"snapshot/{offer.round}/model.safetensors"
        with writing_to(folder), nothing_left(folder):
            fetch([WantedFile(name, folder / "model.safetensors", offer.size, hashes=offer.sha256)])
        for file in small:
            shutil.copyfile(base / file.name, folder / file.name)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


class DownloadPlan:
    """The way to the global model with the fewest bytes.

    Args:
        max_disk: bytes that fetched models may take; None: no limit.
        kept: round of this machine's checkpoint in the run; None: there is none.
    """

    def __init__(self, welcome: messages.Welcome, max_disk: int | None, kept: int | None = None) -> None:
        from recipes.config import recipe_from_json
        from transport import CatchUp

        self.recipe = recipe_from_json(welcome.recipe, recipe_type)
        check_files(welcome.base, self.recipe.model.trust_remote_code)
        self.files, self.folder = welcome.base, base_folder(welcome.base)
        self.frozen = self.recipe.lora is not None  # the base is then needed whatever way the model comes
        missing = bytes_to_fetch([file for file in self.files if is_weights(file)], self.folder)
        # A checkpoint is loaded into a model made from the base: without base weights it is no way by itself.
        own = kept if self.frozen or not missing else None
        self.machine = CatchUp(welcome, missing, own, free_bytes(max_disk), self.frozen)

    @property
    def bytes(self) -> int:
        """Bytes to fetch before this peer can train, as far as known."""
        return bytes_to_fetch(snapshot_files(self.files), self.folder) + self.machine.plan.bytes

    @property
    def bytes_here(self) -> int:
        """Bytes of the base model that are on the disk already."""
        return sum(file.size for file in self.files) - bytes_to_fetch(self.files, self.folder)

    @property
    def way(self) -> str:
        """The source of the global model, in a word for people."""
        return str(self.machine.plan.way.value)
