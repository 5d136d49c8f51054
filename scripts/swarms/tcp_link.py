"""A TCP proxy for one line: it can go dark, swallow its connections, cut them, be deaf and be thin."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

THIN = 125_000.0  # bytes a second


class Pair:
    """A connection to the proxy, and the one behind it."""

    def __init__(self, client: socket.socket, behind: socket.socket) -> None:
        self.ends = (client, behind)
        self.swallowed = threading.Event()  # what comes is read and thrown away, for ever

    def cut(self) -> None:
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Link:
    """Listens on `port` of the loopback; connects to the port `behind` it, which may be known later.

    Args:
        up: bytes a second up of a connection; 0: any.
        source: the address that the hub sees.
    """

    def __init__(self, behind: int = 0, up: float = 0.0, source: str = "127.0.0.1") -> None:
        self.behind, self.rates, self.source = behind, (up, 0.0), source
        self.up = self.down = 0  # bytes from the client, and back
        self.light = threading.Event()  # cleared: the link is dark
        self.light.set()
        self._hears = threading.Event()  # cleared: what comes back is held
        self._hears.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[Pair] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self.light.wait()  # a SYN into the dark is not answered; here the greeting is held
        try:
            to, here = ("127.0.0.1", self.behind), (self.source, 0)
            behind = socket.create_connection(to, timeout=5, source_address=here)
        except OSError:
            client.close()
            return
        behind.settimeout(None)
        for end in (client, behind):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = Pair(client, behind)
        with self._lock:
            self._pairs.append(pair)
        back = threading.Thread(target=self._pump, args=(pair, False), daemon=True)
        back.start()
        self._pump(pair, True)
        back.join()
        for end in pair.ends:
            end.close()
        with self._lock:
            self._pairs.remove(pair)

    def _pump(self, pair: Pair, up: bool) -> None:
        source, sink = pair.ends if up else pair.ends[::-1]
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.light.wait()
                if not up:
                    self._hears.wait()
                if pair.swallowed.is_set():
                    continue
                sink.sendall(data)
                if up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                if rate := self.rates[not up]:
                    time.sleep(len(data) / rate)
        self.light.wait()  # an end is not heard of in the dark either
        if not pair.swallowed.is_set():
            pair.cut()

    def dark(self) -> None:
        """Hold whatever comes, either way."""
        self.light.clear()

    def deaf(self) -> None:
        """Hold what comes back."""
        self._hears.clear()

    def thin(self) -> None:
        """Let every connection pass 1 Mbit/s each way."""
        self.rates = THIN, THIN

    def mend(self) -> None:
        """Undo these three."""
        self.rates = 0.0, 0.0
        self._hears.set()
        self.light.set()

    def swallow(self) -> int:
        """Make the present connections half-open: neither end hears anything more of the other."""
        with self._lock:
            for pair in self._pairs:
                pair.swallowed.set()
            return len(self._pairs)

    def cut(self) -> int:
        """End every connection now."""
        with self._lock:
            for pair in self._pairs:
                pair.cut()
            return len(self._pairs)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread stays in accept()
        self._listener.close()
        self.mend()
        self.cut()


def free_port() -> int:
    """Find a port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port
