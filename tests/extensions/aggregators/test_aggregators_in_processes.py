"""Peers that own shards, each a process with a door: one is killed and comes back, one leaves, and the hub is
killed."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import PATIENCE, Command, Forked, needs_fork

from transport import Ledger

LAUNCH = ["launch", "smoke", "--port", "0", "--bind", "127.0.0.1", "--json", "--peers", "0"]
LAUNCH += ["data.max_length=16", "data.val_set_size=4", "global_batch_size=6", "max_steps=5000"]
LAUNCH += ["compression.shards=8", "owners=peers"]
# where a busy machine's rungs went from staleness 2 to 1, nobody has one round's x' to report
LAUNCH += ["staleness=1"]

pytestmark = [pytest.mark.slow, needs_fork]


def steps(command: Command) -> list[dict[str, Any]]:
    return [event for event in command.told if event.get("event") == "step"]


def three_rounds_of(hub: Command, peers: int) -> None:
    """Wait until the last three rounds had so many members."""
    end = time.monotonic() + PATIENCE
    while [step["peers"] for step in steps(hub)[-3:]] != [peers] * 3:
        assert hub.poll() is None, hub.said
        assert time.monotonic() < end, f"no three rounds of {peers}: {hub.told[-3:]}"
        time.sleep(0.05)


def still(hub: Command) -> list[str]:
    """Told of shards that have not moved."""
    return [event["message"] for event in hub.told if "have not moved" in event.get("message", "")]


def test_owners_are_killed_leave_and_outlive_their_hub(tmp_path: Path, forked: Forked) -> None:
    launch = [*LAUNCH, "-o", str(tmp_path / "out")]
    hub = forked.start(tmp_path / "hub", *launch)
    url, peers = hub.until("run_started")["url"], dict[str, Command]()

    def join(name: str, life: str = "") -> Command:
        line = ["join", url, "-y", "--json", "--name", name, "--listen", "127.0.0.1:0"]
        return forked.start(tmp_path / f"{name}{life}", *line, home=tmp_path / name / "home")

    for name in ("ann", "bob", "cat"):
        peers[name] = join(name)
    three_rounds_of(hub, 3)
    assert not still(hub)

    [kept] = (tmp_path / "bob" / "home" / "kept").glob("*/bob@*.updates.log")
    end = time.monotonic() + PATIENCE
    while not kept.stat().st_size:  # it has just handed shards over, and written its error down anew
        assert time.monotonic() < end, "no round since"
        time.sleep(0.01)
    peers["bob"].send(signal.SIGKILL)
    three_rounds_of(hub, 2)
    assert len(still(hub)) <= 1, "the round that it was killed in"
    assert kept.stat().st_size, "what led to its error"
    peers["bob"] = join("bob", " again")
    three_rounds_of(hub, 3)
    assert not [event for event in peers["bob"].told if event.get("event") == "warning"]
    peers["cat"].send(signal.SIGINT)
    assert peers["cat"].wait() == 0
    three_rounds_of(hub, 2)
    assert all("cat" not in message for message in still(hub)), "the hub knew before the next round opened"

    hub.send(signal.SIGKILL)
    hub.wait()
    again = forked.start(tmp_path / "again", "resume", str(tmp_path / "out"), "--json")
    three_rounds_of(again, 2)
    again.send(signal.SIGINT)
    assert (again.wait(), peers["ann"].wait(), peers["bob"].wait()) == (0, 75, 75), "the run is paused"
    assert not still(again)

    with Ledger(tmp_path / "out" / "ledger", write=False) as ledger:
        rows, audit = ledger.rounds(), ledger.verify()
    assert audit.rounds == len(rows) > steps(again)[0]["round"] > 6
    for name, peer in peers.items():
        told = [(step["round"], step["fingerprint"]) for step in steps(peer) if step["round"] + 1 < len(rows)]
        assert told == [(round, f"{rows[round + 1].fingerprint:016x}") for round, _ in told], name
