"""The words to a relay: SOCKS 5 (RFC 1928), which libzmq speaks as well.

The name that a client asks for says what it is. No name is resolved, so a relay is no open proxy:

    <run>.run        a peer wants the hub of this run
    <run>.probe      is that hub here? Answered and closed
    control.probe    the relay's own CURVE key, as the address in its answer
    control.relay    a hub's control connection: CURVE, by which it proves the run's key
    <ticket>.guest   a hub fetches the peer that was announced with this ticket
"""

from __future__ import annotations

from .streams import Stream, exactly

VERSION, CONNECT, DOMAIN, NO_LOGIN = 5, 1, 3, 0
GREETING = bytes((VERSION, 1, NO_LOGIN))
ACCEPTED, FORBIDDEN, UNKNOWN = 0, 2, 4  # RFC 1928: succeeded, not allowed by ruleset, host unreachable
CONTROL, RELAY, PROBE, GUEST = "control", "relay", "probe", "guest"  # and dialling.RUN
PORT = (1).to_bytes(2, "big")  # SOCKS wants one; a relay ignores it


def request(name: str) -> bytes:
    """Return greeting and request in one; a relay answers them one after the other."""
    return GREETING + bytes((VERSION, CONNECT, 0, DOMAIN, len(name))) + name.encode() + PORT


async def read_request(stream: Stream) -> str:
    """Read a client's greeting and request, answer the greeting, and return the name. Raises OSError, and
    ValueError where it is not SOCKS 5 with a name."""
    version, methods = await exactly(stream, 2)
    if version != VERSION or not methods:  # else what speaks another protocol would be waited for
        raise ValueError("not SOCKS 5")
    if NO_LOGIN not in await exactly(stream, methods):
        raise ValueError("a login is wanted")
    await stream.send(bytes((VERSION, NO_LOGIN)))
    version, command, _, kind, size = await exactly(stream, 5)
    if (version, command, kind) != (VERSION, CONNECT, DOMAIN) or not size:
        raise ValueError("not a request for a name")
    return (await exactly(stream, size + len(PORT)))[:size].decode("ascii")


def reply(code: int, text: str = RELAY) -> bytes:
    """Return the relay's answer; `text` stands where SOCKS has the bound address."""
    return bytes((VERSION, code, 0, DOMAIN, len(text))) + text.encode() + PORT


async def read_reply(stream: Stream) -> tuple[int, str]:
    """Read the answers to `request`: code and text. Raises OSError, and ValueError where it is no relay's."""
    version, method = await exactly(stream, 2)
    if (version, method) != (VERSION, NO_LOGIN):
        raise ValueError("not SOCKS 5")
    version, code, _, kind, size = await exactly(stream, 5)
    if version != VERSION or kind != DOMAIN:
        raise ValueError("not a relay's answer")
    return code, (await exactly(stream, size + len(PORT)))[:size].decode("ascii")
