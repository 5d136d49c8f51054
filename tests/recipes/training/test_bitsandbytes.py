"""8-bit optimizers and quantized bases, with bitsandbytes as it computes on a CPU."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_precision import ROWS, recipe_of, stepped

from recipes.data import collate
from recipes.models import load_trained, open_trained
from recipes.objectives import loss_sum
from recipes.training import Peer, build_peer, peer_checkpoint
from recipes.weight_files import layout_of

pytest.importorskip("bitsandbytes")


def peer_of(base: Path, optim: str, **sections: Any) -> Peer:
    recipe = recipe_of(base, training={"optim": optim}, **sections)
    return build_peer(load_trained(recipe, base), recipe, 2)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bits_learn_what_float32_learns(base, name: str, dtype: str) -> None:
    whole, small = peer_of(base, "adamw_torch"), peer_of(base, name, model={"dtype": dtype})

    losses = stepped(small.trainer, 10)  # type: ignore[arg-type]

    np.testing.assert_allclose(losses, stepped(whole.trainer, 10), rtol=0.05)  # type: ignore[arg-type]
    local: Any = small.trainer
    kinds = {
        v.dtype for of in local.optimizer.state.values() for w, v in of.items() if w in ("state1", "state2")
    }
    assert torch.uint8 in kinds


def test_what_eight_bits_keep_comes_back_to_the_bit(base, tmp_path) -> None:
    peer, other = (peer_of(base, "adamw_8bit") for _ in range(2))
    stepped(peer.trainer, 3)  # type: ignore[arg-type]
    peer_checkpoint.keep(peer, tmp_path / "kept", {})
    peer_checkpoint.read(tmp_path / "kept")

    peer_checkpoint.restore(other, tmp_path / "kept")

    for one in (peer, other):
        stepped(one.trainer, 2)  # type: ignore[arg-type]
    assert torch.equal(peer.worker.x, other.worker.x)


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"])
def test_adapters_are_trained_beside_a_quantized_base(base, bits: str) -> None:
    """The base's weights take part of their bytes; with nested quantization the scales do too."""
    double = bits == "bnb_4bit_use_double_quant"
    quantized = {bits: True} | ({"load_in_4bit": True} if double else {})
    recipe = recipe_of(base, model=quantized, lora={"lora_r": 4, "lora_dropout": 0.0, "use_dora": double})
    model = load_trained(recipe, base)
    states = [p.quant_state for p in model.parameters() if getattr(p, "quant_state", None) is not None]
    assert bool(states) == (bits != "load_in_8bit")
    assert all(state.nested == double for state in states)
    peer = build_peer(model, recipe, 2)
    with closing(open_trained(recipe, base)) as start:
        assert start.layout == layout_of(model)
        assert np.array_equal(start.read(0, start.layout.size), peer.worker.global_model.vector.numpy())

    losses = stepped(peer.trainer, 15)  # type: ignore[arg-type]

    assert losses[-1] < losses[0]
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert {torch.uint8, torch.int8} & frozen
    plain = float(loss_sum(load_trained(recipe, base, quantized=False), collate(ROWS))[0].detach())
    assert losses[0] == pytest.approx(plain / sum(row.count for row in ROWS), rel=0.05)
