"""An asyncio loop in a thread of its own, the tasks that it serves, and a ZeroMQ wire that it polls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

POLL_S = 0.5  # the longest wait for a wire: what is periodic happens as often

T = TypeVar("T", covariant=True)


class LoopThread:
    """Runs a coroutine in a thread until it ends, or `stop`."""

    def __init__(self, name: str, main: Callable[[], Coroutine[object, object, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(unhandled)
        self._thread = threading.Thread(target=self._run, args=(main,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the coroutine and all tasks of its loop, and wait for them; may be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self, main: Callable[[], Coroutine[object, object, None]]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(main())


def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Tell of an exception that nobody awaits. asyncio's `sock_accept` has one of its own where a connection
    comes in the moment in which it is cancelled: its future is done then. That is no news."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


class TaskSet:
    """The tasks of a loop that serves many connections; they end with the loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Polled(Protocol[T]):
    """A wire of transport.wire, either end."""

    def poll(self, timeout: float) -> Sequence[T]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class PolledWire(Generic[T]):
    """A wire in a thread of its own, as the loop uses it: `events` yields what arrived, `call` runs a job of
    the loop's with the wire."""

    def __init__(self, wire: Polled[T]) -> None:
        self._wire = wire
        self._jobs: deque[Callable[[], object]] = deque()
        self._pool = ThreadPoolExecutor(1, "cocktail-relay-wire")

    def call(self, job: Callable[[], object]) -> None:
        self.next_turn(job)
        self._wire.wake()

    def next_turn(self, job: Callable[[], object]) -> None:
        """Do a job before the next poll, which it does not hasten: one in each turn must not spin."""
        self._jobs.append(job)

    async def events(self) -> AsyncIterator[Sequence[T]]:
        """Yield what arrived, at least every POLL_S, and an empty list where that is nothing."""
        loop = asyncio.get_running_loop()
        while True:
            yield await loop.run_in_executor(self._pool, self._turn)

    def _turn(self) -> Sequence[T]:
        while self._jobs:
            self._jobs.popleft()()
        return self._wire.poll(POLL_S)

    async def close(self) -> None:
        self._wire.wake()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._wire.close)
        self._pool.shutdown()
