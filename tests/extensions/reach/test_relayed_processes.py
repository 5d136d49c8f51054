"""A run through `cocktail relay`, with real processes."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from forked import Forked, needs_fork
from tls_only import CERTIFICATE, KEY, Firewall
from waiting import until

LAUNCH = "launch smoke --port 0 --bind 127.0.0.1 --advertise 127.0.0.1:1 --peers 1 --json -o out"
SMALL = "data.max_length=32 data.val_set_size=4 global_batch_size=8 max_steps=5000"
PATIENCE = 180.0  # seconds for anything to happen on a busy machine

pytestmark = pytest.mark.slow


@needs_fork
def test_through_a_relay_one_peer_is_killed_one_leaves_and_the_rest_die_with_their_launcher(
    forked: Forked, tmp_path: Path
) -> None:
    """From where only TLS gets out, as host and as volunteer."""
    tls = ["--tls-cert", str(CERTIFICATE), "--tls-key", str(KEY)]
    relay = forked.start(tmp_path / "relay", "relay", "--bind", "127.0.0.1", "--port", "0", *tls, "--json")
    port = int(next(relay.follow())["address"].rpartition(":")[2])
    with closing(Firewall(port)) as firewall:
        reach = ["--relay", f"127.0.0.1:{firewall.port}"]
        peers_come_and_go(forked, tmp_path, [*LAUNCH.split(), *reach, *SMALL.split()])
    relay.send(signal.SIGTERM)

    assert relay.wait() == 0
    assert max(told["runs"] for told in relay.told) == 1


def peers_come_and_go(forked: Forked, tmp_path: Path, command: list[str]) -> None:
    launch = forked.start(tmp_path / "launch", *command, forks=True)
    url = launch.next("run_started")["url"]
    killed, volunteer = (forked.join(tmp_path / name, url) for name in ("killed", "volunteer"))
    launch.next("step", peers=3)
    killed.send(signal.SIGKILL)
    assert launch.next("peer_left")["peer"] == "killed"
    volunteer.send(signal.SIGINT)
    assert volunteer.wait() == 0
    assert (volunteer.told[-1]["event"], volunteer.told[-1]["finished"]) == ("left", False)
    way = "reached the hub through the relay"
    (state,) = [event["state"] for event in volunteer.told if str(event.get("state")).startswith(way)]
    assert state.endswith(" by TLS")
    assert launch.next("peer_left", peer="volunteer")["reason"].startswith("left")
    launch.next("step", peers=1)

    launch.send(signal.SIGKILL)
    until(lambda: not alive(int((launch.folder / "out" / "peers" / "local-1.pid").read_text())), PATIENCE)


def alive(pid: int) -> bool:
    """Tell whether the process runs; an orphan may stay as a zombie where no init collects it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
