"""Transfers through a relay by SOCKS and by WebSocket over TLS, and joins through a real proxy.

    scripts/start scripts.netlab.through_tls --megabytes 64 --times 3 --joins 20

Hub, relay and volunteer are processes of their own; what is measured is the machine, as there is no line. The
proxy is squid or tinyproxy, which lets CONNECT to the relay's port through and nothing else; where none is
installed, joins are left out. One line of JSON is printed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import socket
import ssl
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from cocktail_cli.extensions.reach.dialling import hub_routes
from cocktail_cli.extensions.reach.proxies import Proxies, Proxy
from cocktail_cli.extensions.reach.relay_server import Relay
from scripts import ROOT
from scripts.netlab.through_relay import AT_ONCE, BLOB, RUN, join, print_rounded, serve
from scripts.swarms.lab import parser
from scripts.swarms.processes import Line, Process, run_role, say, started
from scripts.swarms.tcp_link import free_port
from transport import PeerLink, RunKeys, parse_url
from transport.peer import PeerIdentity
from transport.wire import DealerWire

MODULE = "scripts.netlab.through_tls"
SHUT = 1  # a port at which nothing listens: the direct way does not work
CERTIFICATE, KEY = (ROOT / "tests" / "extensions" / "reach" / f"relay-{part}.pem" for part in ("cert", "key"))
PROXIES = {
    "squid": (
        "http_port 127.0.0.1:{port}\nacl relay port {relay}\n"
        "http_access allow CONNECT relay\nhttp_access deny all\n"
        "pid_filename none\ncache_log /dev/null\naccess_log none\ncache deny all\npinger_enable off\n"
    ),
    "tinyproxy": "Listen 127.0.0.1\nPort {port}\nMaxClients 200\nConnectPort {relay}\nLogLevel Error\n",
}
START = {"squid": ["squid", "-N", "-f"], "tinyproxy": ["tinyproxy", "-d", "-c"]}


# ---- programs ----------------------------------------------------------------------------------------------


def run_hub(asked: Line) -> None:
    serve(asked, ("127.0.0.1", 0), asked["relay"], 1)


def run_relay(_: Line) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    relay = Relay("127.0.0.1", 0, tls=context)
    say("listening", port=relay.port)
    while not relay.runs:
        time.sleep(0.02)
    say("claimed")
    signal.pause()


def run_transfers(asked: Line) -> None:
    """Fetch one object so many times by a route; print the rate of each in Mbit/s."""
    url, me = parse_url(asked["url"]), PeerIdentity("mover")
    (route,) = (route for route in hub_routes(url) if route.kind == ("tls" if asked["tls"] else "relay"))
    link = PeerLink(url, me, wire=DealerWire((route,), url.key))
    link.connect(30.0)
    for _ in range(asked["times"]):
        started = time.monotonic()
        link.fetch(BLOB, asked["size"])
        say("down", mbit=8e-6 * asked["size"] / (time.monotonic() - started))
    link.leave("done")
    say("done")


def run_joins(asked: Line) -> None:
    """Join so many times by TLS through the proxy, AT_ONCE at a time."""
    proxies = EvenHere(every=Proxy("http", "127.0.0.1", asked["proxy"]))
    url = parse_url(asked["url"])
    url = replace(url, dial=lambda to: [route for route in hub_routes(to, proxies) if route.kind == "tls"])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        say("joined", ways=list(pool.map(lambda number: join(url, f"p{number}"), range(asked["joins"]))))


class EvenHere(Proxies):
    """Proxies that are for the loopback too."""

    def of(self, host: str, port: int) -> tuple[Proxy | None, Proxy | None]:
        return self.every, self.every


# ---- the measurement ---------------------------------------------------------------------------------------


def measure(asked: argparse.Namespace) -> Line:
    size, keys = round(asked.megabytes * 1e6), RunKeys.generate()
    with tempfile.TemporaryDirectory() as folder, started(MODULE) as start, ExitStack() as stack:
        relay = start("relay")
        port = relay.until("listening")["port"]
        place = f"127.0.0.1:{port}"
        url = str(keys.url("127.0.0.1", SHUT, RUN, place))
        hub = start("hub", folder=f"{folder}/ledger", keys=asdict(keys), size=size, relay=place)
        hub.until("listening")
        relay.until("claimed")
        found: Line = {}
        for name, tls in (("socks", False), ("tls", True)):
            mover = start("transfers", url=url, size=size, times=asked.times, tls=tls)
            mover.until("done", timeout=600)
            found[f"{name}_mbit"] = median(line["mbit"] for line in mover.heard("down"))
        found["tls_of_socks"] = found["tls_mbit"] / found["socks_mbit"]
        name = next((name for name in PROXIES if shutil.which(name)), "")
        if not name:
            return found | {"joins": "left out: neither squid nor tinyproxy is installed"}
        proxy = start_proxy(name, port, Path(folder), stack)
        joins = start("joins", url=url, joins=asked.joins, proxy=proxy)
        ways = joins.until("joined", timeout=300)["ways"]
        good = [way for way in ways if way.startswith(f"the relay {place} by TLS through the proxy")]
        return found | {"proxy": name, "joins": len(good), "failed": sorted({*ways} - {*good})}


def start_proxy(name: str, relay: int, folder: Path, stack: ExitStack) -> int:
    """Start a proxy that lets CONNECT to the relay's port through, until the stack ends; return its own."""
    port = free_port()
    folder.chmod(0o755)  # squid gives up root's rights
    (folder / name).write_text(PROXIES[name].format(port=port, relay=relay), encoding="utf-8")
    stack.callback(Process([*START[name], str(folder / name)]).kill)
    end = time.monotonic() + 20.0
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return port
        if time.monotonic() > end:
            raise SystemExit(f"{name} does not listen")
        time.sleep(0.05)


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--megabytes", type=float, default=64.0)
    for name, value in {"times": 3, "joins": 20}.items():
        asked.add_argument(f"--{name}", type=int, default=value)
    print_rounded(measure(asked.parse_args()))


if __name__ == "__main__":
    run_role({"hub": run_hub, "relay": run_relay, "joins": run_joins, "transfers": run_transfers}, main)
