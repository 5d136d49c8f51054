"""Peers that go wrong, each in its own way, in one run: it goes on, each is named with its reason, and every
sample is counted once."""

import itertools
import time
from pathlib import Path

import pytest
from forked import Command, Forked, needs_fork
from stalling_hub import Material, stalling_hub

from transport import Ledger
from transport.protocol import events as told

pytestmark = [pytest.mark.slow, needs_fork]

# In its third micro-batch torch is asked for more than any machine has.
NO_MEMORY = """
import recipes.objectives as objective, torch, itertools
fine, calls = objective.loss_sum, itertools.count()
objective.loss_sum = lambda *a: torch.empty(10**15) if next(calls) == 3 else fine(*a)
"""
# What is fetched goes to a device that is always full.
NO_DISK = """
import builtins
fine = builtins.open
builtins.open = lambda path, mode="r", *a, **o: fine(
    "/dev/full" if set(mode) & {"w", "+"} and str(path).endswith(".part") else path, mode, *a, **o)
"""
# Seven hours late, and five hours to and fro with every look.
WRONG_CLOCK = """
import itertools, time
fine, looks = time.time, itertools.count()
time.time = lambda: fine() - 3600 * (7 + 5 * (next(looks) % 2))
"""


def test_the_run_goes_on_whatever_happens_at_a_peer(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: fine() + 3600 * 3 * (next(looks) % 2))  # the hub's own clock
    material = Material.prepare(tmp_path / "base", "max_steps=24")
    with stalling_hub(material, tmp_path / "ledger", commits=True, first_peers=5, linger_s=2.0) as hub:

        def join(name: str, before: str = "", folder: str = "", home: Path | None = None) -> Command:
            place = tmp_path / (folder or name)
            place.mkdir()
            (place / "url").write_text(f"{hub.url}\n")
            options = ("-y", "--json", "--device", "cpu", "--micro-batch-size", "1", "--name", name)
            return forked.start(place, "join", "@url", *options, before=before, home=home)

        no_disk = join("no-disk", NO_DISK, home=tmp_path / "elsewhere")
        no_memory = join("no-memory", NO_MEMORY)
        others = [join("steady"), join("clock", WRONG_CLOCK), join("twin"), join("twin", folder="twin again")]

        assert [peer.wait() for peer in others] == [0] * 4, [peer.told[-1:] for peer in others]
        assert (no_disk.wait(), no_memory.wait()) == (8, 8)

    assert all(peer.told[-1]["finished"] for peer in others)
    home = str(tmp_path / "elsewhere")
    assert f"the disk is full: no space left at {home}" in no_disk.told[-1]["error"]["message"]
    assert no_memory.told[-1]["error"]["code"] == "out_of_memory"
    assert "data.max_length" in " ".join(no_memory.told[-1]["error"]["hints"])  # it has one sample at a time
    assert (hub.left("no-disk"), hub.left("no-memory")) == (["left: out of disk"], ["left: out of memory"])
    rounds = [event for event in hub.events if isinstance(event, told.RoundCommitted)]
    by_name = {name: sum(name in round.accepted for round in rounds) for name in names(rounds)}
    assert set(by_name) >= {"steady", "clock", "twin", "twin-2"}
    assert by_name["clock"] >= by_name["steady"] // 2, "nobody looks at the clock on the wall"
    with Ledger(tmp_path / "ledger", write=False) as ledger:
        assert ledger.verify(complete=True).missing == 0


def names(rounds: list[told.RoundCommitted]) -> set[str]:
    return {name for round in rounds for name in round.accepted}
