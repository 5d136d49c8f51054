"""Files that arrive in chunks: every MiB is checked, and only what is wrong is asked for."""

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.models import hash_file
from recipes.models.base_model import HASH_BLOCK as RECIPES_BLOCK
from transport.protocol import Leaving, ProtocolError
from transport.transfer import HASH_BLOCK, ChunkFile, block_hashes

CHUNK = 256 * 1024
DATA = random.Random(0).randbytes(3 * HASH_BLOCK + 12_345)


def hashed(folder: Path, data: bytes = DATA) -> bytes:
    (folder / "origin").write_bytes(data)
    return block_hashes(folder / "origin")


def fragment(index: int, data: bytes = DATA) -> bytes:
    return data[index * CHUNK : (index + 1) * CHUNK]


def fill(part: ChunkFile, data: bytes = DATA) -> int:
    """Bring what is missing; returns how many bytes that took."""
    came = 0
    for index in part.map.missing:
        assert part.add(index, fragment(index, data)) == []
        came += len(fragment(index, data))
    return came


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[2 * HASH_BLOCK + 7] ^= 1
    file.write_bytes(data)


def hole(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[HASH_BLOCK : HASH_BLOCK + 4096] = bytes(4096)
    file.write_bytes(data)


def truncated(file: Path) -> None:
    os.truncate(file, 2 * HASH_BLOCK + 5)


def longer(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"more")


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (flip, HASH_BLOCK),
        (hole, HASH_BLOCK),
        (truncated, HASH_BLOCK + 12_345),
        (longer, 0),
        (lambda file: file.write_bytes(b""), len(DATA)),
        (lambda file: None, 0),
    ],
)
def test_of_a_damaged_file_only_the_wrong_blocks_are_fetched(
    tmp_path: Path, damage: Callable[[Path], None], wrong: int
) -> None:
    hashes, target = hashed(tmp_path), tmp_path / "weights"
    target.write_bytes(DATA)
    damage(target)
    part = ChunkFile(target, len(DATA), hashes, CHUNK)
    found = part.verify()

    assert fill(part) == wrong
    assert found == len(DATA) - wrong
    assert part.finish().read_bytes() == DATA
    assert sorted(p.name for p in tmp_path.iterdir()) == ["origin", "weights"]


def test_a_file_goes_on_where_a_killed_process_stopped(tmp_path: Path) -> None:
    hashes, target = hashed(tmp_path), tmp_path / "weights"
    killed = ChunkFile(target, len(DATA), hashes, CHUNK)
    for index in (0, 1, 2, 3, 9, 12):  # block 0, a chunk of block 2, the short last one
        killed.add(index, fragment(index))
    later = ChunkFile(target, len(DATA), hashes, CHUNK)
    later.verify()

    assert later.map.missing == [4, 5, 6, 7, 8, 9, 10, 11]
    fill(later)
    assert later.finish().read_bytes() == DATA


def test_a_block_that_comes_wrong_is_asked_for_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    part = ChunkFile(tmp_path / "weights", len(DATA), hashed(tmp_path), CHUNK)

    def bring(last: bytes) -> list[int]:
        return [again for i in range(4) for again in part.add(i, fragment(i) if i < 3 else last)]

    assert bring(bytes(CHUNK)) == [0, 1, 2, 3]
    assert part.map.missing == list(range(13))
    assert bring(bytes(CHUNK)) == [0, 1, 2, 3]
    with pytest.raises(ProtocolError, match="MiB 0 of weights came wrong 3 times"):
        bring(bytes(CHUNK))


def test_what_was_begun_of_another_object_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "weights.part").write_bytes(bytes(len(DATA)))
    part = ChunkFile(tmp_path / "weights", len(DATA), hashed(tmp_path), CHUNK)

    assert part.verify() == 0


def test_looking_at_a_large_file_can_be_left(tmp_path: Path) -> None:
    (tmp_path / "weights.part").write_bytes(DATA)
    part = ChunkFile(tmp_path / "weights", len(DATA), hashed(tmp_path), CHUNK)

    def leave() -> None:
        raise Leaving("asked to leave")

    with pytest.raises(Leaving):
        part.verify(leave)


@settings(max_examples=30)
@given(st.integers(0, 3 * HASH_BLOCK), st.integers(0, 2**32))
def test_in_any_order_and_twice_a_file_is_the_file(size: int, seed: int) -> None:
    data, dice = DATA[:size], random.Random(seed)
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        part = ChunkFile(Path(name) / "weights", size, hashed(Path(name), data), CHUNK)
        order = part.map.missing * 2
        dice.shuffle(order)
        for index in order:
            part.add(index, fragment(index, data))

        assert part.map.whole
        assert part.finish().read_bytes() == data


@pytest.mark.parametrize("size", [0, 1, HASH_BLOCK, HASH_BLOCK + 1])
def test_owner_and_peer_cut_a_file_alike(tmp_path: Path, size: int) -> None:
    hashes = hashed(tmp_path, DATA[:size])
    file = hash_file(tmp_path / "origin")

    assert RECIPES_BLOCK == HASH_BLOCK
    assert (file.blocks, file.size) == (hashes, size)
    assert file.sha256 == hashlib.sha256(DATA[:size]).hexdigest()
    assert size > HASH_BLOCK or hashes.hex() == file.sha256, "a small file needs no list"


def test_a_list_of_hashes_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="64 bytes of hashes for weights, a file of 5 bytes"):
        ChunkFile(tmp_path / "weights", 5, bytes(64), CHUNK)
