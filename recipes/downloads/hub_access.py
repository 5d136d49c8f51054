"""Who this machine is to the Hugging Face hub, and what it may read there. Only `cocktail doctor` asks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True)
class HubAnswer:
    """What the hub said to a question for nothing in particular."""

    endpoint: str
    error: str = ""  # it did not answer
    token: bool = False  # this machine has one
    user: str = ""  # whose it is; empty where there is none, or it is not taken
    skew: float | None = None  # seconds that this machine's clock is behind


OFFLINE = HubAnswer("")


def ask_hub(timeout: float) -> HubAnswer:
    """Ask the hub who this machine is to it. OFFLINE where it is not to be asked."""
    from huggingface_hub import HfApi, constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    endpoint, token = constants.ENDPOINT, get_token()
    try:
        said = get_session().head(endpoint, timeout=timeout)
    except Exception as error:  # the HTTP library, its transports and the system each have their own
        return HubAnswer(endpoint, error=f"{type(error).__name__}: {error}", token=token is not None)
    date, user = said.headers.get("date"), ""
    skew = parsedate_to_datetime(date).timestamp() - time.time() if date else None
    if token:
        with suppress(Exception):  # not taken, for whatever reason: `user` stays empty
            user = str(HfApi().whoami(token).get("name", ""))
    return HubAnswer(endpoint, token=token is not None, user=user, skew=skew)


def hub_cache() -> str:
    """Where models and data from the hub are kept."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def gated_models(models: Sequence[str]) -> Iterator[str]:
    """Those of these hub models whose licence nobody has accepted for this machine's token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    for name in models:
        try:
            HfApi().auth_check(name)
        except GatedRepoError:
            yield name
        except Exception:  # missing, renamed, no answer: a launch says so
            continue
