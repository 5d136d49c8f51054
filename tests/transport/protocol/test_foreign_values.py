"""What another machine has written is a value of the type that is expected, or a ProtocolError."""

import json
from typing import Any

import msgspec
import pytest
from hostile_bytes import JSON, MSGPACK
from hypothesis import given
from hypothesis import strategies as some

from transport.peer.hub_questions import status_of
from transport.protocol import (
    ProtocolError,
    decode_to_hub,
    decode_to_peer,
    messages,
    read_json,
    read_msgpack,
)
from transport.protocol.message_codec import MOST_LEVELS

TEXTS = JSON | {
    "deep, and yet parsed": b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    "infinity": b'{"a": Infinity}',
    "beyond infinity": b'{"a": 1e999}',
    "not a number": b'{"a": NaN}',
    "half a character": b'{"a": "\\ud800"}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_json_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError, match=r"^it cannot be read: [^\n]{5,90}$"):
        read_json(TEXTS[name], dict[str, Any], "it")


@pytest.mark.parametrize("name", MSGPACK)
def test_hostile_msgpack_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError, match=r"^it cannot be read: [^\n]{5,90}$"):
        read_msgpack(MSGPACK[name], dict[str, Any], "it")
    for decode in (decode_to_hub, decode_to_peer):
        with pytest.raises(ProtocolError):
            decode(MSGPACK[name])


def test_values_in_a_struct_are_bounded_too() -> None:
    deep: Any = []
    for _ in range(MOST_LEVELS):
        deep = [deep]
    rows = msgspec.defstruct("Rows", [("of", dict[str, list[list[Any]]])])

    with pytest.raises(ProtocolError, match="nested deeper than 64 levels"):
        read_msgpack(msgspec.msgpack.encode(rows({"chain": [[deep]]})), rows, "it")


@given(some.dictionaries(some.text(), some.integers() | some.text() | some.lists(some.floats(-1e9, 1e9))))
def test_what_json_writes_is_read(value: dict[str, Any]) -> None:
    assert read_json(json.dumps(value), dict[str, Any], "it") == json.loads(json.dumps(value))


# ---- the hub's status --------------------------------------------------------------------------------------


def told(**fields: Any) -> dict[str, Any]:
    return status_of(messages.Status(json.dumps({"run": "r", "state": "running"} | fields)))


def test_a_status_has_every_figure_that_is_read_whatever_the_hub_left_out() -> None:
    status = told(peers=[{"name": "ann", "gpu": "", "state": "training"}])

    assert (status["step"], status["eta_s"], status["losses"]) == (0, None, [])
    assert (status["peers"][0]["up_bytes"], status["peers"][0]["rtt_ms"]) == (0, None)
    assert told(peers=[{"name": "ann", "gpu": "", "state": "deciding"}])["peers"][0]["joined_s"] == 0


def test_fields_of_a_later_version_and_people_without_figures_stay_as_they_are() -> None:
    deciding = {"name": "bob", "gpu": "CPU", "state": "deciding", "joined_s": 3.0}
    status = told(tomorrow={"a": 1}, others=[deciding])

    assert status["tomorrow"] == {"a": 1}
    assert status["others"] == [deciding]


@pytest.mark.parametrize(
    "fields",
    [
        {"run": 1},
        {"state": None},
        {"step": "A\x1b]52;c;x\x07"},
        {"step": -1},
        {"max_steps": 2**63},
        {"eta_s": 1e300},
        {"losses": [[1]]},
        {"peers": {}},
        {"peers": [{"name": "ann"}]},
        {"peers": [{"name": "ann", "gpu": "", "state": "", "share": "all"}]},
        {"others": [{"state": "lost"}]},
        {"peers": [{"name": "ann", "gpu": "", "state": "", "joined_s": 1e29}]},
        {"since_s": -1e29},
        {"needs": {"memory": "much"}},
    ],
    ids=str,
)
def test_a_figure_of_another_type_is_a_protocol_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the hub's status cannot be read"):
        told(**fields)
