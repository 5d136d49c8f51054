"""Who has much waiting delays itself: others of its address by one item each in turn, and nobody
elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.wire import FairQueue


def test_origins_take_turns_and_those_of_an_origin_too() -> None:
    queue = FairQueue[str]()
    for n in range(3):
        queue.put("crowd", "a", f"a{n}")
        queue.put("crowd", "b", f"b{n}")
    queue.put("home", "c", "c0")
    queue.put("home", "c", "c1")

    assert [queue.take() for _ in range(queue.count)] == ["a0", "c0", "b0", "c1", "a1", "b1", "a2", "b2"]
    with pytest.raises(IndexError):
        queue.take()


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("123")), max_size=40), st.data())
def test_what_is_put_in_is_taken_once_in_its_payers_order(
    puts: list[tuple[str, str]], data: st.DataObject
) -> None:
    queue = FairQueue[tuple[str, str, int]]()
    for number, (origin, payer) in enumerate(puts):
        queue.put(origin, origin + payer, (origin, payer, number))
    dropped = data.draw(st.sampled_from(puts)) if puts else ("x", "1")
    queue.drop(dropped[0], "".join(dropped))
    taken = [queue.take() for _ in range(queue.count)]

    assert sorted(n for _, _, n in taken) == [n for n, who in enumerate(puts) if who != dropped]
    for who in set(puts):
        mine = [n for origin, payer, n in taken if (origin, payer) == who]
        assert mine == sorted(mine)


@given(st.integers(1, 50), st.integers(1, 5))
def test_a_crowd_of_one_origin_delays_another_by_one_item_each(crowd: int, mine: int) -> None:
    queue = FairQueue[str]()
    for n in range(crowd):
        queue.put("crowd", f"k{n}", "theirs")
    for _ in range(mine):
        queue.put("home", "me", "mine")
    order = [queue.take() for _ in range(queue.count)]

    assert order.index("mine") <= 1
    assert [at for at, item in enumerate(order) if item == "mine"][-1] <= 2 * mine
