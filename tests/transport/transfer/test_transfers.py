import hashlib
import tracemalloc
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.protocol import ProtocolError, TooLong, messages
from transport.transfer import ChunkBuffer, ChunkMap, CompletedUpload, Inbox, PeerTransfers, transfers

CHUNK, PLENTY = 1024, 1 << 30


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK", CHUNK)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def some(size: int) -> bytes:
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


class Link:
    """A peer and a hub with lossy flows between them: what is under way on a flow that is cut is lost."""

    def __init__(self, objects: dict[str, bytes], flows: int = 3, credit: int = 4) -> None:
        self.peer, self.inbox = PeerTransfers(), Inbox(lambda session, name, size: self.refused.get(name))
        self.refused: dict[str, str] = {}
        self.objects, self.credit = objects, credit
        self.wires: dict[
            int, tuple[deque[tuple[messages.Message, bytes]], deque[tuple[messages.Message, bytes]]]
        ] = {}
        self.arrived: dict[str, bytes] = {}
        self.chunks = 0
        for flow in range(1, flows + 1):
            self.connect(flow)

    def connect(self, flow: int) -> None:
        self.wires[flow] = (deque(), deque())
        self.peer.up(flow, self.credit, 0.0, 0.0)

    def cut(self, flow: int) -> None:
        if self.wires.pop(flow, None) is not None:
            self.peer.down(flow)

    def say(self) -> None:
        for out in self.peer.outgoing():
            self.wires[out.flow][0].append((out.message, bytes(out.payload or b"")))
        assert sum(fragment.up for fragment in self.peer._under) <= self.credit
        assert sum(not fragment.up for fragment in self.peer._under) <= self.credit

    def up(self, flow: int) -> None:
        """The hub hears the next message of this flow."""
        if flow not in self.wires or not self.wires[flow][0]:
            return
        message, payload = self.wires[flow][0].popleft()
        if isinstance(message, messages.Get):
            self.wires[flow][1].append(self.serve(message))
            return
        assert isinstance(message, messages.Put | messages.Chunk)
        self.chunks += isinstance(message, messages.Chunk)
        for answer in self.inbox.receive("session", message, payload):
            if isinstance(answer, CompletedUpload):
                assert answer.name not in self.arrived, "an upload arrives once"
                self.arrived[answer.name] = answer.parts.data()
                self.refused[answer.name] = "it is here already"
            else:
                self.wires[flow][1].append((answer, b""))

    def serve(self, get: messages.Get) -> tuple[messages.Message, bytes]:
        data = self.objects.get(get.name)
        if data is None:
            return messages.NoObject(get.name, "there is none"), b""
        fragment = data[get.index * get.chunk : (get.index + 1) * get.chunk]
        return messages.Data(get.name, get.index, len(data), sha(data)), fragment

    def down(self, flow: int) -> None:
        if flow in self.wires and self.wires[flow][1]:
            self.peer.receive(*self.wires[flow][1].popleft(), 0.0)

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
    transfers.CHUNK = CHUNK  # hypothesis does not run the fixture for each example
    link = Link({"base/a": some(down)})
    upload = link.peer.upload("update/1", some(up), sha(some(up)))
    download = link.peer.fetch("base/a", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY)
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

    assert first == [messages.Put] + [messages.Chunk] * 5
    assert second == [messages.Put]
    assert link.arrived["update/1"] == some(5 * CHUNK)
    assert link.chunks == 5, "what had come through is not sent again"


def test_an_object_of_known_size_is_asked_for_at_once() -> None:
    link = Link({"packet/1": some(3 * CHUNK)}, flows=1)
    link.peer.fetch("packet/1", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY, 3 * CHUNK)
    link.say()

    assert [m.index for m, _ in link.wires[1][0] if isinstance(m, messages.Get)] == [0, 1, 2]


