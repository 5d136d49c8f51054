"""The failures of commands, and their exit codes: one table for all commands.

Every room has its own small family of exceptions. Only here do they become a `Failure`: a code for programs,
a sentence and hints for people, and an exit code. The families are looked up by name, so that an error in a
recipe does not cost the import of ZeroMQ, nor a wrong URL the import of torch.
"""

from __future__ import annotations

import errno
import json
import mmap
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.errors import Problem, RecipeError, problem_lines

from .foreign_text import one_line, readable
from .installation import command_to_add

STATUSES = {  # exit status -> codes
    1: ("unexpected",),
    2: ("usage", "url_invalid"),
    3: ("recipe_invalid", "dataset_invalid", "model_invalid", "run_unknown"),
    4: ("preflight", "port_in_use", "output_in_use"),
    5: ("unreachable",),
    6: ("rejected",),
    7: ("no_result",),
    8: ("out_of_memory", "out_of_disk"),
    9: ("altered",),
    75: ("lost", "rank_lost"),  # EX_TEMPFAIL: restart me
    130: ("interrupted",),
    143: ("terminated",),
}
EXIT = {code: status for status, codes in STATUSES.items() for code in codes}


# the key and token of a run URL, however the rest of it was typed
SECRETS = re.compile(r"(cocktail:/+)(?:[^\s'\"/@]+(?=@)|[\w.-]{20,})")


def shown_line(text: str) -> str:
    """Make a text one line that is safe to show: no secret of a run URL is in it."""
    return SECRETS.sub(r"\1***", one_line(text))


class Failure(Exception):
    """Ends a command. `code` is a key of EXIT, the message one sentence, each hint a thing to do. Others may
    have a part in the words: they are safe to show.
    """

    def __init__(
        self, code: str, message: str, problems: tuple[Problem, ...] = (), hints: tuple[str, ...] = ()
    ) -> None:
        assert code in EXIT, code
        self.code = code
        self.message = shown_line(message)
        self.problems = tuple(Problem(**readable(asdict(problem), shown_line)) for problem in problems)
        self.hints = tuple(map(shown_line, hints))
        super().__init__(self.message)

    @classmethod
    def of_json(cls, error: dict[str, Any]) -> Failure:
        """Read the failure of another process of ours from its --json output."""
        problems = tuple(Problem(**problem) for problem in error["problems"])
        return cls(error["code"], error["message"], problems, tuple(error["hints"]))

    @property
    def exit(self) -> int:
        """The exit status of the command."""
        return EXIT[self.code]

    def as_json(self) -> str:
        """Format as one line: `{"v":1,"error":{"code","exit","message","problems","hints"}}`."""
        error = {
            "code": self.code,
            "exit": self.exit,
            "message": self.message,
            "problems": [asdict(problem) for problem in self.problems],
            "hints": list(self.hints),
        }
        return json.dumps({"v": 1, "error": error})

    def lines(self) -> Iterator[str]:
        """Yield the lines for people, on stderr."""
        yield f"error: {self.message}"
        yield from problem_lines(self.problems)
        for hint in self.hints:
            yield f"hint: {hint}"


def damaged(path: Path, why: str, *hints: str) -> Failure:
    """Make the failure of a file that is not what was written."""
    return Failure("altered", f"{path} is damaged: {why}", hints=hints)


def hubs_fault(message: str) -> Failure:
    """Make the failure of a hub that offers what no hub of this version does."""
    return Failure("rejected", message, hints=(FAULT_HINT,))


