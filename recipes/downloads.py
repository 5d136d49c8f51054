"""Fetch files from https addresses and the Hugging Face hub, push to it, and turn its errors into ours."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

import huggingface_hub as hf  # its parts load at first use: some take as long as a page of help
from yaml import YAMLError

from recipes.errors import DataError, HubUnreachable, ModelError
from recipes.foreign_json import parse_json, read_object

# ---- files and texts from https addresses ------------------------------------------------------------------

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
TIMEOUT = 30.0  # seconds for a server to answer; for a text, to send all of it


class DownloadError(Exception):
    """The address gave nothing usable."""


@contextmanager
def open_url(url: str) -> Iterator[Any]:
    """Open an address for reading. Errors, also while it is read: DownloadError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            if not answer.url.startswith("https://"):
                raise DownloadError(f"leads to {answer.url}, which is not https")
            yield answer
    except urllib.error.HTTPError as error:
        raise DownloadError(f"the server answers {error.code} {error.reason}") from error
    except (urllib.error.URLError, ConnectionError, TimeoutError, HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DownloadError(f"cannot be fetched: {why}") from error


@cache  # one command reads an address more than once, and must see the same text
def fetch_text(url: str, most: int) -> bytes:
    """Fetch a text of at most `most` bytes. Errors: DownloadError."""
    until, data = time.monotonic() + TIMEOUT, b""
    with open_url(url) as answer:
        wanted = int(answer.headers["Content-Length"] or 0)
        while block := answer.read1(1 << 16):
            data += block
            if len(data) > most:
                raise DownloadError(f"is larger than {most >> 10:,} KiB")
            if time.monotonic() > until:
                raise DownloadError(f"has not come within {TIMEOUT:.0f} s")
        if "text/html" in (answer.headers["Content-Type"] or ""):
            raise DownloadError("is a page to look at: take the address of the file itself (its `raw` form)")
    if wanted and len(data) != wanted:
        raise DownloadError(f"{len(data):,} bytes came, {wanted:,} were announced")
    return data


@dataclass
class HttpsFile:
    """A file at an https address. `sha256`: the one it must have, of a run that began with it; hex."""

    url: str
    sha256: str | None = None
    _here: Path | None = None

    def fetch(self, progress: Progress = lambda done, total: None) -> Path:
        """Fetch the file into the Hugging Face cache, unless the server names a strong ETag that is there, or
        the wanted content is. Errors: DataError."""
        if self._here is None:
            try:
                found = (self._cached("*") if self.sha256 else None) or self._fetch(progress)
            except DownloadError as error:
                raise DataError(f"{self.url}: {error}") from error
            sha256 = found.name.split("-")[2]
            if self.sha256 not in (None, sha256):
                raise DataError(
                    f"{self.url} has changed: its sha256 is {sha256}, that of before {self.sha256}"
                )
            self._here, self.sha256 = found, sha256
        return self._here

    def _fetch(self, progress: Progress) -> Path:
        part, digest = self._place("", f"{os.urandom(4).hex()}.part"), hashlib.sha256()
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open_url(self.url) as answer, part.open("wb") as file:
                tag, wanted = answer.headers.get("ETag") or "W/", int(answer.headers["Content-Length"] or 0)
                tag = "" if tag.startswith("W/") else hashlib.sha256(tag.encode()).hexdigest()[:16]
                if tag and not self.sha256 and (cached := self._cached(tag)):
                    return cached
                while block := answer.read(1 << 16):
                    file.write(block)
                    digest.update(block)
                    progress(file.tell(), wanted)
                if wanted and file.tell() != wanted:
                    raise DownloadError(f"{file.tell():,} bytes came, {wanted:,} were announced")
            return part.replace(self._place(tag, digest.hexdigest()))
        finally:
            part.unlink(missing_ok=True)

    def _cached(self, tag: str) -> Path | None:
        place = self._place(tag, self.sha256 or "*")
        return next(place.parent.glob(place.name), None)

    def _place(self, tag: str, sha256: str) -> Path:
        """Place in the cache: hashes of address and ETag, that of the bytes, the file's own name."""
        from huggingface_hub.constants import HF_HOME

        name = re.sub(r"[^\w.-]", "_", Path(urllib.parse.urlparse(self.url).path).name[-100:])
        url = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return Path(HF_HOME) / "cocktail" / f"{url}-{tag}-{sha256}-{name}"


https_file = cache(HttpsFile)  # one command reads an address more than once, and must see the same file


# ---- access to the hub, and licences -----------------------------------------------------------------------


@dataclass(frozen=True)
class Licence:
    """The licence of a model, as its card states it, and whether its repository is gated."""

    name: str = ""  # as the hub spells it: apache-2.0, llama3.1, other; empty: not stated
    title: str = ""  # of `other`
    link: str = ""  # of `other`
    gated: bool | None = False  # each reader has to accept the licence there; None: the hub did not say

    def __str__(self) -> str:
        return self.title or self.name or "not stated"


def licence_of(model: str, revision: str | None) -> Licence:
    """Look up the licence of a model: on the hub by its id, or in the card of a local folder."""
    if (folder := Path(model).expanduser()).is_dir():
        card = folder / "README.md"
        try:
            return _stated(hf.metadata_load(card) or {}) if card.is_file() else Licence()
        except (OSError, ValueError, YAMLError):  # a card that is no card
            return Licence()
    try:
        info = hf.HfApi().model_info(model, revision=revision)
    except Exception:  # any of the hub's errors: a fetch tells it, or the cache has the model
        return Licence(gated=None)
    stated: dict[str, Any] = vars(info.card_data) if info.card_data else {}
    return _stated(stated, bool(info.gated))


def _stated(card: Mapping[str, Any], gated: bool = False) -> Licence:
    names = ("license", "license_name", "license_link")
    name, title, link = (str(card.get(key) or "") for key in names)
    return Licence(name, title, link, gated)


# ---- files of the hub, and a push to it --------------------------------------------------------------------

DISK_RESERVE = 256 << 20  # bytes that stay free on the disk
TOO_MANY_REQUESTS = 429

# huggingface_hub, httpx, requests and datasets each have their own names for "no answer"
NO_ANSWER = {
    "ConnectError",
    "ConnectionError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "TimeoutException",
    "TransportError",
}

TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER)  # files beside a model's weights
# files of a folder that are pushed; a run's folder has its ledger and its base below it
PUSHED_FILES = (
    "README.md",
    "model.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
    *COMPANIONS,
)
TOKEN_HINT = "(hint: `hf auth login`, or HF_TOKEN with a token that may write)"


