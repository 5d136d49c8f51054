"""What newcomers begin to upload has a bound in all; the origin that has most gives way."""

from hypothesis import given
from hypothesis import strategies as st

from transport.protocol import messages
from transport.transfer import CompletedUpload, Inbox
from transport.transfer.upload_inbox import FULL

CHUNK, POOL = 1024, 16 * 1024
ORIGINS = {f"{origin}{n}": origin for origin in ("crowd", "home") for n in range(8)}


def inbox() -> Inbox:
    return Inbox(lambda session, name, size: None, ORIGINS.get, POOL)


def begin(inbox: Inbox, session: str, chunks: int, of: int = 64) -> list[messages.Message | CompletedUpload]:
    name = "update/0"
    answers = inbox.receive(session, messages.Put(name, of * CHUNK, bytes(32), CHUNK), b"")
    for index in range(chunks):
        answers += inbox.receive(session, messages.Chunk(name, index), bytes(CHUNK))
    return answers


def held(inbox: Inbox) -> int:
    return sum(parts.map.received for (session, _), parts in inbox._parts.items() if session in ORIGINS)


@given(st.lists(st.tuples(st.sampled_from([*ORIGINS, "known"]), st.integers(0, 40)), max_size=20))
def test_all_uploads_of_newcomers_fit_their_pool_whatever_they_begin(puts: list[tuple[str, int]]) -> None:
    box = inbox()
    for session, chunks in puts:
        begin(box, session, chunks)
        assert held(box) <= POOL
    for session in ORIGINS:
        box.drop(session)
    assert held(box) == 0
    assert box._newcomers == {}


def test_a_crowd_gives_way_to_one_from_elsewhere_and_those_of_the_run_do_not_count() -> None:
    box = inbox()
    begin(box, "known", 60)
    for n in range(8):
        begin(box, f"crowd{n}", 7)
    answers = begin(box, "home0", 7)
    assert not [a for a in answers if isinstance(a, messages.PutDone)]
    assert box.under_way("home0", "update/0") == (7 * CHUNK, 64 * CHUNK)
    assert box.under_way("known", "update/0") == (60 * CHUNK, 64 * CHUNK)
    assert sum(box.under_way(f"crowd{n}", "update/0") is None for n in range(8)) >= 6


def test_one_that_fills_the_pool_alone_is_told_so() -> None:
    box = inbox()
    answers = begin(box, "home0", 17)
    assert answers[-1] == messages.PutDone("update/0", False, FULL)
    assert held(box) == 0


def test_a_complete_upload_counts_until_its_round_is_over() -> None:
    box = inbox()
    assert isinstance(begin(box, "home0", 15, of=15)[-1], CompletedUpload)
    assert begin(box, "home1", 2)[-1] == messages.PutDone("update/0", False, FULL)
    box.forget(lambda name: name == "update/0")
    assert not [a for a in begin(box, "home1", 15) if isinstance(a, messages.PutDone)]
