"""A hook of DistributedDataParallel: what it leaves out comes later, and all ranks have the same bits."""

import multiprocessing
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # by DDP: once, before ranks are forked
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocktail_cli import CocktailState, cocktail_hook
from compress import Cocktail

EXACT = Cocktail(random_ratio=1.0, topk_ratio=1.0, quant_bits=32)
SPARSE = Cocktail(random_ratio=0.5, topk_ratio=0.2, quant_bits=4)
WIDTH = 64

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks ranks")


class Model(nn.Module):
    """Two layers in one bucket, of which the second need not be used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        return x if skips else self.second(x)


def of(parameters: Any) -> Tensor:
    return nn.utils.parameters_to_vector(parameters).detach().clone()


def trained(
    state: CocktailState | None, steps: int = 6, seed: int = 0, **options: Any
) -> DistributedDataParallel:
    """Train with SGD: on a half batch twice a step with `accumulates`; every third step skips a layer with
    `find_unused_parameters`."""
    accumulates = options.pop("accumulates", False)
    model = DistributedDataParallel(options.pop("model", None) or Model(), **options)
    if state is not None:
        model.register_comm_hook(state, cocktail_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=generator)
        skips = step % 3 == 2 and options.get("find_unused_parameters", False)
        if accumulates:
            with model.no_sync():
                (model(x[:4]) - x[:4]).square().mean().backward()
        (model(x[4:], skips) - x[4:]).square().mean().backward()
        optimizer.step()
    return model


def exactly() -> tuple[Tensor, Tensor]:
    ours = trained(CocktailState(EXACT))
    return of(ours.parameters()), of(trained(None).parameters())


def of_every_kind() -> list[Tensor]:
    kinds = ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"accumulates": True})
    return [of(trained(CocktailState(SPARSE, dense_steps=3), **kind).parameters()) for kind in kinds]


def owed() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Have one gradient in all steps: return the sum that was applied, what it should be, and the errors."""
    weights = nn.Linear(4 * WIDTH, WIDTH, bias=False)
    nn.init.zeros_(weights.weight)
    model, state = DistributedDataParallel(weights), CocktailState(SPARSE)
    model.register_comm_hook(state, cocktail_hook)
    gradient = torch.randn(WIDTH, 4 * WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    wanted = gradient.clone()
    dist.all_reduce(wanted)
    for _ in range(9):
        model.zero_grad()
        (model(torch.eye(4 * WIDTH)).T * gradient).sum().backward()
        assert weights.weight.grad is not None
        weights.weight.data += weights.weight.grad
    (own, shared), n = state.errors[0], wanted.numel()
    shard = state.compressor.cut(n, 0)[dist.get_rank()]
    left = own / dist.get_world_size()
    shard.of(left).add_(shared)
    dist.all_reduce(left)
    return of([weights.weight]), 9 * wanted.view(-1) / dist.get_world_size(), [left]


def resumed() -> tuple[Tensor, Tensor, int]:
    """Train on after a checkpoint, and without one; DDP has one bucket at first, and then several."""
    state, small = CocktailState(SPARSE), {"seed": 1, "bucket_cap_mb": 0.01}
    model = trained(state, **small).module
    kept, weights = pickle.dumps(state.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    state.load_state_dict(state.state_dict())
    on = trained(state, model=model, **small)
    again, fresh = Model(), CocktailState(SPARSE)
    again.load_state_dict(weights)
    fresh.load_state_dict(pickle.loads(kept))
    return of(on.parameters()), of(trained(fresh, model=again, **small).parameters()), len(fresh.errors)


def overflowing() -> tuple[Tensor, Tensor, Tensor]:
    """Have infinity in the gradient of one rank: return the gradients, and the errors before and after."""
    state = CocktailState(SPARSE)
    model = trained(state)
    before = state.errors[0][0].clone()
    model.zero_grad()
    (model(torch.ones(1, WIDTH)).sum() * (torch.inf if dist.get_rank() == 1 else 1)).backward()
    return of(p.grad for p in model.parameters()), before, state.errors[0][0]


def refused() -> list[str]:
    """Return the words of errors: too few dense steps, checkpoints of more ranks and of none, other types."""
    said, more, none = [], CocktailState(SPARSE).state_dict() | {"ranks": 9}, cast(Any, None)
    wrongs: tuple[Callable[[], object], ...] = (
        lambda: CocktailState(dense_steps=1),
        lambda: CocktailState().load_state_dict(more),
        lambda: CocktailState().load_state_dict({}),
        lambda: CocktailState(none),
        lambda: trained(cast(Any, SPARSE), steps=1),
    )
    for wrong in wrongs:
        try:
            wrong()
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


STORIES: tuple[Callable[[], Any], ...] = (exactly, of_every_kind, owed, resumed, overflowing, refused)


def rank_of(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    torch.save({story.__name__: story() for story in STORIES}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Fork the ranks; return what each has returned of each story."""
    folder, fork = tmp_path_factory.mktemp("ranks"), multiprocessing.get_context("fork")
    started = [
        fork.Process(target=rank_of, args=(rank, request.param, folder)) for rank in range(request.param)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join()
    assert [one.exitcode for one in started] == [0] * request.param
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def test_sending_everything_is_the_mean_that_ddp_makes(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        torch.testing.assert_close(*one["exactly"])


def test_all_ranks_have_the_same_bits_whatever_the_model_does(ranks: list[dict[str, Any]]) -> None:
    first, *others = ranks
    assert len(first["of_every_kind"]) == 4
    for other in others:
        assert all(map(torch.equal, first["of_every_kind"], other["of_every_kind"]))


def test_what_was_not_sent_is_in_the_errors_and_nothing_is_lost(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        applied, wanted, (left,) = one["owed"]
        assert left.abs().max() > 0.1, "some of it waits"
        torch.testing.assert_close(applied + left, wanted, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        on, again, buckets = one["resumed"]
        assert torch.equal(on, again)
        assert buckets > 1


def test_an_overflow_at_one_rank_is_seen_by_all_and_changes_no_error(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        gradient, before, after = one["overflowing"]
        assert gradient.isnan().all()
        assert torch.equal(before, after)


def test_what_cannot_work_is_refused_in_words(ranks: list[dict[str, Any]]) -> None:
    early, other, empty, compressor, state = ranks[0]["refused"]
    assert early == "dense_steps 1: at least 2, as DDP cuts its buckets anew after the first"
    assert other == f"a checkpoint of 9 ranks, there are {len(ranks)}"
    assert empty == "{} is not what state_dict() of a CocktailState returned"
    assert compressor == "the compressor is None, expected a compress.Cocktail"
    assert "expected a CocktailState: model.register_comm_hook" in state
