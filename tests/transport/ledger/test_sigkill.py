"""kill -9 of a real hub process at random instants, with peers that live on.

COCKTAIL_KILLS=100 scripts/test tests/transport/ledger/test_sigkill.py    kills it a hundred times, in minutes
"""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from toy_swarm import ToyPeer, ToyWork, trained

from transport import Ledger, PeerLink, RunKeys
from transport.peer import LinkLimits, PeerIdentity

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("COCKTAIL_KILLS", "10"))
SEED = int(os.environ.get("COCKTAIL_SEED", "0"))


def start(folder: Path, port: int, keys: RunKeys, samples: int) -> subprocess.Popen[str]:
    command = [str(Path(__file__).parents[1] / "toy_hub.py"), str(folder), str(port)]
    return subprocess.Popen(
        [sys.executable, *command, json.dumps(asdict(keys)), str(samples)], stdout=subprocess.PIPE, text=True
    )


def test_a_hub_killed_at_random_instants_loses_nothing_and_its_peers_come_back(tmp_path: Path) -> None:
    dice, keys, announced, killed, port = random.Random(SEED), RunKeys.generate(), set[int](), 0, 0
    samples = 8 * (KILLS * 25 + 50)
    peers: list[ToyPeer] = []
    slowest = 0.0  # from the hub's start to its first round
    while True:
        hub = start(tmp_path, port, keys, samples)
        assert hub.stdout is not None
        port = int(hub.stdout.readline())
        began = time.monotonic()
        if not peers:
            url = keys.url("127.0.0.1", port, "toy-run")
            peers = [
                ToyPeer(PeerLink(url, PeerIdentity(name), LinkLimits(patience=60.0)))
                for name in ("ann", "bob", "cem")
            ]
            threads = [peer.start() for peer in peers]
        if killed == KILLS:
            break
        if dice.random() < 0.7:
            announced.add(int(hub.stdout.readline()))
            slowest = max(slowest, time.monotonic() - began)
            announced |= {int(hub.stdout.readline()) for _ in range(dice.randrange(20))}
            time.sleep(dice.random() * 0.02)
        else:  # some die in the middle of coming back
            time.sleep(dice.random() * 0.2)
        hub.kill()
        announced |= {int(line) for line in hub.stdout.read().split("\n")[:-1]}
        assert hub.wait() < 0, "it was still there to be killed"
        killed += 1
        with Ledger(tmp_path, write=False) as ledger:
            audit = ledger.verify()
            assert audit.rounds > max(announced, default=-1)
    announced |= {int(line) for line in hub.stdout.read().split()}
    assert hub.wait() == 0
    for thread in threads:
        thread.join(120)

    with Ledger(tmp_path, write=False) as ledger:
        ledger.verify(complete=True)
        packets = [packet for _, packet in ledger.packets()]
    assert trained(ToyWork(packets)) == list(range(samples)), "every sample is in x', once"
    assert announced <= set(range(len(packets)))
    for peer in peers:
        assert (peer.error, peer.over and peer.over.finished) == (None, True)
        assert peer.packets == packets, "all hold the same x'"
    assert slowest < 10.0, "peers come back by themselves within 10 s"
