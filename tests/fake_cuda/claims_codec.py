"""The codec and the algorithm on a GPU: the right device, the bits of the host, few bytes, few waits."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fake_cuda as fake
import pytest
import torch
from a_peer import PRECISIONS, Hub, OneRound, peer_on, recipe_of, small_samples

from cocktail_cli.machine import no_kernels
from compress import Cocktail, decode, fingerprint, triton_kernels
from compress import backends as dispatch
from recipes.algorithm import (
    DecodedPacket,
    GlobalModel,
    OuterOptimizer,
    compressor_of,
    replay,
    warm_up_codec,
)
from recipes.planning.memory_plan import exchange_part
from recipes.training import finetune
from scripts.bench import phases
from scripts.study.device_exchange import DeviceExchange

FEW, LONG = 160, 400  # sides of a small table, and of one whose packets stay packed (`small_samples`)
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


def test_where_triton_cannot_compile_the_host_encodes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No working compiler, and nothing in Triton's cache: an image without gcc, or without Python.h."""
    v = torch.randn(30_000, generator=torch.Generator().manual_seed(1))
    mix = Cocktail(topk_ratio=0.2)
    with monkeypatch.context() as image:
        for name, value in {
            "CC": "/bin/false",
            "TRITON_CACHE_DIR": tmp_path,
            "TRITON_LIBCUDA_PATH": tmp_path,
        }.items():
            image.setenv(name, str(value))
        image.setenv("TRITON_INTERPRET", "0")  # kernels are launched, which compiles Triton's launcher
        image.delitem(sys.modules, "compress.triton_kernels")
        image.delattr("compress.triton_kernels")
        dispatch._tried.cache_clear()
        why = no_kernels("cuda:1")
        packet = mix.encode(v.to("cuda:1")).packet
        sample = mix.draw(len(v), 1, 1)
        moved = sample.add_(v.to("cuda:1"), decode(mix.encode(sample.take(v)).packet, sample.m, "cuda:1"))
    dispatch._tried.cache_clear()

    assert why is not None
    assert "/bin/false" in why
    assert "gcc" in why
    assert packet == mix.encode(v, kernels=False).packet
    assert torch.equal(
        moved.cpu(), sample.add_(v.clone(), decode(mix.encode(sample.take(v)).packet, sample.m))
    )
    assert no_kernels("cuda:1") is None


