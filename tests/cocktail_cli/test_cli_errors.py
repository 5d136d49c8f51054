"""Every error has a code, an exit status and words; bugs alone are exit 1."""

import errno
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cocktail_cli.errors import EXIT, Failure, Problem, explain, is_fault, writing_to
from cocktail_cli.main import command_table, options_of, run
from recipes.errors import DataError, ForeignPacket, ForeignSamples, HubUnreachable, ModelError, RecipeError
from recipes.snapshots import WrongFold
from transport.protocol import (
    AddressInUse,
    LinkLost,
    NoRoom,
    ProtocolError,
    RefusedByHub,
    TooLong,
    Unreachable,
    UrlError,
)


@dataclass(frozen=True)
class Case:
    error: BaseException
    exit: int


CASES = [
    Case(UrlError("the run URL is incomplete"), 2),
    Case(RecipeError([Problem("a.yaml", 3, "training.lr", "no such key")]), 3),
    Case(DataError("rows.jsonl:7 is no JSON"), 3),
    Case(ModelError("no such model folder: x"), 3),
    Case(WrongFold("the packet of round 3: its checksum does not match"), 9),
    Case(AddressInUse("0.0.0.0", 29400, "in use"), 4),
    Case(Unreachable("h", 1, "tcp", "refused"), 5),
    Case(HubUnreachable("no answer"), 5),
    Case(RefusedByHub("token", "the token is wrong"), 6),
    Case(RefusedByHub("over", "the run is over"), 7),
    Case(MemoryError("full"), 8),
    Case(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes"), 8),
    Case(RuntimeError("could not create a primitive"), 8),
    Case(ImportError("libtorch_cpu.so: failed to map segment from shared object"), 8),
    Case(OSError(errno.ENOSPC, "No space left on device", "model.safetensors"), 8),
    Case(OSError(errno.EDQUOT, "Disk quota exceeded"), 8),
    Case(OSError(errno.EFBIG, "File too large", "model.safetensors"), 8),
    Case(RuntimeError("SafetensorError: I/O error: File too large (os error 27)"), 8),
    Case(OSError(errno.ENOSPC, "a model of 24 GB does not fit", "outputs"), 8),
    Case(RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"), 8),
    Case(PermissionError(errno.EACCES, "Permission denied", "/opt/out"), 4),
    Case(ProtocolError("a message has no end"), 6),
    Case(TooLong("lease/0 is announced with 9 bytes"), 6),
    Case(ForeignSamples("no packed samples"), 6),
    Case(ForeignPacket("an aggregate cannot be used"), 6),
    Case(NoRoom("the disk is too full", ("make room",)), 8),
    Case(LinkLost("silent for 30 s"), 75),
    Case(OSError(errno.EROFS, "Read-only file system", "/opt/out"), 4),
    Case(FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/foo"), 4),
    Case(NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/x"), 4),
    Case(FileExistsError(errno.EEXIST, "File exists", "file"), 4),
    Case(IsADirectoryError(errno.EISDIR, "Is a directory", "outputs"), 4),
    Case(OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 4),
    Case(OSError(errno.ENOTTY, "Inappropriate ioctl"), 1),
    Case(KeyError("a bug"), 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case.error).__name__)
def test_an_error_has_its_documented_exit_status(case: Case) -> None:
    failure = explain(case.error)

    assert failure.exit == case.exit
    assert failure.hints or case.exit != 4 or not isinstance(case.error, OSError), "a path has a remedy"
    assert "\n" not in failure.message


@pytest.mark.parametrize("command", command_table([]).commands)
def test_another_place_is_chosen_by_options_that_the_command_has(command: str) -> None:
    options = options_of(command_table([]), [command])

    [hint] = explain(OSError(errno.EROFS, "Read-only file system", "/x"), options).hints

    assert set(re.findall(r"(-\S+) DIR", hint)) == {"-o", "--cache-dir"} & options


def test_an_error_before_there_are_commands_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocktail_cli.main.command_table", lambda typed: [][0])
    with pytest.raises(SystemExit, match=r"^1$"):
        run(as_json=False, loud=False)


@pytest.mark.parametrize("error", [TooLong("5 bytes"), ForeignSamples("5 bytes"), ForeignPacket("5 bytes")])
def test_what_no_honest_hub_says_is_told_as_the_hubs_fault(error: Exception) -> None:
    failure = explain(error)

    assert failure.message == "the hub is at fault: 5 bytes"
    assert "ask the run's host" in failure.hints[0]
    assert is_fault(error)
    assert not is_fault(LinkLost("silent for 30 s"))


def test_memory_that_ran_out_is_told_however_it_was_passed_on() -> None:
    error = ModelError("transformers cannot load this")
    error.__cause__ = MemoryError()

    assert explain(error).code == "out_of_memory"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_whatever_fails_where_no_memory_is_left_fails_for_want_of_it() -> None:
    said = """
import resource
from pathlib import Path
from cocktail_cli.errors import explain
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
print(explain(ImportError("cannot import name")).code)
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
print(explain(ImportError("cannot import name")).code)
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["unexpected", "out_of_memory"]


def test_a_process_without_memory_ends_at_once_whatever_its_threads_wait_for() -> None:
    """A thread that had no memory to begin with is waited for for ever, also at Python's own end."""
    said = """
import threading
from cocktail_cli import main
threading.Thread(target=threading.Event().wait).start()
main.fail(main.explain(MemoryError("full")), False)
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=600)

    assert (done.returncode, "memory" in done.stderr) == (8, True)


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(Failure) as full, writing_to(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert full.value.message == f"the disk is full: no space left at {tmp_path}"


def test_problems_are_told_with_place_key_and_hint() -> None:
    problems = [
        Problem("my.yaml", 11, "training.learing_rate", "unknown key", "did you mean `learning_rate`?"),
        Problem("my.yaml", 2, "name", "is missing"),
    ]

    lines = list(explain(RecipeError(problems, "my.yaml")).lines())

    assert lines == [
        "error: my.yaml has 2 problems",
        "  my.yaml:2   name                   is missing",
        "  my.yaml:11  training.learing_rate  unknown key (did you mean `learning_rate`?)",
        "hint: its keys: cocktail recipes schema training",
    ]


def test_an_error_as_json_is_one_object_that_programs_can_read() -> None:
    failure = Failure(
        "recipe_invalid", "bad", (Problem("a.yaml", 1, "lr", "unknown", "learning_rate"),), ("look",)
    )

    assert json.loads(failure.as_json()) == {
        "v": 1,
        "error": {
            "code": "recipe_invalid",
            "exit": 3,
            "message": "bad",
            "problems": [
                {"message": "unknown", "file": "a.yaml", "line": 1, "key": "lr", "hint": "learning_rate"}
            ],
            "hints": ["look"],
        },
    }


def test_exit_codes_are_those_of_the_readme() -> None:
    assert sorted(set(EXIT.values())) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 75, 130, 143]


def test_a_run_whose_pipe_was_closed_is_recorded_with_that_reason_and_not_as_a_bug() -> None:
    failure = explain(BrokenPipeError(errno.EPIPE, "Broken pipe"))

    assert (failure.code, failure.message) == ("terminated", "its output was closed by what read it")
    assert "--detach" in failure.hints[0]


TOKEN = "k" * 43 + "." + "t" * 32


@pytest.mark.parametrize("said", ["cocktail://{}@h:1/run-1", "'cocktail:/{}@h'", "cocktail://{}h:1/run-1"])
def test_no_error_shows_the_secrets_of_a_run_url_however_it_was_typed(said: str) -> None:
    typed = said.format(TOKEN)
    failure = Failure("usage", f"what is {typed}?", (Problem(typed, None, "", "none"),), (f"not {typed}",))

    shown = "\n".join([*failure.lines(), failure.as_json(), str(failure)])
    assert "tttt" not in shown
    assert shown.count("cocktail:/") == 7
    assert Failure("usage", "which?", hints=("cocktail join cocktail://...",)).hints[0].endswith("//...")
