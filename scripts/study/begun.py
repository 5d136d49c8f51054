"""A cell under way: its clock, and the file from which it goes on where it was cut short."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from recipes.training.trainer import load_states, states_of

if TYPE_CHECKING:
    from scripts.study.train import Swarm

MOST = 4 << 30  # bytes of a cell that are saved; a larger one begins anew
APART = 60.0  # seconds between two savings, at least


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


@dataclass
class Begun:
    """Progress of a cell: what is done of it, and what it may still take.

    Args:
        until: of time.monotonic(); a cell that is not done by then is cut short.
        file: what is saved of it; None: nothing is.
    """

    until: float = float("inf")
    file: Path | None = None
    say: Callable[[str], object] | None = None  # told the loss along the way
    step: int = 0  # the next one
    curve: tuple[float, ...] = ()
    seconds: float = 0.0  # of earlier runs
    saved: float = float("-inf")

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def measured(self, loss: float, share: float) -> None:
        """Add a loss to the curve."""
        self.curve = (*self.curve, loss)
        if self.say is not None:
            self.say(f"  {share:.0%} of the steps: held-out loss {loss:.4f}")

    def load(self, swarm: Swarm) -> None:
        """Go on where the file's run was."""
        if self.file is None or not self.file.exists():
            return
        with safe_open(self.file, "pt") as file:
            said = json.loads(file.metadata()["cell"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.step, self.curve, self.seconds = said["step"], tuple(said["curve"]), said["seconds"]
        swarm.round, swarm.up, swarm.down = said["round"], said["up"], said["down"]
        swarm.global_model.round = swarm.round  # nobody looks at its fingerprint
        for name, place in places(swarm):
            place.copy_(tensors[name])
        for number, peer in enumerate(swarm.peers):
            own = f"{number}."
            its = {name.removeprefix(own): one for name, one in tensors.items() if name.startswith(own)}
            peer.steps = said["steps"]
            peer.noise.load(its["noise"].to(peer.flat.vector.device))
            for which, optimizer in enumerate(peer.optimizers):
                own = f"optimizer{which}."
                load_states(
                    optimizer, {n.removeprefix(own): one for n, one in its.items() if n.startswith(own)}
                )

    def save(self, swarm: Swarm, step: int, seconds: float) -> None:
        """Save what the steps before this one have left; not amid a round, nor what is too large."""
        if self.file is None or swarm.flights or step % swarm.setting.local_steps or swarm.setting.turns:
            return
        if not self.over and time.monotonic() < self.saved + APART:
            return
        tensors = dict(places(swarm))
        for number, peer in enumerate(swarm.peers):
            tensors[f"{number}.noise"] = peer.noise.state()
            for which, optimizer in enumerate(peer.optimizers):
                states = states_of(optimizer).items()
                tensors |= {f"{number}.optimizer{which}.{name}": one for name, one in states}
        if sum(one.nbytes for one in tensors.values()) > MOST:
            return
        swarm.count_bytes()
        said = {"step": step, "curve": self.curve, "seconds": self.seconds + seconds, "round": swarm.round}
        said |= {"up": swarm.up, "down": swarm.down, "steps": swarm.peers[0].steps}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".part")
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, beside, {"cell": json.dumps(said)}
        )
        beside.replace(self.file)
        self.saved = time.monotonic()


def places(swarm: Swarm) -> Iterator[tuple[str, Tensor]]:
    """Name the vectors of a swarm, in whose place a saved cell's are put."""
    yield "global", swarm.global_model.vector
    for number, peer in enumerate(swarm.peers):
        yield f"{number}.x", peer.flat.vector
        if peer.ahead is not None:
            yield f"{number}.ahead", peer.ahead
    yield from swarm.feedback()
