"""The host's side by its commands: launch, refuse `cocktail join`, resume after kill -9, verify."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import closing
from math import nan
from pathlib import Path

import pytest
import torch
import typer
from forked import Forked, needs_fork
from own_host import conv_net, flat
from safetensors.torch import load_file
from test_swarm import train
from torch import nn

import cocktail_cli
from cocktail_cli.assembly import ModelOnDisk, recipe_type
from cocktail_cli.errors import Failure
from cocktail_cli.extensions.dashboard.command import invitation
from cocktail_cli.extensions.own_loop import parse_function
from cocktail_cli.extensions.own_loop.named_tensors import measure
from cocktail_cli.extensions.own_loop.swarm import Swarm
from cocktail_cli.host import HostSession
from cocktail_cli.ui import events
from cocktail_cli.volunteer import Resources
from recipes.config import load_recipe
from recipes.errors import ModelError, RecipeError

LAUNCH = ("launch", "own-loop", "--port", "0", "--bind", "127.0.0.1", "--json", "-o", "out", "warmup_steps=0")
EVALUATE = ("--evaluate", "held_out:bias")
SCRIPT = ["own_loop.script=https://example.org/train.py", f"own_loop.script_sha256={'ab' * 32}"]


@pytest.mark.slow
@needs_fork
def test_a_run_of_own_loops_from_launch_to_verify(forked: Forked, tmp_path: Path) -> None:
    """Its hub is killed and resumed meanwhile; the peer goes on. The result is the net that was trained, and
    `launch` and `cocktail join` say how one takes part."""
    cocktail_cli.save_base(conv_net(), tmp_path / "base")
    for here in (tmp_path, tmp_path / "again"):
        here.mkdir(exist_ok=True)
        (here / "held_out.py").write_text("def bias(state):\n    return state['3.bias'].square().sum()\n")
    keys = ["max_steps=60", "save_steps=20", "global_batch_size=16", "learning_rate=1e-2", *SCRIPT]
    host = forked.start(tmp_path, *LAUNCH, *EVALUATE, "--model", str(tmp_path / "base"), *keys)
    started, here, go_on = host.until("run_started"), threading.Event(), threading.Event()
    url = started["url"]
    found: list[nn.Module] = []

    def wait(swarm: Swarm) -> None:
        if swarm.last is not None and swarm.last.round > 4:
            here.set()
            go_on.wait(120)

    thread = threading.Thread(target=lambda: found.append(train(url, each=wait)), daemon=True)
    thread.start()
    assert here.wait(120)
    refused = forked.join(tmp_path / "join", url)
    assert refused.wait() == 6
    assert not refused.events("joined")
    (hint,) = refused.told[-1]["error"]["hints"]
    said = f"fetch https://example.org/train.py (sha256 {'ab' * 32}), read it, and start it with the run URL"
    assert hint == started["invitation"] == said
    host.send(signal.SIGKILL)
    host.wait()
    go_on.set()
    again = forked.start(tmp_path / "again", "resume", str(tmp_path / "out"), "--json", *EVALUATE)
    thread.join(120)
    finished = again.until("run_finished")
    assert again.wait() == 0

    model = conv_net(7)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(flat(model), flat(found[0]))
    (base_eval,), evals = host.events("eval"), again.events("eval")
    assert base_eval["round"] == 0
    assert len(evals) >= 2
    bias = pytest.approx(float(model[3].bias.detach().square().sum()))
    assert evals[-1]["loss"] == bias == finished["eval_loss"]
    assert finished["prompt"] is None
    assert "data of its peers" in (tmp_path / "out" / "README.md").read_text()
    verify = forked.start(tmp_path / "verify", "verify", str(tmp_path / "out"))
    assert verify.wait() == 0, verify.said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.lora_r=4", "a peer's own program decides it"),
        ("max_steps=-1", "is required by `own_loop:`"),
        ("own_loop.script=https://example.org/a.py", "stand together"),
        ("own_loop.loss_range=[1, 0]", "the least loss, then the greatest"),
    ],
)
def test_a_recipe_that_contradicts_own_loops_is_refused(override: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("own-loop", [override], extend=recipe_type)


def test_the_page_invites_loops_and_a_peer_without_a_model_is_refused_wherever_it_joins() -> None:
    recipe = load_recipe("own-loop", ["max_steps=4"], extend=recipe_type)
    how, machine = recipe.objective.invitation, Resources(0, 0, 0)

    *before, says, url = invitation("cocktail://hub", how).splitlines()
    assert invitation("cocktail://hub", f"{how}\nrm").splitlines()[:-2] == before, "a hub's text is a comment"
    machine.check(recipe, given=conv_net())
    with pytest.raises(Failure, match="peers bring model, data and loop") as met:
        machine.check(recipe)

    assert (says, url, met.value.hints) == (f"# {how}", "cocktail://hub", (how,))


def test_data_sets_have_no_place_in_a_run_of_own_loops(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="peers have their own data"):
        load_recipe("own-loop", data="builtin:python-docs", extend=recipe_type)


def test_a_base_with_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    from cocktail_cli.assembly import pinned

    net = conv_net()
    with torch.no_grad():
        net[3].bias[1] = torch.nan
    cocktail_cli.save_base(net, tmp_path)
    recipe = load_recipe("own-loop", model=str(tmp_path), extend=recipe_type)

    with pytest.raises(ModelError, match=r"3\.bias has a number that is NaN"):
        pinned(recipe, tmp_path)


def test_a_function_of_the_host_that_fails_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    cocktail_cli.save_base(conv_net(), tmp_path)
    model = ModelOnDisk(tmp_path, 3, 4, print, lambda: False)

    assert measure(lambda state: float(len(state)), model) == events.Eval(4, 3, 4.0)
    for function, said in ((lambda state: state["none"], "KeyError: 'none'"), (lambda state: nan, "nan")):
        met = measure(function, model)
        assert isinstance(met, events.Warning)
        assert said in met.message


@pytest.mark.parametrize("text", ["json", "no_such_module:loss", "json:no_such_function"])
def test_a_function_that_is_not_there_is_refused_as_it_is_typed(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write MODULE:FUNCTION"):
        parse_function(text)


def test_a_function_of_the_host_is_for_own_loops_alone(tmp_path: Path) -> None:
    with closing(HostSession(load_recipe("smoke", extend=recipe_type), tmp_path, [])) as session:
        session.given = {"own_loop": {"evaluate": len}}
        with pytest.raises(Failure, match="is for runs with a section"):
            session.prepare()


def test_a_base_is_written_with_the_config_that_its_model_has(tmp_path: Path) -> None:
    cocktail_cli.save_base(conv_net(), tmp_path)

    assert json.loads((tmp_path / "config.json").read_text()) == {"architectures": ["Sequential"]}
