"""A queue that serves origins in turn, and at each origin those who have something waiting in turn.

Whoever puts in most waits longest: one of many who share an address delays them, and nobody elsewhere. No
clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by who pays for them, and those by their origin."""

    def __init__(self) -> None:
        self._origins: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, origin: str, payer: str, item: T) -> None:
        """Append an item to those of its payer."""
        self._origins.setdefault(origin, OrderedDict()).setdefault(payer, deque()).append(item)
        self._count += 1

    def waiting(self, origin: str, payer: str) -> int:
        """Count the items of a payer."""
        payers = self._origins.get(origin)
        return len(payers[payer]) if payers is not None and payer in payers else 0

    def take(self) -> T:
        """Pop the next item. Raises IndexError where there is none."""
        if not self._origins:
            raise IndexError("nothing waits")
        origin, payers = next(iter(self._origins.items()))
        payer, items = next(iter(payers.items()))
        item = items.popleft()
        self._count -= 1
        del payers[payer]
        if items:
            payers[payer] = items  # behind the others of its origin
        if payers:
            self._origins.move_to_end(origin)
        else:
            del self._origins[origin]
        return item

    def drop(self, origin: str, payer: str) -> None:
        """Forget the items of a payer."""
        payers = self._origins.get(origin, OrderedDict())
        self._count -= len(payers.pop(payer, ()))
        if origin in self._origins and not payers:
            del self._origins[origin]
