"""The Hugging Face hub: a name to a folder in its own cache, and what it means when that fails."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from recipes.problems import HubUnreachable, ModelError

SPARE = 256 << 20  # bytes that stay free on the disk

# huggingface_hub, httpx, requests and datasets each have their own names for "no answer"
NO_ANSWER = {
    "ConnectError",
    "ConnectionError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "TimeoutException",
    "TransportError",
}


def fetch(name: str, revision: str | None, files: Sequence[str], otherwise: Sequence[str] = ()) -> Path:
    """The files of hub model `name` that match the patterns `files`, and those that match `otherwise` where
    the repository has no safetensors. What is in the cache is not fetched again, and is enough when the hub
    does not answer.

    Errors: ModelError where there is no such model or it may not be read, HubUnreachable.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = HfApi().model_info(name, revision=revision, files_metadata=True)
        listed = found.siblings or []
        safe = any(file.rfilename.endswith(".safetensors") for file in listed)
        wanted = [*files, *([] if safe else otherwise)]
        sizes = {f.rfilename: f.size or 0 for f in listed if any(fnmatch(f.rfilename, w) for w in wanted)}
        check_room(name, str(found.sha), sizes)
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise ModelError(f"{name}: neither a folder nor the id of a model on the hub") from error
    except GatedRepoError as error:
        raise ModelError(f"{name}: the hub wants to know who asks {licence(name)}") from error
    except RevisionNotFoundError as error:
        hint = f"(hint: those there are: https://huggingface.co/{name}/tree/main)"
        raise ModelError(f"{name} has no revision {revision}, or no longer {hint}") from error
    except RepositoryNotFoundError as error:
        hint = "(hint: of a private one `hf auth login` first)"
        raise ModelError(f"{name}: no such folder, and no such model on the hub {hint}") from error
    except Exception as error:
        if not is_no_answer(error):
            raise
        return _cached(name, revision, error)


def licence(name: str) -> str:
    """What opens a gated model."""
    return f"(hint: accept the licence at https://huggingface.co/{name}, then `hf auth login`)"


def check_room(name: str, commit: str, sizes: Mapping[str, int]) -> None:
    """Before the first byte: is there room for those of the files that the cache lacks? Raises OSError."""
    from huggingface_hub import constants, try_to_load_from_cache

    cached = {file for file in sizes if isinstance(try_to_load_from_cache(name, file, revision=commit), str)}
    needed = sum(size for file, size in sizes.items() if file not in cached)
    place = Path(constants.HF_HUB_CACHE)
    there = next(p for p in (place, *place.parents) if p.exists())
    if needed > max(0, shutil.disk_usage(there).free - SPARE):
        raise OSError(errno.ENOSPC, f"{name} has {needed / 1e9:.1f} GB that are not here", str(place))


def _cached(name: str, revision: str | None, no_answer: Exception) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        message = f"the hub did not answer for {name}, and it is not in the cache: {no_answer}"
        raise HubUnreachable(message) from no_answer


def is_no_answer(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the network or the hub did not answer."""
    chain = (error, error.__cause__, error.__context__)
    return any(cls.__name__ in NO_ANSWER for e in chain if e is not None for cls in type(e).__mro__)
