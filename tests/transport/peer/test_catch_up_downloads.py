"""A joiner against a real hub: the line is never idle, nobody waits, what vanishes is got otherwise."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from toy_swarm import ToyPeer, ToyWork, toy_fingerprint, toy_settings, toy_spool
from waiting import until

from transport import Bandwidth, CatchUp, CatchUpDownloads, Ledger, PeerLink, WantedFile
from transport.ledger import RoundRow, pack_header
from transport.peer import CatchUpSource, LinkLimits, Progress
from transport.protocol import Leaving, NotServed, RefusedByHub, RoundCommitted, messages
from transport.protocol import events as told
from transport.transfer import CHUNK, HASH_BLOCK, block_hashes

SIZE = 2 * HASH_BLOCK + 999  # of a snapshot
WEIGHTS = random.Random(1).randbytes(SIZE)
MANY = 100_000  # samples of a run that does not end
LONG = toy_settings(linger_s=0.1, samples=MANY, max_update=1 << 20)
RATE = 2e6  # bytes a second: 16 Mbit/s


def grow(folder: Path, rounds: int, size: int, samples: int = 40) -> list[bytes]:
    """A ledger of so many committed rounds; their packets."""
    dice = random.Random(2)
    packets = [json.dumps(["x" * (size - 4 + dice.randrange(3))]).encode() for _ in range(rounds)]
    with Ledger(folder, run="toy-run", samples=samples) as ledger:
        ledger._db.execute("PRAGMA synchronous=OFF")  # nobody is told of these rounds
        for round, packet in enumerate(packets):
            row = RoundRow(round, 0, 0.0, 0.0, toy_fingerprint(packets[:1]), (), (), None, 0)
            ledger.commit(row, packet, ())
    return packets


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def snapshot(folder: Path, work: ToyWork, round: int, log_bytes: int) -> messages.SnapshotOffer:
    """A snapshot of `round` that the hub can serve."""
    file = folder / f"snapshot-{round}"
    file.write_bytes(WEIGHTS)
    name, hashes = f"snapshot/{round}/model.safetensors", block_hashes(file)
    work.objects |= {name: file, f"hashes/{name}": hashes}
    return messages.SnapshotOffer(round, SIZE, hashlib.sha256(hashes).hexdigest(), log_bytes)


def wanted(offer: messages.SnapshotOffer, folder: Path) -> list[WantedFile]:
    return [
        WantedFile(f"snapshot/{offer.round}/model.safetensors", folder / "w", offer.size, hashes=offer.sha256)
    ]


@dataclass
class Joiner:
    """A joining peer without a model."""

    link: PeerLink
    folder: Path
    base: int = 10**9
    told: list[Progress] = field(default_factory=list)
    packets: dict[int, bytes] = field(default_factory=dict)
    came: int = 0

    def catch_up(self) -> CatchUp:
        machine = CatchUp(self.link.welcome, self.base)
        supply = CatchUpDownloads(self.link, machine, toy_spool(self.folder), self.told.append)
        while machine.plan.offer is not None:
            try:
                supply.files(wanted(machine.plan.offer, self.folder))
                break
            except NotServed:
                assert machine.gone(supply.ask_anew)
        machine.weights_here()
        self.packets = dict(supply.packets())
        supply.close()
        self.received = supply.received
        return machine


def grown(folder: Path, rounds: int, size: int) -> tuple[HubSwarm, ToyWork]:
    packets = grow(folder / "run", rounds, size)
    work = ToyWork(packets=packets)
    return HubSwarm(toy_settings(linger_s=0.1), work, folder / "run"), work


def test_thousands_of_packets_come_in_few_objects_and_in_order(tmp_path: Path) -> None:
    swarm, work = grown(tmp_path, 3000, 300)
    with swarm:
        link = swarm.link("ann")
        link.connect(30.0)
        joiner = Joiner(link, tmp_path, base=0)
        machine = joiner.catch_up()
        link.ready(machine.applied, toy_fingerprint([]))

    assert [*joiner.packets.items()] == [*enumerate(work.packets)]
    assert joiner.told[-1].done == joiner.told[-1].total == link.welcome.log_bytes
    assert machine.plan.way is CatchUpSource.BASE


def test_a_snapshot_that_vanishes_while_it_is_fetched_is_replaced_by_the_newer_one(tmp_path: Path) -> None:
    swarm, work = grown(tmp_path, 40, 1000)
    first, second = (snapshot(tmp_path, work, round, round * 1056) for round in (20, 30))
    with swarm:
        swarm.hub.offer([first])
        link = swarm.link("ann")
        link.connect(30.0)
        swarm.hub.offer([second])
        joiner = Joiner(link, tmp_path)
        machine = joiner.catch_up()

    assert machine.plan.offer == second
    assert sorted(joiner.packets) == list(range(30, 40))
    assert (tmp_path / "w").read_bytes() == WEIGHTS
    assert SIZE <= joiner.received < SIZE + CHUNK


def test_a_snapshot_whose_file_rots_on_the_hub_is_given_up_for_the_base(tmp_path: Path) -> None:
    swarm, work = grown(tmp_path, 40, 1000)
    offer = snapshot(tmp_path, work, 20, 20 * 1056)
    (tmp_path / "snapshot-20").write_bytes(WEIGHTS[:-1] + b"?")
    with swarm:
        swarm.hub.offer([offer])
        link = swarm.link("ann")
        link.connect(30.0)
        joiner = Joiner(link, tmp_path)
        machine = joiner.catch_up()

    assert (machine.plan.way, machine.plans) == (CatchUpSource.BASE, 2)
    assert sorted(joiner.packets) == list(range(40))


def test_only_the_newest_two_snapshots_are_offered_and_served(tmp_path: Path) -> None:
    swarm, work = grown(tmp_path, 40, 1000)
    offers = [snapshot(tmp_path, work, round, 0) for round in (10, 20, 30)]
    with swarm:
        swarm.hub.offer(offers)
        link = swarm.link("ann")
        welcome = link.connect(30.0)
        with pytest.raises(KeyError, match="not offered any more"):
            link.fetch("snapshot/10/model.safetensors", SIZE)
        served = link.fetch("snapshot/30/model.safetensors", SIZE)

    assert welcome.snapshots == offers[1:]
    assert welcome.log_bytes == sum(len(packet) + 56 for packet in work.packets)
    assert served == WEIGHTS


def test_a_connection_that_is_lost_while_files_and_packets_come_costs_nothing_twice(tmp_path: Path) -> None:
    swarm, work = grown(tmp_path, 60, 20_000)
    offer = snapshot(tmp_path, work, 20, 20 * 20_056)
    with swarm:
        swarm.hub.offer([offer])
        link = swarm.link("ann", LinkLimits(patience=10.0, flows=2))
        link.connect(30.0)
        cuts = iter([0, 1, 2, 1])

        def cut(progress: Progress) -> None:
            swarm.wires[link].cut(next(cuts, 0))

        machine = CatchUp(link.welcome, 10**9)
        supply = CatchUpDownloads(link, machine, toy_spool(tmp_path), cut)
        supply.files(wanted(offer, tmp_path))
        machine.weights_here()
        packets = dict(supply.packets())

    assert packets == dict(enumerate(work.packets[20:], 20))
    assert SIZE <= supply.received < 2 * SIZE


def test_of_a_damaged_snapshot_on_the_disk_only_the_wrong_mib_comes_over_the_line(tmp_path: Path) -> None:
    swarm, work = grown(tmp_path, 2, 100)
    offer = snapshot(tmp_path, work, 1, 156)
    (tmp_path / "w").write_bytes(WEIGHTS[:HASH_BLOCK] + b"!" + WEIGHTS[HASH_BLOCK + 1 :])
    with swarm:
        swarm.hub.offer([offer])
        link = swarm.link("ann")
        link.connect(30.0)
        before = link.bytes_down
        supply = CatchUpDownloads(link, CatchUp(link.welcome, 0), toy_spool(tmp_path))
        supply.files(wanted(offer, tmp_path))
        down = link.bytes_down - before

    assert (tmp_path / "w").read_bytes() == WEIGHTS
    # part of a chunk may come twice while fragments are fitted
    assert HASH_BLOCK <= supply.received < HASH_BLOCK + CHUNK
    assert down < 1.02 * (HASH_BLOCK + CHUNK)


FETCHER = """
import sys
from pathlib import Path
from transport import Bandwidth, CatchUp, CatchUpDownloads, PeerLink, WantedFile, parse_url
from transport.peer import LinkLimits, PeerIdentity
from transport.transfer import FreeDisk, Spool
url, to, size, sha256 = sys.argv[1:]
link = PeerLink(parse_url(url), PeerIdentity("ann"), LinkLimits(bandwidth=Bandwidth(down=1e6)))
link.connect(30.0)
name = "snapshot/1/model.safetensors"
spool, machine = Spool(Path(to).parent, FreeDisk(Path(to).parent)), CatchUp(link.welcome, 0)
supply = CatchUpDownloads(link, machine, spool, lambda progress: print(progress.done, flush=True))
supply.files([WantedFile(name, Path(to), int(size), hashes=sha256)])
"""


@pytest.mark.slow
def test_a_download_goes_on_where_a_peer_was_killed(tmp_path: Path) -> None:
    packets = grow(tmp_path / "run", 2, 100, MANY)
    work = ToyWork(packets=packets)
    offer = snapshot(tmp_path, work, 1, 156)
    with HubSwarm(LONG, work, tmp_path / "run", 0) as swarm:
        swarm.hub.offer([offer])
        arguments = [str(swarm.url), str(tmp_path / "w"), str(SIZE), offer.sha256]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        child = subprocess.Popen(
            [sys.executable, "-c", FETCHER, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) > 1.3 * HASH_BLOCK:
                break
        child.kill()  # -9 where there are signals
        child.wait(120)
        child.stdout.close()
        link = swarm.link("bob")
        link.connect(30.0)
        supply = CatchUpDownloads(link, CatchUp(link.welcome, 0), toy_spool(tmp_path))
        supply.files(wanted(offer, tmp_path))
        link.close()

    assert (tmp_path / "w").read_bytes() == WEIGHTS
    assert supply.received < SIZE - HASH_BLOCK + CHUNK


def test_asked_to_leave_a_joiner_leaves_in_the_middle(tmp_path: Path) -> None:
    swarm, _ = grown(tmp_path, 500, 1000)
    with swarm:
        link = swarm.link("ann")
        link.connect(30.0)
        machine = CatchUp(link.welcome, 0)
        machine.weights_here()
        packets = CatchUpDownloads(link, machine, toy_spool(tmp_path)).packets()
        next(packets)
        link.leave_requested.set()
        with pytest.raises(Leaving):
            list(packets)


@pytest.mark.parametrize(
    ("holds", "told"),
    [
        ({"base": "12ab"}, "base weights: you have 12ab, the run has 34cd"),
        ({"tokenizer": "0"}, "tokenizer: you have 0, the run has 56ef"),
        ({"base": "1", "tokenizer": "2"}, "base weights: .*; tokenizer: "),
        ({"recipe": "x", "base": "34cd"}, "recipe: you have x"),
    ],
)
def test_what_a_peer_was_made_from_is_compared_and_the_difference_told(
    tmp_path: Path, holds: dict[str, str], told: str
) -> None:
    ours = {"base": "34cd", "tokenizer": "56ef", "recipe": "78"}
    with HubSwarm(toy_settings(holds=ours, linger_s=0.1), ToyWork(), tmp_path) as swarm:
        good, bad = swarm.link("ann"), swarm.link("bob")
        good.connect(30.0)
        bad.connect(30.0)
        good.ready(0, toy_fingerprint([]), {"tokenizer": "56ef"})
        assert good.next_round().round == 0  # type: ignore[union-attr]
        bad.ready(0, toy_fingerprint([]), holds)
        with pytest.raises(RefusedByHub, match=told) as refused:
            bad.next_round()

    assert refused.value.code == "state"


# ---- time to join ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.alone  # a second counts here
def test_a_joiner_is_there_when_its_bytes_are_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Time to join <= 1.15 x bytes / bandwidth + 2 s, while another peer trains on."""
    packets = grow(tmp_path / "run", 1500, 900, MANY)
    work = ToyWork(packets=list(packets))
    log = sum(len(packet) + 56 for packet in packets)
    offer = snapshot(tmp_path, work, 500, log // 3)
    with HubSwarm(LONG, work, tmp_path / "run", 0) as swarm:
        swarm.hub.offer([offer])
        events, other = swarm.events, ToyPeer(swarm.link("bob"), packets=list(packets))
        other.before_exchange = lambda _: time.sleep(0.1)  # its compute: x' need not move a thousand times
        thread = other.start()
        link = swarm.link("ann", LinkLimits(bandwidth=Bandwidth(down=RATE)))
        started = time.monotonic()
        rounds = sum(isinstance(e, RoundCommitted) for e in events)
        link.connect(30.0)
        joiner = Joiner(link, tmp_path)
        machine = joiner.catch_up()
        link.ready(machine.applied, toy_fingerprint(work.packets[: machine.applied]))
        until(lambda: any(isinstance(e, told.PeerReady) and e.peer == "ann" for e in events), 60)
        took, down = time.monotonic() - started, link.bytes_down
        opened = [e for e in events if isinstance(e, RoundCommitted)]
        assert link.next_round().round >= machine.applied  # type: ignore[union-attr]
        link.close()
        other.link.leave_requested.set()
        thread.join(120)

    print(f"joined with {down} bytes in {took:.2f} s: {took / (down / RATE):.2f} x bytes / bandwidth")
    assert machine.plan.way is CatchUpSource.SNAPSHOT
    assert down > SIZE + log // 2
    assert took <= 1.15 * down / RATE + 2.0
    assert len(opened) - rounds > 3, "the other trained meanwhile"


class LyingLink:
    """A hub whose packets are those of other rounds."""

    newest_round, size, received = -1, 62, 62

    def begin_spooled(self, name: str, most: int, spool: object) -> LyingLink:
        return self

    def finish_spooled(self, download: object, tick: object) -> io.BytesIO:
        return io.BytesIO(pack_header(7, b"packet") + b"packet")

    def raise_if_leaving(self) -> None:
        """Do nothing, as nobody asks this peer to leave."""


def test_packets_of_other_rounds_are_not_applied(tmp_path: Path) -> None:
    machine = CatchUp(
        messages.Welcome(messages.PROTOCOL, "run", "ann", "s", "{}", "00", [], 1, 1.0, log_bytes=62), base=0
    )
    machine.weights_here()

    with pytest.raises(NotServed, match="packets/0-1 has round 7, not 0"):
        list(CatchUpDownloads(LyingLink(), machine, toy_spool(tmp_path)).packets())  # type: ignore[arg-type]
