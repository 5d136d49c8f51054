"""Shards of a vector, and the packets of all of them as one."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress import Cocktail, PacketError, join, split, within

PACKETS = st.one_of(st.just(b""), st.binary(max_size=40).map(lambda rest: b"CK" + rest))


@given(st.lists(PACKETS, min_size=1, max_size=9))
def test_joined_packets_are_split_again(packets: list[bytes]) -> None:
    assert split(join(packets), len(packets)) == packets
    assert [bytes(part) for part in split(memoryview(join(packets)), len(packets))] == packets


def test_a_single_shard_is_its_packet_as_it_stands() -> None:
    assert join([b"CK of its own"]) == b"CK of its own"
    assert split(join([b""]), 1) == [b""]


@given(n=st.integers(1, 5000), count=st.integers(1, 40))
def test_shards_are_the_whole_vector_each_coordinate_once_and_nearly_alike(n: int, count: int) -> None:
    count = min(n, count)
    shards = Cocktail(shards=count).cut(n, seed=42)

    assert [s.start for s in shards] == [0, *(s.stop for s in shards[:-1])]
    assert shards[-1].stop == n
    assert max(s.size for s in shards) - min(s.size for s in shards) <= 1
    assert shards[0].seed == 42
    assert len({s.seed for s in shards}) == count


def test_shards_of_one_length_have_different_samples() -> None:
    mix = Cocktail(shards=2, block_size=16)
    one, other = (mix.draw(s.size, s.seed, 3).units.tolist() for s in mix.cut(20_000, seed=1))
    assert one != other


def test_more_shards_than_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="4 shards of 3 coordinates"):
        Cocktail(shards=4).cut(3, 0)
    with pytest.raises(ValueError, match="shards 1025"):
        Cocktail(shards=1025)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=9), st.data())
def test_a_part_of_a_vector_has_the_samples_of_the_whole(sizes: list[int], data: st.DataObject) -> None:
    """Shards end where they are told to; ranges of whole shards make a vector whose shards have the numbers
    and seeds that they have in the whole, at the places that `offset` names."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    shards = Cocktail(shards=tuple(ends)).cut(ends[-1], seed=42)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    part = within(shards, [range(shards[n].start, shards[n].stop) for n in chosen])

    assert [s.stop for s in shards] == ends
    assert [(s.number, s.seed, s.size) for s in part] == [(n, shards[n].seed, shards[n].size) for n in chosen]
    assert [s.start + s.offset for s in part] == [shards[n].start for n in chosen]
    assert [s.start for s in part] == [0, *(s.stop for s in part[:-1])]


def test_a_part_that_cuts_a_shard_is_refused() -> None:
    shards = Cocktail(shards=2).cut(10, seed=1)
    with pytest.raises(ValueError, match="coordinates 0 to 7 are not a union of shards"):
        within(shards, [range(7)])
    with pytest.raises(ValueError, match="numbers that rise"):
        Cocktail(shards=(1, 1, 3))


@pytest.mark.parametrize(
    ("packet", "message"),
    [
        (b"", "0 bytes, the packets of 2 shards have at least 24"),
        (b"CK" + bytes(30), "begins with b'CK' version 0"),
        (b"CS\x02\x00" + bytes(30), "version 2, reserved field 0, expected b'CS' version 1"),
        (join([b"a", b"b", b"c"]), "the packets of 3 shards, expected 2"),
        (join([b"a", b"b"])[:-1], "25 bytes, its table of shards adds up to 26"),
        (join([b"a", b"b"]) + b"c", "27 bytes, its table of shards adds up to 26"),
        (struct.pack("<2sBBI2Q", b"CS", 1, 0, 2, 1 << 63, 1 << 63), "adds up to 18,446,744,073,709,551,640"),
        (struct.pack("<2sBBI", b"CS", 1, 0, 1 << 31) + bytes(16), "2,147,483,648 shards, expected 2"),
    ],
)
def test_a_false_table_of_shards_is_refused_before_memory_is_allocated(packet: bytes, message: str) -> None:
    with pytest.raises(PacketError, match=message):
        split(packet, 2)
