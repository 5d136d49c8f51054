"""Targets of compress and recipes: packets, residual handoffs, leases, recipes, weights, peer checkpoints."""

import base64
import io
import json
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import torch

from compress import Cocktail, PacketError, Update, decode, decode_packed, decode_windows
from compress import backends as dispatch
from compress.coding import LZ4
from compress.packet import BODY, HEAD, LEVELS
from recipes.algorithm import Aggregator, RejectedUpdate
from recipes.config import load_recipe, recipe_from_json
from recipes.data import Sample, SampleLimits, pack_samples, unpack_samples
from recipes.errors import DataError, ModelError, RecipeError
from recipes.training import peer_checkpoint, read
from recipes.weight_files import TensorSpec, read_header, safetensors_header, words_digest, write_safetensors
from scripts import ROOT
from scripts.fuzzing.mutate import EDGES, Target, bent, mutated

M = 900  # length of a sampled vector
WIDTHS = (1, 2, 3, 4, 8, 16, 32)
GOLDEN = ROOT / "tests" / "compress" / "golden.json"
P = 2000  # parameters of the owner's vector
MIX = Cocktail(random_ratio=0.5, topk_ratio=0.2, quant_bits=4, block_size=16)


# ---- packets -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def packets() -> list[tuple[int, bytes]]:
    """Encode (m, packet) of every width, kind and codec."""
    made = [(g["m"], base64.b64decode(g["packet"])) for g in json.loads(GOLDEN.read_text(encoding="utf-8"))]
    for bits in WIDTHS:
        v = torch.randn(M, generator=torch.Generator().manual_seed(bits))
        made += [
            (M, Cocktail(topk_ratio=keep, quant_bits=bits, quant_bucket_size=16).encode(v).packet)
            for keep in (0.003, 0.02, 0.2, 1.0)
        ]
    zeros = torch.zeros(20_000)
    zeros[7000:7900] = 1.0
    return [*made, (20_000, Cocktail(topk_ratio=0.05, quant_bits=4).encode(zeros).packet)]


def make_packet(rng: Random) -> bytes:
    m, good = rng.choice(packets())
    kind = rng.random()
    if kind < 0.3:
        data = bytearray(good)
        field(rng, data, m)
    elif kind < 0.6:  # the front, which all else depends on
        data = bytearray(mutated(rng, good[: LEVELS + 20], good) + good[LEVELS + 20 :])
    else:
        data = bytearray(mutated(rng, good, rng.choice(packets())[1]))
    if rng.random() < 0.95:  # with a checksum that is right again
        data[4:8] = struct.pack("<I", zlib.crc32(data[8:]))
    return struct.pack("<I", m) + data


FIELDS = [
    (3, 1),
    (8, 8),
    (16, 8),
    (24, 8),
    (32, 4),
    (36, 1),
    (37, 1),
    (38, 2),
    *((40 + 8 * i, 8) for i in range(5)),
]


def field(rng: Random, data: bytearray, m: int) -> None:
    """Change one number of the header, or an entry of the table of sections."""
    values = [n for n in (*EDGES, 0, 1, 2, 255, m, m + 1, m - 1, m * 8) if 0 <= n < 2**64]
    at, size = rng.choice(FIELDS)
    value = rng.choice(values)
    if at >= HEAD.size + BODY.size and rng.random() < 0.5:
        value = int.from_bytes(data[at : at + 8], "little") & (2**61 - 1) | rng.randrange(8) << 61
    data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


@contextmanager
def compiled_too() -> Iterator[None]:
    """Add short vectors up by compiled loops, as long ones are."""
    worth, dispatch.WORTH = dispatch.WORTH, 0
    try:
        yield
    finally:
        dispatch.WORTH = worth


def check_packet(case: bytes) -> bool:
    """Check that the decoders agree, to the bit or in their refusal, and so do the sums of packed updates."""
    m, packet = struct.unpack_from("<I", case)[0], case[4:]
    try:
        update = decode(packet, m)
    except PacketError:
        update = None
    check_sum(packet, m, update)
    try:
        parts = list(decode_windows(memoryview(packet), m, 64))
    except PacketError:
        lz4 = LZ4 in [entry >> 5 for entry in packet[47:80:8]]  # its library reads a match 0 bytes back
        assert update is None or lz4, "decode takes what its windows refuse"
        return False
    assert update is not None, "its windows take what decode refuses"
    at = update.positions
    assert bool((at[1:] > at[:-1]).all())
    assert not len(at) or (int(at[0]) >= 0 and int(at[-1]) < m)
    assert bool(update.values.isfinite().all())
    joined = (
        [torch.cat([getattr(p, what) for p in parts]) for what in ("positions", "values")] if parts else []
    )
    assert not parts or (torch.equal(joined[0], at) and torch.equal(joined[1], update.values))
    return True


