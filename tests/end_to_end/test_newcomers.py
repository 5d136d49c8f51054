"""A newcomer's model comes from the hub and from a peer that has it: real processes of the command line."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Forked, needs_fork

from scripts.swarms.lent_machines import LentMachines
from scripts.swarms.processes import Process
from scripts.swarms.tcp_link import free_port

pytestmark = [pytest.mark.slow, needs_fork]
BASE = 4_000_000  # bytes of the builtin model's weights, about
SMALL = ("max_steps=4000", "global_batch_size=8", "data.max_length=32", "data.val_set_size=4")
SHARE = 2 << 20  # bytes that a peer is asked for at a time


def test_a_newcomer_has_a_part_of_the_base_from_a_peer(tmp_path: Path, forked: Forked) -> None:
    with ExitStack() as stack:
        machines = LentMachines(tmp_path, stack, fork=forked.forker.start)
        host, url = machines.launch(*SMALL, "--max-up", "16mbit")
        machines.join(url, "ann", "--listen", f"127.0.0.1:{free_port()}").until("step")
        assert any(of_a_peer(machines, host, url, name) > SHARE // 2 for name in ("bob", "cem", "dan"))


def of_a_peer(machines: LentMachines, host: Process, url: str, name: str) -> int:
    """Let a machine join; return the bytes of the base that the hub has not sent it. A peer that is too busy
    to send its share in time leaves it to the hub, so one newcomer in three may have had none."""
    came = machines.join(url, name)
    host.until("peer_ready", len(host.heard("peer_ready")) + 1)
    ready = host.heard("step")[-1]["round"]
    while host.heard("step")[-1]["round"] < ready + 2:
        host.until("step", len(host.heard("step")) + 1)
    [fetched] = [line["total"] for line in came.heard("progressed") if line.get("unit") == "bytes"][-1:]
    assert fetched > BASE
    return fetched - sum(step["fetched_bytes"].get(name, 0) for step in host.heard("step"))
