"""Who this machine is in every run: a CURVE key pair of its own, made at first use.

    COCKTAIL_HOME/peer.json, readable by its user alone

A hub learns the public key from the handshake, which cannot be passed without the secret one. All processes
of a user on a machine are the same peer, twice or more. Who deletes the file is a stranger to every run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure

from .cache_locks import claimed
from .run_registry import home, write_private

if TYPE_CHECKING:
    from transport.protocol import CurveKeys

FILE = "peer.json"


def own_keys() -> CurveKeys:
    """This machine's key pair. Raises Failure (preflight) where its file is damaged."""
    from transport.protocol import CurveKeys

    path = home() / FILE
    if not path.exists():
        make(path, CurveKeys.generate())
    try:
        keys = CurveKeys(**json.loads(path.read_text(encoding="utf-8")))
        keys.check()
    except (ValueError, TypeError) as error:
        hint = f"remove {path}: this machine is then a new peer to every run"
        raise Failure("preflight", f"the key pair in {path} is damaged: {error}", hints=(hint,)) from None
    return keys


@contextmanager
def under(run: str, name: str) -> Iterator[bool]:
    """While a process of this machine is in a run under a name. False: another one is, too.

    A hub cannot tell a peer that was killed and comes back from a second one beside the first, whose
    connection is lost at the moment: their key is the same.
    """
    place = home() / "here" / hashlib.sha256(f"{run}/{name}".encode()).hexdigest()[:32]
    with claimed(place) as mine:
        try:
            yield mine == place
        finally:
            mine.rmdir()


def make(path: Path, keys: CurveKeys) -> None:
    """Write a new pair, whole; where another process was quicker, its pair is the one."""
    mine = path.with_name(f"{FILE}.{os.getpid()}.new")
    write_private(mine, json.dumps({"public": keys.public, "secret": keys.secret}))
    try:
        os.link(mine, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        os.replace(mine, path)
    finally:
        mine.unlink(missing_ok=True)
