"""Helpers of other folders that the claims about a device use, and a device without a race behind it."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.swarms.forked import copy_that_forks, forking

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "recipes" / folder) for folder in ("training", "algorithm")]


@pytest.fixture(scope="session", autouse=True)
def fast_ranks() -> Iterator[None]:
    """The processes of a peer are forks of this one as it is before the first test."""
    if "fake_cuda" not in sys.modules:  # in the process that starts the one with the device
        yield
        return
    import fake_nccl  # noqa: F401 - stands in for NCCL in them

    with forking(copy_that_forks()):
        yield


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """A test begins with all of the memory, and ends without a race."""
    fake = sys.modules.get("fake_cuda")
    if fake is None:
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
