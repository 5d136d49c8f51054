"""Fetch files and texts from https addresses."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from typing import Any

TIMEOUT = 30.0  # seconds for a server to answer; for a text, to send all of it


class DownloadError(Exception):
    """The address gave nothing usable."""


@contextmanager
def open_url(url: str) -> Iterator[Any]:
    """Open an address for reading. Errors, also while it is read: DownloadError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            if not answer.url.startswith("https://"):
                raise DownloadError(f"leads to {answer.url}, which is not https")
            yield answer
    except urllib.error.HTTPError as error:
        raise DownloadError(f"the server answers {error.code} {error.reason}") from error
    except (urllib.error.URLError, ConnectionError, TimeoutError, HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DownloadError(f"cannot be fetched: {why}") from error


@cache  # one command reads an address more than once, and must see the same text
def fetch_text(url: str, most: int) -> bytes:
    """Fetch a text of at most `most` bytes. Errors: DownloadError."""
    until, data = time.monotonic() + TIMEOUT, b""
    with open_url(url) as answer:
        wanted = int(answer.headers["Content-Length"] or 0)
        while block := answer.read1(1 << 16):
            data += block
            if len(data) > most:
                raise DownloadError(f"is larger than {most >> 10:,} KiB")
            if time.monotonic() > until:
                raise DownloadError(f"has not come within {TIMEOUT:.0f} s")
        if "text/html" in (answer.headers["Content-Type"] or ""):
            raise DownloadError("is a page to look at: take the address of the file itself (its `raw` form)")
    if wanted and len(data) != wanted:
        raise DownloadError(f"{len(data):,} bytes came, {wanted:,} were announced")
    return data