def downloading(size: int, fragment: int, known: bool) -> tuple[PeerTransfers, transfers.Download]:
    """One that has asked for its first fragments of this size. One chunk is four fragments of 16 KiB."""
    peer = PeerTransfers()
    peer.up(1, 32, 0.05, 0.0)
    window = peer.windows[False]
    window.answered(window.sent(1, 0, 0, 0.0), int(fragment * 20), 1.0, more=False)
    assert window.fragment == fragment
    download = peer.fetch(
        "base/a", lambda n, sha: ChunkBuffer(n, sha, transfers.CHUNK), size, size if known else 0
    )
    return peer, download


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, 1, 16384, 65535, 65536, 200_001])
def test_on_a_slow_line_a_chunk_comes_in_fragments(
    monkeypatch: pytest.MonkeyPatch, size: int, known: bool
) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 65536)
    data, now, largest = some(size), 1.0, 0
    peer, download = downloading(size, 16384, known)
    for _ in range(100):
        for out in peer.outgoing(now=now):
            assert isinstance(out.message, messages.Get)
            now += 0.05
            start = out.message.index * out.message.chunk
            fragment = data[start : start + out.message.chunk]
            largest = max(largest, len(fragment))
            peer.receive(messages.Data("base/a", out.message.index, size, sha(data)), fragment, now)

    assert download.error is None
    assert download.sink is not None
    assert download.sink.finish() == data
    assert largest == min(size, 16384)
    assert not peer.pending


def test_fragments_that_a_flow_lost_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 65536)
    data = some(100_000)
    peer, download = downloading(len(data), 16384, True)
    asked = [out.message.index for out in peer.outgoing(now=1.0) if isinstance(out.message, messages.Get)]
    peer.receive(messages.Data("base/a", 0, len(data), sha(data)), data[:16384], 1.1)
    peer.down(1)
    peer.up(2, 32, 0.05, 1.2)
    again = [out.message.index for out in peer.outgoing(now=1.2) if isinstance(out.message, messages.Get)]

    assert asked[:2] == [0, 1]
    assert sorted(again)[0] == 1, "the first is here"
    assert set(asked[1:]) <= set(again)
    assert not download.done


@pytest.mark.parametrize("known", [True, False])
def test_fragments_change_their_size_between_two_chunks_and_none_is_asked_for_twice(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 65536)
    data, now, asked = some(300_000), 1.0, list[messages.Get]()
    peer, download = downloading(len(data), 16384, known)
    window = peer.windows[False]
    queue = [out.message for out in peer.outgoing(now=now) if isinstance(out.message, messages.Get)]
    window.answered(window.sent(1, 0, 0, now), 1 << 30, now + 0.1, more=False)  # the line is fast in truth
    queue += [out.message for out in peer.outgoing(now=now) if isinstance(out.message, messages.Get)]
    meanwhile = len(queue)
    while queue:
        get = queue.pop(0)
        asked.append(get)
        start = get.index * get.chunk
        peer.receive(
            messages.Data("base/a", get.index, 300_000, sha(data)), data[start : start + get.chunk], now + 0.2
        )
        if not queue:
            queue += [
                out.message for out in peer.outgoing(now=now + 0.2) if isinstance(out.message, messages.Get)
            ]

    assert {get.chunk for get in asked[:meanwhile]} == {16384}
    assert asked[-1].chunk == (16384 if known else 65536), "where all of it was not under way before"
    assert sum(len(data[get.index * get.chunk :][: get.chunk]) for get in asked) == len(data)
    assert download.sink is not None
    assert download.sink.finish() == data


def test_a_late_answer_to_a_fetch_that_was_given_up_harms_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 65536)
    data = some(60_000)
    peer, _ = downloading(len(data), 16384, True)
    late = [out.message for out in peer.outgoing(now=1.0) if isinstance(out.message, messages.Get)]
    peer.forget("base/a")
    window = peer.windows[False]
    window.answered(window.sent(1, 0, 0, 1.0), 1 << 30, 1.1, more=False)
    download = peer.fetch(
        "base/a", lambda n, digest: ChunkBuffer(n, digest, transfers.CHUNK), PLENTY, len(data)
    )
    asked = [out.message for out in peer.outgoing(now=1.2) if isinstance(out.message, messages.Get)]
    for get in late + asked:
        start = get.index * get.chunk
        peer.receive(
            messages.Data("base/a", get.index, 60_000, sha(data)), data[start : start + get.chunk], 1.3
        )

    assert {get.chunk for get in asked} == {16384}
    assert download.error is None
    assert download.sink is not None
    assert download.sink.finish() == data


