"""What a hub says to an owner that is a peer, and what that says back: for the thread of owning.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from .carrier import Carrier
from .errors import SessionRenewed, TransportError
from .messages import Close, Committed, Holds, Round, Unusable


class Orders:
    """Of one link. `wait(what, there)` is the link's, and raises what makes `there()` impossible."""

    def __init__(self, carrier: Carrier, wait: Callable[[str, Callable[[], bool]], None]) -> None:
        self._carrier, self._state, self._wait = carrier, carrier.state, wait
        self._thread = 0  # that asks for them
        self._heard_enough = False

    @property
    def waiting(self) -> bool:
        """Is it the owner's thread that calls? Of a new session the others are to hear."""
        return threading.get_ident() == self._thread

    def next(self) -> Round | Close | Committed | None:
        """What the hub said next. None: nothing will come any more, or all has been heard and that was
        `enough`."""

        def there() -> bool:
            return bool(self._state.orders) or self._heard_enough or self._state.over is not None

        self._thread = threading.get_ident()
        while True:
            try:
                self._wait("the hub's word to an owner", there)
            except SessionRenewed:
                continue
            except TransportError:
                return None
            with self._carrier.changed:
                return self._state.orders.popleft() if self._state.orders else None

    def enough(self) -> None:
        """Have `next` end, once all that has come is heard."""
        with self._carrier.changed:
            self._heard_enough = True
            self._carrier.changed.notify_all()

    def unusable(self, message: Unusable) -> None:
        """Say that a peer's part cannot be used."""
        with self._carrier.changed:
            self._carrier.say([message])

    def holding(self, round: int, names: Sequence[str]) -> None:
        """Say whose parts of `round` have come to this owner, all of them."""
        with self._carrier.changed:
            self._carrier.say(self._state.holding(Holds(round, list(names))))
