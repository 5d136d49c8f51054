"""Look up this machine's access to the Hugging Face hub, for `cocktail doctor`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


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


def hub_cache() -> str:
    """Folder of the hub's cache."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


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
