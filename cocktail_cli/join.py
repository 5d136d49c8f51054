"""`cocktail join`: lend this machine to a run, until it is over or Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from cocktail_cli import __version__
from cocktail_cli.base import check_names, fetch_base, folder_of, missing
from cocktail_cli.board import megabytes
from cocktail_cli.errors import Failure
from cocktail_cli.events import Joined, Left, Progressed, Step, Warning
from cocktail_cli.folder import log_to
from cocktail_cli.local_peers import hold_life_line
from cocktail_cli.machine import hardware, own_name, pick_device
from cocktail_cli.options import (
    Device,
    Json,
    MaxDown,
    MaxUp,
    MicroBatch,
    NoColor,
    ProgressOption,
    Quiet,
    Verbose,
)
from cocktail_cli.show import Display, View, view_of
from cocktail_cli.signals import leave_on_signal

if TYPE_CHECKING:
    from cocktail_cli.link import RunLink
    from recipes.finetune import Link, Peer, StepDone
    from recipes.schema import Recipe
    from transport import PeerLink, RunURL
    from transport.messages import Welcome

CONNECT_TIMEOUT = 5.0  # seconds for the hub to answer, where --wait says nothing
MICRO_BATCH = 8  # sequences in memory at once, where neither the recipe nor the user says


@dataclass(frozen=True)
class Lent:
    """What this machine's owner lends, and how."""

    name: str
    device: str
    micro_batch_size: int | None
    ask: bool  # before anything is fetched
    max_up: float | None = None  # bytes a second
    max_down: float | None = None


def join(
    run_url: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_URL",
            envvar="COCKTAIL_RUN_URL",
            help="The line the run's owner passed on; @FILE to read it from a file, - from stdin.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", envvar="COCKTAIL_NAME", help="Shown to the others (default: this machine's name)."
        ),
    ] = None,
    device: Device = "auto",
    micro_batch_size: MicroBatch = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    wait: Annotated[
        str,
        typer.Option(
            "--wait", metavar="TIME", help="Keep trying this long while the run cannot be reached: 10m."
        ),
    ] = "0s",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", envvar="COCKTAIL_YES", help="Do not ask before joining.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_color: NoColor = False,
    progress: ProgressOption = "auto",
    life_line: Annotated[bool, typer.Option("--life-line", hidden=True)] = False,
) -> None:
    """Join a run: fetch its model, train, exchange, until the run is over or you press Ctrl-C.

    The run's owner cannot run code here: a recipe is data, weights are tensors.

    Examples: cocktail join cocktail://...
    echo "$URL" | cocktail join - -y
    cocktail join @url.txt --max-up 5mbit --max-down 50mbit

    With --json every line of stdout is an event: {"v":1,"t":...,"event":"step","step":3,"loss":4.1,...}
    """
    from recipes.schema import duration
    from transport import parse_url

    url = parse_url(read_url(run_url))
    try:
        patience = float(duration(wait))
    except ValueError as error:
        raise Failure("usage", f"--wait: {error}") from error
    if not yes and not sys.stdin.isatty():
        raise Failure("usage", "there is no terminal to ask on", hints=("-y joins without being asked",))
    log_to(None, verbose)
    lent = Lent(name or own_name(), pick_device(device), micro_batch_size, not yes, max_up, max_down)
    with view_of(Display(as_json, quiet, verbose, not no_color, progress)) as view:
        Membership(url, lent, view).last(patience, life_line)


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


