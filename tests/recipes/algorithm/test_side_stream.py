"""A stream beside the compute's. What it orders on a GPU: tests/fake_cuda/claims_codec.py."""

from __future__ import annotations

import pytest
import torch

from recipes.algorithm.side_stream import SideStream


def test_without_cuda_work_is_done_at_once_and_an_error_in_it_is_raised() -> None:
    side, done = SideStream(torch.device("cpu")), []
    with side.behind(side.mark()):
        done.append("behind")
    with pytest.raises(ValueError, match="of the work"), side.turn():
        done.append("turn")
        raise ValueError("of the work")

    assert done == ["behind", "turn"]
    assert side.mark() is None
