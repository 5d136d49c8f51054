"""A machine without NVIDIA's driver is one without its GPUs: every question has an answer."""

import pytest

from cocktail_cli.machine import driver_version, nvml, users_of
from cocktail_cli.machine.devices import driver_gpus


def test_without_a_driver_there_are_no_gpus_and_nobody_uses_them() -> None:
    if nvml() is not None:
        pytest.skip("this machine has NVIDIA's driver")

    assert driver_version() is None
    assert driver_gpus() == []
    assert users_of("cuda:0") == []
