"""The whole of cocktail: launch with three peers, a fourth joins, one is killed with -9, a model comes out.

Everything goes through the command line that users have; the numbers come from its `--json` events. Exit 0
only if all of it happened: the run finished, the held-out loss fell by 40 %, the fourth took part.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COCKTAIL = [sys.executable, "-m", "cocktail_cli"]
PROMPT = "The import statement"
WRITES = ["--max-new-tokens", "60", "--temperature", "0.6", "--seed", "1"]
FALL = 0.4  # of the first held-out loss
JOIN_AT, KILL_AFTER = 0.1, 0.5  # shares of the run
VICTIM = "local-2"

Event = dict[str, Any]  # one of --json


@dataclass
class Story:
    """The run so far, as its events tell it."""

    folder: Path
    url: str = ""
    held_out: list[float] = field(default_factory=list)
    came: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    fourth: subprocess.Popen[str] | None = None
    fourth_worked: int = 0  # rounds with its packet
    killed: bool = False
    model: str = ""  # the folder of the finished one

    def follow(self, event: Event) -> None:
        """Tell one event, and do what comes next."""
        kind = event.get("event", "")
        if kind == "run_started":
            self.url = event["url"]
            say(f"run {event['run']}: recipe {event['recipe']}, {event['parameters']:,} parameters")
            say(f"cocktail join {event['url']}\n")
            say("Bytes of the sockets in a round, up/down, and how many times fewer than FP16 parameters.")
        elif kind == "eval":
            self.held_out.append(event["loss"])
            say(f"  held-out loss of the global model at step {event['step']}: {event['loss']:.4f}")
        elif kind == "peer_joined":
            self.came.append(event["peer"])
            say(f"  + {event['peer']} joined ({event['hardware']})")
        elif kind == "peer_left":
            self.left.append(f"{event['peer']} ({event['reason']})")
            say(f"  - {event['peer']} left: {event['reason']}")
        elif kind == "step":
            self.step(event)
        elif kind == "warning":
            say(f"  ! {event['message']}")
        elif kind == "run_finished":
            self.model = event["model"]
        elif "error" in event:
            say(f"  error: {event['error']['message']}")

    def step(self, event: Event) -> None:
        loss = "-" if event["loss"] is None else f"{event['loss']:.3f}"
        say(f"step {event['step']:>3}/{event['steps']} loss {loss:<6} {traffic(event)}")
        share = event["step"] / event["steps"]
        if self.fourth is None and share >= JOIN_AT:
            say("  a fourth peer is started, with nothing but the URL")
            self.fourth = join_fourth(self.url)
        self.fourth_worked += "fourth" in event["accepted"]
        if not self.killed and self.fourth_worked and share >= KILL_AFTER:
            self.killed = True
            say(f"  kill -9 {VICTIM}")
            pid = int((self.folder / "peers" / f"{VICTIM}.pid").read_text())
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends it as hard with SIGTERM

    @property
    def fall(self) -> float:
        return 1 - self.held_out[-1] / self.held_out[0] if len(self.held_out) > 1 else 0.0

    def promises(self) -> dict[str, bool]:
        """Tell for each promise of the demo whether it was kept."""
        return {
            f"the held-out loss fell by {FALL:.0%}": self.fall > FALL,
            "the fourth peer took part": self.fourth_worked > 0,
            "one peer was killed and the run went on": self.killed and bool(self.model),
            "the run finished all its steps": bool(self.model),
        }


def say(text: str = "") -> None:
    print(text, flush=True)


def join_fourth(url: str) -> subprocess.Popen[str]:
    """Start a volunteer of another machine: here another process that has the URL and nothing else."""
    join = [*COCKTAIL, "join", "-", "-y", "--quiet", "--name", "fourth"]
    process = subprocess.Popen(join, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stdin is not None
    process.stdin.write(url + "\n")
    process.stdin.close()
    return process


def traffic(event: Event) -> str:
    """Format each peer's bytes up and down in this round: `local-1 17.7/22.5 kB (115x/90x)`."""
    parts = []
    for peer in event["up_bytes"]:
        up, down = event["up_bytes"][peer] / 1e3, event["down_bytes"].get(peer, 0) / 1e3
        beside = [f"{event[key][peer]:.0f}x" for key in ("ratio_up", "ratio_down") if peer in event[key]]
        parts.append(f"{peer} {up:.1f}/{down:.1f} kB ({'/'.join(beside) or 'catching up'})")
    return "  ".join(parts)


def main() -> int:
    started = time.monotonic()
    free = (p for n in range(1, 1000) if not (p := Path("outputs") / f"demo-{n}").exists())
    story = Story(next(free))
    launch = ["launch", "smoke", "--peers", "3", "--port", "0", "--bind", "127.0.0.1"]
    launch += ["-o", str(story.folder), "--json"]
    say("$ cocktail " + " ".join(launch))
    with subprocess.Popen([*COCKTAIL, *launch], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            story.follow(json.loads(line))
    if story.fourth is not None:
        story.fourth.wait(60)
    losses = " -> ".join(f"{loss:.3f}" for loss in story.held_out)
    say(f"\nheld-out loss        {losses}  ({story.fall:.0%} less)")
    say(f"came                 {', '.join(story.came)}")
    say(f"left                 {', '.join(story.left) or 'no peer'}")
    if story.model:
        generate = [*COCKTAIL, "generate", story.model, PROMPT, *WRITES]
        say(f"model                {story.model}")
        say(f'sample               $ cocktail generate {story.model} "{PROMPT}" {" ".join(WRITES)}')
        say(subprocess.run(generate, capture_output=True, text=True, check=True).stdout.strip())
    say(f"\ntook                 {time.monotonic() - started:.0f} s")
    broken = [promise for promise, kept in story.promises().items() if not kept]
    for promise in broken:
        say(f"NOT SO: {promise}")
    return 1 if broken or run.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
