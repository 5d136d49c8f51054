"""A machine behind the head: computes its stage's part of each step, and answers what comes around the ring.

One thread takes messages and computes, in the order in which they come. Requests that belong beside the
compute (the exchange of a round) are answered by a second one, so that no micro-batch waits for an encoding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

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
    StageLost,
    error_values,
    request_of,
    sender,
)
from .stage_machine import StageMachine
from .stage_worker import BadMessage

LOOK_S = 0.1  # between two looks at `stop`


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
