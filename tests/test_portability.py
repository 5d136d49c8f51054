"""Rooms depend on no system: what Windows lacks is guarded by a test of the platform."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("compress", "transport", "recipes", "cocktail_cli")

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
NO_FORK = "`in_child` forks where it can"
GUARDED = {
    "cocktail_cli/extensions/multi_gpu/gpu_processes.py pass_fds": "--gpus is refused on Windows",
    "cocktail_cli/machine/own_process.py os.fork": NO_FORK,
    "cocktail_cli/machine/own_process.py os.setsid": NO_FORK,
    "cocktail_cli/machine/own_process.py os.WNOHANG": NO_FORK,
}
FORKS = {"fork", "forkserver"}  # as a word: multiprocessing's ways to start a process


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_in_a_room_runs_on_unix_only(room: str) -> None:
    """A name that Windows lacks is under a test of the platform, or in a `try` that handles its absence."""
    found = [line for path in sorted((ROOT / room).rglob("*.py")) for line in unix_only(path)]

    assert [line for line in found if re.sub(r":\d+", "", line) not in GUARDED] == []


def test_what_is_guarded_elsewhere_is_still_there() -> None:
    found = {
        re.sub(r":\d+", "", line)
        for path in (ROOT / "cocktail_cli").rglob("*.py")
        for line in unix_only(path)
    }

    assert found == {line for line in GUARDED if (ROOT / line.split()[0]).exists()}


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
        yield from imported_by(node) & UNIX_MODULES
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


def imported_by(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {node.module} if node.level == 0 and node.module else set()


@pytest.mark.skipif(os.name == "nt", reason="a script for a shell")
@pytest.mark.parametrize("there", [True, False])
def test_scripts_install_by_uv_where_it_is_and_by_pip_where_it_is_not(tmp_path: Path, there: bool) -> None:
    programs, venv = tmp_path / "programs", tmp_path / "venv" / "bin"
    for folder in (programs, venv):
        folder.mkdir(parents=True)
    (programs / "cat").symlink_to(str(shutil.which("cat")))
    told = f'echo "${{0##*/}} $*" >> {shlex.quote(str(tmp_path / "told"))}'
    real = f'[ "$1" = -c ] && exec {shlex.quote(sys.executable)} "$@"'
    for program, text in ((venv / "python", f"{real}\n{told}"), (programs / "uv", told)):
        if there or program.name == "python":
            program.write_text(f"#!{shutil.which('bash')}\n{text}\n")
            program.chmod(0o755)

    code = ". scripts/env && environment run && environment run"
    outside = {"PATH": str(programs), "COCKTAIL_VENV": str(venv.parent)}
    subprocess.run([str(shutil.which("bash")), "-c", code], env=outside, cwd=ROOT, check=True)

    how = "uv pip install --python" if there else "python -m pip install"
    [line] = (tmp_path / "told").read_text().splitlines()
    assert line.startswith(how), "once, as the second time finds it there"
