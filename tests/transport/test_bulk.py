from __future__ import annotations

import hashlib
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import bulk
from transport.bulk import Arrived, BulkPeer, Inbox
from transport.chunks import ChunkMap, PartFile, Parts
from transport.errors import ProtocolError
from transport.messages import Chunk, Data, Get, Have, Message, NoObject, Put, PutDone

CHUNK = 1024


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK", CHUNK)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def some(size: int) -> bytes:
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


class Link:
    """A peer and a hub with lossy flows between them: what is under way on a flow that is cut is lost."""

    def __init__(self, objects: dict[str, bytes], flows: int = 3, credit: int = 4) -> None:
        self.peer, self.inbox = BulkPeer(), Inbox(lambda session, name, size: self.refused.get(name))
        self.refused: dict[str, str] = {}
        self.objects, self.credit = objects, credit
        self.wires: dict[int, tuple[deque[tuple[Message, bytes]], deque[tuple[Message, bytes]]]] = {}
        self.arrived: dict[str, bytes] = {}
        self.chunks = 0
        for flow in range(1, flows + 1):
            self.connect(flow)

    def connect(self, flow: int) -> None:
        self.wires[flow] = (deque(), deque())
        self.peer.up(flow, self.credit)

    def cut(self, flow: int) -> None:
        if self.wires.pop(flow, None) is not None:
            self.peer.down(flow)

    def say(self) -> None:
        for out in self.peer.outgoing():
            self.wires[out.flow][0].append((out.message, bytes(out.payload or b"")))
        under = [u for flow in self.peer._under.values() for u in flow]
        assert sum(u.up for u in under) <= self.credit
        assert sum(not u.up for u in under) <= self.credit

    def up(self, flow: int) -> None:
        """The hub hears the next message of this flow."""
        if flow not in self.wires or not self.wires[flow][0]:
            return
        message, payload = self.wires[flow][0].popleft()
        if isinstance(message, Get):
            self.wires[flow][1].append(self.serve(message))
            return
        assert isinstance(message, Put | Chunk)
        self.chunks += isinstance(message, Chunk)
        for answer in self.inbox.receive("session", message, payload):
            if isinstance(answer, Arrived):
                assert answer.name not in self.arrived, "an upload arrives once"
                self.arrived[answer.name] = answer.parts.data()
                self.refused[answer.name] = "it is here already"
            else:
                self.wires[flow][1].append((answer, b""))

    def serve(self, get: Get) -> tuple[Message, bytes]:
        data = self.objects.get(get.name)
        if data is None:
            return NoObject(get.name, "there is none"), b""
        piece = data[get.index * get.chunk : (get.index + 1) * get.chunk]
        return Data(get.name, get.index, len(data), sha(data)), piece

    def down(self, flow: int) -> None:
        if flow in self.wires and self.wires[flow][1]:
            self.peer.receive(*self.wires[flow][1].popleft())

    def settle(self) -> None:
        for flow in (1, 2, 3):
            if flow not in self.wires:
                self.connect(flow)
        for _ in range(500):
            self.say()
            for flow in self.wires:
                self.up(flow)
                self.down(flow)


happenings = st.lists(
    st.tuples(st.sampled_from(["say", "up", "down", "cut", "connect"]), st.integers(1, 3)), max_size=80
)


@given(st.integers(1, 20 * CHUNK), st.integers(0, 20 * CHUNK), happenings)
def test_whatever_the_flows_do_objects_arrive_whole_and_once(
    up: int, down: int, history: list[tuple[str, int]]
) -> None:
    bulk.CHUNK = CHUNK  # hypothesis does not run the fixture for each example
    link = Link({"base/a": some(down)})
    upload = link.peer.upload("update/1", some(up), sha(some(up)))
    download = link.peer.fetch("base/a", lambda size, digest: Parts(size, digest, CHUNK))
    for what, flow in history:
        if what == "say":
            link.say()
        elif what == "up":
            link.up(flow)
        elif what == "down":
            link.down(flow)
        elif what == "cut":
            link.cut(flow)
        elif flow not in link.wires:
            link.connect(flow)
    link.settle()

    assert link.arrived == {"update/1": some(up)}
    assert upload.done is not None
    assert download.sink is not None
    assert download.sink.finish() == some(down)
    assert not link.peer.pending


def test_chunks_follow_the_first_put_at_once_and_wait_for_an_answer_after_a_cut() -> None:
    link = Link({}, flows=1, credit=10)
    link.peer.upload("update/1", some(5 * CHUNK), sha(some(5 * CHUNK)))
    link.say()
    first = [type(m) for m, _ in link.wires[1][0]]
    for _ in range(4):
        link.up(1)
    link.cut(1)
    link.connect(1)
    link.say()
    second = [type(m) for m, _ in link.wires[1][0]]
    link.settle()

    assert first == [Put] + [Chunk] * 5
    assert second == [Put]
    assert link.arrived["update/1"] == some(5 * CHUNK)
    assert link.chunks == 5, "what had come through is not sent again"


