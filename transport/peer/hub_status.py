"""A hub's answers in JSON, to `cocktail status` and to its host, whose fields are checked before use.

A hub may add fields, which are kept. What it leaves out has the value below.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transport.protocol import LinkLost, ProtocolError, RefusedByHub, messages, read_json

Count = messages.Count
Finite = messages.Finite
Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]  # three centuries: a date can be so far away
Point = tuple[Count, Finite]  # step and loss


class PeerRow(msgspec.Struct):
    """A peer in a status, or somebody who is not in the run any more, or not yet."""

    name: str
    gpu: str
    state: str
    reason: str = ""
    share: Finite = 0.0
    tokens: Count = 0
    up_bytes: Count = 0
    down_bytes: Count = 0
    fetched_bytes: Count = 0
    rtt_ms: Finite | None = None
    last_seen_s: Seconds = 0.0
    joined_s: Seconds = 0.0
    rounds: Count = 0
    left_out: Count = 0
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0


class HubStatus(msgspec.Struct):
    """The fields of a status that are read here."""

    run: str
    state: str
    reason: str = ""
    term: Count = 0
    recipe: str = ""
    recipe_hash: str = ""
    licence: str = ""
    parameters: Count = 0
    local_steps: Annotated[int, Meta(ge=0, le=2**32)] = 1
    rung: str = ""
    need: Finite = 0.0
    since_s: Seconds = 0.0
    step: Count = 0
    max_steps: Count = 0
    round: Count = 0
    loss: Finite | None = None
    losses: list[Point] = []
    eval_loss: Finite | None = None
    eval_losses: list[Point] = []
    grad_norm: Finite | None = None
    samples: Count = 0
    tokens: Count = 0
    tokens_per_s: Finite = 0.0
    checkpoint: Count | None = None
    eta_s: Finite | None = None
    needs: dict[str, Finite] = {}
    peers: list[PeerRow] = []  # the first ones by name, where they are many
    peer_count: Count = 0  # of all of them
    others: list[PeerRow] = []
    refused: Count = 0


class ListedPeer(msgspec.Struct):
    """A key in the list of `cocktail peers`."""

    name: str
    key: str
    gpu: str
    state: str
    since_s: Seconds | None  # None: it has no connection
    strikes: Count
    up_bytes: Count
    down_bytes: Count
    reason: str


class PeersPage(msgspec.Struct):
    """A page of that list."""

    join: str
    peers: list[ListedPeer]
    more: str  # what to ask for next; "": nothing
    left: Count  # rows after this page


class AdminDone(msgspec.Struct):
    """A decision of the host, carried out."""

    did: str
    key: str = ""
    peers: list[str] = []


# by field, for an answer that lacks it; the others are told to joiners, or of those who have left
FIGURES: dict[str, Any] = msgspec.to_builtins(HubStatus("", ""))
FIGURES = {name: FIGURES[name] for name in FIGURES.keys() - {"recipe", "licence", "needs"}}
FIGURES_OF_PEER: dict[str, Any] = msgspec.to_builtins(PeerRow("", "", ""))
FIGURES_OF_PEER = {name: FIGURES_OF_PEER[name] for name in FIGURES_OF_PEER.keys() - {"reason"}}


def status_of(answer: messages.Message) -> dict[str, Any]:
    """Return the object of `cocktail status --json`. Raises as `answer_of`."""
    status = answer_of(answer, HubStatus, "status")
    status["peers"] = [FIGURES_OF_PEER | row for row in status.get("peers", ())]
    others = status.get("others", ())  # who is deciding has no figures
    status["others"] = [row if row["state"] == "deciding" else FIGURES_OF_PEER | row for row in others]
    status.setdefault("peer_count", len(status["peers"]))
    return status | {name: FIGURES[name] for name in FIGURES.keys() - status.keys()}


def answer_of(answer: messages.Message, kind: type[msgspec.Struct], what: str) -> dict[str, Any]:
    """Return the object in a hub's answer, whose fields have the types of `kind`; there may be others.

    Raises RefusedByHub; LinkLost where it is another message; ProtocolError where a field is not of its type.
    """
    if isinstance(answer, messages.Refused):
        raise RefusedByHub(answer.code, answer.reason)
    if not isinstance(answer, messages.Status):
        raise LinkLost(f"the hub answered {type(answer).__name__} to a question for its {what}")
    found = read_json(answer.status, dict[str, Any], f"the hub's {what}")
    check_answer(found, kind, what)
    return found


def check_answer(found: dict[str, Any], kind: type[msgspec.Struct], what: str) -> None:
    """Raise ProtocolError where a field of a hub's answer is not of its type in `kind`."""
    try:
        msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the hub's {what} cannot be read: {error}") from None
