# %% [markdown]
# # A run from Python
#
# These are cells of a notebook: VS Code, Spyder and Jupytext read this form. It is a script as well. It takes
# half a minute on two cores, and downloads nothing. With a model of your own:
# `cocktail_cli.launch(model="...", data="my.jsonl")`.

# %%
import tempfile
from pathlib import Path

import cocktail_cli
from cocktail_cli import events

# %% [markdown]
# ## A callback
# It is one for transformers' `Trainer`: a `TrainerCallback`, or an object with some of its methods.


# %%
class StopBelow:
    """Stops a run as soon as its held-out loss is low enough."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        control.should_training_stop = metrics["eval_loss"] < self.loss


# %% [markdown]
# ## Launch
# The keywords are options of `cocktail launch` and keys of a recipe. The call returns at once, as the run is
# a process of its own: this notebook imports no torch for it. `run.url` is the line to pass on.

# %%
run = cocktail_cli.launch(
    "smoke",
    output_dir=Path(tempfile.mkdtemp()) / "run",
    port=0,
    bind="127.0.0.1",
    learning_rate=6e-3,
    max_steps=60,
    max_length=32,
    global_batch_size=16,
    eval_steps=4,
    val_set_size=16,
    callbacks=[StopBelow(5.5)],
)
print(run.name, "can be joined at", run.url)

# %% [markdown]
# ## Join
# On another machine this line is the whole program. Here the guest is on the same one.

# %%
guest = cocktail_cli.join(run.url, name="guest", device="cpu", max_up="50mbit")

# %% [markdown]
# ## Follow
# Events are dataclasses, the same as with `--json`. Interrupt the cell or call `run.stop()`, and the run ends
# in good order: its model has every step that was committed.

# %%
for event in run:
    match event:
        case events.PeerReady():
            print(f"{event.peer} trains from round {event.round} on")
        case events.Step(loss=float()):
            at = f"round {event.round}, step {event.step} of {event.steps}"
            print(f"{at}: loss {event.loss:.3f}, peers: {event.peers}")
        case events.Eval():
            print(f"step {event.step}: held-out loss {event.loss:.3f}")
        case events.Warning():
            print("warning:", event.message)

result = run.result()
print(f"{result.reason}: {result.steps} of {result.planned} steps -> {run.model_dir}")
print(f"the guest: {guest.result().reason}")

# %% [markdown]
# ## Errors
# They are exceptions, with the hints of the command as notes.

# %%
try:
    cocktail_cli.launch("smoke", learning_rat=1e-4).result()
except cocktail_cli.InvalidInput as error:
    print(error.code, error.__notes__)

# %% [markdown]
# ## Use the model

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402  (a notebook imports where it needs)

model = AutoModelForCausalLM.from_pretrained(run.model_dir)
tokenizer = AutoTokenizer.from_pretrained(run.model_dir)
prompt = tokenizer("The import statement", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))
