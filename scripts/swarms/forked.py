"""Commands in processes of their own that do not each pay six seconds of processor for the imports.

One process imports what `cocktail` needs, and forks for each command: real processes, pids and signals. The
processes that a command starts can be forked as well.

    with Forker() as forker:
        process = forker.start([*COCKTAIL, "join", "-"], environment, folder, (stdin, stdout, stderr))
        process.wait(120)

Run as a module it is that process. It answers requests on its stdin, a datagram of JSON each. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts import ROOT

# What a command would import, and what that imports in its turn.
MODULES: tuple[str, ...] = (
    "cocktail_cli.main",
    "cocktail_cli.volunteer.run_link",
    "cocktail_cli.host.host_session",
    "cocktail_cli.host.run_delegate",
    "recipes.training.loop",
)
OF_EXTENSIONS = (
    *("standby.standby_session", "reach.hub_tunnel", "standby.hub_process"),
    *("aggregators.durable_shards", "aggregators.peer", "aggregators.hub"),
)
MODULES += tuple(
    f"cocktail_cli.extensions.{name}"
    for name in OF_EXTENSIONS
    if (ROOT / "cocktail_cli" / "extensions" / name.replace(".", "/")).with_suffix(".py").is_file()
)
MODULES += ("datasets", "zmq", "transformers.models.gpt_neox.modeling_gpt_neox", "transformers.optimization")
WARM = "scripts.swarms.warm"  # what each of them would work out first
ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # a process to leave
LARGEST = 1 << 20  # bytes of a request
FILES = 8  # of a request, at most
POLL_S = 0.02  # seconds between two questions whether a process has ended
NETWORK = 0x40000000  # CLONE_NEWNET
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class ForkedProcess:
    """A process of a forker, with what is needed of `subprocess.Popen`."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._forker, self._lock = forker, threading.Lock()

    returncode: int | None  # negative: the signal that ended it

    def poll(self) -> int | None:
        """Return the exit status, None while it runs. Until it is returned no other process has this pid."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._forker.ask({"poll": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if timeout is not None and end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal; one that has ended gets none."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that forks. At its end, or ours, it kills what it has forked.

    Args:
        modules: what it imports before.
    """

    def __init__(self, modules: Sequence[str] = (*MODULES, WARM)) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._lock, self._asked = ours, threading.Lock(), 0
        known = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        known["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a fork has no other thread than its own
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", __name__, *modules],
                stdin=its.fileno(),
                env=os.environ | known | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,  # Ctrl-C at the terminal is for who uses it
            )

    def ask(self, request: Mapping[str, object], files: Sequence[int] = ()) -> Any:
        """Send a request with open files; return the answer."""
        with self._lock:
            self._asked += 1
            socket.send_fds(self._socket, [json.dumps([self._asked, request]).encode()], files)
            while text := self._socket.recv(LARGEST):
                number, answer = json.loads(text)
                if number == self._asked:  # else Ctrl-C has interrupted who waited for it
                    return answer
        raise RuntimeError("the process that forks has ended")

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        files: Sequence[int],
        **more: object,
    ) -> ForkedProcess:
        """Start `python ... -m MODULE ARGUMENTS` with these files as stdin, stdout and stderr, and as all of
        its environment; `more` are the other parameters of `become`."""
        module = command.index("-m") + 1
        request = {"environment": dict(environment), "folder": str(folder), "command": command[module:]}
        return ForkedProcess(self, self.ask(request | more, files))

    def forking(self) -> AbstractContextManager[None]:
        """Let `subprocess` fork what is `python -m MODULE ...` from that process, as children of this one."""
        return forking(lambda request, files: self.ask({**request, "orphan": True}, files))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- the process that forks --------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until the other end is closed; in a fork return what it is to become."""
    # As a terminal gives them, and from a fork's first moment on: this may run under nohup, or behind an &.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # it would look through the libraries again and again: a sixth of this time
    for name in sys.argv[1:]:
        import_module(name)
    gc.enable()
    import torch

    torch.set_num_threads(1)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lack {len(threads) - 1} threads of its parent"
    gc.collect()
    gc.freeze()  # a fork does not look through the libraries again, and so does not copy their pages
    asked, forked = socket.socket(fileno=os.dup(0)), set[int]()
    while True:
        text, files, _, _ = socket.recv_fds(asked, LARGEST, FILES)
        if not text:
            break
        number, request = json.loads(text)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            forked.discard(pid)
        else:
            # Python forgets in a fork which signals have come before it is ready for them: these wait.
            signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
            orphan = request.pop("orphan", False)
            answer = fork_orphan() if orphan else os.fork()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
            if not answer:
                asked.close()
                become(files, **request)
                return
            if not orphan:
                forked.add(answer)
            for file in files:
                os.close(file)
        asked.send(json.dumps([number, answer]).encode())
    for pid in forked:
        os.kill(pid, signal.SIGKILL)


def become(
    files: Sequence[int], environment: dict[str, str], folder: str, command: Sequence[str], **special: Any
) -> None:
    """Become the command, in the fork, as if it had been typed.

    Args:
        special: `member` of a network lab, whose machine it runs on; `nice`; `before`, Python to run first;
            `forks`: its own commands are forked as well; `kept`: the numbers of its files beyond the first
            three; `session`: False where it stays in that of who forks it.
    """
    if special.get("session", True):
        os.setsid()
    if member := special.get("member"):
        with open(f"/run/netns/lab-{member}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"the network of {member}")
    os.nice(special.get("nice", 0))
    os.chdir(folder)
    place_files(files, [0, 1, 2, *special.get("kept", ())])
    # Python's own, made anew: those of the parent are other files, and close none of these as they go
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    with forking(copy_that_forks()) if special.get("forks") else nullcontext():
        run(command, special.get("before", ""))


def run(command: Sequence[str], before: str) -> None:
    """Run a module with its arguments, in a process that has just begun."""
    exec(before, {})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def place_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers, which some of the others may have now."""
    from fcntl import F_DUPFD, fcntl  # no Windows has it

    away = [fcntl(file, F_DUPFD, max(*files, *numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(away, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


# ---- what a process starts with `subprocess` ---------------------------------------------------------------

Ask = Callable[[Mapping[str, object], Sequence[int]], int]  # for a fork with these open files; returns its id


@contextmanager
def forking(ask: Ask) -> Iterator[None]:
    """Let `subprocess` fork what is `python -m MODULE ...`, as children of this process.

    Each is the orphan of a process between it and its original, and the kernel gives orphans to the nearest
    ancestor that asks for them.
    """
    executes: Any = subprocess
    execute = executes._fork_exec
    executes._fork_exec = partial(fork_or_execute, ask, execute)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(SUBREAPER, 0, 0, 0, 0)
        executes._fork_exec = execute


def fork_or_execute(ask: Ask, execute: Any, arguments: Sequence[Any], *how: Any) -> int:
    """Stand in for `_fork_exec` of `subprocess`, with its arguments; return the id of the process."""
    _, _, kept, folder, given, stdin, _, _, stdout, _, stderr, _, errors, _, session, *_ = how
    words = [os.fsdecode(word) for word in arguments]
    if words[0] != sys.executable or "-m" not in words:
        return int(execute(arguments, *how))
    environment = dict(os.environ) if given is None else dict(os.fsdecode(x).split("=", 1) for x in given)
    also = [number for number in kept if number != errors]
    request = {
        "environment": environment,
        "folder": os.fsdecode(folder or os.getcwd()),
        "command": words[words.index("-m") + 1 :],
        "kept": also,
        "session": bool(session),
        "forks": True,
    }
    files = [number if file < 0 else file for number, file in enumerate((stdin, stdout, stderr))]
    return ask(request, [*files, *also])


def copy_that_forks() -> Ask:
    """Fork a copy of this process as it is now, which forks again for each that is asked for."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        serve_parent(its)
        raise SystemExit  # a fork that was a command, and has come to its end
    its.close()
    turn = threading.Lock()

    def ask(request: Mapping[str, object], files: Sequence[int]) -> int:
        with turn:
            socket.send_fds(ours, [json.dumps(request).encode()], files)
            return int(ours.recv(LARGEST))

    return ask


def serve_parent(asked: socket.socket) -> None:
    """Fork what the parent asks for, until it has ended; in a fork, become it, and return at its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # they are for the parent, which may let this one go on
    with open(os.devnull) as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)  # who reads what the parent prints sees its end
    while True:
        text, files, _, _ = socket.recv_fds(asked, LARGEST, FILES)
        if not text:
            os._exit(0)
        if pid := fork_orphan():
            for file in files:
                os.close(file)
            asked.send(str(pid).encode())
        else:
            asked.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
            become(files, **json.loads(text))
            return


def fork_orphan() -> int:
    """Fork by a process between; return once it has ended, so that the kernel has given its orphan away."""
    come, go = os.pipe()
    if between := os.fork():
        os.waitpid(between, 0)
        forked = int(os.read(come, LARGEST))
    elif forked := os.fork():
        os.write(go, str(forked).encode())
        os._exit(0)
    os.close(come)
    os.close(go)
    return forked


if __name__ == "__main__":
    serve()
