from __future__ import annotations

from pathlib import Path

import transport
from transport.state_tables import tables, with_tables


def test_the_tables_in_protocol_md_are_the_ones_the_machines_run_on() -> None:
    page = (Path(transport.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")

    assert tables() in page, "run: python -m transport.state_tables"
    assert with_tables(page) == page
