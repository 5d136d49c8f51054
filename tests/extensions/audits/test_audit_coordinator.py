"""Audits in a real hub: what reports must have, what a refused peer reads, and any history of misfortunes."""

import json
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.structs import replace
from sim_swarm import STOP, SimPeer, SimSwarm
from test_run_ledger import begin
from toy_swarm import ToyWork, toy_settings

from cocktail_cli.extensions.audits.audit_book import SKETCH
from cocktail_cli.extensions.audits.bodies import NAME, Answers, Tasks
from cocktail_cli.extensions.audits.hub import AuditCoordinator
from transport.protocol import events, messages
from transport.transfer import ObjectStore

MISFORTUNES = ("step",) * 30 + ("cut", "kill", "join", "second", "minute", "restart", "leave")


def sketch(sample: int, lease: int) -> bytes:
    return Random(f"{sample}/{lease}").randbytes(SKETCH)


class AuditedPeer(SimPeer):
    """A peer that sketches what it computes; `lies`: another gradient than it was given."""

    lies = False
    says: bytes | None = None  # in place of sketches

    def __init__(self, swarm: SimSwarm, name: str, staleness: int) -> None:
        super().__init__(swarm, name, staleness)
        self.audited: dict[int, list[tuple[int, int]]] = {}  # round -> (sample, lease)

    def begin(self) -> None:
        super().begin()
        if self.round is not None and NAME in self.round.extra and self.state.welcome is not None:
            leases = msgspec.msgpack.decode(self.round.extra[NAME], type=Tasks).leases
            samples = audits_of(self.swarm).samples(self.state.welcome.session, self.round.round) or ()
            if len(samples) == len(leases):  # else another hub has asked
                self.audited[self.round.round] = list(zip(samples, leases, strict=True))

    def report(self, opened: messages.Round) -> messages.Report:
        of = {lease: b"".join(self.found(i, lease) for i in self.pending[lease]) for lease in self.sent}
        beside = {lease: self.audited.get(lease, []) for lease in self.sent}
        audits = {lease: b"".join(self.found(*one) for one in asked) for lease, asked in beside.items()}
        body = msgspec.msgpack.encode(Answers(of, {r: a for r, a in audits.items() if a}))
        return replace(super().report(opened), extra={NAME: self.says if self.says is not None else body})

    def found(self, sample: int, lease: int) -> bytes:
        return (
            sketch(sample, lease)
            if not self.lies
            else sketch(-sample - 1, int.from_bytes(self.key.encode(), "big"))
        )


def audits_of(swarm: SimSwarm) -> AuditCoordinator:
    (audits,) = swarm.hub.rounds.extensions
    assert isinstance(audits, AuditCoordinator)
    return audits


class AuditedSwarm(SimSwarm):
    def new_peer(self, name: str) -> SimPeer:
        return AuditedPeer(self, name, self.staleness)


def swarm_of(peers: int, **changes: object) -> AuditedSwarm:
    usual = {"samples": 400, "global_batch": 16, "step_timeout": 20.0, "peer_timeout": 90.0}
    settings = toy_settings(**(usual | {"start_timeout": 300.0} | changes))
    swarm = AuditedSwarm(1, settings, extensions=[partial(AuditCoordinator, share=0.2)])
    for _ in range(peers):
        swarm.join()
    return swarm


def warned(swarm: SimSwarm) -> list[tuple[str | None, str]]:
    return [(e.peer, e.message) for e in swarm.events if isinstance(e, events.Warned)]


def test_honest_peers_are_audited_and_nobody_is_warned_of() -> None:
    swarm = swarm_of(5)

    assert swarm.settle(20_000).finished
    figures = json.loads(swarm.hub.status(swarm.now))["audits"]
    assert figures["audited"] > 40
    assert figures["share"] <= 0.2
    assert (figures["disagreements"], figures["usual_bits"]) == (0, 0)
    assert not any("audit" in message for _, message in warned(swarm))


