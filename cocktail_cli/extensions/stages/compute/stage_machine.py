"""A machine of a replica from its start on: nothing, then a stage that the head fills, then its part.

    held    whose parameters are here already, and of which round
    load    recipe and config of the model; the stage is built on the meta device
    fill    values of one parameter
    begin   the stage trains: every later request is its part's

A machine behind the head needs no run URL, no account, and no disk unless `activation_bits` is below 32. The
head reads weights from its own disk, window by window, so no machine ever has more than its stage. One that
has the run's base on its own disk reads its layers there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cocktail_cli.assembly import recipe_type
from recipes.config import Recipe, recipe_from_json
from recipes.models import build_on_meta, frozen_name, open_trained, open_vector
from recipes.weight_files import Layout, StoredVector, layout_of

from .ring_request import Answer, StageLost, answer_by
from .stage_model import StageModel
from .stage_part import StagePart, check_staged

# of weights, as a stage names them
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
WINDOW = 1 << 21  # parameters of a `fill`: 8 MiB, which a line takes at once


class WeightsReader:
    """Reads the values of parameters: what is trained, of x'; the rest, of the base."""

    def __init__(self, trained: StoredVector, base: StoredVector | None) -> None:
        self.trained, self.base = trained, base

    def has(self, wanted: object) -> bool:
        """Tell whether this is name, size and dtype of a parameter, as a stage asks for it."""
        if not isinstance(wanted, list | tuple) or [type(one) for one in wanted] != [str, int, str]:
            return False
        name, _, dtype = wanted
        frozen = self.base is not None and frozen_name(self.base, name) in self.base.layout.names
        return dtype in DTYPES and (frozen or name in self.trained.layout.names)

    def windows(self, name: str, dtype: str) -> Iterator[tuple[int, bytes]]:
        """Yield the start and the bytes of each window of a parameter."""
        stored = self.trained
        if name not in stored.layout.names:
            assert self.base is not None
            stored, name = self.base, frozen_name(self.base, name)
        at = stored.layout.names.index(name)
        first, last = stored.layout.offsets[at], stored.layout.offsets[at + 1]
        for start in range(first, last, WINDOW):
            values = torch.from_numpy(stored.read(start, min(start + WINDOW, last))).to(DTYPES[dtype])
            yield start - first, values.view(torch.uint8).numpy().tobytes()


@contextmanager
def open_weights(recipe: Recipe, base: Path, snapshot: Path | None = None) -> Iterator[WeightsReader]:
    """Open the model in `base`, at x' of a snapshot, or x_0. Errors: ModelError."""
    with ExitStack() as files:
        trained = files.enter_context(closing(open_trained(recipe, base, snapshot)))
        frozen = None
        if recipe.lora is not None:
            frozen = files.enter_context(closing(open_vector(base, recipe.model.trust_remote_code)))
        yield WeightsReader(trained, frozen)


CONFIG = "config.json"
T = TypeVar("T")


