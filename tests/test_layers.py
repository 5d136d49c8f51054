"""The house keeps its walls: who may import what, what a start costs, what runs on every system."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("compress", "transport", "recipes", "cocktail_cli")
HEAVY = ("zmq", "torch", "transformers", "datasets", "peft", "trl", "starlette", "uvicorn")

# room -> packages it may import beside the standard library and itself: the table of the README
MAY_IMPORT = {
    "compress": "torch numpy lz4 zstandard triton numba llvmlite",
    "transport": "zmq msgspec",
    "recipes": "compress torch numpy transformers tokenizers datasets peft trl pydantic pydantic_core yaml "
    "safetensors huggingface_hub jinja2",
    "cocktail_cli": "compress transport recipes typer rich platformdirs starlette uvicorn torch "
    "transformers yaml pynvml",
}

UNIX_ONLY = {
    "os": {"fork", "forkpty", "killpg", "setsid", "getpgid", "setpgid", "getuid", "geteuid", "mkfifo"},
    "signal": {
        "SIGKILL",
        "SIGHUP",
        "SIGUSR1",
        "SIGUSR2",
        "SIGCHLD",
        "SIGALRM",
        "alarm",
        "pause",
        "setitimer",
    },
}
UNIX_MODULES = {"fcntl", "pwd", "grp", "resource", "termios", "tty", "pty"}


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
    ]

    assert found == []


def test_only_show_imports_rich() -> None:
    users = [path.name for path in files("cocktail_cli") if "rich" in tops(path)]

    assert users == ["show.py"]


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
    """What Windows lacks stands under a test of the platform, or in a `try` that takes ImportError."""
    assert [line for path in files(room) for line in unix_only(path)] == []


def unix_only(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {id(inner) for node in ast.walk(tree) if asks_for_platform(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in UNIX_ONLY.get(node.value.id, ()):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.value.id}.{node.attr}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for module in set(imports(node)) & UNIX_MODULES:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {module}"


def asks_for_platform(node: ast.AST) -> bool:
    if isinstance(node, ast.Try):
        return any("ImportError" in ast.dump(handler) for handler in node.handlers)
    if not isinstance(node, (ast.If, ast.IfExp)):
        return False
    test = ast.unparse(node.test)
    return "os.name" in test or "sys.platform" in test or "hasattr(" in test


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_importing_the_command_leaves_torch_alone() -> None:
    done = run(
        "-c", "import sys, cocktail_cli.main; print(sorted(set(sys.modules) & set(sys.argv[1:])))", *HEAVY
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_answers_in_half_a_second() -> None:
    """In processor time where the system tells it: a busy machine stretches the clock."""
    best = min(timed("-m", "cocktail_cli", "--help") for _ in range(3))

    assert best < 0.5


def timed(*arguments: str) -> float:
    started, before = time.perf_counter(), os.times()
    done = run(*arguments)
    seconds, after = time.perf_counter() - started, os.times()
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used or seconds  # Windows says 0


def test_scripts_can_be_run() -> None:
    if os.name == "nt":
        pytest.skip("Windows has no executable bit")
    for name in ("scripts/demo", "scripts/chaos", "scripts/test", "scripts/check", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
