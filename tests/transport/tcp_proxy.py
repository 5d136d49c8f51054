"""A TCP proxy for tests: counts what passes, and can cut every connection, or stop answering."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class TcpProxy:
    """Listens on `port`, connects to the hub's. `rate`: bytes a second up of a connection; 0: any. `source`:
    the address that the hub sees."""

    def __init__(self, to_port: int, rate: float = 0.0, source: str = "127.0.0.1") -> None:
        self.to_port, self.rate, self.source = to_port, rate, source
        self.up = self.down = 0  # bytes, client to hub and back
        self.dark = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                hub = socket.create_connection(("127.0.0.1", self.to_port), source_address=(self.source, 0))
            except OSError:
                return
            for end in (client, hub):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((client, hub))
            threading.Thread(target=self._pump, args=(client, hub, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(hub, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.dark.is_set():
                    time.sleep(0.01)
                sink.sendall(data)
                if up:
                    self.up += len(data)
                    time.sleep(len(data) / self.rate if self.rate else 0.0)
                else:
                    self.down += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Every connection ends now."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()
