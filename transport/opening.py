"""Between two rounds: does the next one open, or whom does it wait for?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .finale import finish_or_wait
from .rounds import Phase

if TYPE_CHECKING:
    from .hub_state import HubState

TELL_S = 5.0  # seconds of waiting for min_peers, before anybody is told


def open_or_wait(hub: HubState, now: float) -> None:
    ready, s = hub.members.ready(), hub.settings
    if hub.leases.done:
        hub.evaluations.finish()  # of an older x': the final one is what counts now
        hub.enter(Phase.FINAL)
        hub.waiting_since = now
        finish_or_wait(hub, now)
    elif others_expected(hub, len(ready), now):
        return
    elif len(ready) < max(1, s.min_peers):
        tell_whom(hub, len(ready), now)
        if now >= hub.waiting_since + s.start_timeout:
            hub.end(f"{len(ready)} peers were ready, {s.min_peers} needed, for {s.start_timeout:.0f} s", 7)
    else:
        hub.waiting_since = now
        if hub.leases.free or any(hub.leases.held(p.id) for p in ready):
            hub.open(ready, now)
        # else those who hold the last samples are behind: they deliver, or lose them after lease_s


def others_expected(hub: HubState, ready: int, now: float) -> bool:
    """For a while: those who were here before the hub was restarted, or who start with the run; and what
    comes of dialling the doors of owners, so that shards need not change hands at once."""
    s = hub.settings
    looked_for = any(session.looked_for for session in hub.members.sessions.values())
    first = ready < s.first_peers or looked_for
    starting = hub.round == 0 and first and now < hub.started + s.first_s
    return starting or ((looked_for or hub.members.awaited()) and now < hub.hold_until)


def tell_whom(hub: HubState, ready: int, now: float) -> None:
    """Once: how many peers are lacking, and where those are that this hub knows."""
    if hub.told_of_waiting or now < hub.waiting_since + TELL_S:
        return
    hub.told_of_waiting = True
    lacking = max(1, hub.settings.min_peers) - ready
    known = ", ".join(hub.members.not_ready(now)) or "none has come yet"
    hub.out.warn(f"waiting for {lacking} {'peer' if lacking == 1 else 'peers'}: {known}")
