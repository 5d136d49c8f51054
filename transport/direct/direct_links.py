"""A peer's links to peers that can be reached, by name: dialled when needed, again when lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from transport.peer import LinkLimits, PeerIdentity, PeerLink
from transport.protocol import CurveKeys, LinkLost, RunURL, parse_address
from transport.transfer import Download, Upload

DIRECT_FRAGMENT = 32 * 1024  # bytes at least: framing is 1.3 % of 16 KiB, and several links share one line
DIAL_S = 2.0  # to be welcomed
STILL_S = 10.0  # without progress, in either direction


class ReachablePeer(Protocol):
    """A peer with a server of its own, as the hub names it."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def address(self) -> str: ...


def link_to(link: PeerLink, keys: CurveKeys, peer: ReachablePeer) -> PeerLink:
    """Make a link to a peer, not connected yet, under the name that this one has at the hub."""
    host, port = parse_address(peer.address)
    url = RunURL(peer.key, "", host, port, link.url.run, dial=link.url.dial)
    made = PeerLink(
        url,
        PeerIdentity(link.name, keys=keys),
        LinkLimits(patience=DIAL_S, flows=1, min_fragment=DIRECT_FRAGMENT),
        rate_limits=link.rate_limits,
    )
    made.bounds_of_extensions = link.bounds_of_extensions
    return made


class DirectLinks:
    """Links by name; `dial` makes an unconnected one. Any thread may call."""

    def __init__(self, dial: Callable[[ReachablePeer], PeerLink]) -> None:
        self._dial = dial
        self._links: dict[str, tuple[ReachablePeer, PeerLink]] = {}
        self._lock = threading.Lock()
        self._dialling: dict[str, threading.Lock] = {}  # by name: two threads share one link to a peer
        self._closed = (0, 0)  # bytes up and down of closed links

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        with self._lock:
            links = [link for _, link in self._links.values()]
            up, down = self._closed
        return up + sum(link.bytes_up for link in links), down + sum(link.bytes_down for link in links)

    def to(self, peer: ReachablePeer) -> PeerLink:
        """Return the link to a peer, redialled if it was lost. Raises TransportError."""
        with self._lock:
            dialling = self._dialling.setdefault(peer.name, threading.Lock())
        with dialling:
            with self._lock:
                known, old = self._links.get(peer.name, (peer, None))
            moved = (known.key, known.address) != (peer.key, peer.address)
            if old is not None and not old.lost and not moved:
                return old
            if old is not None:
                self.drop(peer.name)
            link = self._dial(peer)
            link.connect(DIAL_S, DIAL_S)  # the server may learn of a new member later than the member of it
            with self._lock:
                self._links[peer.name] = peer, link
            return link

    def keep(self, names: Collection[str]) -> None:
        """Close the links to all other peers."""
        with self._lock:
            others = self._links.keys() - set(names)
        for name in others:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Close the link to a peer, if there is one."""
        with self._lock:
            _, link = self._links.pop(name, (None, None))
            if link is not None:
                self._closed = self._closed[0] + link.bytes_up, self._closed[1] + link.bytes_down
        if link is not None:
            link.close()

    def close(self) -> None:
        self.keep(())


class StallDetector:
    """Ends the wait for a transfer without progress for `still_s`: the peer, or its line, is dead."""

    def __init__(self, still_s: float | None = None) -> None:
        self.still_s = STILL_S if still_s is None else still_s
        self.done, self.since = -1, 0.0

    def download(self, one: Download) -> None:
        self._look(one.name, one.received)

    def upload(self, one: Upload) -> None:
        self._look(one.name, len(one.todo))  # it shrinks as answers arrive

    def _look(self, name: str, done: int) -> None:
        if done != self.done:
            self.done, self.since = done, time.monotonic()
        elif time.monotonic() - self.since > self.still_s:
            raise LinkLost(f"nothing was heard of {name} for {self.still_s:.0f} s")