def check_sum(packet: bytes, m: int, update: Update | None) -> None:
    with compiled_too():
        try:
            found = decode_packed(packet, m)
        except PacketError:
            assert update is None, "decode takes what decode_packed refuses"
            return
    assert update is not None, "decode_packed takes what decode refuses"
    sums = [torch.linspace(-1, 1, m) for _ in range(2)]
    for start, stop in ((0, m // 3), (m // 3, m)):
        found.add_to(sums[0], start, stop, 0.7)
    update.add_to(sums[1], 0, m, 0.7)
    assert torch.equal(*(each.view(torch.int32) for each in sums)), "a sum is not that of the update"
    assert np.isclose(found.norm(), update.norm(), rtol=1e-7, atol=0)


# ---- the owner ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def owned() -> tuple[Aggregator, list[bytes], list[bytes]]:
    """Make an aggregator with error feedback, packets of round 0, and residual handoffs."""
    owner = Aggregator(P, MIX, seed=1)
    whole = torch.randn(P, generator=torch.Generator().manual_seed(1))
    owner.assigned[0].error.copy_(whole)
    sample = MIX.draw(P, 1, 0)
    some = [Cocktail(topk_ratio=keep, quant_bits=bits) for keep in (0.01, 0.2, 1.0) for bits in WIDTHS]
    return owner, [c.encode(sample.take(whole)).packet for c in some], [c.encode(whole).packet for c in some]


def make_update(rng: Random) -> bytes:
    _, updates, legacies = owned()
    legacy = rng.random() < 0.5
    good = updates if not legacy else legacies
    data = bytearray(mutated(rng, rng.choice(good), rng.choice(good)))
    if rng.random() < 0.3:
        data = bytearray(rng.choice(good))
        field(rng, data, P)
    if rng.random() < 0.95 and len(data) >= 8:
        data[4:8] = struct.pack("<I", zlib.crc32(data[8:]))
    return bytes([legacy]) + data


def check_update(case: bytes) -> bool:
    """Check that a refused packet changes nothing, and one that is taken leaves error feedback that is
    finite."""
    owner, updates, _ = owned()
    before = owner.assigned[0].error.clone()
    try:
        if case[0]:
            owner.merge_handoff("bob", case[1:], 0.5)
        else:
            packet = owner.step(0, [("ann", updates[3], 10.0), ("bob", case[1:], 10.0)])
            decode(packet, MIX.draw(P, 1, 0).m)
        taken = True
    except RejectedUpdate as error:
        taken = error.peer != "bob"
    moved = not torch.equal(owner.assigned[0].error, before)
    finite = bool(owner.assigned[0].error.isfinite().all())
    owner.assigned[0].error.copy_(before)
    assert finite, "e is not finite"
    assert taken or not moved, "refused, and yet e has moved"
    return taken


# ---- leases, recipes, weights, what was kept ---------------------------------------------------------------


def make_samples(rng: Random) -> bytes:
    made = []
    for _ in range(rng.randrange(4)):
        ids = [rng.randrange(rng.choice((300, 70000))) for _ in range(rng.randrange(1, 12))]
        tokens = np.array(ids, np.int32)
        trained = np.array([False] + [rng.random() < 0.7 for _ in tokens[1:]])
        made.append(Sample(tokens, trained))
    good = pack_samples(made)
    return mutated(rng, good, good)


def check_samples(case: bytes) -> bool:
    try:
        samples = unpack_samples(case, SampleLimits(1 << 20, 1 << 20, vocabulary=70000))
    except DataError:
        return False
    for sample in samples:
        assert len(sample.tokens) == len(sample.trained) > 0
        assert not sample.trained[0]
        assert 0 <= sample.tokens.min() <= sample.tokens.max() < 70000
    return True


@lru_cache(maxsize=1)
def recipe_text() -> bytes:
    return load_recipe("smoke").to_json().encode()


def make_recipe(rng: Random) -> bytes:
    if rng.random() < 0.4:
        return mutated(rng, recipe_text(), recipe_text())
    return json.dumps(bent(rng, json.loads(recipe_text())), default=repr).encode()


def check_recipe(case: bytes) -> bool:
    try:
        recipe = recipe_from_json(case.decode(errors="replace"))
    except RecipeError:
        return False
    assert recipe_from_json(recipe.to_json()) == recipe
    return True


HEADER = safetensors_header(
    {"run": "r"}, {"a": TensorSpec("F32", (2, 3), 24), "b": TensorSpec("BF16", (4,), 8)}
)


def make_weights(rng: Random) -> bytes:
    if rng.random() < 0.5:
        return mutated(rng, HEADER, HEADER)
    text = json.dumps(bent(rng, json.loads(HEADER[8:])), default=repr).encode()
    return len(text).to_bytes(8, "little") + text


def check_weights(case: bytes) -> bool:
    try:
        header = read_header(io.BytesIO(case), "model.safetensors")
    except ModelError:
        return False
    assert header.size >= header.start
    return True


@lru_cache(maxsize=1)
def kept_file() -> tuple[Path, bytes]:
    path = Path(tempfile.mkdtemp(prefix="fuzz-")) / "kept.safetensors"
    x = torch.zeros(4)
    sums = {"x": "0" * 16, "common": "0" * 16}
    words = {
        "run": "r",
        "format": peer_checkpoint.FORMAT,
        "round": "3",
        "fingerprint": "0" * 16,
        "sums": json.dumps(sums),
    }
    write_safetensors(path, {"x": x, "common": x}, {**words, "check": words_digest(words)})
    read(path)
    return path, path.read_bytes()


def make_kept(rng: Random) -> bytes:
    return mutated(rng, kept_file()[1], kept_file()[1])


def check_kept(case: bytes) -> bool:
    path = kept_file()[0]
    path.write_bytes(case)
    try:
        read(path)
    except (ValueError, OSError):
        return False
    return True


TARGETS = [
    Target("packet", "packets", 60, make_packet, check_packet, 40 << 20),
    Target("update", "legacy", 10, make_update, check_update, 4 << 20),
    Target("samples", "files", 50, make_samples, check_samples),
    Target("recipe", "files", 4, make_recipe, check_recipe, 4 << 20),
    Target("weights", "files", 10, make_weights, check_weights),
    Target("kept", "files", 5, make_kept, check_kept),
]
