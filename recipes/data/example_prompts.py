"""Prompts taken from samples: the text before a sample's first trained token, and a user's question in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from .conversations import common_length
from .samples import Sample

SHOWN = 16  # tokens of a text that are the prompt, where the data has none of its own
LONGEST = 128  # tokens of a prompt; of a longer one the end
NEW = 48  # tokens that a model adds
LINE = 100  # characters of a prompt that is typed
LOOKED_AT = 64  # samples, for a prompt of one short line
MARKS = ("\ue000", "\ue001", "\ue002")  # private characters, found again in a rendered conversation


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text, and how it goes on."""

    tokens: list[int]
    rest: list[int]


def prompt_of(sample: Sample) -> Prompt:
    """Split a sample's first document before its first trained token, or plain text after SHOWN tokens."""
    length = sample.lengths[0]
    tokens, trained = sample.tokens[:length].tolist(), sample.trained[:length]
    first = int(trained.argmax()) if trained.any() else 0
    cut = first if first > 1 else min(SHOWN, max(1, length // 2))
    return Prompt(tokens[max(0, cut - LONGEST) : cut], tokens[cut : cut + NEW])


@dataclass(frozen=True)
class TypedPrompt:
    """A prompt to type after `cocktail generate`; `chat`: a message, for the chat template."""

    text: str
    chat: bool


def typed_prompt(tokenizer: PreTrainedTokenizerBase, samples: Iterable[Sample]) -> TypedPrompt | None:
    """Find a prompt of one line of at most LINE characters: a user's message where the samples are
    conversations, else the beginning of a text. None where there is no text at all."""
    first = None
    for sample in islice(samples, LOOKED_AT):
        one = asked_in(tokenizer, prompt_of(sample))
        if one.text and len(one.text) <= LINE and one.text.isprintable():
            return one
        first = first or (one if one.text else None)
    if first is None:
        return None
    line = first.text.splitlines()[0]
    shortened = line if len(line) <= LINE else line[:LINE].rsplit(" ", 1)[0]
    return TypedPrompt("".join(filter(str.isprintable, shortened)), first.chat)


def asked_in(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> TypedPrompt:
    """Decode the last message of a user in a prompt, or all of it where there is none."""
    before, after = _user_marks(tokenizer)
    _, opened, rest = str(tokenizer.decode(prompt.tokens)).rpartition(before or MARKS[0])
    message, closed, _ = rest.partition(after or MARKS[0])
    if opened and closed:
        return TypedPrompt(message.strip(), True)
    return TypedPrompt(str(tokenizer.decode(prompt.tokens, skip_special_tokens=True)).strip(), False)


def _user_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Find what the chat template puts before a user's message, and the first line of what it puts after it.
    Both are empty where there is no template, or it takes no such messages."""
    roles = ("user", "assistant", "user")
    talk = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
    try:
        rendered = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except Exception:  # any kind: a template is a program of somebody else
        return "", ""
    before, _, rest = rendered.partition(MARKS[0])
    after, _, rest = rest.partition(MARKS[1])
    shared = common_length(before[::-1], rest.partition(MARKS[2])[0][::-1])
    after = after.strip().partition("\n")[0]
    return before[len(before) - shared :], after
