"""Rings of lent machines: nobody is in two, each has all layers within its memory, the lost are replaced."""

from collections.abc import Iterator, Sequence
from itertools import combinations, count, pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from cocktail_cli.extensions.stages.ring_table import BACK_S, GAP_S, Lender, Ring, RingTable, strongest

LAYERS, ENDS = 6, 2  # a unit of memory for each layer


class Units:
    """A division of six layers of one unit each; the first machine has two units beside."""

    layers = LAYERS
    micro_batches, activation, gradient = 4, 1e5, 2e5

    def memory(self, stages: int, number: int, layers: range) -> int:
        return len(layers) + (ENDS if number == 0 else 0)

    def divide(self, memories: Sequence[int]) -> tuple[range, ...] | None:
        """Give each machine as many layers as it can have, the first ones first; each has one at least."""
        found, start = list[range](), 0
        for number, memory in enumerate(memories):
            later = len(memories) - number - 1
            stop = min(start + memory - (ENDS if number == 0 else 0), LAYERS - later)
            if stop <= start:
                return None
            found.append(range(start, stop))
            start = stop
        return tuple(found) if start == LAYERS else None


def named() -> Iterator[str]:
    return map("ring-{}".format, count())


def check(table: RingTable) -> None:
    """All laws that hold at any time."""
    placed = [machine for ring in table.rings.values() for machine in ring.machines if machine]
    assert len(placed) == len(set(placed))
    assert {lender.id for lender in table.waiting} == table.lenders.keys() - set(placed)
    for ring in table.rings.values():
        assert any(ring.machines)
        assert [one.start for one in ring.layers] == [0, *(one.stop for one in ring.layers[:-1])]
        assert ring.layers[-1].stop == LAYERS
        for number, machine in enumerate(ring.machines):
            need = Units().memory(len(ring.layers), number, ring.layers[number])
            assert not machine or table.lenders[machine].memory >= need
        if len(ring.machines) > 1:
            for pair in pairwise((*ring.machines, ring.machines[0])):
                assert "" in pair or any(table.lenders[machine].reachable for machine in pair)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 8), st.booleans()),
        st.tuples(st.just("gone"), st.integers(0, 30), st.just(False)),
        st.tuples(st.just("wait"), st.integers(1, 70), st.just(False)),
        st.tuples(st.just("line"), st.integers(0, 30), st.booleans()),
    ),
    max_size=30,
)


@given(STEPS)
def test_every_history_keeps_the_laws_of_rings(steps: list[tuple[str, int, bool]]) -> None:
    table, now, names, machines = RingTable(Units()), 0.0, named(), map("m{}".format, count())
    for kind, number, reachable in steps:
        if kind == "come":
            table.come(Lender(next(machines), number, reachable))
        elif kind == "gone" and table.lenders:
            table.gone(list(table.lenders)[number % len(table.lenders)])
        elif kind == "line" and (some := list(table.rings.values())):  # is lost, or there again
            beside = list(pairwise(filter(None, some[number % len(some)].machines)))
            for one, other in beside[: number % 3]:
                table.measured(one, other, 0.01 if reachable else inf)
        else:
            now += number
        check(table)
        before = {ring.id: ring for ring in table.rings.values()}
        table.tick(now, names)
        check(table)
        if any(table.latency(one, other) == inf for one, other in combinations(table.lenders, 2)):
            continue
        waiting = sorted(table.waiting, key=lambda one: -one.memory)
        for size in range(1, len(waiting) + 1):
            chosen = strongest(waiting, size)
            assert not chosen or Units().divide([one.memory for one in chosen]) is None, "a ring could form"
        for ring in table.rings.values():
            old = before.get(ring.id)
            if old is not None:  # who was in it keeps place and layers
                assert old.layers == ring.layers
                for was, machine in zip(old.machines, ring.machines, strict=True):
                    assert was in ("", machine)


def placed(*memories: int) -> RingTable:
    """A table of reachable machines m0, m1, ..."""
    table = RingTable(Units())
    for number, memory in enumerate(memories):
        table.come(Lender(f"m{number}", memory, True))
    table.tick(0.0, named())
    return table


