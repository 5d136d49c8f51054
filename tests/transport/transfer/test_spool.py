"""Objects in files without a name: they take room before a byte is kept, and leave nothing behind."""

import hashlib
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from transport.protocol import NoRoom, ProtocolError
from transport.transfer import FreeDisk, Spool
from transport.transfer.chunks import SPARE

DATA = bytes(range(256)) * 10
CHUNK = 1000  # bytes


@dataclass
class Room:
    """Room for so many bytes."""

    free: int
    taken: list[str] = field(default_factory=list)

    def take(self, size: int, what: str) -> None:
        if size > self.free:
            raise NoRoom(f"{what} needs {size}")
        self.free -= size
        self.taken.append(what)

    def give_back(self, size: int) -> None:
        self.free += size


def test_chunks_in_any_order_make_the_object_whose_room_is_given_back_once(tmp_path: Path) -> None:
    room = Room(3000)
    stored = Spool(tmp_path / "spool", room).open("eval", len(DATA), hashlib.sha256(DATA).digest(), CHUNK)
    assert room.free == 3000 - len(DATA), "its room is taken before a byte of it is here"

    for index in (2, 0, 1, 0):
        assert stored.add(index, DATA[index * CHUNK : (index + 1) * CHUNK]) == ()
    assert stored.map.whole
    assert stored.finish().read() == DATA
    stored.close()
    stored.close()

    assert room.free == 3000
    assert list((tmp_path / "spool").iterdir()) == []


def test_what_there_is_no_room_for_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match="eval needs 1099511627776"):
        Spool(tmp_path / "spool", Room(3000)).open("eval", 2**40, b"", CHUNK)

    assert not (tmp_path / "spool").exists()


def test_where_no_file_can_be_made_no_room_is_lost(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"a file where the folder is to be")
    room = Room(3000)

    with pytest.raises(FileExistsError):
        Spool(tmp_path / "spool", room).open("eval", 10, b"", CHUNK)
    assert room.free == 3000


@pytest.mark.parametrize(
    ("index", "payload"), [(3, b"x"), (0, b"short"), (-1, bytes(CHUNK)), (2, bytes(CHUNK))]
)
def test_a_chunk_that_the_object_does_not_have_is_not_written(
    tmp_path: Path, index: int, payload: bytes
) -> None:
    with closing(Spool(tmp_path, Room(3000)).open("eval", len(DATA), b"", CHUNK)) as stored:
        with pytest.raises(ProtocolError):
            stored.add(index, payload)
        assert stored.map.received == 0


def test_an_object_of_another_checksum_is_not_handed_out(tmp_path: Path) -> None:
    with closing(Spool(tmp_path, Room(10)).open("eval", 3, hashlib.sha256(b"abc").digest(), CHUNK)) as stored:
        stored.add(0, b"abd")
        with pytest.raises(ProtocolError, match="checksum"):
            stored.finish()


def test_the_free_disk_keeps_its_spare(tmp_path: Path) -> None:
    room = FreeDisk(tmp_path)
    assert room.free >= 0

    with pytest.raises(NoRoom, match=r"eval has .* bytes; .* are free"):
        room.take(room.free + SPARE + 1, "eval")


FILLED = """
import sys, time
from pathlib import Path
from transport.transfer import Spool
from transport.transfer.chunks import FreeDisk
folder = Path(sys.argv[1])
stored = Spool(folder / "spool", FreeDisk(folder)).open("eval", 1 << 20, b"", 1 << 20)
stored.add(0, bytes(1 << 20))
print("filled", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"filled\n"
        process.send_signal(signal.SIGKILL)

    assert list((tmp_path / "spool").iterdir()) == []
