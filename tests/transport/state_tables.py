"""Write the state tables of the protocol into PROTOCOL.md: `python tests/transport/state_tables.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transport.membership import KEY_TRANSITIONS, SESSION_TRANSITIONS
from transport.peer import HEARD
from transport.peer import NEXT as CATCH_UP
from transport.scheduling import PHASES

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- tables: written by python tests/transport/state_tables.py -->", "<!-- end of tables -->"


def tables() -> str:
    """Render all tables from the data that the state machines run on."""
    phases = [
        (phase.name, ", ".join(p.name for p in PHASES if p in after) or "nothing")
        for phase, after in PHASES.items()
    ]
    heard = [(state.name, ", ".join(m.__name__ for m in heard) or "none") for state, heard in HEARD.items()]
    return "\n\n".join(
        [
            table("A run at the hub", "rounds.PHASES", ("phase", "may be followed by"), phases),
            transitions("A session at the hub", "roster.SESSION_TRANSITIONS", "state", SESSION_TRANSITIONS),
            transitions("A key at the hub", "admission.KEY_TRANSITIONS", "standing", KEY_TRANSITIONS),
            table("A peer", "peer_state.HEARD", ("state", "messages that mean something"), heard),
            transitions("A peer that catches up", "catch_up.NEXT", "state", CATCH_UP),
        ]
    )


def transitions(title: str, where: str, state: str, next_states: Mapping[Any, Mapping[Any, Any]]) -> str:
    """Render a transition table, a row for each state."""
    rows = list[tuple[str, str]]()
    for before, arrows in next_states.items():
        after = (f"{event.value}: {to.name}" for event, to in arrows.items())
        rows.append((before.name, "; ".join(after) or "nothing"))
    return table(title, where, (state, "what happens: next"), rows)


def table(title: str, where: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    bars = ["|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"**{title}** (`{where}`)", "", f"| {' | '.join(heads)} |", *bars])


def with_tables(text: str) -> str:
    """Replace the text between the two marks by the tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "transport" / "PROTOCOL.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
