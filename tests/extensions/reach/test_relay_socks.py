import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tunnel_targets import Bytes

from cocktail_cli.extensions.reach.dialling import FarRoute, hub_routes, run_name
from cocktail_cli.extensions.reach.relay_socks import FORBIDDEN, read_reply, read_request, reply, request
from cocktail_cli.extensions.reach.streams import Stream
from transport import RunKeys

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=255)
T = TypeVar("T")


def parsed(read: Callable[[Stream], Awaitable[T]], data: bytes) -> T:
    """Return what is read from a connection that ends after these bytes."""

    async def run() -> T:
        return await read(Bytes(data))

    return asyncio.run(run())


@given(names)
def test_a_relay_reads_the_name_that_was_asked_for(name: str) -> None:
    assert parsed(read_request, request(name)) == name


@given(names)
def test_a_client_reads_the_relays_answer(text: str) -> None:
    assert parsed(read_reply, b"\5\0" + reply(FORBIDDEN, text)) == (FORBIDDEN, text)


@given(st.binary(max_size=400))
def test_any_other_bytes_are_refused_or_not_enough(data: bytes) -> None:
    for read in (read_request, read_reply):
        with suppress(ValueError, ConnectionError):
            parsed(read, data)


def test_a_name_at_a_relay_does_not_tell_the_hubs_key() -> None:
    keys = RunKeys.generate()
    url = keys.url("203.0.113.7", 29400, "amber-otter-42", "relay.example.org:29399")
    route = hub_routes(url)[1]

    assert isinstance(route, FarRoute)
    assert (route.address, route.name) == ("relay.example.org:29399", f"{run_name(keys.public)}.run")
    assert keys.public not in route.name
    assert len(hub_routes(keys.url("203.0.113.7", 29400, "amber-otter-42"))) == 1


@pytest.mark.parametrize("start", [b"GE", b"\xff\0", b"\4\1", b"\x16\3"])  # HTTP, ZMTP, SOCKS 4, TLS
def test_another_protocol_is_refused_by_its_first_bytes(start: bytes) -> None:
    with pytest.raises(ValueError, match="not SOCKS 5"):
        parsed(read_request, start)
