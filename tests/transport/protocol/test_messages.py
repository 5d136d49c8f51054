import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.protocol import ProtocolError, message_codec
from transport.protocol import messages as m

EXAMPLES_TO_HUB: list[m.Message] = [
    m.Hello(m.PROTOCOL, "t", "run", "ann", "CPU", {"codec": "1"}),
    m.AskAdmin(m.PROTOCOL, "secret", "run", "ban", "ann", "lies"),
    m.Resume(m.PROTOCOL, "run", "ann", "s", 3, True, [2, 3], 7),
    m.Ready(4, 2**64 - 1, {"base": "00ff"}),
    m.Report(4, 0, [2, 3], 1.5, 10, 0.1, 0.2, 10, 0.7),
    m.Evaluated(4, 1, 2.5, 7),
    m.Leave("enough"),
    m.Extension("name", b"body"),
    m.Ping(1.0),
    m.Pong(1.0),
    m.AskStatus(m.PROTOCOL, "t", "run"),
    m.Deciding(m.PROTOCOL, "t", "run", "ann"),
    m.AskStop(m.PROTOCOL, "s", "run", True, True),
    m.Attach("s"),
    m.Put("update/1", 10, b"\0" * 32, 1024),
    m.Chunk("update/1", 0),
    m.Get("packet/1", 0, 1024),
]
EXAMPLES_TO_PEER: list[m.Message] = [
    m.Welcome(
        m.PROTOCOL,
        "run",
        "ann",
        "s",
        "{}",
        "00",
        [m.File("a", 1, "00", "01")],
        3,
        1.0,
        True,
        2,
        99,
        [m.SnapshotOffer(2, 400, "ff", 50)],
    ),
    m.Wait("waiting for the host's approval"),
    m.Refused("token", "no"),
    m.Round(1, 1, 5, ["ann"], 8, True, 0, 1),
    m.Round(1, 1, 5, ["ann"], 8, True, 0, 1, extra={"an extension": b"a body"}),
    m.Extension("name", b"body"),
    m.Committed(1, 100, "00", ["ann"], {"bob": "why"}),
    m.Committed(1, 100, "00", ["ann"], extra={"receipt": b"r" * 64}),
    m.Over("done", True),
    m.Status("{}"),
    m.Attached(32),
    m.Have("update/1", b"\1"),
    m.Ack("update/1", 0),
    m.PutDone("update/1", True),
    m.Data("packet/1", 0, 10, b"\0" * 32),
    m.NoObject("packet/1", "none"),
]


@pytest.mark.parametrize("message", EXAMPLES_TO_HUB, ids=lambda x: type(x).__name__)
def test_a_message_to_the_hub_survives_the_wire(message: m.Message) -> None:
    assert message_codec.decode_to_hub(message_codec.encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES_TO_PEER, ids=lambda x: type(x).__name__)
def test_a_message_to_a_peer_survives_the_wire(message: m.Message) -> None:
    assert message_codec.decode_to_peer(message_codec.encode(message)) == message


def test_every_message_has_an_example() -> None:
    said = {type(x) for x in EXAMPLES_TO_HUB} | {type(x) for x in EXAMPLES_TO_PEER}

    assert said == set(m.ToHub.__args__) | set(m.ToPeer.__args__)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (message_codec.decode_to_hub, message_codec.decode_to_peer):
        try:
            decode(data)
        except ProtocolError:
            continue


@given(st.sampled_from(EXAMPLES_TO_HUB), st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(message: m.Message, data: st.DataObject) -> None:
    wire = bytearray(message_codec.encode(message))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        message_codec.decode_to_hub(bytes(wire))
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "message",
    [
        m.Report(0, 0, [], math.nan),
        m.Report(0, 0, [], 0.0, 0, math.inf),
        m.Report(0, 2**64 - 1, [], 0.0, 0, 0.0, -math.inf),
        m.Evaluated(0, 0, math.nan, 1),
        m.Ready(0, -1),
        m.Ready(-1, 0),
        m.Report(0, 0, [-1]),
        m.Hello(m.PROTOCOL, "t" * 200, "run", "ann"),
        m.Leave("x" * 3000),
        m.Put("update/1", 0, b"", 1024),
        m.Put("update/1", 10, b"", 2**30),
        m.Get("x" * 400, 0, 1024),
    ],
    ids=str,
)
def test_numbers_and_texts_out_of_bounds_are_refused(message: m.Message) -> None:
    with pytest.raises(ProtocolError):
        message_codec.decode_to_hub(message_codec.encode(message))


@pytest.mark.parametrize("change", [{"extra": 1}, {"round": "x"}, {"round": None}])
def test_an_unknown_field_or_type_is_refused(change: dict[str, object]) -> None:
    raw = msgspec.msgpack.decode(message_codec.encode(m.Ready(1, 2))) | change

    with pytest.raises(ProtocolError):
        message_codec.decode_to_hub(msgspec.msgpack.encode(raw))


def test_a_greeting_of_another_version_is_told_apart_whatever_else_it_says() -> None:
    raw = {"type": "Hello", "protocol": 7, "something_new": [1, 2]}

    with pytest.raises(message_codec.OtherVersion, match="version 2 would do"):
        message_codec.decode_to_hub(msgspec.msgpack.encode(raw))


def test_a_peer_is_not_told_what_is_for_the_hub() -> None:
    with pytest.raises(ProtocolError):
        message_codec.decode_to_peer(message_codec.encode(m.Ready(1, 2)))


@pytest.mark.parametrize("value", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
@pytest.mark.parametrize("before", [b"", b"\x82\xa1a", b"\x82\xa4type\xa5Hello\xa1a"], ids=len)
def test_values_within_twenty_thousand_others_are_no_message(value: bytes, before: bytes) -> None:
    for decode in (message_codec.decode_to_hub, message_codec.decode_to_peer):
        with pytest.raises(ProtocolError):
            decode(before + 20_000 * value)


@pytest.mark.parametrize(
    "message",
    [
        m.Committed(1, 2**41, "00", []),
        m.Committed(-1, 1, "00", []),
        m.Data("packet/1", 0, 2**62),
        m.Attached(-1),
        m.Attached(2**40),
        m.Round(-1, 0, 0, [], 1, True),
        m.Welcome(m.PROTOCOL, "run", "ann", "s", "{}", "00", [m.File("a", -1, "")], 1, 1.0),
        m.Welcome(m.PROTOCOL, "run", "ann", "s", "{}", "00", [], 1, math.nan),
        m.Ping(math.inf),
    ],
    ids=str,
)
def test_a_peer_refuses_numbers_that_no_hub_says(message: m.Message) -> None:
    with pytest.raises(ProtocolError):
        message_codec.decode_to_peer(message_codec.encode(message))
