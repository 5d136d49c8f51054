"""A Hugging Face hub on this machine that has one model: what huggingface_hub asks of it, over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ff" * 10


@contextmanager
def hub_here(folder: Path, name: str, rate: float = 1e9) -> Iterator[str]:
    """Its address. `rate`: bytes a second that it sends of a file."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked = self.path.partition("?")[0].strip("/")
            if asked.startswith(f"{name}/resolve/"):
                self.file(asked.rpartition("/")[2])
            elif asked.startswith(f"api/models/{name}/tree"):
                listed = [{"type": "file", "path": f, "size": len(b), "oid": "0"} for f, b in files.items()]
                self.answer(json.dumps(listed).encode())
            elif asked.startswith(f"api/models/{name}"):
                listed = [{"rfilename": f, "size": len(b)} for f, b in files.items()]
                self.answer(json.dumps({"id": name, "sha": COMMIT, "siblings": listed}).encode())
            else:
                self.send_error(404)

        def file(self, asked: str) -> None:
            self.answer(files[asked], ETag=f'"{sha256(files[asked]).hexdigest()}"')

        def answer(self, body: bytes, **headers: str) -> None:
            self.send_response(200)
            headers |= {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
            for header, value in headers.items():
                self.send_header(header, value)
            self.end_headers()
            for at in range(0, len(body) if self.command == "GET" else 0, 1 << 16):
                self.wfile.write(body[at : at + (1 << 16)])
                time.sleep(min(1 << 16, len(body) - at) / rate)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
