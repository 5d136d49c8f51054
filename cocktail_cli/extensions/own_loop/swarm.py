"""Take part in a run from one's own loop.

with cocktail_cli.join_with(url, model, optimizer) as swarm:
    for inputs, labels in batches:
        loss = loss_of(model(inputs), labels)
        loss.backward()
        swarm.step(loss, len(inputs))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cocktail_cli import signals
from cocktail_cli.assembly import Joining, PeerBuilder, url_to_dial
from cocktail_cli.errors import Failure, explain
from cocktail_cli.machine import default_peer_name
from cocktail_cli.ui import events
from cocktail_cli.volunteer import VolunteerLimits, VolunteerSession, take_turns
from recipes.config import Recipe
from recipes.training import ModelExtension, Peer, peer_of
from recipes.weight_files import layout_of
from transport.protocol import TransportError

from .loop_trainer import Evaluate, Gradient, LoopTrainer, Turns
from .named_tensors import check_layout, open_named, trained_of

if TYPE_CHECKING:
    from transport import PeerLink, RunURL

LEAVES_WITHIN = signals.LEAVE_WITHIN + 8.0  # seconds for the session to end
WINDOW = 1 << 22  # parameters that are read at a time
MOST = 10**12  # samples of a step, and its loss: sums of them are within what a report carries
WHOLE = 1 << 40  # samples of a micro-batch: a user's gradient is one
WRAPPED = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")


class SwarmOver(Exception):
    """The run is over, or this peer has left it: the block of `join_with` ends with it in good order."""


def join_with(
    url: str,
    model: nn.Module,
    optimizer: Optimizer,
    evaluate: Evaluate | None = None,
    name: str | None = None,
    show: Callable[[Any], None] | None = None,
) -> Swarm:
    """Join a run whose peers bring their own loops; a context manager.

    Args:
        evaluate: mean loss of the model on held-out data of this machine; needed where the run evaluates.
        name: to show; None: this machine's.
        show: called with the events of `cocktail_cli.events`, in a thread of its own.

    Raises Failure where model or optimizer cannot take part.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    check_usable(model, optimizer)
    plain = getattr(optimizer, "optimizer", optimizer)  # accelerate's has it inside
    return Swarm(dialled(url), model, plain, evaluate, name or default_peer_name(), show or warn)


def dialled(url: str) -> RunURL:
    """Parse the URL of a run. Raises Failure."""
    try:
        return url_to_dial(str(url or ""))  # an environment may have none
    except TransportError as error:
        raise explain(error) from error


def warn(event: Any) -> None:
    """Print warnings."""
    if isinstance(event, events.Warning):
        import warnings

        warnings.warn(event.message, stacklevel=2)


