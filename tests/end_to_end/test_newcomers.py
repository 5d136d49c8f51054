"""A newcomer's model comes from the hub and from a peer that has it: real processes of the command line."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Forked, needs_fork

from scripts.swarms.lent_machines import LentMachines
from scripts.swarms.tcp_link import free_port

pytestmark = [pytest.mark.slow, needs_fork]
BASE = 4_000_000  # bytes of the builtin model's weights, about
SHARE = 2 << 20  # bytes that a peer is asked for at a time


def test_a_newcomer_has_a_part_of_the_base_from_a_peer(tmp_path: Path, forked: Forked) -> None:
    with ExitStack() as stack:
        machines = LentMachines(tmp_path, stack, fork=forked.forker.start)
        _, url = machines.launch("max_steps=400", "global_batch_size=8")
        machines.join(url, "ann", "--listen", f"127.0.0.1:{free_port()}").until("step")
        came = machines.join(url, "bob")
        came.until("step")
        status = machines.start("host", "status", url)
        status.end()
        [bob] = [peer for peer in status.said[-1]["peers"] if peer["name"] == "bob"]
        [fetched] = [line["total"] for line in came.heard("progressed") if line.get("unit") == "bytes"][-1:]

    assert fetched > BASE
    assert bob["down_bytes"] < fetched - SHARE // 2, "the hub has not sent all of it"