class StageMachine:
    """One machine's end of all requests.

    Args:
        number: of its stage; 0: the head's.
        device: where it trains.
        base: folder of the run's base model on this machine, called like the head's; None: it has none.
    """

    def __init__(self, number: int, device: torch.device | str = "cpu", base: Path | None = None) -> None:
        self.number, self.device, self._base = number, torch.device(device), base
        self.trained: StagePart | None = None
        self.filling: LoadingStage | None = None  # that the head fills
        self._key = ""  # of the loading that gave it its part

    @property
    def loading(self) -> LoadingStage:
        """Return the stage that is being filled. Raises StageLost: `load` went to the process before."""
        return given(self.filling)

    @property
    def part(self) -> StagePart:
        """Return what is trained. Raises StageLost: it went with the process before."""
        return given(self.trained)

    def answer(self, do: str, fields: Mapping[str, Any], data: bytes) -> Answer:
        """Do what the head asks. Raises KeyError where it is no request."""
        if do not in ("held", "load", "fill", "begin"):
            return self.part.answer(do, fields, data)
        return answer_by(self, do, fields, data)

    def held(self) -> dict[str, Any]:
        """Say which loading gave this machine its part, the round of its x', and the last step that it knows.
        No key: it has none."""
        if self.trained is None:
            return {"key": "", "round": 0, "step": -1}
        part = self.trained
        return {"key": self._key, "round": part.worker.global_model.round, "step": part.compute.step}

    def load(
        self, recipe: str, config: str, layers: Mapping[str, Sequence[int]], source: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Build this machine's stage, if it is one of these, with the values that its disk has; says which it
        needs. What it trained before is gone.

        Args:
            source: `base`, the name of the head's folder; and whether x' is `from_snapshot`.
        """
        if (mine := layers.get(str(self.number))) is None:
            return {"parameters": []}
        self.trained = self.filling = None
        here = range(*mine)
        self.filling = LoadingStage(
            recipe_from_json(recipe, recipe_type), config, here, self.number == 0, self.device
        )
        if self._base is not None and self._base.name == source["base"]:
            self.filling.read(self._base, trained=not source["from_snapshot"])
        return {"parameters": self.loading.wanted}

    def fill(self, data: bytes, stage: int, name: str, start: int) -> None:
        """Take values of one parameter of one stage, from element `start` on."""
        if stage == self.number:
            self.loading.fill(name, start, data)

    def begin(self, name: str, round: int, step: int, key: str = "") -> dict[str, Any]:
        """Train what was filled: x' of `round`, of the replica `name`; steps are counted on from `step`. A
        machine that has its part already goes on with it."""
        if self.trained is not None:
            return self.trained.state()
        loaded, self.filling, self._key = self.loading, None, key
        self.trained = StagePart(loaded.stage, loaded.whole, loaded.recipe, name, round, self.device)
        self.trained.compute.step = step
        return self.trained.state()


def given(what: T | None) -> T:
    """Return what this process was given. Raises StageLost: it was the process before it."""
    if what is None:
        raise StageLost("it was started again, and has nothing to train")
    return what


class LoadingStage:
    """A stage on its way from the meta device to one with values.

    Args:
        config: the text of the model's config.json.
    """

    def __init__(self, recipe: Recipe, config: str, layers: range, first: bool, device: torch.device) -> None:
        check_staged(recipe)
        self.recipe = recipe
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_text(config, encoding="utf-8")
            model: nn.Module = build_on_meta(Path(folder), recipe, device)
        self.whole: Layout = layout_of(model)
        self.stage = StageModel(model, layers, first)
        self.flat: dict[str, Tensor] = {}
        self._here: set[str] = set()  # parameters that were read from the disk
        self._allocate()

    def _allocate(self) -> None:
        """Give each parameter memory, a tied one once."""
        names = {parameter: name for name, parameter in self.stage.model.named_parameters()}
        made: dict[Tensor, nn.Parameter] = {}
        for owner in self.stage.model.modules():
            for attribute, empty in list(owner.named_parameters(recurse=False)):
                if not empty.is_meta:
                    continue
                if empty not in made:
                    values = torch.empty(empty.shape, dtype=empty.dtype)
                    made[empty] = nn.Parameter(values, empty.requires_grad)
                    self.flat[names[empty]] = values.view(-1)
                owner._parameters[attribute] = made[empty]  # as `register_parameter`, which may be patched

    @property
    def wanted(self) -> list[tuple[str, int, str]]:
        """List name, size and dtype of each parameter that the head is to give."""
        return [
            (name, len(flat), str(flat.dtype)) for name, flat in self.flat.items() if name not in self._here
        ]

    def read(self, base: Path, *, trained: bool) -> None:
        """Read the frozen parameters from a base model's folder, and where `trained` those of x_0."""
        with open_weights(self.recipe, base) as reader:
            for name, flat in self.flat.items():
                if trained or name not in self.whole.names:
                    for start, values in reader.windows(name, str(flat.dtype)):
                        self.fill(name, start, values)
                    self._here.add(name)

    def fill(self, name: str, start: int, data: bytes) -> None:
        flat = self.flat[name]
        values = torch.frombuffer(bytearray(data), dtype=flat.dtype)
        flat[start : start + len(values)] = values
