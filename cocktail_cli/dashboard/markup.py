"""HTML and SVG as element trees: foreign text cannot become markup, because no text is pasted together.

Nor can it change how the text beside it reads: each text is made safe to show.
"""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cocktail_cli.foreign_text import paragraphs

Child = Element | str | None  # None: nothing


def el(tag: str, *children: Child, **attributes: str | float | bool | None) -> Element:
    """Create an element. `class_` is class, `aria_label` is aria-label; None is omitted."""
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            made.set(name.rstrip("_").replace("_", "-"), "" if value is True else attribute_text(value))
    for child in children:
        if isinstance(child, str):
            add_text(made, child)
        elif child is not None:
            made.append(child)
    return made


def add_text(parent: Element, text: str) -> None:
    text = paragraphs(text)
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def attribute_text(value: str | float) -> str:
    """Format an attribute; floats are rounded to a hundredth of a pixel to save bytes."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else paragraphs(str(value))


def html(made: Element) -> str:
    return ElementTree.tostring(made, encoding="unicode", method="html")
