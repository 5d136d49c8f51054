"""SHA-256 of long files: blocks on all cores, each byte read once, and what was hashed is remembered.

A record is one JSON file in a folder of the caller's. It holds for as long as the file's size, times of
change (mtime and ctime, in ns) and inode are those that were hashed. No write keeps all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HASH_BLOCK = 1 << 20  # bytes under one hash (transport.transfer has the same)
AT_ONCE = 16 * HASH_BLOCK  # bytes that a thread hashes; a file of fewer is hashed anew each time
FRESH = 2.0  # seconds: of two writes within a tick of a file system's clock the second may leave no trace


@dataclass(frozen=True)
class BaseFile:
    """One file of the base, as announced to peers."""

    name: str  # no directories
    size: int
    sha256: str  # "" where only the blocks were asked for
    blocks: bytes = b""  # SHA-256 of each MiB, one after the other: a peer repairs a damaged file by them


def hash_file(
    path: Path, memory: Path | None = None, whole: bool = True, go_on: Callable[[], object] = lambda: None
) -> BaseFile:
    """Hash a file and its blocks. `go_on` is called now and then, and may raise.

    Args:
        memory: folder of what is remembered; None: nothing is, and nothing is looked up.
        whole: hash the whole as well, which takes one thread as long as all blocks take many.
    """
    status = path.stat()
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    record = None
    if memory is not None and status.st_size >= AT_ONCE:
        record = memory / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or damaged: hash anew
            known = json.loads(record.read_bytes())
            if known["state"] == state and (known["sha256"] or not whole):
                return BaseFile(path.name, state[0], known["sha256"], bytes.fromhex(known["blocks"]))
    size, sha256, blocks = _hashed(path, whole, go_on)
    if record is not None and size == state[0] and time.time() - max(state[1:3]) / 1e9 > FRESH:
        part = record.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a full disk: it is hashed again the next time
            record.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"state": state, "sha256": sha256, "blocks": blocks.hex()}))
            part.replace(record)
    return BaseFile(path.name, size, sha256, blocks)


def _hashed(path: Path, whole: bool, go_on: Callable[[], object]) -> tuple[int, str, bytes]:
    digest, size, blocks, cores = hashlib.sha256(), 0, list[bytes](), os.cpu_count() or 1
    pool, asked = ThreadPoolExecutor(cores), deque[Future[bytes]]()
    try:
        with path.open("rb") as file:
            while (data := file.read(AT_ONCE)) or not size + len(asked):
                go_on()
                asked.append(pool.submit(_blocks_of, data))
                if whole:
                    digest.update(data)
                size += len(data)
                if len(asked) > cores:
                    blocks.append(asked.popleft().result())
        blocks.extend(one.result() for one in asked)
    finally:
        pool.shutdown(cancel_futures=True)
    return size, digest.hexdigest() if whole else "", b"".join(blocks)


def _blocks_of(data: bytes) -> bytes:
    """Hash each block; of no data, one empty block."""
    starts = range(0, max(len(data), 1), HASH_BLOCK)
    view = memoryview(data)
    return b"".join(hashlib.sha256(view[at : at + HASH_BLOCK]).digest() for at in starts)
