"""Before `cocktail join` joins: which run, what it will fetch, use and send here, and what it never does."""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cocktail_cli.errors import Failure
from cocktail_cli.machine import GIB, RUNTIME, memory_of
from cocktail_cli.ui import counted, megabytes, printable

from .base_weights import to_fetch

if TYPE_CHECKING:
    from transport import PeerLink, RunURL

    from .base_weights import File
    from .bootstrap import Preparation
    from .lending_terms import Lent

CONFIG = "config.json"
ANSWER_S = 5.0  # for the hub to say how far the run is


@dataclass(frozen=True)
class Estimate:
    """What a step will take here, as `cocktail plan` reckons it."""

    memory: int  # bytes of the device
    packet: int  # bytes, each way


def read_url(given: str | None) -> str:
    """The URL itself, a file (`@path`) or stdin (`-`). Raises Failure (usage)."""
    if not given:
        raise Failure("usage", "which run? the URL is missing", hints=("cocktail join cocktail://...",))
    if given == "-":
        return sys.stdin.readline()
    if given.startswith("@"):
        path = Path(given[1:]).expanduser()
        if not path.is_file():
            raise Failure("usage", f"no such file: {path}")
        return path.read_text(encoding="utf-8")
    return given


def screen(url: RunURL, preparation: Preparation, lent: Lent, terms: list[str]) -> Iterator[str]:
    """The lines above the question. `terms`: when this machine takes part, as its owner said."""
    recipe, files = preparation.recipe, preparation.files
    model = printable(recipe.model.model_name_or_path)
    how = "adapters (LoRA) on " if recipe.lora is not None else ""
    yield f"run {url.run}: recipe {recipe.name}, trains {how}{model}{progress(url)}"
    here = sum(file.size for file in files) - to_fetch(files, preparation.folder)
    way = preparation.machine.plan.way.value
    fetched = f"{way} and packets; {megabytes(here)} are here"
    yield f"it will       download {megabytes(preparation.bytes)} ({fetched})"
    estimate = estimated(preparation, lent)
    yield f"              train on {lent.hardware}{taking(estimate, lent)}"
    if estimate is not None:
        yield f"              send and receive about {megabytes(estimate.packet)} each a step{held_to(lent)}"
    if terms:
        yield f"              take part {', '.join(terms)}"
    if recipe.model.trust_remote_code:
        code = ", ".join(file.name for file in files if file.name.endswith(".py"))
        yield f"              run code that comes with the model, as you allow: {code}"
        yield "              nothing keeps that code from your files"
        return
    door = "" if lent.listen else " · open a port"
    yield f"it will never run code of the run's owner: a recipe is data, weights load as tensors{door}"
    yield "              read or send a file of yours · stay when you press Ctrl-C"


def fitted(line: str, width: int) -> list[str]:
    """One of these lines for a terminal of this width: broken between words, what follows further in."""
    return textwrap.wrap(
        line, max(width, 40), subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False
    )


def progress(url: RunURL) -> str:
    """How far the run is; nothing where the hub does not say in time."""
    from transport import ask_status
    from transport.protocol import TransportError

    with suppress(TransportError):  # who is welcome may have no token that is good for questions any more
        status = ask_status(url, ANSWER_S)
        peers = counted(max(0, len(status["peers"]) - 1), "other peer")
        return f", {peers}, step {status['step']} of {status['max_steps']}"
    return ""


def taking(estimate: Estimate | None, lent: Lent) -> str:
    """Its memory: what is needed, of what there is, within what is allowed."""
    if estimate is None:
        return ""
    have = memory_of(lent.devices[0])
    of = f" of {have / GIB:.1f}" if have else ""
    limit = f", at most {lent.vram_limit / GIB:.1f} GiB" if lent.vram_limit else ""
    return f", about {estimate.memory / GIB:.1f}{of} GiB of its memory{limit}"


def held_to(lent: Lent) -> str:
    caps = [("up", lent.max_up), ("down", lent.max_down)]
    said = [f"{8e-6 * rate:g} Mbit/s {way}" for way, rate in caps if rate]
    return f", at most {' and '.join(said)}" if said else ""


def estimated(preparation: Preparation, lent: Lent) -> Estimate | None:
    """From the model's config, which is fetched for it; None where that says too little."""
    from recipes.errors import ModelError
    from recipes.planning import Machine, packet_bytes
    from recipes.planning import plan_memory as needed

    config = next((file for file in preparation.files if file.name == CONFIG), None)
    if config is None:
        return None
    data = fetched_soon(preparation.link, config)
    if data is None:
        return None
    with tempfile.TemporaryDirectory(prefix="cocktail-") as folder:
        (Path(folder) / CONFIG).write_bytes(data)
        device = lent.devices[0]
        machine = Machine(memory_of(device), device != "cpu", len(lent.devices))
        try:
            memory = needed(preparation.recipe, Path(folder), preparation.micro_batch or 1, machine)
        except ModelError:  # the join itself will say what is wrong with it
            return None
    return Estimate(memory.bytes + RUNTIME, packet_bytes(preparation.recipe, memory.parameters))


def fetched_soon(link: PeerLink, file: File) -> bytes | None:
    """A small file of the base; None where the hub does not give it in time: one is asked all the same."""
    until = time.monotonic() + ANSWER_S

    def waited() -> None:
        link.leave_or_go_on()
        if time.monotonic() > until:
            raise TimeoutError

    download = link.begin(f"base/{file.name}", file.sha256)
    try:
        return link.finish(download, waited)
    except (KeyError, TimeoutError):
        return None
    finally:
        link.forget(download)


def says_yes(question: str) -> bool:
    try:
        return typer.confirm(question, default=True, err=True)
    except typer.Abort:  # the end of the input
        raise Failure("interrupted", "not joined") from None
