"""Files with one byte that is another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def altered(path: Path, at: int, flip: int = 1) -> Iterator[None]:
    """While one byte of a file is another one."""
    was = path.read_bytes()
    at %= len(was)
    path.write_bytes(was[:at] + bytes([was[at] ^ flip]) + was[at + 1 :])
    try:
        yield
    finally:
        path.write_bytes(was)
