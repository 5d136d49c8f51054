from state_tables import ROOT, tables, with_tables


def test_the_tables_in_protocol_md_are_the_ones_the_machines_run_on() -> None:
    page = (ROOT / "transport" / "PROTOCOL.md").read_text(encoding="utf-8")

    assert tables() in page, "run: python tests/transport/state_tables.py"
    assert with_tables(page) == page
