"""A volunteer's program: `python conv_peer.py URL NAME [SECONDS]`, with seconds to wait in each step."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import cocktail_cli


def main(url: str, name: str, seconds: float = 0.0) -> None:
    """Train on noise until the run is over; print a line for each step."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with cocktail_cli.join_with(url, model, optimizer, name=name) as swarm:
        while True:
            loss = cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(0, 4, (8,)))
            loss.backward()
            swarm.step(loss, 8)
            print("step", flush=True)
            time.sleep(seconds)
    print(f"ended: {swarm.reason}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(float, sys.argv[3:]))
