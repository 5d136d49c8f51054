"""A user's own loop in a run: what it computes, what it is refused, and that it never hangs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from own_host import EXACT, Hosted, conv_net, flat, hosted, images
from torch import nn
from torch.nn.functional import cross_entropy

import cocktail_cli
from cocktail_cli.errors import Failure
from cocktail_cli.extensions.own_loop.hub import WeighedClaims
from cocktail_cli.extensions.own_loop.loop_trainer import own_gradients
from cocktail_cli.extensions.own_loop.swarm import Swarm
from recipes.training import clip
from transport.protocol import events as hub

pytestmark = pytest.mark.slow


def train(
    url: str,
    name: str = "ann",
    seed: int = 1,
    each: Callable[[Swarm], None] = lambda _: None,
    model: nn.Module | None = None,
    samples: int = 16,
    **options: Any,
) -> nn.Module:
    """The loop of a volunteer who knows PyTorch: batches of 16 images of his own, until the run is over."""
    model, generator = model or conv_net(3), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    with cocktail_cli.join_with(str(url), model, optimizer, name=name, **options) as swarm:
        while True:
            pixels, labels = images(16, generator)
            loss = cross_entropy(model(pixels), labels)
            loss.backward()
            swarm.step(loss, samples)
            each(swarm)
    return model


def plain(steps: int, seed: int = 1) -> torch.Tensor:
    """The same loop without a swarm."""
    model, generator = conv_net(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(steps):
        pixels, labels = images(16, generator)
        optimizer.zero_grad()
        cross_entropy(model(pixels), labels).backward()
        optimizer.step()
    return flat(model)


def test_one_peer_alone_trains_as_its_loop_would_without_a_swarm(tmp_path: Path) -> None:
    """x_0 and the rate are the run's; the model holds x' at the end, which is what the ledger says."""
    with hosted(tmp_path, conv_net(), compression=EXACT) as run:
        found = train(run.url)
        run.wait()

        assert torch.equal(flat(found), run.folded())
        torch.testing.assert_close(flat(found), plain(12), rtol=0, atol=1e-5)
        assert (plain(12) - flat(conv_net())).abs().max() > 0.01


def test_accumulated_and_scaled_gradients_are_one_step(tmp_path: Path) -> None:
    """Two halves of a batch, each scaled by a power of two as AMP does, are the whole batch."""
    model, generator = conv_net(3), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    with (
        hosted(tmp_path, conv_net(), compression=EXACT) as run,
        cocktail_cli.join_with(str(run.url), model, optimizer) as swarm,
    ):
        while True:
            pixels, labels = images(16, generator)
            for half in (slice(0, 8), slice(8, 16)):
                loss = cross_entropy(model(pixels[half]), labels[half])
                scaler.scale(loss / 2).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            swarm.step(loss, 16)

    torch.testing.assert_close(flat(model), plain(12), rtol=0, atol=1e-5)


def test_a_cell_of_a_notebook_takes_part(tmp_path: Path) -> None:
    """A notebook's kernel runs a cell inside its event loop, and here in a thread that no signal reaches."""
    found: list[nn.Module] = []

    async def cell(url: str) -> None:
        assert asyncio.get_running_loop().is_running()
        found.append(train(url))

    with hosted(tmp_path, conv_net()) as run:
        kernel = threading.Thread(target=lambda: asyncio.run(cell(str(run.url))))
        kernel.start()
        kernel.join(120)
        run.wait()

        assert torch.equal(flat(found[0]), run.folded())


