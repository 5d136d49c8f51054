"""A wire in a thread of its own beside an asyncio loop."""

from __future__ import annotations

import asyncio
import threading

from transport.tunnel import PolledWire


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
