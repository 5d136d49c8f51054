"""A peer's name stays as its owner writes it, and cannot harm a terminal, a table or a page."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.protocol import clean_name, unique_name
from transport.protocol.names import MARKS, MOST

KEPT = ["attic-3090", "ömer-3090", "Ömer_2.b", "東京-4090", "नमस्ते", "мария", "שלום", "x1"]
CLEANED = {
    "attic\x1b[2J": "attic-2J",
    "two words\tand\n more": "two-words-and-more",
    "\u202eevil\u202c": "evil",  # right-to-left override
    "a\u200bb\u2066c\u2069": "abc",  # zero width space, isolates
    "o\u0308mer": "ömer",  # composed
    "o\u200b\u0308mer": "ömer",  # not before the space between them is gone
    "\uff46\uff55\uff4c\uff4c": "full",  # wide letters
    "z\u0337\u0338\u0334\u0335\u0336x": "z\u0337\u0338\u0334x",
    "\u0301start": "start",
    "<b>&'\"/../": "b",
    "../../etc/passwd": "etc-passwd",
    "gpu 🚀": "gpu",
    "x" * 99: "x" * MOST,
    "🚀": "peer",
    "": "peer",
    "...": "peer",
}


@pytest.mark.parametrize("name", KEPT)
def test_a_name_in_any_script_stays(name: str) -> None:
    assert clean_name(name) == name


@pytest.mark.parametrize("name", CLEANED, ids=repr)
def test_what_could_harm_the_text_around_a_name_is_cleaned(name: str) -> None:
    assert clean_name(name) == CLEANED[name]


@given(st.text(max_size=200))
def test_every_name_is_short_printable_and_stays_when_cleaned_again(name: str) -> None:
    cleaned = clean_name(name)

    assert 0 < len(cleaned) <= MOST
    assert cleaned.isprintable()
    assert not set(" /\\<>&\"'`|:*?@") & set(cleaned)
    assert clean_name(cleaned) == cleaned
    marks = "".join("m" if unicodedata.category(c)[0] == "M" else "." for c in cleaned)
    assert "m" * (MARKS + 1) not in marks


def test_a_name_that_is_taken_gets_a_number() -> None:
    assert unique_name("ömer", []) == "ömer"
    assert unique_name("ömer", ["ömer", "ömer-2"]) == "ömer-3"
