"""kill -9 of the hub at any write: what was announced is there, no sample is lost or counted twice, and x'
and the owner's error are what they would have been."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import pytest
import torch
from crash_points import Crashes, State, recorded
from hub_swarm import HubSwarm
from torch import Tensor
from toy_swarm import ToyPeer, ToyWork, toy_settings, trained

from cocktail_cli.host import DurableAggregator
from compress import Cocktail
from recipes.algorithm import Aggregator, Log, handoff_compressor, unlogged
from transport import Ledger
from transport.ledger import RoundRow
from transport.protocol import Event, messages

pytestmark = pytest.mark.slow

P, SEED, SAMPLES = 400, 7, 28
MIX = Cocktail(random_ratio=0.25, topk_ratio=0.2, quant_bits=4, block_size=16)
KEPT_BYTES = 1000  # of updates.log before e itself is written: about every other round
SETTINGS = toy_settings(
    samples=SAMPLES, eval=True, eval_every=2, recover_s=0.0, peer_timeout=0.5, ping_s=0.02, grace_s=0.1,
    linger_s=0.2,
)  # fmt: skip
Legacy = tuple[str, bytes, float]
Updates = Sequence[tuple[str, bytes, float]]


def packet_of(name: str, round: int, ids: list[int]) -> bytes:
    """A real packet of the method, behind the names of the samples that are in it."""
    generator = torch.Generator().manual_seed(crc32(f"{name} {round} {ids}".encode()))
    coordinates = MIX.draw(P, SEED, round).m
    return json.dumps(ids).encode() + b"\n" + MIX.encode(torch.randn(coordinates, generator=generator)).packet


class NamingOwner(Aggregator):
    """The owner of recipes; its packets name the samples as well."""

    def __init__(self) -> None:
        super().__init__(P, MIX, SEED)

    def step(self, round: int, updates: Updates, log: Log = unlogged) -> bytes:
        said = [[peer, json.loads(packet.partition(b"\n")[0]), weight] for peer, packet, weight in updates]
        return json.dumps([round, said]).encode() + b"\n" + super().step(round, plain(updates), log)

    def replay(self, round: int, updates: Updates, packet: bytes) -> None:
        super().replay(round, plain(updates), packet.partition(b"\n")[2])


def plain(updates: Updates) -> Updates:
    return [(peer, packet.partition(b"\n")[2], weight) for peer, packet, weight in updates]


@dataclass
class KeptWork(ToyWork):
    """The hub's work with the owner's error on the disk. Remembers what went in, e after each round, and how
    it ended.
    """

    durable: DurableAggregator = None  # type: ignore[assignment]
    updates: list[Updates] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    over: list[messages.Over | None] = field(default_factory=list)  # what each peer heard last
    legacies: dict[int, Legacy] = field(default_factory=dict)  # by the round they were inherited before

    def aggregate(self, round: int, updates: Updates) -> bytes:
        packet = self.durable.aggregate(round, updates)
        self.updates.append(updates)
        return packet

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        self.durable.inherit(peer, packet, share)
        self.legacies[len(self.packets)] = (peer, packet, share)

    def committed(self, round: int, packet: bytes) -> None:
        super().committed(round, packet)
        self.errors.append(error_of(self.durable).clone())
        self.durable.committed(round)

    def named(self) -> list[int]:
        """Every sample that is in x', as often as it is."""
        return trained(ToyWork([packet.partition(b"\n")[0] for packet in self.packets]))


def kept_owner(folder: Path) -> DurableAggregator:
    owner = DurableAggregator(NamingOwner(), folder)
    owner.longest = KEPT_BYTES
    return owner


def error_of(kept: DurableAggregator) -> Tensor:
    return kept.aggregator.assigned[0].error