class Swarm:
    """A run that takes part in a loop of the user's. Its methods are for the thread that made it."""

    def __init__(
        self,
        url: RunURL,
        model: nn.Module,
        optimizer: Optimizer,
        evaluate: Evaluate | None,
        name: str,
        show: Callable[[Any], None],
    ) -> None:
        self.turns, self.told = Turns(), show
        self.url, self.optimizer = url, optimizer
        self.limits = VolunteerLimits(name, [str(next(model.parameters()).device)], WHOLE)
        self.joining = JoinedLoop(model, optimizer, evaluate, self.turns)
        self.last: events.Step | None = None  # the newest round that was joined
        self.reason = ""  # why the run is over for this peer
        self.over = False
        self.error: BaseException | None = None
        # what optimizer.step() does in the user's thread
        self.stepped: Callable[[], None] = refuse_step
        self._stack = ExitStack()
        self._thread = threading.Thread(target=self._take_part, name="swarm", daemon=True)

    def __enter__(self) -> Swarm:
        if self._thread.ident is not None:
            raise Failure("usage", "the block of a swarm was entered before", hints=("join_with(...) again",))
        with ExitStack() as stack:
            stack.enter_context(signals.leave_on_signal(self.joining.ask))
            stack.enter_context(self._stepping())
            self._thread.start()
            stack.callback(self._close)
            try:
                self._await_turn()
            except SwarmOver as over:
                raise Failure("interrupted", f"not joined: {over}", hints=("join again",)) from None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._stack.close()
        if self.error is not None and kind is None:
            raise explain(self.error) from self.error
        return kind is not None and issubclass(kind, SwarmOver)

    # ---- for the user's loop -------------------------------------------------------------------------------

    def step(self, loss: Tensor | float, samples: int) -> events.Step | None:
        """Step the optimizer in place of `optimizer.step()`, and exchange; clear the gradients.

        Args:
            loss: mean of the batch, for the run's figures.
            samples: that the gradient is the mean of: this peer's weight.

        Returns the newest joined round, one behind this step; None: there is none yet.

        Raises SwarmOver once the run is over or this peer has left, and Failure.
        """
        if not hasattr(samples, "__index__") or not 1 <= (samples := index(samples)) <= MOST:
            raise Failure("usage", f"a step of {samples!r} samples", hints=("samples=len(batch), 1 or more",))
        if self._trainer.evaluating:
            raise Failure("usage", "swarm.step inside swarm.global_model()", hints=("end that block first",))
        if self.turns.ended.is_set():
            self._end()
        norm = self._trainer.collect()
        try:
            mean = float(loss.detach() if isinstance(loss, Tensor) else loss)
            if not isfinite(mean):
                raise ValueError(f"it is {mean}")
        except (TypeError, ValueError, RuntimeError) as error:
            hints = ("the mean over the batch: a number, or a tensor of one",)
            raise Failure("usage", f"a step of no loss: {error}", hints=hints) from None
        self.turns.give(Gradient(max(-MOST, min(mean, MOST)), samples, norm))
        self._await_turn()
        return self.last

    @property
    def share(self) -> int:
        """Return how many samples the run would like the next gradient to be of, by this peer's pace."""
        return self.turns.samples

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """Let the model have the parameters of x' in this block, to be evaluated."""
        trainer, peer = self._trainer, self.joining.peer
        if trainer.evaluating:  # at x' already
            yield self.joining.own
            return
        peer.encoded.wait()
        with peer.reading, trainer.at(peer.worker.global_model.vector) as model:
            yield model

    def leave(self, why: str = "left by its loop") -> None:
        """Leave after the exchange under way: what this peer did not send is handed over."""
        self.joining.ask(why)

    def use(self, extension: ModelExtension) -> None:
        """Let an extension take part in this peer's training; before the block begins."""
        self.joining.extensions.append(extension)

    # ---- turns ---------------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> LoopTrainer:
        """Return the trainer. Raises Failure before the block."""
        if (trainer := self.joining.trainer) is None:
            raise Failure("usage", "the run is not joined", hints=("with join_with(...) as swarm:",))
        return trainer

    def _await_turn(self) -> None:
        if not self.turns.wait():
            self._end()
        self._trainer.note()

    def _end(self) -> None:
        """Raise why there is no turn any more."""
        self.over = True
        if self.error is not None:
            error, self.error = self.error, None
            raise explain(error) from error
        if self.turns.stalled:
            hints = ("call swarm.step(loss, samples) for each batch", "join again: what it had is kept")
            raise Failure("lost", f"this peer has left the run: {self.turns.stalled}", hints=hints)
        raise SwarmOver(self.reason or "this peer has left")

    def _take_part(self) -> None:
        def session(again: bool) -> VolunteerSession:
            one = VolunteerSession(self.url, self.limits, self, [self.joining])
            try:
                one.take_part(signals.PAUSE_WITHIN if again else 0.0, None)
            finally:
                self.url = one.url
            return one

        try:
            take_turns([self.joining], session, True, self.show)
        except signals.StopAsked:
            self.reason = "asked to leave"
        except BaseException as error:
            self.error = error
        finally:
            self.turns.ended.set()

    def _close(self) -> None:
        """End the session: handoff, goodbye, checkpoint; at the run's end leave x' in the model."""
        self.over = True
        if not self.joining.early.is_set():  # else it has said why
            self.leave()
        self._thread.join(LEAVES_WITHIN)
        self.joining.finish()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Let `optimizer.step()` be what finetune alone calls, and no other swarm take the same model."""
        model = vars(self.joining.own)
        if model.get("in_swarm"):
            hints = ("leave it first: the parameters are one run's",)
            raise Failure("usage", "the model takes part in a run already", hints=hints)
        model["in_swarm"] = True
        original, own = self.optimizer.step, "step" in vars(self.optimizer)

        def step(closure: Callable[[], float] | None = None) -> Any:
            if threading.current_thread() is self._thread:
                return original()
            return self.stepped()

        self.optimizer.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model["in_swarm"]
            if own:
                self.optimizer.step = original  # type: ignore[method-assign]
            else:
                del self.optimizer.step

    # ---- a view of the session, in its thread --------------------------------------------------------------

    def show(self, event: Any) -> None:
        if isinstance(event, events.Step):
            self.last = event
        elif isinstance(event, events.Left):
            self.reason, self.joining.finished = event.reason, event.finished
        self.told(event)

    def close(self) -> None:
        """Pass: the user's `show` is not closed."""


def refuse_step() -> None:
    """Raise Failure: the user's loop steps the optimizer itself."""
    hints = ("swarm.step(loss, samples) in its place: one optimizer, which the swarm steps",)
    raise Failure("usage", "optimizer.step() was called in a swarm", hints=hints)


