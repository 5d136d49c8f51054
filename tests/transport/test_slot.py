from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.slot import SHARE, SHORT, WINDOW, Slot


def test_of_what_was_not_measured_nothing_is_known() -> None:
    assert Slot().up == Slot().computed(1.0).up == Slot().sent(10**6, 1.0).up == 0


@given(st.floats(0.1, 100), st.floats(1e4, 1e8))
def test_each_way_carries_its_share_of_the_compute_at_its_rate(seconds: float, rate: float) -> None:
    slot = Slot().computed(seconds).sent(10**6, 10**6 / rate).came(10**6, 10**6 / (2 * rate))

    assert abs(slot.up - SHARE * seconds * rate) <= 2
    assert abs(slot.down - 2 * slot.up) <= 4


def test_one_odd_time_says_nothing() -> None:
    slot = Slot()
    for _ in range(WINDOW - 1):
        slot = slot.computed(1.0).sent(10**6, 1.0)

    assert slot.computed(60.0).sent(10**6, 90.0).up == slot.up


def test_a_short_packet_is_no_word_on_a_thin_line_but_finds_one_that_has_become_wide() -> None:
    known = Slot().computed(1.0)

    assert known.sent(SHORT - 1, 0.1).up == 0
    for _ in range(WINDOW):
        known = known.sent(10**6, 100.0)  # 10 kB a second
    wide = known
    for _ in range(WINDOW):
        wide = wide.sent(SHORT - 1, 0.1)

    assert known.sent(SHORT - 1, 10.0).up == known.up
    assert wide.up > 10 * known.up


def test_what_took_no_time_was_not_measured() -> None:
    assert Slot().computed(1.0).sent(10**6, 0.0).up == 0
