"""Samples in a file are those that were packed, bit for bit, and a lie in it is found."""

import io
import struct
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data import MOST, Sample, SampleLimits, StoredSamples, batches, pack_samples, unpack_samples
from recipes.errors import ForeignSamples

LIMITS = SampleLimits(tokens=40, documents=40, vocabulary=100_000)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Draw a sample of one document or several, with a mask or without."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    seed, masked = draw(st.integers(0, 2**20)), draw(st.booleans())
    rng, total = np.random.default_rng(seed), sum(lengths)
    trained = rng.random(total) < 0.5 if masked else np.ones(total, bool)
    trained[np.cumsum([0, *lengths[:-1]])] = False
    tokens = rng.integers(0, draw(st.sampled_from([300, 90_000])), total).astype(np.int32)
    return Sample(tokens, trained, tuple(lengths) if len(lengths) > 1 else ())


def plain(found: Sequence[Sample]) -> list[object]:
    return [(s.tokens.tolist(), str(s.tokens.dtype), s.trained.tolist(), s.documents) for s in found]


@given(st.lists(samples(), max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_samples_of_a_file_are_those_that_were_packed(made: list[Sample], step: int, first: int) -> None:
    data = pack_samples(made)
    stored = StoredSamples(io.BytesIO(data), LIMITS)

    assert plain(stored) == plain(unpack_samples(data, LIMITS)) == plain(made)
    assert plain(stored[first::step]) == plain(made[first::step])
    assert plain([stored[i] for i in range(len(stored))]) == plain(made)
    assert [plain(batch) for batch in batches(stored, 3)] == [plain(batch) for batch in batches(made, 3)]


@given(st.lists(samples(), min_size=1, max_size=5), st.integers(0, 400), st.integers(0, 255))
def test_changed_bytes_are_refused_or_samples_within_the_limits(
    made: list[Sample], place: int, value: int
) -> None:
    data = bytearray(pack_samples(made))
    data[place % len(data)] = value

    try:
        found = unpack_samples(bytes(data), LIMITS)
    except ForeignSamples:
        return
    for sample in found:
        assert 1 <= sum(sample.lengths) == len(sample.tokens) == len(sample.trained) <= LIMITS.tokens
        assert 0 <= sample.tokens.min() <= sample.tokens.max() < LIMITS.vocabulary
        assert not sample.trained[np.cumsum([0, *sample.lengths[:-1]])].any()


@given(st.lists(samples(), max_size=3), st.data())
def test_cut_bytes_and_more_bytes_are_refused(made: list[Sample], draw: st.DataObject) -> None:
    whole = pack_samples(made)
    cut = whole[: draw.draw(st.integers(0, len(whole) - 1))]

    for wrong in (cut, whole + b"\0"):
        with pytest.raises(ForeignSamples):
            StoredSamples(io.BytesIO(wrong), LIMITS)


def header(count: int, flags: int = 0) -> bytes:
    return struct.pack("<4sBBI", b"CKT1", 2, flags, count)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header(2**32 - 1), "4,294,967,295 samples in 10 bytes"),
        (header(MOST + 1) + bytes(4 * MOST + 4), "at most 1,048,576 are read"),
        (header(1, 2) + b"\xff" * 8, "too short for 4,294,967,295 lengths"),
        (header(1) + b"\xff" * 8, "a sample of 4,294,967,295 tokens, this run has at most 40"),
        (header(2) + bytes(20), "a sample of no tokens"),
        (b"CKT9" + header(1)[4:], "these bytes are no packed samples"),
        (b"", "samples of 0 bytes"),
    ],
)
def test_a_lie_about_lengths_is_found_before_anything_is_made_of_it(data: bytes, said: str) -> None:
    tracemalloc.start()
    with pytest.raises(ForeignSamples, match=said):
        StoredSamples(io.BytesIO(data), LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1 << 20


def test_a_long_set_takes_the_memory_of_its_places() -> None:
    one = Sample(np.arange(40, dtype=np.int32), np.arange(40) > 0)
    file = io.BytesIO(pack_samples([one] * 4000))
    tracemalloc.start()
    stored = StoredSamples(file, LIMITS)
    seen = sum(sample.count for sample in stored[1::2])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert seen == 39 * 2000
    assert peak < len(file.getvalue()), "two places of 8 bytes a sample, and a window of lengths"


@given(st.lists(samples(), max_size=6))
def test_no_set_within_the_limits_is_longer_than_was_known_beforehand(made: list[Sample]) -> None:
    full = Sample(np.full(40, 70_000, np.int32), np.zeros(40, bool), (1,) * 40)

    assert len(pack_samples([*made, full])) <= LIMITS.packed(len(made) + 1)
