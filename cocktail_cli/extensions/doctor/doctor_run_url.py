"""The checks of `cocktail doctor RUN_URL`: reachability, versions, throughput.

It joins as a peer would under the name `doctor`, fetches part of the base model, uploads bytes that the hub
discards, and leaves before it is given work. It measures its own line and the hub's, as busy as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import ask_status, everyone, recipe_type, url_to_dial
from cocktail_cli.errors import explain
from cocktail_cli.machine import own_keys
from cocktail_cli.ui import counted, found, megabytes

if TYPE_CHECKING:
    from recipes.errors import Finding
    from recipes.planning import LinkSpeed
    from transport import PeerLink, RunURL
    from transport.protocol import Route, Unreachable

ANSWER = 10.0  # seconds to wait for the hub
NAME = "doctor"
FETCH_S, FETCH = 3.0, 32 << 20  # download trial: at most so many seconds and bytes
FIRST, SEND_S, SEND = 64 << 10, 2.0, 4 << 20  # upload trial: bytes of the first, then seconds and most bytes
SLOWEST = 30.0  # seconds for either trial
ENOUGH = 0.7  # share of the time that a device computes; below that a line is worth a word


def run(text: str) -> Iterator[Finding]:
    """Check the layers from the outside in; the first failure ends it."""
    from cocktail_cli.host import versions
    from transport.protocol import Unreachable

    try:
        url = url_to_dial(text)
        tried = try_ways(url)
        failed = [result for _, result in tried if isinstance(result, Unreachable)]
        if len(failed) == len(tried) == 1:
            raise failed[0]
        yield from (way_found(route, result) for route, result in tried)
        if len(failed) == len(tried):
            hints = "; ".join(dict.fromkeys(hint for error in failed for hint in explain(error).hints))
            yield found("fail", "run", f"none of {len(tried)} ways leads to its hub", hints)
            return
        status = ask_status(url, ANSWER)
        with visiting(url) as link:
            yield found("ok", "run", f"{url.run} at {link.way}: {said(status)}")
            same = ", ".join(f"{package} {number}" for package, number in versions().items())
            yield found("ok", "versions", f"those of the run: {same}")
            gated = any(file.gated for file in link.welcome.base)
            down = None if gated else down_rate(link)
            yield base_access(link) if down is None else fetched(link, down)
            up = up_rate(link)
            yield sent(up)
            if up and down:
                yield pace(status, link.welcome.recipe, up, down)
    except Exception as error:
        failure = explain(error)
        yield found("fail", "run", failure.message, "; ".join(failure.hints))


def try_ways(url: RunURL) -> list[tuple[Route, float | Unreachable]]:
    """Connect to the hub on each way, all at once; return the seconds each took, or why it does not work."""
    from transport.protocol import Unreachable
    from transport.wire import routes_to, try_route

    def result(route: Route) -> float | Unreachable:
        try:
            return try_route(route, url.key, timeout=ANSWER)
        except Unreachable as error:
            return error

    routes = routes_to(url)
    with ThreadPoolExecutor(len(routes)) as pool:
        return [*zip(routes, pool.map(result, routes), strict=True)]


def way_found(route: Route, result: float | Unreachable) -> Finding:
    """Report one way to the hub: directly, or through something."""
    if not isinstance(result, float):
        return found("warn", route.kind, str(result))
    text, remark = f"{route} works, connected in {1000 * result:.0f} ms", route.remark()
    return found("ok", route.kind, f"{text}; {remark}" if remark else text)


@contextmanager
def visiting(url: RunURL) -> Iterator[PeerLink]:
    """Join the run for the duration of the block."""
    from cocktail_cli.host import versions
    from transport import PeerLink
    from transport.peer import PeerIdentity

    link = PeerLink(url, PeerIdentity(NAME, NAME, versions(), keys=own_keys(), alone=False))
    try:
        link.connect(ANSWER)
        yield link
    finally:
        link.leave("the doctor has seen enough")


def said(status: dict[str, Any]) -> str:
    there = counted(status["peer_count"], "peer")
    return f"{status['state']}, step {status['step']}/{status['max_steps']}, {there}"


def down_rate(link: PeerLink) -> float:
    """Measure the download rate of the base model, in bytes per second; nothing of it is kept."""
    largest = max(link.welcome.base, key=lambda file: file.size)
    before, started, dropped = link.bytes_down, time.monotonic(), DroppedChunks(largest.size)
    chunks = range(min(dropped.map.count, 2 * FETCH // dropped.map.chunk))
    download = link.begin_chunks(f"base/{largest.name}", dropped, chunks)
    try:
        while not download.done and link.bytes_down - before < FETCH and time.monotonic() - started < FETCH_S:
            time.sleep(0.02)
    finally:
        link.forget(download)
    return (link.bytes_down - before) / max(time.monotonic() - started, 1e-3)


class DroppedChunks:
    """Takes the chunks of an object and keeps none of them (a transport.transfer.Sink)."""

    def __init__(self, size: int) -> None:
        from transport.transfer import CHUNK, ChunkMap

        self.map = ChunkMap(size, CHUNK)

    def add(self, index: int, payload: bytes) -> tuple[int, ...]:
        self.map.add(index, payload)
        return ()


def fetched(link: PeerLink, rate: float) -> Finding:
    """Report the download rate, and how much of the base model is missing here."""
    from cocktail_cli.volunteer import base_folder, bytes_to_fetch, free_bytes

    files = link.welcome.base
    lacking, free = bytes_to_fetch(files, base_folder(files)), free_bytes()
    text = f"{8 * rate / 1e6:.0f} Mbit/s down; the base model is {megabytes(sum(f.size for f in files))}"
    if lacking > free:
        return found(
            "fail", "line", f"{text}, {megabytes(free)} are free here", "COCKTAIL_HOME on a larger disk"
        )
    return found("ok", "line", f"{text}, {megabytes(lacking)} of it not here yet")


def base_access(link: PeerLink) -> Finding:
    """Report whether this machine's account may read the gated base of the run."""
    from recipes.config import recipe_from_json
    from recipes.downloads import gated_models, licence_hint

    name = recipe_from_json(link.welcome.recipe, recipe_type).model.model_name_or_path
    if [*gated_models([name])]:
        return found("fail", "licence", f"the run trains {name}, which is gated {licence_hint(name)}")
    return found("ok", "licence", f"the run trains {name}, which is gated and not refused to this account")


