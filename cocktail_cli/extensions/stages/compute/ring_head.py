"""The head's end of the ring: sends requests around, and takes what comes back.

A thread takes all messages: activations and gradients for the step under way, answers for those who asked. So
the threads of an exchange ask while the step is computed. Each wait ends: with the answer, with what a stage
has met, or after SILENT seconds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import suppress
from typing import Any

from compress import PacketError

from ..lines import LineLost, StageLink, StageMessage
from .ring_request import (
    FAILED,
    Answer,
    RingRequest,
    StageFailed,
    StageLost,
    answers_of,
    raise_error,
    request_of,
    sender,
)
from .stage_machine import StageMachine
from .stage_part import StagePart

SILENT = 600.0  # seconds for an answer, or for a message of a step
THERE = 5.0  # seconds to say what it has, for a machine that computes nothing
LOOK_S = 0.1  # between two looks at `close`
MOST = 4096  # messages of a step that wait here: more than are in flight of any


class RingHead:
    """Asks all machines of a replica, of which this one is the first.

    Args:
        machine: this one.
        layers: of each machine of the replica, this one's first.
    """

    def __init__(self, machine: StageMachine, lines: StageLink, layers: tuple[range, ...]) -> None:
        self.machine, self.lines, self.layers, self.stages = machine, lines, layers, len(layers)
        self.key = ""  # of the newest loading of machines
        self.steps = -1  # the last step begun: they count up whatever is loaded anew
        self._failure: Exception | None = None  # a machine is lost, or sends what no stage does
        self._asked = 0
        self._waiting: dict[int, Future[RingRequest]] = {}
        self._lock = threading.Lock()
        self._step: queue.SimpleQueue[StageMessage | Exception] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take, name="ring", daemon=True)
        self._thread.start()

    @property
    def part(self) -> StagePart:
        return self.machine.part

    def ask(self, do: str, data: Sequence[bytes] = (), **fields: Any) -> list[Answer]:
        """Let every machine do `do`, this one too, each with its bytes; returns their answers in order.

        Raises what a machine has met: StageFull, StageFailed, ModelError; StageLost.
        """
        return self._ask(do, data, SILENT, fields)

    def held(self) -> list[Answer]:
        """Ask what each machine has. Raises StageLost soon where one is not there."""
        return self._ask("held", (), THERE, {})

    def _ask(self, do: str, data: Sequence[bytes], patience: float, fields: dict[str, Any]) -> list[Answer]:
        each = list(data) or [b""] * self.stages
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._asked += 1
            number, future = self._asked, Future[RingRequest]()
            self._waiting[number] = future
        self.lines.send(RingRequest(do, fields, tuple(each[1:]), number=number).message())
        try:
            own = self.machine.answer(do, fields, each[0])
            found = future.result(patience)
        except TookTooLong:
            raise StageLost(f"no answer to {do} within {patience:.0f} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return [own, *answers_of(found, do, self.stages)]

    def begin(self) -> int:
        """Forget what has come of an earlier step; returns the number of the next one."""
        with suppress(queue.Empty):
            while True:
                self._step.get_nowait()
        if self._failure is not None:
            raise self._failure
        self.steps += 1
        return self.steps

    def next(self, wait: bool) -> StageMessage | None:
        """Return the next message of the step under way; None: there is none yet.

        Raises what a stage has met, as `ask`.
        """
        try:
            came = self._step.get(wait, SILENT) if wait else self._step.get_nowait()
        except queue.Empty:
            if wait:
                raise StageLost(f"no activations and no gradients for {SILENT:.0f} s") from None
            return None
        if isinstance(came, Exception):
            raise came
        return came

    def mend(self) -> None:
        """Go on after a lost machine is there again."""
        with self._lock:
            self._failure = None

    def lose(self, lost: StageLost | StageFailed) -> None:
        """End all that is under way: a machine is lost, or another has to replace it. `mend` goes on."""
        with self._lock:
            self._failure = lost
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for future in waiting:
            future.set_exception(lost)
        self._step.put(lost)

    def refused(self, error: PacketError, kind: str) -> StageFailed:
        """Name the neighbour that has sent a message of this kind, which no stage would send."""
        return StageFailed(str(error), sender(0, kind, self.stages))

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    # ---- the ring's thread ---------------------------------------------------------------------------------

    def _take(self) -> None:
        while not self._closing.is_set():
            came = self.lines.receive(LOOK_S)
            if isinstance(came, LineLost):
                self.lose(StageLost(came.why))
            elif came is not None and came.kind == "request":
                self._answered(came)
            elif came is not None and self._failure is None and came.step >= self.steps:
                self._step.put(came)
                if self._step.qsize() > MOST:
                    self.lose(self.refused(PacketError("sends more messages than a step has"), came.kind))

    def _answered(self, message: StageMessage) -> None:
        try:
            request = request_of(message)
        except PacketError as error:
            self.lose(self.refused(error, message.kind))
            return
        try:
            if request.do == FAILED:
                raise_error(self._stage_of(request), request.fields)
        except StageLost as lost:
            self.lose(lost)
        except Exception as error:  # of any kind: the step under way is void
            if self._step.qsize() <= MOST:
                self._step.put(error)
        else:
            with self._lock:
                future = self._waiting.pop(request.number, None)
            if future is not None:
                future.set_result(request)

    def _stage_of(self, request: RingRequest) -> int:
        """Return the machine that has failed, as another says; the last one, where that names none."""
        stage = request.fields.get("stage")
        return stage if isinstance(stage, int) and 0 < stage < self.stages else self.stages - 1
