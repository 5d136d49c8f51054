"""Write the state tables of this room into PROTOCOL.md: `python -m transport.state_tables`."""

from __future__ import annotations

from pathlib import Path

from transport.membership import NEXT as ADMISSION
from transport.membership.sessions import NEXT
from transport.peer import HEARD
from transport.peer import NEXT as CATCH_UP
from transport.scheduling import PHASES

BEGIN, END = "<!-- tables: written by python -m transport.state_tables -->", "<!-- end of tables -->"


def tables() -> str:
    """All tables, as the machines run on them."""
    lines = ["**A run at the hub** (`rounds.PHASES`)", "", "| phase | may be followed by |", "|---|---|"]
    for phase, after in PHASES.items():
        lines.append(f"| {phase.name} | {', '.join(p.name for p in PHASES if p in after) or 'nothing'} |")
    lines += [
        "",
        "**A session at the hub** (`sessions.NEXT`)",
        "",
        "| state | what happens | next |",
        "|---|---|---|",
    ]
    for state, row in NEXT.items():
        lines += [f"| {state.name} | {kind.value} | {to.name} |" for kind, to in row.items()]
    lines += [
        "",
        "**A key at the hub** (`admission.NEXT`)",
        "",
        "| standing | what happens | next |",
        "|---|---|---|",
    ]
    for standing, acts in ADMISSION.items():
        lines += [f"| {standing.name} | {act.value} | {after.name} |" for act, after in acts.items()]
    lines += [
        "",
        "**A peer** (`peer_state.HEARD`)",
        "",
        "| state | messages that mean something |",
        "|---|---|",
    ]
    for link, heard in HEARD.items():
        lines.append(f"| {link.name} | {', '.join(m.__name__ for m in heard) or 'none'} |")
    lines += [
        "",
        "**A peer that catches up** (`catch_up.NEXT`)",
        "",
        "| state | what happens | next |",
        "|---|---|---|",
    ]
    for step, ways in CATCH_UP.items():
        lines += [f"| {step.name} | {kind.value} | {to.name} |" for kind, to in ways.items()]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """`text` with what lies between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(__file__).with_name("PROTOCOL.md")
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