def test_a_liar_is_found_refused_and_banned_and_reads_why() -> None:
    swarm = swarm_of(5)
    liar = swarm.peers[2]
    assert isinstance(liar, AuditedPeer)
    liar.lies = True

    assert swarm.settle(20_000).finished
    assert [peer for peer, message in warned(swarm) if "found by audits" in message] == ["p2"]
    refusals = [one.refused["p2"] for one in liar.state.commits.values() if "p2" in one.refused]
    assert all("two other peers agree on another gradient of the sample" in why for why in refusals)
    assert liar.state.refused is not None
    assert "3 unusable packets" in liar.state.refused.reason
    assert {e.peer for e in swarm.events if isinstance(e, events.PeerLeft) and e.how == "removed"} == {"p2"}


def test_a_ban_by_hand_that_is_lifted_leaves_no_evidence() -> None:
    """The machine was repaired: it is admitted, and nothing that it sends is refused."""
    swarm = swarm_of(5)
    liar = swarm.peers[2]
    assert isinstance(liar, AuditedPeer)
    liar.lies = True
    audits = audits_of(swarm)
    while not audits.book.convicted:
        swarm.step()
    assert list(audits.book.convicted) == [liar.key]
    for order in ("ban", "unban"):
        asked = messages.AskAdmin(messages.PROTOCOL, STOP, "toy-run", order, "p2")  # type: ignore[arg-type]
        swarm.act(swarm.hub.receive(b"host", asked, swarm.now))

    assert not audits.book.convicted
    assert not audits.book.records
    assert not any(liar.key in case.opinions for case in audits.book.cases)


def test_a_peer_that_audits_nothing_in_a_round_is_served_no_audit(tmp_path: Path) -> None:
    """Else it could have any number of empty objects in the memory where leases are, and an empty one before
    the round has its own."""
    swarm = swarm_of(3)
    while swarm.peers[0].round is None:
        swarm.step()
    audits = audits_of(swarm)
    [session, *_] = [one.id for one in swarm.hub.members]

    assert audits.samples(session, 10**6) is None
    with begin(tmp_path) as ledger:
        objects = ObjectStore(ledger, ToyWork(), lambda session, round: None)
        audits.serve(objects)
        found, data = objects.answer(session, messages.Get("audit/1000000", 0, 1024))
        assert (found, data) == (
            messages.NoObject("audit/1000000", "this session holds no audit of round 1000000"),
            None,
        )
        objects.close()


@pytest.mark.parametrize("body", [b"", b"no msgpack", msgspec.msgpack.encode({"sketches": {0: "text"}})])
def test_an_update_whose_report_has_no_sketches_is_refused_with_the_reason(body: bytes) -> None:
    swarm = swarm_of(3)
    silent = swarm.peers[0]
    assert isinstance(silent, AuditedPeer)
    silent.says = body

    assert swarm.settle(20_000).finished
    refusals = [one.refused["p0"] for one in silent.state.commits.values() if "p0" in one.refused]
    assert refusals
    assert all("its report has no gradient sketch of each of the" in why for why in refusals)
    assert sorted(swarm.trained) == list(range(400))


def test_whatever_happens_to_them_honest_peers_are_never_refused() -> None:
    """Lost connections, killed peers, restarted hubs, newcomers, slow ones: an audit is only ever lost."""
    for seed in range(60):
        random = Random(seed)
        swarm = swarm_of(4, samples=120)
        for peer, pace in zip(swarm.peers, (1.0, 1.0, 30.0, 0.0), strict=True):
            peer.compute_s = pace
        for _ in range(200):
            what, peer = random.choice(MISFORTUNES), random.choice(swarm.peers)
            if what == "step":
                swarm.step()
            elif what == "join" and len(swarm.peers) < 8:
                swarm.join()
            elif what in ("cut", "kill"):
                getattr(swarm, what)(peer)
            elif what == "leave":
                swarm.leave(peer)
            elif what == "restart":
                swarm.restart_hub()
            else:
                swarm.pass_time(2.0 if what == "minute" else 1.0)
        if swarm.ended is None:
            swarm.join()
        ended = swarm.settle(20_000)

        assert ended.finished or ended.exit_code == 7, seed
        assert not any("cannot be used" in message or "audit" in message for _, message in warned(swarm)), (
            seed
        )
