"""Recipe keys of direct preference optimization, and the objective that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from recipes.config import Conflict, ObjectiveSection, Real, Recipe, key

if TYPE_CHECKING:
    from .preferences import PreferencePairs, Preferences

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")  # TRL's names


class Keys(ObjectiveSection):
    """Direct preference optimization (Rafailov et al., 2023): of two answers the chosen one is made likelier
    than the rejected one. The reference model is the base with its adapters switched off; both are without
    dropout, so that they differ by the adapters alone."""

    one_machine: ClassVar[bool] = True  # a ring of stages has no pass for the reference
    row_type: ClassVar[str] = "preference"
    row_columns: ClassVar[Set[str]] = {"chosen", "rejected"}
    sequences: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    forwards: ClassVar[int] = 1  # the reference's
    dropout: ClassVar[bool] = False
    term: ClassVar[str] = "pair"
    adapters_rate: ClassVar[float | None] = 1e-5  # ten times TRL's for whole models
    method: ClassVar[str] = "direct preference optimization"
    gone_keys: ClassVar[Mapping[str, str]] = {
        "label_smoothing": "there is no such key: loss_type is sigmoid, hinge or ipo, and none of them has "
        "one",
        "disable_dropout": "there is no such key: under `dpo:` there is no dropout",
    }
    foreign_names: ClassVar[Mapping[str, str]] = {
        "dpo": "rl rlhf",
        "dpo.beta": "dpo_beta pref_beta rl_beta",
        "dpo.loss_type": "pref_loss dpo_loss_type",
    }

    beta: Annotated[Real, Field(gt=0)] = key(0.1, "how closely the reference is followed; tau of ipo")
    loss_type: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "loss of a pair, as in TRL")

    def described(self) -> Iterator[str]:
        yield f"pairs of answers: loss `{self.loss_type}`, beta {self.beta:g}"

    def named(self, figures: Sequence[float]) -> dict[str, dict[str, float]]:
        """Name the rewards of the chosen answers, of the rejected ones, the share of pairs in which the
        chosen one has more, and the margin between them."""
        if not figures:
            return {}
        chosen, rejected, accuracies = figures
        values = (chosen, rejected, accuracies, chosen - rejected)
        return {"rewards": {name: round(value, 6) for name, value in zip(REWARDS, values, strict=True)}}

    def row_reader(self) -> PreferencePairs:
        from .preferences import PreferencePairs

        return PreferencePairs()

    def objective(self) -> Preferences:
        from .preferences import Preferences

        return Preferences(self.beta, self.loss_type)

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield keys that mean nothing, or something else, where preferences are learnt."""
        for name, datasets in (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets)):
            for number, dataset in enumerate(datasets):
                if dataset.type not in ("auto", self.row_type):
                    text = f"`{dataset.type}` has no chosen and rejected answers, which `dpo:` learns from"
                    yield Conflict(f"{name}.{number}.type", text)
        if recipe.lora is None:
            text = "needs `lora:`: the reference is the base without adapters, a whole model would need a "
            text += "second one"
            yield Conflict("dpo", text, "lora.lora_r=16")
        if recipe.data.packing:
            text = "excluded by `dpo:`: a sample is a pair of answers"
            yield Conflict("data.packing", text, "packing=false")
        for name in ("completion_only_loss", "assistant_only_loss"):
            if getattr(recipe.data, name) is not None:
                yield Conflict(f"data.{name}", "excluded by `dpo:`: what follows the prompt is compared")