class Interrupted(BaseException):
    """A second Ctrl-C or SIGTERM, which ends at once. Not an Exception: no handler may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit = 128 + signum


# Exceptions of the rooms, by room and name of the class -> code. Subclasses are found through their bases.
CODES = {
    "recipes.ForeignSamples": "rejected",
    "recipes.DataError": "dataset_invalid",
    "recipes.ForeignPacket": "rejected",
    "recipes.WrongFold": "altered",
    "recipes.ModelError": "model_invalid",
    "recipes.InputError": "recipe_invalid",
    "recipes.HubUnreachable": "unreachable",
    "transport.UrlError": "url_invalid",
    "transport.AddressInUse": "port_in_use",
    "transport.Unreachable": "unreachable",
    "transport.RefusedByHub": "rejected",
    "transport.NotServed": "rejected",
    "transport.ProtocolError": "rejected",
    "transport.NoRoom": "out_of_disk",
    "transport.LinkLost": "lost",
    "transport.LedgerBusy": "output_in_use",
    "transport.LedgerError": "preflight",
    "recipes.PartLost": "rank_lost",
    "recipes.MemoryFull": "out_of_memory",
    "torch.OutOfMemoryError": "out_of_memory",
    "torch.cuda.OutOfMemoryError": "out_of_memory",
    "builtins.MemoryError": "out_of_memory",
}

# The meaning of a class or of its code, printed before the room's own text.
SAID = {
    "transport.ProtocolError": "the hub does not keep to the protocol: ",
    "unreachable": "cannot be reached: ",
    "rejected": "the hub refused: ",
    "no_result": "the run gave no result: ",
    "lost": "the connection to the hub is lost: ",
}

TOLD = ("rejected", "no_result")  # codes of errors in the other side's words, which may name any cause
# Of these the hub is to blame, and not this machine: it names what no hub of such a run would.
FAULTS = {"transport.ProtocolError", "recipes.ForeignSamples", "recipes.ForeignPacket"}
FAULT_HINT = "ask the run's host, and join it no more before you know why: no hub of this version says that"

# Libraries wrap the system's error in texts of their own, which contain it.
TOO_LARGE = "File too large"  # for FAT32, or for `ulimit -f`
FULL_DISK = ("No space left on device", "disk is full", "Disk quota exceeded", TOO_LARGE)
FULL_MEMORY = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "std::bad_alloc",
    "backend out of memory",
    "failed to map segment from shared object",  # a library that does not fit
    "could not create a primitive",  # oneDNN, which says no more
)
ROOM = 64 << 20  # bytes: with less available, any failure is for want of memory
OTHER_PLACE = "choose another place"  # `explain` adds how
OWN_FILES = "for cocktail's own files COCKTAIL_HOME=DIR cocktail ..."
PLACES = ("-o", "--cache-dir")  # options that choose a folder, in the commands that have them
PATH_HINTS = {  # errno of a path that the user chose -> remedy
    errno.EACCES: f"{OTHER_PLACE}; or change its rights",
    errno.EPERM: f"{OTHER_PLACE}; or change its rights",
    errno.EROFS: OTHER_PLACE,
    errno.ENOENT: f"no folder can be made there, or it was removed meanwhile; {OTHER_PLACE}",
    errno.ENOTDIR: f"a file is where a folder is needed; {OTHER_PLACE}",
    errno.EEXIST: f"a file is where a folder is needed; {OTHER_PLACE}",
    errno.EISDIR: "a folder is where a file is needed: give the path of a file",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: f"a link leads to itself; {OTHER_PLACE}",
    errno.EINVAL: f"this system allows no such name; {OTHER_PLACE}",
}
TRACEBACK_HINT = "-v shows the traceback"
MEMORY_HINT = "lower --micro-batch-size on this machine, or data.max_length in the recipe"
PORT_HINT = "--port 0 takes any free port; another --port or --bind may be free too"
URL_HINT = "copy the whole line between its quotes, or ask the run's host for it again"
PIPE_HINT = "write the output to a file, or launch with --detach"
NAME_HINT = "check this machine's connection, and the host's name in the URL"
HUB_HINT = "the run may be paused (`join --wait 12h` waits) or over, or its port closed to you: ask its host"

# What to do about an error of a room that says nothing of its own, by class or code.
REMEDIES = {
    "recipes.DataError": "mend the data there; `cocktail preview RECIPE` reads them again in seconds",
    "recipes.WrongFold": "`cocktail verify RUN` says what differs; put `ledger` and `base` back from a copy",
    "recipes.ModelError": "--model: the id of a model on the hub, or a folder as save_pretrained writes it",
    "recipes.HubUnreachable": "try again; HF_HUB_OFFLINE=1 uses what is on this disk; or give a local path",
    "recipes.PartLost": "start that machine again, and the first one, if it does not join again by itself",
    "recipe_invalid": "its keys: cocktail recipes schema",
    "transport.NotServed": "start it again: another peer or the hub may have it",
    "transport.NoRoom": "make room there, or COCKTAIL_HOME=DIR on a larger disk",
    "transport.LedgerBusy": "end the other process, or take another folder: -o DIR",
    "transport.LedgerError": "put `ledger` back from a copy, or `cocktail export` one of the snapshots",
    "rejected": "ask the run's host, who may have a newer run URL",
    "no_result": "ask the run's host for the model, or for the next run",
    "lost": "start the same command again; `cocktail doctor RUN_URL` says which part fails",
    "out_of_memory": MEMORY_HINT,
    "port_in_use": PORT_HINT,
    "url_invalid": URL_HINT,
    "unreachable": HUB_HINT,
}


def explain(error: BaseException, options: Collection[str] = ()) -> Failure:
    """Turn any exception into the Failure that the user reads, who can type `options`. Unknown exceptions are
    bugs: exit 1."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, BrokenPipeError):
        return Failure("terminated", "its output was closed by what read it", hints=(PIPE_HINT,))
    code = code_of(error)
    if disk_is_full(error):
        return out_of_disk(getattr(error, "filename", None) or "the output folder", error=error)
    if memory_is_full(error):
        hints = hints_of(error)
        said = str(error) if hints else "this machine's memory is full"
        return Failure("out_of_memory", said, hints=hints or (MEMORY_HINT,))
    if isinstance(error, OSError) and error.filename and error.errno in PATH_HINTS:
        ways = "".join(f"{option} DIR, " for option in PLACES if option in options) + OWN_FILES
        hints = (PATH_HINTS[error.errno].replace(OTHER_PLACE, f"{OTHER_PLACE}: {ways}"),)
        return Failure("preflight", f"cannot use {error.filename}: {error.strerror}", hints=hints)
    problems = tuple(error.problems) if isinstance(error, RecipeError) else ()
    # Where a room lists problems, its text repeats them below its first line.
    said = str(error).split("\n")[0] if problems else " ".join(str(error).split())
    if code == "unexpected":
        return Failure(code, f"{type(error).__name__}: {said}", hints=(TRACEBACK_HINT,))
    hints = hints_of(error)
    if is_fault(error):
        return Failure(code, f"the hub is at fault: {said}", hints=hints or (FAULT_HINT,))
    if not hints and "(hint: " not in said:
        remedy = REMEDIES.get(family_of(error)) or REMEDIES[code]
        hints = schema_hint(problems) or (NAME_HINT if getattr(error, "layer", "") == "dns" else remedy,)
    meaning = SAID.get(family_of(error), SAID.get(code, ""))
    return Failure(code, meaning + (said or code.replace("_", " ")), problems, hints)


