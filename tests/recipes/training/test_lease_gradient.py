"""Local steps: a round is H optimizer steps of a peer, and one exchange."""

import time
from typing import Any

import pytest
import torch
from test_loop import SAMPLES, FakeHub, OneRound, leaver, peer_for, recipe, steps
from torch import Tensor

from recipes.algorithm import DecodedPacket
from recipes.config import recipe_from_json
from recipes.training import HandedOver, finetune, learning_rate
from recipes.training.loop import parts_of

H = 2  # of the 4 samples of a lease two each


def rounds(count: int) -> list[OneRound]:
    return [OneRound(t, H * t, steps=H * count) for t in range(count)]


def stepwise(count: int) -> Tensor:
    """x_i after so many steps with an exchange after each."""
    again = FakeHub(recipe(staleness=0), [OneRound(t, t, steps=count) for t in range(count)])
    peer = peer_for(again)
    steps(again, peer)
    return peer.trainer.flat.vector


@pytest.mark.parametrize("staleness", [0, 1])
def test_h_steps_lie_between_two_exchanges_and_one_peer_alone_is_plain_sgd(staleness: int) -> None:
    """All samples are alike here, so a step of two has the gradient of a step of four."""
    hub = FakeHub(recipe(staleness=staleness, local_steps=H), rounds(3))
    peer = peer_for(hub, micro_batch=SAMPLES)
    done = steps(hub, peer)

    assert peer.trainer.model.micro_batches == 3 * H
    assert len(hub.deliveries) == 3
    delivered = [delivery.delivers for delivery in hub.deliveries]
    assert delivered == ([[], [0], [1]] if staleness else [[0], [1], [2]])
    assert [step.tokens for step in done] == [16, 16, 16], "the whole lease, not its last step"
    torch.testing.assert_close(peer.trainer.flat.vector, stepwise(3 * H), rtol=0, atol=1e-5)


def test_the_steps_of_a_round_are_those_that_it_was_announced_with() -> None:
    """One, two and four steps of the four samples of a lease, under a schedule that counts steps."""
    announced = [OneRound(t, 2**t - 1, steps=7, rung=t) for t in range(3)]
    hub = FakeHub(recipe(auto=("local_steps",)), announced)
    hub.recipe = hub.recipe.model_copy(
        update={"training": hub.recipe.training.model_copy(update={"lr_scheduler_type": "linear"})}
    )
    peer = peer_for(hub, micro_batch=SAMPLES)
    done = steps(hub, peer)
    rate = learning_rate(hub.recipe.training, 7)

    assert peer.trainer.model.micro_batches == 1 + 2 + 4
    assert [step.local_steps for step in done] == [1, 2, 4]
    assert [step.lr for step in done] == [rate(0), rate(2), rate(6)]
    assert [step.tokens for step in done] == [16, 16, 16]


def test_the_learning_rate_counts_steps() -> None:
    hub = FakeHub(recipe(local_steps=H), rounds(3))
    hub.recipe = hub.recipe.model_copy(
        update={"training": hub.recipe.training.model_copy(update={"lr_scheduler_type": "linear"})}
    )
    done = steps(hub, peer_for(hub))
    rate = learning_rate(hub.recipe.training, 3 * H)

    assert [step.lr for step in done] == [rate(1), rate(3), rate(5)]
    assert rate(1) > rate(3) > rate(5) > 0


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd"])
@pytest.mark.parametrize(
    ("preset", "members", "share"), [("cocktail", 1, 1), ("cocktail", 4, 4), ("local-sgd", 4, 1)]
)
def test_where_packets_are_added_up_each_peer_takes_its_part_of_the_rate_and_of_the_momentum(
    optim: str, preset: str, members: int, share: int
) -> None:
    asked = recipe(preset=preset, local_steps=1).to_json()
    asked = asked.replace('"optim":"sgd"', f'"optim":"{optim}"')
    hub = FakeHub(recipe_from_json(asked), [OneRound(0, 0, peers=members)])
    peer = peer_for(hub)
    (done,) = steps(hub, peer)

    (group,) = peer.trainer.optimizer.param_groups
    training = hub.recipe.training
    assert group["lr"] == done.lr / share == training.learning_rate / share
    assert "betas" not in group or group["betas"] == (training.adam_beta1 / share, training.adam_beta2)


def test_the_last_round_has_the_steps_that_are_left() -> None:
    """Five steps are two rounds of two and one of one, with all of the lease in it."""
    hub = FakeHub(recipe(local_steps=H), [OneRound(t, H * t, steps=5) for t in range(3)])
    peer = peer_for(hub, micro_batch=SAMPLES)
    steps(hub, peer)

    assert peer.trainer.model.micro_batches == 5


@pytest.mark.parametrize(("samples", "steps"), [(4, 2), (5, 3), (2, 5), (0, 2), (7, 1)])
def test_a_lease_is_cut_into_parts_that_hold_it_once(samples: int, steps: int) -> None:
    found = list(parts_of(list(range(samples)), steps))  # type: ignore[arg-type]

    assert [one for _, part in found for one in part] == list(range(samples))
    assert all(0 <= number < steps for number, _ in found)
    assert all(samples // steps <= len(part) <= samples // steps + 1 for _, part in found)


def test_a_lease_of_many_steps_is_cut_without_going_through_them() -> None:
    found = list(parts_of(list(range(3)), 10**15))  # type: ignore[arg-type]

    assert [part for _, part in found] == [[0], [1], [2]]
    assert [number for number, _ in found] == [-(-(place + 1) * 10**15 // 3) - 1 for place in range(3)]


def test_no_step_is_made_while_the_packet_is_encoded() -> None:
    """x_i is read then: a packet of which half were older than the rest would be of no model."""
    hub = FakeHub(recipe(local_steps=H), rounds(3))
    peer = peer_for(hub)
    start, moved = peer.worker.start, []

    def slow(*asked: Any) -> DecodedPacket:
        before = peer.worker.x.clone()
        time.sleep(0.05)
        moved.append(not torch.equal(before, peer.worker.x))
        return start(*asked)

    peer.worker.start = slow  # type: ignore[method-assign]
    steps(hub, peer)

    assert moved == [False] * 3


@pytest.mark.parametrize(("after", "handed"), [(5, True), (7, False)], ids=["no step of it made", "one made"])
def test_a_lease_of_which_some_steps_are_made_is_work_that_others_will_do_again(
    after: int, handed: bool
) -> None:
    """Asked to leave in the first or in the second step of the second lease."""
    lossy: dict[str, object] = {"random_ratio": 0.5, "topk_ratio": 0.2}
    hub = FakeHub(recipe(staleness=0, local_steps=H, **lossy), rounds(9), room=10**6)
    peer = leaver(hub, after)
    events = list(finetune(hub, peer, now=0))

    assert any(isinstance(event, HandedOver) for event in events) == handed
    assert bool(hub.handoffs) == handed
    assert [delivery.delivers for delivery in hub.deliveries] == [[0]]
