"""A stand-in for `urlopen` that answers once."""

from __future__ import annotations

import io


class Web:
    def __init__(
        self,
        body: bytes,
        announced: int | None = None,
        url: str = "https://example.org/my.jsonl",
        kind: str = "text/plain",
        etag: str | None = None,
    ) -> None:
        self.body, self.url, self.asked = io.BytesIO(body), url, 0
        length = len(body) if announced is None else announced
        self.headers = {"Content-Length": str(length), "Content-Type": kind, "ETag": etag}

    def __call__(self, url: str, timeout: float) -> Web:
        self.asked += 1
        return self

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        return self.body.read(size)

    def read1(self, size: int) -> bytes:
        return self.body.read1(size)
