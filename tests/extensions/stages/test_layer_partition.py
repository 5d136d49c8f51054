"""The partition of layers is the best there is."""

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail_cli.extensions.stages.compute import Costs, partition_layers

cost = st.integers(1, 50).map(float)


def load(costs: Costs, parts: tuple[range, ...], capacities: list[float]) -> float:
    sums = [sum(costs.layers[part.start : part.stop]) for part in parts]
    sums[0] += costs.ends
    return max(total / capacity for total, capacity in zip(sums, capacities, strict=True))


@given(
    st.lists(cost, min_size=3, max_size=7),
    cost,
    st.lists(st.integers(1, 4).map(float), min_size=1, max_size=3),
    st.integers(0, 1),
)
def test_no_partition_has_a_lower_largest_load(
    layers: list[float], ends: float, capacities: list[float], first: int
) -> None:
    """Beside all partitions, tried one by one; parts follow each other, and only the first may be empty."""
    costs = Costs(tuple(layers), ends)
    parts = partition_layers(costs, capacities, first)

    assert [layer for part in parts for layer in part] == list(range(len(layers)))
    assert all(parts[1:])
    assert len(parts[0]) >= first
    tried = []
    for inner in combinations_with_replacement(range(len(layers) + 1), len(capacities) - 1):
        ends_at = (0, *inner, len(layers))
        every = tuple(range(a, b) for a, b in pairwise(ends_at))
        if all(every[1:]) and len(every[0]) >= first:
            tried.append(load(costs, every, capacities))
    assert load(costs, parts, capacities) == min(tried)


def test_more_stages_than_layers_are_refused() -> None:
    """The first stage may be without layers, no other."""
    assert partition_layers(Costs((1.0, 1.0), 9.0), [1.0] * 3) == (range(0, 0), range(0, 1), range(1, 2))
    with pytest.raises(ValueError, match="4 stages of 2 layers"):
        partition_layers(Costs((1.0, 1.0), 9.0), [1.0] * 4)
