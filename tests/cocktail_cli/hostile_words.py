"""Words of somebody who wants a terminal to obey, and the measure of text that none obeys."""

import unicodedata
from collections.abc import Iterator
from typing import Any

from cocktail_cli.foreign_text import INVISIBLE

HOSTILE = (
    "A\x1b]52;c;cm0gLXJm\x07\x1b]0;title\x07\x1b[2J\x9b31m\x7f\nerror: a lie\r\x85hint: another\u2028"
    "\u202eevil\u2066\u200b\u200d\ufeff\u00ad\U000e0041\ufe0f" + "\u0301" * 20 + "\ud800Z"
)
WORDS = HOSTILE.replace("\ud800", "")  # which no message can carry


def safe(text: str) -> bool:
    wrong = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    seen = [c for c in text if c != "\n" and (unicodedata.category(c) in wrong or ord(c) in INVISIBLE)]
    return not seen and "\u0301" * 4 not in text


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*texts_in(key), *texts_in(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
