"""Gradient sketches: near for the same gradient, far for another, whatever micro-batch and precision."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import SIZES, tiny_model
from torch import nn

from cocktail_cli.assembly import recipe_type
from cocktail_cli.extensions.audits.bodies import NAME
from cocktail_cli.extensions.audits.model import BITS, Auditor, drawn_signs, signs, sketch_key
from recipes.config import Recipe
from recipes.data import Sample, batches
from recipes.training import SingleDeviceTrainer, in_order

LEASE = 7
KEY = sketch_key(42, LEASE)


def recipe(**sections: Any) -> Recipe:
    return recipe_type(sections).model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": "builtin:tiny-gpt-neox"},
            "datasets": [{"path": "none"}],
            **sections,
        }
    )


def trainer(kind: str = "llama", seed: int = 42) -> SingleDeviceTrainer:
    """Without dropout, which OPT has: what is drawn anew is another gradient."""
    model = tiny_model(kind)
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    return sketcher(model, recipe(), seed)


def sketcher(model: nn.Module, asked: Recipe, seed: int = 42) -> SingleDeviceTrainer:
    made = SingleDeviceTrainer(model, asked)
    made.extensions = [Auditor(recipe(training={"seed": seed}))]
    return made


def lease(count: int, seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 96, random.integers(12, 40)).astype(np.int32) for _ in range(count)]
    return [Sample(one, np.arange(len(one)) > 0) for one in tokens]


def sketches(
    peer: SingleDeviceTrainer, samples: Sequence[Sample], size: int, lease: int = LEASE, terms: int = 9
) -> np.ndarray:
    """(samples, BITS), in the order of the lease, computed in micro-batches of `size`."""
    peer.zero()
    parts = list(batches(samples, size))
    found = in_order(samples, parts, peer.backward(parts, terms, lease).notes[NAME])
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(found), np.uint8), bitorder="little")
    return bits.reshape(len(samples), BITS)


def differing(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one != other).sum(axis=1)


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_a_sample_has_its_own_sketch_whatever_micro_batch_it_is_in(kind: str) -> None:
    peer, samples = trainer(kind), lease(12)
    alone = sketches(peer, samples, 1)

    assert differing(alone, sketches(peer, samples, 5)).max() <= 3
    assert differing(alone, sketches(peer, samples[::-1], 12)[::-1]).max() <= 3
    assert differing(alone, np.roll(alone, 1, axis=0)).min() >= 40


def test_it_is_the_same_again_and_has_nothing_to_do_with_that_of_another_round() -> None:
    peer, samples = trainer(), lease(12)
    one = sketches(peer, samples, 4)

    assert (one == sketches(peer, samples, 4)).all()
    assert differing(one, sketches(peer, samples, 4, LEASE + 1)).min() >= 40
    assert differing(one, sketches(trainer(seed=43), samples, 4)).min() >= 40


def test_the_scale_of_a_loss_changes_no_bit() -> None:
    peer, samples = trainer(), lease(12)

    assert differing(sketches(peer, samples, 4, terms=1), sketches(peer, samples, 4, terms=10**4)).max() <= 1


def test_bfloat16_differs_little_from_float32() -> None:
    peer, samples = trainer(), lease(24)
    whole = sketches(peer, samples, 4)
    peer.half = torch.bfloat16

    assert np.median(differing(whole, sketches(peer, samples, 4))) <= 6


def test_the_gradient_that_is_accumulated_is_what_it_is_without_sketches() -> None:
    peer, samples = trainer(), lease(6)
    peer.zero()
    peer.backward([samples], 9)
    plain = peer.flat.grad.clone()
    peer.zero()
    found = peer.backward([samples], 9, LEASE)

    assert torch.equal(plain, peer.flat.grad)
    assert len(found.notes[NAME]) == 6 * BITS // 4


def test_it_is_the_sign_of_a_random_projection_of_the_gradient_of_the_embedded_tokens() -> None:
    peer, [sample] = trainer(), lease(1)
    model: Any = peer.model
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    peer.zero()
    logits = model(inputs_embeds=embedded).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum").backward()
    gradient = embedded.grad[0]  # (T, D)
    a, r = signs(f"{KEY}/tokens/0", len(gradient)), signs(f"{KEY}/width", gradient.shape[1])
    reference = (torch.einsum("td,tk,dk->k", gradient, a, r) > 0).numpy()

    assert (reference != sketches(peer, [sample], 1)[0]).sum() <= 1


def test_below_adapters_the_frozen_embedding_is_sketched_too() -> None:
    from recipes.models import prepare_for_training

    adapted = recipe(lora={"lora_r": 4, "lora_dropout": 0.0})
    peer = sketcher(prepare_for_training(tiny_model("llama"), adapted), adapted)
    samples = lease(6)
    one = sketches(peer, samples, 3)

    assert differing(one, sketches(peer, samples, 2)).max() <= 3
    assert differing(one, np.roll(one, 1, axis=0)).min() >= 40


def test_a_preference_pair_is_one_sample() -> None:
    from recipes.models import prepare_for_training

    asked = recipe(
        lora={"lora_r": 4, "lora_dropout": 0.0}, dpo={}, datasets=[{"path": "none", "type": "preference"}]
    )
    peer = sketcher(prepare_for_training(tiny_model("llama"), asked), asked)
    halves = lease(12)
    pairs = [
        Sample(
            np.concatenate([a.tokens, b.tokens]),
            np.concatenate([a.trained, b.trained]),
            (len(a.tokens), len(b.tokens)),
        )
        for a, b in zip(halves[::2], halves[1::2], strict=True)
    ]
    one = sketches(peer, pairs, 1)

    assert differing(one, sketches(peer, pairs, 4)).max() <= 3
    assert differing(one, np.roll(one, 1, axis=0)).min() >= 40


def test_signs_are_prefixes_of_each_other_and_as_often_plus_as_minus() -> None:
    assert torch.equal(signs("a", 100)[:40], signs("a", 40))
    assert abs(float(signs("a", 1000).mean())) < 0.01


def test_lengths_up_to_a_power_of_two_share_one_draw() -> None:
    before = drawn_signs.cache_info().misses
    for rows in (129, 200, 255, 256):
        assert signs("lengths", rows).shape == (rows, BITS)

    assert drawn_signs.cache_info().misses == before + 1


def test_without_a_key_no_hook_is_set_and_there_is_no_sketch() -> None:
    peer, samples = trainer(), lease(4)
    embedding: Any = peer.model.get_input_embeddings()
    hooks: list[int] = []
    embedding.register_forward_hook(lambda *_: hooks.append(len(embedding._forward_hooks)))
    peer.zero()

    assert peer.backward([samples], 9).notes == {}
    assert peer.backward([samples], 9, LEASE).notes[NAME]
    assert hooks == [1, 2]


@pytest.mark.slow
def test_a_sketch_costs_next_to_nothing_beside_the_backward_pass() -> None:
    peer, samples = trainer("gpt_neox"), lease(64)
    took = dict[int | None, float]({None: 1e9, LEASE: 1e9})
    for times in range(40):  # other load stretches some; the shortest of each are compared
        if times >= 5 and took[LEASE] < 1.25 * took[None]:
            break
        for of in took:
            started = time.process_time()
            peer.zero()
            peer.backward(list(batches(samples, 8)), 9, of)
            took[of] = min(took[of], time.process_time() - started)

    assert took[LEASE] < 1.25 * took[None]  # of a model that is all overhead; see LOG.md for a real one
