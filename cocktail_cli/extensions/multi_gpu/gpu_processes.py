"""The processes that share this peer's model (`--gpus N`): started, called, and ended.

A request on stdin is a line of JSON, which bytes may follow; the answer on stdout is a line of JSON. Requests
are answered in turn, but for those `beside`: a rank answers them while it computes, so that no question of an
exchange waits for a micro-batch. When this process ends, in any way, so does their stdin, and so do they.
When one of them ends the others cannot go on: all are ended, and the caller is told why.

When one runs out of memory, the others may wait for it in the middle of a layer and cannot be interrupted. So
each saves its part of the local model and of the optimizer state, all are ended, and as many start again from
there. They have no terminal: Ctrl-C is for this process alone.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.errors import Failure
from recipes.hardware import usable_cores

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.training import Peer

SILENT = 600.0  # seconds for an answer; collectives between ranks time out before
GRACE = 2.0  # seconds to hear from all, once one has failed: the first need not be the cause
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

Answer = dict[str, Any]
Answers = queue.SimpleQueue[tuple[int, Answer | None]]  # by rank; None: it has ended


@dataclass
class Generation:
    """The processes of all ranks, and their answers."""

    processes: list[subprocess.Popen[bytes]]
    answers: Answers = field(default_factory=queue.SimpleQueue)
    beside: Answers = field(default_factory=queue.SimpleQueue)
    listeners: list[threading.Thread] = field(default_factory=list)
    ended: bool = False  # by this process

    def end(self) -> None:
        self.ended = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        self.end()
        for thread in self.listeners:
            thread.join()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not written yet
                    pipe.close()


class GpuProcesses:
    """Runs one process for each device.

    Args:
        devices: `cuda:0`, `cuda:1`, ...; `cpu` several times, to try it out.
        lost: called in a thread when one of them has ended unasked.
        vram_limit: bytes that each may take of its GPU.
    """

    def __init__(
        self, devices: Sequence[str], lost: Callable[[], None], vram_limit: int | None = None
    ) -> None:
        from .fsdp_peer import anonymous_file

        self.devices, self.count, self.lost = devices, len(devices), lost
        self.file = anonymous_file()
        self.folder = Path(tempfile.mkdtemp(prefix="cocktail-ranks-"))  # for this user alone
        self.turns = ThreadPoolExecutor(1, "ranks")  # requests are answered in order
        self.writing, self.asking_beside = threading.Lock(), threading.Lock()
        self.failure: Failure | None = None
        self.vram_limit = vram_limit
        self.loaded: dict[str, Any] = {}  # what they were asked to load
        self.crew = self.fresh()
        # They import for seconds; the next request waits for them, and raises what went wrong.
        self.turns.submit(self.begin)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return self.crew.processes

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self.processes}

    def build(
        self, recipe: Recipe, base: Path, snapshot: Path | None, micro_batch: int, round: int = 0
    ) -> Peer:
        from .fsdp_peer import build_fsdp_peer

        return build_fsdp_peer(self, base, snapshot, recipe, micro_batch, round)

    def fresh(self) -> Generation:
        crew = Generation([self.spawn(rank) for rank in range(self.count)])
        for rank in range(self.count):
            crew.listeners.append(threading.Thread(target=self.listen, args=(crew, rank), daemon=True))
            crew.listeners[-1].start()
        return crew

    def begin(self) -> None:
        store = self.folder / "store"
        store.unlink(missing_ok=True)  # where those before them met
        start = {"file": self.file, "store": str(store), "vram_limit": self.vram_limit}
        self.ask("start", (), start)

    def spawn(self, rank: int) -> subprocess.Popen[bytes]:
        cores = str(max(1, usable_cores() // self.count))
        own = {"OMP_NUM_THREADS": cores, "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
        with self.log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cocktail_cli.extensions.multi_gpu.gpu_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(self.file,),
                start_new_session=True,  # out of the terminal's process group
                env={**own, **os.environ, "HF_MODULES_CACHE": str(self.folder / f"code-{rank}")},
            )

    def all(self, do: str, parts: Sequence[bytes] = (), **fields: Any) -> list[Answer]:
        """Call `do` on each rank, with its part; return answers by rank. Raises Failure, with all ended."""
        return self.turns.submit(self.ask, do, parts, fields).result()

    def beside(self, do: str, **fields: Any) -> list[Answer]:
        """Call `do` on each rank beside its turn, from any one thread. Raises like `all`."""
        with self.asking_beside:  # not while other processes take their place
            if self.failure is not None:
                raise self.failure
            for rank in range(self.count):
                self.write(rank, {"do": do, **fields})
            answers = self.gather(do, self.crew.beside)
        return [answers[rank] for rank in range(self.count)]

    def check(self) -> None:
        """Raise Failure where one has ended."""
        if self.failure is not None or any(process.poll() is not None for process in self.processes):
            self.all("bytes")  # any request

    def ask(self, do: str, parts: Sequence[bytes], fields: dict[str, Any]) -> list[Answer]:
        """Send a request and gather the answers, in the one thread that does so.

        Raises:
            MemoryError: one has no memory left; all go on, and the gradient has to be computed again.
        """
        if self.failure is not None:
            raise self.failure
        if do == "load":
            self.loaded = fields
        for rank in range(self.count):
            asked = {"do": do, **fields}
            if do == "start":
                asked |= {"number": rank, "count": self.count, "device": self.devices[rank]}
            self.write(rank, asked, parts[rank] if parts else b"")
        answers = self.gather(do, self.crew.answers)
        for rank, answer in answers.items():
            if "full" in answer:
                self.begin_again()
                raise MemoryError(f"{self.name(rank)}: {answer['full']}")
        return [answers[rank] for rank in range(self.count)]

    def write(self, rank: int, asked: dict[str, Any], data: bytes = b"") -> None:
        stdin = self.crew.processes[rank].stdin
        assert stdin is not None
        with suppress(OSError), self.writing:  # it has ended, as its listener notices
            stdin.write(json.dumps({**asked, "bytes": len(data)}).encode() + b"\n" + data)
            stdin.flush()

    def gather(self, do: str, told: Answers) -> dict[int, Answer]:
        """Collect an answer of each, or fewer once one is out of memory: the others may wait for it."""
        answers: dict[int, Answer] = {}
        while len(answers) < self.count and not any("full" in answer for answer in answers.values()):
            try:
                rank, answer = told.get(timeout=SILENT)
            except queue.Empty:
                silent = min(set(range(self.count)) - answers.keys())
                raise self.end(f"{self.name(silent)} has not answered for {SILENT:.0f} s ({do})") from None
            if answer is None or "error" in answer:
                raise self.end(self.cause(rank, answer))
            answers[rank] = answer
        return answers

    def begin_again(self) -> None:
        """Replace the processes by new ones with the same state."""
        saved = [str(self.folder / f"{rank}.kept") for rank in range(self.count)]
        with self.asking_beside:
            for rank, path in enumerate(saved):
                self.write(rank, {"do": "save", "path": path})
            self.gather("save", self.crew.beside)
            self.crew.close()
            self.crew = self.fresh()
            self.begin()
            self.ask("load", (), self.loaded)
            for rank, path in enumerate(saved):
                self.write(rank, {"do": "restore", "path": path})
            self.gather("restore", self.crew.answers)
        for path in saved:
            os.unlink(path)

    def listen(self, crew: Generation, rank: int) -> None:
        stdout = crew.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            with suppress(ValueError):  # cut short by its end
                answer = json.loads(line)
                (crew.beside if answer.pop("beside", False) else crew.answers).put((rank, answer))
        for told in (crew.answers, crew.beside):
            told.put((rank, None))
        if not crew.ended:
            self.lost()

    def cause(self, rank: int, answer: Answer | None) -> Failure:
        """Choose the failure to report: a killed rank, else an explained error, else the first."""
        last = {rank: answer}
        until = time.monotonic() + GRACE
        while len(last) < self.count and (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                rank, answer = self.crew.answers.get(timeout=left)
                if answer is None or "error" in answer:
                    last[rank] = last.get(rank) or answer
        for rank, answer in last.items():
            if answer is None:
                return self.killed(rank)
        failures = [self.failed(rank, answer["error"]) for rank, answer in last.items() if answer is not None]
        return next((failure for failure in failures if failure.code != "unexpected"), failures[0])

    def killed(self, rank: int) -> Failure:
        """Describe a rank that ended without an answer."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(GRACE)
        status = self.processes[rank].returncode
        if status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        hints = ("the system does that where memory is short: `dmesg` tells",) if status == -9 else ()
        return Failure("rank_lost", f"{self.name(rank)} {how}", hints=hints)

    def failed(self, rank: int, error: dict[str, Any]) -> Failure:
        if error["code"] == "unexpected":
            logging.getLogger(__name__).error("%s", self.log(rank).read_text(errors="replace"))
        return Failure(error["code"], f"{self.name(rank)}: {error['message']}", hints=tuple(error["hints"]))

    def end(self, why: Failure | str) -> Failure:
        """End all ranks, and remember why."""
        if self.failure is None:  # of two that wait, one hears of it first
            self.failure = Failure("rank_lost", why) if isinstance(why, str) else why
        self.crew.end()
        return self.failure

    def close(self) -> None:
        self.crew.end()  # a caller that waits for an answer gets the failure
        self.turns.shutdown()
        self.crew.close()
        os.close(self.file)
        shutil.rmtree(self.folder)

    def name(self, rank: int) -> str:
        return f"rank {rank} of {self.count} ({self.devices[rank]})"

    def log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"
