"""A machine without NVIDIA's driver is one without its GPUs: every question has an answer."""

import pytest

from cocktail_cli.machine import nvml
from cocktail_cli.machine.devices import driver_gpus


def test_without_a_driver_there_are_no_gpus() -> None:
    if nvml() is not None:
        pytest.skip("this machine has NVIDIA's driver")

    assert driver_gpus() == []
