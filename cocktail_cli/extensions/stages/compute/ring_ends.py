"""The ends of ring requests: the head sends them around and takes what comes back, the others answer.

At the head a thread takes all messages: activations and gradients for the step under way, answers for those
who asked. So the threads of an exchange ask while the step is computed. Each wait ends: with the answer, with
what a stage has met, or after SILENT seconds.

Behind the head one thread takes messages and computes, in the order in which they come. Requests that belong
beside the compute (the exchange of a round) are answered by a second one, so that no micro-batch waits for an
encoding.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import nullcontext, suppress
from typing import Any

from torch.cuda import Event

from compress import PacketError
from recipes.algorithm import SideStream
from recipes.training import is_full

from ..lines import LineLost, StageLink, StageMessage
from .ring_request import (
    BESIDE,
    FAILED,
    UNASKED,
    Answer,
    RingRequest,
    StageFailed,
    StageLost,
    answers_of,
    error_values,
    raise_error,
    request_of,
    sender,
)
from .stage_machine import StageMachine, StagePart
from .stage_worker import BadMessage

SILENT = 600.0  # seconds for an answer, or for a message of a step
THERE = 5.0  # seconds for the answer of a machine that computes nothing
LOOK_S = 0.1  # between two looks at `close`, or `stop`
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

    def ask(
        self, do: str, data: Sequence[bytes] = (), *, patience: float = SILENT, **fields: Any
    ) -> list[Answer]:
        """Let every machine do `do`, this one too, each with its bytes; returns their answers in order.

        Raises what a machine has met: StageFull, StageFailed, ModelError; StageLost, also after `patience`.
        """
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
                stage = request.fields.get("stage")  # that has failed, as another says
                if not isinstance(stage, int) or not 0 < stage < self.stages:
                    stage = self.stages - 1
                raise_error(stage, request.fields)
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


class StageServer:
    """Serves as one machine of a replica of so many stages, until `stop` is set."""

    def __init__(self, machine: StageMachine, lines: StageLink, stages: int) -> None:
        self.machine, self.lines, self.stages = machine, lines, stages
        self.stop = threading.Event()
        self.side = SideStream(machine.device)

    def run(self) -> None:
        """Serve. What is wrong here, and with a neighbour's messages, the head is told."""
        with ThreadPoolExecutor(1, "beside") as beside:
            while not self.stop.is_set():
                came = self.lines.receive(0.0)
                if came is None and not self._work():
                    came = self.lines.receive(LOOK_S)
                if isinstance(came, LineLost):
                    self._tell(StageLost(came.why))
                elif came is not None and came.kind == "request":
                    self._take(came, beside)
                elif came is not None:
                    self._compute(came)

    def _work(self) -> bool:
        """Do the next piece of the step; returns whether there was one."""
        part = self.machine.trained
        return part is not None and self._do(part.compute.work)

    def _compute(self, message: StageMessage) -> None:
        if self.machine.filling is None:  # else it is of a session that is over
            self._do(lambda: self.machine.part.compute.receive(message))

    def _do(self, work: Callable[[], list[StageMessage] | None]) -> bool:
        """Send what follows from some work; returns False where there was none, or it has failed."""
        try:
            made = work()
        except BadMessage as bad:
            self._refuse(bad, bad.kind)
            return False
        except (RuntimeError, MemoryError, ValueError, StageLost) as error:
            self._tell(error)
            return False
        for message in made or ():
            self.lines.send(message)
        return made is not None

    def _take(self, message: StageMessage, beside: ThreadPoolExecutor) -> None:
        """Answer a request, or pass on what it has met before."""
        try:
            request = request_of(message)
        except PacketError as error:
            self._refuse(error, message.kind)
            return
        if request.do == FAILED or request.failed:
            self.lines.send(request.message())
        elif request.do in BESIDE:
            beside.submit(self._answer, request, self.side.mark())
        else:
            self._answer(request, None)

    def _answer(self, request: RingRequest, mark: Event | None) -> None:
        inside = self.side.behind(mark) if request.do in BESIDE else nullcontext()
        try:
            with inside, self.side.turn() if request.do == "follow" else nullcontext():
                answer = self.machine.answer(request.do, request.fields, request.mine)
        except Exception as error:  # of any kind: the head is to know
            answer = Answer(error_values(error, is_full(error)))
        self.lines.send(request.answered(answer).message())

    def _refuse(self, error: PacketError, kind: str) -> None:
        """Tell the head and the lines that a neighbour has sent what no stage would send. Where that is the
        head itself, this stage is the one that it can have replaced."""
        self.lines.refuse(kind, str(error))
        self._tell(error, sender(self.machine.number, kind, self.stages))

    def _tell(self, error: Exception, stage: int = 0) -> None:
        """Tell the head what was met without being asked, and of which stage; 0: of this one."""
        told = error_values(error, is_full(error)) | {"stage": stage or self.machine.number}
        self.lines.send(RingRequest(FAILED, told, (), number=UNASKED).message())
