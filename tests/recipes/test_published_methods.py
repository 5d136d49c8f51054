"""scripts/study/published.py: each method is what its paper defines it by."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.study.levers import BUCKET
from scripts.study.published import METHODS, Compressor, Dgc, EControl, Feedback, OnebitAdam, Scafcom, Way
from scripts.study.tables import published

P, PEERS = 1000, 3
ALL = torch.arange(PEERS)
EXACT: dict[str, Any] = {"peers": PEERS, "keep": 1.0}
SPARSE: dict[str, Any] = {"peers": PEERS, "keep": 0.05}


def made(method: str, **way: Any) -> Any:
    asked = Way(method=method, **way)
    return METHODS[method](asked, P, Compressor(asked, P, seed=1))


def rounds(count: int) -> list[Tensor]:
    return list(torch.randn(count, PEERS, P, generator=torch.Generator().manual_seed(5)).unbind())


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("feedback", {}),
        ("econtrol", {"control": 0.3}),
        ("scafcom", {"control": 1.0}),
        ("dgc", {"momentum": 0.0}),
    ],
)
def test_where_nothing_is_left_out_each_gives_the_mean_of_the_gradients(
    method: str, way: dict[str, Any]
) -> None:
    exact = made(method, **EXACT, **way)
    for gradients in rounds(4):
        torch.testing.assert_close(exact.estimate(gradients, ALL), gradients.mean(0), rtol=0, atol=1e-6)


def test_error_feedback_sends_every_gradient_once_sooner_or_later() -> None:
    feedback: Feedback = made("feedback", **SPARSE, share=0.5)
    found = sum(feedback.estimate(gradients, ALL) for gradients in rounds(4))

    torch.testing.assert_close(found + feedback.e.mean(0), sum(rounds(4)).mean(0), rtol=0, atol=1e-5)  # type: ignore[union-attr]


def test_dgc_drops_momentum_and_residual_where_it_has_sent_and_keeps_both_elsewhere() -> None:
    dgc: Dgc = made("dgc", **SPARSE, momentum=0.9)
    for gradients in rounds(3):
        u = 0.9 * dgc.u + gradients
        v = dgc.v + u
        threshold = v.abs().topk(int(0.05 * P)).values[:, -1:]
        sent = v.abs() >= threshold

        torch.testing.assert_close(dgc.estimate(gradients, ALL), (v * sent).mean(0))
        assert torch.equal(dgc.u, u * ~sent)
        assert torch.equal(dgc.v, v * ~sent)


def test_dgc_warms_up_by_quarters_and_never_below_its_usual_k() -> None:
    dgc: Dgc = made("dgc", peers=PEERS, keep=0.005, warm=8)
    keeps = []
    for gradients in rounds(10):
        keeps.append(dgc.keep)
        dgc.estimate(gradients, ALL)

    assert keeps == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.005, 0.005, 0.005, 0.005]


def test_onebit_adam_is_adam_first_and_then_v_stays_to_the_bit_and_m_loses_nothing_on_either_side() -> None:
    onebit: OnebitAdam = made("onebit", peers=PEERS, keep=1.0, bits=1, warm=3)
    x = torch.zeros(P, requires_grad=True)
    adam = torch.optim.Adam([x], lr=1.0, betas=(0.9, 0.999))
    for gradients in rounds(3):
        gradients[:, 0] = 0  # the coordinate of a byte that has not come yet
        before, x.grad = x.detach().clone(), gradients.mean(0)
        adam.step()
        torch.testing.assert_close(onebit.estimate(gradients, ALL), before - x.detach(), rtol=1e-4, atol=1e-5)
    v = onebit.v.clone()
    for gradients in rounds(6)[3:]:
        m, e, error = onebit.m.clone(), onebit.e.clone(), onebit.error.clone()
        onebit.estimate(gradients, ALL)

        assert torch.equal(onebit.v, v)
        wanted = 0.9 * m + 0.1 * gradients + e
        total = (wanted - onebit.e).mean(0) + error
        torch.testing.assert_close(onebit.m[1:], (total - onebit.error)[1:], rtol=0, atol=1e-6)
        assert len(onebit.m[BUCKET : 2 * BUCKET].abs().unique()) == 1
        assert onebit.m[0] == 0


@pytest.mark.parametrize("eta", [1.0, 0.1])
def test_econtrols_residual_is_what_the_gradients_were_without_its_estimates(eta: float) -> None:
    """With eta = 1 that is plain error feedback's: what C has left of what was wanted."""
    econtrol: EControl = made("econtrol", **SPARSE, control=eta)
    total = torch.zeros(PEERS, P)
    for gradients in rounds(5):
        wanted, h = eta * econtrol.e + gradients - econtrol.h, econtrol.h.clone()
        estimate = econtrol.estimate(gradients, ALL)
        total += gradients - econtrol.h

        torch.testing.assert_close(econtrol.e, total)
        torch.testing.assert_close(estimate, econtrol.h.mean(0))
        if eta == 1:
            torch.testing.assert_close(econtrol.e, wanted - (econtrol.h - h), rtol=0, atol=1e-5)


def test_scafcoms_common_variate_is_the_mean_of_all_and_who_is_absent_keeps_its_own() -> None:
    scafcom: Scafcom = made("scafcom", **SPARSE, control=0.5)
    members = torch.tensor([0, 2])
    scafcom.estimate(rounds(1)[0], ALL)
    for gradients in rounds(4):
        u, c, common = scafcom.u.clone(), scafcom.c.clone(), scafcom.common.clone()
        found = scafcom.estimate(gradients[members], members)

        torch.testing.assert_close(scafcom.common, scafcom.c.mean(0), rtol=0, atol=1e-6)
        assert torch.equal(scafcom.u[1], u[1])
        assert torch.equal(scafcom.c[1], c[1])
        assert torch.equal(scafcom.u[0], torch.lerp(u[0], gradients[0], 0.5))
        torch.testing.assert_close(found, common + (scafcom.c - c)[members].mean(0), rtol=0, atol=1e-6)


def test_bits_are_those_of_the_way_up() -> None:
    way = Way(method="feedback", peers=PEERS)
    compressor = Compressor(way, P, seed=1)
    compressor(torch.randn(PEERS, P))

    assert 16 / compressor.bits == pytest.approx(118, rel=0.05)
    dense = Compressor(replace(way, keep=1.0), P, seed=1)
    dense(torch.randn(PEERS, P))
    assert dense.bits == 16


def test_a_method_is_reported_at_the_rate_that_the_other_half_chose_and_by_what_it_was() -> None:
    way = asdict(Way(method="scafcom", members=4, apart=1, control=0.5))
    tried = [(2e-3, 1, 1.0, 2.1), (4e-3, 1, 1.1, 1.9), (2e-3, 2, 1.2, 2.3), (4e-3, 2, 0.9, 1.5)]
    rows = [{**way, "rate": r, "seed": s, "halves": [a, b], "ratio": 118.4} for r, s, a, b in tried]

    [line] = published(rows, {1: 2.0, 2: 2.0})

    name = "SCAFCOM, beta 0.5; Adam; 4 of 8 peers, each with a text of its own"
    assert line == [name, "118x", "0.002", "2.2000 (2)", "+10.00%"]
