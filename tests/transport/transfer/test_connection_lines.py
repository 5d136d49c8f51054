"""Transfers and rounds on the lines of a network lab: real processes and sockets, rates, round trips, faults.

Skipped, with the reason, where namespaces cannot be made. Figures are in recipes/LOG.md.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import line_faults
import line_transfers
import pytest

from scripts.swarms import lab

pytestmark = pytest.mark.slow
ATTEMPTS = 3  # of a measurement: a busy machine is late with pings itself


def measured(script: ModuleType, case: Any) -> dict[str, Any]:
    """Measure a case in a lab of its own."""
    (found,) = lab.inside([str(script.__file__), json.dumps(asdict(case))], case.lab)
    return found


def in_a_lab(measure: Callable[[], dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    try:
        return measure()
    except SystemExit as ended:
        said = capfd.readouterr().err
        if ended.code == 77:
            pytest.skip(said.strip())
        pytest.fail(f"{ended.code}: {said}")


@pytest.mark.alone  # milliseconds count here; the others leave seconds to a busy machine
@pytest.mark.parametrize("way", ["up", "down"])
def test_heartbeats_are_not_late_behind_a_transfer_though_the_router_would_queue_for_a_second(
    way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    case = line_transfers.Case(way, 20.0, 40.0, 5.0, queue=1000.0, congestion="reno")
    late, share = [], []
    for _ in range(ATTEMPTS):
        found = in_a_lab(lambda: measured(line_transfers, case), capfd)
        late.append(max(found["late_hub"], found["late_peer"]))  # ms; whole windows of 8 MiB: 2000
        share.append(found["share"])
        if late[-1] < 200 and share[-1] > 0.8:
            break

    assert min(late) < 200
    assert max(share) > 0.8, "of the line, the start of the transfer included"


def test_an_upload_goes_on_after_a_dark_line_and_sends_at_most_a_window_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = line_transfers.Case("up", 50.0, 40.0, 12.0, fault="dark", fault_at=0.8, fault_s=4.0)
    found = in_a_lab(lambda: measured(line_transfers, case), capfd)

    assert found["again"] <= found["window"] + 256, "KiB; a fragment may go beyond the window"
    assert found["window"] < 4 * 1024
    assert found["seconds"] < 4.0 + 6 * 12e6 * 8 / 50e6


def test_whatever_goes_wrong_with_peers_a_round_keeps_its_deadline_and_they_come_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = line_faults.Case(
        "stop+dark+forgotten+slow+kill",
        fault_s=5.0,
        at=0.3,
        megabytes=0.5,
        mbit=50.0,
        peers=6,
        compute_s=0.3,
        ping_s=0.5,
        peer_timeout=4.0,
        step_timeout=60.0,
        tail=1,
    )
    found = in_a_lab(lambda: measured(line_faults, case), capfd)

    assert found["accepted"] < 6
    assert found["beyond"] < 2.0, "seconds after its deadline a round was committed at the latest"
    assert found["deadline"] < 30.0, "by paces, not by the cap"
    assert all(found["told"][name] for name in found["missed"]), found["told"]
    assert sorted(found["back"]) == ["p2", "p3", "p4", "p5", "p6"], "all came back by themselves"
    assert found["equal"], "all hold the same bytes"


def test_a_peer_killed_in_the_middle_of_a_round_of_40_mb_packets_costs_seconds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = line_faults.Case("kill", first=True, tail=0)
    found = in_a_lab(lambda: measured(line_faults, case), capfd)

    assert found["accepted"] == 3
    assert found["commit"] < found["deadline"], "nobody waits for a connection that is gone"
    assert found["told"]["p4"] == ["p4 left: connection lost"]
    assert found["equal"], "the survivors hold the same bytes"
