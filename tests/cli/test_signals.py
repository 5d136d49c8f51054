"""The first signal asks, the second ends; afterwards all is as it was."""

from __future__ import annotations

import signal

import pytest

from cocktail_cli.errors import Interrupted
from cocktail_cli.signals import leave_on_signal


def test_the_first_ctrl_c_asks_and_the_second_ends_with_130() -> None:
    asked: list[str] = []
    with leave_on_signal(asked.append):
        signal.raise_signal(signal.SIGINT)
        assert asked == ["Ctrl-C"]
        with pytest.raises(Interrupted) as ended:
            signal.raise_signal(signal.SIGINT)

    assert ended.value.exit == 130
    assert asked == ["Ctrl-C"]


def test_a_termination_after_a_ctrl_c_ends_with_143() -> None:
    with leave_on_signal(lambda why: None):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted) as ended:
            signal.raise_signal(signal.SIGTERM)

    assert ended.value.exit == 143


def test_the_handlers_of_before_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with leave_on_signal(lambda why: None):
        assert signal.getsignal(signal.SIGINT) is not before

    assert signal.getsignal(signal.SIGINT) is before