def test_a_notebook_takes_part_with_the_lines_of_the_readme(tmp_path: Path) -> None:
    """A real kernel runs cells; the block of one ends with the run, and a later cell has its model."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    with hosted(tmp_path, conv_net()) as run:
        cells = (
            f"import sys\nsys.path[:0] = {sys.path!r}\n"
            "import cocktail_cli, torch\nfrom own_host import conv_net, flat, images\n"
            "model = conv_net(3)\noptimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
            "generator = torch.Generator().manual_seed(1)",
            f"with cocktail_cli.join_with({str(run.url)!r}, model, optimizer) as swarm:\n"
            "    while True:\n"
            "        pixels, labels = images(16, generator)\n"
            "        loss = torch.nn.functional.cross_entropy(model(pixels), labels)\n"
            "        loss.backward()\n"
            "        swarm.step(loss, 16)",
            "print(swarm.reason, float(flat(model).sum()))",
        )
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        nbclient.NotebookClient(book, timeout=120).execute()
        run.wait()

        said = book.cells[-1].outputs[0].text
        assert float(said.split()[-1]) == pytest.approx(float(run.folded().sum()))


def test_what_accelerate_has_prepared_takes_part(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), conv_net(3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9))
    generator = torch.Generator().manual_seed(1)
    with (
        hosted(tmp_path, conv_net(), compression=EXACT) as run,
        cocktail_cli.join_with(str(run.url), model, optimizer) as swarm,
    ):
        while True:
            pixels, labels = images(16, generator)
            loss = cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            swarm.step(loss, 16)

    torch.testing.assert_close(flat(model), plain(12), rtol=0, atol=1e-5)


def test_two_peers_learn_together_and_a_claim_of_samples_is_bounded(tmp_path: Path) -> None:
    run_training = {"max_steps": 20, "global_batch_size": 32}

    def liar(url: str) -> None:
        model, generator = conv_net(), torch.Generator().manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with cocktail_cli.join_with(url, model, optimizer, name="eve") as swarm:
            while True:
                pixels, labels = images(16, generator)
                loss = cross_entropy(model(pixels), labels)
                loss.backward()
                swarm.step(loss, 10**9)

    with hosted(tmp_path, conv_net(), {"min_peers": 2}, training=run_training) as run:
        eve = threading.Thread(target=liar, args=(str(run.url),))
        eve.start()
        weighed = next(one for one in run.hub._state.rounds.extensions if isinstance(one, WeighedClaims))
        seen: list[dict[str, float]] = []
        found = train(run.url, each=lambda swarm: seen.append(weighed.samples))
        run.wait()
        eve.join(120)

        assert torch.equal(flat(found), run.folded())
        both = [one for one in seen if len(one) == 2]
        assert both
        assert all(one["eve"] == 4 * one["ann"] for one in both)


def test_a_round_closes_once_its_peers_report_a_global_batch(tmp_path: Path) -> None:
    """Ann reports 16 of 16, so no round waits for bob, who reports 8 and computes for several rounds: he is
    never late, and delivers afterwards."""
    computing, later, seen = threading.Event(), threading.Event(), list[int]()

    def compute(swarm: Swarm) -> None:
        if swarm.last is not None:
            computing.set()
            assert later.wait(120)

    def count(swarm: Swarm) -> None:
        if swarm.last is not None and computing.is_set():
            seen.append(swarm.last.round)
            if seen[-1] >= seen[0] + 6:
                later.set()

    long = {"step_timeout": 40.0, "peer_timeout": 20.0, "start_timeout": 200.0}
    more = {"training": {"max_steps": 60}, "swarm": long}
    with hosted(tmp_path, conv_net(), {"first_peers": 2}, **more) as run:
        bob = threading.Thread(target=train, args=(str(run.url), "bob", 2, compute, None, 8))
        bob.start()
        train(run.url, "ann", each=count)
        run.wait()
        bob.join(120)

        late = [one for one in run.events if isinstance(one, hub.Warned) and "goes on without" in one.message]
        accepted = [one.accepted for one in run.events if isinstance(one, hub.RoundCommitted)]
        assert not late
        assert all(one == ("ann",) for one in accepted[seen[0] + 3 : seen[0] + 6])
        assert any("bob" in one for one in accepted[seen[0] + 6 :])


def test_held_out_loss_is_the_mean_of_what_peers_measure(tmp_path: Path) -> None:
    with hosted(tmp_path, conv_net(), training={"max_steps": 8}, checkpoint={"eval_steps": 4}) as run:
        pixels, labels = images(64, torch.Generator().manual_seed(9))

        def measure(model: nn.Module) -> float:
            assert not model.training
            assert not torch.is_grad_enabled()
            return float(cross_entropy(model(pixels), labels))

        found = train(run.url, evaluate=measure)
        run.wait()

        losses = [one.loss for one in run.events if isinstance(one, hub.EvaluationDone)]
        assert len(losses) >= 3
        with torch.no_grad():
            assert losses[0] == pytest.approx(measure_plain(conv_net(), pixels, labels), rel=1e-5)
            assert losses[-1] == pytest.approx(measure_plain(found, pixels, labels), rel=1e-5)


def measure_plain(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    return float(cross_entropy(model(pixels), labels))


def test_a_run_that_evaluates_refuses_a_peer_that_cannot(tmp_path: Path) -> None:
    with (
        hosted(tmp_path, conv_net(), checkpoint={"eval_steps": 4}) as run,
        pytest.raises(Failure, match="no `evaluate` is given"),
    ):
        train(run.url)


def test_the_global_model_can_be_used_at_any_time(tmp_path: Path) -> None:
    """x' is x_0 before the first update has come back, and the model has x_i again after the block."""
    apart: list[float] = []

    def look(swarm: Swarm) -> None:
        own = flat(swarm.joining.own)
        with swarm.global_model() as model:
            apart.append(float((flat(model) - own).norm()))
            with swarm.global_model() as inner, pytest.raises(Failure, match="inside swarm"):
                swarm.step(1.0, 16)
            assert inner is model
        assert torch.equal(flat(swarm.joining.own), own)

    with hosted(tmp_path, conv_net()) as run:
        train(run.url, each=look)

        assert any(one > 0 for one in apart)