def test_no_ring_forms_before_the_machines_have_the_memory_and_the_strongest_is_its_head() -> None:
    table = placed(3, 2)
    assert not table.rings
    table.come(Lender("m2", 4, True))
    table.tick(1.0, named())

    [ring] = table.rings.values()
    assert ring.machines == ("m2", "m0", "m1")
    assert ring.layers == (range(0, 2), range(2, 5), range(5, 6))


def test_a_lost_machine_is_replaced_by_the_least_that_suffices_and_nobody_moves() -> None:
    table = placed(4, 3, 3)
    for late, memory in (("weak", 1), ("strong", 5), ("fit", 2)):
        table.come(Lender(late, memory, True))
    table.changed.clear()
    table.gone("m2")
    table.tick(1.0, named())

    [ring] = table.rings.values()
    assert ring.machines == ("m0", "m1", "weak")  # it has one layer
    assert table.changed == {"m0", "m1", "weak"}


def test_one_of_two_machines_whose_line_is_lost_is_replaced_and_waits() -> None:
    """Only where another can take the place; then that which is not reached, if that other reaches both."""
    table = placed(4, 3, 3)
    table.measured("m1", "m2", inf)
    table.tick(1.0, named())
    assert table.rings["ring-0"].machines == ("m0", "m1", "m2"), "nobody waits"
    table.come(Lender("late", 3, True))
    table.tick(2.0, named())
    assert table.rings["ring-0"].machines == ("m0", "m1", "late")

    table.measured("m1", "late", inf)
    table.tick(3.0, named())
    assert table.rings["ring-0"].machines == ("m0", "m2", "late"), "m2 does not reach m1"
    table.measured("late", "m0", inf)
    table.tick(4.0, named())
    assert table.rings["ring-0"].machines == ("m0", "m2", "late"), "m1 does not reach m2"


def test_machines_that_do_not_reach_each_other_are_no_neighbours() -> None:
    table = RingTable(Units())
    for name in "abc":
        table.come(Lender(name, 3, True))
    table.measured("a", "b", inf)
    table.tick(0.0, named())
    assert not table.rings
    table.come(Lender("d", 3, True))
    table.tick(1.0, named())
    assert [ring.machines for ring in table.rings.values()] == [("b", "c", "d")]

    table = RingTable(Units())
    for name in "abcd":
        table.come(Lender(name, 1 if name == "d" else 3, True))
    table.measured("a", "b", inf)
    table.tick(0.0, named())
    assert [ring.machines for ring in table.rings.values()] in (
        [("a", "c", "b", "d")],
        [("a", "d", "b", "c")],
    )


def test_a_gap_is_filled_when_somebody_comes_and_a_ring_that_waits_for_too_long_is_dissolved() -> None:
    table = placed(4, 3, 3)
    table.gone("m1")
    table.tick(1.0, named())
    assert table.deadline() == 1.0 + GAP_S
    table.come(Lender("late", 3, True))
    table.tick(2.0, named())
    assert [ring.machines for ring in table.rings.values()] == [("m0", "late", "m2")]

    table.gone("late")
    table.tick(3.0, named())
    table.tick(3.0 + GAP_S, named())
    assert not table.rings
    assert {lender.id for lender in table.waiting} == {"m0", "m2"}


def test_a_lost_head_is_replaced_as_any_other_machine() -> None:
    """Also one that lives and that its neighbour does not reach: not the neighbour, which has said so."""
    table = placed(4, 3, 3)
    table.come(Lender("m3", 4, True))
    table.gone("m0")
    table.tick(1.0, named())
    assert [ring.machines for ring in table.rings.values()] == [("m3", "m1", "m2")]

    table.come(Lender("m4", 4, True))
    table.measured("m2", "m3", inf)
    table.tick(2.0, named())
    assert [ring.machines for ring in table.rings.values()] == [("m4", "m1", "m2")]


