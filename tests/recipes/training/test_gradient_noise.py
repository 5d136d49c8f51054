"""The mean of peers' steps is AdamW's step on the mean gradient, whoever takes part with how many samples."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from test_loop import SAMPLES, FakeHub, OneRound, peer_for, recipe, steps
from torch import Tensor

from recipes.algorithm import one_machine
from recipes.config import PRESETS, Compression, Training
from recipes.training import (
    GradientNoise,
    build_optimizer,
    positions_of,
    positions_within,
    restore,
    set_learning_rate,
)
from recipes.training.gradient_noise import AT_FIRST, PATIENCE, PLACES, VALUES
from recipes.training.loop import share_of
from recipes.training.peer_checkpoint import keep
from recipes.weight_files import Layout

LAYOUT = Layout(("a", "b", "c", "d"), ((10, 100), (16,), (2000,), (1000, 1)))
P, WINDOW = LAYOUT.size, 0.999


class Gradients:
    """Draws the gradient of so many samples: a signal of this size, and noise of variance 1 a sample."""

    def __init__(self, signal: float, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.signal = signal * self.noise().sign()

    def noise(self) -> Tensor:
        return torch.randn(P, generator=self.generator)

    def of(self, samples: int, step: int = 0) -> Tensor:
        """Draw the mean gradient of some samples."""
        return self.signal + self.noise() / samples**0.5


class Alternating(Gradients):
    """A signal that turns around with each step, as where a rate is nearly too high."""

    def of(self, samples: int, step: int = 0) -> Tensor:
        return (-1) ** step * self.signal + self.noise() / samples**0.5


def measured(
    draw: Gradients, samples: int, batch: int, *, parts: bool = False, count: int = 200
) -> GradientNoise:
    """Measure gradients of `samples` of a batch: in two halves, or one at a time."""
    noise = GradientNoise(positions_of(LAYOUT), WINDOW)
    for step in range(count):
        noise.begin(samples / batch)
        gradient = draw.of(samples // 2, step) / 2 if parts else torch.zeros(P)
        if parts:
            noise.partly(0.5, gradient[noise.positions])
        gradient += draw.of(samples // 2, step) / 2 if parts else draw.of(samples, step)
        noise.take(gradient[noise.positions])
        noise.observe()
    return noise


def truth(signal: float, samples: int, batch: int) -> float:
    """The root of (M + q N) / (M + N)."""
    return float(((signal**2 + 1 / samples) / (signal**2 + 1 / batch)) ** 0.5)


@pytest.mark.parametrize(("samples", "batch"), [(1, 8), (1, 64), (7, 8), (8, 64)])
@pytest.mark.parametrize("signal", [0.0, 0.2, 1.0, 5.0])
def test_steps_become_longer_by_what_the_noise_of_a_peers_own_samples_has_made_them_shorter(
    signal: float, samples: int, batch: int
) -> None:
    noise = measured(Gradients(signal), samples, batch)

    close = 0.1 if signal == 0 and batch == 64 else 0.03  # 27 measurements
    assert noise.sums.factor == pytest.approx(truth(signal, samples, batch), rel=close)
    assert noise.sums.norms(samples / batch) == pytest.approx(truth(signal, samples, batch), rel=close)


def test_where_all_samples_agree_and_where_one_peer_has_them_all_a_step_stays_what_it_is() -> None:
    assert measured(Gradients(100.0), 1, 16).sums.factor == pytest.approx(1, abs=1e-3)
    alone = measured(Gradients(0.1), 8, 8)
    assert (alone.sums.factor, alone.sums.norms(1.0)) == (1.0, 1.0)


def test_what_turns_around_with_each_step_is_signal_to_the_parts_of_a_lease() -> None:
    """To gradients of two steps it is noise, which they are asked about where a lease has no parts."""
    want, most = truth(0.5, 2, 16), 8**0.5

    assert measured(Alternating(0.5), 2, 16, parts=True).sums.factor == pytest.approx(want, rel=0.03)
    assert measured(Alternating(0.5), 2, 16).sums.factor == pytest.approx(most, rel=0.01)


def test_gradients_of_two_steps_are_asked_once_no_lease_has_had_parts_for_some_time() -> None:
    noise, draw = measured(Alternating(0.5), 2, 16, parts=True), Alternating(0.5, seed=1)
    before = noise.sums.factor
    for step in range(PATIENCE):
        noise.begin(1 / 8)
        assert not noise.wanted
        noise.take(draw.of(2, step)[noise.positions])
        noise.observe()
    assert noise.sums.factor == pytest.approx(before, rel=1e-3)
    for step in range(200):
        noise.take(draw.of(2, step)[noise.positions])
        noise.observe()
    assert noise.sums.factor > 1.1 * before


@pytest.mark.parametrize("counts", [(1,) * 8, (1, 7), (2, 8, 6), (4, 4, 4, 4)])
@pytest.mark.parametrize("signal", [0.05, 0.5])
def test_the_mean_of_peers_steps_is_adamws_step_on_the_mean_gradient(
    counts: Sequence[int], signal: float
) -> None:
    """With AdamW itself, epsilon and weight decay included, over a few hundred steps."""
    training = Training(learning_rate=1e-2, adam_beta1=0.0, weight_decay=0.1, adam_epsilon=1e-2)
    ways = [torch.ones(4, P // 4).requires_grad_() for _ in (*counts, 0)]
    optimizers = [build_optimizer([way], training) for way in ways]
    noises, draw, moved = (
        [GradientNoise(positions_of(LAYOUT), WINDOW) for _ in counts],
        Gradients(signal),
        torch.zeros(P),
    )
    batch = sum(counts)
    for step in range(200):
        whole = torch.zeros(P)
        for way, optimizer, noise, count in zip(ways, optimizers, noises, counts, strict=False):
            gradient = draw.of(count)
            whole += gradient * (count / batch)
            noise.begin(count / batch)
            noise.take(gradient[noise.positions])
            noise.observe()
            way.grad, before = gradient.view_as(way), way.detach().clone()
            set_learning_rate(optimizer, 1e-2, longer=noise.sums.factor)
            optimizer.step()
            if step >= 100:
                moved += (way.detach() - before).flatten() * (count / batch)
        ways[-1].grad, before = whole.view_as(ways[-1]), ways[-1].detach().clone()
        optimizers[-1].step()
        if step >= 100:
            moved -= (ways[-1].detach() - before).flatten()
            ways[-1].grad = None

    along = float(moved @ draw.signal / draw.signal.norm() ** 2)  # of both, what follows the signal
    one_machine = 100 * 1e-2 * signal / (signal**2 + 1 / batch) ** 0.5 / signal
    assert abs(along) < 0.03 * one_machine


def test_epsilon_and_weight_decay_stay_what_they_are_beside_the_recipes_rate() -> None:
    """A step that is twice as long is that of a second moment a quarter as large."""
    training = Training(learning_rate=1e-2, adam_beta1=0.0, weight_decay=0.5, adam_epsilon=0.3)
    long, plain = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    for way, gradient, longer in ((long, 2.0, 2.0), (plain, 1.0, 1.0)):
        optimizer = build_optimizer([way], training)
        for _ in range(2):  # from what was given, not from what was set last
            with torch.no_grad():
                way.fill_(1)
            optimizer.state.clear()
            way.grad = torch.full_like(way, gradient)
            set_learning_rate(optimizer, 1e-2, longer=longer)
            optimizer.step()

    decayed = 1 - 1e-2 * 0.5
    torch.testing.assert_close(plain, torch.full((3, 3), decayed - 1e-2 / 1.3))
    torch.testing.assert_close(long, torch.full((3, 3), decayed - 2e-2 * 2 / (2 + 0.6)))


def test_one_odd_batch_decides_nothing() -> None:
    for factor in (100.0, -100.0):
        draw, noise = Gradients(0.3), measured(Gradients(0.3), 1, 16, count=30)
        usual = noise.sums.factor
        noise.begin(1 / 16)
        noise.take(factor * draw.of(1)[noise.positions])
        noise.observe()
        noise.take(draw.of(1)[noise.positions])
        noise.observe()
        assert noise.sums.factor == pytest.approx(usual, rel=0.15)


def test_the_first_step_is_an_ordinary_one_and_soon_they_are_as_long_as_they_should_be() -> None:
    assert measured(Gradients(0.2), 1, 16, count=1).sums.factor == 1
    assert measured(Gradients(0.2), 1, 16, count=1).sums.norms(1 / 16) == 1
    assert measured(Gradients(0.2), 1, 16, count=10).sums.factor == pytest.approx(truth(0.2, 1, 16), rel=0.06)


def test_when_peers_come_and_go_the_factor_follows_the_second_moment_that_this_peer_has() -> None:
    """v has steps of larger leases in it for some time; with the factor it is that of the mean gradient."""
    draw, noise, window = Gradients(0.1), GradientNoise(positions_of(LAYOUT), 0.99), 0.99
    v, weight = torch.zeros(P), 0.0
    for step in range(600):
        samples = (8, 2, 8)[step // 200]  # of 16: two peers, eight, two
        noise.begin(samples / 16)
        gradient = draw.of(samples)
        noise.take(gradient[noise.positions])
        noise.observe()
        v.lerp_(gradient.square(), 1 - window)
        weight += (1 - weight) * (1 - window)
        if step > 20:
            mean = float(v.mean()) / weight / noise.sums.factor**2
            assert mean == pytest.approx(float(draw.signal.square().mean()) + 1 / 16, rel=0.08), step


def test_what_was_measured_is_kept_and_goes_on_alike() -> None:
    draw, noise = Gradients(0.3), measured(Gradients(0.3), 2, 16, parts=True, count=40)
    again = GradientNoise(positions_of(LAYOUT), WINDOW)
    again.load(noise.state().clone())
    assert again.sums == noise.sums
    for step in range(2 * PATIENCE):
        gradient = draw.of(2, step)[noise.positions]
        for one in (noise, again):
            one.begin(1 / 8)
            one.take(gradient)
            one.observe()
        assert again.sums.factor == noise.sums.factor


def test_each_place_lies_in_one_parameter_and_large_ones_have_more() -> None:
    positions = positions_of(LAYOUT)
    assert positions.shape == (PLACES, VALUES)
    numbers = torch.bucketize(positions, torch.tensor(LAYOUT.offsets), right=True) - 1
    assert (numbers == numbers[:, :1]).all()
    assert torch.bincount(numbers[:, 0], minlength=4).tolist() == [16, 0, 32, 16]
    assert int(positions_of(Layout(("a",), ((3,),))).max()) < 3


def test_parts_of_a_vector_together_measure_what_all_of_it_does() -> None:
    """As machines of a replica do, each with some layers."""
    draw, whole = Gradients(0.3), GradientNoise(positions_of(LAYOUT), WINDOW)
    offsets, shapes = LAYOUT.offsets, LAYOUT.shapes
    parts = [Layout(LAYOUT.names[a:b], shapes[a:b]) for a, b in ((0, 2), (2, 4))]
    noises = [GradientNoise(positions_within(LAYOUT, part), WINDOW) for part in parts]
    for _ in range(50):
        gradient = draw.of(1)
        for noise, own in (
            (whole, gradient),
            (noises[0], gradient[: offsets[2]]),
            (noises[1], gradient[offsets[2] :]),
        ):
            noise.begin(1 / 8)
            noise.take(own[noise.positions])
            noise.observe()
    sums = noises[0].sums + noises[1].sums

    assert sums.factor == pytest.approx(whole.sums.factor, rel=1e-4)
    assert sums.norms(1 / 8) == pytest.approx(whole.sums.norms(1 / 8), rel=1e-4)
    assert sums.least == whole.sums.least


# ---- in the loop -------------------------------------------------------------------------------------------


def hub_of(preset: str = "", **rounds: int) -> FakeHub:
    settings = recipe() if not preset else recipe(preset=preset, staleness=1)
    training = settings.training.model_copy(update={"optim": "adamw_torch", "global_batch_size": 16})
    made = settings.model_copy(update={"training": training})
    return FakeHub(made, [OneRound(t, t, steps=40, **rounds) for t in range(40)])


def test_a_lease_is_computed_in_parts_now_and_then_where_others_have_the_rest_of_the_samples() -> None:
    """Its gradient is the same."""
    for peers, cut in ((1, 0), (4, AT_FIRST + 2)):  # and steps 16 and 32 of 40
        hub = hub_of(peers=peers)
        peer = peer_for(hub, micro_batch=SAMPLES)
        steps(hub, peer)
        assert peer.trainer.model.micro_batches == 40 + cut


def test_a_peer_with_a_quarter_of_the_samples_makes_longer_steps_unless_they_agree() -> None:
    """All samples of the fake hub are alike, so the parts of a lease show no noise."""
    hub = hub_of(peers=4)
    peer = peer_for(hub, micro_batch=SAMPLES)
    steps(hub, peer)
    assert peer.trainer.noise.share == SAMPLES / 16
    assert peer.trainer.noise.sums.factor == pytest.approx(1, abs=1e-3)

    unlike: Callable[[Tensor], Tensor] = torch.randn_like  # in place of their gradient
    peer.trainer.flat.model.table.register_hook(unlike)
    hub.rounds, hub.ended = [OneRound(t, t, steps=80, peers=4) for t in range(40, 80)], None
    steps(hub, peer)
    assert peer.trainer.noise.sums.factor > 1.2


def test_published_methods_have_the_peers_optimizers_as_they_are() -> None:
    ours = {preset for preset in PRESETS if one_machine(Compression.model_validate({"preset": preset}))}
    assert ours == {"cocktail", "cocktail-wide", "cocktail-thin", "lora-cocktail", "allreduce"}
    averaged, published = peer_for(hub_of("allreduce")), peer_for(hub_of("diloco"))

    assert share_of(averaged, OneRound(0, 0, peers=8), 2) == 2 / 16
    assert share_of(averaged, OneRound(0, 0, peers=2), 99) == 1
    assert share_of(averaged, OneRound(0, 0, peers=1), 2) == 1, "its lease is all there is"
    assert share_of(published, OneRound(0, 0, peers=8), 2) == 1


def test_a_gradient_is_clipped_where_the_mean_gradient_would_be() -> None:
    peer = peer_for(hub_of(peers=4))
    trainer = peer.trainer
    trainer.noise = measured_at(trainer.layout, share=1 / 16)
    trainer.zero(1 / 16)
    trainer.flat.grad.fill_(1.0)
    norm = trainer.clip(0.5)

    assert norm == pytest.approx(11)
    assert float(trainer.flat.grad.norm()) == pytest.approx(0.5 * trainer.noise.sums.norms(1 / 16))
    assert trainer.noise.sums.norms(1 / 16) == pytest.approx(4, rel=0.1)


def measured_at(layout: Layout, share: float) -> GradientNoise:
    """Measure noise alone."""
    noise = GradientNoise(positions_of(layout), WINDOW)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        noise.begin(share)
        noise.take(torch.randn(layout.size, generator=generator)[noise.positions])
        noise.observe()
    return noise


def test_a_peer_that_comes_back_has_what_it_measured(tmp_path: Path) -> None:
    hub = hub_of(peers=4)
    peer, fresh = peer_for(hub), peer_for(hub)
    peer.trainer.noise = measured_at(peer.trainer.layout, 1 / 16)
    keep(peer, tmp_path / "peer", {})
    restore(fresh, tmp_path / "peer")

    assert fresh.trainer.noise.sums.factor == peer.trainer.noise.sums.factor > 3
    assert torch.equal(fresh.trainer.noise.state(), peer.trainer.noise.state())
