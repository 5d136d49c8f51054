"""The line that bounds recent rounds is named: the compute, the hub's, or a peer's, up or down."""

import pytest

from cocktail_cli.extensions.diagnosis.bodies import Spent
from cocktail_cli.extensions.diagnosis.slow_rounds import PeerSample, RoundSample
from cocktail_cli.extensions.diagnosis.slowest_line import LineWatch, SlowestLine

MB = 1_000_000


def found(
    ups: list[float], downs: list[float], wait: float = 5.0, starts: tuple[float, ...] = (0.0,) * 4
) -> SlowestLine | None:
    """Rounds of peers whose updates and aggregates, 1 MB each, take these seconds."""
    watch, last = LineWatch(), None
    for round in range(6):
        peers = {
            f"p{i}": PeerSample(
                f"p{i}",
                starts[(i + round) % len(starts)] + up,
                compute_s=10.0,
                wait_s=wait,
                upload_s=up,
                up=MB,
                down=MB,
                spent=Spent(download=round_to_ms(down)),
            )
            for i, (up, down) in enumerate(zip(ups, downs, strict=True))
        }
        last = watch.add(RoundSample(round, 0.0, peers))
    return last


def round_to_ms(seconds: float) -> int:
    return round(1000 * seconds)


@pytest.mark.parametrize(
    ("ups", "downs", "line"),
    [
        ([1, 1, 1, 8], [1, 1, 1, 1], "p3's up"),
        ([1, 1, 1, 1], [1, 9, 1, 1], "p1's down"),
        ([4, 4, 4, 4], [1, 1, 1, 1], "the hub's down"),
        ([1, 1, 1, 1], [4, 4, 4, 4], "the hub's up"),
    ],
)
def test_the_slowest_line_is_a_peers_or_the_hubs(ups: list[float], downs: list[float], line: str) -> None:
    one = found(ups, downs)

    assert one is not None
    assert one.line == line
    assert one.bytes_per_s == round(MB / max(*ups, *downs))


def test_lines_that_carry_the_same_however_many_send_are_the_peers_own() -> None:
    """One of four sends late, alone: over the hub's line it would have been faster."""
    one = found([4.0, 4.1, 3.9, 4.0], [1.0] * 4, starts=(0.0, 0.0, 0.0, 6.0))

    assert one is not None
    assert one.line == "each peer's up"


def test_where_devices_hardly_wait_the_compute_is_the_bottleneck() -> None:
    one = found([4, 4], [4, 4], wait=0.2)

    assert one is not None
    assert (one.line, one.bytes_per_s) == ("the compute", 0)


def test_few_rounds_say_nothing() -> None:
    assert LineWatch().add(RoundSample(0, 0.0)) is None
