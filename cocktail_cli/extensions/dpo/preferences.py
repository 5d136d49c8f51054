"""Direct preference optimization (Rafailov et al., 2023) of adapters beside a frozen base.

    r(y) = beta (log p(y | prompt) - log p_ref(y | prompt))     the reward of an answer, equation 5 without Z
    loss = -log sigmoid(r(chosen) - r(rejected))                equation 7: `sigmoid`

p_ref is the base: the same model with its adapters switched off, so no second model is held. The other losses
are `hinge` (Zhao et al., 2023) and `ipo` (Azar et al., 2024), as in TRL.

Rows have a chosen and a rejected answer to one prompt: TRL's preference format; a pair is one sample. Prompt
and answers are texts, or messages. Without a prompt of its own a row has it in both answers: it is what they
begin with alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from recipes.config import Dataset
from recipes.data import (
    Conversation,
    ConversationReader,
    Row,
    RowTokenizer,
    Sample,
    TokenizedDocument,
    collate,
    common_length,
    plain_text,
)
from recipes.errors import DataError
from recipes.objectives import BatchLoss, Bounds, token_losses

MOST = 1e4  # nats of a margin: beyond, adapters have left their base for good


class Preferences:
    """The mean loss of a pair. A sample is one: its documents are prompt + chosen and prompt + rejected."""

    def __init__(self, beta: float, loss_type: Literal["sigmoid", "hinge", "ipo"]) -> None:
        self.beta, self.loss_type = beta, loss_type

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        """Bound the loss, of which `ipo` is a square, and the rewards; the last figure counts pairs."""
        most = MOST**2 if self.loss_type == "ipo" else MOST
        return (0.0, most), (-inf, inf), (-inf, inf), (0.0, 1.0)

    def terms(self, samples: Sequence[Sample]) -> int:
        return sum(sample.count > 0 for sample in samples)

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        sequences = [*(halves(sample)[0] for sample in part), *(halves(sample)[1] for sample in part)]
        batch = {name: tensor.to(device) for name, tensor in collate(sequences).items()}
        peft: Any = model
        with torch.no_grad(), peft.disable_adapter():
            reference, _ = sequence_losses(model, batch)
        own, lengths = sequence_losses(model, batch)
        ratios = reference - own  # (2 B,) log p - log p_ref
        counted = lengths[: len(part)] > 0
        losses = torch.where(counted, self.pair_losses(ratios, lengths), 0.0)
        chosen, rejected = (self.beta * ratios.detach()).chunk(2)
        right = (chosen > rejected) & counted
        rewards = torch.stack([chosen.sum(), rejected.sum(), right.sum()])  # those of no pair are 0
        return BatchLoss(losses.sum(), self.terms(part), rewards)

    def pair_losses(self, ratios: Tensor, lengths: Tensor) -> Tensor:
        """Compute the loss of each pair: (B,).

        Args:
            ratios: (2 B,) log p - log p_ref of the chosen answers, then of the rejected ones.
            lengths: (2 B,) trained tokens of the answers.
        """
        beta = self.beta
        chosen, rejected = ratios.chunk(2)
        margin = beta * (chosen - rejected)
        match self.loss_type:
            case "sigmoid":
                return -logsigmoid(margin)
            case "hinge":
                return torch.relu(1 - margin)
            case "ipo":  # by the token, so that long answers weigh no more
                chosen, rejected = (ratios / lengths.clamp(min=1)).chunk(2)
                return (chosen - rejected - 1 / (2 * beta)) ** 2

    def longest(self, length: int) -> Sample:
        return Sample(np.zeros(2 * length, np.int32), np.arange(2 * length) % length > 0, (length, length))

    def uncounted(self, like: Sample) -> Sample:
        return Sample(np.tile(like.tokens[:2], 2), np.zeros(4, bool), (2, 2))


def halves(sample: Sample) -> tuple[Sample, Sample]:
    """Split a pair into its chosen and its rejected sequence."""
    cut = sample.lengths[0]
    tokens, trained = sample.tokens, sample.trained
    return Sample(tokens[:cut], trained[:cut]), Sample(tokens[cut:], trained[cut:])


def sequence_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the losses of each sequence, -log p of its answer, and count its trained tokens: (B,) and (B,)."""
    losses, trained = token_losses(model, batch)
    return losses.sum(dim=1), trained.sum(dim=1)


@dataclass(frozen=True)
class TextPair:
    """A prompt and two answers to it, as texts."""

    prompt: str
    chosen: str
    rejected: str


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
                    [render(chosen) for chosen, _ in pairs],
                    [render(rejected) for _, rejected in pairs],
                    [of.template.render_prompt(chosen) for chosen, _ in pairs],
                )
            )
            of.warnings |= of.template.warnings
        equal = next((row for row, a, b in zip(rows, chosen, rejected, strict=True) if a == b), None)
        said = "chosen and rejected are the same: such pairs teach nothing"
        if equal is not None and not any(said in warning for warning in of.warnings):
            of.warnings[f"{equal.place}: {said}"] = None
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


def conversation_pair(reader: ConversationReader, row: Row) -> tuple[Conversation, Conversation]:
    """Read a row of messages, with tools and arguments of the template: two conversations that begin with the
    same prompt, of `prompt` messages each. Errors: DataError with its place."""
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
    ends = (reader.joined(row, prompt + answer, len(prompt)) for answer in (chosen, rejected))
    return next(ends), next(ends)


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
