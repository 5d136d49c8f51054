"""Uploads on their way to a hub, or to a shard server: chunks in any order until each object is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transport.protocol import ProtocolError, messages

from .chunks import ChunkBuffer

MAX_UPLOADS = 2  # uploads of one session under way: an update and a handoff


@dataclass(frozen=True)
class CompletedUpload:
    """A complete upload, as its sender sent it: CURVE authenticates every chunk, and each names its upload.
    The reader must check the content: a packet has a checksum of its own."""

    session: str
    name: str
    parts: ChunkBuffer


class Inbox:
    """All uploads to a hub. `refuses(session, name, size)` returns why an upload is not wanted, or None."""

    def __init__(self, refuses: Callable[[str, str, int], str | None]) -> None:
        self._refuses = refuses
        self.at_once = MAX_UPLOADS
        self._parts: dict[tuple[str, str], ChunkBuffer] = {}

    def receive(
        self, session: str, message: messages.Put | messages.Chunk, payload: bytes | memoryview
    ) -> list[messages.Message | CompletedUpload]:
        """Return the answers to one message, and the upload if it is complete now."""
        key = (session, message.name)
        if isinstance(message, messages.Put):
            return [self._put(key, message)]
        parts = self._parts.get(key)
        if parts is None:
            return [messages.PutDone(message.name, False, "no upload of this name is under way")]
        if message.of not in (b"", parts.sha256[: messages.UPLOAD_TAG]):
            return []  # it was sent before this `Put`, on another connection: no answer is awaited
        try:
            parts.add(message.index, payload)
        except ProtocolError as error:
            del self._parts[key]
            return [messages.PutDone(message.name, False, str(error))]
        if not parts.map.whole:
            return [messages.Ack(message.name, message.index)]
        del self._parts[key]
        return [messages.PutDone(message.name, True), CompletedUpload(session, message.name, parts)]

    def _put(self, key: tuple[str, str], m: messages.Put) -> messages.Message:
        reason = self._refuses(*key, m.size)
        if reason is not None:
            self._parts.pop(key, None)
            return messages.PutDone(m.name, False, reason)
        old = self._parts.get(key)
        if old is None or (old.map.size, old.map.chunk, old.sha256) != (m.size, m.chunk, m.sha256):
            old = self._parts[key] = ChunkBuffer(m.size, m.sha256, m.chunk)
            for other in [k for k in self._parts if k[0] == key[0]][: -self.at_once]:
                del self._parts[other]
        return messages.Have(m.name, old.map.bitmap())

    def under_way(self, session: str, name: str) -> tuple[int, int] | None:
        """Return the bytes that are here of an upload, and its size; None: it is not under way."""
        parts = self._parts.get((session, name))
        return None if parts is None else (parts.map.received, parts.map.size)

    def drop(self, session: str) -> None:
        """Forget the uploads of a session that is over."""
        for key in [k for k in self._parts if k[0] == session]:
            del self._parts[key]

    def forget(self, which: Callable[[str], bool]) -> None:
        """Forget the uploads whose name `which` selects."""
        for key in [k for k in self._parts if which(k[1])]:
            del self._parts[key]
