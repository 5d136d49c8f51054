from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail_cli.extensions.reach.dialling import FarRoute, hub_routes, machine_routes
from cocktail_cli.extensions.reach.proxies import Proxies, Proxy, is_exempt, parse_proxy
from transport import RunKeys
from transport.protocol import UrlError

PROXY, OTHER = Proxy("http", "proxy", 3128), Proxy("socks5h", "other", 1080)


@pytest.mark.parametrize(
    ("text", "proxy"),
    [
        ("http://proxy:3128", PROXY),
        ("proxy:3128", PROXY),
        ("http://proxy:3128/", PROXY),
        ("socks5h://other", OTHER),
        ("http://me:p%40ss@proxy:3128", Proxy("http", "proxy", 3128, "me", "p@ss")),
        ("http://[2001:db8::1]:8", Proxy("http", "2001:db8::1", 8)),
        ("https://proxy", Proxy("https", "proxy", 443)),
        ("socks4://proxy", Proxy("socks4", "proxy", 1080)),
    ],
)
def test_a_proxys_url_is_read_as_other_tools_read_it(text: str, proxy: Proxy) -> None:
    assert parse_proxy(text) == proxy


@given(st.text(max_size=60))
def test_what_is_no_proxys_url_is_a_value_error(text: str) -> None:
    try:
        proxy = parse_proxy(text)
    except ValueError:
        return
    assert proxy.host
    assert 0 < proxy.port < 65536


def test_no_message_shows_a_proxys_password() -> None:
    proxy = parse_proxy("http://me:secret@proxy:3128")

    assert "secret" not in f"{proxy} {proxy!r} {Proxies(proxy)} {FarRoute('hub', 1, proxy=proxy)}"
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its text is what is tested
        parse_proxy("http://me:secret@proxy:99999")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "rules", "exempt"),
    [
        ("hub.example.org", "* example.org .example.org EXAMPLE.org hub.example.org:443", True),
        ("hub.example.org", "hub.example.org:80 ample.org 10.0.0.0/8", False),
        ("10.1.2.3", "10.0.0.0/8 10.1.2.3", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("2001:db8::7", "2001:db8::/32 [2001:db8::7]:443", True),
    ],
)
def test_no_proxy_names_hosts_and_all_below_them_addresses_and_networks(
    host: str, rules: str, exempt: bool
) -> None:
    assert {is_exempt(host, 443, rule) for rule in rules.split()} == {exempt}
    assert not is_exempt(host, 443, "")


def ways(proxies: Proxies, relay: str = "") -> list[str]:
    url = RunKeys.generate().url("hub.example.org", 29400, "a-run", *filter(None, [relay]))
    return [str(route) for route in hub_routes(url, proxies)]


def test_the_ways_are_direct_relay_and_tls_in_this_order() -> None:
    assert ways(Proxies()) == ["hub.example.org:29400"]
    assert ways(Proxies(), "r.example.org:443") == [
        "hub.example.org:29400",
        "the relay r.example.org:443",
        "the relay r.example.org:443 by TLS",
    ]


def test_a_proxy_for_tls_carries_the_rest_only_where_nothing_else_works() -> None:
    by = f" through the proxy {PROXY}"

    assert ways(Proxies(https=PROXY), "r.example.org:443") == [
        "hub.example.org:29400",
        f"hub.example.org:29400{by}",
        "the relay r.example.org:443",
        f"the relay r.example.org:443{by}",
        f"the relay r.example.org:443 by TLS{by}",
    ]


def test_nothing_is_dialled_past_a_proxy_for_everything_but_what_is_exempt() -> None:
    by = f" through the proxy {OTHER}"
    every = Proxies(every=OTHER, exempt=("r.example.org",))

    assert ways(every, "r.example.org:443") == [
        f"hub.example.org:29400{by}",
        "the relay r.example.org:443",
        "the relay r.example.org:443 by TLS",
    ]
    assert all(route is None for host in ("localhost", "127.0.0.9", "::1") for route in every.of(host, 1))


def test_a_machine_at_a_relay_is_reached_as_a_run_is() -> None:
    proxies, name = Proxies(https=OTHER), "a" * 32
    relayed = RunKeys.generate().url("h", 1, "r", "relay:29399")
    assert [replace(route, name="") for route in machine_routes(f"relay:29399/{name}", proxies)] == [
        replace(route, name="") for route in hub_routes(relayed, proxies)[2:] if isinstance(route, FarRoute)
    ]
    for wrong in ("relay/" + name, "relay:29399/", "relay:29399/x", "there:1", f"relay:29399/{name}/{name}"):
        with pytest.raises(UrlError):
            machine_routes(wrong)
