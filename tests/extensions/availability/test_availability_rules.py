"""A volunteer's machine takes part by hours, heat and who else uses its GPU; it leaves and comes back."""

import os
import platform
import signal
import threading
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from in_this_process import Run
from test_user_config import understood, write

from cocktail_cli.errors import Failure
from cocktail_cli.extensions import availability as module
from cocktail_cli.extensions.availability import (
    BUSY_S,
    COOLER,
    FREE_S,
    Availability,
    AvailabilityMonitor,
    DailyHours,
    decide,
    next_at,
    parse_hours,
    parse_time,
)
from cocktail_cli.extensions.availability import AvailabilityState as State
from cocktail_cli.machine import GpuReading, NvidiaGpus, limit_memory, nvidia_gpus
from cocktail_cli.options import parse_size
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import Event, Progressed
from cocktail_cli.volunteer import VolunteerLimits, VolunteerSession, free_bytes, take_turns
from recipes.errors import PartLost
from transport import RunURL
from transport.protocol import RefusedByHub, RolledBack

NIGHT = DailyHours(time(22), time(7))
NOON, MIDNIGHT = datetime(2026, 11, 22, 12), datetime(2026, 11, 23)
TIMES = st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31))


def test_hours_over_midnight_are_open_at_night_and_closed_by_day() -> None:
    opened = [hour for hour in range(24) if NIGHT.open(NOON.replace(hour=hour))]

    assert opened == [0, 1, 2, 3, 4, 5, 6, 22, 23]


@given(TIMES, st.times(), st.times())
def test_a_moment_is_within_the_hours_or_within_those_that_they_leave_out(
    now: datetime, start: time, end: time
) -> None:
    if start != end:
        assert DailyHours(start, end).open(now) != DailyHours(end, start).open(now)


@given(TIMES, st.times())
def test_a_clock_says_everything_within_a_day(now: datetime, moment: time) -> None:
    coming = next_at(moment, now)

    assert timedelta(0) < coming - now <= timedelta(days=1)
    assert coming.time() == moment


@pytest.mark.parametrize("text", ["22", "22-07", "25:00-07:00", "07:00-07:00", "22:00-07:60", ""])
def test_what_are_no_hours_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_hours(text)


def test_hours_and_idleness_may_stand_in_the_settings_of_this_machine() -> None:
    write('hours = "22:00-07:00"\nonly-idle = true\n')

    found = understood("join", "cocktail://x")

    assert (found["hours"], found["only_idle"]) == (NIGHT, True)


def test_hours_are_read_as_they_are_written() -> None:
    assert parse_hours("22:00-07:00") == NIGHT
    assert str(parse_hours("9:30-17:05")) == "09:30-17:05"
    assert parse_time("8:00") == time(8)


def test_outside_its_hours_a_machine_pauses_and_says_when_it_is_back() -> None:
    rules = Availability(hours=NIGHT)

    assert decide(rules, State(), NOON, 0.0, GpuReading()).pause == "outside 22:00-07:00, back at 22:00"
    assert decide(rules, State(), MIDNIGHT, 0.0, GpuReading()).pause == ""


def test_at_its_time_a_machine_leaves_for_good() -> None:
    rules = Availability(hours=NIGHT, until=NOON)

    assert decide(rules, State(), NOON, 0.0, GpuReading()).over == "it is 12:00"
    assert not decide(rules, State(), NOON - timedelta(hours=6), 0.0, GpuReading()).over


def test_a_hot_gpu_rests_until_it_is_cooler_by_a_margin() -> None:
    rules, state, paused = Availability(max_temp=80), State(), []
    for temperature in (80, 81, 79, 80 - COOLER + 1, 80 - COOLER, 80):
        state = decide(rules, state, NOON, 0.0, GpuReading(temperature=temperature))
        paused.append(bool(state.pause))

    assert paused == [False, True, True, True, False, False]