def fetch_model_files(
    name: str,
    revision: str | None,
    files: Sequence[str],
    otherwise: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Path:
    """Fetch the files of hub model `name` that match the patterns `files`, and those that match `otherwise`
    where the repository has no safetensors. Cached files are not fetched again, and suffice when the hub does
    not answer.

    Errors: ModelError where there is no such model or it may not be read, HubUnreachable.
    """
    from huggingface_hub import errors

    try:
        with _refusals(name, revision):
            found = hf.HfApi().model_info(name, revision=revision, files_metadata=True)
            listed = found.siblings or []
            safe = any(file.rfilename.endswith(".safetensors") for file in listed)
            wanted = [*files, *([] if safe else otherwise)]
            sizes = {f.rfilename: f.size or 0 for f in listed if any(fnmatch(f.rfilename, w) for w in wanted)}
            bars = progress_bars(check_cache_space(name, str(found.sha), sizes), progress)
            return Path(hf.snapshot_download(name, revision=revision, allow_patterns=wanted, tqdm_class=bars))
    except errors.HFValidationError as error:
        raise ModelError(f"{name}: neither a folder nor the id of a model on the hub") from error
    except Exception as error:
        if not is_hub_outage(error):
            raise
        try:
            return Path(hf.snapshot_download(name, revision=revision, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            message = f"no folder {name} here, none in the cache, and the hub did not answer: {error}"
            raise HubUnreachable(message) from error


def dataset_commit(name: str, revision: str | None) -> str | None:
    """Look up the commit of `revision` of hub data set `name`; None where the hub does not answer: then the
    cache is used, which has only one.

    Errors: DataError where there is no such data set, or no such revision of it, or it may not be read.
    """
    try:
        with _refusals(name, revision, data_set=True):
            return hf.HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:
        if is_hub_outage(error):
            return None
        raise


def fetch_dataset_files(name: str, commit: str, files: Sequence[str], progress: Progress) -> None:
    """Fetch files of hub data set `name` into the cache.

    Errors: DataError, HubUnreachable, OSError where there is no room for them.
    """
    try:
        with _refusals(name, commit, data_set=True):
            found = hf.HfApi().dataset_info(name, revision=commit, files_metadata=True)
            sizes = {f.rfilename: f.size or 0 for f in found.siblings or [] if f.rfilename in files}
            bars = progress_bars(check_cache_space(name, commit, sizes, "dataset"), progress)
            hf.snapshot_download(
                name, repo_type="dataset", revision=commit, allow_patterns=list(sizes), tqdm_class=bars
            )
    except Exception as error:
        if is_hub_outage(error):
            raise HubUnreachable(f"no file {name} here, and the hub did not answer: {error}") from error
        raise


@contextmanager
def _refusals(name: str, revision: str | None, data_set: bool = False) -> Iterator[None]:
    """Turn the hub's refusals into ModelError, or DataError of a data set; an outage passes unchanged."""
    from huggingface_hub import errors

    Refused = DataError if data_set else ModelError
    page = f"datasets/{name}" if data_set else name
    try:
        yield
    except errors.GatedRepoError as error:
        raise Refused(f"{name}: access is gated {licence_hint(page)}") from error
    except errors.RevisionNotFoundError as error:
        hint = f"(hint: its revisions: https://huggingface.co/{page}/tree/main)"
        raise Refused(f"{name} has no revision {revision} {hint}") from error
    except errors.RepositoryNotFoundError as error:
        sought, what = ("file", "data set") if data_set else ("folder", "model")
        hint = "(hint: its spelling; of a private one `hf auth login` first)"
        raise Refused(f"no {sought} {name} here, and the hub has no {what} of that name {hint}") from error
    except errors.HfHubHTTPError as error:
        if is_hub_outage(error):
            raise
        hint = " (hint: is this machine's token still valid? `hf auth login`)"
        status = http_status(error)
        raise Refused(f"{name}: the hub answers {status}{hint if status in (401, 403) else ''}") from error


def licence_hint(name: str) -> str:
    """Hint that says how to get access to a gated repository."""
    return f"(hint: accept the licence at https://huggingface.co/{name}, then `hf auth login`)"


def progress_bars(total: int, progress: Progress) -> type[Any]:
    """Make a class for huggingface_hub to use as its progress bar, which draws nothing and reports bytes.

    The hub's client makes several: of bytes received, of bytes on disk, of files. The reported number only
    grows.
    """
    from huggingface_hub.utils import tqdm

    class Counting(tqdm):
        here, mine = 0, 0

        def __init__(self, *args: Any, **options: Any) -> None:
            self.of_bytes = options.get("unit") == "B"
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():  # files come in several threads
                self.mine += int(n or 0)
                if self.of_bytes:
                    Counting.here = min(total, max(Counting.here, self.mine))
                    progress(Counting.here, total)

    return Counting


def check_cache_space(name: str, commit: str, sizes: Mapping[str, int], kind: str = "model") -> int:
    """Check that the files which the cache lacks fit on the disk; returns their bytes. Errors: OSError."""
    from huggingface_hub import constants

    found = {file: hf.try_to_load_from_cache(name, file, revision=commit, repo_type=kind) for file in sizes}
    cached = {file for file, path in found.items() if isinstance(path, str)}
    needed = sum(size for file, size in sizes.items() if file not in cached)
    place = Path(constants.HF_HUB_CACHE)
    there = next(p for p in (place, *place.parents) if p.exists())
    if needed > max(0, shutil.disk_usage(there).free - DISK_RESERVE):
        raise OSError(errno.ENOSPC, f"{name} has {needed / 1e9:.1f} GB still to fetch", str(place))
    return needed


def is_hub_outage(error: BaseException) -> bool:
    """True where `error`, or its cause, means that the network or the hub failed or is busy."""
    chain = [e for e in (error, error.__cause__, error.__context__) if e is not None]
    if any(cls.__name__ in NO_ANSWER for e in chain for cls in type(e).__mro__):
        return True
    return any((status := http_status(e)) == TOO_MANY_REQUESTS or status >= 500 for e in chain)


def http_status(error: BaseException) -> int:
    """HTTP status of the hub's answer; 0 where there is none."""
    return getattr(getattr(error, "response", None), "status_code", None) or 0


@dataclass(frozen=True)
class Repository:
    """A model repository on the hub that this machine's token can write to."""

    name: str  # owner/name
    private: bool | None = None  # of a new one; None: the account's default

    def open(self) -> str:
        """Create the repository unless it exists; returns its id. Called before a run that ends with a push.

        Errors: ModelError where the token may not, HubUnreachable.
        """
        with _pushing(self.name):
            made = hf.HfApi().create_repo(self.name, private=self.private, exist_ok=True)
            return str(made.repo_id)

    def push(self, folder: Path, message: str, more: Sequence[str] = ()) -> str:
        """Push the model files of `folder`, and `more` of these names; returns the commit's address."""
        with _pushing(self.name):
            done = hf.HfApi().upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                allow_patterns=[*PUSHED_FILES, *more, *(file.name for file in folder.glob(CODE_FILES))],
            )
            return str(getattr(done, "commit_url", done))


@contextmanager
def _pushing(name: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ModelError(f"`{name}` is no id of a model: {error}") from error
    except errors.LocalTokenNotFoundError as error:
        raise ModelError(f"{name}: no token to write with {TOKEN_HINT}") from error
    except errors.HfHubHTTPError as error:
        if http_status(error) in (401, 403):
            raise ModelError(f"{name}: this machine's token may not write there {TOKEN_HINT}") from error
        raise HubUnreachable(f"{name} could not be written: {error}") from error
    except Exception as error:
        if not is_hub_outage(error):
            raise
        raise HubUnreachable(f"the hub did not answer for {name}: {error}") from error


# ---- models with code of their own -------------------------------------------------------------------------

CODE_FILES = "[!_.]*.py"  # in a folder; transformers makes an __init__.py of its own
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


def from_pretrained_options(folder: Path, code: bool) -> dict[str, bool]:
    """Options for loading from `folder`: no network, and the folder's own code only if `code`.

    Errors: ModelError where such code is needed and not allowed, or lies in another repository: a file
    outside the folder has no hash that peers could compare.
    """
    classes: dict[str, str] = {}
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            classes |= _auto_map(folder / name)
    elsewhere = sorted({each.partition("--")[0] for each in classes.values() if "--" in each})
    if code and elsewhere:
        hint = "(hint: copy its .py files beside config.json, and take the name out of `auto_map`)"
        raise ModelError(f"{folder}: its code lies in another repository, {elsewhere[0]} {hint}")
    if not code and (own := classes.get("AutoConfig")) is not None and not _known(folder):
        hint = "(hint: model.trust_remote_code=true, and --trust-remote-code on each machine that trusts it)"
        raise ModelError(
            f"{folder}: transformers has no such model; it comes with code of its own, {own} {hint}"
        )
    return {"local_files_only": True, "trust_remote_code": code}


def _auto_map(file: Path) -> dict[str, str]:
    """Read `auto_map` of a config: Auto class -> file.Class."""
    try:
        found = parse_json(file.read_bytes())["auto_map"].items()
    except UNREADABLE:  # there is none, or transformers will report the error
        return {}
    named = ((key, value) for key, each in found for value in (each if isinstance(each, list) else [each]))
    return {str(key): value for key, value in named if isinstance(value, str)}


def _known(folder: Path) -> bool:
    """True where transformers itself has a class for this type of model."""
    from transformers import CONFIG_MAPPING

    return read_object(folder / "config.json").get("model_type") in CONFIG_MAPPING
