"""The question of `cocktail join`: what is trained, on what, for how long, and what that takes here.

It is asked before torch is imported and before this machine has a session: the hub shows its host that
somebody is deciding. Nothing is fetched, and no round waits.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cocktail_cli.assembly import crossing, dialled
from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line, readable
from cocktail_cli.machine import GIB, RUNTIME, Glance, check_trust, own_keys
from cocktail_cli.ui import counted, duration_text, megabytes, say, short

from . import checkpoint_store
from .base_weights import DownloadPlan, check_free
from .limits import CONNECT_TIMEOUT, Resources, VolunteerLimits

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport import RunURL
    from transport.peer import RunPreview

LABEL = 12  # columns
NOT_IN_A_RUN = ("finished", "stopped", "failed", "paused")


def read_url(given: str | None) -> str:
    """Read the run URL from the argument, a file (`@path`) or stdin (`-`). Raises Failure (usage)."""
    if not given:
        raise Failure("usage", "which run? the URL is missing", hints=("cocktail join cocktail://...",))
    if given == "-":
        return sys.stdin.readline()
    if given.startswith("@"):
        path = Path(given[1:]).expanduser()
        if not path.is_file():
            hints = ("save the line that the host passed on in a file: cocktail join @FILE",)
            raise Failure("usage", f"no such file: {path}", hints=hints)
        return path.read_text(encoding="utf-8")
    return given


@dataclass(frozen=True)
class Offer:
    """The part of this machine that its user would lend to a run."""

    limits: VolunteerLimits  # its devices are not picked yet
    here: Glance
    rules: list[str]  # by which it takes part

    @property
    def resources(self) -> Resources:
        memory = min(self.here.memory, self.limits.vram_limit or self.here.memory)
        return Resources.of_memory(memory, self.limits)


class JoinQuestion:
    """Asks the user of this machine whether to join. A context: the hub shows a person who decides until it
    ends, or until `answered` is called."""

    def __init__(self, url: RunURL, offer: Offer) -> None:
        from transport.peer import PeerIdentity, RunVisit

        self.url, self.offer = url, offer
        identity = PeerIdentity(offer.limits.name, offer.here.hardware, keys=own_keys())
        self._visit = RunVisit(url, identity)

    def __enter__(self) -> JoinQuestion:
        return self

    def __exit__(self, *_: object) -> None:
        self._visit.end(declined=True)

    def answered(self) -> None:
        """End the visit, as this machine has a session now."""
        self._visit.end(declined=False)

    def ask(self, patience: float, agreed: bool = False) -> bool:
        """Show the run and ask, unless the user has `agreed` to any; True where the user agrees.

        Raises:
            Failure: rejected, where the run asks for more than this machine has or its user allows.
            Unreachable, RefusedByHub, LinkLost.
        """
        preview = self._visit.look(max(CONNECT_TIMEOUT, patience), waits=agreed)
        lines = self._checked(preview, agreed)
        if agreed:
            self.answered()
            return True
        self._visit.decide()
        width = shutil.get_terminal_size().columns
        for part in chain.from_iterable(wrap_line(line, width) for line in lines):
            say(part, err=True)
        if confirm(f'Join as "{self.offer.limits.name}"?'):
            return True
        say("not joined: nothing was downloaded; the same command asks again", err=True)
        return False

    def _checked(self, preview: RunPreview, agreed: bool = False) -> Iterator[str]:
        """Check that this machine can take part; return the lines above the question. Who has agreed hears of
        a full disk once the sizes that the hub tells are known to be a model's."""
        if preview.status["state"] in NOT_IN_A_RUN:  # the hub will refuse, and say why
            return iter(())
        limits = self.offer.limits
        plan = DownloadPlan(preview.welcome, limits.max_disk)
        check_trust(plan.recipe, limits.trust_remote_code, "rejected")
        replace(self.offer.resources, fetched=plan.bytes_here).check(plan.recipe)
        if not agreed:
            check_free(plan.bytes, limits.max_disk)
        return question_lines(preview, plan, self.offer)


