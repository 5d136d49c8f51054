"""The codec and the algorithm on a GPU: the right device, the bits of the host, few bytes, few waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from compress import Cocktail, decode

DEVICES = ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("device", DEVICES)
def test_each_kernel_is_launched_on_the_device_of_its_tensors_in_any_thread(device: str) -> None:
    """The second GPU, in a thread whose current device is the first: as the exchange's is."""
    mix = Cocktail(random_ratio=0.5, block_size=16)
    x, y = (torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def exchange() -> tuple[bytes, torch.Tensor]:
        sample = mix.draw(len(x), 1, 3)
        there = x.to(device)
        packet = mix.encode(sample.difference(there, y.to(device))).packet
        return packet, sample.add_(there, decode(packet, sample.m, device)).cpu()

    with ThreadPoolExecutor(1) as pool:
        packet, moved = pool.submit(exchange).result()
    sample = mix.draw(len(x), 1, 3)

    assert torch.equal(moved, sample.add_(x.clone(), decode(packet, sample.m)))
