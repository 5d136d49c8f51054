"""A hub that lies about the size of each object in turn: nothing of it is kept, and the peer says whose fault
it is. A new name without a lie fails here.
"""

import hashlib
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from lying_hub import LyingHub, endless
from memory_sockets import MemoryHubWire
from msgspec.structs import replace
from toy_swarm import BOUNDS, ToyBounds, toy_spool

from transport import CatchUp, CatchUpDownloads, PeerLink, WantedFile
from transport.peer import BOUNDS as NAMES
from transport.protocol import NoRoom, NotServed, ProtocolError, TooLong, messages
from transport.transfer import HASH_BLOCK

LIE = 1 << 36  # bytes: 64 GB
KEPT = 3 << 20  # bytes of memory: some chunks on their way
PACKET = 1 << 10  # bytes of a packet at most
ROUND = messages.Round(0, 0, 9, ["ann"], 4, True)


class ShortPackets(ToyBounds):
    def packet(self, round: int) -> int:
        return PACKET


def files(link: PeerLink, folder: Path, wanted: WantedFile) -> None:
    with closing(CatchUpDownloads(link, CatchUp(link.welcome, 0), toy_spool(folder))) as downloads:
        downloads.files([wanted])


def hashes(link: PeerLink, folder: Path) -> None:
    files(link, folder, WantedFile("base/model", folder / "model", 3 * HASH_BLOCK, hashes="00" * 32))


def short_file(kind: str) -> Callable[[PeerLink, Path], None]:
    """A file of one block, whose size and hash the run has announced."""
    digest = hashlib.sha256(b"abc").hexdigest()
    return lambda link, folder: files(link, folder, WantedFile(f"{kind}/f", folder / "f", 3, digest))


def packets(link: PeerLink, folder: Path) -> None:
    machine = CatchUp(replace(link.welcome, round=1, log_bytes=100), 0)
    machine.weights_here()
    machine.longest = ShortPackets().packet
    with closing(CatchUpDownloads(link, machine, toy_spool(folder))) as downloads:
        list(downloads.packets())


def spooled(link: PeerLink, folder: Path) -> None:
    link.finish_spooled(link.begin_spooled("eval", 1 << 20, toy_spool(folder)))


OF_AN_EXTENSION = "note/"


def of_an_extension(link: PeerLink, _: Path) -> object:
    link.bounds_of_extensions[OF_AN_EXTENSION] = "so many samples"
    return link.fetch("note/0", 24)


# beginning of a name -> the peer's own call that fetches it, and what it then says
LIES: dict[str, tuple[Callable[[PeerLink, Path], object], str]] = {
    "lease/": (lambda link, _: link.fetch("lease/0", BOUNDS.lease(ROUND)), "90 at most: so many samples"),
    OF_AN_EXTENSION: (of_an_extension, "24 at most: so many samples"),
    "packet/": (lambda link, _: link.fetch("packet/0", PACKET), "1,024 at most: the recipe's compression"),
    "packets/": (packets, "1,080 at most: the recipe's compression"),
    "eval": (spooled, "1,048,576 at most: so many samples as a run may evaluate"),
    "base/": (short_file("base"), "3 at most: the size that the run has announced"),
    "snapshot/": (short_file("snapshot"), "3 at most: the size that the run has announced"),
    "hashes/": (hashes, "96 at most: 32 bytes for each MiB"),
}


@pytest.fixture
def hub() -> Iterator[LyingHub]:
    with LyingHub(MemoryHubWire()) as hub:
        yield hub


def test_of_each_object_that_can_be_fetched_there_is_a_lie_here() -> None:
    assert LIES.keys() == {*NAMES, OF_AN_EXTENSION}


@pytest.mark.parametrize("name", LIES)
def test_of_an_object_that_is_announced_longer_than_it_can_be_nothing_is_kept(
    hub: LyingHub, name: str, tmp_path: Path
) -> None:
    call, said = LIES[name]

    assert said in lied_to(hub, name, call, tmp_path)


def lied_to(hub: LyingHub, name: str, call: Callable[[PeerLink, Path], object], folder: Path) -> str:
    """Call where the hub lies; return what the peer says. Nothing is kept, in memory or on the disk."""
    hub.serves[name] = endless(LIE)
    with closing(hub.link()) as link:
        link.bounds = ShortPackets()
        tracemalloc.start()
        try:
            with pytest.raises((ProtocolError, NotServed, NoRoom)) as ended:
                call(link, folder)
            kept = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert any(asked.startswith(name) for asked in hub.asked), "the peer was welcomed, and has asked for it"
    assert kept < KEPT
    assert hub.sent < KEPT
    there = [path for path in folder.rglob("*") if path.is_file() and "ledger" not in path.parts]
    assert sum(path.stat().st_size for path in there) == 0, "and nothing on the disk"
    return str(ended.value)


@pytest.mark.parametrize("size", [PACKET + 1, LIE])
def test_a_commit_that_names_a_longer_packet_than_can_be_ends_the_link(hub: LyingHub, size: int) -> None:
    with closing(hub.link()) as link:
        link.bounds = ShortPackets()
        hub.say(ROUND)
        assert link.next_round() == ROUND
        hub.say(messages.Committed(0, size, "00", ["ann"]))

        with pytest.raises(ProtocolError, match=f"packet/0 is announced with {size:,} bytes"):
            link.next_round()
    assert "packet/0" not in hub.asked


def test_a_round_that_no_run_of_this_recipe_has_ends_the_link(hub: LyingHub) -> None:
    class OneSample(ToyBounds):
        def lease(self, opened: messages.Round) -> int:
            if opened.samples > 1:
                raise ProtocolError("a round has one sample")
            return 100

    with closing(hub.link()) as link:
        link.bounds = OneSample()
        hub.say(ROUND)

        with pytest.raises(ProtocolError, match="a round has one sample"):
            link.next_round()
        with pytest.raises(ProtocolError, match="a round has one sample"):
            link.next_round()
    assert not hub.asked


def test_an_honest_object_of_the_very_bound_is_fetched_into_memory_and_onto_the_disk(
    hub: LyingHub, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 5000
    hub.serves = {"lease/": lambda _: data, "eval": lambda _: data}
    spool = toy_spool(tmp_path)
    with closing(hub.link()) as link:
        assert link.fetch("lease/0", len(data)) == data
        with pytest.raises(TooLong):
            link.fetch("lease/1", len(data) - 1)
        download = link.begin_spooled("eval", len(data), spool)
        with link.finish_spooled(download) as file:
            assert file.read() == data
            assert list(tmp_path.rglob("*")) == [tmp_path / "spool"], "it has no name"
        link.forget(download)


def test_nothing_is_fetched_that_the_table_does_not_have(hub: LyingHub) -> None:
    with closing(hub.link()) as link, pytest.raises(KeyError, match="is no object that a peer fetches"):
        link.fetch("new/0", 100)
    assert not hub.asked
