"""Rows with a chosen and a rejected answer to one prompt: TRL's preference format; a pair is one sample.

Prompt and answers are texts, or messages. Without a prompt of its own a row has it in both answers: it is
what they begin with alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.config import Dataset
from recipes.data import (
    Conversation,
    ConversationReader,
    Row,
    RowTokenizer,
    TokenizedDocument,
    common_length,
    plain_text,
)
from recipes.errors import DataError


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


class PreferencePairs:
    """Reads the rows (`recipes.data.RowReader`)."""

    columns = ("prompt", "chosen", "rejected")

    def talks(self, dataset: Dataset, first: Row) -> bool:
        """True where the answers of a data set are messages; its first row tells. Errors: DataError."""
        return isinstance(first.value(dataset.column("chosen")), list)

    def tokenize(self, of: RowTokenizer, rows: Sequence[Row]) -> list[TokenizedDocument]:
        """Tokenize pairs of answers as TRL does: both completions begin where the first of them differs from
        the prompt."""
        if not rows:
            return []
        if of.template is None:
            texts = [text_pair(of.dataset, row) for row in rows]
            prompts = of.ids([pair.prompt for pair in texts])
            chosen, rejected = (
                [of.ended(ids) for ids in of.ids(whole)]
                for whole in ([p.prompt + p.chosen for p in texts], [p.prompt + p.rejected for p in texts])
            )
        else:
            render, reader = of.template.render, ConversationReader(of.dataset, of.template.texts)
            pairs = [conversation_pair(reader, row) for row in rows]
            chosen, rejected, prompts = (
                of.encoded(rendered)["input_ids"]
                for rendered in (
                    [render(pair.chosen) for pair in pairs],
                    [render(pair.rejected) for pair in pairs],
                    [of.template.render_prompt(pair.chosen) for pair in pairs],
                )
            )
            of.warnings += [warning for warning in of.template.warnings if warning not in of.warnings]
        equal = next((row for row, a, b in zip(rows, chosen, rejected, strict=True) if a == b), None)
        said = "chosen and rejected are the same: such pairs teach nothing"
        if equal is not None and not any(said in warning for warning in of.warnings):
            of.warnings.append(f"{equal.place}: {said}")
        return [joined(*sequences) for sequences in zip(prompts, chosen, rejected, strict=True)]


def joined(prompt: list[int], chosen: list[int], rejected: list[int]) -> TokenizedDocument:
    """Join the two sequences of a pair; what follows the prompt is trained."""
    start = min(common_length(prompt, chosen), common_length(prompt, rejected))
    trained = [np.arange(len(ids)) >= start for ids in (chosen, rejected)]
    tokens = np.asarray([*chosen, *rejected], dtype=np.int64)
    return TokenizedDocument(tokens, np.concatenate(trained), (len(chosen), len(rejected)))


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
