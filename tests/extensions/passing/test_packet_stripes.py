from hypothesis import given
from hypothesis import strategies as st

from cocktail_cli.extensions.passing.passing_choice import (
    CHUNKS,
    LEAST,
    LONGEST,
    MOST,
    chunk_of,
    divide,
    packets_over,
)

UPLINKS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2), st.floats(1e3, 1e9), min_size=1, max_size=8
)


@given(st.integers(1, 200), UPLINKS, st.integers(2, 64), st.integers(0, 99))
def test_no_chunk_is_passed_on_twice_and_the_hub_sends_less_than_two_packets(
    chunks: int, uplinks: dict[str, float], peers: int, turn: int
) -> None:
    stripes = divide(chunks, uplinks, max(peers, len(uplinks)), turn)
    passed = [index for chunks_of in stripes.values() for index in chunks_of]

    assert sorted(passed) == list(range(len(passed))), "each once, without a gap"
    assert len(passed) <= chunks
    direct = chunks - len(passed)
    assert len(passed) + direct * max(peers, len(uplinks)) <= max(1.0, MOST) * chunks


@given(st.integers(2, 8), st.integers(0, 99))
def test_equal_helpers_pass_equal_stripes_on(count: int, turn: int) -> None:
    stripes = divide(840, {f"p{i}": 1e6 for i in range(count)}, count, turn)

    assert {len(chunks) for chunks in stripes.values()} == {840 // count}


@given(st.integers(1, 8), st.integers(2, 64))
def test_packets_over_the_lines_are_those_of_a_packet_that_is_divided(helpers: int, peers: int) -> None:
    """Hub and helpers together send each peer the packet once."""
    peers, chunks = max(peers, helpers), 10_000
    hub, each = packets_over(helpers, peers)
    stripes = divide(chunks, {f"p{i}": 1e6 for i in range(helpers)}, peers)
    passed = sum(map(len, stripes.values()))

    assert abs(hub + helpers * each - peers) < 1e-9
    assert abs(hub - (passed + (chunks - passed) * peers) / chunks) <= peers / chunks
    assert hub <= MOST + 1e-9


def test_a_stripe_is_as_long_as_its_uplink_is_fast() -> None:
    stripes = divide(100, {"slow": 1e6, "fast": 3e6}, 2)

    assert len(stripes["fast"]) == 75
    assert len(stripes["slow"]) == 25


def test_a_packet_of_one_chunk_is_passed_on_by_each_in_turn() -> None:
    helpers = {"ann": 1e6, "bob": 1e6, "cat": 1e6}

    assert {name for turn in range(3) for name in divide(1, helpers, 5, turn)} == set(helpers)


def test_nothing_is_passed_on_to_one_peer_or_by_nobody() -> None:
    assert divide(10, {"ann": 1e6}, 1) == divide(10, {}, 9) == {}


@given(st.integers(1, 2**36))
def test_a_packet_has_at_least_32_chunks_but_very_short_ones(size: int) -> None:
    chunk = chunk_of(size)

    assert LEAST <= chunk <= LONGEST
    assert chunk & (chunk - 1) == 0, "a power of two, as fragments are"
    assert size // chunk >= CHUNKS or chunk == LEAST
