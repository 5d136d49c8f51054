"""A wire in a thread of its own beside an asyncio loop."""

import asyncio
import socket
import threading

import pytest

from cocktail_cli.extensions.reach.streams import LoopThread, PolledWire, accept


class Wire:
    """Brings nothing; notes whether a poll was ended by `wake`."""

    def __init__(self) -> None:
        self._awake, self.hastened = threading.Event(), list[bool]()

    def poll(self, timeout: float) -> list[str]:
        self.hastened.append(self._awake.wait(0.01))
        self._awake.clear()
        return []

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None:
        pass


def test_what_is_done_in_each_turn_ends_no_poll_and_what_is_asked_for_does() -> None:
    """An idle relay, which guards its connections in each turn, uses no processor."""

    async def turns() -> None:
        async for _ in polled.events():
            polled.next_turn(lambda: done.append(len(wire.hastened)))
            if len(wire.hastened) == 5:
                polled.call(lambda: done.append(-1))
            if len(wire.hastened) == 8:
                break
        await polled.close()

    wire, done = Wire(), list[int]()
    polled = PolledWire(wire)
    asyncio.run(turns())

    assert wire.hastened[:5] == [False] * 5
    assert any(wire.hastened[5:])
    assert [one for one in done if one >= 0] == list(range(1, 8))


def test_a_connection_in_the_moment_of_the_end_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio's accept has a callback that fails where its future was cancelled just before."""

    async def main() -> None:
        accepting = asyncio.create_task(accept(listener))
        await asyncio.sleep(0.01)
        client.connect(listener.getsockname())
        asyncio.get_running_loop().call_soon(accepting.cancel)
        await asyncio.wait([accepting])
        over.set()

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setblocking(False)
        thread = LoopThread("test", main)
        assert over.wait(120)
        thread.stop()

    assert not caplog.records
