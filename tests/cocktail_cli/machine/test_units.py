"""Rates as people write them."""

from pathlib import Path

import pytest
import typer
from in_this_process import Run

from cocktail_cli.host import LocalPeers, LocalSettings
from cocktail_cli.options import parse_rate, rate_text


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20mbit", 2.5e6),
        ("20 Mbit/s", 2.5e6),
        ("500kbit", 62_500),
        ("1.5gbit", 187.5e6),
        ("64000bit", 8000),
        ("2MB/s", 2e6),
        ("300kB/s", 300e3),
        ("4000B/s", 4000),
    ],
)
def test_rates_parse_to_bytes_a_second_and_round_trip(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(rate_text(rate)) == rate


@pytest.mark.parametrize("text", ["20", "20mb", "2MB", "2mb/s", "-1mbit", "fast", "", "1e3kbit", "infbit"])
def test_a_rate_that_could_be_bits_or_bytes_is_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a rate; write 20mbit, 500kbit or 2MB/s"):
        parse_rate(text)


def test_a_rate_too_slow_for_a_run_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="at least 8kbit"):
        parse_rate("0mbit")


@pytest.mark.parametrize("command", [("join", "cocktail://x"), ("launch", "smoke")])
def test_a_wrong_rate_is_a_usage_error(cocktail: Run, command: tuple[str, str]) -> None:
    said = cocktail(*command, "--max-up", "20", "--json")

    assert said.exit == 2
    assert "'--max-up'" in said.out
    assert "'20' is not a rate" in said.out


def test_launch_passes_the_rates_on_to_its_local_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    class Stub:
        pid = 1

        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)
            self.stdin = (tmp_path / "stdin").open("w")

    monkeypatch.setattr("cocktail_cli.host.local_peers.subprocess.Popen", Stub)
    LocalPeers(tmp_path, LocalSettings("cpu", None, 625e3, 6.25e6)).start("cocktail://x", 1)

    assert started[0][-4:] == ["--max-up", "625000B/s", "--max-down", "6250000B/s"]
