"""A hub that floods its peers, over real sockets: what comes waits in the kernel and at the hub, and not in
the memory of a peer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from transport.protocol import CurveKeys, as_z85, messages
from transport.transfer import CHUNK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO, and /proc")
KEYS = CurveKeys.generate()
MORE = 40  # MiB by which a peer may grow: two queues of a connection, and what comes between two looks
Flood = Callable[[zmq.Socket[bytes], bytes], None]


def control(sock: zmq.Socket[bytes], peer: bytes) -> None:
    """Messages of 64 KiB."""
    sock.send_multipart([peer, bytes(messages.MAX_CONTROL)])


def unasked(sock: zmq.Socket[bytes], peer: bytes) -> None:
    """Chunks that nobody has asked for."""
    sock.send_multipart([peer, b"x" * 60, bytes(CHUNK)])


def frames(sock: zmq.Socket[bytes], peer: bytes) -> None:
    """A message of 128 MiB in frames of 64 KiB. libzmq sends it once it has all of it; others need not."""
    in_parts(sock, peer, bytes(messages.MAX_CONTROL), 2048)


def dust(sock: zmq.Socket[bytes], peer: bytes) -> None:
    """A message of a million frames of one byte."""
    in_parts(sock, peer, b".", 1_000_000)


def in_parts(sock: zmq.Socket[bytes], peer: bytes, part: bytes, count: int) -> None:
    sock.send(peer, zmq.SNDMORE)
    for _ in range(count):
        sock.send(part, zmq.SNDMORE)
    sock.send(b"")


def flooded(flow: int, flood: Flood, busy: float, seconds: float) -> tuple[int, int, str]:
    """By how many MiB a peer has grown, the messages that it has read, and what ended it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.linger, sock.sndtimeo, sock.rcvtimeo, sock.curve_server = 0, 500, 20_000, True
    sock.sndhwm, sock.router_mandatory = 100, True
    sock.curve_publickey, sock.curve_secretkey = as_z85(KEYS.public), as_z85(KEYS.secret)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    script = Path(__file__).with_name("flooded_peer.py")
    command = [
        sys.executable,
        str(script),
        str(flow),
        str(busy),
        str(seconds),
        f"127.0.0.1:{port}",
        KEYS.public,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        name, _ = sock.recv_multipart()
        while peer.poll() is None:
            try:
                flood(sock, name)
            except zmq.Again:  # it does not read: its queues are full
                continue
            except zmq.ZMQError:  # it has hung up
                break
        assert peer.stdout is not None
        grown, said, ended = peer.stdout.read().split(" ", 2)
    context.destroy(0)
    return int(grown), int(said), ended.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("flow", "flood"), [(0, control), (1, unasked)])
def test_whole_messages_that_nobody_asked_for_wait_at_the_hub(flow: int, flood: Flood) -> None:
    grown, said, ended = flooded(flow, flood, busy=1.0, seconds=3.0)

    assert said > 100, "it was connected, and has read what came"
    assert grown < MORE
    assert ended == ""


@pytest.mark.slow
@pytest.mark.parametrize("flow", [0, 1])
@pytest.mark.parametrize("flood", [frames, dust])
def test_a_message_without_an_end_ends_its_connection_and_is_the_hubs_fault(flow: int, flood: Flood) -> None:
    grown, _, ended = flooded(flow, flood, busy=0.0, seconds=60.0)

    assert "a message has no end" in ended
    assert grown < MORE


def test_a_peer_asks_for_no_longer_fragment_than_it_reads() -> None:
    assert messages.MAX_ANSWER == CHUNK
