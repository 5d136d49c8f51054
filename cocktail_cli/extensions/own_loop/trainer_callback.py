"""`CocktailCallback(url)`: a `transformers.Trainer`, or one of TRL's, takes part in a run.

Trainer(model=..., args=..., train_dataset=..., callbacks=[CocktailCallback(url)]).train()

The run decides steps, rate, schedule, clipping and seed; everything else is the trainer's own. A step of its
optimizer is `swarm.step`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from zlib import crc32

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cocktail_cli.assembly import ask_status, recipe_type, url_to_dial
from cocktail_cli.errors import Failure
from cocktail_cli.machine import default_peer_name
from recipes.config import Recipe, recipe_from_json

from .loop_trainer import Evaluate
from .swarm import Swarm, SwarmOver, join_with

ASKS_WITHIN = 10.0  # seconds
DISAGREE = {  # argument that would make this peer's model or steps another -> what to do
    "fp16": "bf16=True, or neither: GradScaler would skip steps that the run counts",
    "fsdp": "one process a peer",
    "deepspeed": "one process a peer",
    "load_best_model_at_end": "False: the model is the run's",
    "resume_from_checkpoint": "None: x' comes from the run",
    "auto_find_batch_size": "False: it would begin anew",
    "torch_compile": "False",
}


class CocktailCallback(TrainerCallback):
    """Joins a run as the training begins, and leaves it in the end.

    Args:
        evaluate, name: as `join_with`.
    """

    def __init__(self, url: str, evaluate: Evaluate | None = None, name: str | None = None) -> None:
        self.url, self.evaluate, self.name = url, evaluate, name or default_peer_name()
        self.swarm: Swarm | None = None
        self._stack = ExitStack()
        self._loss, self._samples, self._over = 0.0, 1, False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the run's arguments, before the trainer makes its optimizer and schedule."""
        status = ask_status(url_to_dial(self.url), ASKS_WITHIN, recipe=True)
        run_decides(args, recipe_from_json(status["recipe"], recipe_type), self.name)
        self._samples = args.per_device_train_batch_size * args.gradient_accumulation_steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Join, with the trainer's model and optimizer."""
        model = parts["model"]
        swarm = join_with(self.url, model, parts["optimizer"], self.evaluate, self.name)
        if args.gradient_accumulation_steps == 1:  # else a loss is of a part of the step
            self._stack.callback(model.register_forward_hook(self._note_loss).remove)
        self.swarm = self._stack.enter_context(swarm)
        self.swarm.stepped = self._step

    def _note_loss(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if model.training and (loss := getattr(outputs, "loss", None)) is not None:
            self._loss = float(loss.detach())

    def _step(self) -> None:
        assert self.swarm is not None
        try:
            if not self._over:
                self.swarm.step(self._loss, self._samples)
        except SwarmOver:
            self._over = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Note the loss of trainers whose models return none (GRPO)."""
        self._loss = float((logs or {}).get("loss", self._loss))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the training once the run is over."""
        control.should_training_stop |= self._over

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave; where the run is over the trainer's model is its result."""
        self._stack.close()


def run_decides(args: TrainingArguments, recipe: Recipe, name: str) -> None:
    """Set what all peers share. Raises Failure where an argument would make this peer another than they."""
    for key, instead in DISAGREE.items():
        if getattr(args, key, None):
            raise Failure("usage", f"TrainingArguments.{key} is excluded by a swarm", hints=(instead,))
    training = recipe.training
    args.max_steps, args.learning_rate, args.seed = training.max_steps, training.learning_rate, training.seed
    args.max_grad_norm = 0.0  # the swarm clips, as the recipe says
    if args.data_seed is None:  # peers with the same data are to see it in another order each
        args.data_seed = training.seed ^ crc32(name.encode()) & 0x7FFFFFFF
