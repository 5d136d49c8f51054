"""One session of a volunteer after the other, until it has left a run for good."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from cocktail_cli.assembly import Joining
from cocktail_cli.machine import return_freed_memory
from cocktail_cli.ui import events


class EndedSession(Protocol):
    """A session that has ended, as `VolunteerSession` reports it."""

    @property
    def returns(self) -> bool: ...
    @property
    def status(self) -> int: ...


def take_turns(
    joining: Sequence[Joining],
    session: Callable[[bool], EndedSession],
    join_first: bool,
    show: Callable[[events.Event], None],
) -> int:
    """Run one session after the other as long as it is to return; return the exit status.

    Args:
        session: joins, takes part and leaves; its argument tells whether it is a return.
        join_first: the first session does not wait: a person at the terminal answers its prompt.
    """
    from recipes.errors import StageLost
    from transport.protocol import RefusedByHub, RolledBack

    again = False
    while True:
        for one in joining if again or not join_first else ():
            if (status := one.wait(show)) is not None:
                return status
        try:
            ended = session(again)
            if not ended.returns:
                return ended.status
            del ended
        except StageLost as error:
            show(events.Warning(f"{error}: joining anew"))
            again = True
            continue  # at once: the ring has kept its peer, so there is little to free
        except RolledBack as error:
            show(events.Warning(f"{error}: joining anew"))
        except RefusedByHub as refused:
            if not again or refused.code != "over":
                raise
            show(events.Progressed("the run has ended meanwhile"))
            return 0
        again = True
        gc.collect()
        return_freed_memory()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()
