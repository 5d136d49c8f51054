"""`cocktail logs`: what a run of this machine says, also one that is detached or over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from cocktail_cli.completion import local_peers
from cocktail_cli.errors import Failure
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import RunRecord, load_run, reread_run
from cocktail_cli.options import Json, RunArgument, argument, flag, value
from cocktail_cli.ui import Progressed, events, from_json, say, sentence, step_line

EVERY = 0.5  # seconds between two looks of --follow
# files of words, or of events, and what formats a line of each; None leaves it out
Sources = list[tuple[in_folder.GrowingFile, Callable[[str], str | None]]]
PEERS = "peers"  # folder of the local peers' files


def logs(
    run: RunArgument,
    peer: Annotated[
        str | None,
        argument(
            "PEER", "A local peer, such as local-1 (default: the hub).", local_peers, show_default=False
        ),
    ] = None,
    follow: Annotated[bool, flag("--follow -f", "Print new lines until the run is over.")] = False,
    count: Annotated[int, value("--lines -n", "N", "Print the last N lines first.", min=0)] = 50,
    as_json: Json = False,
) -> None:
    """Print what a run says: its last lines, and with -f the new ones.

    Examples: cocktail logs amber-otter-42 -f
    cocktail logs amber-otter-42 local-1 -n 200

    With --json each line is an event, as of `launch --json`.
    """
    record = load_run(run)
    logs_of = sources(record, peer, as_json)
    shown = [*new_lines(logs_of)]
    for line in shown[max(0, len(shown) - count) :]:
        say(line)
    with suppress(KeyboardInterrupt):
        while follow:
            over = reread_run(record).state_now() != "running"
            for line in new_lines(logs_of):
                say(line)
            if over:  # asked before the files were read, so nothing is missed
                return
            time.sleep(EVERY)


def new_lines(logs_of: Sources) -> Iterator[str]:
    for file, words in logs_of:
        yield from (said for said in map(words, file.new_lines()) if said is not None)


def sources(record: RunRecord, peer: str | None, as_json: bool) -> Sources:
    """Return the files of the hub or of a local peer. Raises Failure (usage) for a peer that has none."""
    folder, growing = Path(record.output_dir), in_folder.GrowingFile
    if peer is None:
        events_log, words_log = folder / in_folder.EVENTS, folder / in_folder.LOG
        return [(growing(events_log), str) if as_json else (growing(words_log), log_words)]
    names = sorted(path.stem for path in (folder / PEERS).glob("*.jsonl"))
    if peer not in names:
        near = get_close_matches(peer, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"local peers: {', '.join(names) or 'none'}"
        raise Failure("usage", f"{record.run} has no log of a peer {peer}", hints=(hint,))
    told, said = growing(folder / PEERS / f"{peer}.jsonl"), growing(folder / PEERS / f"{peer}.log")
    return [(told, str)] if as_json else [(told, event_words), (said, str)]


def log_words(line: str) -> str:
    """Leave out the name of the logger that has what the terminal shows."""
    return line.replace(f" INFO {in_folder.TOLD}:", "", 1)


def event_words(line: str) -> str | None:
    """Format a line of NDJSON as launch prints it: time and sentence. None for events without words."""
    from recipes.foreign_json import parse_json

    try:
        told: Any = parse_json(line)
        if "error" in told:
            return f"error: {told['error']['message']}"
        event = from_json(told)
        said = event.state if isinstance(event, Progressed) else sentence(event)
        said = step_line(event, 0) if isinstance(event, events.Step) else said
        return f"{told['t']} {said}" if said else None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # cut by a kill, or damaged
        return f"a line that is no event: {error}"
