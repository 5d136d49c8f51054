"""Hostile members beside a real hub, over sockets: each was admitted, and none costs the run's rounds or its
memory. scripts/fault_injection/strangers.py measures all kinds of them beside a whole run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest
import toy_hub
from toy_swarm import ToyPeer, toy_fingerprint, toy_settings

from transport import PeerLink, RunKeys
from transport.peer import PeerIdentity
from transport.protocol import messages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="the addresses 127.0.0.2 and on"),
]
ROOT = Path(__file__).parents[3]
MEMBERS, ORIGINS = 48, 6
COMING_S, WATCHED_S = 1.5, 3.0
COMPUTE_S = 0.05  # of a round
KEEPS = 0.6  # of the pace beside idle members; the script promises 0.8 over a longer time
MORE = 200 << 20


@dataclass
class TrainingRun:
    """A hub in a process of its own, whose two honest peers train."""

    hub: psutil.Process
    url: str
    peers: list[ToyPeer]
    events: Path
    idle: float = 0.0  # the pace beside idle members, as last measured
    memory: int = 0  # bytes of the hub then, before any other kind was there

    def pace(self, seconds: float) -> tuple[float, int]:
        """Return rounds a second, and the most bytes that the hub had."""
        before, began, most = len(self.peers[0].rounds), time.monotonic(), 0
        while time.monotonic() < began + seconds:
            most = max(most, int(self.hub.memory_info().rss))
            assert self.peers[0].error is None
            time.sleep(0.05)
        return (len(self.peers[0].rounds) - before) / (time.monotonic() - began), most

    def beside(self, kind: str, source: int) -> tuple[float, int, dict[str, int]]:
        """Measure the same while members of a kind are there; also what these did."""
        sources = [f"127.{source}.0.{n + 1}" for n in range(ORIGINS)]
        asked = {"url": self.url, "members": MEMBERS, "seconds": COMING_S + WATCHED_S, "sources": sources}
        command = [sys.executable, "-m", "scripts.fault_injection.hostile_members", kind]
        command.append(json.dumps(asked | {"events": str(self.events)}))
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as attacker:
            time.sleep(COMING_S)
            pace, most = self.pace(WATCHED_S)
            said, _ = attacker.communicate(timeout=600)
        return pace, most, json.loads(said)

    def beside_idle(self, source: int) -> None:
        self.idle, most, there = self.beside("idle", source)
        self.memory = self.memory or most
        assert there["admitted"] >= MEMBERS / 2, there


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    folder, keys = tmp_path_factory.mktemp("hostile"), RunKeys.generate()
    command = [
        sys.executable,
        toy_hub.__file__,
        str(folder / "run"),
        "0",
        json.dumps(asdict(keys)),
        str(10**6),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as hub:
        assert hub.stdout is not None
        url = keys.url("127.0.0.1", int(hub.stdout.readline()), toy_settings().run)
        peers = [ToyPeer(PeerLink(url, PeerIdentity(name))) for name in ("ann", "bob")]
        events = folder / "events.jsonl"

        def tell(opened: messages.Round) -> None:
            """Compute, and publish x' of the round, as anybody's honest peer could."""
            time.sleep(COMPUTE_S)
            of = f"{toy_fingerprint(peers[0].packets):016x}"
            with events.open("a") as file:
                file.write(json.dumps({"event": "step", "round": opened.round, "fingerprint": of}) + "\n")

        peers[0].before_exchange = tell
        threads = [peer.start() for peer in peers]
        run = TrainingRun(psutil.Process(hub.pid), str(url), peers, events)
        end = time.monotonic() + 60.0
        while len(peers[0].rounds) < 20:
            assert time.monotonic() < end, [peer.error for peer in peers]
            time.sleep(0.05)
        yield run
        hub.kill()
        for peer in peers:
            peer.link.close()
        for thread in threads:
            thread.join(120)


@pytest.mark.parametrize(
    ("kind", "does"), [("begin-updates", "Put"), ("ask-for-names", "Get"), ("lie-in-reports", "Report")]
)
def test_honest_rounds_keep_their_pace_and_the_hub_its_memory(
    training: TrainingRun, kind: str, does: str
) -> None:
    source = 10 + 2 * sum(map(ord, kind)) % 200
    if not training.idle:
        training.beside_idle(source + 1)
    pace, most, did = training.beside(kind, source)
    if pace < KEEPS * training.idle:  # the machine may have less time now than it had then
        training.beside_idle(source + 1)

    assert did["admitted"] >= MEMBERS / 2, did
    assert did[does] > 0, did
    assert pace >= KEEPS * training.idle, (pace, training.idle, did)
    assert most - training.memory < MORE
