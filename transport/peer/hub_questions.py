"""Questions to a hub on a connection without a session: `cocktail status`, `stop`, `peers` and `kick`, and a
look at a run before joining it.

Of the JSON in an answer the fields are checked before use. A hub may add fields, which are kept. What it
leaves out has the value below.

To a visitor the hub tells what a joiner wants to know, and shows its host that somebody is deciding, where
somebody is. Nothing is fetched, and the run waits for nobody, until the user has agreed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transport.protocol import (
    LinkLost,
    ProtocolError,
    RefusedByHub,
    RunURL,
    Unreachable,
    decode_to_peer,
    encode,
    messages,
    read_json,
)
from transport.wire import Connected, DealerWire, Disconnected, Received, routes_to

from .peer_link import PeerIdentity

ADMIN_S = 60.0  # for an answer: a decision waits until the round being committed is durable
ANSWER_S = 20.0  # a hub that takes connections may take this long to answer
REDIAL_S = 1.0
GOODBYE_S = 1.0

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

    Raises LinkLost where it is another message, ProtocolError where a field is not of its type.
    """
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


# ---- from a command ----------------------------------------------------------------------------------------


def ask_status(url: RunURL, timeout: float = 10.0, recipe: bool = False) -> dict[str, Any]:
    """Return the object of `cocktail status --json`, with the recipe's text if `recipe`. Raises Unreachable,
    RefusedByHub, LinkLost, ProtocolError."""
    question = messages.AskStatus(messages.PROTOCOL, url.token, url.run, recipe)
    return status_of(ask(url, question, timeout))


def ask_stop(url: RunURL, secret: str, now: bool = False, pause: bool = False, timeout: float = 10.0) -> None:
    """End or pause the run; wait for the hub's answer. Raises Unreachable, RefusedByHub, LinkLost."""
    question = messages.AskStop(messages.PROTOCOL, secret, url.run, now, pause)
    try:
        answer = ask(url, question, timeout)
    except LinkLost:  # a hub without peers ends at once, and its answer may be lost with the connection
        try:
            answer = ask(url, question, timeout)
        except Unreachable:
            return
    if not isinstance(answer, messages.Over):
        raise LinkLost(f"the hub answered {type(answer).__name__} to a stop")


def ask_admin(url: RunURL, secret: str, order: messages.AdminCommand, **fields: str) -> dict[str, Any]:
    """Ask for a page of the list of peers, or decide on one (messages.AskAdmin has the `fields`); returns
    when durable. Raises Unreachable, RefusedByHub, LinkLost, ProtocolError."""
    question = messages.AskAdmin(messages.PROTOCOL, secret, url.run, order, **fields)
    kind, what = (PeersPage, "list of peers") if order == "list" else (AdminDone, "answer")
    return answer_of(ask(url, question, ADMIN_S), kind, what)


def peer_pages(url: RunURL, secret: str) -> Iterator[dict[str, Any]]:
    """Yield the list of peers page by page, those with a connection first. Raises as `ask_admin`."""
    after = None
    while after != "":
        page = ask_admin(url, secret, "list", peer=after or "")
        after = "" if page.get("more") == after else page.get("more", "")
        yield page


def ask(url: RunURL, question: messages.Message, timeout: float) -> messages.Message:
    """Send one message on a connection of its own and return the answer."""
    with closing(DealerWire(routes_to(url), url.key)) as wire:
        answer = answer_on(wire, question, timeout)
    if answer is None:
        why = f"no answer from {url.host}:{url.port} within {timeout:.0f} s"
        raise Unreachable(url.host, url.port, "tcp", why)
    return answer


def answer_on(wire: DealerWire, question: messages.Message, timeout: float) -> messages.Message | None:
    """Connect, send one message and return the answer; None where none comes in time. Raises Unreachable,
    RefusedByHub, LinkLost, ProtocolError."""
    until = time.monotonic() + timeout
    wire.dial(0)
    while (left := until - time.monotonic()) > 0:
        for event in wire.poll(left):
            if isinstance(event, Connected):
                wire.send(0, [encode(question)])
            elif isinstance(event, Disconnected):
                raise event.error or LinkLost("the hub hung up without an answer")
            elif isinstance(answer := decode_to_peer(event.frames[0]), messages.Refused):
                raise RefusedByHub(answer.code, answer.reason)
            else:
                return answer
    return None


