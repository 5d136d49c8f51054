"""The board as lines of text, drawn as in a terminal."""

import io

from rich.console import Console, RenderableType


def drawn(what: RenderableType, width: int, height: int = 40) -> list[str]:
    """Draw into a terminal of this size, without blanks at the ends of lines."""
    console = Console(file=io.StringIO(), width=width, height=height, markup=False)
    lines = console.render_lines(what, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]