def test_another_program_has_the_gpu_once_it_stays_and_until_it_has_gone() -> None:
    rules, state, paused = Availability(only_idle=True), State(), []
    uses = [(0.0, 0.5), (BUSY_S - 1, 0.0), (BUSY_S, 0.5), (2 * BUSY_S, 0.5), (40.0, 0.0), (60.0, 0.9)]
    uses += [(70.0, 0.0), (70.0 + FREE_S - 1, 0.0), (70.0 + FREE_S, 0.0)]
    for at, others in uses:
        state = decide(rules, state, NOON, at, GpuReading(others=others))
        paused.append(bool(state.pause))

    assert paused == [False, False, False, True, True, True, True, True, False]


def test_what_the_gpu_does_not_say_changes_nothing() -> None:
    rules = Availability(only_idle=True, max_temp=80)
    hot = decide(rules, State(), NOON, 0.0, GpuReading(temperature=90))

    assert decide(rules, hot, NOON, 1.0, GpuReading()).pause == hot.pause != ""
    assert decide(rules, State(), NOON, 1.0, GpuReading()).pause == ""


@pytest.mark.parametrize("rules", [Availability(), Availability(hours=DailyHours(time(0), time(23)))])
def test_nobody_is_asked_about_a_gpu_that_the_terms_do_not_name(rules: Availability) -> None:
    said: list[str] = []

    monitor = AvailabilityMonitor(rules)
    monitor.begin(["cuda:0"], said.append)
    assert monitor.gpus is None
    assert not said


# ---- the driver --------------------------------------------------------------------------------------------


class NotSupported(Exception):
    """NVML's error for what a device does not support."""


@dataclass
class Driver:
    """The functions of pynvml that are used."""

    NVMLError = NotSupported
    running: list[int] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # pid, share, time

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        if handle == "dumb":
            raise NotSupported("temperature")
        return 71

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=35)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        return [SimpleNamespace(pid=pid) for pid in self.running]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> Any:
        newer = [sample for sample in self.samples if sample[2] > since]
        if not newer:
            raise NotSupported("no sample")
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=at) for pid, share, at in newer]


def test_what_others_take_of_a_gpu_is_the_mean_of_their_samples_and_never_our_own() -> None:
    driver = Driver([7, 8], [(7, 90, 1), (8, 20, 2), (8, 40, 3)])
    gpus = NvidiaGpus(driver, ["gpu"], pytest.fail)

    assert gpus.read({7}) == GpuReading(71, 0.3)
    assert gpus.read({7}) == GpuReading(71, 0.0), "each sample counts once"
    assert gpus.read(None) == GpuReading(71, 0.35), "who does not train is nobody of these"


def test_a_driver_that_does_not_know_our_own_process_calls_nobody_another() -> None:
    """Containers number processes differently, and on Windows the driver lists none."""
    said: list[str] = []
    gpus = NvidiaGpus(Driver([4711], [(4711, 90, 1)]), ["gpu"], said.append)

    assert gpus.read({7}).others is None
    assert gpus.read({7}).others is None
    assert len(said) == 1


def test_a_gpu_that_says_nothing_of_its_warmth_is_not_held_hot() -> None:
    assert NvidiaGpus(Driver(), ["dumb"], pytest.fail).read(None).temperature is None


def test_a_machine_without_nvidia_says_what_has_no_effect() -> None:
    said: list[str] = []

    assert nvidia_gpus(["cpu"], said.append) is None
    assert "no effect" in said[0]


# ---- sessions ---------------------------------------------------------------------------------------------


@dataclass
class Ended:
    returns: bool
    status: int


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    return []


class Scripted(AvailabilityMonitor):
    """Decides these states, in this order."""

    def __init__(self, *states: State) -> None:
        super().__init__(Availability())
        self.coming = list(states)

    def update(self, ours: set[int] | None) -> State:
        self.state = self.coming.pop(0)
        return self.state


GO, HOT = State(), State(pause="the GPU is too hot")


def test_a_machine_that_paused_waits_and_joins_again(shown: list[Event]) -> None:
    ends, again = [Ended(True, 75), Ended(True, 75), Ended(False, 0)], []

    def session(back: bool) -> Ended:
        again.append(back)
        return ends.pop(0)

    status = take_turns([Scripted(HOT, GO, HOT, HOT, GO, GO)], session, False, shown.append)

    assert (status, again) == (0, [False, True, True])
    assert shown == [Progressed("paused: the GPU is too hot")] * 2


