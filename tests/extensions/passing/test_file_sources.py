"""Newcomers fetch files from the hub and from peers that have them: real hub and servers, over queues."""

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from memory_sockets import MemoryPeerWire
from toy_passing import ToyPassingPeer, passing_peer, passing_settings
from toy_swarm import ToyWork
from waiting import until

from cocktail_cli.extensions.passing import file_sources
from cocktail_cli.extensions.passing.file_sources import serve_files
from cocktail_cli.extensions.passing.hub import PassingCoordinator
from cocktail_cli.extensions.passing.peer import PassingPeer
from transport import PeerLink
from transport.direct import ReachablePeer
from transport.peer import LinkLimits, PeerIdentity
from transport.protocol import RunSettings, Warned, messages
from transport.transfer import block_hashes

FILE = "base/model.safetensors"
SIZE = 8 << 20  # bytes
LATE = 0.005  # seconds that a slow hub takes for a chunk


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "model.safetensors"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


class Base(HubSwarm):
    """A hub that serves a file, slowly, and a member of its run that has the file, or another one."""

    def __init__(self, folder: Path, file: Path, settings: RunSettings) -> None:
        hub = partial(PassingCoordinator, mode="always")
        work = ToyWork(objects={FILE: file})
        super().__init__(settings, work, folder, extend=lambda keys, ledger: [hub])
        read = self.hub._objects.answer

        def answer(session: str, m: messages.Get) -> tuple[messages.Message, bytes | None]:
            if m.name == FILE:
                time.sleep(LATE)
            return read(session, m)

        self.hub._objects.answer = answer  # type: ignore[method-assign]
        self.busy = False

    def member(self, file: Path) -> ToyPassingPeer:
        """Let a reachable peer train, and serve the file once it is ready."""
        peer = passing_peer(self, "ann", reachable=True)
        assert peer.server is not None
        serve_files(peer.server, {FILE: file}, lambda: self.busy)
        peer.start()
        until(lambda: peer.rounds)
        return peer

    def newcomer(self) -> PeerLink:
        link = self.link("bob")
        link.connect(5.0)
        return link

    def half(self, link: PeerLink) -> PassingPeer:
        def dial(source: ReachablePeer) -> PeerLink:
            at = MemoryPeerWire(self.wire.servers[source.address], "key-of-bob")
            return PeerLink(self.url, PeerIdentity(link.name), LinkLimits(patience=2.0, flows=1), wire=at)

        return PassingPeer(link, dial, None)


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Iterator[Base]:
    settings = passing_settings(samples=100_000, min_peers=1)
    with Base(tmp_path / "run", whole, settings) as base:
        yield base


def fetched(run: Base, link: PeerLink, to: Path, whole: Path) -> tuple[bytes, int]:
    """Fetch the file; return it, and the bytes of it that came from peers."""
    download = link.begin_file(FILE, to, SIZE, block_hashes(whole))
    half = run.half(link)
    half.files([download])
    path = link.finish_file(download)
    half.built({}, None)  # type: ignore[arg-type]
    return path.read_bytes(), half.traffic[1]


def test_a_newcomer_has_a_part_of_a_file_from_a_peer(run: Base, tmp_path: Path, whole: Path) -> None:
    run.member(whole)
    data, passed = fetched(run, run.newcomer(), tmp_path / "here", whole)
    assert data == whole.read_bytes()
    assert passed > SIZE // 4


def test_a_liar_is_found_by_its_first_block_and_the_hub_sends_the_rest(
    run: Base, tmp_path: Path, whole: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(random.Random(1).randbytes(SIZE))
    run.member(wrong)
    data, passed = fetched(run, run.newcomer(), tmp_path / "here", whole)
    assert data == whole.read_bytes()
    assert passed < SIZE // 2, "one share at most"
    warned = [event for event in list(run.events) if isinstance(event, Warned) and event.peer == "ann"]
    assert any("wrong bytes" in event.message for event in warned)


@pytest.mark.parametrize("busy", [True, False])
def test_a_peer_that_sends_an_update_or_has_not_the_file_costs_nothing(
    run: Base, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(file_sources, "LAST_S", 0.1)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    run.busy = busy
    run.member(whole if busy else empty)
    data, passed = fetched(run, run.newcomer(), tmp_path / "here", whole)
    assert data == whole.read_bytes()
    assert passed < 20_000


def test_a_stranger_is_no_newcomer(run: Base, whole: Path) -> None:
    run.member(whole)
    at = MemoryPeerWire(run.wire.servers["ann:1"], "key-of-eve")
    link = PeerLink(run.url, PeerIdentity("bob"), LinkLimits(patience=0.2, flows=1), wire=at)
    with pytest.raises(Exception, match="not in the round"):
        link.connect(1.0)
    link.close()