def test_an_object_of_known_size_is_asked_for_at_once() -> None:
    link = Link({"packet/1": some(3 * CHUNK)}, flows=1)
    link.peer.fetch("packet/1", lambda size, digest: Parts(size, digest, CHUNK), 3 * CHUNK)
    link.say()

    assert [m.index for m, _ in link.wires[1][0] if isinstance(m, Get)] == [0, 1, 2]


def test_a_refused_upload_ends_with_its_reason() -> None:
    link = Link({})
    link.refused["update/1"] = "round 1 is closed"
    upload = link.peer.upload("update/1", some(5000), sha(some(5000)))
    link.settle()

    assert upload.done == PutDone("update/1", False, "round 1 is closed")
    assert not link.arrived


def test_an_object_that_is_not_there_is_refused_with_the_reason() -> None:
    link = Link({})
    download = link.peer.fetch("nothing", lambda size, digest: Parts(size, digest, CHUNK))
    link.settle()

    assert download.refused == "there is none"


def test_a_hub_that_lost_an_upload_is_given_it_again() -> None:
    link = Link({})
    link.peer.upload("update/1", some(5000), sha(some(5000)))
    link.settle()
    link.arrived.clear()
    link.refused.clear()
    link.peer.offer_again()
    link.settle()

    assert link.arrived["update/1"] == some(5000)


@pytest.mark.parametrize(
    ("put", "chunk", "payload", "told"),
    [
        (Put("u", 100, b"", 1024), Chunk("u", 0), b"x" * 99, "99 bytes, expected 100"),
        (Put("u", 100, b"", 1024), Chunk("u", 1), b"x", "chunk 1 of an object with 1"),
        (Put("u", 100, b"\0" * 32, 1024), Chunk("u", 0), b"x" * 100, "checksum of the whole is wrong"),
        (Put("u", 100, b"", 1024), Chunk("v", 0), b"x", "no upload of this name"),
    ],
)
def test_chunks_that_do_not_fit_end_the_upload(put: Put, chunk: Chunk, payload: bytes, told: str) -> None:
    inbox = Inbox(lambda session, name, size: None)
    inbox.receive("s", put, b"")
    (answer,) = inbox.receive("s", chunk, payload)

    assert isinstance(answer, PutDone)
    assert not answer.ok
    assert told in answer.reason


def test_uploads_of_closed_rounds_and_ended_sessions_are_forgotten() -> None:
    inbox = Inbox(lambda session, name, size: None)
    for session in ("s", "t"):
        for name in ("update/1", "update/2"):
            inbox.receive(session, Put(name, 2000, b"", 1024), b"")
            inbox.receive(session, Chunk(name, 0), b"x" * 1024)
    inbox.drop("t")
    inbox.keep({"update/2"})

    assert inbox.receive("s", Put("update/2", 2000, b"", 1024), b"") == [Have("update/2", b"\1")]
    assert inbox.receive("s", Put("update/1", 2000, b"", 1024), b"") == [Have("update/1", b"\0")]
    assert inbox.receive("t", Put("update/2", 2000, b"", 1024), b"") == [Have("update/2", b"\0")]


@given(st.integers(0, 5000), st.sets(st.integers(0, 4)))
def test_a_map_knows_what_is_missing(size: int, indices: set[int]) -> None:
    chunks = ChunkMap(size, CHUNK)
    good = {i for i in indices if i < chunks.count}
    for i in good:
        assert chunks.add(i, b"x" * chunks.length(i))
        assert not chunks.add(i, b"x" * chunks.length(i))

    assert set(chunks.missing) == set(range(chunks.count)) - good
    assert ChunkMap(size, CHUNK, int.from_bytes(chunks.bitmap(), "little")).missing == chunks.missing
    assert chunks.whole == (not chunks.missing)


def test_a_file_goes_on_where_an_earlier_process_stopped(tmp_path: Path) -> None:
    data, target = some(10 * CHUNK + 5), tmp_path / "weights"
    first = PartFile(target, len(data), sha(data), CHUNK)
    for i in (0, 1, 7):
        first.add(i, data[i * CHUNK : (i + 1) * CHUNK])
    first.save()
    second = PartFile(target, len(data), sha(data), CHUNK)
    missing = second.map.missing
    for i in missing:
        second.add(i, data[i * CHUNK : (i + 1) * CHUNK])

    assert missing == [2, 3, 4, 5, 6, 8, 9, 10]
    assert second.finish().read_bytes() == data


def test_a_file_of_another_object_is_begun_anew(tmp_path: Path) -> None:
    first = PartFile(tmp_path / "weights", 3000, sha(b"old"), CHUNK)
    first.add(0, b"x" * CHUNK)
    first.save()

    assert PartFile(tmp_path / "weights", 3000, sha(b"new"), CHUNK).map.missing == [0, 1, 2]


def test_a_file_with_a_wrong_checksum_is_begun_anew(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "weights", 5, sha(b"right"), CHUNK)
    part.add(0, b"wrong")
    with pytest.raises(ProtocolError, match="the checksum of weights is wrong"):
        part.finish()

    assert list(tmp_path.iterdir()) == []