def test_a_peer_that_leaves_hands_over_and_its_return_goes_on(tmp_path: Path) -> None:
    """The loop's own `break` ends in good order; the same peer comes back with its residual."""
    with hosted(tmp_path, conv_net(), training={"max_steps": 30}) as run:
        told: list[Any] = []
        steps: list[int] = []

        def leave(swarm: Swarm) -> None:
            steps.append(1)
            if len(steps) == 8:
                swarm.leave()

        train(run.url, each=leave, show=told.append)
        assert any("left" in reason for reason in run.left("ann"))
        assert any("handed over" in getattr(one, "state", "") for one in told)
        told.clear()
        found = train(run.url, show=told.append)
        run.wait()

        assert any("back with what it kept" in getattr(one, "state", "") for one in told)
        assert torch.equal(flat(found), run.folded())


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that goes on, for mistakes that are met in one."""
    with hosted(tmp_path_factory.mktemp("endless"), conv_net(), training={"max_steps": 100_000}) as run:
        yield run


def mistake(run: Hosted, each: Callable[[Swarm, nn.Module, torch.optim.Optimizer], None]) -> Failure:
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(Failure) as met, cocktail_cli.join_with(str(run.url), model, optimizer) as swarm:
        each(swarm, model, optimizer)
    return met.value


def test_a_step_without_gradients_is_one_error(endless: Hosted) -> None:
    met = mistake(endless, lambda swarm, model, optimizer: swarm.step(1.0, 16))

    assert "no parameter has a gradient" in met.message
    assert "loss.backward()" in met.hints[0]


def test_a_gradient_set_by_hand_is_a_step_that_only_reads_it(endless: Hosted) -> None:
    """No copy, no zeros: nothing is clipped here, and the next `backward` makes another gradient."""
    model = conv_net()
    with cocktail_cli.join_with(str(endless.url), model, torch.optim.SGD(model.parameters())) as swarm:
        gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        swarm.step(1.0, 16)

        assert not any(gradient._version for gradient in gradients)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_by_hand_that_share_memory_are_clipped_as_any_others() -> None:
    shared, trained = torch.ones(4), [nn.Parameter(torch.zeros(4)) for _ in range(4)]
    for parameter, gradient in zip(trained, (shared, shared, torch.ones(()).expand(4)), strict=False):
        parameter.grad = gradient

    gradients = own_gradients(trained)

    assert clip(gradients, 1.0) == pytest.approx(12**0.5)
    torch.testing.assert_close(gradients, [torch.full((4,), share * 12**-0.5) for share in (1, 1, 1, 0)])


def test_a_step_of_no_loss_is_one_error(endless: Hosted) -> None:
    def step(swarm: Swarm, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        model(torch.ones(1, 1, 8, 8)).sum().backward()
        swarm.step(loss, 16)

    for loss in (None, "x", torch.ones(3), nan):
        assert "a step of no loss" in mistake(endless, partial(step, loss=loss)).message


def test_a_loss_beyond_all_ranges_holds_up_no_round(endless: Hosted) -> None:
    def far_off(swarm: Swarm, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            model(torch.ones(1, 1, 8, 8)).sum().backward()
            swarm.step(1e30, 10**12)
        swarm.step(1.0, 10**13)

    assert "a step of 10000000000000 samples" in mistake(endless, far_off).message


@pytest.mark.parametrize("change", ["a second optimizer", "other weights", "another dtype"])
def test_parameters_that_something_else_has_changed_are_one_error(endless: Hosted, change: str) -> None:
    def step(swarm: Swarm, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 1, 8, 8)).sum().backward()
            swarm.step(1.0, 16)
        model(torch.ones(1, 1, 8, 8)).sum().backward()
        if change == "a second optimizer":
            second.step()
        elif change == "other weights":
            model.load_state_dict(conv_net(5).state_dict())
        else:
            model.double()
        swarm.step(1.0, 16)

    met = mistake(endless, step)

    assert met.message == "the parameters were changed between two steps"
    assert "one optimizer" in met.hints[0]


def test_a_swarm_outside_of_its_block_is_one_error(endless: Hosted) -> None:
    model = conv_net()
    swarm = cocktail_cli.join_with(str(endless.url), model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(Failure, match="the run is not joined"):
        swarm.step(1.0, 16)
    with pytest.raises(Failure, match="the run is not joined"), swarm.global_model():
        pytest.fail("it has a model")
    with swarm:
        swarm.leave()
    with pytest.raises(Failure, match="entered before"), swarm:
        pytest.fail("it joined")


def test_a_compiled_model_takes_part_as_itself(endless: Hosted) -> None:
    model = torch.compile(conv_net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps optimizer.step, and has no effect
    with cocktail_cli.join_with(str(endless.url), model, optimizer) as swarm:
        model(torch.ones(1, 1, 8, 8)).sum().backward()
        swarm.step(1.0, 16)
        swarm.leave()


def test_a_gradient_that_is_not_finite_is_one_error(endless: Hosted) -> None:
    def step(swarm: Swarm, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(torch.full((1, 1, 8, 8), torch.inf)).sum()
        loss.backward()
        swarm.step(loss, 1)

    met = mistake(endless, step)

    assert "not finite" in met.message
    assert "unscale_" in met.hints[0]


def test_a_loop_that_steps_the_optimizer_itself_is_told(endless: Hosted) -> None:
    met = mistake(endless, lambda swarm, model, optimizer: optimizer.step())

    assert "optimizer.step() was called" in met.message
    assert "swarm.step" in met.hints[0]


def test_a_model_takes_part_in_one_run_at_a_time(endless: Hosted) -> None:
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        cocktail_cli.join_with(str(endless.url), model, optimizer),
        pytest.raises(Failure, match="takes part in a run already"),
        cocktail_cli.join_with(str(endless.url), model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        pytest.fail("joined twice")


def test_a_vector_that_differs_is_refused_with_the_first_difference(endless: Hosted) -> None:
    model = conv_net()
    model[3] = nn.Linear(144, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    with pytest.raises(Failure) as met, cocktail_cli.join_with(str(endless.url), model, optimizer):
        pytest.fail("it joined")

    assert "parameter 2: this model trains 3.weight (5, 144), the run 3.weight (4, 144)" in met.value.message
    assert "save_base" in met.value.hints[0]


def test_a_loop_that_stops_calling_step_leaves(tmp_path: Path) -> None:
    """The peer goes, so that nobody waits for it; its next step says why."""
    short = {"step_timeout": 1.0, "peer_timeout": 10.0, "start_timeout": 30.0}
    with hosted(tmp_path, conv_net(), training={"max_steps": 1000}, swarm=short) as run:

        def stall(swarm: Swarm) -> None:
            if swarm.last is not None and swarm.last.round == 3:
                run.until(lambda: run.left("ann"), 20)

        with pytest.raises(Failure, match="its loop had not called"):
            train(run.url, each=stall)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.half(), "is torch.float16, and trained parameters must be float32"),
        (lambda model: model.to("meta"), "is on the meta device"),
        (lambda model: nn.DataParallel(model), "inside DataParallel"),
        (lambda model: model.requires_grad_(False), "all of its parameters are frozen"),
    ],
    ids=["float16", "meta", "wrapped", "frozen"],
)
def test_a_model_that_cannot_take_part_is_refused_before_the_run_is_dialled(
    change: Callable[[nn.Module], nn.Module], said: str
) -> None:
    model = change(conv_net())
    with pytest.raises(Failure, match=said):
        cocktail_cli.join_with("cocktail://unused", model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("url", [None, "", "https://example.org/run"])
def test_what_is_no_run_url_is_refused(url: Any) -> None:
    model = conv_net()
    with pytest.raises(Failure, match="the run URL"):
        cocktail_cli.join_with(url, model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.LBFGS(conv_net().parameters())])
def test_what_is_no_optimizer_or_needs_a_closure_is_refused(optimizer: Any) -> None:
    with pytest.raises(Failure, match="no optimizer whose step"):
        cocktail_cli.join_with("cocktail://unused", conv_net(), optimizer)
    with pytest.raises(Failure, match=r"expected a torch\.nn\.Module"):
        cocktail_cli.join_with("cocktail://unused", optimizer, optimizer)


def test_an_optimizer_that_scales_gradients_by_itself_is_refused() -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # makes the state that its optimizers ask for
    model = conv_net()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scaled = AcceleratedOptimizer(sgd, device_placement=False, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(Failure, match="scales gradients itself"):
        cocktail_cli.join_with("cocktail://unused", model, scaled)


def test_a_second_optimizer_is_refused() -> None:
    model = conv_net()
    with pytest.raises(Failure, match="lacks 2 of 4 trained parameters, first 0"):
        cocktail_cli.join_with("cocktail://unused", model, torch.optim.SGD(model[3].parameters(), lr=1.0))
    both = [*model.parameters(), *conv_net().parameters()]
    with pytest.raises(Failure, match="4 parameters of another model"):
        cocktail_cli.join_with("cocktail://unused", model, torch.optim.SGD(both, lr=1.0))


def test_an_error_of_the_users_own_goes_through_and_the_peer_leaves(endless: Hosted) -> None:
    def fail(swarm: Swarm) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(endless.url, name="dan", each=fail)
    endless.until(lambda: endless.left("dan"))


# ---- other models ------------------------------------------------------------------------------------------


def one_batch(model: nn.Module, batch: dict[str, torch.Tensor], url: str) -> None:
    """Train on one batch until the run is over."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with cocktail_cli.join_with(url, model, torch.optim.AdamW(trained, lr=1.0)) as swarm:
        while True:
            loss = model(**batch).loss
            loss.backward()
            swarm.step(loss, len(batch["input_ids"]))


