"""The first signal asks, the second ends; afterwards all is as it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cocktail_cli.errors import Interrupted
from cocktail_cli.signals import Interruption, StopAsked, leave_on_signal


def test_the_first_ctrl_c_asks_and_the_second_ends_with_130() -> None:
    asked: list[str] = []
    with leave_on_signal(asked.append):
        signal.raise_signal(signal.SIGINT)
        assert asked == ["Ctrl-C"]
        with pytest.raises(Interrupted) as ended:
            signal.raise_signal(signal.SIGINT)

    assert ended.value.exit == 130
    assert asked == ["Ctrl-C"]


def test_a_second_ctrl_c_may_ask_for_something_else_and_the_third_ends() -> None:
    asked: list[str] = []
    with leave_on_signal(lambda why: asked.append("pause"), second=lambda why: asked.append("end")):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert asked == ["pause", "end"]
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


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


def test_where_nothing_is_in_flight_the_first_signal_ends_what_is_going_on() -> None:
    asked: list[str] = []
    with leave_on_signal(asked.append) as request:
        with pytest.raises(StopAsked), request.raising():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(StopAsked), request.raising():
            raise AssertionError("not begun any more, once the request is there")

    assert asked == ["Ctrl-C"]


def test_a_termination_told_to_process_and_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout`, systemd and a closed terminal signal both."""
    clock = [100.0]
    monkeypatch.setattr("cocktail_cli.signals.time.monotonic", lambda: clock[0])
    asked: list[str] = []
    with leave_on_signal(asked.append):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert asked == ["SIGTERM"]
        clock[0] += 1.0
        with pytest.raises(Interrupted) as ended:
            signal.raise_signal(signal.SIGTERM)

    assert ended.value.exit == 143


def test_before_the_second_signal_ends_it_waiting_calls_are_let_go() -> None:
    done: list[str] = []
    with leave_on_signal(lambda why: None, lambda: done.append("at once")):
        signal.raise_signal(signal.SIGINT)
        assert not done
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)

    assert done == ["at once"]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_under_nohup_a_closed_terminal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with leave_on_signal(lambda why: pytest.fail(why)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


IN_TIME = """
import sys, threading, time
from cocktail_cli.signals import leave_in_time
begun, takes = time.monotonic(), float(sys.argv[1])
goodbye = lambda: (time.sleep(takes), print("bye", flush=True))
words = goodbye, lambda: print("thanks", flush=True)
with leave_in_time(lambda: (begun, begun + 0.1), words, lambda: 75):
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "bye\nthanks\n"), (0.5, "thanks\nbye\n"), (60.0, "thanks\n")],
    ids=["at once", "a goodbye over a slow line", "a goodbye that hangs"],
)
def test_a_process_that_does_not_look_is_gone_in_time(root: Path, seconds: float, said: str) -> None:
    command = [sys.executable, "-c", IN_TIME, str(seconds)]
    ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=600)

    assert (ended.returncode, ended.stdout) == (75, said)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that signal")
def test_a_ctrl_c_that_a_library_swallows_ends_the_process_all_the_same() -> None:
    program = """
import signal, time
from cocktail_cli import signals
signals.ENDS_WITHIN = 0.05
with signals.Interruption().handled():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_after_a_ctrl_c_the_handler_of_before_is_back_and_nothing_ends_the_process() -> None:
    before, interruption = signal.getsignal(signal.SIGINT), Interruption()
    with pytest.raises(KeyboardInterrupt), interruption.handled():
        signal.raise_signal(signal.SIGINT)

    assert interruption.came
    assert signal.getsignal(signal.SIGINT) is before
    assert not hasattr(signal, "setitimer") or signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
@pytest.mark.parametrize(
    "arguments", [("launch", "smoke"), ("join", "-y", "cocktail://KEY.TOKEN@127.0.0.1:9/otter")]
)
def test_a_ctrl_c_while_the_modules_load_prints_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    module = tmp_path / "typer.py"  # the first module that takes long to load
    module.write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    ended = subprocess.run(
        [sys.executable, "-m", "cocktail_cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
