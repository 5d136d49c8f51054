"""Helpers of other folders that the claims about a device use, and a device without a race behind it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "recipes" / folder) for folder in ("training", "algorithm")]


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """A test begins with all of the memory, and ends without a race."""
    fake = sys.modules.get("fake_cuda")
    if fake is None:  # in the process that starts the one with the device
        yield
        return
    gc.collect()  # what earlier tests have held
    gc.freeze()  # libraries are looked through once, not before every test
    for device in range(fake.COUNT):
        fake.limit(0, device)
        fake.fail_at(0, device)
    fake.machine.__init__()
    sys.modules["fake_triton"].long_blocks()
    yield
    fake.raise_race()
