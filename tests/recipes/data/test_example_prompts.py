"""A user is told to type a message of the held-out conversations, or the beginning of a text."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.data import Sample, TypedPrompt, typed_prompt
from recipes.models import BUILTIN_MODELS, open_tokenizer

ASKED = "When does the harbour office open?"
TALK = [
    {"role": "system", "content": "You are short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": "At nine."},
]


@pytest.fixture
def tokenizer() -> Any:
    return open_tokenizer(BUILTIN_MODELS["builtin:tiny-gpt-neox"])


def sample(tokenizer: Any, text: str, answer: str = "") -> Sample:
    """Make a sample of a text whose tokens from `answer` on are trained."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = text[: text.rindex(answer)] if answer else text[:1]
    first = len(tokenizer(before, add_special_tokens=False)["input_ids"])
    return Sample(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= first)


@pytest.mark.parametrize(
    "template",
    [
        "llama3",
        "llama3_1",
        "qwen2_5",
        "qwen3",
        "qwen3_5_think",
        "gemma",
        "gemma3",
        "phi3",
        "deepseekv3",
        "cohere",
    ],
)
def test_of_conversations_it_is_the_last_message_of_the_user(tokenizer: Any, template: str) -> None:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{template}.jinja"
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    talk = TALK[1:] if template == "gemma" else TALK
    text = tokenizer.apply_chat_template(talk, tokenize=False)

    assert typed_prompt(tokenizer, [sample(tokenizer, text, "At nine.")]) == TypedPrompt(ASKED, True)


def test_of_texts_it_is_the_beginning_whatever_the_tokenizer_has(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    plain = typed_prompt(tokenizer, [sample(tokenizer, "It was a dark night, and nobody came.")])
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"

    assert plain == typed_prompt(tokenizer, [sample(tokenizer, "It was a dark night, and nobody came.")])
    assert plain is not None
    assert not plain.chat
    assert "It was a dark night, and nobody came.".startswith(plain.text)


def test_it_is_one_line_that_a_terminal_shows(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    long = "first line \x1b[31m\nsecond line " + "word " * 200

    assert typed_prompt(tokenizer, [sample(tokenizer, long, "word")]) is not None
    assert typed_prompt(tokenizer, []) is None
    for found in (typed_prompt(tokenizer, [sample(tokenizer, text)]) for text in (long, "\n\n\n\n")):
        assert found is None or (found.text.isprintable() and len(found.text) <= 100)
