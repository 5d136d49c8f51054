"""Published changes that the study tries: each does what its paper says, and all of them train."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from compress import Cocktail
from scripts.study.device_exchange import compressed, draws_of, in_turn, seen_in_bf16
from scripts.study.plan import ADAPTERS, SUM
from scripts.study.train import ELEMENTWISE, ByteModel, Optim, Setting, Size, Swarm, base, train

TINY = Size(hidden=32, layers=1, length=32, rows=4, steps=6, base_steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_correlated_rounding_is_right_in_the_mean_of_many_peers_and_better_than_its_parts(bits: int) -> None:
    """Nearest levels err alike for equal vectors, and draws of each peer's own err by chance."""
    one = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 2 - 1
    all_send = Cocktail(random_ratio=1.0, topk_ratio=1.0, quant_bits=bits)
    values = one.expand(16, -1)
    shared = draws_of(values, 7)
    alone = torch.rand(16, 4096, generator=torch.Generator().manual_seed(2))
    inside = one.abs() < 0.4  # no value is cut off by the outermost level

    def error(draws: torch.Tensor | None) -> float:
        mean = compressed(all_send, values, draws=draws).mean(0)
        return float((mean - one)[inside].square().mean())

    assert error(shared) < error(alone) / 4
    assert error(shared) < error(None)


def test_what_a_pass_in_bf16_sees_is_selected() -> None:
    """Changes of one length: those of small weights are seen, those of large ones are not."""
    weights = torch.logspace(-6, 6, 1000, base=2)
    change = torch.full((1, 1000), 2.0**-8)
    sent = compressed(Cocktail(1.0, 0.2, 16), change, weights)[0] != 0
    moved = (weights + change[0]).bfloat16() != weights.bfloat16()

    assert sent.sum() == 200
    assert bool(moved[sent].all())
    assert bool((seen_in_bf16(change[0], weights)[~moved] < 1.01).all())


def test_adapters_move_in_turn(folder: Path) -> None:
    """A step trains A or B and leaves the other; what it trained is sent in the next round."""
    setting = replace(ADAPTERS, peers=2, in_turn=1)
    model = ByteModel(TINY, base(TINY, folder), setting.lora)
    swarm = Swarm(model, setting, setting.training(1e-2, 1, TINY.steps))
    a, b = in_turn(swarm.peers[0].flat.layout.offsets, torch.device("cpu"))
    assert len(a.at) + len(b.at) == len(model.start)
    for step in range(4):
        before, shared = swarm.vectors[0].clone(), swarm.shared.clone()
        started = swarm.start()
        swarm.step(torch.randint(256, (4, 32)), 1e-2)
        trained, other = (a, b) if step % 2 == 0 else (b, a)
        assert torch.equal(other.take(swarm.vectors[0]), other.take(before))
        assert step == 0 or not torch.equal(trained.take(swarm.vectors[0]), trained.take(before))
        swarm.exchange(started, set())
        assert torch.equal(trained.take(swarm.shared), trained.take(shared)), "it goes with the next round"


@pytest.mark.parametrize("optim", ELEMENTWISE)
def test_a_step_of_a_whole_vector_is_that_of_its_parameters(
    optim: Optim, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, ends = replace(SUM, peers=2, optim=optim), []
    for elementwise in (ELEMENTWISE, ()):
        monkeypatch.setattr("scripts.study.train.ELEMENTWISE", elementwise)
        swarm = Swarm(ByteModel(TINY, base(TINY, folder)), setting, setting.training(1e-3, 1, TINY.steps))
        for step in range(3):
            swarm.step(torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(step)), 1e-3)
        ends.append(torch.stack(swarm.vectors))

    torch.testing.assert_close(*ends, rtol=1e-6, atol=0)


def test_a_step_ahead_is_twice_the_last_less_the_one_before(folder: Path) -> None:
    start = base(TINY, folder)
    rows = [torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def steps(setting: Setting) -> list[torch.Tensor]:
        swarm = Swarm(ByteModel(TINY, start), setting, setting.training(1e-3, 1, TINY.steps))
        at = [swarm.vectors[0].clone()]
        for own in rows:
            swarm.step(own, 1e-3)
            at.append(swarm.vectors[0].clone())
        return [after - before for before, after in pairwise(at)]

    plain = replace(SUM, peers=1)
    first, _ = steps(plain)
    ahead, _ = steps(replace(plain, ahead=1))
    assert torch.allclose(ahead, 2 * first, atol=1e-7), "nothing was before the first"
    none, second = steps(replace(plain, gathering=1))
    assert not none.any()
    assert second.any()


@pytest.mark.parametrize(
    "setting",
    [
        replace(SUM, ahead=1),
        replace(SUM, seen=1),
        replace(ADAPTERS, bits=1, correlated=1),
        replace(ADAPTERS, in_turn=1),
        replace(ADAPTERS, gathering=1, ahead=1),
    ],
    ids=lambda setting: ",".join(
        k for k in ("ahead", "seen", "correlated", "in_turn") if getattr(setting, k)
    ),
)
def test_each_of_them_learns(setting: Setting, folder: Path) -> None:
    untouched = train(TINY, replace(setting, peers=2), 0.0, 1, folder).loss

    assert train(replace(TINY, steps=30), replace(setting, peers=2), 5e-3, 1, folder).loss < untouched - 0.05
