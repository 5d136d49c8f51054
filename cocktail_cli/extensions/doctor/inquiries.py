"""Questions to NVIDIA's driver and to the Hugging Face hub."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from cocktail_cli import machine


def driver_version() -> str | None:
    """Return the version of the driver; None without one."""
    asked = machine.nvml()
    return None if asked is None else str(asked.nvmlSystemGetDriverVersion())


def users_of(device: str) -> list[str]:
    """Describe the programs that hold memory of a GPU: `python (4711) 3.2 GiB`, those that hold most first.
    Empty where the driver does not tell, as in a container or on Windows."""
    import psutil

    asked = machine.nvml()
    if asked is None:
        return []
    try:
        running = asked.nvmlDeviceGetComputeRunningProcesses(machine.handle_of(asked, device))
    except asked.NVMLError:
        return []
    held = sorted(((process.usedGpuMemory or 0, process.pid) for process in running), reverse=True)
    found = []
    for size, pid in held:
        try:
            name = psutil.Process(pid).name()
        except psutil.Error:  # of another user, or of another container
            name = "a program"
        found.append(f"{name} ({pid}) {size / 2**30:.1f} GiB")
    return found


@dataclass(frozen=True)
class HubAnswer:
    """Result of a request to the hub."""

    endpoint: str
    error: str = ""  # why it did not answer
    token: bool = False  # this machine has a token
    user: str = ""  # the token's user; empty without a token, or where it is refused
    skew: float | None = None  # seconds that this machine's clock is behind


OFFLINE = HubAnswer("")


def ask_hub(timeout: float) -> HubAnswer:
    """Ask the hub for the token's user and the time. OFFLINE where HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import HfApi, constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    endpoint, token = constants.ENDPOINT, get_token()
    try:
        answer = get_session().head(endpoint, timeout=timeout)
    except Exception as error:  # HTTP library, transports and system each raise their own
        return HubAnswer(endpoint, error=f"{type(error).__name__}: {error}", token=token is not None)
    date, user = answer.headers.get("date"), ""
    skew = parsedate_to_datetime(date).timestamp() - time.time() if date else None
    if token:
        with suppress(Exception):  # refused, for whatever reason: `user` stays empty
            user = str(HfApi().whoami(token).get("name", ""))
    return HubAnswer(endpoint, token=token is not None, user=user, skew=skew)


def gated_models(models: Sequence[str]) -> Iterator[str]:
    """Yield the hub models whose licence has not been accepted for this machine's token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    for name in models:
        try:
            HfApi().auth_check(name)
        except GatedRepoError:
            yield name
        except Exception:  # missing, renamed, no answer: a launch reports it
            continue
