"""The command `cocktail`: its commands, and the one place where an error becomes words and an exit code.

Nothing heavy is imported here: `cocktail --help` answers in under half a second. Commands import torch and
the rooms inside their functions.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.main import get_command

import cocktail_cli
from cocktail_cli.assembly import CHECK, RESULTS, RUN, SHOWING, TOOLS, reader_of
from cocktail_cli.assembly import commands as extensions_commands
from cocktail_cli.commands import check, join, launch, peers, recipes, results, status
from cocktail_cli.host import log_to
from cocktail_cli.machine import hide_token
from cocktail_cli.ui import guarded_output, say, say_text

from .errors import EXIT, Failure, Interrupted, explain
from .help_pages import CommandTable
from .key_options import CONFIGURED, check_removed, defaults, rewritten
from .options import with_extensions
from .signals import Interruption

app = CommandTable(
    help="Fine-tune a large language model with other people's GPUs over ordinary internet links.",
    epilog="First: cocktail launch smoke. Then pass on the line it prints.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("launch", rich_help_panel=RUN)(with_extensions(launch.launch))
app.command("join", rich_help_panel=RUN)(with_extensions(join.join))
app.command("resume", rich_help_panel=RUN)(with_extensions(launch.resume))
app.command("runs", rich_help_panel=RUN)(status.runs)
app.command("status", rich_help_panel=RUN)(status.status)
app.command("logs", rich_help_panel=RUN)(status.logs)
app.command("stop", rich_help_panel=RUN)(status.stop)
app.command("peers", rich_help_panel=RUN)(peers.peers)
app.command("kick", rich_help_panel=RUN)(peers.kick)
app.command("validate", rich_help_panel=CHECK)(check.validate)
app.command("preview", rich_help_panel=CHECK)(check.preview)
app.command("export", rich_help_panel=RESULTS)(results.export)
app.command("generate", rich_help_panel=RESULTS)(results.generate)
app.add_typer(recipes.app, name="recipes", rich_help_panel=TOOLS)


OUTPUT_CLOSED = 141  # exit status where a pipe's reader is gone, as of programs that SIGPIPE ends
EVERYWHERE = ("--no-color", "-v", "-vv", "--verbose")  # SHOWING declare these; others leave them to `main`


def print_version(wanted: bool) -> None:
    if wanted:
        say(f"cocktail {cocktail_cli.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune a large language model with other people's GPUs over ordinary internet links."""


def main() -> NoReturn:
    """Run the command line and exit with the code that `cocktail_cli.errors` documents."""
    hide_token()
    make_output_survive()
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    as_json = "--json" in options
    loud = bool({"-v", "-vv", "--verbose"} & set(options) or os.environ.get("COCKTAIL_DEBUG"))
    if "--no-color" in options:
        os.environ["NO_COLOR"] = "1"
    log_to(None, 0)  # until a command names a file: without a handler, logging would print errors itself
    try:
        with guarded_output():
            run(as_json, loud)
    finally:
        drop_output()


def run(as_json: bool, loud: bool) -> NoReturn:
    """Run the command that sys.argv names, and end with SystemExit whatever happens."""
    interruption, options = Interruption(), set[str]()
    try:
        check_rooms()
        typed = sys.argv[1:]
        check_removed(typed, os.environ)
        commands = command_table(typed)
        given, defaults = rewritten(command_line(typed), commands), settings(typed)
        options = options_of(commands, given)
        with interruption.handled():
            # Not standalone: Typer would print usage errors itself, in a form of its own.
            code = commands(given, prog_name="cocktail", standalone_mode=False, default_map=defaults)
        sys.exit(code if isinstance(code, int) else 0)
    except Interrupted as signal:
        drop_output()
        os._exit(signal.exit)  # at once: threads that compute, and Python's own end, would take seconds
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        discard(sys.stdout, sys.stderr)
        sys.exit(OUTPUT_CLOSED)  # Typer would make it 1, which is the code of a bug
    except typer.TyperException as error:
        fail_usage(error, as_json)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:  # the border of the program: whatever it is, the user gets a sentence
        if interruption.came:
            sys.exit(EXIT["interrupted"])
        failure = explain(error, options)
        failure.hints = (*filter(None, [reader_of(error)]), *failure.hints)
        bug = failure.code == "unexpected"  # of what the user can mend, the sentence says all
        logging.getLogger("cocktail_cli").error("%s", failure, exc_info=bug or loud)
        if loud:
            traceback.print_exc()
        fail(failure, as_json)


