"""On a terminal a table is redrawn in place, whatever becomes of it, and what others write is above."""

import io
import re
import sys
from dataclasses import replace

import pytest
from run_story import STEP, STORY, URL

from cocktail_cli.extensions.board.live_view import LiveView
from cocktail_cli.ui import Display, events, open_view

LEFT = events.Left("amber-otter-42", "b", "left (Ctrl-C)", False, steps=12, returns=True)


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_survives_hostile_names_and_narrow_terminals(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "30")
    out, err = io.StringIO(), io.StringIO()
    view = LiveView(out, err, color=False)
    view.show(events.PeerJoined("[red]x[/nope]", "[bold"))
    for event in STORY:
        view.show(event)
    view.close()

    assert out.getvalue().splitlines() == [URL, "outputs/smoke"]
    assert "[red]x[/nope]" in err.getvalue()


class Terminal:
    """A screen of so many columns that breaks lines as terminals do, and knows what rich sends."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row = width, [""], 0

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing, as writes are not buffered."""

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\x1b[1A":
                self.row = max(0, self.row - 1)
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif part[0] not in "\x1b\r":
                self.rows[self.row] += part
        return len(text)

    def narrow(self, width: int) -> None:
        """Reflow as terminals do: a line too long takes several rows, and the cursor moves along."""
        cut = [[row[i : i + width] for i in range(0, len(row), width)] or [""] for row in self.rows]
        self.row = sum(len(pieces) for pieces in cut[: self.row])
        self.rows, self.width = [piece for row in cut for piece in row], width


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    return Terminal(120)


def test_nothing_is_left_of_the_table_when_its_terminal_is_made_narrower(terminal: Terminal) -> None:
    view = LiveView(io.StringIO(), terminal, color=False)  # type: ignore[arg-type]
    for event in STORY[:5]:
        view.show(event)
    assert any("DOWN/S" in row for row in terminal.rows)

    terminal.narrow(60)
    top = max(0, terminal.row - 30)  # rows above have left the screen, and can't be erased
    view.console.width = 60
    view.draw()

    shown = "\n".join(terminal.rows[top:])
    assert "DOWN/S" not in shown
    assert shown.count("· amber-otter-42") == 1
    assert shown.count("Ctrl-C") == 1
    view.close()


def test_what_others_write_goes_above_the_table(terminal: Terminal) -> None:
    before = sys.stderr
    view = LiveView(io.StringIO(), terminal, color=False)  # type: ignore[arg-type]
    for event in STORY[:5]:
        view.show(event)
    print("a library has something to say", file=sys.stderr)
    view.close()

    rows = [row for row in terminal.rows if row]
    assert rows.index("a library has something to say") < rows.index(next(r for r in rows if "· amber" in r))
    assert sys.stderr is before


def test_what_a_volunteer_gave_is_said_below_the_table_and_the_table_comes_again_with_the_next_session(
    terminal: Terminal,
) -> None:
    view = LiveView(io.StringIO(), terminal, color=False)  # type: ignore[arg-type]
    joined = events.Joined("amber-otter-42", "b", "smoke", "9f" * 32, 0)
    for event in (joined, *STORY[1:5], LEFT):
        view.show(event)

    rows = [row for row in terminal.rows if row]
    assert rows[-1].startswith("left amber-otter-42 (Ctrl-C). You gave 12 steps")
    assert sum("· amber-otter-42 · smoke ──" in row for row in rows) == 1
    assert not any("Ctrl-C: leave" in row for row in rows)
    view.show(joined)
    assert sum("· amber-otter-42 · smoke ──" in row for row in terminal.rows) == 2
    view.close()


def colours(sent: str) -> set[str]:
    """Find the codes of colours: 30 to 37, 90 to 97, and those of 256 or more."""
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", sent) for code in found.split(";")}
    return {code for code in codes if re.fullmatch(r"3[0-8]|9[0-7]", code)}


class Recorded(Terminal):
    """A terminal that remembers all that it was sent."""

    def __init__(self, width: int, encoding: str = "utf-8") -> None:
        super().__init__(width)
        self.encoding, self.sent = encoding, ""

    def write(self, text: str) -> int:
        self.sent += text.encode(self.encoding).decode(self.encoding)
        return super().write(text)


@pytest.mark.parametrize(
    ("color", "no_color", "coloured"), [(True, "", True), (False, "", False), (True, "1", False)]
)
def test_states_have_colours_unless_they_are_not_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, color: bool, no_color: str, coloured: bool
) -> None:
    """The option --no-color and the variable NO_COLOR are obeyed, and every word is there without colours."""
    monkeypatch.setenv("NO_COLOR", no_color)
    screen = Recorded(120)
    view = LiveView(io.StringIO(), screen, color=color)  # type: ignore[arg-type]
    for event in STORY[:5]:
        view.show(event)
    view.close()

    assert bool(colours(screen.sent)) == coloured
    assert "training" in screen.sent


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_a_terminal_without_unicode_is_sent_only_what_it_can_show(terminal: Terminal, encoding: str) -> None:
    """The curve is drawn in ASCII there, and no character raises UnicodeEncodeError."""
    screen = Recorded(120, encoding)
    view = LiveView(io.StringIO(), screen, color=True)  # type: ignore[arg-type]
    view.board.run = "amber-otter-42"
    for event in STORY[1:5]:
        view.show(event)
    for step in range(13, 40):
        view.show(replace(STEP, step=step, loss=5.0 - step / 10))
    view.close()

    assert any("*" in row for row in screen.rows)


def test_a_view_for_people_is_the_screen_where_it_is_wanted(terminal: Terminal) -> None:
    with open_view(Display(progress="rich")) as view:
        assert isinstance(view.view, LiveView)  # type: ignore[attr-defined]
