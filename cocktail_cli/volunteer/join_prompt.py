"""The prompt of `cocktail join`: which run, what it fetches, uses and sends here, and what it never does."""

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

if TYPE_CHECKING:
    from transport import PeerLink, RunURL
    from transport.protocol import messages

    from .bootstrap import Bootstrap
    from .limits import VolunteerLimits

CONFIG = "config.json"
ANSWER_S = 5.0  # for the hub to say how far the run is


@dataclass(frozen=True)
class Estimate:
    """The cost of a step on this machine, as `cocktail plan` computes it."""

    memory: int  # bytes of the device
    packet: int  # bytes, each way


def read_url(given: str | None) -> str:
    """Read the run URL from the argument, a file (`@path`) or stdin (`-`). Raises Failure (usage)."""
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


def prompt_lines(url: RunURL, bootstrap: Bootstrap, availability: list[str]) -> Iterator[str]:
    """Yield the lines above the question. `availability`: the rules by which this machine takes part."""
    recipe, files, limits = bootstrap.recipe, bootstrap.files, bootstrap.limits
    model = printable(recipe.model.model_name_or_path)
    how = "adapters (LoRA) on " if recipe.lora is not None else ""
    yield f"run {url.run}: recipe {recipe.name}, trains {how}{model}{progress(url)}"
    fetched = f"{bootstrap.way} and packets; {megabytes(bootstrap.bytes_here)} are here"
    yield f"it will       download {megabytes(bootstrap.bytes)} ({fetched})"
    estimate = estimated(bootstrap)
    yield f"              train on {limits.hardware}{memory_text(estimate, limits)}"
    if estimate is not None:
        packet = megabytes(estimate.packet)
        yield f"              send and receive about {packet} each a step{rates_text(limits)}"
    if availability:
        yield f"              take part {', '.join(availability)}"
    if recipe.model.trust_remote_code:
        code = ", ".join(file.name for file in files if file.name.endswith(".py"))
        yield f"              run code that comes with the model, as you allow: {code}"
        yield "              nothing keeps that code from your files"
        return
    door = "" if limits.listen else " · open a port"
    yield f"it will never run code of the run's host: a recipe is data, weights load as tensors{door}"
    yield "              read or send a file of yours · stay when you press Ctrl-C"


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap one of these lines between words to a terminal's width, with a hanging indent."""
    return textwrap.wrap(
        line, max(width, 40), subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False
    )


def progress(url: RunURL) -> str:
    """Describe how far the run is; empty where the hub does not answer in time."""
    from transport import ask_status
    from transport.protocol import TransportError

    with suppress(TransportError):  # a welcome peer may hold a token that is rotated since
        status = ask_status(url, ANSWER_S)
        peers = counted(max(0, len(status["peers"]) - 1), "other peer")
        return f", {peers}, step {status['step']} of {status['max_steps']}"
    return ""


def memory_text(estimate: Estimate | None, limits: VolunteerLimits) -> str:
    """Describe the memory that is needed, present and allowed."""
    if estimate is None:
        return ""
    have = memory_of(limits.devices[0])
    of = f" of {have / GIB:.1f}" if have else ""
    limit = f", at most {limits.vram_limit / GIB:.1f} GiB" if limits.vram_limit else ""
    return f", about {estimate.memory / GIB:.1f}{of} GiB of its memory{limit}"


def rates_text(limits: VolunteerLimits) -> str:
    caps = [("up", limits.max_up), ("down", limits.max_down)]
    said = [f"{8e-6 * rate:g} Mbit/s {way}" for way, rate in caps if rate]
    return f", at most {' and '.join(said)}" if said else ""


def estimated(bootstrap: Bootstrap) -> Estimate | None:
    """Estimate a step from the model's config, which is fetched for it; None where that says too little."""
    from recipes.errors import ModelError
    from recipes.planning import Machine, packet_bytes
    from recipes.planning import plan_memory as needed

    config = next((file for file in bootstrap.files if file.name == CONFIG), None)
    if config is None:
        return None
    data = fetched_soon(bootstrap.link, config)
    if data is None:
        return None
    with tempfile.TemporaryDirectory(prefix="cocktail-") as folder:
        (Path(folder) / CONFIG).write_bytes(data)
        devices = bootstrap.limits.devices
        machine = Machine(memory_of(devices[0]), devices[0] != "cpu", len(devices))
        try:
            memory = needed(bootstrap.recipe, Path(folder), bootstrap.micro_batch or 1, machine)
        except ModelError:  # the join itself will say what is wrong with it
            return None
    return Estimate(memory.bytes + RUNTIME, packet_bytes(bootstrap.recipe, memory.parameters))


def fetched_soon(link: PeerLink, file: messages.File) -> bytes | None:
    """Fetch a small base file; None where the hub is too slow: the prompt then goes without an estimate."""
    until = time.monotonic() + ANSWER_S

    def waited() -> None:
        link.raise_if_leaving()
        if time.monotonic() > until:
            raise TimeoutError

    download = link.begin(f"base/{file.name}", file.sha256)
    try:
        return link.finish(download, waited)
    except (KeyError, TimeoutError):
        return None
    finally:
        link.forget(download)


def confirm(question: str) -> bool:
    try:
        return typer.confirm(question, default=True, err=True)
    except typer.Abort:  # the end of the input
        raise Failure("interrupted", "not joined") from None