def command_table(typed: list[str]) -> typer.core.TyperGroup:
    """Make the table of commands; with those of extensions, where none of the others is typed."""
    table = get_command(app)
    assert isinstance(table, typer.core.TyperGroup)
    if not typed or typed[0] not in table.commands:
        for group, function in extensions_commands():
            app.command(function.__name__, rich_help_panel=group)(function)
        table = get_command(app)
        assert isinstance(table, typer.core.TyperGroup)
    return table


def options_of(commands: typer.core.TyperGroup, given: list[str]) -> set[str]:
    """Return the options of the command that is given."""
    command = commands.commands.get(given[0]) if given else None
    return {name for parameter in command.params for name in parameter.opts} if command else set()


def command_line(arguments: list[str]) -> list[str]:
    """Remove the options that every command accepts and `main` has handled."""
    if not arguments or arguments[0] in SHOWING:
        return arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [one for one in arguments[:end] if one not in EVERYWHERE] + arguments[end:]


def settings(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Read this machine's config.toml, where the command uses it and is not only asked for its help."""
    wanted = arguments[:1] and arguments[0] in CONFIGURED and not {"-h", "--help"} & set(arguments)
    return defaults() if wanted else {}


def fail_usage(error: typer.TyperException, as_json: bool) -> NoReturn:
    """Print a usage error with the command whose help lists what is right, and exit."""
    if type(error).__name__ == "NoArgsIsHelpError":  # Typer does not export it
        say_text(error.format_message())
        sys.exit(error.exit_code)
    context = getattr(error, "ctx", None)
    hints = (f"{context.command_path} --help",) if context else ()
    fail(Failure("usage", usage_text(error.format_message()), hints=hints), as_json)


def usage_text(said: str) -> str:
    """Leave out of Typer's text the variables that are not set, and what its library says of itself."""
    for variable in re.findall(r" \(env var: '(\w+)'\)", said):
        if variable not in os.environ:
            said = said.replace(f" (env var: '{variable}')", "")
    return said.replace("Value error, ", "").replace("Input should be", "it should be").rstrip(".")


def fail(failure: Failure, as_json: bool) -> NoReturn:
    """Print a failure, as JSON on stdout or as text on stderr, and exit."""
    with suppress(OSError):  # a closed pipe or a full disk: the exit status says it as well
        if as_json:
            say(failure.as_json())
        else:
            say(*failure.lines(), err=True)
    if failure.code == "out_of_memory":  # Python's own end would wait for threads that could not begin
        drop_output()
        os._exit(failure.exit)
    sys.exit(failure.exit)


def make_output_survive() -> None:
    """Print `?` for characters that the terminal's or the pipe's encoding lacks, such as cp1252."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Windows has programs without a console: None
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Drop output that cannot be written, which would make Python end with another exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)


def discard(*streams: TextIO) -> None:
    """Send what these streams still hold to the null device."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_rooms() -> None:
    """Raise Failure (preflight) where another package shadows one of ours, such as a top-level `recipes`."""
    house = Path(cocktail_cli.__file__).resolve().parent.parent
    for room in ("compress", "recipes", "transport"):
        spec = find_spec(room)
        places = list(spec.submodule_search_locations or []) if spec else []
        if not any(Path(place).resolve().parent == house for place in places):
            raise Failure(
                "preflight",
                f"the package `{room}` at {places[0] if places else 'nowhere'} is not cocktail's",
                hints=("install cocktail in an environment of its own: uv tool install, pipx or a new venv",),
            )


if __name__ == "__main__":
    main()
