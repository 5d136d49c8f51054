"""What scripts/demo shows: launch with three peers, a fourth joins, one is killed with -9, a model comes out.

Everything goes through the command line that users have; the numbers come from its `--json` events. Ends with
exit 0 only if all of it happened: the run finished, the held-out loss fell by 40 %, the fourth took part.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COCKTAIL = [sys.executable, "-m", "cocktail_cli"]
PROMPT = "The import statement"
WRITES = ["--max-new-tokens", "60", "--temperature", "0.6", "--seed", "1"]
FALL = 0.4  # of the first held-out loss
JOIN_AT, KILL_AFTER = 0.1, 0.5  # shares of the run

Told = dict[str, Any]  # one event of --json


@dataclass
class Story:
    """What happened so far."""

    folder: Path
    url: str = ""
    parameters: int = 0
    held_out: list[float] = field(default_factory=list)
    came: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    fourth: subprocess.Popen[str] | None = None
    fourth_worked: int = 0  # rounds with its packet
    killed: str = ""
    finished: Told | None = None


def say(text: str = "") -> None:
    print(text, flush=True)


def free_folder() -> Path:
    """outputs/demo-1, or the first after it that is not there yet."""
    return next(p for n in range(1, 1000) if not (p := Path("outputs") / f"demo-{n}").exists())


def events(process: subprocess.Popen[str]) -> Iterator[Told]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def join_fourth(url: str) -> subprocess.Popen[str]:
    """A volunteer at another machine; here it is another process that has the URL and nothing else."""
    process = subprocess.Popen(
        [*COCKTAIL, "join", "-", "-y", "--quiet", "--name", "fourth"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(url + "\n")
    process.stdin.close()
    return process


def kill_9(folder: Path, name: str) -> None:
    pid = int((folder / "peers" / f"{name}.pid").read_text())
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends it as hard with SIGTERM


def traffic(event: Told) -> str:
    """`local-1 17.7/22.5 kB (115x/90x)`: up and down of each peer in this round, beside FP16 parameters."""
    parts = []
    for peer in event["up_bytes"]:
        up, down = event["up_bytes"][peer] / 1e3, event["down_bytes"].get(peer, 0) / 1e3
        beside = [f"{event[key][peer]:.0f}x" for key in ("ratio_up", "ratio_down") if peer in event[key]]
        parts.append(f"{peer} {up:.1f}/{down:.1f} kB ({'/'.join(beside) or 'catching up'})")
    return "  ".join(parts)


def follow(story: Story, event: Told) -> None:
    """Tell one event, and do what the story wants at this point."""
    kind = event["event"]
    if kind == "run_started":
        story.url, story.parameters = event["url"], event["parameters"]
        say(f"run {event['run']}: recipe {event['recipe']}, {event['parameters']:,} parameters")
        say(f"cocktail join {event['url']}\n")
        say("Bytes of the sockets in a round, up/down, and how many times fewer than FP16 parameters.")
    elif kind == "eval":
        story.held_out.append(event["loss"])
        say(f"  held-out loss of x' at step {event['step']}: {event['loss']:.4f}")
    elif kind == "peer_joined":
        story.came.append(event["peer"])
        say(f"  + {event['peer']} joined ({event['hardware']})")
    elif kind == "peer_left":
        story.left.append(f"{event['peer']} ({event['reason']})")
        say(f"  - {event['peer']} left: {event['reason']}")
    elif kind == "step":
        step_done(story, event)
    elif kind == "warning":
        say(f"  ! {event['message']}")
    elif kind == "run_finished":
        story.finished = event
    elif "error" in event:
        say(f"  error: {event['error']['message']}")


def step_done(story: Story, event: Told) -> None:
    loss = "-" if event["loss"] is None else f"{event['loss']:.3f}"
    say(f"step {event['step']:>3}/{event['steps']} loss {loss:<6} {traffic(event)}")
    share = event["step"] / event["steps"]
    if story.fourth is None and share >= JOIN_AT:
        say("  a fourth peer is started, with nothing but the URL")
        story.fourth = join_fourth(story.url)
    story.fourth_worked += "fourth" in event["accepted"]
    if not story.killed and story.fourth_worked and share >= KILL_AFTER:
        story.killed = "local-2"
        say(f"  kill -9 {story.killed}")
        kill_9(story.folder, story.killed)


def sample(folder: str) -> str:
    command = [*COCKTAIL, "generate", folder, PROMPT, *WRITES]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def checks(story: Story) -> dict[str, bool]:
    """What the demo promises, and whether it was so."""
    first, last = (story.held_out[0], story.held_out[-1]) if len(story.held_out) > 1 else (0.0, 0.0)
    return {
        f"the held-out loss fell by {FALL:.0%}": last < (1 - FALL) * first,
        "the fourth peer took part": story.fourth_worked > 0,
        "one peer was killed and the run went on": bool(story.killed) and story.finished is not None,
        "the run finished all its steps": story.finished is not None,
    }


def main() -> int:
    story, started = Story(free_folder()), time.monotonic()
    command = [*COCKTAIL, "launch", "smoke", "--peers", "3", "--port", "0", "--bind", "127.0.0.1"]
    command += ["-o", str(story.folder), "--json"]
    say("$ cocktail " + " ".join(command[3:]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launch:
        for event in events(launch):
            if "event" in event or "error" in event:
                follow(story, event | {"event": event.get("event", "")})
    if story.fourth is not None:
        story.fourth.wait(60)
    say()
    if story.held_out:
        fall = 1 - story.held_out[-1] / story.held_out[0]
        say(
            "held-out loss of x'  "
            + " -> ".join(f"{loss:.3f}" for loss in story.held_out)
            + f"  ({fall:.0%} less)"
        )
    say(f"came                 {', '.join(story.came)}")
    say(f"left                 {', '.join(story.left) or 'nobody'}")
    if story.finished is not None:
        say(f"model                {story.finished['model']}")
        command = f'cocktail generate {story.finished["model"]} "{PROMPT}" {" ".join(WRITES)}'
        say(f"sample               $ {command}")
        say(sample(story.finished["model"]))
    say(f"\ntook                 {time.monotonic() - started:.0f} s")
    failed = [promise for promise, kept in checks(story).items() if not kept]
    for promise in failed:
        say(f"NOT SO: {promise}")
    return 1 if failed or launch.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
