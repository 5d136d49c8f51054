"""`cocktail` as it is, but each gradient of a peer takes a given time, and each round is printed.

    python -m scripts.comparison.paced cocktail '{"args": ["join", URL, ...], "sample_s": 0.1}'

The time stands for a device.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import recipes.training.loop as loop
from cocktail_cli.main import main as command
from scripts.swarms.processes import say


def main(args: list[str], sample_s: float | None = None) -> None:
    compute, join = loop.compute, loop.join

    def slow(link: Any, peer: Any, round: int, number: int, lease: Any, *more: Any) -> Any:
        done = compute(link, peer, round, number, lease, *more)
        if done is None or sample_s is None:
            return done
        until = done.started + sample_s * len(lease)
        while (left := until - time.monotonic()) > 0 and not link.leaving.is_set():
            time.sleep(min(0.05, left))
        return replace(done, finished=time.monotonic())

    def told(link: Any, peer: Any, done: Any) -> Any:
        step = join(link, peer, done)
        row = {"round": step.round, "end": time.monotonic(), "accepted": step.accepted}
        row |= {"steps": step.local_steps, "sent": step.sent_bytes, "fingerprint": step.fingerprint}
        say("round", **row)
        return step

    loop.compute, loop.join = slow, told
    sys.argv = ["cocktail", *args]
    command()


if __name__ == "__main__":
    main(**json.loads(sys.argv[2]))
