"""The fake device itself: it forgives nothing that a real one would not."""

from pathlib import Path

import fake_cuda as fake
import pytest
import torch
import triton
import triton.language as tl
from fake_triton import WrongDevice

HERE = Path(__file__).name


@triton.jit
def doubled(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def test_there_are_two_devices_whose_tensors_do_not_mix() -> None:
    a, b = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")

    assert torch.cuda.device_count() == 2
    assert (a + a).device == torch.device("cuda:0")
    for other in (b, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            a + other


def test_fresh_memory_holds_nan_and_so_does_freed_memory() -> None:
    fresh = torch.empty(8, device="cuda")
    assert fresh.isnan().all()
    assert (torch.empty(8, dtype=torch.int64, device="cuda") == -1).all()
    assert torch.empty(8, dtype=torch.bfloat16, device="cuda").isnan().all()


def test_memory_runs_out_where_a_test_says_so() -> None:
    before = fake.peak_from_here()
    one = torch.empty(1000, device="cuda")
    fake.fail_at(2)
    two = torch.empty(1000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1000, device="cuda")
    del two
    fake.limit(fake.held() + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1000, device="cuda")

    assert fake.peak() - before == 2 * 4096
    fake.limit(0)
    assert one.isnan().all()


def test_traffic_is_counted_by_file_and_line() -> None:
    x = torch.arange(1000, dtype=torch.float32)
    with fake.counted() as traffic:
        there = x.to("cuda")
        there.sum().item()
        there.cpu()
        there[there > 3]

    assert sum(traffic.to_device.values()) == 4000
    assert sum(traffic.to_host.values()) == 4000 + 4 + 8
    assert sum(traffic.waits.values()) == 4
    assert all(HERE in line for line in [*traffic.to_device, *traffic.to_host, *traffic.waits])


def test_a_kernel_is_launched_where_its_pointers_are() -> None:
    x, y = torch.ones(10, device="cuda:1"), torch.empty(10, device="cuda:1")
    with pytest.raises(WrongDevice):
        doubled[(1,)](x, y, 10, 16)
    with torch.cuda.device(x.device):
        doubled[(1,)](x, y, 10, 16)

    assert torch.equal(y, 2 * x)


def test_a_copy_that_does_not_block_arrives_once_it_was_waited_for() -> None:
    x, pinned = torch.ones(100, device="cuda"), torch.empty(100, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()

    assert torch.equal(pinned, torch.ones(100))


def test_pinned_memory_stays_as_it_is_until_its_copy_is_done() -> None:
    pinned = torch.ones(100).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    pinned.zero_()
    with pytest.raises(RuntimeError, match="changed while"):
        torch.cuda.synchronize()

    assert there.sum().item() == 100


def test_streams_that_nothing_orders_race() -> None:
    side, x = torch.cuda.Stream(), torch.ones(100, device="cuda")
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="race"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    with pytest.raises(RuntimeError, match="may still read"):
        x.zero_()
    torch.cuda.current_stream().wait_stream(side)
    x.zero_()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="race"):
        doubled[(1,)](x, torch.empty(100, device="cuda"), 100, 128)
    torch.cuda.synchronize()


def test_memory_that_another_stream_uses_is_not_freed_under_it() -> None:
    side = torch.cuda.Stream()
    for recorded in (True, False):
        x = torch.ones(100, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        if recorded:
            x.record_stream(side)
        del x
        if recorded:
            fake.raise_race()
        else:
            with pytest.raises(RuntimeError, match="freed"):
                fake.raise_race()
