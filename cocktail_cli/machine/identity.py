"""This machine's identity in every run: a CURVE key pair, made at first use.

    COCKTAIL_HOME/peer.json, readable by its user alone

The handshake proves to a hub that the peer has the secret key. All processes of one user on a machine have
the same identity. A machine whose file was deleted is a new peer to every run.
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

from .cache_locks import locked_folder
from .run_registry import home, write_private

if TYPE_CHECKING:
    from transport.protocol import CurveKeys

FILE = "peer.json"


def own_keys() -> CurveKeys:
    """Load this machine's key pair, made if missing. Raises Failure (preflight) where its file is damaged."""
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
def registered_as(run: str, name: str) -> Iterator[bool]:
    """Register this process in a run under a name; yield False where another live process has that name too.

    A hub cannot tell a killed peer that comes back from a second process beside one whose connection is lost
    at the moment: their keys are the same.
    """
    place = home() / "here" / hashlib.sha256(f"{run}/{name}".encode()).hexdigest()[:32]
    with locked_folder(place) as mine:
        try:
            yield mine == place
        finally:
            mine.rmdir()


def make(path: Path, keys: CurveKeys) -> None:
    """Write a new pair atomically; if another process was quicker, its pair stays."""
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
