"""Objects that a hub has in memory for several peers that ask for the same."""

import hashlib
import io
from pathlib import Path

from test_run_ledger import begin, commit
from toy_swarm import ToyWork

from transport.ledger import read_packets
from transport.protocol import messages
from transport.transfer import ObjectStore, object_store

CHUNK = 1024


def test_the_newest_packet_is_given_from_memory_and_each_fragment_is_made_once(tmp_path: Path) -> None:
    packet = bytes(range(256)) * 4 * (object_store.CACHED_CHUNKS + 1) + b"rest"
    with begin(tmp_path) as ledger:
        for round, data in enumerate((b"old", packet)):
            row = commit(ledger, round, data)
            served = ObjectStore(ledger, ToyWork(), lambda session, round: None)
            served.committed(round, data, row.sha256)
        asked = [messages.Get("packet/1", i, CHUNK) for i in range(object_store.CACHED_CHUNKS + 2)]

        first = served.at_hand(asked[0])
        assert first is not None
        first[1].made = first[1]  # as a wire's frame does, which refers to the fragment
        given = [answer for m in asked if (answer := served.at_hand(m))]
        again = served.at_hand(asked[-1])

        assert b"".join(fragment for _, fragment in given) == packet
        assert given[0][0] == messages.Data("packet/1", 0, len(packet), hashlib.sha256(packet).digest())
        assert given == [served.answer("ann", m) for m in asked], "what the reader makes of the file"
        assert again is not None
        assert again[1] is given[-1][1]
        assert len(served._chunks) == object_store.CACHED_CHUNKS
        assert first[1].made is None, "the oldest fragment is in no circle"
        assert served.at_hand(messages.Get("packet/0", 0, CHUNK)) is None, "older ones are in the file"
        assert served.at_hand(messages.Get("packet/1", len(asked), CHUNK)) is None, (
            "there is no such fragment"
        )
        served.close()


def test_a_round_is_served_as_it_was_sealed_though_the_log_was_read_before(tmp_path: Path) -> None:
    """Its payload is in the log before its header: nothing of that is remembered from the round before."""
    with begin(tmp_path) as ledger:
        commit(ledger, 0, b"old")
        served = ObjectStore(ledger, ToyWork(), lambda session, round: None)
        ledger._log.begin([b"new" * 1000])
        ledger._log.flush()
        served.answer("ann", messages.Get("packets/0-1", 0, CHUNK))
        commit(ledger, 1, b"new" * 1000)

        chunks = [served.answer("ann", messages.Get("packets/1-2", at, CHUNK))[1] for at in range(3)]

        records = list(read_packets(io.BytesIO(b"".join(chunk for chunk in chunks if chunk))))
        assert records == [(1, b"new" * 1000)]
        served.close()
