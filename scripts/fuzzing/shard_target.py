"""The door of a peer that owns shards. As in fuzz_doors.py, the shell is real, and its wire is replaced."""

from __future__ import annotations

from scripts.fuzzing.mutate import Target, parts_of
from scripts.fuzzing.transport_targets import HubEnd, name_of, some_messages
from transport.aggregators.shard_server import ShardServer
from transport.protocol import message_codec
from transport.protocol import messages as m
from transport.transfer.connection_registry import MAX_CONNECTIONS
from transport.transfer.transfers import MAX_UPLOADS

LIMIT = 4096  # bytes of a part
SAID: list[m.Message] = [
    m.Hello(1, "", "toy-run", "ann"),
    m.Hello(1, "", "toy-run", "bob"),
    m.Attach("s-ann"),
    m.Attach("s-bob"),
    m.Put("part/3", 2000, b"", 1024),
    m.Put("part/4", LIMIT, b"", 1024),
    m.Chunk("part/3", 0),
    m.Chunk("part/3", 1),
    m.Get("shard/3", 0, 1024),
    m.Leave("enough"),
]
BYTES = [message_codec.encode(x) for x in SAID]


def open_door() -> ShardServer:
    """In round 3: ann and bob have been here, and ann has a connection."""
    door = ShardServer(HubEnd(), "toy-run")  # type: ignore[arg-type]
    door.opened(3, {"ann": "ann", "bob": "bob"}, LIMIT)
    door.serve(3, b"packet of shards")
    door._visitors = {f"s-{name}": (name, name) for name in ("ann", "bob")}
    door._hear(name_of(0), [message_codec.encode(m.Attach("s-ann"))])
    return door


def check_door(case: bytes) -> bool:
    door, came = open_door(), list[tuple[int, str, bytes]]()
    door.came = lambda *what: came.append(what)
    for conn, data in parts_of(case):
        payload = b"x" * (1024 if data[-1:] == b"\0" else 976)
        door._hear(name_of(conn), [data, payload] if b"Chunk" in data else [data])
    assert sorted(door._visitors.values()) == [("ann", "ann"), ("bob", "bob")]
    assert set(door._flows.values()) <= set(door._visitors)
    assert len(door._flows) <= 2 * (MAX_CONNECTIONS + 1)
    assert len(door._inbox._parts) <= 2 * MAX_UPLOADS
    assert all(round in (3, 4) and len(part) <= LIMIT for round, _, part in came)
    return bool(came or door._inbox._parts)


TARGETS = [Target("door", "bulk", 12, lambda r: some_messages(r, BYTES, 5), check_door, 4 << 20)]