@pytest.mark.parametrize("chunks", [2, 100])
def test_a_lease_stands_behind_no_packet_and_no_model(chunks: int) -> None:
    """On a thin line a packet takes as long as a round's compute, and the next one needs its lease."""
    peer = PeerTransfers()
    peer.up(1, 1, 0.05, 0.0)
    peer.fetch("packet/0", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY, chunks * CHUNK)
    first = peer.outgoing(now=0.0)
    peer.fetch("lease/1", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY)
    peer.receive(messages.Data("packet/0", 0, chunks * CHUNK, b""), bytes(CHUNK), 0.1)
    then = peer.outgoing(now=0.1)

    assert [out.message.name for out in first] == ["packet/0"]
    assert then[0].message.name == "lease/1"


def test_a_size_that_was_announced_wrongly_is_an_error_and_no_hang() -> None:
    peer = PeerTransfers()
    peer.up(1, 4, 0.05, 0.0)
    download = peer.fetch("packet/1", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY, 100)
    peer.outgoing(now=0.0)
    peer.receive(messages.Data("packet/1", 0, 5000, b""), bytes(CHUNK), 0.1)

    assert str(download.error) == "packet/1 has 5000 bytes, expected 100"


def test_a_refused_upload_ends_with_its_reason() -> None:
    link = Link({})
    link.refused["update/1"] = "round 1 is closed"
    upload = link.peer.upload("update/1", some(5000), sha(some(5000)))
    link.settle()

    assert upload.done == messages.PutDone("update/1", False, "round 1 is closed")
    assert not link.arrived


def test_an_object_that_is_not_there_is_refused_with_the_reason() -> None:
    link = Link({})
    download = link.peer.fetch("nothing", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY)
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
        (messages.Put("u", 100, b"", 1024), messages.Chunk("u", 0), b"x" * 99, "99 bytes, expected 100"),
        (messages.Put("u", 100, b"", 1024), messages.Chunk("u", 1), b"x", "chunk 1 of an object with 1"),
        (messages.Put("u", 100, b"", 1024), messages.Chunk("v", 0), b"x", "no upload of this name"),
    ],
)
def test_chunks_that_do_not_fit_end_the_upload(
    put: messages.Put, chunk: messages.Chunk, payload: bytes, told: str
) -> None:
    inbox = Inbox(lambda session, name, size: None)
    inbox.receive("s", put, b"")
    (answer,) = inbox.receive("s", chunk, payload)

    assert isinstance(answer, messages.PutDone)
    assert not answer.ok
    assert told in answer.reason


def test_a_chunk_of_an_upload_that_another_has_replaced_is_no_part_of_it() -> None:
    inbox = Inbox(lambda session, name, size: None)
    old, new = some(2000), some(2000)[::-1]
    inbox.receive("s", messages.Put("u", 2000, sha(old), 1024), b"")
    inbox.receive("s", messages.Put("u", 2000, sha(new), 1024), b"")
    late = inbox.receive("s", messages.Chunk("u", 0, sha(old)[: messages.UPLOAD_TAG]), old[:1024])
    inbox.receive("s", messages.Chunk("u", 0, sha(new)[: messages.UPLOAD_TAG]), new[:1024])
    _, arrived = inbox.receive("s", messages.Chunk("u", 1, sha(new)[: messages.UPLOAD_TAG]), new[1024:])

    assert late == []
    assert isinstance(arrived, CompletedUpload)
    assert arrived.parts.data() == new


def test_an_object_that_is_not_what_was_promised_is_no_object() -> None:
    parts = ChunkBuffer(100, sha(some(100)), 1024)
    parts.add(0, b"x" * 100)

    with pytest.raises(ProtocolError, match="checksum of the whole is wrong"):
        parts.finish()


