"""Several machines are one peer: real processes of the command line, one of them killed with -9."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from forked import Forked, needs_fork

from cocktail_cli.extensions.reach.relay_server import Relay
from scripts.swarms.commands import SMOKE
from scripts.swarms.lent_machines import LentMachines, ring_of
from scripts.swarms.processes import Process
from scripts.swarms.tcp_link import free_port

pytestmark = [pytest.mark.slow, needs_fork]
STEPS, SMALL = 16, ("global_batch_size=8", "data.val_set_size=4")


@pytest.fixture
def machines(tmp_path: Path, forked: Forked) -> Iterator[LentMachines]:
    with ExitStack() as stack:
        yield LentMachines(tmp_path, stack, fork=forked.forker.start)


def loaded(head: Process) -> list[str]:
    """List what a head has said each time that it gave the machines of its ring their layers."""
    states = [told["state"] for told in head.heard("progressed")]
    return [state for state in states if "waiting for the other 2 of 3 machines" in state]


def test_a_lent_machine_killed_with_9_is_replaced_by_one_that_waits(machines: LentMachines) -> None:
    """No machine has memory for the model. Three are a ring, the fourth waits, and takes the layers of the
    one that is killed, while the others keep theirs. The replay is what the machines had. As its neighbour
    has told the hub that nobody is there, its session has no grace. Of the four one alone can be dialled, so
    two neighbours meet at the run's relay."""
    relay = machines.stack.enter_context(closing(Relay("127.0.0.1", 0)))
    host, url = machines.launch(f"max_steps={STEPS}", *SMALL, "--relay", f"127.0.0.1:{relay.port}")
    lent: dict[str, Process] = {}
    for name in ("ann", "bob", "cid", "dan"):
        listen = ["--listen", f"127.0.0.1:{free_port()}"] if name == "ann" else []
        lent[name] = machines.join(url, name, "--layers", SMOKE, *listen)
    while len(host.heard("peer_joined")) < 5:  # the four, and the replica
        host.until("peer_joined", len(host.heard("peer_joined")) + 1)
    host.until("step", 3)  # until then a fourth machine may get a place in the first ring
    told = len(host.heard("stages"))
    ring = next(filter(None, map(ring_of, reversed(host.heard("stages")))))
    head, killed = lent[ring[0]], ring[1]
    loads = len(loaded(head))
    assert relay.runs == 4, "the hub's, and of the three that nobody can dial"
    lent[killed].signal(signal.SIGKILL)
    stepped = len(head.heard("step"))
    finished = host.until("run_finished", timeout=300.0)
    [left] = [event["came"] for event in host.heard("peer_left") if event["peer"] == killed]
    after = host.heard("stages")[told:]
    replaced = next(e["came"] for e in after if ring_of(e) and killed not in ring_of(e))

    assert abs(replaced - left) < 1.0, "both at once, not 1.5 s apart"
    assert finished["steps"] == STEPS
    assert sum(step["loss"] is not None for step in head.heard("step")[stepped + 1 :]) > 3
    assert len(loaded(head)) == loads + 1, "it has joined anew, once"
    assert machines.verified() == 8 * STEPS
