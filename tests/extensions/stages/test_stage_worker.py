"""A ring of real stages has the whole model's gradient, whatever happens to its messages."""

import contextlib
from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tiny_models import tiny_model

from cocktail_cli.extensions.stages.compute import BadMessage
from cocktail_cli.extensions.stages.compute.stage_worker import activations_of
from cocktail_cli.extensions.stages.lines import StageMessage
from compress import PacketError
from recipes.data import Sample, collate
from recipes.objectives import loss_sum
from scripts.swarms.stage_ring import LineSetting, StageRing

EXACT, AQ_SGD = LineSetting(), LineSetting(bits=4, gradient_bits=8, places=8, rows=16)


def model_of(kind: str = "llama") -> Any:
    model = tiny_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def lease(seed: int, *lengths: int) -> list[list[Sample]]:
    """Micro-batches of two samples each, the second packed."""
    drawn, found = np.random.default_rng(seed), []
    for length in lengths:
        trained = np.arange(length) > 0
        packed = trained.copy()
        packed[3] = False
        tokens = drawn.integers(0, 96, (2, length)).astype(np.int32)
        found.append([Sample(tokens[0], trained), Sample(tokens[1], packed, (3, length - 3))])
    return found


def terms_of(micro_batches: list[list[Sample]]) -> int:
    return sum(sample.count for part in micro_batches for sample in part)


def gradients(ring: StageRing) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in ring.parameters().items() if p.grad is not None}


def whole_step(model: Any, micro_batches: list[list[Sample]]) -> float:
    """The same gradient of the whole model; returns the summed losses."""
    total = 0.0
    for part in micro_batches:
        loss, _ = loss_sum(model, collate(part))
        (loss / terms_of(micro_batches)).backward()
        total += loss.item()
    return total


@pytest.mark.parametrize(("kind", "stages"), [("llama", 2), ("opt", 3)])
def test_two_replicas_of_stages_train_as_two_whole_models_do(kind: str, stages: int) -> None:
    """Three steps of AdamW on the mean gradient of two replicas, unquantised: losses and parameters are those
    of two whole models to rounding, with tied weights too."""
    model = model_of(kind)
    wholes = [deepcopy(model), deepcopy(model)]
    rings = [StageRing(model, stages, EXACT), StageRing(model, stages, EXACT)]
    whole_sets = [dict(whole.named_parameters()) for whole in wholes]
    ring_sets = [ring.parameters() for ring in rings]
    assert ring_sets[0].keys() == whole_sets[0].keys()
    optimizers = [torch.optim.AdamW(each.values(), lr=1e-3) for each in (*whole_sets, *ring_sets)]
    for step in range(3):
        for replica in range(2):
            parts = lease(10 * step + replica, 8, 5, 7)
            found = rings[replica].gradient(parts, terms_of(parts), in_flight=2)
            assert found.mean == pytest.approx(whole_step(wholes[replica], parts) / found.terms, rel=1e-5)
        for sets in (whole_sets, ring_sets):
            for name in sets[0]:
                mean = (sets[0][name].grad + sets[1][name].grad) / 2
                sets[0][name].grad, sets[1][name].grad = mean, mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in ring_sets[0].items():
        torch.testing.assert_close(parameter, whole_sets[0][name], rtol=1e-3, atol=1e-4)
        assert torch.equal(parameter, ring_sets[1][name])


def test_messages_that_come_twice_change_nothing() -> None:
    """Each message three times: the same gradient, to the bit, over two epochs of quantised changes."""
    once, thrice = StageRing(model_of(), 3, AQ_SGD), StageRing(model_of(), 3, AQ_SGD, repeats=3)
    for _ in range(2):
        parts = lease(1, 8, 6)
        for ring in (once, thrice):
            ring.gradient(parts, terms_of(parts), in_flight=4)
    for name, gradient in gradients(once).items():
        assert torch.equal(gradient, gradients(thrice)[name])


def test_an_end_that_restarts_costs_a_message_and_no_difference() -> None:
    """A stage that has lost its memory asks for the samples again, and the step has the direct gradient."""
    ring, fresh = StageRing(model_of(), 3, AQ_SGD), StageRing(model_of(), 3, AQ_SGD)
    parts = lease(1, 8, 6)
    ring.gradient(parts, terms_of(parts), in_flight=4)
    for parameter in ring.parameters().values():
        parameter.grad = None
    for worker in ring.workers:
        worker.line.decoder.memory = ring.memory()
    ring.gradient(parts, terms_of(parts), in_flight=4)
    fresh.gradient(parts, terms_of(parts), in_flight=4)
    for name, gradient in gradients(fresh).items():
        assert torch.equal(gradient, gradients(ring)[name])
    assert ring.sent["activations"] == pytest.approx(3 * fresh.sent["activations"], rel=0.02)


def test_changes_come_closer_than_direct_quantisation() -> None:
    """In the second epoch of a model that stands still the gradient is nearer to the exact one."""
    exact, ring = StageRing(model_of(), 3, EXACT), StageRing(model_of(), 3, AQ_SGD)
    parts, errors = lease(1, 8, 6), []
    exact.gradient(parts, terms_of(parts), in_flight=4)
    for _ in range(3):
        ring.gradient(parts, terms_of(parts), in_flight=4)
        wanted, found = gradients(exact), gradients(ring)
        errors.append(sum(float((found[name] - wanted[name]).square().sum()) for name in wanted))
        for parameter in ring.parameters().values():
            parameter.grad = None
    assert errors[2] < errors[0] / 4


@settings(max_examples=40, deadline=None)
@given(
    st.binary(max_size=80),
    st.sampled_from(["activations", "gradients", "mismatch"]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_strangers_message_is_refused_or_changes_nothing(
    body: bytes, kind: Any, number: int, cut: bool
) -> None:
    """Any bytes of any kind, and damaged ones of our own, raise PacketError at the most."""
    first, other = RING.workers
    first.begin(first.step + 1, lease(1, 6), 9, 1)
    [sent] = first.work() or []
    if cut:
        kind, body = "activations", sent.body[: len(body)] + body + sent.body[2 * len(body) :]
    with contextlib.suppress(PacketError):
        other.receive(StageMessage(first.step, kind, number, body))


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_a_neighbour_is_named_whose_message_turns_out_to_be_garbage_only_in_the_work(kind: Any) -> None:
    """The gradient of its activations is not finite; its own is no packet."""
    ring = StageRing(model_of(), 2, EXACT)
    first, other = ring.workers
    first.begin(0, lease(1, 6), 9, 1)
    other.receive((first.work() or [])[0])
    [sent] = other.work() or []
    found = activations_of(sent.body)
    values = torch.full((sum(each.count for each in found.rows), ring.columns), 3e38)
    huge = structs.replace(found, coded=other.line.encoder.encode(found.rows, values))
    body = msgspec.msgpack.encode(huge) if kind == "activations" else b"no packet"
    assert first.receive(StageMessage(0, kind, 0, body)) == []
    with pytest.raises(BadMessage) as met:
        first.work()
    assert met.value.kind == kind


RING = StageRing(model_of(), 2, AQ_SGD)
