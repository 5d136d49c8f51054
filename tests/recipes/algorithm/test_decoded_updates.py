"""Packets that are opened as they arrive: the sum is that of opening them one after another at the close."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from collected import collected
from torch import Tensor

from compress import Cocktail, PackedUpdate, decode
from recipes.algorithm import Aggregator, RejectedUpdate, robust_mean
from recipes.algorithm.robust_mean import DecodedUpdates, Rule

M, SEED = 5000, 7
MIX = Cocktail(random_ratio=0.5, topk_ratio=0.3, quant_bits=4, block_size=16)
Updates = list[tuple[str, bytes, float]]


def sent(peers: int, m: int, liars: int = 0, mix: Cocktail = MIX) -> Updates:
    """Packets of as many peers, the first of them far longer than the others."""
    generator = torch.Generator().manual_seed(m)
    vectors = [torch.randn(m, generator=generator) * (9.0 if i < liars else 1.0) for i in range(peers)]
    return [(f"p{i:02}", mix.encode(v).packet, 0.5 + i) for i, v in enumerate(vectors)]


def bits(x: Tensor) -> list[int]:
    return list(x.view(torch.int32).tolist())


def one_after_another(error: Tensor, updates: Updates, scales: dict[str, float]) -> Tensor:
    """Sum as ledgers were written: by peer, each packet added to the whole vector."""
    total = sum(weight for _, _, weight in updates)
    out = torch.zeros(len(error)) if scales else error.clone()
    for peer, packet, weight in sorted(updates):
        update = decode(packet, len(error))
        out.index_add_(0, update.positions, update.values, alpha=weight / total * scales.get(peer, 1.0))
    return error + out if scales else out


@pytest.mark.parametrize("liars", [0, 2])
@pytest.mark.parametrize("room", [0, 40_000, 1 << 30], ids=["none kept", "some kept", "all kept"])
@pytest.mark.parametrize("cores", [1, 4])
def test_the_bits_do_not_depend_on_cores_on_room_or_on_who_came_first(
    cores: int, room: int, liars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust_mean, "WORTH", 0)
    monkeypatch.setattr(robust_mean, "AT_ONCE", 700)
    monkeypatch.setattr(robust_mean, "CORES", cores)
    error, updates, packets = torch.randn(M), sent(9, M, liars), DecodedUpdates({0: M}, 1, room)
    early = random.Random(cores).sample(updates, 6)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda u: packets.decode(*u[:2]), early))

    found = collected(error, updates[::-1], Rule(), packets)

    assert [t.peer for t in found.shortened] == [f"p{i:02}" for i in range(liars)]
    want = one_after_another(error, updates, {t.peer: t.scale for t in found.shortened})
    assert bits(found.D) == bits(want)


@pytest.mark.parametrize("kind", ["mean", "median"])
def test_the_bits_do_not_depend_on_the_form_in_which_packets_are_kept(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba", reason="it has no build for this platform")
    m, rule = 40_000, Rule(kind)  # type: ignore[arg-type]
    error, updates, packets = torch.randn(m), sent(9, m, 2, Cocktail(topk_ratio=0.15)), DecodedUpdates({0: m})
    decoded = collected(error, updates, rule)
    monkeypatch.setattr("compress.backends.WORTH", 0)
    for peer, packet, _ in updates:
        assert isinstance(packets.decode(peer, packet)[0].update, PackedUpdate)

    found = collected(error, updates, rule, packets)

    assert [(t.peer, t.scale) for t in found.shortened] == [(t.peer, t.scale) for t in decoded.shortened]
    assert bits(found.D) == bits(decoded.D)


def test_the_median_is_the_same_of_packets_that_are_kept_decoded_and_of_those_that_are_not() -> None:
    rule, updates, error = Rule("median"), sent(7, M), torch.randn(M)

    assert bits(collected(error, updates, rule).D) == bits(
        collected(error, updates, rule, DecodedUpdates({0: M}, 1, 0)).D
    )


def test_what_is_kept_decoded_stays_within_its_room_however_often_packets_come() -> None:
    packets, updates = DecodedUpdates({0: M}, 1, 40_000), sent(9, M)
    for _ in range(3):
        for peer, packet, _ in updates:
            packets.decode(peer, packet)
            packets.decode(peer, MIX.encode(torch.ones(M)).packet)

    kept = [one[0] for _, one in packets._decoded.values() if one[0].update is not None]
    assert sum(one.nbytes for one in kept) <= 40_000
    assert kept
    assert len(packets._decoded) == 9, "of a peer only the last"


def test_an_aggregator_that_saw_packets_arrive_makes_the_packet_of_one_that_did_not() -> None:
    """Also where some came too late, were of another round, were damaged, or were replaced."""
    early, late = Aggregator(M, MIX, SEED), Aggregator(M, MIX, SEED)
    for t in range(3):
        updates = sent(5, early.assigned[0].sample(t).m)
        early.add(t, "p00", updates[1][1])
        for peer, packet, _ in updates:
            early.add(t, peer, packet)
        early.add(t, "p09", b"damaged")
        early.add(t - 1, "p01", updates[0][1])

        assert early.step(t, updates) == late.step(t, updates)
        assert bits(early.assigned[0].error) == bits(late.assigned[0].error)
        early.add(t, "p08", updates[0][1])
        assert early._updates is None, "nothing of a round is held once it is aggregated"


def test_a_packet_that_cannot_be_used_is_refused_at_the_close() -> None:
    aggregator = Aggregator(M, MIX, SEED)
    updates = sent(3, aggregator.assigned[0].sample(0).m)
    aggregator.add(0, "p01", b"damaged")

    with pytest.raises(RejectedUpdate, match="p01 is refused"):
        aggregator.step(0, [updates[0], ("p01", b"damaged", 1.0), updates[2]])
    assert not aggregator.assigned[0].error.any()
