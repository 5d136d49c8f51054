"""A volunteer knows the size of a run's objects before it asks for them."""

import io
from collections.abc import Callable
from typing import BinaryIO

import pytest
import torch
from msgspec.structs import replace

from cocktail_cli.volunteer.run_link import AT_ONCE, MOST, RunBounds, RunLink
from recipes.algorithm import compressor_of
from recipes.config import load_recipe
from transport.ledger import pack_header
from transport.protocol import NotServed, ProtocolError, messages

RECIPE = load_recipe("smoke", ["data.max_length=32", "global_batch_size=16", "local_steps=2"])
P = 50_000
BOUNDS = RunBounds(RECIPE, P, 321)
ROUND = messages.Round(7, 0, 9, ["ann"], 4, True)


def test_a_lease_is_as_long_as_its_samples_and_no_round_has_more_than_the_recipe_gives() -> None:
    one = BOUNDS.lease(replace(ROUND, samples=1))
    assert 2 * 32 < one < 3 * 32
    assert BOUNDS.lease(replace(ROUND, samples=32)) <= 32 * one

    for lie in (replace(ROUND, samples=33), replace(ROUND, samples=2**40)):
        with pytest.raises(ProtocolError, match="in 2 local steps: by the recipe a round has 32 at most"):
            BOUNDS.lease(lie)
    with pytest.raises(ProtocolError, match="round 7 is on rung 1, and the recipe has 1, from 0 on"):
        BOUNDS.lease(replace(ROUND, rung=1))
    assert BOUNDS.samples(2) == BOUNDS.lease(replace(ROUND, samples=2))


def test_ids_of_a_large_vocabulary_take_four_bytes() -> None:
    small, large, unknown = (
        RunBounds(RECIPE, P, size).lease(ROUND) for size in (1 << 16, (1 << 16) + 1, None)
    )

    assert large == unknown == small + 2 * 32 * ROUND.samples


class Records:
    """A link whose hub has these objects, and notes what each could have been."""

    name, leave_requested, bounds = "ann", None, BOUNDS

    def __init__(self, has: Callable[[str], bytes]) -> None:
        self.has, self.asked = has, dict[str, int]()

    def begin_spooled(self, name: str, most: int, spool: object) -> str:
        self.asked[name] = most
        return name

    def finish_spooled(self, name: str) -> BinaryIO:
        return io.BytesIO(self.has(name))

    def forget(self, *names: str) -> None: ...

    def abandon(self) -> None: ...


def link(has: Callable[[str], bytes]) -> tuple[RunLink, Records]:
    records = Records(has)
    run = RunLink(records, None)  # type: ignore[arg-type]
    run.knows(BOUNDS)
    return run, records


def record(round: int) -> bytes:
    mix = compressor_of(RECIPE.compression)
    packet = mix.encode(torch.randn(mix.draw(P, 1, round).m)).packet
    return pack_header(round, packet) + packet


def records_of(name: str) -> bytes:
    start, stop = map(int, name.partition("/")[2].split("-"))
    return b"".join(map(record, range(start, stop)))


def test_missed_packets_come_in_objects_of_a_size_known_beforehand() -> None:
    run, records = link(records_of)

    came = list(run.packets(3, 3 + AT_ONCE + 1))

    assert len(came) == AT_ONCE + 1
    assert [*records.asked] == ["packets/3-67", "packets/67-68"]
    assert all(len(records_of(name)) <= most <= MOST for name, most in records.asked.items())


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (lambda _: record(4), "have one of round 4"),
        (lambda _: record(3), "lack that of round 4"),
        (lambda _: record(3)[:-1], "come damaged"),
        (lambda _: record(3) + record(4) + record(5), "have one of round 5"),
        (lambda _: pack_header(3, bytes(2**20)) + bytes(2**20), "come damaged"),
    ],
)
def test_packets_of_other_rounds_or_lengths_are_not_applied(sent: Callable[[str], bytes], said: str) -> None:
    run, _ = link(sent)

    with pytest.raises(NotServed, match=said):
        list(run.packets(3, 5))
