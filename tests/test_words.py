"""Words of errors: each is in cocktail_cli/ERRORS.md with its cause and what to do about it."""

from __future__ import annotations

import pytest
from words import listed, said

GOLDEN = listed()


def test_every_error_is_listed_with_the_text_that_users_read() -> None:
    """`python tests/words.py` prints the lines to add and to remove."""
    assert set(said()) == GOLDEN.keys()


@pytest.mark.parametrize("room", ["cocktail_cli", "recipes", "transport"])
def test_every_error_has_a_cause_and_something_to_do(room: str) -> None:
    lacking = [text for (of, text), told in GOLDEN.items() if of == room and not all(told)]

    assert lacking == []
    assert any(of == room for of, _ in GOLDEN)


def test_an_error_is_one_clause_without_shouting_or_a_full_stop() -> None:
    texts = [text for _, text in GOLDEN]

    assert [text for text in texts if text.endswith((".", "!")) and not text.endswith(("...", " ."))] == []
    assert [text for text in texts if "\n" in text or "  " in text] == []
    shouting = ("invalid", "illegal", "failed to", "unable to", "please", "oops")
    assert [text for text in texts if any(word in text.lower() for word in shouting)] == []
