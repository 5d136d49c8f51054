"""What a hub says to an owner that is a peer, and what that says back: for the thread of owning.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from transport.protocol import Close, Committed, Holds, Round, SessionRenewed, TransportError, Unusable

from .connection_manager import ConnectionManager
from .stop_request import StopRequest


class AggregatorOrders:
    """Of one link. `wait(what, there)` is the link's, and raises what makes `there()` impossible."""

    def __init__(
        self,
        connections: ConnectionManager,
        wait: Callable[[str, Callable[[], bool]], None],
        leave_requested: StopRequest,
    ) -> None:
        self._connections, self._state, self._wait, self._leave_requested = (
            connections,
            connections.state,
            wait,
            leave_requested,
        )
        self._resigned = False
        self._thread = 0  # that asks for them
        self._heard_enough = False

    @property
    def waiting(self) -> bool:
        """Is it the owner's thread that calls? Of a new session the others are to hear."""
        return threading.get_ident() == self._thread

    def next(self) -> Round | Close | Committed | None:
        """What the hub said next. None: nothing will come any more, or all has been heard and that was
        `enough`. Meanwhile the hub hears of a wish to leave: it gives this owner no other round."""

        def there() -> bool:
            if self._leave_requested.is_set() and not self._resigned:
                self.resign(last=False)
            return bool(self._state.orders) or self._heard_enough or self._state.over is not None

        self._thread = threading.get_ident()
        while True:
            try:
                self._wait("the hub's word to an owner", there)
            except SessionRenewed:
                continue
            except TransportError:
                return None
            with self._connections.changed:
                return self._state.orders.popleft() if self._state.orders else None

    def resign(self, *, last: bool, lost: bool = False) -> None:
        """Say that this peer is to own nothing any more, not even (`lost`) in the round that is open, and
        (`last`) that no update of it will come."""
        with self._connections.changed:
            self._resigned = True
            self._connections.say(self._state.resigns(last, lost))

    def enough(self) -> None:
        """Have `next` end, once all that has come is heard."""
        with self._connections.changed:
            self._heard_enough = True
            self._connections.changed.notify_all()

    def unusable(self, message: Unusable) -> None:
        """Say that a peer's part cannot be used."""
        with self._connections.changed:
            self._connections.say([message])

    def holding(self, round: int, parts: Mapping[str, str]) -> None:
        """Say whose parts of `round` have come to this owner, all of them: name -> digest."""
        with self._connections.changed:
            self._connections.say(self._state.holding(Holds(round, dict(parts))))
