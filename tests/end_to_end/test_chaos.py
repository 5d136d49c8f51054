"""scripts/chaos in short: a run under a handful of faults keeps every promise, and a broken one is found."""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest
from forked import needs_fork

from scripts.fault_injection.chaos import PEERS, under_faults
from scripts.fault_injection.checks import everybody_came_back, exits, growth_of, rounds_in_time, sentences
from scripts.fault_injection.faults import Record
from scripts.fault_injection.run import Workload, write_data
from scripts.fault_injection.schedule import HUB_SHARE, KINDS, Fault, hub_kills, schedule
from scripts.fault_injection.soak import Row, read_rows, soak, totals
from scripts.swarms.commands import HUB, RELAY, Child, Look, Swarm, Told
from scripts.swarms.forked import Forker
from scripts.swarms.tcp_link import Link

THREE = ["ann", "bob", "cyd"]


def fault(number: int, kind: str, target: str, lasts: float = 0.0) -> Fault:
    return Fault(number, 0.3, kind, target, lasts, 0.0, "SIGTERM", 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.alone
@needs_fork
def test_a_run_under_faults_keeps_every_promise(tmp_path: Path) -> None:
    write_data(tmp_path / "rows.jsonl", 2000)
    faults = [
        fault(0, "stop", "ann", 4.0),
        fault(1, "kill", "bob"),
        fault(2, "half-open", "cyd"),
        fault(3, "hub-kill", HUB, 1.0),
        fault(4, "hub-lost", HUB, 0.5),
        fault(5, "relay-kill", RELAY),
    ]
    with Forker() as forker:
        workload = Workload(3, 70, 1, batch=12, held_out=8, forker=forker)
        out = under_faults("run", workload, faults, None, math.inf, tmp_path)

    assert out.kept, "\n".join(out.lines())
    assert {record.fault.kind for record in out.records} == {f.kind for f in faults}


def test_the_faults_follow_from_the_seed() -> None:
    first, again, other = (list(schedule(seed, 600, THREE, 5, list(KINDS))) for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert list(hub_kills(1, 5)) == list(hub_kills(1, 5))


def test_every_kind_of_fault_comes_and_what_is_watched_for_its_memory_is_left_alive() -> None:
    faults = list(schedule(1, 1800, PEERS[:4], 9, list(KINDS)))

    assert {f.kind for f in faults} == set(KINDS)
    assert {f.target for f in faults if KINDS[f.kind].ends} == {"ann", "bob", "cyd"}
    assert max(f.at for f in faults if f.target == HUB) < HUB_SHARE * 1800
    assert {60.0, 5.0} <= {f.lasts for f in faults if f.kind in ("stop", "dark")}


def test_a_hurried_run_has_every_kind_often_those_that_cost_little_and_briefly() -> None:
    faults = list(schedule(1, 600, PEERS, 0.2, list(KINDS)))
    counts = Counter(f.kind for f in faults)

    assert set(counts) == set(KINDS)
    assert counts["cut"] > counts["stop"] > counts["kill"] > 20 * counts["memory"] > 0
    assert counts["kill"] > 200
    lasts = [f.lasts for f in faults if not KINDS[f.kind].long or f.lasts < KINDS[f.kind].long]
    assert max(lasts) <= 2.5
    assert sum(f.lasts == 60.0 for f in faults) > 0


def test_a_soak_goes_on_where_its_file_ends_and_adds_up_its_parts(tmp_path: Path) -> None:
    def part(number: int, way: Row) -> Row:
        played.append(number)
        row = way | {"part": number, "faults": {"kill": 3, "thin": 1}, "samples": 10, "lost": 0}
        return row | {
            "gaps_s": [number / 2],
            "peak_mb": {"hub": number},
            "broken": ["fork"] if number == 3 else [],
        }

    played: list[int] = []
    file = tmp_path / "soak.jsonl"

    assert soak(file, 8, part)
    assert not soak(file, 12, part)
    assert not soak(file, 12, part)
    assert played == [1, 2, 3]
    said = "\n".join(totals(read_rows(file)))
    assert "3 parts, 12 faults: kill 9, thin 3" in said
    assert "replicated: 1 hubs lost with their disk, 0 committed rounds with them; gap 1.0 s" in said
    assert "peak of hub: 1 MB, in the last part 3, at most 3" in said
    assert "NOT SO in part 3: fork" in said


# ---- the checks find what they are for ---------------------------------------------------------------------


def ended(tmp_path: Path, status: int) -> Child:
    ends = f"import os; os._exit({status})" if status >= 0 else f"import os; os.kill(os.getpid(), {-status})"
    child = Child("ann", [sys.executable, "-c", ends], tmp_path / "ann-1")
    child.end()
    return child


def swarm_of(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path / "run", [], [])


def test_a_wrong_exit_status_is_named_with_its_log(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path)
    swarm.children = [ended(tmp_path, 0), ended(tmp_path, 75)]
    check = exits(swarm)

    assert not check.kept
    assert "ann ended with exit 75, expected 0" in check.figure
    assert "ann-1.err" in check.figure


def test_a_peer_that_finds_the_run_over_before_it_has_joined_is_no_fault(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path)
    swarm.children = [ended(tmp_path, 7)]

    assert exits(swarm).kept
    swarm.children[0].name = HUB
    assert not exits(swarm).kept


def test_a_round_that_took_too_long_is_found_and_the_time_without_a_hub_is_not_its_own(
    tmp_path: Path,
) -> None:
    swarm = swarm_of(tmp_path)
    swarm.told = [Told(float(at), {"event": "step", "round": i}) for i, at in enumerate((0, 1, 2, 60))]

    assert not rounds_in_time(swarm, [], step_timeout=30.0).kept
    swarm.no_hub = [[3.0, 40.0]]
    assert rounds_in_time(swarm, [], step_timeout=30.0).kept


def test_a_fault_that_was_not_survived_is_named() -> None:
    record = Record(fault(3, "stop", "bob"), 0.0, problem="bob had no packet in a committed round for 60 s")
    check = everybody_came_back([record])

    assert not check.kept
    assert check.figure == "stop of bob at 0 s: bob had no packet in a committed round for 60 s"


@pytest.mark.parametrize(("allowed", "kept"), [({8, -6}, True), ({8}, False)])
def test_an_abort_without_memory_is_no_traceback_where_it_was_to_be_expected(
    tmp_path: Path, allowed: set[int], kept: bool
) -> None:
    swarm, child = swarm_of(tmp_path), ended(tmp_path, -6)
    child.expects = allowed
    child.log.write_text("FATAL ERROR: OUT OF MEMORY\nFatal Python error: Aborted\n")
    swarm.children = [child]

    assert sentences(swarm).kept is kept


@pytest.mark.parametrize(("more", "flat"), [(0.0, True), (0.5e6, False)])
def test_memory_that_grows_steadily_is_found(tmp_path: Path, more: float, flat: bool) -> None:
    child = ended(tmp_path, 0)
    child.works = 100.0
    child.memory = [Look(100.0 + t, round(500e6 + more * t), 30) for t in range(600)]
    growth = growth_of(child)

    assert growth is not None
    assert growth.flat() is flat


def test_a_swallowed_connection_brings_nothing_more_while_a_new_one_does() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as hub:
        link = Link(hub.getsockname()[1])
        try:
            old = socket.create_connection(("127.0.0.1", link.port))
            behind, _ = hub.accept()
            old.sendall(b"a")
            assert behind.recv(1) == b"a"
            assert link.swallow() == 1
            old.sendall(b"b")
            behind.settimeout(0.1)
            with pytest.raises(TimeoutError):
                behind.recv(1)
            new = socket.create_connection(("127.0.0.1", link.port))
            beyond, _ = hub.accept()
            new.sendall(b"c")
            assert beyond.recv(1) == b"c"
            link.deaf()
            beyond.sendall(b"d")
            new.sendall(b"e")
            assert beyond.recv(1) == b"e", "only one direction is lost"
            new.settimeout(0.1)
            with pytest.raises(TimeoutError):
                new.recv(1)
            link.mend()
            new.settimeout(5.0)
            assert new.recv(1) == b"d"
        finally:
            link.close()
