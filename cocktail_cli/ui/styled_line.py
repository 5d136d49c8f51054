"""Lines of text with styles. A style is a word for what it marks; the live view gives words their colours."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

STAND_INS = {"·": "-", "─": "-", "━": "=", "…": "~"} | dict(zip("▁▂▃▄▅▆▇█", "__.--=^#", strict=True))


@dataclass(frozen=True)
class Span:
    """A style of the characters from `start` to before `stop`."""

    start: int
    stop: int
    style: str


@dataclass(frozen=True)
class Line:
    """One line of a screen."""

    text: str = ""
    spans: tuple[Span, ...] = ()

    @classmethod
    def styled(cls, text: str, style: str) -> Line:
        return cls(text, (Span(0, len(text), style),) if style else ())

    def __len__(self) -> int:
        return len(self.text)

    def __add__(self, other: Line | str) -> Line:
        """Append; a span goes on where the next begins with the same style."""
        other = Line(other) if isinstance(other, str) else other
        moved = tuple(Span(s.start + len(self), s.stop + len(self), s.style) for s in other.spans)
        last = self.spans[-1] if self.spans else None
        if last and moved and (last.stop, last.style) == (moved[0].start, moved[0].style):
            moved = (replace(last, stop=moved[0].stop), *moved[1:])
            return Line(self.text + other.text, self.spans[:-1] + moved)
        return Line(self.text + other.text, self.spans + moved)

    def rstrip(self) -> Line:
        """Cut the blanks at the end; a span may reach beyond the text."""
        return replace(self, text=self.text.rstrip())

    def __radd__(self, other: str) -> Line:
        return Line(other) + self

    def within(self, encoding: str) -> Line:
        """Replace every character that an encoding lacks by its stand-in, or by a question mark."""
        return replace(self, text="".join(map(partial(encodable, encoding=encoding), self.text)))


def encodable(character: str, encoding: str) -> str:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return STAND_INS.get(character, "?")
    return character


def flowed(parts: Iterable[Line], width: int) -> list[Line]:
    """Fill lines with as many parts as fit; a part too long for a line takes several, without its styles."""
    lines: list[Line] = []
    for part in (piece for whole in parts for piece in wrapped(whole, width)):
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] = lines[-1] + "   " + part
        else:
            lines.append(part)
    return lines


def wrapped(line: Line, width: int) -> Sequence[Line]:
    return [line] if len(line) <= width else [Line(text) for text in textwrap.wrap(line.text, width)]


def columns_of(text: str) -> int:
    """Count the columns that a text takes: two for a wide character, none for a combining one."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def padded(text: str, width: int, right: bool = False) -> str:
    """Cut or fill a text to `width` columns; `right` aligns it to the right."""
    while columns_of(text) > width:
        text = text[:-1]
    fill = " " * (width - columns_of(text))
    return fill + text if right else text + fill
