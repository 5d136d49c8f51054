"""Stages send each other messages over real sockets, and notice a neighbour that is gone."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue

import pytest

from cocktail_cli.extensions.stages.lines import (
    LineLost,
    Neighbour,
    StageLink,
    StageMessage,
)
from scripts.swarms.tcp_link import Link
from transport.protocol import CurveKeys, LinkLost, Unreachable
from transport.wire import RouterWire

LIMIT = 1 << 20
KEYS = [CurveKeys.generate() for _ in range(4)]
WAIT = 10.0


class Ring:
    """Stage links on the loopback; each is dialled through a proxy."""

    def __init__(self) -> None:
        self.links: dict[int, StageLink] = {}
        self.proxies: dict[int, Link] = {}

    def start(self, number: int, gone_s: float = 20.0) -> StageLink:
        wire = RouterWire("127.0.0.1", 0, KEYS[number], 1, allowed=lambda key: self.links[number].knows(key))
        self.links[number] = StageLink(wire, KEYS[number], LIMIT, gone_s)
        proxy = self.proxies.setdefault(number, Link())
        proxy.behind = wire.port
        return self.links[number]

    def connect(self, size: int, *numbers: int, hidden: int = -1) -> None:
        """Connect these of a ring of `size`; nobody can dial the hidden one."""
        for number in numbers or range(size):
            before, after = (self.named((number + step) % size, hidden) for step in (-1, 1))
            self.links[number].connect(before, after, self.named(number, hidden).address)

    def named(self, number: int, hidden: int) -> Neighbour:
        address = "" if number == hidden else f"127.0.0.1:{self.proxies[number].port}"
        return Neighbour(f"s{number}", KEYS[number].public, address)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for proxy in self.proxies.values():
            proxy.close()


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    ring.close()


def activations(number: int, size: int = 300_000) -> StageMessage:
    return StageMessage(1, "activations", number, bytes([number]) * size)


Came = StageMessage | LineLost


def received(link: StageLink, wanted: Callable[[Came], bool]) -> Came:
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        came = link.receive(0.1)
        if came is not None and wanted(came):
            return came
    raise AssertionError("it did not come")


def message(link: StageLink) -> StageMessage:
    found = received(link, lambda came: isinstance(came, StageMessage))
    assert isinstance(found, StageMessage)
    return found


@pytest.mark.parametrize(("size", "hidden"), [(2, -1), (3, -1), (3, 1)])
def test_activations_go_around_and_gradients_back(ring: Ring, size: int, hidden: int) -> None:
    """In rings of two and three; one of three cannot be dialled, so it dials both of its neighbours."""
    for number in range(size):
        ring.start(number)
    ring.connect(size, hidden=hidden)
    for number in range(size):
        ring.links[number].send(activations(number))
        ring.links[number].send(StageMessage(1, "gradients", number, b"g"))
    for number, link in ring.links.items():
        before, after = (number - 1) % size, (number + 1) % size
        found = sorted((message(link) for _ in range(2)), key=lambda one: one.kind)
        assert found == [activations(before), StageMessage(1, "gradients", after, b"g")]


def test_connections_that_are_cut_lose_and_double_nothing(ring: Ring) -> None:
    """Twenty messages, and cuts among them."""
    for number in range(2):
        ring.start(number)
    ring.connect(2)
    found = []
    for number in range(20):
        ring.links[0].send(activations(number))
        if number % 5 == 4:
            found.append(message(ring.links[1]))
            ring.proxies[1].cut()
    found += [message(ring.links[1]) for _ in range(16)]
    assert found == [activations(number) for number in range(20)]


def test_a_neighbour_that_ends_is_gone_and_one_in_its_place_is_new(ring: Ring) -> None:
    """Both ends of its lines hear of it: what was for the old one is not delivered to the new one."""
    for number in range(2):
        ring.start(number, gone_s=0.4)
    dialled = SimpleQueue[str]()
    ring.links[0].dialled = lambda neighbour, why: dialled.put(neighbour.name)
    ring.connect(2)
    for number in range(2):
        ring.links[number].send(activations(number))
        message(ring.links[1 - number])
    while not dialled.empty():
        dialled.get()
    ring.links[1].close()
    assert dialled.get(timeout=WAIT) == "s1"
    ring.links[0].send(activations(1))
    for _ in range(2):
        gone = received(ring.links[0], lambda came: isinstance(came, LineLost))
        assert gone == LineLost("s1 has been silent for 0 s")
    ring.start(1)
    ring.connect(2, 1)
    for _ in range(2):
        received(ring.links[0], lambda came: came == LineLost("s1 begins anew"))
    ring.links[0].send(activations(2))
    assert message(ring.links[1]) == activations(2)


def test_another_peer_takes_the_place_of_a_neighbour(ring: Ring) -> None:
    """Stage 1 of two becomes another peer with another key; the first peer's messages come no more."""
    for number in range(3):
        ring.start(number)
    ring.connect(2)
    ring.links[0].send(activations(0))
    message(ring.links[1])
    first, other = ring.named(0, -1), ring.named(2, -1)
    ring.links[0].connect(other, other, first.address)
    ring.links[2].connect(first, first, other.address)
    ring.links[1].send(StageMessage(1, "gradients", 0, b"late"))
    ring.links[2].send(StageMessage(2, "gradients", 1, b"of the other"))
    ring.links[0].send(activations(1))
    assert message(ring.links[0]) == StageMessage(2, "gradients", 1, b"of the other")
    assert message(ring.links[2]) == activations(1)


def test_what_is_sent_before_there_is_a_neighbour_is_lost_and_the_sender_is_told(ring: Ring) -> None:
    """A head sends so if its ring loses a machine to which it was not connected yet."""
    for number in range(2):
        ring.start(number)
    ring.links[0].send(activations(0))
    ring.connect(2)

    assert received(ring.links[0], lambda came: True) == LineLost("s1 begins anew")
    ring.links[0].send(activations(1))
    assert message(ring.links[1]) == activations(1)


def test_who_dials_a_machine_with_another_key_than_it_expects_is_told(ring: Ring) -> None:
    for number in range(2):
        ring.start(number)
    met = SimpleQueue[Unreachable | None]()
    ring.links[0].dialled = lambda neighbour, why: met.put(why)
    ring.connect(2, 1)
    wrong = replace(ring.named(1, -1), key=KEYS[2].public)
    ring.links[0].connect(wrong, wrong, ring.named(0, -1).address)

    why = met.get(timeout=WAIT)
    assert why is not None
    assert why.layer == "key"


def test_a_line_that_neither_end_can_dial_is_refused(ring: Ring) -> None:
    ring.start(0)
    hidden = Neighbour("far", KEYS[1].public)
    with pytest.raises(LinkLost, match="neither this stage nor far can be dialled"):
        ring.links[0].connect(hidden, hidden, "")
