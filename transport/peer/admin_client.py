"""Requests on a connection that belongs to no peer: `cocktail status`, `stop`, `peers` and `kick`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from transport.protocol import LinkLost, RefusedByHub, RunURL, Unreachable, decode_to_peer, encode, messages
from transport.wire import Connected, DealerWire, Disconnected, routes_to

from .hub_status import AdminDone, PeersPage, answer_of, status_of

ADMIN_S = 60.0  # for an answer: a decision waits until the round being committed is durable


def ask_status(url: RunURL, timeout: float = 10.0, recipe: bool = False) -> dict[str, Any]:
    """Return the object of `cocktail status --json`, with the recipe's text if `recipe`. Raises Unreachable,
    RefusedByHub, LinkLost, ProtocolError."""
    question = messages.AskStatus(messages.PROTOCOL, url.token, url.run, recipe)
    return status_of(ask(url, question, timeout))


def ask_stop(url: RunURL, secret: str, now: bool = False, pause: bool = False, timeout: float = 10.0) -> None:
    """End or pause the run; wait for the hub's answer. Raises Unreachable, RefusedByHub, LinkLost."""
    question = messages.AskStop(messages.PROTOCOL, secret, url.run, now, pause)
    try:
        answer = ask(url, question, timeout)
    except LinkLost:  # a hub without peers ends at once, and its answer may be lost with the connection
        try:
            answer = ask(url, question, timeout)
        except Unreachable:
            return
    if not isinstance(answer, messages.Over):
        raise LinkLost(f"the hub answered {type(answer).__name__} to a stop")


def ask_admin(url: RunURL, secret: str, order: messages.AdminCommand, **fields: str) -> dict[str, Any]:
    """Ask for a page of the list of peers, or decide on one (messages.AskAdmin has the `fields`); returns
    when durable. Raises Unreachable, RefusedByHub, LinkLost, ProtocolError."""
    question = messages.AskAdmin(messages.PROTOCOL, secret, url.run, order, **fields)
    kind, what = (PeersPage, "list of peers") if order == "list" else (AdminDone, "answer")
    return answer_of(ask(url, question, ADMIN_S), kind, what)


def peer_pages(url: RunURL, secret: str) -> Iterator[dict[str, Any]]:
    """Yield the list of peers page by page, those with a connection first. Raises as `ask_admin`."""
    after = None
    while after != "":
        page = ask_admin(url, secret, "list", peer=after or "")
        after = "" if page.get("more") == after else page.get("more", "")
        yield page


def ask(url: RunURL, question: messages.Message, timeout: float) -> messages.Message:
    """Send one message on a connection of its own and return the answer."""
    with closing(DealerWire(routes_to(url), url.key)) as wire:
        answer = answer_on(wire, question, timeout)
    if answer is None:
        why = f"no answer from {url.host}:{url.port} within {timeout:.0f} s"
        raise Unreachable(url.host, url.port, "tcp", why)
    if isinstance(answer, messages.Refused):
        raise RefusedByHub(answer.code, answer.reason)
    return answer


def answer_on(wire: DealerWire, question: messages.Message, timeout: float) -> messages.Message | None:
    """Connect, send one message and return the answer; None where none comes in time. Raises Unreachable,
    LinkLost, ProtocolError."""
    until = time.monotonic() + timeout
    wire.dial(0)
    while (left := until - time.monotonic()) > 0:
        for event in wire.poll(left):
            if isinstance(event, Connected):
                wire.send(0, [encode(question)])
            elif isinstance(event, Disconnected):
                raise event.error or LinkLost("the hub hung up without an answer")
            else:
                return decode_to_peer(event.frames[0])
    return None
