"""Copies from the host to a device. To and from a GPU: tests/fake_cuda/claims_codec.py."""

import numpy as np
import torch

from compress import brought
from compress.pinned_copy import array_brought


def test_on_the_host_a_tensor_is_itself_and_an_array_is_a_copy_that_may_be_written() -> None:
    x, array = torch.arange(3), np.arange(3)
    array.flags.writeable = False
    copy = array_brought(array, torch.device("cpu"))
    copy += 1

    assert brought(x, torch.device("cpu")) is x
    assert array.tolist() == [0, 1, 2]