def up_rate(link: PeerLink) -> float | None:
    """Measure the upload rate in bytes per second; None where the hub takes no trial uploads (an
    earlier version).

    A small upload first tells how many bytes fill the line for a moment.
    """
    size, rate = FIRST, 0.0
    for number in range(2):
        started = time.monotonic()

        def in_time(_: object, since: float = started) -> None:
            if time.monotonic() - since > SLOWEST:
                raise TimeoutError

        try:
            if not link.put(f"trial/{number}", bytes(size), in_time):
                return None
        except TimeoutError:
            return rate or size / SLOWEST
        rate = size / max(time.monotonic() - started, 1e-3)
        size = min(SEND, max(FIRST, int(rate * SEND_S)))
    return rate


def sent(rate: float | None) -> Finding:
    """Report the upload rate of packets."""
    if rate is None:
        return found("ok", "line", "the hub takes no trial uploads: how fast this line sends is not known")
    if rate <= FIRST / SLOWEST:
        hint = "packets will be late: compression.topk_ratio lower, or another line"
        return found("warn", "line", f"less than {8e-3 * rate:.0f} kbit/s up", hint)
    return found("ok", "line", f"{8 * rate / 1e6:.1f} Mbit/s up")


def pace(status: dict[str, Any], recipe_text: str, up: float, down: float) -> Finding:
    """Report what this line means for the run: seconds of a round, K, and how much of the time is computing.

    Args:
        status: the hub's answer; peers that take part say how long a round's compute takes, and what of the
            hub's line each of them has where that is the bottleneck.
        up, down: bytes a second, as measured.
    """
    from recipes.algorithm import adaptive_rate_of
    from recipes.config import recipe_from_json
    from recipes.planning import LinkSpeed, cost_of_step, packet_bytes

    recipe, steps = recipe_from_json(recipe_text, recipe_type), status.get("local_steps") or 1
    took = [peer["compute_s"] / peer["rounds"] for peer in status["peers"] if peer.get("rounds")]
    packet = packet_bytes(recipe, status["parameters"])
    if not took or not median(took):
        text = f"a packet of {megabytes(packet)} takes {packet / up:.1f} s up and {packet / down:.1f} s down"
        return found("ok", "pace", f"{text}; no peer has trained yet, so its share of a round is not known")
    line = shared_line(status, LinkSpeed(up, down, "this line's up", "this line's down"))
    cost = replace(cost_of_step(recipe, packet, median(took) / steps, line), every=steps)
    rate = adaptive_rate_of(recipe.compression)
    usual = replace(rate, at=rate.usual, size=packet)
    sent = usual.within(packet * cost.fitting) if cost.fitting < 1 else usual
    seconds = steps * cost.compute / cost.computing
    many = f" and {steps} steps" if steps > 1 else ""
    text = f"rounds of {seconds:.1f} s{many}, of which {steps * cost.compute:.1f} s compute"
    text += f" ({cost.computing:.0%}), at K = {sent.compressor.topk_ratio:.2g}"
    text += f"; the bottleneck is {cost.slowest}"
    if cost.computing >= ENOUGH:
        return found("ok", "pace", text)
    return found("warn", "pace", text, "another line; or the host: compression.staleness, local_steps: auto")


def shared_line(status: dict[str, Any], own: LinkSpeed) -> LinkSpeed:
    """Return what this line carries in the run: at most what each peer has of the hub's, with this one more.

    Where peers pass packets on, what comes from the hub alone says nothing of how fast an aggregate comes.
    """
    from recipes.planning import HUBS_DOWN, HUBS_UP

    count = status["peer_count"]
    rates = zip(*(one.hubs_line(status) for one in everyone()), strict=True)
    up, down = (max(known) * count / (count + 1) for known in rates)
    if up and (any(one.others_send(status) for one in everyone()) or up < own.down):
        return replace(own, down=up, down_line=HUBS_UP)
    return replace(own, up=down, up_line=HUBS_DOWN) if 0 < down < own.up else own
