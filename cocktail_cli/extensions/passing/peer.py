"""A peer's part of passing: it fetches from those that the hub names, and passes on if it can be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cocktail_cli.assembly import PeerExtension
from transport import PeerLink
from transport.direct import PeerServer, ReachablePeer
from transport.protocol import ProtocolError, read_msgpack

from .bodies import NAME, FileHelpers, Newcomer, Sources
from .file_sources import NEWCOMERS, FileSources, serve_files
from .packet_sources import PacketSources

if TYPE_CHECKING:
    from recipes.training import Peer
    from transport.transfer import Download

KEPT_NEWCOMERS = 64
FINISH_S = 3.0  # for others to fetch from a peer that leaves


class PassingPeer(PeerExtension):
    """Fetches from sources that the hub names, and serves where others can reach this peer.

    Args:
        dial: makes an unconnected link to a source.
        server: where others reach this peer; None: they do not.
    """

    name, serves = NAME, True

    def __init__(
        self, link: PeerLink, dial: Callable[[ReachablePeer], PeerLink], server: PeerServer | None
    ) -> None:
        self._link, self._server = link, server
        self._files, self._packets = FileSources(link, dial), PacketSources(link, dial, server)
        self._newcomers: dict[str, str] = {}  # name -> key, the newest last

    @contextmanager
    def beside(self, processes: set[int]) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()

    def files(self, downloads: Sequence[Download]) -> None:
        """Fetch shares of files from the peers that the hub has named to this newcomer."""
        if not (body := self._link.welcome.extra.get(NAME)):
            return
        try:
            helpers = read_msgpack(body, FileHelpers, "who passes files on").helpers
        except ProtocolError:
            return  # the hub sends them itself
        self._files.fetch(helpers, downloads)

    def built(self, files: Mapping[str, Path], peer: Peer) -> None:
        """Take no more files from others; serve these, if this peer can be reached."""
        self._files.close()
        if self._server is not None:
            self._server.rate_limits = self._link.rate_limits
            serve_files(self._server, files, lambda: self._link.uploads_now)

    def received(self, body: bytes) -> None:
        kind = cast("type[Sources | Newcomer]", Sources | Newcomer)
        said = read_msgpack(body, kind, "what the hub says of passing")
        if isinstance(said, Newcomer):
            self._admit(said)
        else:
            self._packets.named(said)

    def _admit(self, newcomer: Newcomer) -> None:
        """Let a newcomer fetch files; the oldest of too many has to fetch them elsewhere."""
        self._newcomers.pop(newcomer.name, None)
        self._newcomers[newcomer.name] = newcomer.key
        while len(self._newcomers) > KEPT_NEWCOMERS:
            self._newcomers.pop(next(iter(self._newcomers)))
        if self._server is not None:
            self._server.admit(NEWCOMERS, self._newcomers)

    def fetch(self, round: int) -> bytes | None:
        return self._packets.fetch(round)

    @property
    def traffic(self) -> tuple[int, int]:
        served = (0, 0) if self._server is None else (self._server.bytes_up, self._server.bytes_down)
        up, down = map(sum, zip(served, self._files.traffic, self._packets.traffic, strict=True))
        return up, down

    def leave(self) -> None:
        """Let the others have what this peer passes on, and hang up."""
        if (passed := self._packets.passed) is not None:
            passed.server.finish(FINISH_S, lambda: passed.lacking)
        self._close()

    def _close(self) -> None:
        self._files.close()
        self._packets.close()
