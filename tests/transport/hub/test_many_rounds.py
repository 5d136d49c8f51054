"""A hub over many rounds: its delegate sees packets on arrival, and memory stays bounded."""

import gc
import hashlib
import threading
import tracemalloc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from memory_sockets import MemoryPeerWire
from toy_swarm import ToyPeer, ToyWork, toy_settings, trained

from transport.protocol import decode_to_peer, encode, messages
from transport.wire import Received

SAME = 7  # fingerprint of every x'


class Forgetful(ToyWork):
    """A delegate that stores nothing."""

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Ignore the call."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        return bytes(updates[0][1])

    def committed(self, round: int, packet: bytes) -> None:
        """Ignore the call."""


class Bare:
    """Peer that sends the messages of a round and stores nothing."""

    def __init__(self, swarm: HubSwarm, name: str) -> None:
        self.wire = MemoryPeerWire(swarm.wire, f"key-of-{name}")
        self.came: list[messages.Message] = []
        for flow in (0, 1):
            self.wire.dial(flow)
        self.say(0, messages.Hello(messages.PROTOCOL, swarm.keys.token, swarm.settings.run, name))
        welcome = self.until(messages.Welcome)
        self.say(1, messages.Attach(welcome.session))  # type: ignore[attr-defined]
        self.until(messages.Attached)
        self.say(0, messages.Ready(0, SAME))

    def say(self, flow: int, message: messages.Message, *payload: bytes) -> None:
        assert self.wire.send(flow, [encode(message), *payload])

    def until(self, kind: type[messages.Message]) -> messages.Message:
        """The next message of this kind; those that came before it stay."""
        while not (found := [m for m in self.came if isinstance(m, kind)]):
            events = self.wire.poll(60.0)
            assert events, f"waited for {kind.__name__}"
            self.came += [decode_to_peer(e.frames[0]) for e in events if isinstance(e, Received)]
        self.came.remove(found[0])
        return found[0]

    def upload(self) -> None:
        round = self.until(messages.Round).round  # type: ignore[attr-defined]
        self.came = [m for m in self.came if isinstance(m, messages.Round | messages.Committed)]
        name, packet = f"update/{round}", b"%6d" % round * 500
        self.say(1, messages.Put(name, len(packet), hashlib.sha256(packet).digest(), 1024))
        for i in range(3):
            self.say(1, messages.Chunk(name, i), packet[i * 1024 : (i + 1) * 1024])
        self.say(1, messages.Get(f"lease/{round}", 0, 1024))
        self.say(0, messages.Report(round, SAME, [round], 1.0, 10))
        assert self.until(messages.PutDone).ok  # type: ignore[attr-defined]

    def fetch(self) -> None:
        self.say(1, messages.Get(f"packet/{self.until(messages.Committed).round}", 0, 1024))  # type: ignore[attr-defined]
        self.until(messages.Data)


@contextmanager
def swarm_that_forgets(folder: Path) -> Iterator[list[Bare]]:
    """Run a hub whose events are dropped, and two peers."""
    with HubSwarm(toy_settings(samples=10**6, min_peers=2), Forgetful(), folder) as swarm:
        swarm.events = deque(maxlen=1)  # type: ignore[assignment]
        yield [Bare(swarm, name) for name in ("ann", "bob")]


def test_the_memory_of_a_hub_does_not_grow_with_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub's memory is full soon, and grows no more.
    monkeypatch.setattr("transport.transfer.object_store.KEPT", 4)
    monkeypatch.setattr("transport.transfer.object_store.CACHED_CHUNKS", 4)
    monkeypatch.setattr("transport.scheduling.exchange.KEPT", 4)
    held = []
    with swarm_that_forgets(tmp_path) as peers:
        tracemalloc.start()
        for _ in range(3):
            for _ in range(50):
                for peer in peers:
                    peer.upload()
                for peer in peers:
                    peer.fetch()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()

    grown = [after - before for before, after in pairwise(held)]  # what comes once is in one of them alone
    assert min(grown) < 50 * 300, f"bytes held after 50, 100, 150 rounds: {held}"


def test_the_delegate_sees_packets_while_others_are_still_in_transit(tmp_path: Path) -> None:
    """And gets the same objects at the close."""
    first_is_seen, given = threading.Event(), list[bytes]()

    class Watching(ToyWork):
        def arrived(self, round: int, peer: str, packet: bytes) -> None:
            super().arrived(round, peer, packet)
            first_is_seen.set()

        def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
            given.extend(packet for _, packet, _ in updates)
            return super().aggregate(round, updates)

    work = Watching()
    with HubSwarm(toy_settings(samples=16, min_peers=2, first_peers=2), work, tmp_path) as swarm:
        ann, bob = (ToyPeer(swarm.link(name), 0) for name in ("ann", "bob"))
        bob.before_exchange = lambda _: first_is_seen.wait(120) or pytest.fail("the round is open")
        swarm.train(ann, bob)

    assert trained(work) == list(range(16))
    assert {id(packet) for _, _, packet in work.came} >= {id(packet) for packet in given}


def test_an_error_while_packets_are_decoded_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    class Broken(ToyWork):
        def arrived(self, round: int, peer: str, packet: bytes) -> None:
            raise MemoryError

    with HubSwarm(toy_settings(), Broken(), tmp_path) as swarm:
        swarm.train(ToyPeer(swarm.link("ann")))

    assert (swarm.events[-1].exit_code, swarm.events[-1].reason) == (8, "the hub's memory is full")  # type: ignore[attr-defined]