def run(folder: Path, names: Sequence[str], leaver: str = "", crashes: Crashes | None = None) -> KeptWork:
    """A run in `folder`, begun or gone on with, to its end; `leaver` goes in its fourth round."""
    work = KeptWork(durable=kept_owner(folder))
    with HubSwarm(SETTINGS, work, folder) as swarm:
        if crashes is not None:
            crashes.announced = lambda: swarm.hub._state.rounds.round
        work.durable.recover(swarm.ledger)
        work.packets += [packet for _, packet in swarm.ledger.packets()]
        peers: list[ToyPeer] = []
        threads: list[threading.Thread] = []
        for name in names:
            link = swarm.link(name)
            peer = ToyPeer(link, pack=lambda round, ids, name=name: packet_of(name, round, ids))  # type: ignore[misc]
            if name == leaver:
                peer.legacy = handoff_compressor(MIX, 0.2).encode(torch.randn(P)).packet
                peer.before_exchange = lambda opened, link=link: leave(link.leave_requested, opened)  # type: ignore[misc]
            peers.append(peer)
            threads.append(peer.start())
        work.events = swarm.wait(120)
        for thread in threads:
            thread.join(120)
        work.over = [peer.over for peer in peers]
    work.durable.close()
    return work


def leave(wish: threading.Event, opened: messages.Round) -> None:
    if opened.round == 3:
        wish.set()


@dataclass(frozen=True)
class Undisturbed:
    crashes: Crashes
    work: KeptWork


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A run of three peers, one of which leaves; nobody is killed, every instant is kept."""
    folder = tmp_path_factory.mktemp("undisturbed") / "ledger"
    with recorded(folder) as crashes:
        work = run(folder, ("ann", "bob", "cem"), leaver="bob", crashes=crashes)
    audit(folder)
    return Undisturbed(crashes, work)


def audit(folder: Path) -> None:
    """Every sample was counted once. Raises LedgerError."""
    with Ledger(folder, write=False) as ledger:
        ledger.verify(complete=True)


def go_on(state: State, folder: Path, told: KeptWork) -> None:
    """The next process, fed the same packets."""
    state.restore(folder)
    with Ledger(folder, run=SETTINGS.run, samples=SAMPLES) as ledger:
        audit, recovered = ledger.verify(), ledger.recover()
        owner = kept_owner(folder)
        owner.recover(ledger)

        assert state.announced <= recovered.round == audit.rounds
        assert [packet for _, packet in ledger.packets()] == told.packets[: recovered.round]
        if recovered.round:
            assert torch.equal(error_of(owner), told.errors[recovered.round - 1])
        for round in range(recovered.round, len(told.packets)):
            if round in told.legacies:  # not committed with a round: as if the leaver could say it again
                owner.inherit(*told.legacies[round])
            packet = owner.aggregate(round, told.updates[round])
            assert packet == told.packets[round]
            ledger.commit(RoundRow(round, round, 0.0, 0.0, 0, (), (), None, 0), packet, ())
            owner.committed(round)
        assert torch.equal(error_of(owner), told.errors[-1])
        owner.close()


def test_killed_at_any_write_the_next_hub_goes_on_as_if_nothing_had_happened(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    crashes = undisturbed.crashes
    assert len(crashes.states) > 100
    assert len(undisturbed.work.legacies) == 1
    for number, state in enumerate(crashes.states):
        try:
            go_on(state, tmp_path / str(number), undisturbed.work)
        except BaseException as error:
            raise AssertionError(f"killed {state.where}, {state.announced} announced: {error}") from error


def test_after_a_kill_at_any_write_the_run_counts_every_sample_once(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """New peers take the run to its end: one under a name that was there before, and one that was not."""
    states = undisturbed.crashes.states
    for number in range(3, len(states), max(1, len(states) // 12)):
        states[number].restore(tmp_path / str(number))
        work = run(tmp_path / str(number), ("ann", "dan"))

        assert work.named() == list(range(SAMPLES)), f"killed {states[number].where}"
        audit(tmp_path / str(number))