class JoinedLoop(Joining):
    """Builds a session's peer of the user's model and optimizer."""

    process = False
    trainer: LoopTrainer | None = None  # with the first session
    peer: Peer

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, evaluate: Evaluate | None, turns: Turns
    ) -> None:
        self.own, self.optimizer, self.evaluate, self.turns = model, optimizer, evaluate, turns
        self.early = threading.Event()  # asked to leave before there was a session
        self.finished = False  # the run has reached its end
        self.extensions: list[ModelExtension] = []  # of its training
        self._leave: Callable[[str], None] | None = None

    def ask(self, why: str) -> None:
        """Leave, in the session there is, or soon is."""
        if self._leave is not None:
            self._leave(why)
        self.early.set()

    def check(self, recipe: Recipe) -> None:
        """Raise Failure where the run trains otherwise, or wants what this peer has not."""
        if "own_loop" not in recipe.extensions:
            hints = ("cocktail join RUN_URL",)
            raise Failure("rejected", "this run's peers train what the hub leases", hints=hints)
        if recipe.checkpoint.eval_steps and self.evaluate is None:
            hints = ("join_with(..., evaluate=mean_loss_of_model)",)
            raise Failure("rejected", "this run evaluates, and no `evaluate` is given", hints=hints)
        self.turns.patience = recipe.swarm.step_timeout

    def model(self) -> nn.Module:
        return self.own

    def builder(self, link: PeerLink, leave: Callable[[str], None], vram_limit: int | None) -> PeerBuilder:
        self._leave, self.turns.leaving = leave, link.leave_requested
        if self.early.is_set():
            leave("left by its loop")
        return BuilderHere(self.build)

    def build(self, recipe: Recipe, base: Path, snapshot: Path | None, micro_batch: int, round: int) -> Peer:
        """Bring x' into the user's model. Raises ModelError where they differ in a name or a shape."""
        with closing(open_named(snapshot or base)) as stored, torch.no_grad():
            layout = layout_of(self.own)
            check_layout(layout, stored.layout)
            trained = (p for p in self.own.parameters() if p.requires_grad)
            for parameter, start in zip(trained, layout.offsets, strict=False):
                flat = parameter.data.view(-1)
                for at in range(0, len(flat), WINDOW):
                    end = min(at + WINDOW, len(flat))
                    flat[at:end] = torch.from_numpy(stored.read(start + at, start + end))
        self.finish()
        self.trainer = LoopTrainer(self.own, self.optimizer, recipe, self.turns, self.evaluate)
        self.trainer.extensions = self.extensions
        self.peer = replace(peer_of(self.trainer.inner, recipe, round, micro_batch), trainer=self.trainer)
        self.trainer.release()
        return self.peer

    def finish(self) -> None:
        """Make the model x' where the run has reached its end."""
        if self.trainer is not None and self.finished:
            self.trainer.flat.take(self.peer.worker.global_model.vector)


@dataclass
class BuilderHere:
    """A `PeerBuilder` of this process."""

    build: Callable[[Recipe, Path, Path | None, int, int], Peer]

    @property
    def pids(self) -> set[int]:
        return set()

    def check(self) -> None:
        """Pass: no other process trains."""

    def close(self) -> None:
        """Pass: the user's model stays."""


# ---- what cannot take part ---------------------------------------------------------------------------------


def check_usable(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise Failure where this model and optimizer cannot be a peer."""
    trained = trained_of(model)
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (wrapped := sorted(names & {*WRAPPED})) or (group and torch.distributed.get_world_size() > 1):
        what = f"the model is inside {wrapped[0]}" if wrapped else "this process is one of a process group"
        hints = ("one process and one plain model a peer: each GPU joins for itself",)
        raise Failure("usage", f"{what}, which exchanges gradients itself", hints=hints)
    if name := next((name for name, p in model.named_parameters() if p.is_meta), None):
        hints = ("load the model first: x_0 comes from the run, buffers do not",)
        raise Failure("usage", f"{name} is on the meta device, without memory", hints=hints)
    dtypes = {p.dtype: name for p, name in trained.items() if p.dtype != torch.float32}
    if dtypes:
        dtype, name = next(iter(dtypes.items()))
        hints = ("model.float(), and torch.autocast around the forward pass; or train adapters in float32",)
        raise Failure("usage", f"{name} is {dtype}, and trained parameters must be float32", hints=hints)
    check_optimizer(trained, optimizer)


def check_optimizer(trained: dict[nn.Parameter, str], optimizer: Optimizer) -> None:
    """Raise Failure unless this one optimizer has all that is trained, and nothing else."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        hints = ("join_with(RUN_URL, model, torch.optim.AdamW(model.parameters()))",)
        raise Failure("usage", f"{kind} is no optimizer whose step() needs no closure", hints=hints)
    if getattr(optimizer, "scaler", None) is not None:
        hints = ("mixed_precision='bf16'",)
        raise Failure("usage", "the optimizer scales gradients itself, and would skip steps", hints=hints)
    has = {p for group in optimizer.param_groups for p in group["params"]}
    lacks: Sequence[str] = [name for p, name in trained.items() if p not in has]
    if lacks:
        hints = ("one optimizer for all of them, in groups; or requires_grad_(False)",)
        said = f"the optimizer lacks {len(lacks)} of {len(trained)} trained parameters, first {lacks[0]}"
        raise Failure("usage", said, hints=hints)
    if strange := sum(p.requires_grad for p in has) - len(trained):
        hints = ("an optimizer of model.parameters()",)
        raise Failure("usage", f"the optimizer has {strange} parameters of another model", hints=hints)
