"""The seconds of each phase of an exchange, measured around the product's functions and not in them.

`measured` wraps the functions that `functions` lists while a peer trains. In each thread the time belongs to
the innermost phase, so the phases add up. On a GPU a boundary is a CUDA event of the thread's stream: nobody
waits for one, and they are read once the run has ended. Elsewhere, and in threads that have no stream, the
host's clock is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

# of an exchange, in their order; "code" is the packet's bytes, "read back" what leaves a GPU
EXCHANGE = ["sample", "gather", "select", "quantize", "code", "read_back", "decode", "move", "bring", "join"]
COMPUTE, OPTIMIZER = "compute", "optimizer"  # of the default stream


@dataclass(frozen=True)
class Span:
    """A stretch of one thread's time."""

    phase: str
    begin: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        """The time on the device, where both ends are events, or on the host. Errors: the device has not
        been waited for."""
        if self.begin.event is None or self.end.event is None:
            return self.end.host - self.begin.host
        return float(self.begin.event.elapsed_time(self.end.event)) / 1e3


@dataclass(frozen=True)
class Moment:
    host: float
    event: Any  # torch.cuda.Event; None: of the host alone


@dataclass
class Phases:
    """The spans of all threads since `taken` was called."""

    device: torch.device
    spans: list[Span] = field(default_factory=list)
    _here: threading.local = field(default_factory=threading.local)

    def taken(self) -> list[Span]:
        """Return the spans so far and begin anew."""
        taken, self.spans = self.spans, []
        return taken

    def moment(self, phase: str) -> Moment:
        event = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if phase in (COMPUTE, OPTIMIZER) or stream != torch.cuda.default_stream(self.device):
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record(stream)
        return Moment(time.perf_counter(), event)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Let this thread's time belong to a phase, and then to the one around it again."""
        stack = self._here.__dict__.setdefault("stack", [])
        if stack:
            self._close(stack)
        stack.append((name, self.moment(name)))
        try:
            yield
        finally:
            self._close(stack)
            stack.pop()
            if stack:
                outer, _ = stack[-1]
                stack[-1] = outer, self.moment(outer)

    def _close(self, stack: list[tuple[str, Moment]]) -> None:
        name, begin = stack[-1]
        self.spans.append(Span(name, begin, self.moment(name)))


def functions(peer: Any) -> Iterator[tuple[str, Any, str]]:
    """List the functions of each phase, for the classes that a peer is made of: phase, owner, name."""
    import compress
    from compress import codec, sampling
    from recipes.training import loop

    worker, trainer = peer.worker, type(peer.trainer)
    local_model, global_model = type(worker.local_model), type(worker.global_model)
    yield "sample", sampling.Schedule, "sample"
    yield "gather", local_model, "difference"
    for name in ("largest", "everything", "in_chunks"):
        yield "select", compress.topk, name
    yield "quantize", codec, "quantize"
    yield "code", codec, "encode_positions"
    yield "code", codec, "write"
    yield "quantize", codec, "plans"
    yield "read_back", codec, "read_each"
    yield "decode", codec.Encoded, "update"
    yield "decode", global_model, "decode"
    yield "move", global_model, "move"
    yield "bring", type(worker), "bring"
    yield "join", type(worker), "follow"
    yield COMPUTE, loop, "compute"
    yield OPTIMIZER, trainer, "step"
    if peer.side.stream is not None and compress.kernels_missing(peer.side.stream.device) is None:
        from compress import triton_kernels

        yield "select", triton_kernels, "largest"
        yield "quantize", triton_kernels, "quantize"
        yield "quantize", triton_kernels.OnDevice, "codes"
        yield "code", triton_kernels, "coded"
        yield "code", triton_kernels.CodedPositions, "read"


@contextmanager
def measured(peer: Any) -> Iterator[Phases]:
    """Measure the phases of a peer meanwhile."""
    device = torch.device("cpu") if peer.side.stream is None else peer.side.stream.device
    phases = Phases(device)
    with ExitStack() as stack:
        for phase, owner, name in functions(peer):
            whole = owner.__dict__[name]
            stack.callback(setattr, owner, name, whole)
            setattr(owner, name, within(phases, phase, whole))
        yield phases


def within(phases: Phases, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with phases.phase(phase):
            return function(*arguments, **named)

    return wrapped


def seconds(spans: list[Span]) -> dict[str, float]:
    """Add up the seconds of each phase. The device has been waited for."""
    found = dict.fromkeys((*EXCHANGE, COMPUTE, OPTIMIZER), 0.0)
    for span in spans:
        found[span.phase] += span.seconds
    return found