@pytest.mark.parametrize("where", ["accelerator", "cpu"])
def test_a_warm_codec_has_launched_each_kernel_of_an_exchange(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_samples(monkeypatch)
    around, launched, run = Around(where), [set[str]()], triton_kernels.launch

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched[-1].add(kernel.fn.__name__)
        run(kernel, *arguments, **options)

    monkeypatch.setattr(triton_kernels, "launch", launch)
    monkeypatch.setattr("recipes.algorithm.compressor.WORTH", 1 << 15)
    warm_up_codec(compressor_of(around.peer.recipe.compression), LONG**2, "cuda:0")
    launched.append(set())
    around.finish(around.start())

    assert launched[1]
    assert launched[1] <= launched[0]


class Around:
    """One exchange of a peer with itself: what it makes of x and x'."""

    def __init__(self, where: str, side: int = LONG, **compression: Any) -> None:
        self.peer = peer_on("cuda", recipe_of(state_device=where, **compression), side)
        step = torch.randn(side**2, generator=torch.Generator().manual_seed(3))
        self.peer.worker.x.add_(step.to("cuda"), alpha=0.01)

    def start(self) -> DecodedPacket:
        return self.peer.worker.start()

    def finish(self, sent: DecodedPacket) -> None:
        worker = self.peer.worker
        aggregate = worker.global_model.decode(sent.packet)
        worker.global_model.move(aggregate)
        worker.follow(aggregate, sent)

    def ends(self) -> list[torch.Tensor]:
        worker = self.peer.worker
        return [worker.x.cpu(), worker.global_model.vector.cpu()]


@pytest.mark.parametrize(
    ("where", "p", "decay"), [("accelerator", 1.0, 1.0), ("cpu", 0.5, 1.0), ("accelerator", 0.5, 0.9)]
)
def test_an_exchange_waits_for_the_device_once_and_takes_the_memory_that_is_planned(
    where: str, p: float, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 8 bytes a sent value are brought there, and the sample of an x' that is kept on the host. The
    fingerprint is waited for where it is asked for, and for nothing that was queued since."""
    small_samples(monkeypatch)
    more = {"random_ratio": p, "error_decay": decay, "quant_bits": 2}
    Around(where, **more).finish(Around(where, **more).start())  # tables are brought there once
    around = Around(where, **more)
    worker, before = around.peer.worker, fake.peak_from_here()
    with fake.counted() as start:
        sent = around.start()
    with fake.counted() as finish:
        around.finish(sent)
    taken, since = fake.peak() - before, torch.empty(LONG**2, pin_memory=True)
    since.copy_(worker.x, non_blocking=True)
    told = worker.global_model.fingerprint
    (update,) = sent.shard_updates
    m, k = update.sample.m, update.update.count
    elsewhere = 4 * m if where == "cpu" else 0
    brought = sum(start.to_device.values()) + sum(finish.to_device.values()) - elsewhere

    assert k == pytest.approx(0.2 * m, rel=0.02)
    assert sum(start.waits.values()) == 1, start.waits
    assert not finish.waits
    assert since.isnan().all()
    assert told == fingerprint(worker.global_model.vector)
    assert brought < 8 * k, (start.to_device, finish.to_device)
    assert sum(start.to_host.values()) < 2 * k, start.to_host
    planned = exchange_part(around.peer.recipe.compression, LONG**2, beside=0, gpu=True).bytes
    levels = 1 << 20  # bytes while they are fitted, of any model
    assert 0.9 * planned < taken < 1.1 * planned + levels


@pytest.mark.parametrize("where", ["accelerator", "cpu"])
@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"quant_bits": 2}, 1),
        ({"quant_bits": 2, "shards": 3}, 1),
        ({"quant_bits": 2, "topk_ratio": 0.05}, 1),  # over 1 % too many pass the threshold, and are cut off
        ({"quant_bits": 1, "topk_ratio": 1.0}, 1),
        ({"shards": 3}, 2),  # of 4 bits the host fits the levels
        ({"quant_bits": 16, "shards": 2}, 1),  # the host quantizes
        ({"topk_chunk": 64, "shards": 2}, 1),  # likewise
    ],
    ids=str,
)
def test_an_exchange_of_all_shards_waits_once_when_the_bytes_of_its_packet_are_there(
    changes: dict[str, Any], waits: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back waits for nothing until the fingerprint of an x' on the device is told."""
    small_samples(monkeypatch)
    around = Around(where, random_ratio=0.5, **changes)
    with fake.counted() as start:
        sent = around.start()
    with fake.counted() as finish:
        around.finish(sent)
    with fake.counted() as told:
        assert around.peer.worker.global_model.fingerprint

    assert sum(start.waits.values()) == waits, start.waits
    assert not finish.waits
    assert sum(told.waits.values()) == (where == "accelerator")


@pytest.mark.parametrize("where", ["accelerator", "cpu"])
def test_each_phase_of_an_exchange_is_measured_and_nobody_waits_for_that(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_samples(monkeypatch)
    wanted, waits, spans = recipe_of(state_device=where, random_ratio=0.5), [], list[phases.Span]()
    for measured in (False, True):
        hub = Hub(wanted, [OneRound(t, t) for t in range(3)], side=LONG)
        peer = peer_on("cuda", wanted, LONG)
        with ExitStack() as stack:
            if measured:
                spans = stack.enter_context(phases.measured(peer)).spans
            traffic = stack.enter_context(fake.counted())
            list(finetune(hub, peer, now=0))
        waits.append(sum(traffic.waits.values()))

    assert waits[0] == waits[1]
    assert {span.phase for span in spans} == {*phases.EXCHANGE, phases.COMPUTE, phases.OPTIMIZER}


@pytest.mark.parametrize("changes", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("where", ["accelerator", "cpu"])
def test_an_exchange_has_a_stream_of_its_own_beside_the_compute(where: str, changes: dict[str, Any]) -> None:
    """Nothing of it queues behind the micro-batches, no streams race, and x' has the bits of the packets."""
    wanted = recipe_of(state_device=where, random_ratio=0.5, local_steps=2, error_decay=0.9, **changes)
    rounds = [OneRound(t, 2 * t, eval_parts=t % 2) for t in range(4)]
    hub, peer = Hub(wanted, rounds, side=FEW), peer_on("cuda", wanted, FEW)
    replayed = GlobalModel(
        peer.worker.global_model.vector.cpu().clone(), compressor_of(wanted.compression), wanted.training.seed
    )
    with fake.counted() as traffic:
        list(finetune(hub, peer, now=0))
    *_, replayed = replay(replayed, hub.aggregates)

    assert {stream for thread, stream in traffic.waited if thread.startswith("exchange")} == {
        peer.side.stream.stream_id
    }
    assert torch.equal(replayed.vector, peer.worker.global_model.vector.cpu())
    assert replayed.fingerprint == peer.worker.global_model.fingerprint


def test_an_exchange_has_the_same_result_where_the_system_lets_nothing_be_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around, made = Around("cpu", FEW), torch.empty
    around.finish(around.start())

    def empty(*size: Any, pin_memory: bool = False, **kind: Any) -> torch.Tensor:
        return refused() if pin_memory else made(*size, **kind)

    def refused(*_: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    other = Around("cpu", FEW)
    other.finish(other.start())

    assert all(map(torch.equal, around.ends(), other.ends()))


@pytest.mark.parametrize(
    ("where", "keys"),
    [("accelerator", {}), ("cpu", {}), ("accelerator", {"topk_chunk": 64, "shards": 2})],
    ids=["x' there", "x' here", "by chunks, two shards"],
)
def test_an_exchange_in_which_memory_runs_out_has_the_same_result(where: str, keys: dict[str, int]) -> None:
    """At each allocation in turn: encoded again on the host, applied again in smaller windows."""
    around = Around(where, FEW, **keys)
    around.finish(sent := around.start())
    want = around.ends()
    before = fake.allocations()
    again = Around(where, FEW, **keys)
    made = fake.allocations() - before  # of the peer itself
    again.finish(again.start())
    count = fake.allocations() - before - made
    short = 0
    for n in range(1, count, 1 if keys else max(count // 12, 1)):
        around = Around(where, FEW, **keys)
        fake.fail_at(n)
        mine = around.start()
        around.finish(mine)
        fake.fail_at(0)
        short += around.peer.worker.short_of_memory
        if mine.packet == sent.packet:  # the host may round a code at a border differently
            assert all(map(torch.equal, around.ends(), want))
        residual = around.ends()[0] - around.ends()[1]
        torch.testing.assert_close(residual, want[0] - want[1], rtol=0, atol=0.02)
    assert short


def test_candidates_that_are_all_equal_take_no_more_memory_than_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Adam's first step every coordinate has moved as far."""
    small_samples(monkeypatch)
    k, peaks = 1 << 14, []
    for v in (torch.randn(1 << 17, device="cuda"), torch.ones(1 << 17, device="cuda")):
        before = fake.peak_from_here()
        found = triton_kernels.largest(v, triton_kernels.first_look(len(v), k))
        peaks.append(fake.peak() - before)

        assert k <= int(found.count) <= 1.01 * k
    assert peaks[1] <= 1.05 * peaks[0]


def test_the_fingerprint_of_a_device_is_that_of_the_host() -> None:
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(1))

    assert fingerprint(x.to("cuda:1")) == fingerprint(x)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_round_of_the_study_waits_for_nothing_until_its_bytes_are_asked_for(bits: int) -> None:
    model = GlobalModel(torch.zeros(5000, device="cuda"), Cocktail(0.3, 0.2, bits), 1)
    exchange = DeviceExchange(model, OuterOptimizer("packets"), decay=0.9)
    xs = [torch.randn(5000, generator=torch.Generator().manual_seed(seed)).to("cuda") for seed in range(4)]
    exchange.finish(xs, exchange.start(xs, 0), [1.0] * 4)  # tables are brought there once
    with fake.counted() as traffic:
        exchange.finish(xs, exchange.start(xs, 1), [1.0] * 4)

    assert not traffic.waits
    assert all(exchange.bytes_sent())
    assert exchange.bytes_sent() == (0, 0)
