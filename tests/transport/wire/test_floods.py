"""Floods, from processes of their own: the hub's memory stays, honest peers go on, newcomers get in."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import attacks
import pytest
from attacks import BLOB
from hub_swarm import FAST, HubSwarm
from test_strangers import MORE, PATIENCE_S, goes_on, resident
from toy_swarm import ToyWork, toy_settings

from scripts.swarms.tcp_link import Link
from transport import PeerLink, RunURL, ask_status
from transport.peer import PeerIdentity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO, and the addresses 127.0.0.2 and on"),
]
RATE = 50e6  # bytes a second of the attacker's line


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubSwarm]:
    """A hub whose one honest peer trains for as long as it takes."""
    work = ToyWork(objects={BLOB: bytes(8 << 20)})
    settings = toy_settings(
        **FAST, samples=10**6, peer_timeout=30.0, step_timeout=60.0, start_timeout=PATIENCE_S
    )
    with HubSwarm(settings, work, tmp_path_factory.mktemp("floods"), 0).start().training(0.1) as running:
        yield running


@contextmanager
def attacked(url: RunURL, *names: str, seconds: float) -> Iterator[None]:
    """While these attacks are on, from another address than the honest peers'."""
    with ExitStack() as stack:
        for name in names:
            asked = json.dumps({"url": str(url), "seconds": seconds, "source": "127.0.0.2"})
            command = [sys.executable, attacks.__file__, name, asked]
            attacker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.callback(attacker.wait)
            stack.callback(attacker.kill)
        yield


def test_endless_messages_and_answers_that_nobody_reads_do_not_fill_the_hubs_memory(
    running: HubSwarm,
) -> None:
    line, before = Link(running.hub.port, RATE, "127.0.0.3"), resident()
    url = running.keys.url("127.0.0.1", line.port, running.settings.run)
    refused, most = ask_status(running.url)["refused"], before
    while line.up < MORE:  # the hub hangs up on them, so they come again
        until = time.monotonic() + 8.0
        with attacked(url, "frames", "dust", "unread", seconds=10.0):
            while line.up < MORE and time.monotonic() < until:
                goes_on(running, 1)
                time.sleep(0.05)
                most = max(most, resident())
    line.close()

    assert most - before < 2 * MORE, "32 MiB that nobody reads, and what malloc keeps"
    assert ask_status(running.url)["refused"] > refused + 2


def test_crowds_and_talkers_keep_no_honest_peer_out(running: HubSwarm) -> None:
    refused, before = ask_status(running.url)["refused"], resident()
    with attacked(running.url, "idle", "newcomers", "talk", seconds=60.0):
        while ask_status(running.url)["refused"] < refused + 500:
            goes_on(running, 1)
        link = PeerLink(running.url, PeerIdentity("late"))
        link.connect(PATIENCE_S)
        link.leave("seen enough")
        goes_on(running, 3)

    assert resident() - before < MORE