def test_adapters_of_the_users_own_are_the_vector(tmp_path: Path) -> None:
    """The frozen base is each peer's; adapters begin as those of the run, whatever was drawn here."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    def adapted(seed: int) -> nn.Module:
        torch.manual_seed(0)
        base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16))
        torch.manual_seed(seed)
        return get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    tokens = torch.arange(32).view(4, 8)
    with hosted(tmp_path, adapted(1)) as run:
        model = adapted(2)
        one_batch(model, {"input_ids": tokens, "labels": tokens}, str(run.url))
        run.wait()

        assert torch.equal(flat(model), run.folded())
        assert len(flat(model)) == 2 * 16 + 48 * 2
        assert not torch.equal(flat(model), flat(adapted(1)))


def test_a_small_vision_language_model(tmp_path: Path) -> None:
    """Pictures and texts go in together; what they are is the loop's own affair."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees = CLIPVisionConfig(**small | {"num_hidden_layers": 2}, image_size=8, patch_size=4, projection_dim=16)
    reads = LlamaConfig(**small, vocab_size=64)
    config = LlavaConfig(vision_config=sees, text_config=reads, image_token_index=63)

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config)

    tokens = torch.tensor([[63, 63, 63, 63, 5, 6, 7], [63, 63, 63, 63, 8, 9, 1]])
    labels = tokens.masked_fill(tokens == 63, -100)
    batch = {"input_ids": tokens, "labels": labels, "pixel_values": torch.randn(2, 3, 8, 8)}
    with hosted(tmp_path, made(1)) as run:
        model = made(2)
        one_batch(model, batch, str(run.url))
        run.wait()

        assert torch.equal(flat(model), run.folded())
        assert not torch.equal(flat(model), flat(made(1)))
