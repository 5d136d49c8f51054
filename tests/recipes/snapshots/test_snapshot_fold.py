"""Snapshots: the bits of `replay` as a folder that loads, in bounded memory, whole or not there at all."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import BUILTIN, CONFIGS, TIED

from compress import Cocktail, fingerprint, join
from recipes import snapshots
from recipes.algorithm import GlobalModel, replay
from recipes.errors import ModelError
from recipes.models import load_model, open_vector
from recipes.snapshots import (
    Fold,
    KnownFingerprint,
    SnapshotCancelled,
    WrongFold,
    list_snapshots,
    remove_unfinished_snapshots,
    write_chunk_hashes,
)
from recipes.training import FlatParameters
from recipes.weight_files import (
    Layout,
    StoredTensor,
    StoredVector,
    atomic_folder,
    layout_of,
    model_config_files,
    read_header,
    write_model_files,
)

MIX = Cocktail(random_ratio=0.3, topk_ratio=0.2, quant_bits=4, block_size=64)


def packets_of(mix: Cocktail, size: int, rounds: range, seed: int = 7) -> list[bytes]:
    """Packets that aggregators might have sent in these rounds, of each p of the run in turn; of several
    shards one has not moved in each round.
    """
    made = []
    for round in rounds:
        noise, parts = torch.Generator().manual_seed(round), []
        ratios = mix.random_ratios or (mix.random_ratio,)
        own = replace(mix, random_ratio=ratios[round % len(ratios)])
        for shard in mix.cut(size, seed):
            m = own.draw(shard.size, shard.seed, round).m
            moved = mix.shards == 1 or round % mix.shards != shard.number
            parts.append(own.encode(0.01 * torch.randn(m, generator=noise)).packet if moved else b"")
        made.append(join(parts))
    return made


def in_memory(vector: torch.Tensor) -> StoredVector:
    data = memoryview(vector.numpy().view(np.uint8).data)
    shape = tuple(vector.shape)
    return StoredVector(Layout(("w",), (shape,)), ("w",), (StoredTensor("F32", shape, data),), {})


def fold(model: GlobalModel, packets: Iterable[bytes]) -> GlobalModel:
    """Apply all packets."""
    *_, folded = replay(model, packets)
    return folded


def fold_of(
    source: StoredVector, packets: Sequence[bytes], mix: Cocktail = MIX, start: int = 0, **more: Any
) -> Fold:
    return Fold("a-run", mix, 7, source, start, [memoryview(packet) for packet in packets], **more)


def write(fold: Fold, base: Path, folder: Path) -> int:
    with atomic_folder(folder) as part:
        write_model_files(part, model_config_files(base), BUILTIN)
        number = fold.write(part)
        write_chunk_hashes(part, lambda: False)
    return number


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("gpt_neox", "llama", "opt", "gpt2"):
        torch.manual_seed(1)
        made[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(made[name])
    return made


# ---- the bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "opt", "gpt2"])
def test_a_snapshot_loads_and_is_the_fold_to_the_bit_and_so_is_the_next(bases, tmp_path, name: str) -> None:
    flat = FlatParameters(load_model(bases[name]))
    packets = packets_of(MIX, flat.layout.size, range(9))
    truth = GlobalModel(flat.vector.clone(), MIX, 7)
    fold(truth, packets[:5])

    with closing(open_vector(bases[name])) as base:
        assert base.on_disk
        assert base.layout == flat.layout
        known = KnownFingerprint(5, truth.fingerprint)
        assert (
            write(fold_of(base, packets[:5], known=known), bases[name], tmp_path / "5") == truth.fingerprint
        )

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "5")
    assert loaded.dtype == torch.float32
    assert torch.equal(FlatParameters(loaded).vector, truth.vector)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == (name in TIED)
    assert (
        load_file(tmp_path / "5" / "model.safetensors").keys()
        == load_file(bases[name] / "model.safetensors").keys()
    )
    [one] = list_snapshots(tmp_path, "a-run")
    assert (one.round, one.fingerprint) == (5, truth.fingerprint)

    fold(truth, packets[5:])
    with closing(open_vector(one.folder)) as source:
        write(fold_of(source, packets[5:], start=5), one.folder, tmp_path / "9")
    assert torch.equal(FlatParameters(load_model(tmp_path / "9")).vector, truth.vector)
    assert [one.round for one in list_snapshots(tmp_path, "a-run")] == [5, 9]
    assert list_snapshots(tmp_path, "another-run") == []


def test_the_weights_begin_with_the_vector_itself(bases, tmp_path) -> None:
    with closing(open_vector(bases["llama"])) as base:
        write(fold_of(base, []), bases["llama"], tmp_path / "0")

    data = (tmp_path / "0" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    vector = np.frombuffer(data, "<f4", base.layout.size, start)
    assert start % 8 == 0
    assert torch.equal(torch.from_numpy(vector.copy()), FlatParameters(load_model(bases["llama"])).vector)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_base_in_half_precision_and_in_shards_is_read_as_transformers_reads_it(
    bases, tmp_path, dtype
) -> None:
    for name in ("gpt_neox", "gpt2"):
        folder = tmp_path / name
        load_model(bases[name]).to(dtype).save_pretrained(folder, max_shard_size="20KB")
        wanted = FlatParameters(load_model(folder)).vector

        with closing(open_vector(folder)) as base:
            assert base.on_disk
            assert len({part.data.file for part in base.parts}) > 2
            assert torch.equal(torch.from_numpy(base.read(0, len(wanted))), wanted)
            assert torch.equal(torch.from_numpy(base.read(777, 5000)), wanted[777:5000])
            write(fold_of(base, []), folder, tmp_path / "0")
        assert torch.equal(FlatParameters(load_model(tmp_path / "0")).vector, wanted)
        shutil.rmtree(tmp_path / "0")


def test_buffers_of_the_base_come_along_as_they_were(bases, tmp_path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(bases["gpt_neox"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with closing(open_vector(folder)) as base:
        assert base.on_disk
        write(fold_of(base, packets_of(MIX, base.layout.size, range(2))), folder, tmp_path / "2")

    kept = load_file(tmp_path / "2" / "model.safetensors")["gpt_neox.layers.0.attention.bias"]
    assert torch.equal(kept, weights["gpt_neox.layers.0.attention.bias"])
    load_model(tmp_path / "2")


@pytest.mark.parametrize("how", ["bin", "tied twice", "other precision"])
def test_a_base_that_must_be_loaded_gives_the_same_snapshot(bases, tmp_path, how: str) -> None:
    folder, name = tmp_path / "odd", "gpt2" if how == "tied twice" else "llama"
    shutil.copytree(bases[name], folder)
    weights = load_file(folder / "model.safetensors")
    if how == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    elif how == "tied twice":
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        first = next(iter(weights))
        weights[first] = weights[first].double()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    truth = GlobalModel(FlatParameters(load_model(folder)).vector.clone(), MIX, 7)
    packets = packets_of(MIX, truth.vector.numel(), range(3))
    fold(truth, packets)

    with closing(open_vector(folder)) as base:
        assert not base.on_disk
        write(fold_of(base, packets), folder, tmp_path / "3")

    assert torch.equal(FlatParameters(load_model(tmp_path / "3")).vector, truth.vector)
    with closing(open_vector(tmp_path / "3")) as again:
        assert again.on_disk


@pytest.mark.parametrize("content", [b"", b"no safetensors file at all", b"\x02" + bytes(7) + b"[]", "cut"])
def test_weights_that_cannot_be_read_are_named(bases, tmp_path, content: bytes | str) -> None:
    shutil.copytree(bases["llama"], tmp_path / "bad")
    path = tmp_path / "bad" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if isinstance(content, str) else content)

    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_vector(tmp_path / "bad")


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_without_loading_a_weight(bases, tmp_path, name: str, monkeypatch) -> None:
    folder = tmp_path / name
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.save_pretrained(folder)
    monkeypatch.setattr("recipes.models.causal_lm.load_model", lambda *_, **__: pytest.fail("it was loaded"))

    with closing(open_vector(folder)) as vector:
        assert vector.layout.size == layout_of(model).size


@settings(max_examples=30)
@given(
    size=st.integers(1, 300_000),
    mix=st.builds(
        Cocktail,
        random_ratio=st.sampled_from([1.0, 0.3, 0.1, 0.01]),
        sample_kind=st.sampled_from(["block", "element", "fragment"]),
        topk_ratio=st.sampled_from([0.05, 1.0]),
        quant_bits=st.sampled_from([2, 4, 16, 32]),
        uncompressed_rounds=st.sampled_from([0, 102]),
        random_ratios=st.sampled_from([(), (0.4, 0.05)]),  # of a run that changes its rung
    ),
    rounds=st.integers(0, 6),
    at=st.integers(0, 6),
    budget=st.sampled_from([0, 1 << 30]),
    shards=st.sampled_from([1, 3]),
)
def test_the_sweep_is_the_fold_whatever_the_windows_the_batches_the_shards_and_the_rungs(
    size: int, mix: Cocktail, rounds: int, at: int, budget: int, shards: int
) -> None:
    mix = replace(mix, shards=min(shards, size))
    vector = torch.randn(size, generator=torch.Generator().manual_seed(1))
    packets = packets_of(mix, size, range(100, 100 + rounds))
    truth = GlobalModel(vector.clone(), mix, 7, round=100)
    fold(truth, packets[: min(at, rounds)])
    known = KnownFingerprint(truth.round, truth.fingerprint)
    fold(truth, packets[min(at, rounds) :])

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(snapshots, "WINDOW", 1 << 16)
        job = fold_of(in_memory(vector), packets, mix, start=100, known=known, budget=budget)
        number = job.write(Path(folder))
        swept = load_file(Path(folder) / "model.safetensors")["w"]

    assert torch.equal(swept.view(torch.int32), truth.vector.view(torch.int32))
    assert number == truth.fingerprint


# ---- what goes wrong -----------------------------------------------------------------------------


def test_a_fold_that_is_not_what_the_peers_hold_is_no_snapshot_and_names_both(bases, tmp_path) -> None:
    with closing(open_vector(bases["opt"])) as base:
        packets = packets_of(MIX, base.layout.size, range(3))
        with pytest.raises(
            WrongFold, match=r"x' of round 2 the fingerprint [0-9a-f]{16}, .* had 000000000000002a"
        ):
            write(fold_of(base, packets, known=KnownFingerprint(2, 42)), bases["opt"], tmp_path / "3")

        damaged = [packets[0], packets[1][:-1] + b"?", packets[2]]
        with pytest.raises(WrongFold, match=r"the packet of round 1: its checksum does not match"):
            write(fold_of(base, damaged), bases["opt"], tmp_path / "3")

    assert list(tmp_path.iterdir()) == []


def test_a_fold_that_is_asked_to_stop_leaves_nothing(bases, tmp_path) -> None:
    asked = iter([False, False, True])
    with closing(open_vector(bases["opt"])) as base:
        job = fold_of(base, packets_of(MIX, base.layout.size, range(5)), stop=lambda: next(asked))
        with pytest.raises(SnapshotCancelled):
            write(job, bases["opt"], tmp_path / "5")

    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_found_out_before_a_byte_is_written(bases, tmp_path, monkeypatch) -> None:
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("recipes.weight_files.DISK_RESERVE", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room._replace(free=5000))
    monkeypatch.setattr(snapshots, "_write", lambda file, data: pytest.fail("it was written to"))
    with closing(open_vector(bases["opt"])) as base, pytest.raises(OSError, match="does not fit") as full:
        write(fold_of(base, []), bases["opt"], tmp_path / "0")

    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(bases, tmp_path, monkeypatch) -> None:
    plain, written = snapshots._write, []

    def fill(file: Any, data: Any) -> None:
        written.append(len(memoryview(data).cast("B")))
        if len(written) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file, data)

    monkeypatch.setattr(snapshots, "_write", fill)
    with closing(open_vector(bases["opt"])) as base, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write(fold_of(base, []), bases["opt"], tmp_path / "0")

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_hub_left_does_not_count_and_is_cleared_away(bases, tmp_path) -> None:
    with closing(open_vector(bases["opt"])) as base:
        write(fold_of(base, []), bases["opt"], tmp_path / "0")
    whole = tmp_path / "0" / "model.safetensors"
    for round in (1, 2, 3):
        shutil.copytree(tmp_path / "0", tmp_path / str(round))
    (tmp_path / "1" / "model.safetensors").write_bytes(whole.read_bytes()[:-1])
    (tmp_path / "2" / "model.safetensors").unlink()
    shutil.copytree(tmp_path / "0", tmp_path / ".4.part")

    remove_unfinished_snapshots(tmp_path)

    assert [one.round for one in list_snapshots(tmp_path, "a-run")] == [0], "3 says of itself that it is 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]


# ---- memory --------------------------------------------------------------------------------------

SIZE = 64 << 20  # elements: 256 MiB
MEASURED = """
import sys
from pathlib import Path
from compress import Cocktail
from compress.coding import FileSlice
from recipes.weight_files import Layout
from recipes.snapshots import Fold
from recipes.weight_files import StoredTensor
from recipes.weight_files import StoredVector

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

