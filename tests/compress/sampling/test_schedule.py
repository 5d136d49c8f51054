"""A walk through the vector window by window visits what `draw` lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import Cocktail
from compress.sampling.schedule import places


@settings(max_examples=60)
@given(
    n=st.integers(1, 5000),
    p=st.sampled_from([1.0, 0.5, 0.3, 0.1, 2 / 7, 0.003]),
    block=st.sampled_from([1, 4, 64, 256]),
    kind=st.sampled_from(["block", "element", "fragment"]),
    seed=st.integers(0, 2**64 - 1),
    round=st.integers(0, 1000),
    window=st.integers(1, 600),
)
def test_windows_put_together_are_the_sample(
    n: int, p: float, block: int, kind: str, seed: int, round: int, window: int
) -> None:
    mix = Cocktail(random_ratio=p, block_size=block, sample_kind=kind)
    whole = mix.draw(n, seed, round)

    walk = mix.walk(n, seed, round)
    parts = [
        start + walk.visited(places(walk, start, min(start + window, walk.count)))
        for start in range(0, walk.count, window)
    ]

    assert (walk.m, walk.block) == (whole.m, whole.block)
    assert np.concatenate(parts).tolist() == whole.units.tolist()