def schema_hint(problems: tuple[Problem, ...]) -> tuple[str, ...]:
    """Hint at the command that lists the keys of the section with the first problem."""
    sections = [
        p.key.partition(".")[0] for p in problems if "." in p.key and (p.line or p.file == "override")
    ]
    return (f"its keys: cocktail recipes schema {sections[0]}",) if sections else ()


def disk_is_full(error: BaseException) -> bool:
    """Tell whether an error means a full disk, whichever library raised it."""
    if code_of(error) in TOLD:
        return False
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
        words in str(error) for words in FULL_DISK
    )


def memory_is_full(error: BaseException | None) -> bool:
    """Tell whether an error, or one of its causes, means that memory is full."""
    if error is not None and code_of(error) in TOLD:
        return False
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in FULL_MEMORY):
            return True
        error = error.__cause__
    return cramped()


def cramped() -> bool:
    """Tell whether this process gets no more memory. Libraries then raise anything: a module whose import
    broke halfway, with its error swallowed, later lacks a name."""
    try:
        mmap.mmap(-1, ROOM).close()
    except OSError:
        return True
    return False


def out_of_disk(
    place: str | Path,
    hints: tuple[str, ...] = ("make room there, then start again",),
    error: BaseException | None = None,
) -> Failure:
    why = "a file is too large for FAT32 or `ulimit -f`" if TOO_LARGE in str(error) else "no space left"
    return Failure("out_of_disk", f"the disk is full: {why} at {place}", hints=hints)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name `folder` in errors of a full disk, most of which do not say which disk it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Failure) or not disk_is_full(error):
            raise
        named = Path(getattr(error, "filename", None) or folder)  # a cache elsewhere, which has its own disk
        elsewhere = named.is_absolute() and folder.resolve() not in (named, *named.parents)
        raise out_of_disk(named if elsewhere else folder, error=error) from error


def code_of(error: BaseException) -> str:
    """Return the key of EXIT for an exception of any room."""
    code = CODES.get(family_of(error), "unexpected")
    return "no_result" if code == "rejected" and getattr(error, "code", "") == "over" else code


def family_of(error: BaseException) -> str:
    """Return the key of CODES for an exception; "" where it has none."""
    return next((name for name in families(error) if name in CODES), "")


def is_fault(error: BaseException) -> bool:
    """Tell whether an error says that a hub names what no honest one would."""
    return bool(FAULTS.intersection(families(error)))


def families(error: BaseException) -> list[str]:
    """List the classes of an exception by room and name, from its own on."""
    return [f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(error).__mro__]


def hints_of(error: BaseException) -> tuple[str, ...]:
    """Return `error.hints` or `error.hint`, where a room gives them, after the command that installs the
    package that is missing."""
    hints = getattr(error, "hints", None) or getattr(error, "hint", None) or ()
    hints = (hints,) if isinstance(hints, str) else tuple(hints)
    package = getattr(error, "package", None)
    return (command_to_add(package), *hints) if package else hints
