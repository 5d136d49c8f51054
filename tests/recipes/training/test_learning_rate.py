import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from recipes.config import Training
from recipes.training.optimizers import learning_rate

KINDS = {
    "linear": {},
    "cosine": {"num_cycles": 1.5},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_min_lr": {"min_lr": 2e-5},
    "warmup_stable_decay": {"num_decay_steps": 4, "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.integers(1, 60), warm=st.integers(0, 60), rate=st.floats(1e-6, 0.9))
def test_a_schedule_is_that_of_transformers_to_the_bit(kind: str, steps: int, warm: int, rate: float) -> None:
    chosen = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": KINDS[kind]}
    training = Training.model_validate({"learning_rate": rate, "warmup_steps": warm, **chosen})
    theirs = get_scheduler(
        kind,
        torch.optim.SGD([torch.zeros(1)], lr=rate),
        num_warmup_steps=warm,
        num_training_steps=steps,
        scheduler_specific_kwargs=KINDS[kind],
    ).lr_lambdas[0]
    ours = learning_rate(training, steps)

    assert [ours(step) for step in range(steps)] == [rate * theirs(step) for step in range(steps)]
    assert ours(steps + 3) == ours(steps - 1)
