"""Commands in processes of their own that do not each pay four seconds of processor for the imports.

One process imports what `cocktail` needs, and forks for each command: real processes, pids and signals.

    with Forker() as forker:
        process = forker.start([*COCKTAIL, "join", "-"], environment, folder, (stdin, stdout, stderr))
        process.wait(60.0)

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
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts import ROOT

# What a command would import, and what that imports in its turn.
MODULES: tuple[str, ...] = (
    "cocktail_cli.main",
    "cocktail_cli.standby",
    "cocktail_cli.volunteer.run_link",
    "cocktail_cli.host.host_session",
    "cocktail_cli.host.run_delegate",
    "recipes.training.loop",
    "transport.aggregators",
    "transport.relay",
    "transport.standby",
)
MODULES += ("datasets", "zmq", "transformers.models.gpt_neox.modeling_gpt_neox", "transformers.optimization")
ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # a process to leave
LARGEST = 1 << 20  # bytes of a request
POLL_S = 0.02  # seconds between two questions whether a process has ended
NETWORK = 0x40000000  # CLONE_NEWNET


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
    """The process that forks. At its end, or ours, it kills what it has forked."""

    def __init__(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._lock, self._asked = ours, threading.Lock(), 0
        known = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        known["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a fork has no other thread than its own
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", __name__],
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
    for name in MODULES:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lack {len(threads) - 1} threads of its parent"
    gc.collect()
    gc.freeze()  # a fork does not look through the libraries again, and so does not copy their pages
    asked, forked = socket.socket(fileno=os.dup(0)), set[int]()
    while True:
        text, files, _, _ = socket.recv_fds(asked, LARGEST, 3)
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
            answer = os.fork()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
            if not answer:
                asked.close()
                become(files, **request)
                return
            forked.add(answer)
            for file in files:
                os.close(file)
        asked.send(json.dumps([number, answer]).encode())
    for pid in forked:
        os.kill(pid, signal.SIGKILL)


def become(
    files: Sequence[int],
    environment: dict[str, str],
    folder: str,
    command: Sequence[str],
    **special: Any,
) -> None:
    """Become the command, in the fork, as if it had been typed.

    Args:
        special: `member` of a network lab, whose machine it runs on; `nice`; `before`, Python to run first.
    """
    os.setsid()
    if member := special.get("member"):
        with open(f"/run/netns/lab-{member}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"the network of {member}")
    os.nice(special.get("nice", 0))
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # Python's own, made anew: those of the parent are other files
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    exec(special.get("before", ""), {})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
