"""A stream beside the compute's. What it orders on a GPU: tests/fake_cuda/claims_codec.py."""

import pytest
import torch

from recipes.algorithm import SideStream


def test_without_cuda_work_is_done_at_once_and_an_error_in_it_is_raised() -> None:
    side, x = SideStream(torch.device("cpu")), torch.zeros(3)
    with side.behind(side.mark()):
        x += 1
    with pytest.raises(RuntimeError, match="size"), side.turn():
        x += torch.ones(2)

    assert x.tolist() == [1, 1, 1]
    assert side.mark() is None
