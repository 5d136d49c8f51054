from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recipes.config import Recipe, load_recipe
from recipes.planning import LinkSpeed, StepCost, cost_of_step, survey_data
from transport.protocol import Rung
from transport.scheduling.leases import BLOCK, Ladder

PACKET = 10**6


def recipe(**compression: object) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "costs",
            "model": {"model_name_or_path": "builtin:tiny-gpt-neox"},
            "datasets": [{"path": "builtin:python-docs"}],
            "compression": compression,
        }
    )


def cost(asked: Recipe, compute: float, rate: float) -> StepCost:
    return cost_of_step(asked, PACKET, compute, LinkSpeed(rate, rate))


@given(st.floats(0.001, 1000), st.floats(1e3, 1e8), st.floats(1, 100), st.integers(1, 16))
def test_a_better_line_never_has_longer_rounds_or_shorter_packets(
    compute: float, rate: float, faster: float, peers: int
) -> None:
    lines = (LinkSpeed(each, each) for each in (rate, faster * rate))
    thin, wide = (cost_of_step(recipe(), PACKET, compute, line, peers) for line in lines)

    assert wide.every <= thin.every
    assert wide.packet >= 0.9 * thin.packet, "that of the rung for many peers is a little shorter"
    assert wide.computing >= 0.999 * thin.computing or wide.packet > thin.packet


def test_a_number_of_local_steps_is_taken_whatever_the_line_carries() -> None:
    for rate in (1e3, 1e9):
        assert cost(recipe(local_steps=3), 1.0, rate).every == 3


def test_over_the_hubs_line_go_the_packets_of_all_peers() -> None:
    """Four peers on the lines of a home and a hub on such a line: its up carries four aggregates."""
    home, good = LinkSpeed(2.5e6, 12.5e6), LinkSpeed(1e9, 1e9)
    asked = recipe(auto=False)

    alone, shared = (cost_of_step(asked, PACKET, 0.8, home.behind(hub, 4)) for hub in (good, home))

    assert (alone.computing, alone.slowest) == (1.0, "the compute")
    assert (shared.up, shared.down) == (0.4, 4 * PACKET / 2.5e6)
    assert shared.slowest == "the hub's up"
    assert shared.computing == 0.8 / 2.0


def test_peers_that_pass_packets_on_relieve_the_hubs_line() -> None:
    home = LinkSpeed(2.5e6, 12.5e6)

    passed = home.behind(home, 4, sent=1.4, passed=1.6)

    assert (passed.up, passed.down) == (2.5e6, 2.5e6 / 1.6)
    assert passed.down_line == "each peer's up", "whose line passes on more than the hub's sends"
    assert home.behind(home, 4, sent=1.8).down_line == "the hub's up"


@given(st.floats(1, 100), st.floats(0.3, 400), st.integers(1, 16))
def test_the_rung_of_a_plan_is_the_one_on_which_a_run_rests(compute: float, need: float, peers: int) -> None:
    asked = recipe().compression
    assume(all(abs(need / one.need - 1) > 1e-6 for one in asked.ladder))
    line = LinkSpeed(2 * PACKET / (need * compute), 2 * PACKET / (need * compute))
    both = zip(asked.ladder, asked.rungs, strict=True)
    ladder = Ladder(tuple(Rung(one.need, rung.local_steps, one.peers) for one, rung in both), 0)
    for round in range(6 * BLOCK):
        ladder = ladder.committed(round, need, peers)

    found = cost_of_step(recipe(), PACKET, compute, line, peers).rung
    kept = ladder.rungs[ladder.at]
    assert found == asked.rungs[ladder.at].words or peers < kept.peers, "it has six of eight"


@given(st.floats(0.01, 100), st.floats(1e3, 1e8), st.integers(0, 3))
def test_a_run_computes_all_the_time_exactly_where_the_compute_is_the_bottleneck(
    compute: float, rate: float, staleness: int
) -> None:
    found = cost(recipe(staleness=staleness), compute, rate)

    assert 0 < found.computing <= 1
    if staleness and found.slowest == "the compute":
        assert found.computing > 1 - 1e-8, "but for rounding"
    elif staleness:
        assert found.computing < 1


def test_packets_shrink_until_the_compute_hides_them_and_no_further() -> None:
    wide, thin, thinner = (cost(recipe(), 1.0, rate) for rate in (1e7, 1e6, 1e2))

    assert (wide.fitting, wide.computing) == (1.0, 1.0)
    assert (thin.fitting, thin.computing) == (0.5, 1.0)
    assert thinner.every == 8
    assert 0.03 < thinner.fitting * thinner.packet / PACKET < 0.05
    assert thinner.computing < 0.1
    assert thinner.slowest == "each peer's up"
    assert thin.seconds == 1.0, "a step takes as long as the packets that are sent"
    assert thinner.computing * thinner.seconds == 1.0


@pytest.mark.parametrize("held", ["0", "3"])
def test_a_plan_counts_the_samples_that_are_trained(
    corpus_of: Any, tokenizer: Any, tmp_path: Path, held: str
) -> None:
    """A template that rewrites earlier messages makes a sample of each answer."""
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    rows = [{"messages": [ask, answer] * 3}] * 12
    keys = (f"val_set_size={held}", "max_length=256")

    trained = len(corpus_of(rows, *keys).samples)

    asked = load_recipe(tmp_path / "bare.yaml", list(keys), data=str(tmp_path / "my.jsonl"))
    survey = survey_data(asked, tokenizer)
    assert survey.samples(asked) == trained == 3 * (12 - int(held))
    assert (survey.rows, len(survey.lengths)) == (12, 12)
    asked = load_recipe(tmp_path / "bare.yaml", [*keys, "packing=true"], data=str(tmp_path / "my.jsonl"))
    assert survey.samples(asked) == round((12 - int(held)) * sum(survey.documents) / 12 / 256)