class Membership:
    """One stay in a run, from the first word to the goodbye."""

    def __init__(self, url: RunURL, lent: Lent, view: View) -> None:
        self.url, self.lent, self.view = url, lent, view
        self.steps = 0
        self.leave_asked = ""

    def last(self, patience: float, life_line: bool) -> None:
        """Join, train and leave. `patience`: seconds to keep trying while the hub cannot be reached."""
        from cocktail_cli.link import RunLink
        from transport import Bandwidth, PeerLink

        def told(what: str) -> None:
            self.view.show(Warning(what))

        lent = self.lent
        link = PeerLink(
            self.url,
            lent.name,
            hardware(lent.device),
            versions(),
            bandwidth=Bandwidth(lent.max_up, lent.max_down),
            told=told,
        )

        def leave(why: str) -> None:
            self.leave_asked = why
            link.leave_requested.set()

        with closing(link):
            if life_line:
                hold_life_line(leave, lambda: link.cut_off)
            self.view.show(Progressed(f"dialling {self.url.address}"))
            welcome = link.connect(max(CONNECT_TIMEOUT, patience))
            if not self.agreed(welcome):
                link.leave("declined")
                return
            from recipes.finetune import Interrupted

            run = RunLink(link)
            try:
                # Signals not before: Ctrl-C at the question is an answer.
                with leave_on_signal(leave), run.waiting():
                    self.train(run, self.prepare(link, welcome))
            except Interrupted:  # outside the loop, which minds it itself: while fetching, say
                if run.ended is None:
                    link.leave(self.leave_asked)
            self.view.show(self.goodbye(run))

    def goodbye(self, run: RunLink) -> Left:
        return Left(
            run=self.url.run,
            peer=run.name,
            reason=run.ended or f"left ({self.leave_asked})",
            finished=run.finished,
            steps=self.steps,
            up_bytes=run.link.bytes_up,
            down_bytes=run.link.bytes_down,
        )

    def agreed(self, welcome: Welcome) -> bool:
        """Tell what the run is and will do here, and ask whether that is wanted.

        Raises:
            Failure: rejected, where the base's file names cannot be.
        """
        from recipes.recipe import recipe_from_json

        check_names(welcome.base)
        recipe = recipe_from_json(welcome.recipe)
        wanted = sum(file.size for file in missing(welcome.base, folder_of(welcome.base)))
        total = sum(file.size for file in welcome.base)
        if self.lent.ask:
            typer.echo(
                f"run {welcome.run}: recipe {recipe.name}, {recipe.model.model_name_or_path}", err=True
            )
            fetch = f"download {megabytes(wanted)} of weights (have {megabytes(total - wanted)})"
            typer.echo(f"this run will  {fetch} · train on {hardware(self.lent.device)}", err=True)
            typer.echo(
                "it will not    run code of its owner: a recipe is data, weights load as tensors", err=True
            )
            if not self.says_yes(f'Join as "{welcome.name}"?'):
                return False
        every = recipe.logging.logging_steps
        self.view.show(Joined(welcome.run, welcome.name, recipe.name, welcome.recipe_hash, wanted, every))
        return True

    @staticmethod
    def says_yes(question: str) -> bool:
        try:
            return typer.confirm(question, default=True, err=True)
        except typer.Abort:  # Ctrl-C or the end of the input
            raise Failure("interrupted", "not joined") from None

    def prepare(self, link: PeerLink, welcome: Welcome) -> Peer:
        """The base model, fetched and loaded on the device, and all that trains it."""
        from recipes.finetune import build_peer
        from recipes.model import load_model
        from recipes.recipe import recipe_from_json

        recipe = recipe_from_json(welcome.recipe)

        def fetch(name: str, to: Path, progress: Callable[[int, int], None]) -> None:
            link.fetch(name, progress, to)

        def told(name: str, done: int, total: int) -> None:
            self.view.show(Progressed(f"fetching {name}", done, total, "bytes"))

        folder = fetch_base(welcome.base, fetch, told)
        self.view.show(Progressed("loading the model"))
        model = load_model(folder, recipe.model.attn_implementation, self.lent.device)
        batch = micro_batch(recipe, self.lent.micro_batch_size)
        return build_peer(model, recipe, batch, welcome.name)

    def train(self, run: RunLink, peer: Peer) -> None:
        """Take part, and show what this machine does; again from the start of a session where one is
        renewed.
        """
        from transport.errors import SessionRenewed

        while True:
            try:
                self.take_part(run, peer)
                return
            except SessionRenewed as renewed:
                # What was not delivered in the old session is the work of others now. x and x' stay as they
                # are.
                peer.undelivered.clear()
                run.name = run.link.name
                self.view.show(Warning(str(renewed)))

    def take_part(self, run: RunLink, peer: Peer) -> None:
        from recipes.finetune import CaughtUp, StepDone, finetune

        up, down = run.link.bytes_up, run.link.bytes_down
        # The cast: messages are frozen, and a Protocol's plain attributes promise that they can be set.
        for event in finetune(cast("Link", run), peer, run.link.welcome.round):
            if isinstance(event, CaughtUp):
                self.view.show(Progressed(f"caught up to round {event.round} with {event.packets} packets"))
            elif isinstance(event, StepDone):
                self.steps += event.loss is not None
                before, (up, down) = (up, down), (run.link.bytes_up, run.link.bytes_down)
                self.view.show(self.step_of(event, run, peer, up - before[0], down - before[1]))

    def step_of(self, done: StepDone, run: RunLink, peer: Peer, up: int, down: int) -> Step:
        """What this machine did in a round: its own loss, its own bytes."""
        name, announced = run.name, run.round
        full = 2 * peer.flat.layout.size  # bytes of the parameters in FP16
        return Step(
            step=done.step,
            steps=announced.steps if announced else 0,
            round=done.round,
            loss=done.loss,
            peers=len(announced.members) if announced else 0,
            tokens=done.tokens,
            accepted=[name] if done.accepted else [],
            up_bytes={name: up},
            down_bytes={name: down},
            ratio_up={name: round(full / up, 2)} if up else {},
            ratio_down={name: round(full / down, 2)} if down else {},
            ratio_fp16=round(2 * full / (up + down), 2) if up + down else 0.0,
            packet_bytes=done.sent_bytes,
            fingerprint=f"{done.fingerprint:016x}",
        )


def micro_batch(recipe: Recipe, wanted: int | None) -> int:
    """Sequences in memory at once: this machine's word, else the recipe's, else MICRO_BATCH."""
    asked = recipe.training.per_device_train_batch_size
    return wanted or (MICRO_BATCH if asked == "auto" else asked)


def versions() -> dict[str, str]:
    return {"cocktail": __version__}
