"""Lent machines at a hub: the real state machines of the hub and of peers, every message as it is sent."""

from dataclasses import replace
from hashlib import sha256

from msgspec import structs
from test_ring_table import Units
from toy_swarm import toy_settings

from cocktail_cli.extensions.stages.bodies import NAME, Lends, OtherMachine, Placed, Probed, packed
from cocktail_cli.extensions.stages.hub import PROBE_S, UNREACHED, RingCoordinator, Undivided
from cocktail_cli.extensions.stages.lines import LineRates
from cocktail_cli.extensions.stages.ring_table import GAP_S
from transport.actions import Reach, Send
from transport.hub import HubState, Late
from transport.peer import PeerState, SessionState
from transport.protocol import messages, read_msgpack

TOKEN = "token"
REPLICA = "-replica"
SETTINGS = replace(toy_settings(), peer_timeout=30.0, start_timeout=1e6)


class Lent(PeerState):
    """A machine that lends memory, which says its newest place to a hub that is started anew."""

    placed: Placed | None = None

    def __init__(self, name: str, memory: int, address: str = "") -> None:
        body = {NAME: packed(Lends(memory))}
        super().__init__(
            messages.Hello(messages.PROTOCOL, TOKEN, SETTINGS.run, name, address=address, extra=body)
        )
        self.memory = memory
        self.listen({NAME: self.take})

    def take(self, body: bytes) -> None:
        self.placed = read_msgpack(body, Placed, "a place")
        self.introduce(NAME, packed(Lends(self.memory, self.placed)))


def said(seconds: dict[str, float], rates: dict[str, LineRates] | None = None) -> messages.Extension:
    return messages.Extension(NAME, packed(Probed(seconds, rates or {})))


