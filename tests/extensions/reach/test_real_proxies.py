"""Joins through proxies that others wrote: squid, tinyproxy and microsocks, where they are installed."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hub_swarm import FAST, HubSwarm
from tls_only import CERTIFICATE, Firewall, TlsFront, server_context
from toy_swarm import ToyPeer, ToyWork, toy_settings, trained
from waiting import until

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach.dialling import hub_routes
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.proxies import Proxies, Proxy
from cocktail_cli.extensions.reach.relay_server import Relay
from cocktail_cli.extensions.reach.websocket_stream import client_context
from scripts.swarms.tcp_link import free_port
from transport import PeerLink, RunURL, ask_status
from transport.peer import PeerIdentity
from transport.protocol import Unreachable

SHUT = 1  # a port of the loopback at which nothing listens

TINYPROXY = """
Port {port}
Listen 127.0.0.1
MaxClients 100
Timeout 600
LogLevel Error
ConnectPort {allowed}
BasicAuth me s3cret
"""
SQUID = """
http_port 127.0.0.1:{port}
acl allowed port {allowed}
http_access allow CONNECT allowed
http_access deny all
pid_filename {folder}/squid.pid
cache_log {folder}/cache.log
access_log none
cache_store_log none
coredump_dir {folder}
shutdown_lifetime 0 seconds
cache deny all
netdb_filename none
"""
LOGIN = {"user": "me", "password": "s3cret"}


def tinyproxy(port: int, allowed: int, folder: Path) -> list[str]:
    """One that lets CONNECT to one port through, and wants a login."""
    (folder / "conf").write_text(TINYPROXY.format(port=port, allowed=allowed), encoding="utf-8")
    return ["tinyproxy", "-d", "-c", str(folder / "conf")]


def squid(port: int, allowed: int, folder: Path) -> list[str]:
    """One that lets CONNECT to one port through, and wants no login."""
    folder.chmod(0o777)  # it gives up root's rights
    (folder / "conf").write_text(SQUID.format(port=port, allowed=allowed, folder=folder), encoding="utf-8")
    return ["squid", "-N", "-f", str(folder / "conf")]


def microsocks(port: int, allowed: int, folder: Path) -> list[str]:
    """A SOCKS 5 proxy that wants a login."""
    return ["microsocks", "-i", "127.0.0.1", "-p", str(port), "-u", "me", "-P", "s3cret"]


COMMANDS = {"tinyproxy": tinyproxy, "squid": squid, "microsocks": microsocks}
PROXIES = {
    "tinyproxy": Proxy("http", "127.0.0.1", 0, **LOGIN),
    "squid": Proxy("http", "127.0.0.1", 0),
    "microsocks": Proxy("socks5", "127.0.0.1", 0, **LOGIN),
}


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@pytest.fixture
def started() -> Iterator[Callable[[str, int, Path], Proxy]]:
    """Starts a proxy that lets only one port through."""
    processes = []

    def start(name: str, allowed: int, folder: Path) -> Proxy:
        program = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if program is None:
            pytest.skip(f"{name} is not installed")
        port, place = free_port(), folder / name
        place.mkdir()
        command = [program, *COMMANDS[name](port, allowed, place)[1:]]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        processes.append(process)
        end = time.monotonic() + 20.0
        while not listens(port):
            assert process.poll() is None, f"{name} ended"
            assert time.monotonic() < end
            time.sleep(0.02)
        return replace(PROXIES[name], port=port)

    yield start
    for process in processes:
        process.kill()  # squid would wait for its clients
        process.wait(120)


def through(url: RunURL, proxy: Proxy, *relays: str) -> RunURL:
    """The URL as it is dialled where the environment names this proxy for everything."""
    return replace(url, places=relays, dial=partial(hub_routes, proxies=AsGiven(every=proxy)))


class AsGiven(Proxies):
    """Proxies that are for the loopback too, which a proxy of this machine can reach."""

    def of(self, host: str, port: int) -> tuple[Proxy | None, Proxy | None]:
        return self.every, self.https or self.every


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_trains_through_a_proxy_directly_and_by_tls_through_a_relay(
    name: str, started: Callable[[str, int, Path], Proxy], tmp_path: Path
) -> None:
    with (
        HubSwarm(toy_settings(**FAST, min_peers=2), ToyWork(), tmp_path / "run", 0) as running,
        closing(Relay("127.0.0.1", 0, tls=server_context())) as relay,
        closing(Firewall(relay.port)) as firewall,
    ):
        direct = started(name, running.hub.port, tmp_path)
        for_relay = started(name, firewall.port, tmp_path / "run")
        place = f"127.0.0.1:{firewall.port}"
        here = "127.0.0.1", running.hub.port
        proxied = AsGiven(every=for_relay)
        with closing(HubTunnel(place, Server(running.keys.pair, *here), proxies=proxied)) as tunnel:
            until(lambda: tunnel.claims)
            urls = [through(running.url, direct), through(replace(running.url, port=SHUT), for_relay, place)]
            peers = [ToyPeer(PeerLink(url, PeerIdentity(f"p{n}"))) for n, url in enumerate(urls)]
            running.train(*peers)

    assert running.ended().finished
    assert [peer.error for peer in peers] == [None, None]
    assert trained(running.work) == list(range(40))
    assert peers[0].link.way == f"127.0.0.1:{running.hub.port} through the proxy {direct}"
    assert peers[1].link.way == f"the relay {place} by TLS through the proxy {for_relay}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [("tinyproxy", "403"), ("squid", "403")])
def test_a_port_that_a_proxy_does_not_let_through_is_told_with_its_status(
    name: str, told: str, started: Callable[[str, int, Path], Proxy], tmp_path: Path
) -> None:
    with HubSwarm(toy_settings(**FAST), ToyWork(), tmp_path / "run", 0) as running:
        proxy = started(name, SHUT, tmp_path)
        with pytest.raises(Unreachable, match=f"no way through the proxy .* {told} ") as refused:
            ask_status(through(running.url, proxy))

    assert "s3cret" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [("tinyproxy", "401|407"), ("microsocks", "login is wanted")])
def test_a_login_that_is_lacking_is_told(
    name: str, told: str, started: Callable[[str, int, Path], Proxy], tmp_path: Path
) -> None:
    with HubSwarm(toy_settings(**FAST), ToyWork(), tmp_path / "run", 0) as running:
        proxy = started(name, running.hub.port, tmp_path)
        with pytest.raises(Unreachable, match=told):
            ask_status(through(running.url, replace(proxy, user="", password="")))


@pytest.mark.slow
def test_a_proxy_over_tls_gets_a_login_only_behind_a_certificate_that_is_trusted(
    started: Callable[[str, int, Path], Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubSwarm(toy_settings(**FAST), ToyWork(), tmp_path / "run", 0) as running:
        plain = started("tinyproxy", running.hub.port, tmp_path)
        with closing(TlsFront(plain.port)) as front:
            url = through(running.url, replace(plain, scheme="https", port=front.port))
            client_context.cache_clear()
            with pytest.raises(
                Unreachable, match=r"no way through the proxy https.*certificate verify failed"
            ):
                ask_status(url)
            passed = front.passed
            monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
            client_context.cache_clear()
            status = ask_status(url)
            (peer,) = [ToyPeer(PeerLink(url, PeerIdentity("ann")))]
            peer.start().join(120)
    client_context.cache_clear()

    assert (passed, status["run"]) == (0, "toy-run")
    assert (peer.error, trained(running.work)) == (None, list(range(40)))
