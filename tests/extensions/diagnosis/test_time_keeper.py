"""A peer's part of the diagnosis: what it says with its next report."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cocktail_cli.extensions.diagnosis.bodies import NAME, Spent, spent_of
from cocktail_cli.extensions.diagnosis.machine_load import GpuLoad
from cocktail_cli.extensions.diagnosis.peer import TimeKeeper, load_of
from cocktail_cli.machine import NvidiaGpus
from recipes.training import Delivery
from transport.protocol import messages

ROUND = messages.Round(0, 0, 9, ["ann"], 4, True)


def reported(keeper: TimeKeeper, now: float) -> Spent:
    body = keeper.report(Delivery(0, 0, [], 0.0, 0, compute_s=3.0, wait_s=0.0), now)
    found = spent_of(messages.Report(0, 0, [], extra={NAME: body}))
    assert found is not None
    return found


def test_a_report_says_where_the_time_since_the_last_one_went() -> None:
    keeper = TimeKeeper(staleness=1, devices=["cpu"])
    keeper.took_round(ROUND, 0.0, 0.0)
    assert reported(keeper, 0.5) == Spent(encode=500)
    keeper.fetched("lease", 0.0, 0.2)
    keeper.fetched("evaluation", 0.0, 0.9)
    keeper.exchanged(1.5, 8.0)
    keeper.fetched("packet", 8.0, 9.0)
    keeper.took_round(ROUND, 9.5, 10.0)

    said = reported(keeper, 10.4)

    assert (said.cycle, said.lease, said.download, said.upload) == (9900, 200, 1000, 1000)
    assert said.idle == 4800 + 500, "from the end of its compute to the commit, and until the next round"
    assert (said.encode, said.apply) == (400, 500)


def test_without_staleness_the_compute_of_a_round_comes_before_its_exchange() -> None:
    keeper = TimeKeeper(staleness=0, devices=["cpu"])
    keeper.took_round(ROUND, 0.0, 0.0)
    reported(keeper, 1.0)
    keeper.exchanged(2.0, 5.0)
    keeper.fetched("packet", 5.0, 6.0)
    keeper.took_round(ROUND, 6.5, 6.5)
    keeper.fetched("lease", 6.5, 7.0)

    said = reported(keeper, 10.2)

    assert (said.idle, said.lease, said.encode, said.apply) == (3000, 500, 200, 500)


def test_what_other_extensions_store_with_a_commit_is_time_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = TimeKeeper(staleness=1, devices=["cpu"])
    keeper.took_round(ROUND, 0.0, 0.0)
    keeper.exchanged(1.5, 8.0)
    monkeypatch.setattr("time.monotonic", lambda: 8.25)
    keeper.committed(messages.Committed(0, 9, "00", ["ann"]))
    keeper.took_round(ROUND, 9.0, 9.0)

    assert reported(keeper, 9.5).disk == 250


def test_a_machine_is_measured_while_it_trains_and_no_longer() -> None:
    keeper = TimeKeeper(staleness=1, devices=["cpu"])
    before = {thread.name for thread in threading.enumerate()}
    with keeper.beside({1}):
        assert "load" in {thread.name for thread in threading.enumerate()} - before
        assert keeper.meter is not None
        assert reported(keeper, 1.0).gpu_wait == 0
    for thread in threading.enumerate():
        if thread.name == "load":
            thread.join(120)
            assert not thread.is_alive()


@pytest.mark.parametrize(("reasons", "throttled"), [(0x04, False), (0x20, True)])
def test_a_gpu_at_its_power_cap_is_not_called_hot_and_one_slowed_down_for_its_heat_is(
    reasons: int, throttled: bool
) -> None:
    driver: Any = SimpleNamespace(
        NVMLError=ValueError,
        nvmlDeviceGetTemperature=lambda handle, sensor: 71,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7)],
        nvmlDeviceGetProcessUtilization=lambda handle, since: [
            SimpleNamespace(pid=8, smUtil=30, timeStamp=1)
        ],
    )

    assert load_of(NvidiaGpus(driver, ["gpu"], pytest.fail), {7}) == GpuLoad(0.3, throttled)


def test_an_array_of_a_peer_that_measures_less_is_read() -> None:
    body = msgspec.msgpack.encode([9900, 5300])

    assert spent_of(messages.Report(0, 0, [], extra={NAME: body})) == Spent(cycle=9900, idle=5300)