class Machines:
    """A hub and machines that lend memory to it, all of which are reached at their address."""

    def __init__(self) -> None:
        self.now, self.peers = 0.0, dict[str, Lent]()
        self.lines: dict[frozenset[str], float] = {}  # bytes a second, by both addresses
        self.start()

    def start(self) -> None:
        """Start the hub, again without any memory of rings."""
        begin = Late(NAME, lambda hub: RingCoordinator(hub, Units()))
        self.hub = HubState(SETTINGS, TOKEN, "stop", self.now, extensions=[begin])

    def come(self, name: str, memory: int, *, answers: bool = True, address: str = "NAME:1") -> Lent:
        address = address.replace("NAME", name)
        peer = self.peers[name] = Lent(name, memory, address)
        self.dial(name)
        assert peer.placed is None, "it is not prepared yet"
        self.act(self.hub.receive(conn(name), said({}), self.now))  # type: ignore[arg-type]
        if answers:
            self.probe()
        return peer

    def dial(self, name: str) -> None:
        for message in self.peers[name].connected(self.now):
            self.act(self.hub.receive(conn(name), message, self.now))  # type: ignore[arg-type]

    def act(self, actions: list[object]) -> None:
        """Carry out what the hub asks, and let no time pass."""
        self.carry(actions)
        self.tick()

    def carry(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Reach):
                self.reached(action.session)
            elif isinstance(action, Send):
                name = action.conn.decode().partition(".")[2]
                if name not in self.peers:  # its connection is closed
                    self.carry(self.hub.lost(action.conn, self.now))  # type: ignore[arg-type]
                    continue
                for answer in self.peers[name].receive(action.message, self.now):  # type: ignore[arg-type]
                    self.carry(self.hub.receive(action.conn, answer, self.now))  # type: ignore[arg-type]

    def reached(self, session: str) -> None:
        self.carry(self.hub.apply(lambda _: self.hub.reached(session, True), self.now))  # type: ignore[arg-type]

    def probe(self) -> None:
        """Let all machines answer what they are asked to measure: 10 ms each, and the rates of `lines`."""
        for name, peer in self.peers.items():
            asked = getattr(getattr(peer, "placed", None), "probe", [])
            addresses = [other.address for other in asked if other.address]
            if addresses:
                rates = {
                    to: LineRates(*[self.lines.get(frozenset((f"{name}:1", to)), 1e7)] * 2)
                    for to in addresses
                }
                found = said(dict.fromkeys(addresses, 0.01), rates)
                self.act(self.hub.receive(conn(name), found, self.now))  # type: ignore[arg-type]

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        if self.now >= self.hub.deadline():
            self.carry(self.hub.tick(self.now))  # type: ignore[arg-type]

    def lead(self, head: str) -> None:
        """Let the head of a ring begin the session of the peer that its ring is."""
        name = f"{head}{REPLICA}"
        self.peers[name] = PeerState(messages.Hello(messages.PROTOCOL, TOKEN, SETTINGS.run, name))  # type: ignore[assignment]
        for message in self.peers[name].connected(self.now):
            self.act(self.hub.receive(conn(name), message, self.now))  # type: ignore[arg-type]

    def lose(self, name: str) -> None:
        """End a machine at once: its connection closes, and it does not come back within its grace."""
        self.peers.pop(name)
        self.act(self.hub.lost(conn(name), self.now))  # type: ignore[arg-type]
        self.tick(SETTINGS.grace_s)

    def places(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The stage of each machine that has a place, and the names in its ring, as it was told."""
        placed = {name: getattr(peer, "placed", None) for name, peer in self.peers.items()}
        return {
            name: (place.number, tuple(one.name for one in place.machines))
            for name, place in placed.items()
            if place is not None and place.ring
        }


def conn(name: str) -> bytes:
    return f"key-of-{name.removesuffix(REPLICA)}.{name}".encode()


def at_relay(name: str) -> str:
    return f"relay:29399/{sha256(name.encode()).hexdigest()[:32]}"


def formed() -> Machines:
    machines = Machines()
    for name, memory in (("ann", 4), ("bob", 3), ("cid", 3)):
        machines.come(name, memory)
    return machines


def test_machines_that_hold_the_model_together_are_told_their_ring_and_nobody_trains() -> None:
    machines = Machines()
    machines.come("ann", 4)
    machines.come("bob", 3)
    assert machines.places() == {}
    assert "waits until" in machines.peers["ann"].placed.reason  # type: ignore[union-attr]
    assert not machines.peers["ann"].placed.spare  # type: ignore[union-attr]
    machines.come("cid", 3)

    assert machines.places() == {
        name: (number, ("ann", "bob", "cid")) for number, name in enumerate(machines.peers)
    }
    placed = machines.peers["bob"].placed
    assert placed is not None
    assert [(one.key, one.address) for one in placed.machines] == [
        (f"key-of-{name}", f"{name}:1") for name in machines.peers
    ]
    machines.act(machines.hub.receive(conn("ann"), messages.Ready(0, 0), machines.now))  # type: ignore[arg-type]
    assert machines.hub.members.ready() == []
    status = machines.hub.status(machines.now)
    assert '"state": "stage"' in status
    assert '"rings": [[{"name": "ann", "layers": [0, 2]}' in status


def test_a_line_is_measured_once_by_the_new_machine_and_only_those_two_are_told() -> None:
    """The other is to answer this one key; once the line is measured it answers nobody any more."""
    machines = Machines()
    machines.come("ann", 1)
    machines.come("bob", 1, answers=False)
    ann, bob = machines.peers["ann"].placed, machines.peers["bob"].placed
    assert ann is not None
    assert bob is not None
    assert ann.probe == [OtherMachine("key-of-bob", "")]
    assert bob.probe == [OtherMachine("key-of-ann", "ann:1")]

    machines.probe()
    assert [peer.placed.probe for peer in machines.peers.values()] == [[], []]  # type: ignore[union-attr]
    machines.come("cid", 1, answers=False)
    assert [len(peer.placed.probe) for peer in machines.peers.values()] == [1, 1, 2]  # type: ignore[union-attr]
    machines.lose("ann")
    machines.tick(PROBE_S)
    assert [peer.placed.probe for peer in machines.peers.values()] == [[], []]  # type: ignore[union-attr]


def test_machines_that_a_relay_leads_to_are_neighbours_and_the_direct_address_is_dialled() -> None:
    """The hub dials none of the three of four that cannot be dialled directly: those that measure their lines
    do. One that names the address of another, or none that leads anywhere, has none."""
    machines = Machines()
    machines.come("ann", 3, address=at_relay("ann"))
    machines.come("bob", 2, address=at_relay("bob"), answers=False)
    assert machines.peers["bob"].placed.probe == [OtherMachine("key-of-ann", at_relay("ann"))]  # type: ignore[union-attr]
    machines.probe()
    machines.come("cid", 2, answers=False)
    assert machines.peers["cid"].placed.probe == [OtherMachine(f"key-of-{n}", "") for n in ("ann", "bob")]  # type: ignore[union-attr]
    machines.probe()
    machines.come("dan", 2, address=at_relay("dan"))
    assert set(machines.places()) == {"ann", "bob", "cid", "dan"}
    for name, address in (("eve", at_relay("ann")), ("fay", "relay:1/no-name")):
        machines.come(name, 2, address=address)
        assert machines.peers[name].placed.reason.endswith(UNREACHED)  # type: ignore[union-attr]


def test_a_ring_avoids_a_thin_line_that_its_machines_have_measured() -> None:
    machines = Machines()
    machines.lines = {frozenset(("ann:1", "bob:1")): 1e4}
    for name, memory in (("ann", 3), ("bob", 2), ("cid", 2), ("dan", 1)):
        machines.come(name, memory)
    number, ring = machines.places()["ann"]
    assert "bob" not in (ring[number - 1], ring[number + 1])


def test_a_waiting_machine_replaces_one_whose_process_ends_and_the_others_keep_their_stages() -> None:
    machines = formed()
    machines.come("dan", 3)
    ring = machines.peers["ann"].placed.ring  # type: ignore[union-attr]
    machines.lose("bob")

    assert machines.places() == {
        name: (n, ("ann", "dan", "cid")) for n, name in enumerate(("ann", "dan", "cid"))
    }
    assert {peer.placed.ring for peer in machines.peers.values()} == {ring}  # type: ignore[union-attr]


def test_a_machine_that_its_neighbour_does_not_reach_any_more_is_replaced_at_once() -> None:
    """No time passes: the hub's own connection to it may still be open, or have its grace."""
    machines = formed()
    machines.come("dan", 3)
    lost = said({"bob:1": -1.0})
    machines.act(machines.hub.receive(conn("ann"), lost, machines.now))  # type: ignore[arg-type]

    assert machines.places() == {
        name: (n, ("ann", "dan", "cid")) for n, name in enumerate(("ann", "dan", "cid"))
    }
    spare = machines.peers["bob"].placed
    assert spare is not None
    assert spare.spare


def test_a_head_whose_process_ends_loses_both_sessions_once_its_neighbour_does_not_reach_it() -> None:
    """So its lease is back as soon as another has its place: no time passes."""
    machines = formed()
    machines.lead("ann")
    machines.come("dan", 4)
    del machines.peers["ann"], machines.peers[f"ann{REPLICA}"]
    lost = said({"ann:1": -1.0})
    machines.act(machines.hub.receive(conn("cid"), lost, machines.now))  # type: ignore[arg-type]

    assert machines.places()["dan"] == (0, ("dan", "bob", "cid"))
    assert machines.hub.members.with_key("key-of-ann") == []


def test_a_head_that_lives_keeps_its_sessions_and_their_grace_though_a_neighbour_does_not_reach_it() -> None:
    machines = formed()
    machines.lead("ann")
    lost = said({"ann:1": -1.0})
    machines.act(machines.hub.receive(conn("cid"), lost, machines.now))  # type: ignore[arg-type]
    machines.tick(0.1)
    for name in ("ann", f"ann{REPLICA}"):
        machines.act(machines.hub.receive(conn(name), messages.Pong(machines.now), machines.now))  # type: ignore[arg-type]
        machines.act(machines.hub.lost(conn(name), machines.now))  # type: ignore[arg-type]
    machines.tick(0.9 * SETTINGS.grace_s)
    assert len(machines.hub.members.with_key("key-of-ann")) == 2

    machines.tick(0.2 * SETTINGS.grace_s)
    assert machines.hub.members.with_key("key-of-ann") == []


def test_a_silent_machine_is_lost_where_another_waits() -> None:
    machines = formed()
    machines.come("dan", 3)
    silent = machines.peers.pop("bob")
    machines.peers["bob"] = PeerState(silent.hello)  # type: ignore[assignment]  # hears nothing, and answers nothing
    for _ in range(12):
        machines.tick(1.0)

    assert machines.places()["dan"] == (1, ("ann", "dan", "cid"))


def test_a_ring_that_lost_a_machine_says_so_and_waits_again_after_a_while() -> None:
    machines = formed()
    machines.lose("bob")
    assert machines.places() == {"ann": (0, ("ann", "", "cid")), "cid": (2, ("ann", "", "cid"))}
    while machines.now < 2 * GAP_S:
        machines.tick(1.0)
    assert machines.places() == {}


def test_a_restarted_hub_is_told_of_the_rings_that_there_are() -> None:
    machines = formed()
    before, ring = machines.places(), machines.peers["ann"].placed.ring  # type: ignore[union-attr]
    machines.start()
    for name, peer in machines.peers.items():
        peer.disconnected()
        machines.dial(name)  # Resume, which this hub does not know, then Lends
        assert peer.placed is not None
        assert (peer.placed.ring, peer.placed.number) == (ring, before[name][0]), "it goes on with its layers"

    assert machines.places() == before
    assert all(peer.link is SessionState.JOINED for peer in machines.peers.values())


def test_a_run_whose_model_is_not_divided_says_so() -> None:
    hub = HubState(SETTINGS, TOKEN, "stop", 0.0, extensions=[Late(NAME, lambda _: Undivided())])
    [refused] = [
        a.message for a in hub.receive(conn("ann"), Lent("ann", 9).hello, 0.0) if isinstance(a, Send)
    ]
    assert isinstance(refused, messages.Refused)
    assert "stages={}" in refused.reason
    assert "ann" not in [session.name for session in hub.members]


def test_a_machine_asks_the_host_where_peers_do_and_one_that_says_no_memory_is_refused() -> None:
    begin = Late(NAME, lambda hub: RingCoordinator(hub, Units()))
    hub = HubState(replace(SETTINGS, join="approve"), TOKEN, "stop", 0.0, extensions=[begin])
    hello = Lent("ann", 9).hello
    answers = [
        a.message
        for sent in (hello, structs.replace(hello, extra={NAME: b"?"}))
        for a in hub.receive(conn("ann"), sent, 0.0)
        if isinstance(a, Send)
    ]
    assert [type(one) for one in answers] == [messages.Wait, messages.Refused]
    assert not list(hub.members)
