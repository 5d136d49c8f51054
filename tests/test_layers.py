"""The house keeps its walls: who may import what, what a start costs, what runs on every system."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from processor_time import half_a_second, timed

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("compress", "transport", "recipes", "cocktail_cli")
HEAVY = ("zmq", "torch", "transformers", "datasets", "peft", "trl", "starlette", "uvicorn")

# room -> packages it may import beside the standard library and itself: the table of the README
MAY_IMPORT = {
    "compress": "torch numpy lz4 zstandard triton numba llvmlite",
    "transport": "zmq msgspec",
    "recipes": "compress torch numpy transformers tokenizers datasets peft trl pydantic pydantic_core yaml "
    "safetensors huggingface_hub jinja2",
    "cocktail_cli": "compress transport recipes typer rich platformdirs tomli starlette uvicorn torch "
    "transformers yaml pynvml",
}

# What Windows lacks, by module; much of it macOS as well.
UNIX_ONLY = {
    "os": "chown chroot fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups "
    "getloadavg getpgid getpriority getsid getuid killpg lchown memfd_create mkfifo mknod "
    "nice openpty pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev "
    "sched_getaffinity sched_setaffinity sched_setscheduler sched_yield sendfile setegid "
    "seteuid setgid setpgid setpriority setsid setuid splice statvfs sysconf uname wait wait3 "
    "wait4 waitid WNOHANG O_CLOEXEC O_DIRECT O_DIRECTORY O_NOFOLLOW O_TMPFILE",
    "signal": "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 alarm "
    "getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigwait",
    "socket": "AF_UNIX AF_NETLINK SO_REUSEPORT sendmsg recvmsg",
    "time": "clock_gettime tzset",
    "mmap": "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE MADV_DONTNEED",
}
UNIX_MODULES = {"fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "curses", "readline", "syslog"}
UNIX_ARGUMENTS = {"pass_fds", "preexec_fn"}  # of subprocess
UNIX_PATHS = ("/proc", "/sys/", "/dev/", "/tmp", "/etc/", "/var/", "/usr/")
# What runs behind a guard elsewhere: where, and what guards it.
GUARDED = {
    "cocktail_cli/volunteer/gpu_processes.py pass_fds": "machine.pick_devices refuses --gpus on Windows"
}
FORKS = {"fork", "forkserver"}  # as a word: multiprocessing's ways to start a process


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def at_the_top(tree: ast.Module) -> Iterator[str]:
    """What is imported when the file is: everything outside functions and `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    allowed = set(MAY_IMPORT[room].split()) | {room} | set(sys.stdlib_module_names)

    strangers = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files(room)
        for module in imports(ast.parse(path.read_text(encoding="utf-8")))
        if module.split(".")[0] not in allowed
    ]

    assert strangers == []


def test_no_file_of_the_command_imports_torch_at_its_top() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files("cocktail_cli")
        for module in at_the_top(ast.parse(path.read_text(encoding="utf-8")))
        if module.split(".")[0] in (*HEAVY, "rich")
        and path.name != "live_view.py"  # imported where it is used
    ]

    assert found == []


def test_only_the_live_view_imports_rich() -> None:
    users = [path.name for path in files("cocktail_cli") if "rich" in tops(path)]

    assert users == ["live_view.py"]


def tops(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imports(ast.parse(path.read_text(encoding="utf-8")))}


def test_click_is_never_imported_because_typer_brings_its_own() -> None:
    assert [path for room in ROOMS for path in files(room) if "click" in tops(path)] == []


def test_sockets_and_clocks_of_transport_stay_in_its_shells() -> None:
    """The state machines are told the time and are given bytes, so they can be run in a test without
    waiting.
    """
    for name in ("hub_state", "peer_state", "messages"):
        path = ROOT / "transport" / f"{name}.py"
        if path.exists():
            assert tops(path).isdisjoint({"zmq", "socket", "time", "threading", "asyncio", "selectors"}), path


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_in_a_room_runs_on_unix_only(room: str) -> None:
    """What Windows lacks stands under a test of the platform, or in a `try` that takes what is missing."""
    found = [line for path in files(room) for line in unix_only(path)]

    assert [line for line in found if re.sub(r":\d+", "", line) not in GUARDED] == []


def test_what_is_guarded_elsewhere_is_still_there() -> None:
    found = {re.sub(r":\d+", "", line) for path in files("cocktail_cli") for line in unix_only(path)}

    assert found == GUARDED.keys()


def unix_only(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {id(inner) for node in ast.walk(tree) if asks_for_platform(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in guarded:
            for what in lacking_on_windows(node):
                yield f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 0)} {what}"


def lacking_on_windows(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.attr in UNIX_ONLY.get(node.value.id, "").split():
            yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from set(imports(node)) & UNIX_MODULES
        if isinstance(node, ast.ImportFrom):
            yield from {alias.name for alias in node.names} & set(
                UNIX_ONLY.get(node.module or "", "").split()
            )
    elif isinstance(node, ast.keyword) and node.arg in UNIX_ARGUMENTS:
        yield str(node.arg)
    elif isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        if text.startswith(UNIX_PATHS) or text in FORKS:
            yield repr(text)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.fork()",
        "import signal\nsignal.SIGKILL",
        "import fcntl",
        "from os import killpg",
        "import os\nos.getuid()",
        "open('/proc/self/statm')",
        "get_context('fork')",
        "Popen(['x'], preexec_fn=f)",
        "import resource",
    ],
)
def test_what_windows_lacks_is_found_where_nothing_asks_for_the_platform(source: str) -> None:
    assert [what for node in ast.walk(ast.parse(source)) for what in lacking_on_windows(node)] != []


def test_what_windows_has_is_not_called_unix_only() -> None:
    tree = ast.parse("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nopen('data/x')")

    assert [what for node in ast.walk(tree) for what in lacking_on_windows(node)] == []


def asks_for_platform(node: ast.AST) -> bool:
    if isinstance(node, ast.Try):
        taken = " ".join(ast.dump(handler) for handler in node.handlers)
        return "ImportError" in taken or "AttributeError" in taken
    if not isinstance(node, (ast.If, ast.IfExp)):
        return False
    test = ast.unparse(node.test)
    return "os.name" in test or "sys.platform" in test or "hasattr(" in test


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_importing_the_command_leaves_torch_and_rich_alone() -> None:
    done = run(
        "-c",
        "import sys, cocktail_cli.main; print(sorted(set(sys.modules) & set(sys.argv[1:])))",
        *HEAVY,
        "rich",
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_answers_in_half_a_second() -> None:
    seconds, said = timed("-m", "cocktail_cli", "--help")

    assert "launch" in said
    assert seconds < half_a_second()


def test_scripts_can_be_run() -> None:
    if os.name == "nt":
        pytest.skip("Windows has no executable bit")
    for name in ("scripts/demo", "scripts/chaos", "scripts/test", "scripts/check", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name


def test_every_script_is_named_in_their_readme() -> None:
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"`([\w*]+(?:\.py)?)`", text)
    files = [file.name for file in (ROOT / "scripts").iterdir() if file.is_file() and file.suffix != ".md"]

    assert [name for name in files if name != "env" and not any(fnmatch(name, one) for one in said)] == []
