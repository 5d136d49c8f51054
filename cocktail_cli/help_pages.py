"""The pages of `--help`: options in groups, one line each, without the names of Python types.

Typer's own pages need twice the lines: they give each flag a type, and each table columns that are empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

F = TypeVar("F", bound=Callable[..., Any])
Rows = list[tuple[str, str]]


class CommandTable(typer.Typer):
    """A Typer whose commands have pages of help like those below."""

    def __init__(self, help: str, **more: Any) -> None:
        # without rich: its import alone takes as long as a page
        super().__init__(cls=Group, help=help, no_args_is_help=True, rich_markup_mode=None, **more)

    def command(self, name: str | None = None, **more: Any) -> Callable[[F], F]:
        return super().command(name, cls=Command, **more)


def write_page(command: Any, ctx: Any, formatter: Any) -> None:
    """Write usage, meaning, arguments, and options or commands by group."""
    params = [param for param in command.get_params(ctx) if not param.hidden]
    arguments = [param for param in params if isinstance(param, TyperArgument)]
    options = [param for param in params if isinstance(param, TyperOption)]
    commands = getattr(command, "commands", {}).values()
    words = ["COMMAND"] if commands else [bracketed(argument) for argument in arguments]
    formatter.write(" ".join(["Usage:", ctx.command_path, *words, "[OPTIONS]"]) + "\n")
    formatter.write_paragraph()
    write_meaning(inspect.cleandoc(command.help or ""), formatter)
    write_group("Arguments", [(label(argument), argument.help or "") for argument in arguments], formatter)
    for group, members in grouped(commands, "Commands"):
        rows = [(member.name, first_sentence(member.help or "")) for member in members if not member.hidden]
        write_group(group, rows, formatter)
    for group, members in grouped(options, "Options"):
        write_group(group, [(names_of(option), meaning(option)) for option in members], formatter)
    if command.epilog:
        formatter.write_paragraph()
        formatter.write(command.epilog + "\n")


class Command(TyperCommand):
    format_help = write_page


class Group(TyperGroup):
    format_help = write_page


def write_meaning(text: str, formatter: Any) -> None:
    """Write paragraphs wrapped, and examples line by line, so that they can be copied."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            formatter.write_paragraph()
        title, _, examples = paragraph.partition(": ")
        if title in ("Example", "Examples"):
            formatter.write("Examples:\n" + "".join(f"  {line}\n" for line in examples.split("\n")))
        else:
            formatter.write_text(" ".join(paragraph.split()))


def write_group(title: str, rows: Rows, formatter: Any) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=34)


def grouped(members: Iterable[Any], unnamed: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield each group with its members, in order of appearance. Members without a group are in `unnamed`."""
    groups: dict[str, list[Any]] = {}
    for member in members:
        groups.setdefault(getattr(member, "rich_help_panel", None) or unnamed, []).append(member)
    yield from groups.items()


def label(argument: TyperArgument) -> str:
    return str(argument.metavar or (argument.name or "").upper())


def bracketed(argument: TyperArgument) -> str:
    """Format as `RECIPE`, `[PROMPT]` or `[KEY=VALUE ...]`."""
    text = label(argument) + (" ..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def names_of(option: TyperOption) -> str:
    """Format as `-o, --output-dir DIR`; a flag has no word behind its name."""
    short = [name for name in option.opts if not name.startswith("--")]
    long = [name for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]
    names = "/".join(long) if long else ", ".join(short)
    before = f"{short[0]}, " if short and long else "    " if long else ""
    return f"{before}{names} {'' if option.is_flag or option.count else option.metavar or ''}".rstrip()


def meaning(option: TyperOption) -> str:
    """Return an option's help, with its default where that is a word or a number above 0."""
    default = option.default
    shown = option.show_default and not option.is_flag and isinstance(default, (str, int, float)) and default
    return f"{option.help or ''}{f' [{default}]' if shown else ''}"


def first_sentence(text: str) -> str:
    """Return a text's first sentence, on one line and without its full stop."""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
