"""Joins and transfers of a run whose host and volunteers are behind NATs of their own, through a relay.

    scripts/start scripts.netlab.through_relay                     100 joins, 20 Mbit/s, 40 ms
    scripts/start scripts.netlab.through_relay --joins 5 --megabytes 4

In a network lab (exit 77 and the reason where it cannot be made): the hub and the volunteers' machine can
only dial out, the relay is a machine that both can dial. A join is a link with a key of its own that is
welcomed, fetches a lease, and has its packet in a round. One object is then fetched, and 4 MiB are sent,
through the relay, some times; the relay is killed (SIGKILL) in one more transfer and started again at once;
last the hub's NAT is opened, and the same is fetched and sent directly. One line of JSON is printed.
"""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from cocktail_cli.assembly import Server
from cocktail_cli.extensions.reach.dialling import hub_routes
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import Relay
from scripts.netlab import lab as netlab
from scripts.swarms import lab
from scripts.swarms.idle_delegate import IdleDelegate
from scripts.swarms.processes import Line, Process, run_role, say, started
from transport import Hub, Ledger, PeerLink, RunKeys, RunSettings, RunURL, parse_url
from transport.peer import PeerIdentity
from transport.protocol import RunOver, SessionRenewed, TransportError, messages

MODULE = "scripts.netlab.through_relay"
HUB, RELAY = "10.77.0.1", "10.77.0.12"  # the members hub and p2; volunteers are p1
RUN, BLOB = "relayed", "base/blob"
AT_ONCE = 10  # joins
LONGEST = 4 << 20  # bytes that a hub takes as a trial of a line, four times of a session
KILL_AT = 0.3  # of a transfer's bytes


# ---- programs ----------------------------------------------------------------------------------------------


class Serving(IdleDelegate):
    """Serves one object."""

    def __init__(self, size: int) -> None:
        self.size = size

    def object(self, name: str) -> bytes:
        return bytes(self.size)


def run_hub(asked: Line) -> None:
    serve(asked, ("0.0.0.0", 29400), f"{RELAY}:29399", AT_ONCE)


def serve(asked: Line, bind: tuple[str, int], relay: str, batch: int) -> None:
    """Serve one object through a relay, until SIGTERM; `batch`: samples of a round."""
    keys, size = RunKeys(**asked["keys"]), asked["size"]
    settings = RunSettings(RUN, "{}", "00", 1 << 40, batch, max_update=size + (1 << 20), linger_s=1.0)
    with Ledger(Path(asked["folder"]), run=RUN, samples=settings.samples) as ledger:
        hub = Hub(bind, keys, ledger, settings, Serving(size))
        here = ("127.0.0.1", hub.port)
        tunnel = HubTunnel(relay, Server(keys.pair, *here, lambda text: say("told", text=text)))
        signal.signal(signal.SIGTERM, lambda *_: hub.stop(now=True))
        hub.start()
        say("listening")
        for _ in hub.events():
            continue
        tunnel.close()


def run_relay(_: Line) -> None:
    relay = Relay("0.0.0.0", 29399)
    say("listening")
    while True:
        if relay.runs:
            say("claimed")
            signal.pause()
        time.sleep(0.02)


