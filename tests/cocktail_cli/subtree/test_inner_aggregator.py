"""d_h of an inner hub: nothing is lost, whatever the parent takes, and a crash leaves the same bits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_tree import MIX, SEED, P, aggregator, error_of
from torch import Tensor

from cocktail_cli.subtree import InnerAggregator
from recipes.algorithm import Aggregator, GlobalModel, Worker
from transport.protocol import WeightedPacket


def moved(aggregator: Aggregator, round: int, packet: bytes) -> Tensor:
    """(P,) what a packet says."""
    model = GlobalModel(torch.zeros(P), MIX, SEED, round)
    model.apply(packet)
    return model.vector


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sets(st.sampled_from("ab")), st.booleans(), st.booleans()), max_size=8))
def test_residuals_and_d_h_and_x_are_all_steps(rounds: list[tuple[set[str], bool, bool]]) -> None:
    """Updates come or are lost, the parent accepts the packet or refuses it, and the inner hub is killed:
    residuals + d_h + e + x' stay the sum of all steps, and d_h is the same to the bit after replay."""
    with tempfile.TemporaryDirectory() as folder:
        path, generator = Path(folder) / "inner", torch.Generator().manual_seed(len(rounds))
        inner, root, x = InnerAggregator(aggregator(), path), aggregator(), torch.zeros(P)
        peers = {name: Worker(x.clone(), GlobalModel(x.clone(), MIX, SEED)) for name in "ab"}
        steps = torch.zeros(P)
        for round, (here, accepted, killed) in enumerate(rounds):
            sent = {}
            for name, peer in peers.items():
                step = torch.randn(P, generator=generator)
                peer.x.add_(step)
                steps += step
                sent[name] = peer.start()
            updates = [WeightedPacket(name, sent[name].packet, 1.0) for name in sorted(here)]
            packets = []
            if updates:
                packet = inner.aggregate(round, updates, "h0")
                before = error_of(inner.aggregator) + moved(inner.aggregator, round, packet)
                inner.settle(accepted)
                kept = error_of(inner.aggregator)
                gone = moved(inner.aggregator, round, packet) * accepted
                assert torch.allclose(kept + gone, before, atol=1e-5)
                packets = [("h0", packet, 1.0)] * accepted
            aggregate = root.step(round, packets) if packets else b""
            if aggregate:
                for name, peer in peers.items():
                    peer.finish(aggregate, sent[name] if name in here else None)
                x += moved(root, round, aggregate)
            else:  # no round above: children keep what d_h has not
                for name in here:
                    peers[name].subtract(sent[name])
                for peer in peers.values():
                    peer.global_model.round += 1
            if killed:
                now = error_of(inner.aggregator)
                inner.close()
                inner = InnerAggregator(aggregator(), path)
                inner.recover(round + 1)
                assert torch.equal(error_of(inner.aggregator), now)
        inner.close()
        everything = x + error_of(inner.aggregator) + error_of(root)
        for peer in peers.values():
            assert torch.equal(peer.global_model.vector, x)
            everything += peer.x - x
        assert torch.allclose(everything, steps, atol=1e-4)


def test_a_packet_whose_outcome_nobody_knows_is_pending(tmp_path: Path) -> None:
    """Killed before `settle` the newest packet is pending; refused before the ledger had the round, its
    children must still hear of it; once the ledger has the round it was accepted."""
    inner = InnerAggregator(aggregator(), tmp_path / "inner")
    x = torch.randn(P, generator=torch.Generator().manual_seed(1))
    sent = Worker(x, GlobalModel(torch.zeros(P), MIX, SEED)).start()
    inner.aggregate(0, [WeightedPacket("ann", sent.packet, 1.0)], "h0")
    inner.close()

    def started(rounds: int) -> InnerAggregator:
        again = InnerAggregator(aggregator(), tmp_path / "inner")
        again.recover(rounds)
        return again

    again = started(1)
    assert again.pending is None
    again.close()
    again = started(0)
    assert again.pending is not None
    assert (again.pending.peers, again.pending.sender, again.pending.accepted) == (("ann",), "h0", None)
    again.settle(False)
    kept = error_of(again.aggregator)
    again.close()
    again = started(0)
    assert again.pending is not None
    assert again.pending.accepted is False
    assert torch.equal(error_of(again.aggregator), kept)
    assert torch.allclose(kept, moved(again.aggregator, 0, sent.packet), atol=1e-5)
    again.close()
