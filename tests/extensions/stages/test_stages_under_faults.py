"""scripts/chaos --stages in short: machines that are a peer together, under faults, keep every promise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from forked import needs_fork
from test_chaos import fault

from scripts.fault_injection.chaos import under_faults
from scripts.fault_injection.run import Workload, write_data
from scripts.swarms.commands import HUB, REPLICA
from scripts.swarms.forked import Forker


@pytest.mark.slow
@pytest.mark.alone
@needs_fork
def test_a_run_with_a_peer_of_several_machines_keeps_every_promise(tmp_path: Path) -> None:
    """Two of three have the model's layers, the third waits; one of them is killed, one stopped, the hub
    too."""
    write_data(tmp_path / "rows.jsonl", 2000)
    faults = [fault(0, "kill", "ann"), fault(1, "stop", "bob", 4.0), fault(2, "hub-kill", HUB, 1.0)]
    with Forker() as forker:
        workload = Workload(4, 60, 1, batch=12, held_out=8, lent=3, forker=forker)
        out = under_faults("run", workload, faults, None, math.inf, tmp_path)

    assert out.kept, "\n".join(out.lines())
    assert len(out.records) == len(faults)
    told = [json.loads(line) for line in (out.folder / "told.ndjson").read_text().splitlines()]
    accepted = {name for event in told for name in event.get("accepted", ())}
    assert any(name.endswith(REPLICA) for name in accepted)
    assert accepted.isdisjoint({"ann", "bob", "cyd"}), "none of them trains alone"
