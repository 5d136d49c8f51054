"""Machines of a ring send their own shards: a real hub and real links over in-process queues."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from memory_swarm import MemorySwarm
from msgspec import structs
from test_ring_table import Units
from toy_swarm import PLENTY, ToyPeer, ToyWork, toy_settings, trained

from transport.peer import LinkLimits, PeerIdentity, PeerLink, peer_link
from transport.protocol import RoundCommitted, TransportError, messages, round_and_shards, shard_ranges
from transport.wire import MemoryPeerWire

SETTINGS = replace(toy_settings(), division=Units(), samples=16, shards=4, linger_s=0.5, start_timeout=60.0)
SHARDS = [2, 3]  # of the machine behind the head


class LentMachine:
    """The machine behind a head: sends what it is given, and fetches its shards of the aggregate."""

    def __init__(self, link: PeerLink) -> None:
        self.link = link
        self.fetched: dict[int, bytes] = {}

    def exchange(self, round: int, part: bytes) -> None:
        with suppress(TransportError):  # the run has ended
            self.link.deliver(round, part)
            self.fetched[round] = self.link.fetch(f"packet/{round}/{shard_ranges(SHARDS)}", PLENTY)


class Head(ToyPeer):
    """A replica whose second machine has every other sample of its updates."""

    other: LentMachine
    late = 0.0  # seconds after the head's update that the part is sent
    lies = False  # its part is no packet

    def exchange(self, opened: messages.Round, packet: bytes, report: messages.Report) -> messages.Committed:
        ids = json.loads(packet)
        own, part = (json.dumps(some).encode() for some in (ids[::2], ids[1::2]))
        part = b"no packet" if self.lies else part
        report = structs.replace(report, stages=[hashlib.sha256(part).hexdigest()])
        sends = threading.Timer(self.late, self.other.exchange, (opened.round, part))
        sends.start()
        committed = self.link.exchange(opened.round, own, report)
        sends.join(5.0)
        return committed


def link_of(swarm: MemorySwarm, name: str, key: str, **identity: object) -> PeerLink:
    wire = MemoryPeerWire(swarm.wire, f"key-of-{key}")
    who = PeerIdentity(name, **identity)  # type: ignore[arg-type]
    link = PeerLink(swarm.url, who, LinkLimits(flows=1), wire=wire)
    swarm.links.append(link)
    return link


def lend(swarm: MemorySwarm, name: str, memory: int) -> PeerLink:
    """Lend a machine, which is prepared; return its link."""
    swarm.wire.servers[f"{name}:1"] = swarm.wire
    link = link_of(swarm, name, name, lends=memory, reachable=f"{name}:1")
    link.connect(5.0)
    link.probed(messages.Probed({}))
    return link


def ring_of_two(swarm: MemorySwarm) -> Head:
    """Form the ring of two machines; return the replica that they are."""
    links = {name: lend(swarm, name, memory) for name, memory in (("ann", 6), ("bob", 3))}
    places = dict[str, messages.Placed]()
    while len(places) < 2:
        for name, link in links.items():
            place = link.next_place(places.get(name), 0.1)
            if place is not None and place.ring:
                places[name] = place
    [head] = [name for name, place in places.items() if place.number == 0]
    [other] = links.keys() - {head}
    assert all(place.exchanges for place in places.values())
    peer = Head(link_of(swarm, f"{head}-ring", head))
    peer.other = LentMachine(links[other])
    return peer


def committed(swarm: MemorySwarm) -> list[RoundCommitted]:
    return [event for event in list(swarm.events) if isinstance(event, RoundCommitted)]


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_an_update_counts_once_all_its_parts_are_here(tmp_path: Path, late: float) -> None:
    """Whichever comes last, the head's or the part: all samples are in x', each once. What the other machine
    has moved is counted as the replica's."""
    work = ToyWork()
    with MemorySwarm(SETTINGS, work, tmp_path) as swarm:
        head = ring_of_two(swarm)
        head.late = late
        thread = head.start()
        thread.join(10.0)
        swarm.wait()
    assert head.error is None
    assert trained(work) == list(range(16))
    selected = {round: packet + repr(SHARDS).encode() for round, packet in enumerate(work.packets)}
    assert head.other.fetched == selected
    for event in committed(swarm):
        assert set(event.up) == {head.link.name, head.link.name.removesuffix("-ring")}


def test_a_part_that_the_hub_does_not_want_yet_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may come before its round is open: as after a restart of the hub, before the head is back."""
    monkeypatch.setattr(peer_link, "AGAIN_S", 0.05)
    work = ToyWork()
    with MemorySwarm(SETTINGS, work, tmp_path) as swarm:
        head = ring_of_two(swarm)
        early = threading.Thread(target=head.other.exchange, args=(0, b"[]"))
        early.start()
        early.join(0.2)
        assert early.is_alive()
        head.late = 0.05
        head.start().join(10.0)
        swarm.wait()
    assert head.error is None
    assert trained(work) == list(range(16))


def test_parts_that_are_no_update_are_a_strike_and_the_round_goes_on(tmp_path: Path) -> None:
    settings = replace(SETTINGS, samples=8, min_peers=2, first_peers=2)
    with MemorySwarm(settings, ToyWork(), tmp_path) as swarm:
        head, whole = ring_of_two(swarm), ToyPeer(swarm.link("dan"))
        head.lies = True
        for peer in (head, whole):
            peer.start()
        while not (found := committed(swarm)):
            threading.Event().wait(0.01)
        assert found[0].accepted == ("dan",)
        swarm.hub.stop(now=True)


def test_a_part_of_a_machine_in_no_ring_or_of_no_open_round_is_refused(tmp_path: Path) -> None:
    with MemorySwarm(SETTINGS, ToyWork(), tmp_path) as swarm:
        alone = lend(swarm, "cid", 2)
        assert alone.put("stage/0", b"[]") is False
        assert alone.put("update/0", b"[]") is False
        assert ring_of_two(swarm).other.link.put("stage/7", b"[]") is False


def test_ranges_of_shards_are_read_as_they_were_written() -> None:
    for shards in ([0], [0, 1, 2], [0, 2], [0, 1, 2, 40, 41], [*range(0, 40, 2), 1023]):
        assert round_and_shards(f"packet/7/{shard_ranges(shards)}", 1024) == (7, tuple(shards))
    for wrong in ("", "/", "/3", "/3-3", "/3-1025", "/-1-3", "/0-1,"):
        assert round_and_shards(f"packet/7{wrong}", 1024) is None
