"""Requests to a hub are bounded, and a peer over the bound takes nobody else's place."""

import socket
from pathlib import Path

import pytest
import zmq
from hub_swarm import HubSwarm
from sim_swarm import STOP, TOKEN
from toy_swarm import ToyWork, toy_settings

from transport import actions as do
from transport.hub import HubState
from transport.hub.hub_state import LONGEST
from transport.ledger import KnownPeer, OpenSession, Recovered
from transport.membership.admission import HELLOS, HELLOS_S
from transport.protocol import RunSettings, messages
from transport.transfer import CHUNK, MAX_CONNECTIONS, ConnectionRegistry
from transport.transfer.upload_inbox import HANDSHAKE_COST, KIB, MESSAGES, READING
from transport.wire import MAX_BUFFERED, TokenBuckets, connection_guard, key_of, origin, origin_of
from transport.wire.connection_guard import LITTLE, ConnectionGuard, TcpCounters
from transport.wire.rate_limit import MAX_NAMES

HERE, THERE = "10-0-0-1", "10-0-0-2"


def hello(name: str = "ann") -> messages.Hello:
    return messages.Hello(messages.PROTOCOL, TOKEN, "toy-run", name)


def conn(number: int, where: str = HERE) -> bytes:
    """A connection of a key of its own."""
    return f"k{number}.{where}.{number}".encode()


def answers(hub: HubState, conn: bytes, message: object, now: float) -> list[messages.Message]:
    said = hub.receive(conn, message, now)  # type: ignore[arg-type]
    return [a.message for a in said if isinstance(a, do.Send) and a.conn == conn]


# ---- rates -------------------------------------------------------------------------------------------------


