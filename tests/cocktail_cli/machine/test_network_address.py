"""The address in the run URL: what was asked for, else what can be known without asking anybody."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cocktail_cli.errors import Failure, explain
from cocktail_cli.machine import ListenAddress, free_address, network_of, parse_listen, reach_of
from cocktail_cli.machine.network_address import (
    BIND_HINT,
    NEXT_PORTS,
    RIGHTS_HINT,
    kind_of,
    own_address,
    parse_advertised,
)
from transport.protocol import AddressInUse, parse_address

LOWEST_FREE = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("example.org", "example.org", 29400),
        ("example.org:443", "example.org", 443),
        ("203.0.113.7:1", "203.0.113.7", 1),
        ("[2001:db8::1]:443", "2001:db8::1", 443),
        ("[2001:db8::1]", "2001:db8::1", 29400),
        ("2001:db8::1", "2001:db8::1", 29400),
    ],
)
def test_an_advertised_address_may_have_a_port(text: str, host: str, port: int) -> None:
    assert parse_advertised(text, 29400) == (host, port)


@pytest.mark.parametrize("text", ["example.org:http", "example.org:0", "example.org:65536"])
def test_an_invalid_advertised_port_is_a_usage_error(text: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_advertised(text, 29400)

    assert caught.value.exit == 2


def test_addresses_are_classified_as_loopback_private_or_public() -> None:
    assert reach_of("0.0.0.0", 29400, "example.org").known == "example.org:29400, as --advertise says"
    assert reach_of("127.0.0.1", 1, None).known.endswith("this machine only (--advertise HOST for others)")
    assert reach_of("192.168.1.5", 1, None, "relay:2").known.endswith("and from elsewhere through relay:2")
    assert kind_of("192.168.1.5").startswith("a private address")
    assert kind_of("8.8.8.8") == "a public address"
    assert kind_of("example.org") == "by name"


def test_a_hub_that_listens_everywhere_advertises_the_machines_own_address() -> None:
    assert reach_of("0.0.0.0", 29400, None).host == own_address() != "0.0.0.0"


@pytest.mark.parametrize("text", ["a b", "tcp://host", "me@host", "host\n"])
def test_an_invalid_advertised_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(Failure, match="expected HOST or HOST:PORT"):
        reach_of("0.0.0.0", 29400, text)


@pytest.mark.parametrize(
    ("listen", "advertise", "dialled"),
    [
        ("192.168.1.5:29401", None, "192.168.1.5:29401"),
        ("0.0.0.0:29401", "home.example.org", "home.example.org:29401"),
        ("[::]:29401", "home.example.org:40000", "home.example.org:40000"),
        ("[2001:db8::7]:29401", None, "[2001:db8::7]:29401"),
    ],
)
def test_a_peer_is_dialled_at_its_advertised_address(
    listen: str, advertise: str | None, dialled: str
) -> None:
    place = parse_listen(listen, advertise)

    assert place.dialled(place.port) == dialled
    assert parse_address(dialled)
    assert place.port == 29401


def test_a_peer_that_listens_everywhere_is_dialled_at_the_machines_own_address() -> None:
    assert parse_listen("0.0.0.0:29401", None).dialled(29401) == f"{own_address()}:29401"


def test_a_peer_that_takes_any_free_port_is_dialled_at_the_one_it_got() -> None:
    assert parse_listen("127.0.0.1:0", None).dialled(40123) == "127.0.0.1:40123"
    assert parse_listen("0.0.0.0:0", "home.example.org").dialled(40123) == "home.example.org:40123"


@pytest.mark.parametrize("text", ["29401", "host:", "host:65536", "host:x"])
def test_an_invalid_address_to_listen_at_is_a_usage_error(text: str) -> None:
    with pytest.raises(Failure, match="expected HOST:PORT"):
        parse_listen(text, None)


@pytest.mark.parametrize(
    ("origin", "where"),
    [
        ("8.8.8.8", "the internet"),
        ("2606:4700::", "the internet"),
        ("192.168.1.7", "this network"),
        ("fe80::", "this network"),
        ("127.0.0.1", ""),
        ("", ""),
        ("no address", ""),
    ],
)
def test_a_joiners_address_shows_from_which_network_the_hub_is_reached(origin: str, where: str) -> None:
    assert network_of(origin) == where


def test_a_joiner_of_this_very_machine_confirms_nothing() -> None:
    assert network_of(own_address()) == ""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_was_not_typed_gives_way_to_the_next_free_one(taken: int) -> None:
    found = free_address(ListenAddress("127.0.0.1", taken, typed=False))

    assert taken < found.port < taken + NEXT_PORTS


def test_a_port_that_was_typed_is_taken_or_refused_before_anything_is_prepared(taken: int) -> None:
    with pytest.raises(AddressInUse, match=f"cannot listen on 127.0.0.1:{taken}: another program uses it"):
        free_address(ListenAddress("127.0.0.1", taken))
    assert free_address(ListenAddress("127.0.0.1", 0)).port == 0


@pytest.fixture
def without_rights() -> Iterator[None]:
    """Be no administrator for the length of a test."""
    if sys.platform != "linux" or int(LOWEST_FREE.read_text()) <= 80:
        pytest.skip("every user may listen on any port here")
    before = os.geteuid()
    if not before:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def test_a_port_that_needs_rights_says_so(without_rights: None) -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on 127.0.0.1:80: Permission denied") as refused:
        free_address(ListenAddress("127.0.0.1", 80))
    assert explain(refused.value).hints == (RIGHTS_HINT,)


@pytest.mark.parametrize("bind", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_before_anything_is_prepared(bind: str) -> None:
    with pytest.raises(AddressInUse, match=f"cannot listen on {bind}:29400") as refused:
        free_address(ListenAddress(bind, typed=False))
    assert explain(refused.value).hints == (BIND_HINT,)


def test_an_ipv6_address_stands_in_brackets_before_its_port() -> None:
    assert reach_of("0.0.0.0", 29400, "::1").known == "[::1]:29400, as --advertise says"
    assert ListenAddress("::1", 29400).dialled(29401) == "[::1]:29401"


def test_a_wrong_address_to_advertise_is_refused_before_anything_is_prepared() -> None:
    with pytest.raises(Failure, match="expected HOST or HOST:PORT"):
        free_address(ListenAddress("127.0.0.1", 0, "two words"))
