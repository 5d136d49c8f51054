"""scripts/fuzz in short, of what relays, proxies and their clients send."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fuzzing.fuzz import fuzz, targets


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what earlier tests have left open is collected here
@pytest.mark.filterwarnings("error")
def test_what_a_stranger_sends_is_sound_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    out = fuzz(targets(["ways"]), 500, 1, tmp_path)

    assert not out.findings, "\n".join(out.findings)
    assert sum(t.cases for t in out.tallies.values()) > 500 - len(out.tallies)
    assert all(0 < tally.taken < tally.cases for tally in out.tallies.values())