folder, size, length, budget = Path(sys.argv[1]), *map(int, sys.argv[2:])
before = kib("VmRSS")
with open(folder / "vector", "rb", buffering=0) as vector, open(folder / "log", "rb", buffering=0) as log:
    part = StoredTensor("F32", (size,), FileSlice(vector, 0, 4 * size))
    source = StoredVector(Layout(("w",), ((size,),)), ("w",), (part,), {})
    packets = [FileSlice(log, at, length) for at in range(0, folder.joinpath("log").stat().st_size, length)]
    mix = Cocktail(random_ratio=0.125, topk_ratio=0.05)
    Fold("a-run", mix, 7, source, 0, packets, budget=budget).write(folder)
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_vector_of_256_mb_is_folded_within_64_mib(tmp_path) -> None:
    """Peak resident memory of a process of its own, over what it had with everything imported."""
    mix, budget = Cocktail(random_ratio=0.125, topk_ratio=0.05), 64 << 20
    with (tmp_path / "vector").open("wb") as file:
        file.truncate(4 * SIZE)
    # the same packet each round: its positions are within the sample, which is another each time
    packets = packets_of(mix, SIZE, range(1)) * 3
    assert {mix.schedule(SIZE, 7, round).m for round in range(3)} == {mix.schedule(SIZE, 7, 0).m}
    (tmp_path / "log").write_bytes(b"".join(packets))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path), str(SIZE), str(len(packets[0])), str(budget)]

    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    grown = int(ran.stdout)
    assert grown <= budget, f"{grown / 2**20:.1f} MiB"
    swept = load_file(tmp_path / "model.safetensors")["w"]
    told = json.loads((tmp_path / "model.safetensors").open("rb").read(4096)[8:].partition(b"}")[0] + b"}}")
    truth = fold(GlobalModel(torch.zeros(SIZE), mix, 7), packets)
    assert torch.equal(swept, truth.vector)
    assert told["__metadata__"]["cocktail_fingerprint"] == f"{fingerprint(swept):016x}"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a": {"data_offsets": [0, Infinity]}}',
        '{"a": {"data_offsets": []}}',
        '{"a": {"data_offsets": [0, -1]}}',
    ],
    ids=len,
)
def test_a_header_that_is_none_is_reported(text: str) -> None:
    for claimed in (len(text), 90 << 20):
        with pytest.raises(ModelError, match="is not a safetensors file"):
            read_header(io.BytesIO(claimed.to_bytes(8, "little") + text.encode()), "model.safetensors")
