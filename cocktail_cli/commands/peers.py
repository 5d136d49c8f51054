"""`cocktail peers` and `cocktail kick`: the host sees who is in a run, and decides who may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line, readable
from cocktail_cli.machine import RunRecord, load_run, save_run
from cocktail_cli.options import Json, Quiet, RunArgument, flag, value
from cocktail_cli.ui import duration_text, megabytes, say, say_json, table

from .status import hub_of, words_of

if TYPE_CHECKING:
    from transport import RunURL
    from transport.protocol import messages

WHOM = "PEER"  # a name, or the 16 digits of a key
COLUMNS = dict.fromkeys(("PEER", "KEY", "HARDWARE", "STATE"), "<")  # title -> alignment
GONE = 50  # shown of those without a connection, where there are more than a page of them
COLUMNS |= dict.fromkeys(("SINCE", "STRIKES", "UP", "DOWN"), ">") | {"": "<"}  # the last: the reason


def peers(
    run: RunArgument,
    approve: Annotated[str | None, value("--approve", WHOM, "Admit a peer that asks to join.")] = None,
    deny: Annotated[str | None, value("--deny", WHOM, "Refuse a peer that asks to join.")] = None,
    unban: Annotated[
        str | None, value("--unban", WHOM, "Lift a ban: the peer may ask to join again.")
    ] = None,
    rotate_token: Annotated[
        bool, flag("--rotate-token", "Make a new join line; the old one admits no new peer.")
    ] = False,
    everybody: Annotated[
        bool, flag("--all", "Show all that are gone or banned, not the first 50 alone.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the peers of a run of this machine, or decide about one.

    They are present, waiting, gone or banned. PEER is a name, or the 16 digits of a key. -q and --json have
    all of them.

    Example: cocktail peers amber-otter-42 --approve attic-3090

    With --json one object: join (token, approve) and peers, each with name, key, gpu, state, since_s,
    strikes, up_bytes, down_bytes, reason.
    """
    wanted = [("approve", approve), ("deny", deny), ("unban", unban), ("token", rotate_token or None)]
    given = [(order, word) for order, word in wanted if word is not None]
    if len(given) > 1:
        raise Failure("usage", "one of --approve, --deny, --unban and --rotate-token at a time")
    record = load_run(run)
    if rotate_token:
        rotate(record, as_json)
    elif given:
        tell(ask(record, given[0][0], peer=str(given[0][1])), as_json, quiet)
    else:
        show(listed(record, everybody or as_json or quiet), as_json, quiet)


def kick(
    run: RunArgument,
    peer: Annotated[str, typer.Argument(metavar=WHOM, help="A name, or the 16 digits of a key.")],
    ban: Annotated[bool, typer.Option("--ban", help="Refuse its key from now on, under any name.")] = False,
    reason: Annotated[str, value("--reason", "TEXT", "Text that the peer is shown.")] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove a peer from a run of this machine.

    Its work goes to others. Without --ban it may ask to join again. A ban removes every process with its key.

    Example: cocktail kick amber-otter-42 attic-3090 --ban
    """
    order: messages.AdminCommand = "ban" if ban else "kick"
    tell(ask(load_run(run), order, peer=peer, reason=reason), as_json, quiet)


def listed(record: RunRecord, everybody: bool) -> dict[str, Any]:
    """Return the list of peers: join, peers, and left, how many more there are.

    Args:
        everybody: read the pages of those without a connection too, of which there may be thousands.

    Raises:
        Failure: as `ask`.
    """
    from transport.peer import peer_pages

    found: dict[str, Any] = {"peers": [], "left": 0}
    with answering(record) as (url, secret):
        for page in peer_pages(url, secret):
            peers = [*found["peers"], *page["peers"]]
            found = {"join": page["join"], "peers": peers, "left": page.get("left", 0)}
            if not everybody and peers and peers[-1]["since_s"] is None:  # and so have all after it
                break
    return readable(found)


def ask(record: RunRecord, order: Any, **fields: str) -> dict[str, Any]:
    """Return the hub's answer to an admin command. Raises Failure (run_unknown, usage, unreachable)."""
    from transport import ask_admin

    with answering(record) as (url, secret):
        return readable(ask_admin(url, secret, order, **fields))


@contextmanager
def answering(record: RunRecord) -> Iterator[tuple[RunURL, str]]:
    """Yield where the hub of a run is, and the host's secret. Raises Failure (run_unknown, usage,
    unreachable) for what it answers."""
    from transport.protocol import RefusedByHub

    if record.state != "running":
        hints = (f"cocktail resume {record.run} goes on with it",)
        raise Failure("run_unknown", f"the run {record.run} is not running ({record.state})", hints=hints)
    try:
        with hub_of(record) as url:
            yield url, record.keys["stop"]
    except RefusedByHub as error:
        if error.code != "unknown":
            raise
        raise Failure("usage", str(error), hints=(f"cocktail peers {record.run}",)) from error


def rotate(record: RunRecord, as_json: bool) -> None:
    """Rotate the token, in run.json first, so that a restarted hub has it, then in the hub."""
    from transport import RunKeys
    from transport.protocol import RefusedByHub

    if record.over:
        hints = (f"cocktail export {record.run} -o DIR copies its model",)
        raise Failure("run_unknown", f"the run {record.run} is over: nobody can join it", hints=hints)
    new = record.with_token(RunKeys.new_token())
    save_run(new)
    if record.state == "running":
        try:
            ask(record, "token", token=new.keys["token"])
        except RefusedByHub:
            save_run(record)
            raise
    if as_json:
        say_json({"did": "rotated", "run": new.run, "url": new.url})
    else:
        say(new.url)


def tell(done: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Print the result of a command."""
    if as_json:
        say_json(done)
    elif not quiet:
        say(f"{done['did']} {', '.join(done['peers'])} (key {done['key']})")


def show(found: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Print the list. Of those without a connection the first ones, unless all were read."""
    peers, left = found["peers"], found.pop("left")
    if as_json:
        say_json(found)
    elif quiet:
        say(*(f"{peer['key']} {peer['state']} {peer['name']}" for peer in peers))
    elif not peers:
        say("nobody has come yet")
    else:
        here = sum(peer["since_s"] is not None for peer in peers)
        shown = peers[: here + GONE] if left else peers
        say(*table(COLUMNS, map(columns_of, shown)))
        if left := left + len(peers) - len(shown):
            say(f"and {left:,} more that are gone or banned; --all shows them", err=True)


def columns_of(peer: dict[str, Any]) -> list[str]:
    return [
        *words_of(peer, "name", "key", "gpu", "state"),
        "-" if peer["since_s"] is None else duration_text(peer["since_s"]),
        str(peer["strikes"]),
        *(megabytes(peer[key]) for key in ("up_bytes", "down_bytes")),
        one_line(peer["reason"], 120),
    ]
