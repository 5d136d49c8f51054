"""The processes that share this peer's model (`--gpus N`): started, asked, and ended.

They are asked through their stdin and answer on their stdout, a line of JSON each time; bytes may follow a
question. When this process ends, however it does, their stdin does too, and so do they. When one of them ends
the others cannot go on: all are ended, and whoever asks hears why. They have no terminal: Ctrl-C is for this
process alone.
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
from pathlib import Path
from typing import Any

from cocktail_cli.errors import Failure

SILENT = 600.0  # seconds for an answer; what ranks wait for from each other gives up before
GRACE = 2.0  # seconds to hear from all, once one has failed: the first to say so need not be the cause
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

Answer = dict[str, Any]


class Ranks:
    """One process for each device.

    Args:
        devices: `cuda:0`, `cuda:1`, ...; `cpu` several times, to try it out.
        lost: is called, in a thread, when one of them has ended that was not told to.
        vram_limit: bytes that each may take of its GPU.
    """

    def __init__(
        self, devices: Sequence[str], lost: Callable[[], None], vram_limit: int | None = None
    ) -> None:
        from recipes.shared import nameless

        self.devices, self.count, self.lost = devices, len(devices), lost
        self.file = nameless()
        self.folder = Path(tempfile.mkdtemp(prefix="cocktail-ranks-"))  # for this user alone
        self.answers: queue.SimpleQueue[tuple[int, Answer | None]] = queue.SimpleQueue()
        self.turns = ThreadPoolExecutor(1, "ranks")  # whoever asks first is answered first
        self.ended = False  # by this process
        self.failure: Failure | None = None
        self.processes = [self.spawn(rank) for rank in range(self.count)]
        self.listeners = [
            threading.Thread(target=self.listen, args=(i,), daemon=True) for i in range(self.count)
        ]
        for thread in self.listeners:
            thread.start()
        # Not waited for: they import for seconds. What goes wrong is told to whoever asks next.
        start = {"file": self.file, "store": str(self.folder / "store"), "vram_limit": vram_limit}
        self.turns.submit(self.ask, "start", (), start)

    def spawn(self, rank: int) -> subprocess.Popen[bytes]:
        cores = str(max(1, (os.cpu_count() or 1) // self.count))
        own = {"OMP_NUM_THREADS": cores, "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
        with self.log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cocktail_cli.rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(self.file,),
                start_new_session=True,  # out of the terminal's process group
                env={**own, **os.environ},
            )

    def all(self, do: str, parts: Sequence[bytes] = (), **fields: Any) -> list[Answer]:
        """Ask each rank to `do`; with its part, where there are parts. Their answers, by rank.

        Raises:
            Failure: one of them cannot, or has ended. All have, then.
        """
        return self.turns.submit(self.ask, do, parts, fields).result()

    def check(self) -> None:
        """Raises Failure where one has ended."""
        if self.failure is not None or any(process.poll() is not None for process in self.processes):
            self.all("bytes")  # any question

    def ask(self, do: str, parts: Sequence[bytes], fields: dict[str, Any]) -> list[Answer]:
        """In the one thread that does."""
        if self.failure is not None:
            raise self.failure
        for rank, process in enumerate(self.processes):
            data = parts[rank] if parts else b""
            asked = {"do": do, "bytes": len(data), **fields}
            if do == "start":
                asked |= {"number": rank, "count": self.count, "device": self.devices[rank]}
            assert process.stdin is not None
            with suppress(OSError):  # it has ended: who listens to it knows
                process.stdin.write(json.dumps(asked).encode() + b"\n" + data)
                process.stdin.flush()
        answers: dict[int, Answer] = {}
        while len(answers) < self.count:
            try:
                rank, answer = self.answers.get(timeout=SILENT)
            except queue.Empty:
                silent = min(set(range(self.count)) - answers.keys())
                raise self.end(f"{self.name(silent)} has not answered for {SILENT:.0f} s ({do})") from None
            if answer is None or "error" in answer:
                raise self.end(self.cause(rank, answer))
            answers[rank] = answer
        return [answers[rank] for rank in range(self.count)]

    def listen(self, rank: int) -> None:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            with suppress(ValueError):  # cut short by its end
                self.answers.put((rank, json.loads(line)))
        self.answers.put((rank, None))
        if not self.ended:
            self.lost()

    def cause(self, rank: int, answer: Answer | None) -> Failure:
        """Why all of it ended: who was killed, else who can say what is wrong, else who said so first."""
        last = {rank: answer}
        until = time.monotonic() + GRACE
        while len(last) < self.count and (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                rank, answer = self.answers.get(timeout=left)
                if answer is None or "error" in answer:
                    last.setdefault(rank, answer)
        for rank, answer in last.items():
            if answer is None:
                return self.killed(rank)
        failures = [self.told(rank, answer["error"]) for rank, answer in last.items() if answer is not None]
        return next((failure for failure in failures if failure.code != "unexpected"), failures[0])

    def killed(self, rank: int) -> Failure:
        """It ended without a word of its own."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(GRACE)
        status = self.processes[rank].returncode
        if status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        hints = ("the system does that where memory is short: `dmesg` tells",) if status == -9 else ()
        return Failure("rank_lost", f"{self.name(rank)} {how}", hints=hints)

    def told(self, rank: int, error: dict[str, Any]) -> Failure:
        if error["code"] == "unexpected":
            logging.getLogger(__name__).error("%s", self.log(rank).read_text(errors="replace"))
        return Failure(error["code"], f"{self.name(rank)}: {error['message']}", hints=tuple(error["hints"]))

    def end(self, why: Failure | str) -> Failure:
        """Nobody can go on."""
        self.failure = Failure("rank_lost", why) if isinstance(why, str) else why
        self.kill()
        return self.failure

    def kill(self) -> None:
        """They have nothing to tidy up."""
        self.ended = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        self.kill()
        self.turns.shutdown()
        for thread in self.listeners:
            thread.join()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not written yet
                    pipe.close()
        os.close(self.file)
        shutil.rmtree(self.folder)

    def name(self, rank: int) -> str:
        return f"rank {rank} of {self.count} ({self.devices[rank]})"

    def log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"
