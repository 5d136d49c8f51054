"""Whoever finds the port: what is no peer is refused at once, and honest peers' rounds go on meanwhile."""

import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from hub_swarm import FAST, HubSwarm
from test_hub_and_peer import say
from toy_swarm import ToyWork, toy_settings
from waiting import until

from transport import ask_status
from transport.protocol import CurveKeys, Unreachable, as_z85, encode, messages
from transport.wire import DealerWire, Disconnected, TcpRoute
from transport.wire.zeromq_sockets import MAX_FRAME

MANY = 300  # connections at once
PATIENCE_S = 60.0  # on a busy machine; not what is measured here
MORE = 64 << 20  # bytes by which the process may grow; it keeps what the honest peer trains
CURVE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP greeting


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubSwarm]:
    """A hub whose one honest peer trains for as long as it takes."""
    settings = toy_settings(**FAST, samples=10**6, start_timeout=PATIENCE_S)
    with HubSwarm(settings, ToyWork(), tmp_path_factory.mktemp("strangers"), 0).start().training() as running:
        yield running


def dialled(running: HubSwarm) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.hub.port), timeout=10.0)


def closed_by_hub(sock: socket.socket) -> bool:
    """Within the ten seconds of `dialled`. What the hub says before (its own greeting) is read over."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def silence(running: HubSwarm) -> None:
    dialled(running).close()


def spoken(data: bytes) -> Callable[[HubSwarm], None]:
    def speak(running: HubSwarm) -> None:
        with dialled(running) as sock:
            sock.sendall(data)
            assert closed_by_hub(sock), "the hub still listens to it"

    return speak


def tls(running: HubSwarm) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with dialled(running) as sock, pytest.raises((OSError, ssl.SSLError)):
        context.wrap_socket(sock)


def endless_command(running: HubSwarm) -> None:
    """A handshake command of a gigabyte, of which as much is sent as is taken."""
    with dialled(running) as sock:
        sock.sendall(CURVE + b"\x06" + (1 << 30).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionError):
            for _ in range(256):
                sock.sendall(bytes(1 << 18))
        assert closed_by_hub(sock)


def no_curve(running: HubSwarm) -> None:
    """A ZeroMQ program that knows nothing of keys: what it says arrives nowhere."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(f"tcp://127.0.0.1:{running.hub.port}")
        sock.send(encode(messages.Hello(messages.PROTOCOL, running.keys.token, "toy-run", "eve")))
        assert not sock.poll(300)


def wrong_key(running: HubSwarm) -> None:
    wire = DealerWire((TcpRoute("127.0.0.1", running.hub.port),), CurveKeys.generate().public)
    try:
        wire.dial(0)
        events = wire.poll(0.5)
        while not events:
            events = wire.poll(0.5)
        assert isinstance(events[0], Disconnected)
        assert isinstance(events[0].error, Unreachable)
    finally:
        wire.close()


def long_frame(running: HubSwarm) -> None:
    """A client with the right key whose frame is beyond the limit: its connection ends."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        mine = CurveKeys.generate()
        sock.curve_serverkey = as_z85(running.keys.public)
        sock.curve_publickey, sock.curve_secretkey = as_z85(mine.public), as_z85(mine.secret)
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sock.connect(f"tcp://127.0.0.1:{running.hub.port}")
        sock.send(bytes(MAX_FRAME + 1))
        assert monitor.poll(5000), "the hub took a frame beyond its limit"
        sock.disable_monitor()


def crowd(running: HubSwarm) -> None:
    """Hundreds that connect and say nothing, or half a handshake, and stay."""
    with contextlib.ExitStack() as stack:
        for number in range(MANY):
            sock = stack.enter_context(dialled(running))
            if number % 2:
                sock.sendall(CURVE)
        goes_on(running)


ATTACKS: list[Callable[[HubSwarm], None]] = [
    silence,
    tls,
    endless_command,
    no_curve,
    wrong_key,
    long_frame,
    crowd,
]
SPOKEN = {
    "http": b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
    "garbage": bytes(range(256)) * 256,
    "old zmtp": b"\xff" + bytes(8) + b"\x7f" + b"\x01\x05" + bytes(60),
    "another mechanism": CURVE.replace(b"CURVE", b"PLAIN"),
    "greeting and garbage": CURVE + os.urandom(500),
    "short hello": CURVE + b"\x04\x06\x05HELLO",
}


def goes_on(running: HubSwarm, rounds: int = 3) -> None:
    before = running.committed()
    running.until(lambda: running.committed() >= before + rounds, PATIENCE_S)


def resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__.replace("_", "-"))
def test_rounds_go_on_and_memory_stays_whatever_a_stranger_does(
    running: HubSwarm, attack: Callable[[HubSwarm], None]
) -> None:
    before = resident()
    attack(running)
    goes_on(running)

    assert resident() - before < MORE


@pytest.mark.slow
@pytest.mark.parametrize("said", SPOKEN.values(), ids=SPOKEN.keys())
def test_who_speaks_another_language_is_hung_up_on(running: HubSwarm, said: bytes) -> None:
    spoken(said)(running)
    goes_on(running)


@pytest.mark.slow
def test_who_speaks_another_language_or_has_no_token_and_what_is_no_message_is_counted(
    running: HubSwarm,
) -> None:
    before, expected = ask_status(running.url)["refused"], len(SPOKEN) + 2
    for said in SPOKEN.values():
        spoken(said)(running)
    say(running.url, [encode(messages.Hello(messages.PROTOCOL, "guess", "toy-run", "eve"))])
    say(running.url, [b"\x81\xa1a" * 20_000])
    until(lambda: ask_status(running.url)["refused"] >= before + expected, PATIENCE_S)
    goes_on(running)
