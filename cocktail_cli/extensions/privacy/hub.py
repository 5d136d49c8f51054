"""The hub's half: notes what peers say they have spent, for the status, the card and receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transport.ledger import Ledger
from transport.membership import Session
from transport.protocol import ProtocolError, SampleRanges, messages, read_msgpack
from transport.scheduling import HubExtension

from .keys import Keys

NAME = "privacy"


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """The body of a Report: the epsilon that its peer has spent. An array on the wire."""

    epsilon: Annotated[float, Meta(ge=0, le=1e30)]


class Spending(msgspec.Struct):
    """The budget of each record, and what peers say they have spent of it, by name."""

    epsilon: messages.Finite
    delta: messages.Finite
    spent: dict[str, messages.Finite]


class Figures(msgspec.Struct):
    """Fields of a status."""

    privacy: Spending | None = None


def words(epsilon: float, terms: Keys) -> str:
    """Say what is spent of a budget."""
    return f"epsilon {epsilon:.3g} of {terms.epsilon:g} at delta {terms.delta:g}"


def noted(ledger: Ledger) -> dict[str, float]:
    """Read what the peers of a run have spent, by name."""
    return json.loads(ledger.noted(NAME) or "{}")  # type: ignore[no-any-return]


@dataclass
class SpendingBook(HubExtension):
    """Notes the newest word of each peer; it survives a restart of the hub."""

    terms: Keys
    spent: dict[str, float] = field(default_factory=dict)  # by name
    written: dict[str, float] = field(default_factory=dict)

    name = NAME

    def reported(self, session: Session, body: bytes, claims: Mapping[int, SampleRanges]) -> None:
        try:
            found = read_msgpack(body, Spent, "the privacy that its peer has spent")
        except ProtocolError:  # its own rows are at stake, nobody else's
            return
        self.spent = {**self.spent, session.name: found.epsilon}  # another thread reads the one before

    def noted(self, round: int) -> str:
        if self.spent == self.written:
            return ""
        self.written = self.spent
        return json.dumps(self.written)

    def status(self) -> Mapping[str, Any]:
        spending = Spending(self.terms.epsilon, self.terms.delta, self.spent)
        return {NAME: msgspec.to_builtins(spending)}

    def attests(self, peer: str) -> str:
        return words(self.spent[peer], self.terms) if peer in self.spent else ""
