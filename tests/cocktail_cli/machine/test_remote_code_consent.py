"""`--trust-remote-code`: code that comes with a model runs on a machine only where its owner says so."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from forked import Forked, needs_fork
from in_this_process import Run
from test_processes import LAUNCH

from cocktail_cli.errors import Failure
from cocktail_cli.machine import check_trust
from cocktail_cli.volunteer import check_files
from recipes.config import load_recipe
from recipes.models import BUILTIN_MODELS
from transport.protocol import messages

WANTS = "model.trust_remote_code=true"
MODELING = """
import os
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

with Path({ran!r}).open("a") as ran:
    ran.write(f"{{os.getpid()}}\\n")

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def save_own(folder: Path, ran: Path) -> Path:
    """A model of a class that transformers does not have. Each process that runs its code adds a line."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=320, **sizes, **ends)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(told | {"model_type": "own-llama", "auto_map": own}))
    (folder / "modeling_own.py").write_text(MODELING.format(ran=str(ran)))
    for file in BUILTIN_MODELS["builtin:tiny-gpt-neox"].glob("tokenizer*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.parametrize(
    "command",
    [("launch", "smoke"), ("validate", "smoke")],
)
def test_a_recipe_alone_does_not_allow_model_code(cocktail: Run, command: tuple[str, ...]) -> None:
    said = cocktail(*command, WANTS)

    assert said.exit == 2
    assert "comes with Python code, which this recipe wants to run here" in said.err
    assert "--trust-remote-code, if you trust whoever wrote it" in said.err


def test_the_flag_alone_admits_no_file_of_code() -> None:
    """A run whose recipe says nothing of code cannot have a peer fetch some."""
    files = [messages.File("config.json", 2, "0" * 64), messages.File("modeling.py", 2, "0" * 64)]
    check_trust(load_recipe("smoke"), trusted=True)

    check_files(files, code=True)
    with pytest.raises(Failure, match=r"the run offers a file 'modeling\.py'"):
        check_files(files)


@pytest.mark.slow
@needs_fork
def test_model_code_runs_with_the_flag_and_without_it_the_run_is_refused(
    forked: Forked, tmp_path: Path, cocktail: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = save_own(tmp_path / "own", tmp_path / "ran"), tmp_path / "ran"
    wants = ["--model", str(model), WANTS, "--trust-remote-code", "max_steps=1000"]

    launch = forked.start(tmp_path, *LAUNCH, *wants, "--peers", "0")
    url = launch.next("run_started")["url"]
    guest = forked.join(tmp_path / "guest", url, "--trust-remote-code")
    refused = cocktail("join", url, "-y")
    launch.next("step", step=2)
    assert cocktail("stop", "out").exit == 0
    assert (launch.wait(), guest.wait()) == (0, 0)

    assert refused.exit == 6
    assert "--trust-remote-code, if you trust" in refused.err
    assert len(set(ran.read_text().split())) == 2  # the owner's process, and its guest's
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
