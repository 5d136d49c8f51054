"""A peer that others can reach passes on, at its port, chunks of packets as they come, and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transport.direct import Fragment, PeerServer
from transport.protocol import PACKET, messages, round_of
from transport.transfer import ChunkBuffer, ObjectSource

PASSED = 4  # rounds whose packet is passed on: peers may be behind
MEMBERS, NEWCOMERS = "members", "newcomers"  # of the round; those that fetch files


@dataclass(frozen=True)
class PassedPacket:
    """A packet that this peer fetches, and the chunks of it that it passes on."""

    packet: ChunkBuffer
    chunks: range

    def read(self, m: messages.Get) -> bytes | memoryview | None:
        """Return a fragment, None if it is not here yet. Raises KeyError if it is not passed on."""
        if m.index * m.chunk // self.packet.map.chunk not in self.chunks:
            raise KeyError(f"this peer does not pass on fragment {m.index}")
        return self.packet.read(m.index, m.chunk)

    def is_last(self, m: messages.Get) -> bool:
        """Tell whether a fragment is the last one that this peer passes on."""
        whole = self.packet.map
        return (m.index + 1) * m.chunk >= min(self.chunks.stop * whole.chunk, whole.size)


class PassedPackets:
    """Serves what this peer passes on."""

    def __init__(self, server: PeerServer) -> None:
        self.server = server
        self._round = 0  # the newest that is passed on
        self._passed: dict[int, PassedPacket] = {}  # by round
        self.lacking: set[str] = set()  # members that lack the end of what the newest packet passes on
        server.serve(PACKET, self._read, MEMBERS)

    def pass_on(self, round: int, members: Mapping[str, str], packet: ChunkBuffer, chunks: range) -> None:
        """Serve these chunks of a packet to `members` (name -> key), each as soon as it is in the buffer."""
        self.server.admit(MEMBERS, members)
        kept = {r: passed for r, passed in self._passed.items() if r > round - PASSED}
        self._passed, self.lacking = kept | {round: PassedPacket(packet, chunks)}, set(members)
        self._round = round

    def _read(self, member: str, m: messages.Get) -> Fragment | None:
        round = round_of(PACKET, m.name)
        passed = None if round is None else self._passed.get(round)
        if passed is not None and (payload := passed.read(m)) is not None:
            if round == self._round and passed.is_last(m):
                self.lacking.discard(member)
            return Fragment(payload, passed.packet.map.size, passed.packet.sha256)
        if round is None or round < self._round:
            raise KeyError("it is not served here, or not any more")
        return None


def serve_files(server: PeerServer, files: Mapping[str, Path], busy: Callable[[], bool]) -> None:
    """Serve files to newcomers and members, while this peer's line has nothing else to send (`busy`)."""

    def read(guest: str, m: messages.Get) -> Fragment | None:
        if busy():
            return None
        try:
            with open(files[m.name], "rb") as file:
                source = ObjectSource(file, 0, os.fstat(file.fileno()).st_size, b"")
                return Fragment(source.read(m.index, m.chunk), source.size)
        except (KeyError, OSError) as error:  # whose text may name folders of this machine
            raise KeyError(f"it is not here: {type(error).__name__}") from None

    for prefix in {name.partition("/")[0] for name in files}:
        server.serve(f"{prefix}/", read, NEWCOMERS, MEMBERS)