# ---- before joining ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPreview:
    """The hub's answer to a visitor."""

    status: dict[str, Any]  # the object of `cocktail status --json`
    welcome: messages.Welcome  # as Hello would be answered now, but for name and session


class RunVisit:
    """A visit of one user. `look`, `decide` while the user does, `end`."""

    def __init__(self, url: RunURL, identity: PeerIdentity) -> None:
        self.url, self.identity = url, identity
        self._wire = DealerWire(routes_to(url), url.key, identity.keys)
        self._thread = threading.Thread(target=self._stay, name="visit", daemon=True)
        self._over, self._declined = threading.Event(), False

    def look(self, patience: float, waits: bool = False) -> RunPreview:
        """Ask the hub. While it cannot be reached, dial again for `patience` seconds; where nobody `waits`
        for it to come back, another key than the URL's ends that at once.

        Raises Unreachable, RefusedByHub, LinkLost, ProtocolError.
        """
        until = time.monotonic() + patience
        question = messages.AskStatus(messages.PROTOCOL, self.url.token, self.url.run, True)
        while True:
            try:
                if (answer := answer_on(self._wire, question, ANSWER_S)) is None:
                    raise LinkLost(f"waited {ANSWER_S:.0f} s for the hub's answer")
                status = status_of(answer)
                return RunPreview(status, preview_of(status))
            except (Unreachable, LinkLost) as error:
                away = isinstance(error, Unreachable) and error.layer != "key"
                more = error.patience if isinstance(error, Unreachable) else 0.0
                if time.monotonic() >= until + more or not (waits or away):
                    raise
                time.sleep(REDIAL_S)

    def decide(self) -> None:
        """Be seen as deciding until the visit ends."""
        deciding = messages.Deciding(
            messages.PROTOCOL, self.url.token, self.url.run, self.identity.name, self.identity.hardware
        )
        self._wire.send(0, [encode(deciding)])
        self._thread.start()

    def end(self, declined: bool) -> None:
        """End the visit; the hub hears of a user who has declined. May be called at any time, and again."""
        if self._over.is_set():
            return
        self._declined = declined
        self._over.set()
        if self._thread.ident is None:
            self._wire.close()
        else:
            self._wire.wake()
            self._thread.join(2 * GOODBYE_S)

    def _stay(self) -> None:
        """Answer the hub's pings until the visit ends."""
        connected = True
        while connected and not self._over.is_set():
            connected = self._listen(0.5)
        if connected and self._declined:
            self._wire.send(0, [encode(messages.Leave("declined"))])
            self._listen(GOODBYE_S)
        self._wire.close()

    def _listen(self, timeout: float) -> bool:
        """Handle what comes; False once the connection is gone, or brings what is no message."""
        for event in self._wire.poll(timeout):
            if isinstance(event, Disconnected):
                return False
            if isinstance(event, Received):
                try:
                    message = decode_to_peer(event.frames[0])
                except ProtocolError:
                    return False
                if isinstance(message, messages.Ping):
                    self._wire.send(0, [encode(messages.Pong(message.sent))])
        return True


def preview_of(status: dict[str, Any]) -> messages.Welcome:
    """Build the Welcome that a joiner would get. Raises ProtocolError where the hub's answer lacks a part."""
    known = {key: status.get(key) for key in ("run", "recipe", "recipe_hash", "base", "round")}
    known |= {key: status.get(key) for key in ("log_bytes", "snapshots")}
    rest = {"type": "Welcome", "protocol": messages.PROTOCOL, "name": "", "session": "", "ping_s": 0.0}
    try:
        return msgspec.convert(known | rest, messages.Welcome)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the hub's status is not one for joiners: {error}") from None
