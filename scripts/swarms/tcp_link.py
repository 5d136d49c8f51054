"""A link of one peer, to the hub or from others to its door: a TCP proxy that can go dark, swallow its
connections, or cut them."""

from __future__ import annotations

import contextlib
import socket
import threading


class Pair:
    """A connection to the proxy, and the one that stands behind it."""

    def __init__(self, client: socket.socket, behind: socket.socket) -> None:
        self.ends = (client, behind)
        self.swallowed = threading.Event()  # what comes is read and thrown away, for ever

    def cut(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Link:
    """Listens on `port` of the loopback; connects to the port `behind` it, which may be known later."""

    def __init__(self, behind: int = 0) -> None:
        self.behind = behind
        self.light = threading.Event()  # cleared: the link is dark
        self.light.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[Pair] = []
        self.closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self.light.wait()  # a SYN into the dark is answered by nobody; here the greeting is
        try:
            behind = socket.create_connection(("127.0.0.1", self.behind), timeout=5)
        except OSError:
            client.close()
            return
        behind.settimeout(None)
        for end in (client, behind):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = Pair(client, behind)
        with self._lock:
            self._pairs.append(pair)
        back = threading.Thread(target=self._pump, args=(pair, behind, client), daemon=True)
        back.start()
        self._pump(pair, client, behind)
        back.join()
        for end in pair.ends:
            end.close()
        with self._lock:
            self._pairs.remove(pair)

    def _pump(self, pair: Pair, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.light.wait()
                if not pair.swallowed.is_set():
                    sink.sendall(data)
        self.light.wait()  # an end is not heard of in the dark either
        if not pair.swallowed.is_set():
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> int:
        """The connections of now are half-open from now on: neither end hears anything more of the other."""
        with self._lock:
            for pair in self._pairs:
                pair.swallowed.set()
            return len(self._pairs)

    def cut(self) -> int:
        with self._lock:
            for pair in self._pairs:
                pair.cut()
            return len(self._pairs)

    def close(self) -> None:
        self._listener.close()
        self.light.set()
        self.cut()
