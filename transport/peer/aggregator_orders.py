"""The hub's orders to a peer that aggregates shards, and the answers to them, for aggregator_thread.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from transport.protocol import SessionRenewed, TransportError, messages

from .connection_manager import ConnectionManager
from .stop_request import StopRequest


class AggregatorOrders:
    """The orders of one link. `wait(what, there)` blocks until `there()` and raises if that is impossible."""

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
        self._thread = 0  # the thread that calls `next`
        self._stopped = False

    @property
    def in_aggregator_thread(self) -> bool:
        """True in the aggregator thread: SessionRenewed is for the other threads."""
        return threading.get_ident() == self._thread

    def next(self) -> messages.Round | messages.Close | messages.Committed | None:
        """Wait for the next order; None once the run is over, or the orders before `stop` have been returned.

        A request to leave is passed on to the hub, which then gives this aggregator no other round.
        """

        def there() -> bool:
            if self._leave_requested.is_set() and not self._resigned:
                self.resign(last=False)
            return bool(self._state.orders) or self._stopped or self._state.over is not None

        self._thread = threading.get_ident()
        while True:
            try:
                self._wait("the hub's order to an aggregator", there)
            except SessionRenewed:
                continue
            except TransportError:
                return None
            with self._connections.changed:
                return self._state.orders.popleft() if self._state.orders else None

    def resign(self, *, last: bool, lost: bool = False) -> None:
        """Tell the hub that this peer aggregates no shards from the next round on; `lost`: not even in the
        open round; `last`: no update of it will come either."""
        with self._connections.changed:
            self._resigned = True
            self._connections.say(self._state.resigns(last, lost))

    def stop(self) -> None:
        """Make `next` return None once the orders received so far are handled."""
        with self._connections.changed:
            self._stopped = True
            self._connections.changed.notify_all()

    def report_unusable(self, message: messages.Unusable) -> None:
        """Tell the hub that a peer's part cannot be used."""
        with self._connections.changed:
            self._connections.say([message])

    def report_parts(self, round: int, parts: Mapping[str, str]) -> None:
        """Tell the hub all parts of `round` that are here: name -> digest."""
        with self._connections.changed:
            self._connections.say(self._state.holding(messages.Holds(round, dict(parts))))
