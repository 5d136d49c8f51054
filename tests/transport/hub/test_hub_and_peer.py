"""Real sockets on the loopback: few and short. What the machines decide is tested without sockets."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_swarm import FAST, HubSwarm
from toy_swarm import PLENTY, ToyPeer, ToyWork, toy_settings, trained

from scripts.swarms.tcp_link import Link
from transport import PeerLink, RunKeys, RunURL, ask_status, ask_stop
from transport.peer import LinkLimits, PeerIdentity
from transport.protocol import (
    AddressInUse,
    CurveKeys,
    Leaving,
    LinkLost,
    ProtocolError,
    RefusedByHub,
    RoundCommitted,
    RunEnded,
    Rung,
    Unreachable,
    decode_to_peer,
    encode,
    events,
    messages,
)
from transport.transfer import CHUNK, block_hashes
from transport.wire import Connected, DealerWire, Received, routes_to


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HubSwarm]]:
    hubs: list[HubSwarm] = []

    def begin(folder: str = "run", *, work: ToyWork | None = None, port: int = 0, keys: RunKeys | None = None,
              **changes: object) -> HubSwarm:  # fmt: skip
        settings = toy_settings(**(FAST | changes))
        hubs.append(HubSwarm(settings, work or ToyWork(), tmp_path / folder, port, keys).start())
        return hubs[-1]

    yield begin
    for hub in hubs:
        hub.close()


def test_three_peers_finish_a_run_over_tcp(start: Callable[..., HubSwarm]) -> None:
    running = start(min_peers=3, eval=True)
    peers = [ToyPeer(running.link(name)) for name in ("ann", "bob", "cem")]
    running.train(*peers)
    ended = running.ended()

    assert (ended.finished, ended.exit_code, ended.counted) == (True, 0, 40)
    assert trained(running.work) == list(range(40))
    assert running.ledger.verify(complete=True).rounds == ended.rounds
    assert all(peer.packets == running.work.packets for peer in peers), "all hold the same x'"
    assert [peer.over and peer.over.finished for peer in peers] == [True] * 3
    quickest = min(e.seconds for e in running.events if isinstance(e, RoundCommitted))
    assert quickest < 0.2, "a round costs tens of milliseconds; other load stretches some"


def test_a_name_without_address_is_reported(start: Callable[..., HubSwarm]) -> None:
    running = start()
    url = running.keys.url("no-such-host.invalid", 1, running.url.run)

    with pytest.raises(Unreachable, match="no address for the name 'no-such-host") as told:
        PeerLink(url, PeerIdentity("ann")).connect()
    assert told.value.layer == "dns"


def test_a_port_without_listener_is_reported(start: Callable[..., HubSwarm]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = start().keys.url("127.0.0.1", port, "toy-run")

    with pytest.raises(Unreachable, match="refused") as told:
        PeerLink(url, PeerIdentity("ann")).connect()
    assert told.value.layer == "tcp"


def test_a_hub_with_another_key_is_reported(start: Callable[..., HubSwarm]) -> None:
    running = start()
    url = RunURL(CurveKeys.generate().public, running.url.token, "127.0.0.1", running.hub.port, "toy-run")

    with pytest.raises(Unreachable, match="does not hold the server key") as told:
        PeerLink(url, PeerIdentity("ann")).connect()
    assert told.value.layer == "key"


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"token": "A" * 22}, "token", "token in the run URL"),
        ({"run": "other-run"}, "run", "no run 'other-run' here"),
    ],
)
def test_a_wrong_token_or_run_is_reported(
    start: Callable[..., HubSwarm], change: dict[str, str], code: str, told: str
) -> None:
    running = start()

    with pytest.raises(RefusedByHub, match=told) as refused:
        PeerLink(replace(running.url, **change), PeerIdentity("ann")).connect()  # type: ignore[arg-type]
    assert refused.value.code == code


def test_other_protocol_versions_are_told_which_are_supported(start: Callable[..., HubSwarm]) -> None:
    running = start(versions={"codec": "2"})
    answer = say(running.url, [encode(messages.Hello(7, running.url.token, "toy-run", "ann"))])

    assert isinstance(answer, messages.Refused)
    assert answer.code == "protocol"
    assert "you speak protocol 7, this run needs version 2" in answer.reason
    with pytest.raises(RefusedByHub, match="codec: you have 1, the run has 2"):
        PeerLink(running.url, PeerIdentity("ann", versions={"codec": "1"})).connect()


def say(url: RunURL, frames: list[bytes]) -> object:
    """Send frames on a connection of their own; the first message that comes back, within a second."""
    wire, end = DealerWire(routes_to(url), url.key), time.monotonic() + 1.0
    try:
        wire.dial(0)
        while (left := end - time.monotonic()) > 0:
            for event in wire.poll(left):
                if isinstance(event, Connected):
                    wire.send(0, frames)
                elif isinstance(event, Received):
                    return decode_to_peer(event.frames[0])
        return None
    finally:
        wire.close()


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\xff" * 100], [b"x", b"y", b"z"], [b"\x81" * 70000], [b"{}" * 30000, b"x" * 1000000]],
    ids=["empty", "garbage", "three frames", "too long", "large"],
)
def test_whatever_a_stranger_says_the_hub_goes_on(
    start: Callable[..., HubSwarm], frames: list[bytes]
) -> None:
    running = start()

    assert say(running.url, frames) is None
    assert ask_status(running.url)["state"] == "waiting"


def test_a_port_in_use_is_reported(start: Callable[..., HubSwarm]) -> None:
    running = start()

    with pytest.raises(AddressInUse, match=f"cannot listen on 127.0.0.1:{running.hub.port}: another program"):
        start("other", port=running.hub.port)


def test_status_and_stop(start: Callable[..., HubSwarm]) -> None:
    running = start()
    link = PeerLink(running.url, PeerIdentity("ann", "CPU"))
    link.connect()
    status = ask_status(running.url)
    with pytest.raises(RefusedByHub, match="only the run's host"):
        ask_stop(running.url, "guess")
    ask_stop(running.url, running.keys.stop)
    over = link.next_round()
    link.leave("bye")

    assert [(p["name"], p["gpu"], p["state"]) for p in status["peers"]] == [("ann", "CPU", "syncing")]
    assert over == messages.Over("stopped by its host", False)
    assert running.ended() == RunEnded(running.ended().at, False, "stopped by its host", 0, 0, 0)


def test_a_peer_that_vanishes_is_noticed_and_the_others_go_on(start: Callable[..., HubSwarm]) -> None:
    running = start(min_peers=1, samples=400)
    staying, going = (ToyPeer(running.link(name)) for name in ("ann", "bob"))
    staying.start()
    going.start()
    running.until(lambda: going.rounds and running.committed() > 5)
    going.link.close()
    closed = time.time()
    running.train(staying, going)

    left = next(e for e in running.events if isinstance(e, events.PeerLeft))
    assert (left.peer, left.reason) == ("bob", "connection lost")
    assert left.at - closed < 3.0
    assert running.ended().finished
    assert trained(running.work) == list(range(400))


def test_a_peer_that_is_back_before_its_loss_was_noticed_keeps_its_name(
    start: Callable[..., HubSwarm],
) -> None:
    running, keys = start(ping_s=5.0, grace_s=60.0), CurveKeys.generate()
    first = PeerLink(running.url, PeerIdentity("ann", keys=keys))
    first.connect()
    first.close()
    time.sleep(0.02)  # for the system to tell the hub's that the connection is closed
    second = PeerLink(running.url, PeerIdentity("ann", keys=keys))
    second.connect()
    third = PeerLink(running.url, PeerIdentity("ann", keys=keys))
    third.connect()

    assert (second.name, third.name) == ("ann", "ann-2")
    second.leave("done")
    third.leave("done")


def test_a_leaving_peers_samples_are_leased_again(start: Callable[..., HubSwarm]) -> None:
    running = start(samples=400)
    staying, going = (ToyPeer(running.link(name)) for name in ("ann", "bob"))
    staying.start()
    going.start()
    running.until(lambda: going.rounds and running.committed() > 5)
    going.link.leave_requested.set()
    running.train(staying, going)

    assert going.over == messages.Over("asked to leave", False) or isinstance(going.error, Leaving)
    assert running.ended().finished
    assert trained(running.work) == list(range(400))


def test_a_session_survives_its_connections(start: Callable[..., HubSwarm]) -> None:
    running = start(samples=400, grace_s=5.0)
    proxy = Link(running.hub.port)
    peer = ToyPeer(PeerLink(running.keys.url("127.0.0.1", proxy.port, "toy-run"), PeerIdentity("ann")))
    peer.start()
    for cut in range(3):
        running.until(lambda n=5 * (cut + 1): running.committed() >= n)  # type: ignore[misc]
        proxy.cut()
    running.train(peer)
    proxy.close()

    assert (running.ended().finished, peer.renewed, peer.error) == (True, 0, None)
    assert sum(isinstance(e, events.PeerJoined) for e in running.events) == 1
    assert trained(running.work) == list(range(400))


def test_a_hub_that_is_started_again_goes_on_where_it_was(start: Callable[..., HubSwarm]) -> None:
    """Also on the rung that it had chosen."""
    run = {"samples": 400, "min_peers": 2, "rungs": (Rung(1.0), Rung(2.0, 2), Rung(4.0, 4))}
    running = start(**run)
    peers = [ToyPeer(running.link(name), needs=2.0) for name in ("ann", "bob")]
    for peer in peers:
        peer.start()
    running.until(lambda: running.committed() >= 10)
    running.kill()
    again = start(**run, keys=running.keys, port=running.hub.port, work=ToyWork(running.work.packets))
    again.train(*peers)

    assert again.ended().finished, [repr(peer.error) for peer in peers]
    assert trained(again.work) == list(range(400))
    assert again.ledger.verify(complete=True).counted == 400
    assert [peer.error for peer in peers] == [None, None]
    assert [peer.renewed for peer in peers] == [0, 0], "their sessions and what they hold are remembered"
    steps = [e.local_steps for e in (*running.events, *again.events) if isinstance(e, RoundCommitted)]
    assert (steps[0], {e.local_steps for e in again.events if isinstance(e, RoundCommitted)}) == (1, {2})


def test_bytes_are_counted_as_they_are_on_the_wire(start: Callable[..., HubSwarm]) -> None:
    blob = bytes(range(256)) * 4096
    running = start(work=ToyWork(objects={"base/weights": blob}), samples=80)
    proxy = Link(running.hub.port)
    url = running.keys.url("127.0.0.1", proxy.port, "toy-run")
    # more may be in the middle of a handshake at the end
    peer = ToyPeer(PeerLink(url, PeerIdentity("ann"), LinkLimits(flows=1)))
    peer.link.connect()
    assert peer.link.fetch("base/weights", len(blob)) == blob
    wire = peer.link._connections._wire
    crossed = sum(sum(wire.crossed(flow)) for flow in (0, 1))  # as the kernel counts, on Linux
    peer.link.close()
    time.sleep(0.05)

    assert peer.link.bytes_up == pytest.approx(proxy.up, rel=0.02)
    assert peer.link.bytes_down == pytest.approx(proxy.down, rel=0.02)
    assert crossed == pytest.approx(proxy.up + proxy.down, rel=0.02) or sys.platform != "linux"
    proxy.close()


def test_the_hub_counts_the_same_bytes_per_round(start: Callable[..., HubSwarm]) -> None:
    running = start(samples=400)
    proxy = Link(running.hub.port)
    peer = ToyPeer(PeerLink(running.keys.url("127.0.0.1", proxy.port, "toy-run"), PeerIdentity("ann")))
    running.train(peer)
    rounds = [e for e in running.events if isinstance(e, RoundCommitted)]
    up, down = (sum(getattr(e, way)["ann"] for e in rounds) for way in ("up", "down"))
    proxy.close()

    assert up == pytest.approx(proxy.up, rel=0.02), "all but the goodbye"
    assert down == pytest.approx(proxy.down, rel=0.02)
    fetched = [e.fetched.get("ann", 0) for e in rounds]
    assert 0 < fetched[0] <= rounds[0].down["ann"], "until it was ready: no part of any exchange"
    assert not any(fetched[1:])


def test_large_objects_go_to_disk_and_are_checked(
    start: Callable[..., HubSwarm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.peer.peer_link.RENEWAL_S", 0.1)  # of a session that has not ended
    blob = bytes(range(256)) * 8192
    (tmp_path / "served").write_bytes(blob)
    running = start(work=ToyWork(objects={"base/weights": tmp_path / "served"}))
    link = PeerLink(running.url, PeerIdentity("ann"))
    link.connect()
    target = tmp_path / "cache" / "weights"
    download = link.begin_file("base/weights", target, len(blob), block_hashes(tmp_path / "served"))

    assert link.finish_file(download) == target
    assert target.read_bytes() == blob
    assert [path.name for path in target.parent.iterdir()] == ["weights"]
    assert len(blob) <= download.received <= len(blob) + CHUNK  # a chunk begun in smaller pieces comes again
    with pytest.raises(ProtocolError, match="checksum"):
        link.fetch("base/weights", PLENTY, sha256="00" * 32)
    with pytest.raises(KeyError):
        link.fetch("base/none", PLENTY)
    with pytest.raises(KeyError, match="no lease of round 7"):
        link.fetch("lease/7", PLENTY)
    link.close()
    with pytest.raises(LinkLost, match="closed"):
        link.next_round()
