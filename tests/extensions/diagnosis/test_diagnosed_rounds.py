"""The diagnosis in a hub: what it makes of reports, lines and its own disk, and what it tells of them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_swarm import HubSwarm
from msgspec.structs import replace
from sim_swarm import SimPeer, SimSwarm
from toy_swarm import ToyPeer, ToyWork, toy_settings

from cocktail_cli.extensions.diagnosis.bodies import NAME, Culprit, Spent
from cocktail_cli.extensions.diagnosis.hub import Diagnostician
from cocktail_cli.extensions.diagnosis.slow_rounds import RoundSample, SlowRounds
from transport.protocol import RoundCommitted, events, messages
from transport.scheduling import UnderWay
from transport.wire import Crossed


class Measured(SimPeer):
    """A peer that says how it has spent its time."""

    body = msgspec.msgpack.encode(Spent())

    def report(self, opened: messages.Round) -> messages.Report:
        return replace(super().report(opened), extra={NAME: self.body})


class MeasuredSwarm(SimSwarm):
    def new_peer(self, name: str) -> SimPeer:
        return Measured(self, name, self.staleness)

    def go_on(self, most: float = 0.2) -> None:
        """Let everybody do what they can, or time pass."""
        before = self.fingerprint()
        self.step()
        if self.fingerprint() == before:
            self.pass_time(most)


class Recorder(SlowRounds):
    """Keeps the samples of all rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[RoundSample] = []

    def add(self, sample: RoundSample) -> list[Culprit]:
        self.samples.append(sample)
        return super().add(sample)


def swarm_of(peers: int, **settings: Any) -> MeasuredSwarm:
    usual: dict[str, Any] = {"samples": 200, "global_batch": 6, "step_timeout": 20.0, "peer_timeout": 90.0}
    swarm = MeasuredSwarm(
        1, toy_settings(**usual, start_timeout=300.0, **settings), extensions=[Diagnostician]
    )
    for _ in range(peers):
        swarm.join()
    return swarm


def diagnosis(swarm: SimSwarm) -> Diagnostician:
    (found,) = swarm.hub.rounds.extensions
    assert isinstance(found, Diagnostician)
    return found


def culprits(swarm: SimSwarm) -> list[Culprit]:
    return [event.told for event in swarm.events if isinstance(event, events.OfExtension)]


def test_what_a_peer_has_measured_names_it_after_the_event_of_the_round_and_in_the_status() -> None:
    swarm = swarm_of(3)
    while swarm.hub.rounds.round < 3:
        swarm.step()
    slow = swarm.peers[1]
    assert isinstance(slow, Measured)
    slow.body = msgspec.msgpack.encode(Spent(clock=60_000))
    while not culprits(swarm):
        swarm.step()

    (found,) = culprits(swarm)
    assert (found.peer, found.cause, found.evidence) == ("p1", "clock", "its clock was set 60 s forward")
    before = swarm.events[swarm.events.index(events.OfExtension(0.0, found)) - 1]
    assert isinstance(before, RoundCommitted)
    assert before.round == found.round
    status = json.loads(swarm.hub.status(swarm.now))
    assert [(one["peer"], one["cause"], one["since"]) for one in status["culprits"]] == [
        ("p1", "clock", found.round)
    ]
    assert swarm.settle(20_000).finished


def test_a_status_and_the_event_of_a_round_always_have_a_bottleneck_known_or_not() -> None:
    swarm = swarm_of(2)
    assert json.loads(swarm.hub.status(swarm.now)) | {"bottleneck": None, "culprits": []} == json.loads(
        swarm.hub.status(swarm.now)
    )
    for peer in swarm.peers:
        peer.compute_s = 0.1
    assert swarm.settle(20_000).finished

    fields = [event.extra for event in swarm.events if isinstance(event, RoundCommitted)]
    assert fields[0] == {"bottleneck": ""}
    assert fields[-1] == {"bottleneck": "the compute"}
    status = json.loads(swarm.hub.status(swarm.now))
    assert status["bottleneck"] == {"line": "the compute", "waiting": 0.0, "bytes_per_s": 0}


