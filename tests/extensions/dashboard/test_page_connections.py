"""A page answers whoever asks, whatever others hold open; and it holds nothing open for long."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from http.client import HTTPConnection

import pytest
from served_page import served_page

from cocktail_cli.extensions.dashboard.run_history import About, RunHistory
from cocktail_cli.extensions.dashboard.web_server import HEADERS, WATCHERS, Page

PATIENCE = 0.3
HALF = b"GET / HTTP/1.1\r\nHost: 127"
WHOLE = b"GET /run.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LARGE = 2 << 20  # bytes of a page: more than the system holds for a client that reads nothing


def served(patience: float, look: Callable[[], RunHistory]) -> AbstractContextManager[int]:
    return served_page(Page(lambda: [look()], "key", lambda: ""), patience)


def small() -> RunHistory:
    return RunHistory(About("otter"), "running")


@pytest.fixture(scope="module")
def page() -> Iterator[int]:
    """The port of a page with the usual patience: nothing it has to wait for ends by itself in a test."""
    with served(60.0, small) as port:
        yield port


@pytest.fixture(scope="module")
def hasty() -> Iterator[int]:
    with served(PATIENCE, small) as port:
        yield port


def dialled(port: int, source: str = "127.0.0.1") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), 30.0, (source, 0))
    sock.settimeout(30.0)
    return sock


def small_client(port: int) -> socket.socket:
    """A client for which the system holds little, so that the server has to."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30.0)
    sock.connect(("127.0.0.1", port))
    return sock


def read_to_the_end(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


def status(port: int, request: bytes = WHOLE) -> int:
    """Ask in one go on a new connection; return the status, 0 if it is closed without one."""
    with dialled(port) as sock:
        with suppress(ConnectionError):
            sock.sendall(request)
        with suppress(ConnectionError):
            return int((sock.recv(4096) or b"HTTP/1.1 0").split()[1])
    return 0


@pytest.mark.parametrize("held", [WATCHERS, 500])
@pytest.mark.parametrize("sent", [b"", HALF, WHOLE[:-2], b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"])
def test_whoever_asks_is_answered_while_many_requests_are_half_sent(
    page: int, held: int, sent: bytes
) -> None:
    with ExitStack() as open_ones:
        for _ in range(held):
            open_ones.enter_context(dialled(page)).sendall(sent)

        assert [status(page) for _ in range(5)] == [200] * 5


def test_whoever_asks_is_answered_while_many_read_nothing() -> None:
    with served(10.0, large_page) as port, ExitStack() as open_ones:
        for _ in range(WATCHERS + 5):
            open_ones.enter_context(small_client(port)).sendall(WHOLE * 3)

        assert status(port) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback has one address")
def test_a_crowd_from_one_address_ends_no_connection_of_another(page: int) -> None:
    """A reader's connection stays open between two questions."""
    reader = HTTPConnection("127.0.0.1", page, timeout=10)
    reader.connect()
    reader.auto_open = 0  # it is this connection, or none
    with closing(reader), ExitStack() as crowd:
        for _ in range(2):
            reader.request("GET", "/")
            assert reader.getresponse().read()
            for _ in range(2 * WATCHERS):
                crowd.enter_context(dialled(page, "127.0.0.2")).sendall(HALF)
            assert status(page) == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"G",
        HALF,
        WHOLE[:-2],
        WHOLE + HALF,
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\nx",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nx",
    ],
)
def test_a_connection_ends_that_does_not_bring_the_rest_of_its_request(hasty: int, sent: bytes) -> None:
    with dialled(hasty) as sock:
        sock.sendall(sent)
        read_to_the_end(sock)

    assert status(hasty) == 200


def test_a_request_that_drips_in_ends_as_one_that_stands_still(hasty: int) -> None:
    """Each byte of it comes in time."""
    with dialled(hasty) as sock, suppress(ConnectionError):
        sock.settimeout(PATIENCE / 20)
        began, answered = time.monotonic(), b""
        for byte in WHOLE[:-1] * 10:
            sock.sendall(bytes([byte]))
            with suppress(TimeoutError):
                answered += sock.recv(4096) or b"closed"
            if b"closed" in answered:
                break
        assert time.monotonic() - began < 30.0
        assert b"200" not in answered
    assert status(hasty) == 200


def large_page() -> RunHistory:
    return RunHistory(About("otter"), "running", note="x" * LARGE)


def test_a_client_that_reads_nothing_is_left_and_a_slow_one_gets_everything() -> None:
    """The slow one takes several times the patience, but some of the answer each time."""
    patience = 1.0  # a busy machine may keep either end waiting for a third of it
    with served(patience, large_page) as port, small_client(port) as still, small_client(port) as slow:
        still.sendall(WHOLE)
        slow.sendall(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        wait, began, got = threading.Event(), time.monotonic(), 0
        while part := slow.recv(512 << 10):
            got += len(part)
            if time.monotonic() - began < 3 * patience:
                wait.wait(patience / 10)

        assert got > LARGE
        assert len(read_to_the_end(still)) < LARGE


@pytest.mark.parametrize(
    ("request_", "answers"),
    [
        (WHOLE.replace(b"GET", b"HEAD"), (200,)),
        (b"GET /metric HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", (404,)),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", (404,)),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", (0, 400)),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n", (0, 400)),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", (0, 400, 404)),
        (b"\x16\x03\x01" + b"\0" * 500, (400,)),
        (b"\r\n" * 10_000, (0, 400)),
        (
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            (200,),
        ),
        (
            b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (1 << 20),
            (405,),
        ),
    ],
    ids=["HEAD", "path", "folders", "header", "headers", "target", "TLS", "blank", "websocket", "body"],
)
def test_a_request_of_another_kind_is_answered_or_ended(
    page: int, request_: bytes, answers: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert status(page, request_) in answers
    assert status(page) == 200
    assert capfd.readouterr().err == "", "a stranger does not write on the host's terminal"


def test_every_answer_says_what_a_browser_may_do_with_it(page: int) -> None:
    with closing(HTTPConnection("127.0.0.1", page, timeout=10)) as asked:
        for path, wanted in {"/": 200, "/run.json": 200, "/join": 403, "/page.js": 200, "/no": 404}.items():
            for method in ("GET", "HEAD"):
                asked.request(method, path)
                answer = asked.getresponse()
                assert (answer.status, bool(answer.read())) == (wanted, method == "GET")
                assert HEADERS.items() <= {name: answer.headers.get(name) for name in HEADERS}.items()
                assert answer.headers.get("access-control-allow-origin") is None


def test_a_page_that_ends_while_connections_are_open_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with served(60.0, small) as port:
        still = dialled(port)
        still.sendall(HALF)
        assert status(port) == 200

    assert read_to_the_end(still) == b""
    assert capfd.readouterr().err == ""