def run_joins(asked: Line) -> None:
    """Join so many times, AT_ONCE at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        names = [f"p{number}" for number in range(asked["joins"])]
        url = replace(parse_url(asked["url"]), dial=hub_routes)
        say("joined", ways=list(pool.map(lambda name: join(url, name), names)))


def join(url: RunURL, name: str) -> str:
    """Join and take part in one round; return the way, or what failed."""
    link = PeerLink(url, PeerIdentity(name))
    try:
        welcome = link.connect(30.0)
        link.ready(welcome.round, IdleDelegate().fingerprint(0))
        while isinstance(opened := link.next_round(), messages.Round):
            delivers = [opened.round] if opened.samples else []
            if opened.samples:
                link.fetch(f"lease/{opened.round}", 1 << 20)
            if not opened.exchange:
                continue
            report = messages.Report(opened.round, IdleDelegate().fingerprint(0), delivers)
            if link.name in link.exchange(opened.round, bytes(1000), report).accepted:
                way = link.way
                link.leave("done")
                return way
        return "the run was over"
    except (TransportError, RunOver, KeyError) as error:
        link.close()
        return f"{type(error).__name__}: {error}"


def run_transfers(asked: Line) -> None:
    """Fetch and send one object, each `times` times; print the seconds of each."""
    url, me, size = replace(parse_url(asked["url"]), dial=hub_routes), PeerIdentity("mover"), asked["size"]
    link = PeerLink(url, me, notify=lambda text: say("told", text=text))
    link.connect(30.0)
    for number in range(asked["times"]):
        started = time.monotonic()
        fetch(link, size)
        say("down", seconds=time.monotonic() - started, way=link.way)
        if asked["up"]:
            started = time.monotonic()
            assert link.put(f"trial/{number}", bytes(LONGEST), lambda _: None)
            say("up", seconds=time.monotonic() - started, way=link.way)
    link.leave("done")
    say("done")


def fetch(link: PeerLink, size: int) -> None:
    """Fetch the object, also over a lost connection; say when the first KILL_AT of it is here."""
    begun, told = link.bytes_down, threading.Event()

    def tick() -> None:
        if link.bytes_down - begun > KILL_AT * size and not told.is_set():
            told.set()
            say("halfway")

    download = link.begin(BLOB, size)
    while not download.done:
        try:
            link.finish(download, tick)
        except SessionRenewed:  # nothing was to be delivered in the old one; the download goes on
            say("renewed")


# ---- the measurement ---------------------------------------------------------------------------------------


def measure(asked: Line) -> Line:
    """Inside the lab."""
    size, keys = round(asked["megabytes"] * 1e6), RunKeys.generate()
    url = str(keys.url(HUB, 29400, RUN, f"{RELAY}:29399"))

    def moved(start: Callable[..., Process], direction: str) -> dict[str, float]:
        mover = start("transfers", "p1", url=url, size=size, times=asked["times"], up=True)
        mover.until("done", timeout=600)
        assert all((RELAY in line["way"]) == (direction == "relay") for line in mover.said if "way" in line)
        sizes = {"down": size, "up": LONGEST}
        rates = {way: [s * 8e-6 / line["seconds"] for line in mover.heard(way)] for way, s in sizes.items()}
        return {f"{direction}_{way}": sorted(each)[len(each) // 2] for way, each in rates.items()}

    with tempfile.TemporaryDirectory() as folder, started(MODULE) as start:
        relay = start("relay", "p2")
        relay.until("listening")
        start("hub", "hub", folder=folder, keys=asdict(keys), size=size).until("listening")
        relay.until("claimed")
        begun = time.monotonic()
        ways = start("joins", "p1", url=url, joins=asked["joins"]).until("joined", timeout=600)["ways"]
        found: Line = {"joins": sum(RELAY in way for way in ways), "of": asked["joins"]}
        found |= {"failed": sorted({way for way in ways if RELAY not in way})}
        found |= {"joins_s": time.monotonic() - begun, **moved(start, "relay")}
        mover = start("transfers", "p1", url=url, size=size, times=1, up=False)
        mover.until("halfway")
        relay.kill()
        killed = time.monotonic()
        start("relay", "p2").until("claimed")
        found["claimed_again_s"] = time.monotonic() - killed
        mover.until("done", timeout=120)
        found["killed_down_s"] = mover.heard("down")[0]["seconds"]
        found["down_s"] = size * 8e-6 / found["relay_down"]
        netlab.nat("hub", False)
        return found | moved(start, "direct")


def main() -> None:
    parser = lab.parser(__doc__)
    for name, value in {"joins": 100, "times": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, default in {"megabytes": 32.0, "rate": 20.0, "rtt": 40.0}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    asked = vars(parser.parse_args())
    rate = asked["rate"]
    lines = lab.options(2, up=rate, down=rate, rtt=asked["rtt"], **{"hub-up": rate, "hub-down": rate})
    lines += ["--peer", f"p2:up={10 * rate},down={10 * rate},rtt=2", "--nat", "hub", "--nat", "p1"]
    (found,) = lab.inside(["-m", MODULE, "measure", json.dumps(asked)], lines)
    for way in ("down", "up"):
        found[f"of_direct_{way}"] = found[f"relay_{way}"] / found[f"direct_{way}"]
    print_rounded(found)


def print_rounded(found: Line) -> None:
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}))


if __name__ == "__main__":
    roles = {"hub": run_hub, "relay": run_relay, "joins": run_joins, "transfers": run_transfers}
    run_role(roles | {"measure": lambda asked: print(json.dumps(measure(asked)))}, main)