def test_who_is_to_be_asked_is_asked_before_any_waiting(shown: list[Event]) -> None:
    assert take_turns([Scripted()], lambda back: Ended(False, 3), True, shown.append) == 3


def test_a_machine_whose_time_is_over_does_not_join(shown: list[Event]) -> None:
    over = State(over="it is 08:00")

    assert take_turns([Scripted(over)], lambda back: pytest.fail("joined"), False, shown.append) == 0


def test_a_run_that_ended_during_a_pause_is_no_failure_but_one_that_was_never_joined_is(
    shown: list[Event],
) -> None:
    def session(back: bool) -> Ended:
        if back:
            raise RefusedByHub("over", "the run is over")
        return Ended(True, 75)

    def late(back: bool) -> Ended:
        raise RefusedByHub("over", "the run is over")

    assert take_turns([Scripted(GO, GO)], session, False, shown.append) == 0
    with pytest.raises(RefusedByHub):
        take_turns([Scripted(GO)], late, False, shown.append)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such heaps")
def test_the_memory_of_sessions_that_are_over_is_given_back(shown: list[Event]) -> None:
    """Each has threads and so heaps of its own, in which something small lies above all that was freed."""
    stays, resident, sessions = list[bytes](), list[float](), 6

    def train() -> None:
        blocks = [bytes(50_000) for _ in range(600)]
        stays.append(blocks.pop())

    def session(back: bool) -> Ended:
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(resident) < sessions:
            raise RolledBack("the standby took over without round 3, which this peer has")
        return Ended(False, 0)

    assert take_turns([Scripted(*[GO] * sessions)], session, False, shown.append) == 0
    assert max(resident[1:]) - resident[0] < 15e6


class Goodbyes:
    """A link to a hub that is told goodbye, and nothing else."""

    url, way, bytes_up, bytes_down = RunURL("k" * 40, "t" * 22, "127.0.0.1", 1, "run"), "", 0, 0

    def __init__(self) -> None:
        self.leave_requested, self.reasons = threading.Event(), list[str]()

    def leave(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 0), (None, 3)])
def test_a_replica_that_loses_a_machine_joins_anew_unless_it_was_asked_to_leave(
    shown: list[Event], monkeypatch: pytest.MonkeyPatch, signum: signal.Signals | None, status: int
) -> None:
    monitor, link, sessions = Scripted(GO, GO), Goodbyes(), []

    def lose(*_: object) -> None:
        if signum is not None:
            signal.raise_signal(signum)
        raise PartLost("stage 1 was started again")

    def session(back: bool) -> Any:
        sessions.append(back)
        if back:
            return Ended(False, 3)
        view = SimpleNamespace(show=shown.append)
        one = VolunteerSession(link.url, VolunteerLimits("ann", ["cpu"]), view, [monitor])
        monkeypatch.setattr(one, "_prepare_and_train", lose)
        with leave_on_signal(partial(one.leave, link)) as request:
            one._say_goodbye_after(link, lambda: None, request)
        return one

    assert take_turns([monitor], session, False, shown.append) == status
    assert (sessions, link.reasons) == {
        75: ([False], ["SIGTERM"]),
        0: ([False], ["Ctrl-C"]),
        3: ([False, True], ["joins anew"]),
    }[status]


# ---- limits ------------------------------------------------------------------------------------------------


def test_sizes_are_read_with_their_units() -> None:
    assert (parse_size("20GiB"), parse_size("80GB")) == (20 << 30, 80 * 10**9)
    with pytest.raises(typer.BadParameter):
        parse_size("much")


def test_a_device_without_memory_of_its_own_has_none_to_limit() -> None:
    limit_memory(["cpu"], None)
    with pytest.raises(Failure, match="cpu has no memory of its own"):
        limit_memory(["cpu"], 20 << 30)


def test_fetched_models_take_no_more_than_their_owner_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "base").write_bytes(bytes(1000))

    assert free_bytes(5000) == 4000
    assert free_bytes(500) == -500
    assert free_bytes() > 10**6


def test_a_time_that_is_none_is_named_with_what_to_write(cocktail: Run) -> None:
    said = cocktail("join", "x", "--hours", "25:00-26:00")

    assert said.exit == 2
    assert "'25:00' is no time of day" in said.err
    assert "write 08:00" in said.err
