"""The probe thread beside the hub: harmful peers are refused, and the run never waits for the probe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest

from cocktail_cli.extensions.trust.contribution_score import ENDS_WITHIN, Gain, ProbeThread
from transport.membership import STRIKES
from transport.protocol import WeightedPacket

UPDATES = [WeightedPacket(f"p{i}", b"packet", 1.0) for i in range(10)]
DOES = {"p0": -2.0, "p1": 0.0}
WAIT = 10.0  # seconds, where something is expected


@dataclass
class FakeProbe:
    """Scores ten peers: the first is harmful, the second useless."""

    look_ends: threading.Event = field(default_factory=threading.Event)
    applied: list[bytes] = field(default_factory=list)
    looks: int = 0
    judged: int = 0
    fills: float = 50.0

    def look(self, stop: Callable[[], bool]) -> None:
        self.looks += 1
        while not self.look_ends.wait(0.01) and not stop():
            pass

    def gains(self, updates: Any) -> dict[str, Gain]:
        self.judged += 1
        return {peer: Gain(DOES.get(peer, 1.0)) for peer, _, _ in updates}

    @property
    def global_model(self) -> FakeProbe:
        return self

    def apply(self, packet: bytes) -> None:
        self.applied.append(packet)


@pytest.fixture
def told() -> list[str]:
    return []


def started(load: Callable[[], Any], told: list[str]) -> ProbeThread:
    one = ProbeThread(load, lambda peer, message: told.append(message))
    one.start()
    return one


def test_who_hurts_is_found_and_who_is_of_no_use_counts_for_less_with_the_reasons(told: list[str]) -> None:
    fake = FakeProbe()
    fake.look_ends.set()
    one = started(lambda: fake, told)
    for round in range(12):
        assert one.ready.wait(WAIT)
        one.committed(b"%d" % round, UPDATES, frozenset())
        while len(fake.applied) <= round:
            assert one.thread.is_alive()
            threading.Event().wait(0.001)
    one.close()

    assert one.found.keys() == {"p0"}
    assert fake.applied == [b"%d" % round for round in range(12)]
    assert ["count for no more than that" in said for said in told] == [True, True]
    weights = {update.peer: one.weight(update.peer) for update in UPDATES}
    assert weights.pop("p1") < 0.1
    assert weights.pop("p0") <= 1.0
    assert set(weights.values()) == {1.0}
    for _ in range(STRIKES):
        assert one.objection("p1") == ""
        assert one.objection("p0", packet=False) != "", "a handoff is no strike"
        assert "raise the loss of the host's probe batch, by 2.0 times" in one.objection("p0")
    assert one.objection("p0") == "", "it is out; this is somebody else of that name"


def test_rounds_that_are_committed_while_it_computes_move_x_and_are_judged_by_nobody(told: list[str]) -> None:
    fake = FakeProbe()
    one = started(lambda: fake, told)
    for _ in range(5):
        one.committed(b"x", UPDATES, frozenset())
    fake.look_ends.set()
    assert one.ready.wait(WAIT)
    while len(fake.applied) < 5:
        threading.Event().wait(0.001)
    one.close()

    assert (fake.looks, fake.judged) == (1, 0)


def test_it_ends_in_the_middle_of_a_gradient(told: list[str]) -> None:
    one = started(FakeProbe, told)
    one.close()

    assert not one.thread.is_alive()
    assert not told


def test_a_probe_that_fails_is_a_warning_and_no_end(told: list[str]) -> None:
    def load() -> Any:
        raise MemoryError("Unable to allocate 8.00 GiB")

    one = started(load, told)
    one.thread.join(WAIT)
    one.committed(b"x", UPDATES, frozenset())

    assert len(told) == 1
    assert told[0].startswith("the run goes on without its probe: ")
    assert one.rounds.empty(), "packets that nobody will take are not kept"
    one.close()


def test_ends_within_is_less_than_a_hub_is_given() -> None:
    host_session = import_module("cocktail_cli.host.host_session")

    assert ENDS_WITHIN < host_session.STOPS_WITHIN