def test_machines_that_nobody_reaches_stand_between_reachable_ones() -> None:
    table = RingTable(Units())
    for name in ("a", "b"):
        table.come(Lender(name, 4, False))
    table.tick(0.0, named())
    assert not table.rings
    table.come(Lender("c", 4, True))
    table.tick(1.0, named())
    assert [ring.machines for ring in table.rings.values()] == [("c", "a")]


def test_the_order_of_a_ring_is_that_of_the_least_latencies() -> None:
    """Four machines on a line: a ring that follows it has the least; a replacement is near its neighbours."""
    table, at = RingTable(Units()), {"a": 0, "b": 3, "c": 1, "d": 2, "far": 9, "near": 2}
    for name in "abcd":
        table.come(Lender(name, 3 if name == "a" else 2, True))
    for name in ("far", "near"):
        table.come(Lender(name, 1 if name == "far" else 2, True))
    for one in at:
        for other in at:
            table.measured(one, other, 0.01 * abs(at[one] - at[other]))
    table.gone("near")
    table.tick(0.0, named())
    [ring] = table.rings.values()
    assert ring.machines in (("a", "c", "d", "b"), ("a", "b", "d", "c"))

    table.come(Lender("near", 2, True))
    for other in at:
        table.measured("near", other, 0.01 * abs(at["near"] - at[other]))
    table.gone("d")
    table.tick(1.0, named())
    [ring] = table.rings.values()
    assert set(ring.machines) == {"a", "b", "c", "near"}


def test_the_order_of_a_ring_avoids_a_thin_line_and_so_does_the_choice_of_its_machines() -> None:
    """Latencies are alike. One of four lines is thin; of two that could replace a machine, or be the fourth,
    one has a thin line."""
    table = RingTable(Units())
    for name in "abcd":
        table.come(Lender(name, 3 if name == "a" else 2, True))
    rate(table, {"ab": 1e4})
    table.tick(0.0, named())
    [ring] = table.rings.values()
    assert "b" not in (ring.machines[1], ring.machines[-1])

    for name in ("thin", "fast"):
        table.come(Lender(name, 2, True))
    rate(table, {"thin": 1e4})
    table.gone(ring.machines[2])
    table.tick(1.0, named())
    assert table.rings["ring-0"].machines == (*ring.machines[:2], "fast", ring.machines[3])

    table = RingTable(Units())
    for name, memory in (("a", 4), ("thin", 2), ("c", 2), ("d", 2)):
        table.come(Lender(name, memory, True))
    rate(table, {"thin": 1e4})
    table.tick(0.0, named())
    assert [set(ring.machines) for ring in table.rings.values()] == [{"a", "c", "d"}]


def rate(table: RingTable, thin: dict[str, float]) -> None:
    """Tell a table the rates of all lines: 10 MB/s, but for pairs or machines that are thin."""
    for one in table.lenders:
        for other in table.lenders:
            table.rated(
                one, other, min(thin.get(name, 1e7) for name in (one, one + other, other + one, other))
            )


def test_a_restarted_hub_gives_machines_the_places_that_they_had() -> None:
    """A machine that waits gets none of them before their own have had the time to come back."""
    table, layers = RingTable(Units()), (range(0, 2), range(2, 5), range(5, 6))
    had, names = Ring("r", ("",) * 3, layers), named()
    table.come(Lender("spare", 3, True))
    assert table.restore(Lender("ann", 4, True), had, 0)
    table.tick(0.0, names)
    assert not table.restore(Lender("dan", 4, True), had, 0), "the place is taken"
    assert not table.restore(Lender("eve", 1, True), had, 1), "three layers are too many"
    assert not table.restore(Lender("eve", 4, True), Ring("r", ("",) * 2, (range(0, 2), range(2, 6))), 1)
    assert not table.restore(Lender("eve", 4, True), Ring("other", ("",) * 2, (range(0, 2), range(2, 4))), 1)
    table.tick(BACK_S - 1, names)
    assert table.restore(Lender("bob", 3, True), had, 1)
    assert table.rings["r"].machines == ("ann", "bob", "")
    table.tick(BACK_S, names)
    assert table.rings["r"].machines == ("ann", "bob", "spare")
    check(table)
