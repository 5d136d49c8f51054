"""Targets of aggregators: an aggregator's server, and what aggregators and their hub say to each other."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import msgspec
from toy_aggregators import SHARDS, ShardedWork, sharded_settings
from transport_targets import HubEnd, name_of, some_messages

from cocktail_cli.extensions.aggregators import begin, bodies
from cocktail_cli.extensions.aggregators.aggregator_thread import ORDER, ShardServer
from cocktail_cli.extensions.aggregators.residual_handoffs import HandoffStore
from scripts.fuzzing.mutate import Target, message, parts_of
from transport.direct import PeerServer
from transport.hub import HubState
from transport.ledger import Ledger
from transport.protocol import ProtocolError, encode, messages, read_msgpack
from transport.transfer import MAX_CONNECTIONS, MAX_UPLOADS

LIMIT = 4096  # bytes of a part
TO_SHARDS: list[messages.Message] = [
    messages.Hello(messages.PROTOCOL, "", "toy-run", "ann"),
    messages.Hello(messages.PROTOCOL, "", "toy-run", "bob"),
    messages.Attach("s-ann"),
    messages.Attach("s-bob"),
    messages.Put("part/3", 2000, b"", 1024),
    messages.Put("part/4", LIMIT, b"", 1024),
    messages.Chunk("part/3", 0),
    messages.Chunk("part/3", 1),
    messages.Get("shard/3", 0, 1024),
    messages.Leave("enough"),
]
SHARD_BYTES = [encode(x) for x in TO_SHARDS]


def open_door(took: Callable[[int, str, bytes], None]) -> PeerServer:
    """Open it in round 3: ann and bob have been here, and ann has a connection."""
    door = PeerServer(HubEnd(), "toy-run")  # type: ignore[arg-type]
    shards = ShardServer(door, took)
    shards.opened(3, {"ann": "ann", "bob": "bob"}, LIMIT)
    shards.serve(3, b"packet of shards")
    door._sessions = {f"s-{name}": (name, name) for name in ("ann", "bob")}
    door._receive(name_of(0), [encode(messages.Attach("s-ann"))])
    return door


def check_door(case: bytes) -> bool:
    came = list[tuple[int, str, bytes]]()
    door = open_door(lambda *what: came.append(what))
    for conn, data in parts_of(case):
        payload = b"x" * (1024 if data[-1:] == b"\0" else 976)
        door._receive(name_of(conn), [data, payload] if b"Chunk" in data else [data])
    assert sorted(door._sessions.values()) == [("ann", "ann"), ("bob", "bob")]
    assert set(door._connections.sessions.values()) <= set(door._sessions)
    assert len(door._connections.sessions) <= 2 * (MAX_CONNECTIONS + 1)
    assert len(door._inbox._parts) <= 2 * MAX_UPLOADS
    assert all(round in (3, 4) and len(part) <= LIMIT for round, _, part in came)
    return bool(came or door._inbox._parts)


ORDERS: list[bodies.Order] = [
    bodies.Open(3, [0, 2], {"ann": "key"}, 1000),
    bodies.Close(3, 1, {"ann": 1.0}, {"ann": "00ff"}, [bodies.HandoffOffer(1, "bob", 0.5)]),
    bodies.Done(3, "00ff"),
]
WORDS = [
    bodies.Holds(1, {"bob": "00ff"}),
    bodies.Resigns(),
    bodies.Unusable(1, 1, "bob", "no part"),
    bodies.Parts({"ann": "00ff"}),
]

WORD = cast("type[Any]", bodies.Holds | bodies.Resigns | bodies.Unusable)

ORDER_BYTES, WORD_BYTES = ([msgspec.msgpack.encode(one) for one in all_] for all_ in (ORDERS, WORDS))


@cache
def no_handoffs() -> HandoffStore:
    with Ledger(Path(mkdtemp()), run="toy-run", samples=9) as ledger:
        return HandoffStore(ledger)


def check_orders(case: bytes) -> bool:
    try:
        order = read_msgpack(case, ORDER, "an order")
    except ProtocolError:
        return False
    assert read_msgpack(msgspec.msgpack.encode(order), ORDER, "an order") == order
    return True


def check_words(case: bytes) -> bool:
    """Whatever a peer says alone or in its Report, the hub goes on."""
    extend = partial(begin, no_handoffs(), ShardedWork(), SHARDS, 0)
    state = HubState(sharded_settings(), "", "secret", 0.0, None, [extend])
    state.receive(b"key.1", messages.Hello(messages.PROTOCOL, "", "toy-run", "ann"), 0.0)
    state.receive(b"key.1", messages.Extension(bodies.NAME, case), 0.1)
    report = messages.Report(0, 7, [], extra={bodies.NAME: case})
    state.receive(b"key.1", report, 0.2)
    assert len(state.members.sessions) == 1
    try:
        read_msgpack(case, WORD, "what a peer says")
    except ProtocolError:
        return False
    return True


TARGETS = [
    Target("door", "bulk", 12, lambda r: some_messages(r, SHARD_BYTES, 5), check_door, 4 << 20),
    Target("orders", "messages", 60, lambda r: message(r, ORDER_BYTES), check_orders),
    Target("words", "bulk", 3, lambda r: message(r, WORD_BYTES), check_words, 4 << 20),
]