def question_lines(preview: RunPreview, plan: DownloadPlan, offer: Offer) -> Iterator[str]:
    """Yield the lines above the question: a title, then `- label  text`."""
    recipe, status, limits = plan.recipe, readable(preview.status), offer.limits
    about = recipe.description or f"recipe {recipe.name}"
    yield f"{preview.welcome.run}: {one_line(about, 300)}"
    yield labelled(
        "trains", f"{method(recipe, status['parameters'])} {name_of(recipe.model.model_name_or_path)}"
    )
    if terms := licence(preview, plan):
        yield labelled("licence", terms)
    yield labelled("on", one_line(", ".join(name_of(dataset.path) for dataset in recipe.datasets), 600))
    yield labelled("takes", duration(status))
    yield labelled("downloads", downloads(preview, plan, limits))
    yield labelled("uses", usage(status, offer))
    if offer.rules:
        yield labelled("takes part", ", ".join(offer.rules))
    if dialled(recipe) or crossing(recipe, reachable=1, peers=2):
        others = "all peers" if limits.listen else "peers that listen"
        yield labelled("shows", f"your address to the host, and to {others}, from which packets may come")
    if recipe.model.trust_remote_code:
        code = ", ".join(file.name for file in plan.files if file.name.endswith(".py"))
        yield labelled("runs", f"code that comes with the model, as you allow: {code}")
        yield labelled("careful", "nothing keeps that code from your files")
        return
    door = "" if limits.listen else ", opens no port"
    yield labelled(
        "never", f"runs code of the host, reads or sends your files{door}; Ctrl-C ends it at any time"
    )


def labelled(label: str, text: str) -> str:
    return f"- {label:<{LABEL - 2}}{text}"


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap one of these lines between words to a terminal's width, with a hanging indent."""
    indent = " " * (LABEL if line.startswith("- ") else 2)
    return textwrap.wrap(
        line, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def method(recipe: Recipe, parameters: int) -> str:
    count = short(parameters)
    if recipe.lora is None:
        return f"all {count} parameters of"
    kind = "QLoRA" if recipe.model.quantized else "LoRA"
    return f"adapters ({kind}, {count} parameters) on"


def name_of(path: str) -> str:
    """Shorten a path of the host's machine to its last part; ids and addresses stay."""
    from recipes.config import looks_like_path

    return one_line(Path(path).name if looks_like_path(path) else path, 120)


def licence(preview: RunPreview, plan: DownloadPlan) -> str:
    """Describe the licence of the base, and who gives access to it; empty where the host does not say."""
    stated = one_line(str(preview.status.get("licence") or ""), 100)
    if not any(file.gated for file in plan.files):
        return stated
    name = name_of(plan.recipe.model.model_name_or_path)
    return (
        f"{stated}; gated: you fetch it from the Hugging Face hub with your own account, which must have "
        f"accepted the licence at https://huggingface.co/{name}"
    )


def duration(status: dict[str, Any]) -> str:
    """Describe how far the run is, how long it takes, and with whom."""
    step, eta, peers = status["step"], status["eta_s"], status.get("peer_count", len(status["peers"]))
    left = f", about {duration_text(eta)} left" if isinstance(eta, int | float) else ""
    others = f"with {counted(peers, 'peer')}" if peers else "with nobody else yet"
    return f"step {step} of {status['max_steps']}{left}, {others}"


def downloads(preview: RunPreview, plan: DownloadPlan, limits: VolunteerLimits) -> str:
    """Describe the bytes to fetch."""
    from .checkpoint_store import CheckpointKey

    key = CheckpointKey.of(preview.welcome)
    back = checkpoint_store.path_of(key.run, limits.name).is_file()
    most = "at most " if back and plan.bytes else ""
    here = f"; {megabytes(plan.bytes_here)} are here" if plan.bytes_here else ""
    return f"{most}{megabytes(plan.bytes)} ({plan.way} and updates{here})"


def usage(status: dict[str, object], offer: Offer) -> str:
    """Describe the device, its memory, and the bytes of each step."""
    here, limits, needs = offer.here, offer.limits, status.get("needs")
    needs = needs if isinstance(needs, dict) else {}
    said = here.hardware
    if memory := needs.get("memory"):
        of = f" of {here.memory / GIB:.1f}" if here.memory else ""
        said += f", about {(memory + RUNTIME) / GIB:.1f}{of} GiB of its memory"
    if limits.vram_limit:
        said += f", at most {limits.vram_limit / GIB:.1f} GiB"
    if packet := needs.get("packet"):
        said += f"; sends and receives about {megabytes(packet)} a step"
    caps = [("up", limits.max_up), ("down", limits.max_down)]
    rates = [f"{8e-6 * rate:g} Mbit/s {way}" for way, rate in caps if rate]
    return said + (f", at most {' and '.join(rates)}" if rates else "")


def confirm(question: str) -> bool:
    try:
        return typer.confirm(question, default=True, err=True)
    except typer.Abort:  # the end of the input
        raise Failure("interrupted", "not joined", hints=("-y joins without asking",)) from None