@pytest.mark.parametrize("body", [b"\xff", b"\x91\xa1x", msgspec.msgpack.encode([-1]), b""], ids=repr)
def test_a_body_that_cannot_be_read_is_that_of_a_peer_which_measures_nothing(body: bytes) -> None:
    swarm = swarm_of(2)
    liar, found = swarm.peers[0], diagnosis(swarm)
    assert isinstance(liar, Measured)
    liar.body, found.slow = body, (recorder := Recorder())

    assert swarm.settle(20_000).finished
    spent = {peer.name: peer.spent for sample in recorder.samples for peer in sample.peers.values()}
    assert spent == {"p0": None, "p1": Spent()}


def test_a_sample_of_a_round_has_what_its_hub_measures_and_says_where_peers_evaluated_beside_it() -> None:
    swarm = swarm_of(2, eval=True, eval_every=4)
    found = diagnosis(swarm)
    found.slow = recorder = Recorder()
    assert swarm.settle(20_000).finished

    evaluated = {event.round for event in swarm.events if isinstance(event, events.EvaluationDone)}
    uneven = {sample.round for sample in recorder.samples if sample.uneven}
    assert uneven, "this run evaluates"
    assert evaluated & uneven, "the last evaluation is in no round"
    assert len(uneven) < len(recorder.samples), "each round that evaluates, and the one after it"
    assert all(round + 1 in uneven or round - 1 in uneven for round in uneven)
    usual = recorder.samples[5].peers.values()
    assert {(peer.up, peer.down, peer.whole) for peer in usual} == {(9, 9, True)}
    assert sum(peer.samples for peer in usual) == sum(peer.cost for peer in usual) == 6


def left_out(swarm: MeasuredSwarm, lines: Any = None) -> str:
    """Have rounds go on without p2 until it is named; return the cause."""
    while swarm.hub.rounds.round < 12:
        swarm.go_on()
    if lines is not None:
        diagnosis(swarm).watch(lines)
    late = swarm.peers.pop()
    while not culprits(swarm):
        assert swarm.ended is None, "it was named"
        swarm.step()
        swarm.pass_time(0.5)
    swarm.peers.append(late)
    (found,) = culprits(swarm)
    assert found.peer == "p2"
    return found.cause


def test_a_peer_that_rounds_go_on_without_is_silent_until_its_late_report_says_what_kept_it() -> None:
    swarm = swarm_of(3)
    while swarm.hub.rounds.round < 2:
        swarm.step()

    assert left_out(swarm) == "silent"
    back = swarm.peers[-1]
    assert isinstance(back, Measured)
    back.body = msgspec.msgpack.encode(Spent(cycle=9000, stopped=8000))
    while len(culprits(swarm)) < 2:
        assert swarm.ended is None, "it was heard"
        swarm.step()

    assert [one.cause for one in culprits(swarm)] == ["silent", "stopped"]
    assert [one.cause for one in diagnosis(swarm).slow.culprits] == ["stopped"], "silence is withdrawn"


class Slow:
    """Lines of sessions on which an update comes slowly."""

    def crossed(self, session: str) -> list[Crossed]:
        now = 1e9
        return [Crossed(now, now, 9_000, 0, caught_up_at=0.0, acknowledged=0, is_peers=True)]

    def under_way(self, session: str, round: int, now: float) -> UnderWay:
        return UnderWay(60.0, 12_000, 90_000)


def test_a_peer_whose_update_comes_slowly_is_named_by_the_bytes_of_its_lines() -> None:
    swarm = swarm_of(3)

    assert left_out(swarm, Slow()) == "upload"
    (found,) = culprits(swarm)
    assert "21 of 90 kB of its update have come in 60.0 s" in found.evidence


def test_a_real_hub_measures_its_sums_and_its_disk_and_what_is_on_its_way(tmp_path: Path) -> None:
    made: list[Diagnostician] = []

    def extend(hub: Any) -> Diagnostician:
        made.append(Diagnostician(hub))
        return made[0]

    with HubSwarm(toy_settings(), ToyWork(), tmp_path, extend=lambda keys, ledger: [extend]) as swarm:
        (found,) = made
        found.slow = recorder = Recorder()
        lines = found._lines
        assert lines is not None
        swarm.train(ToyPeer(swarm.link("ann")))

    assert recorder.samples
    assert all(sample.disk_s > 0 and sample.aggregate_s > 0 for sample in recorder.samples)
    assert all(peer.up > 0 for sample in recorder.samples for peer in sample.peers.values())
    assert (lines.crossed("nobody"), lines.under_way("nobody", 0, 1.0)) == ([], None)