def test_uploads_of_closed_rounds_and_ended_sessions_are_forgotten() -> None:
    inbox = Inbox(lambda session, name, size: None)
    for session in ("s", "t"):
        for name in ("update/1", "update/2"):
            inbox.receive(session, messages.Put(name, 2000, b"", 1024), b"")
            inbox.receive(session, messages.Chunk(name, 0), b"x" * 1024)
    inbox.drop("t")
    inbox.forget(lambda name: name != "update/2")

    assert inbox.under_way("s", "update/2") == (1024, 2000)
    assert inbox.under_way("s", "update/1") is inbox.under_way("t", "update/2") is None
    assert inbox.receive("s", messages.Put("update/2", 2000, b"", 1024), b"") == [
        messages.Have("update/2", b"\1")
    ]
    assert inbox.receive("s", messages.Put("update/1", 2000, b"", 1024), b"") == [
        messages.Have("update/1", b"\0")
    ]
    assert inbox.receive("t", messages.Put("update/2", 2000, b"", 1024), b"") == [
        messages.Have("update/2", b"\0")
    ]


def test_a_session_has_two_uploads_under_way_and_the_oldest_makes_room() -> None:
    inbox = Inbox(lambda session, name, size: None)
    for name in ("handoff/1", "handoff/2", "handoff/3"):
        inbox.receive("s", messages.Put(name, 2000, b"", 1024), b"")
        inbox.receive("s", messages.Chunk(name, 0), b"x" * 1024)

    assert inbox.receive("s", messages.Chunk("handoff/1", 1), b"x" * 976) == [
        messages.PutDone("handoff/1", False, "no upload of this name is under way")
    ]
    assert inbox.receive("s", messages.Put("handoff/3", 2000, b"", 1024), b"") == [
        messages.Have("handoff/3", b"\1")
    ]


@pytest.mark.parametrize("known", [0, 2**40])
def test_an_object_that_no_memory_holds_is_refused_before_its_chunks_are_counted(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 256 * 1024)
    peer = PeerTransfers()
    peer.up(1, 4, 0.05, 0.0)
    tracemalloc.start()
    download = peer.fetch("packet/1", lambda n, sha: ChunkBuffer(n, sha, CHUNK), PLENTY, known)
    size = peer.outgoing(now=0.0)[0].answer or transfers.CHUNK
    peer.receive(messages.Data("packet/1", 0, 2**40, b""), bytes(size), 0.1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert isinstance(download.error, TooLong)
    assert "1,099,511,627,776 bytes; it has 1,073,741,824 at most" in str(download.error)
    assert download.sink is None, "nothing is kept"
    assert peak < 2 << 20


@given(st.integers(0, 5000), st.sets(st.integers(0, 4)))
def test_a_map_knows_what_is_missing(size: int, indices: set[int]) -> None:
    chunks = ChunkMap(size, CHUNK)
    good = {i for i in indices if i < chunks.count}
    for i in good:
        chunk = b"x" * min(chunks.chunk, chunks.size - i * chunks.chunk)
        assert chunks.add(i, chunk)
        assert not chunks.add(i, chunk)

    assert set(chunks.missing) == set(range(chunks.count)) - good
    assert ChunkMap(size, CHUNK, int.from_bytes(chunks.bitmap(), "little")).missing == chunks.missing
    assert chunks.whole == (not chunks.missing)


def test_an_upload_that_is_not_wanted_any_more_leaves_the_download_of_its_name_alone() -> None:
    """An owner fetches part/3/bob, bob's part, and sends part/3/bob, its own for bob."""
    peer = PeerTransfers()
    peer.up(1, 4, 0.05, 0.0)
    download = peer.fetch("part/3/bob", lambda size, digest: ChunkBuffer(size, digest, CHUNK), PLENTY)
    peer.upload("part/3/bob", b"mine", sha(b"mine"))
    peer.outgoing(now=0.0)
    peer.withdraw("part/3/bob")
    peer.receive(messages.Data("part/3/bob", 0, 4, sha(b"bobs")), b"bobs", 0.1)

    assert download.sink is not None
    assert download.sink.finish() == b"bobs"
    assert peer.uploads == {}
    assert [window.under for window in peer.windows.values()] == [0, 0]


def test_the_answer_to_an_upload_of_one_chunk_is_a_sample_of_the_rate() -> None:
    peer, data = PeerTransfers(), some(20_000)
    peer.up(1, 32, 0.05, 0.0)
    peer.upload("update/1", data, sha(data))
    peer.outgoing(now=0.0)
    peer.receive(messages.PutDone("update/1", True), b"", 1.0)

    assert peer.windows[True].rate == 20_000
    assert peer.windows[True].under == 0
