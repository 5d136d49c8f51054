"""Packets are passed on where that is measured to be faster, and the choice does not swing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail_cli.extensions.passing.passing_choice import PassingChoice

SIZE = 1000


def rounds(choice: PassingChoice, of_hub: int, of_helpers: int, count: int) -> list[bool]:
    """Feed the choice what four peers measure: so many bytes fit by the hub's line, so many by helpers'."""
    ways = []
    for _ in range(count):
        ways.append(choice.on)
        choice.note([of_helpers if choice.on else of_hub] * 4, SIZE)
    return ways


def test_packets_are_passed_on_where_helpers_are_faster() -> None:
    ways = rounds(PassingChoice(), 500, 1000, 300)

    assert not any(ways[:4])
    assert all(ways[4:])


def test_where_the_hubs_line_is_fast_nothing_is_tried() -> None:
    assert not any(rounds(PassingChoice(), 5000, 9000, 300))


def test_where_helpers_are_no_faster_a_trial_is_short_and_rare() -> None:
    assert sum(rounds(PassingChoice(), 500, 550, 300)) <= 30


def test_a_swarm_whose_helpers_became_slow_goes_back_to_the_hub() -> None:
    choice = PassingChoice()
    rounds(choice, 500, 1000, 50)

    assert choice.on
    assert not any(rounds(choice, 500, 300, 20)[4:])


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3000), min_size=300, max_size=300))
def test_the_way_changes_at_most_twice_in_sixty_rounds_whatever_is_measured(fits: list[int]) -> None:
    choice, ways = PassingChoice(), []
    for one in fits:
        ways.append(choice.on)
        choice.note([one] * 3, SIZE)
    changes = [i for i in range(1, len(ways)) if ways[i] != ways[i - 1]]

    assert all(later - first > 60 for first, later in zip(changes, changes[2:], strict=False))


def test_always_is_always() -> None:
    assert all(rounds(PassingChoice("always"), 9000, 10, 100))