def test_each_name_has_a_bucket_of_its_own_and_a_hub_remembers_few_of_them() -> None:
    buckets = TokenBuckets(2.0, 4.0)
    assert [buckets.take("ann", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert buckets.take("bob", 0.0)
    assert [buckets.take("ann", 1.0) for _ in range(3)] == [True, True, False]
    for number in range(MAX_NAMES + 10):
        buckets.take(number, 1.0)

    assert len(buckets._buckets) == MAX_NAMES


def test_a_fine_keeps_a_bucket_closed_until_it_is_paid() -> None:
    buckets = TokenBuckets(2.0, 4.0)
    buckets.fine("eve", 0.0, 14.0)

    assert not buckets.take("eve", 5.0)
    assert buckets.take("eve", 5.1)


@pytest.mark.parametrize(
    ("address", "said"),
    {
        "192.0.2.7": "192-0-2-7",
        "::ffff:192.0.2.7": "192-0-2-7",
        "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::",
        "fe80::1%eth0": "fe80::",
        "": "",
    }.items(),
)
def test_an_origin_is_an_ipv4_address_or_64_bits_of_an_ipv6_one(address: str, said: str) -> None:
    assert origin(address) == said
    assert origin_of(b"key." + said.encode() + b".\0a.b") == said


@pytest.mark.parametrize("family", ["AF_UNIX", "AF_NETLINK"])
def test_a_descriptor_that_is_something_elses_by_now_is_no_connection(family: str) -> None:
    """libzmq closes, the resolver opens: `getpeername` then says numbers, or nothing."""
    if not hasattr(socket, family):
        pytest.skip(f"this system has no {family}")
    other = (
        socket.socketpair()[0] if family == "AF_UNIX" else socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    )
    with other:
        if family == "AF_NETLINK":
            other.connect((0, 0))
        assert connection_guard.peer_of(other.fileno()) is None
        assert connection_guard.with_socket(other.fileno(), lambda sock: sock.getsockname()[1]) is None
        other.getsockname()  # it is still open


def test_a_closed_descriptor_or_a_file_is_no_connection(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        assert connection_guard.peer_of(number) is None
    assert connection_guard.peer_of(number) is None


def test_a_connections_name_may_lack_its_origin() -> None:
    assert (key_of(b"key.7"), origin_of(b"key.7")) == ("key", "")


def test_greetings_beyond_the_rate_of_one_address_wait_and_another_address_does_not() -> None:
    hub, most = HubState(toy_settings(), TOKEN, STOP, 0.0), int(HELLOS)
    taken = [bool(answers(hub, conn(n), hello(f"m{n}"), 1.0)) for n in range(most + 40)]
    assert taken == [True] * most + [False] * 40
    assert hub.members.refused == 40, "they are counted, and dial again"
    assert isinstance(answers(hub, conn(9000, THERE), hello(), 1.0)[0], messages.Welcome)

    again = [bool(answers(hub, conn(5000 + n), hello(f"n{n}"), 2.0)) for n in range(40)]
    assert sum(again) == HELLOS_S


def test_one_connection_that_greets_for_ever_has_one_session_and_few_writes() -> None:
    hub = HubState(toy_settings(), TOKEN, STOP, 0.0)
    done = [a for n in range(1000) for a in hub.receive(conn(1), hello(f"m{n}"), 1.0)]

    assert len(hub.members.sessions) == 1
    assert sum(isinstance(a, do.RecordStanding | do.Forget) for a in done) <= 3 * HELLOS


def test_a_swarm_of_one_house_comes_back_at_once_after_a_restart() -> None:
    n = 256
    old = tuple(OpenSession(f"s{i}", f"m{i}", "CPU", f"k{i}") for i in range(n // 2))
    known = tuple(KnownPeer(f"k{i}", f"m{i}", "member") for i in range(n))
    hub = HubState(toy_settings(min_peers=n), TOKEN, STOP, 0.0, Recovered(3, sessions=old, peers=known))
    for i in range(n):
        greeting = (
            messages.Resume(messages.PROTOCOL, "toy-run", f"m{i}", f"s{i}", -1, True)
            if i < n // 2
            else hello(f"m{i}")
        )
        (welcome,) = answers(hub, conn(i), greeting, 0.01 * i)
        assert isinstance(welcome, messages.Welcome)
        assert welcome.resumed == (i < n // 2)

    assert len(hub.members.sessions) == n


# ---- those who catch up ------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> HubState:
    monkeypatch.setattr("transport.membership.roster.NEWCOMERS", 4)
    hub = HubState(toy_settings(), TOKEN, STOP, 0.0)
    for n in range(4):
        hub.receive(conn(n), hello(f"m{n}"), float(n))
    return hub


def test_a_crowd_that_never_says_ready_makes_room_for_a_newcomer_from_elsewhere(few: HubState) -> None:
    done = few.receive(conn(9, THERE), hello("bob"), 5.0)
    refused = [a for a in done if isinstance(a, do.Send) and isinstance(a.message, messages.Refused)]

    assert [(a.conn, a.message.code) for a in refused] == [(conn(0), "full")]  # type: ignore[union-attr]
    assert sorted(s.name for s in few.members.sessions.values()) == ["bob", "m1", "m2", "m3"]


def test_another_of_the_crowd_is_told_that_it_is_full(few: HubState) -> None:
    (answer,) = answers(few, conn(9), hello("m9"), 5.0)

    assert isinstance(answer, messages.Refused)
    assert answer.code == "full"
    assert len(few.members.sessions) == 4


def test_who_has_said_ready_is_no_more_of_the_crowd(few: HubState) -> None:
    few.receive(conn(0), messages.Ready(0, 0), 4.0)

    assert isinstance(answers(few, conn(9), hello("m9"), 5.0)[0], messages.Welcome)


# ---- connections -------------------------------------------------------------------------------------------


def test_of_too_many_connections_of_a_session_the_oldest_are_nobodys_but_not_the_control() -> None:
    flows, control = ConnectionRegistry(), conn(0)
    flows.own(control, "s", control)
    for n in range(1, MAX_CONNECTIONS + 4):
        flows.own(conn(n), "s", control)
    kept = [control, *(conn(n) for n in range(4, MAX_CONNECTIONS + 4))]
    assert flows.of("s") == kept
    assert set(flows.sessions) == set(kept)

    flows.own(conn(5), "other", None)
    flows.forget("s")
    assert flows.sessions == {conn(5): "other"}


def test_a_connection_may_say_so_much_and_long_messages_and_questions_are_dear() -> None:
    def said(size: int, *, ask: bool = False) -> int:
        flows, count = ConnectionRegistry(), 0
        while flows.may_say(b"c", size, 0.0):
            count += 1
            if ask:
                flows.costs(b"c", messages.AskStatus(messages.PROTOCOL, TOKEN, "toy-run"), 0.0)
        return count

    assert said(30) == MESSAGES
    assert said(63 * KIB) == -(-MESSAGES // 64)
    assert said(30, ask=True) == -(-MESSAGES // (1 + HANDSHAKE_COST))


def test_what_is_read_for_a_session_and_what_it_does_not_take_are_bounded_together() -> None:
    flows, credit = ConnectionRegistry(), RunSettings("", "", "", 1, 1).credit
    assert 4 * credit * CHUNK == MAX_BUFFERED, "a peer never has more than a quarter under way"
    sizes = []
    while size := flows.begin_read("s", CHUNK, MAX_BUFFERED - READING // 2):
        sizes.append(size)
    assert sum(sizes) == READING // 2
    while size := flows.begin_read("s", CHUNK, 0):
        sizes.append(size)
    assert sum(sizes) == READING >= credit * CHUNK, "more than a credit, and less than all that may be held"
    assert flows.begin_read("other", CHUNK, 0)
    for size in sizes:
        flows.end_read("s", size)

    assert set(flows.reading) == {"other"}


# ---- secrets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "greeting",
    [
        messages.Hello(messages.PROTOCOL, TOKEN, "x", "eve"),
        messages.AskStatus(messages.PROTOCOL, TOKEN, "x"),
        messages.AskAdmin(messages.PROTOCOL, STOP, "x", "list"),
    ],
)
def test_who_names_another_run_is_not_told_which_this_is(greeting: messages.Message) -> None:
    (answer,) = answers(HubState(toy_settings(), TOKEN, STOP, 0.0), b"eve.1", greeting, 1.0)

    assert isinstance(answer, messages.Refused)
    assert (answer.code, answer.reason) == ("run", "no run 'x' here")


def test_the_kernel_is_asked_what_a_connection_holds_only_where_that_may_be_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, taken, conn = list[int](), 0, b"key.origin.1"

    def counts(number: int) -> TcpCounters:
        asked.append(number)
        return TcpCounters(taken)

    monkeypatch.setattr("transport.wire.connection_guard.counts_of", counts)
    monkeypatch.setattr("transport.wire.connection_guard.LINUX", True)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        lines = ConnectionGuard(context, router, 1000)
        lines.came(7, conn, 100, 0.0)
        lines.sent(conn, LITTLE - 1)
        assert (lines.held(conn), asked) == (LITTLE - 1, []), "it cannot be more"

        lines.sent(conn, 32 << 20)
        assert lines.held(conn) > 32 << 20
        taken = 64 << 20
        assert lines.held(conn) == 0, "what was taken is found at once: else no `Get` would ever be answered"
        assert asked == [7, 7]
        lines.close()


def test_a_newcomer_may_try_its_line_a_few_times_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    work = ToyWork()
    with HubSwarm(toy_settings(max_update=1000), work, tmp_path) as swarm:
        link = swarm.link("ann")
        link.connect(30.0)
        taken = [link.put(f"trial/{n}", bytes(size)) for n, size in enumerate((LONGEST + 1, *[2000] * 5))]
        link.leave("seen enough")

    assert taken == [False, True, True, True, True, False]
    assert (work.came, work.inherited) == ([], [])
