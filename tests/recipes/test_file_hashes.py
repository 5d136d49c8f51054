import hashlib
import json
import os
from pathlib import Path

import pytest

from recipes.file_hashes import AT_ONCE, HASH_BLOCK, hash_file

OLD = 1_700_000_000


def written(path: Path, data: bytes, at: float = OLD) -> Path:
    path.write_bytes(data)
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize("size", [0, HASH_BLOCK + 1, 2 * AT_ONCE + 5])
def test_the_whole_and_each_block_have_the_hashes_of_their_bytes(tmp_path: Path, size: int) -> None:
    data = b"seven b" * (size // 7) + bytes(size % 7)
    found = hash_file(written(tmp_path / "weights", data))

    blocks = [data[at : at + HASH_BLOCK] for at in range(0, max(size, 1), HASH_BLOCK)]
    assert (found.size, found.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert found.blocks == b"".join(hashlib.sha256(block).digest() for block in blocks)
    assert hash_file(tmp_path / "weights", whole=False).sha256 == ""


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


def test_a_file_is_read_again_only_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop` is called by whatever reads. One byte changes, and size and mtime are those of before."""
    monkeypatch.setattr("recipes.file_hashes.FRESH", -1.0)
    path, memory = written(tmp_path / "weights", bytes(AT_ONCE)), tmp_path / "hashed"
    with pytest.raises(Stop):
        hash_file(path, memory, go_on=stop)
    blocks = hash_file(path, memory, whole=False)
    assert hash_file(path, memory, whole=False, go_on=stop) == blocks
    with pytest.raises(Stop):
        hash_file(path, memory, go_on=stop)  # its whole was not asked for yet
    whole = hash_file(path, memory)
    assert hash_file(path, memory, go_on=stop) == whole
    written(path, b"!" + bytes(AT_ONCE - 1))

    assert hash_file(path, memory).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_changed_a_moment_ago_is_short_or_has_a_damaged_record_is_read_again(tmp_path: Path) -> None:
    memory = tmp_path / "hashed"
    for name, size in (("fresh", AT_ONCE), ("short", AT_ONCE - 1)):
        (tmp_path / name).write_bytes(bytes(size))
        hash_file(tmp_path / name, memory)
        assert not memory.exists()
    memory.mkdir()
    name = hashlib.sha256(str((tmp_path / "fresh").resolve()).encode()).hexdigest()[:32]
    for text in ("", "[]", json.dumps({"state": None})):
        (memory / f"{name}.json").write_text(text)
        with pytest.raises(Stop):
            hash_file(tmp_path / "fresh", memory, go_on=stop)
