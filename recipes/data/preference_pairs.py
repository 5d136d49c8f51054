"""Rows with a chosen and a rejected answer to one prompt: TRL's preference format.

Prompt and answers are texts, or messages. Without a prompt of its own a row has it in both answers: it is
what they begin with alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes.config import Dataset
from recipes.errors import DataError

from .conversations import Conversation, ConversationReader, plain_text
from .sources import Row


@dataclass(frozen=True)
class TextPair:
    """A prompt and two answers to it, as texts."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class ConversationPair:
    """Two conversations that begin with the same prompt: `chosen.prompt` messages."""

    chosen: Conversation
    rejected: Conversation


def is_pair_of_conversations(dataset: Dataset, first: Row) -> bool:
    """True where the answers of a data set are messages; its first row tells. Errors: DataError."""
    return isinstance(first.value(dataset.column("chosen")), list)


def text_pair(dataset: Dataset, row: Row) -> TextPair:
    """Read a row of texts. Errors: DataError with its place."""
    chosen, rejected = (row.text(dataset.column(name)) for name in ("chosen", "rejected"))
    name = dataset.column("prompt")
    if row.fields.get(name) is None:
        start = shared_start(chosen, rejected)
        if start and chosen[start - 1] == " ":  # the answer begins with the space before it, as in TRL
            start -= 1
        return TextPair(chosen[:start], chosen[start:], rejected[start:])
    prompt = row.text(name)
    if prompt.strip() and chosen.startswith(prompt) and rejected.startswith(prompt):
        raise repeated(row, name)
    return TextPair(prompt, chosen, rejected)


def conversation_pair(reader: ConversationReader, row: Row) -> ConversationPair:
    """Read a row of messages, with tools and arguments of the template. Errors: DataError with its place."""
    dataset = reader.dataset
    chosen, rejected = (reader.messages(row, dataset.column(name)) for name in ("chosen", "rejected"))
    name = dataset.column("prompt")
    given = row.fields.get(name)
    if isinstance(given, list):
        prompt = reader.messages(row, name)
        if chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
            raise repeated(row, name)
    else:
        start = shared_start(chosen, rejected)
        prompt = chosen[:start]
        if given is not None:
            check_repeated_text(row, name, prompt)
        chosen, rejected = chosen[start:], rejected[start:]
    for column, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise DataError(f"{row.place}: `{dataset.column(column)}` has no message of an assistant")
    return ConversationPair(
        reader.joined(row, prompt + chosen, len(prompt)), reader.joined(row, prompt + rejected, len(prompt))
    )


def shared_start(chosen: Any, rejected: Any) -> int:
    """Length of what two texts, or two lists of messages, begin with alike. The last of the shorter one
    always belongs to the answer, as in TRL."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), max(shorter - 1, 0))


def check_repeated_text(row: Row, name: str, prompt: list[dict[str, Any]]) -> None:
    """Check that a prompt which is text, beside messages, is said by one of them too. Errors: DataError."""
    text = row.text(name)
    if not any(plain_text(message.get("content")).strip() == text.strip() for message in prompt):
        raise DataError(
            f"{row.place}: `{name}` is text that is in no message which both answers begin with "
            f"(hint: column_map={{prompt: -}} reads the prompt from the messages)"
        )


def repeated(row: Row, name: str) -> DataError:
    return DataError(
        f"{row.place}: both answers begin with the `{name}`, which the model would read twice "
        "(hint: column_map={prompt: -} reads it from the answers)"
    )
