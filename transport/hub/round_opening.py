"""Between two rounds: does the next one open, or whom does it wait for?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport import actions as do
from transport.aggregators import shard_coordinator
from transport.membership import Kind, Session
from transport.protocol import SampleRanges, count_samples
from transport.scheduling import Exchange, Phase

from .final_evaluation import finish_or_wait

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
    elif not ready or len(ready) + hub.members.apart < s.min_peers:
        tell_whom(hub, len(ready), now)
        if now >= hub.waiting_since + s.start_timeout:
            hub.end(f"{len(ready)} peers were ready, {s.min_peers} needed, for {s.start_timeout:.0f} s", 7)
    else:
        hub.waiting_since = now
        if hub.leases.free or any(hub.leases.held(p.id) for p in ready):
            open_round(hub, ready, now)
        # else those who hold the last samples are behind: they deliver, or lose them after lease_s


def open_round(hub: HubState, ready: list[Session], now: float) -> None:
    s, free = hub.settings, hub.leases.free
    step = (s.samples - free) // s.global_batch if free else s.steps
    granted, spans = lease(hub, ready)
    leased = sum(count_samples(ids) for ids in granted.values())
    members = {p.id: p.name for p in ready}
    ex = hub.exchange = Exchange(hub.round, step, members, leased, now, now + s.step_timeout)
    ex.keys, ex.spans = {p.name: p.key for p in ready}, spans
    here = [p for p in ready if p.id not in spans]  # in the rounds after this one
    ex.fits = min((p.fits for p in here if p.fits), default=0)
    shard_coordinator.name_owners(hub, ex, here)
    for p in ready:
        hub.members.move(p, Kind.OPENED)
        p.owes = now if p.owes is None else p.owes
    if hub.evaluations.due(step):
        hub.evaluations.begin(hub.round, step, [p.id for p in here])
    hub.enter(Phase.OPENING)
    hub.out.add(do.Lease(hub.round, granted, ex.hubs, len(ex.owners), ex.fits))


def lease(hub: HubState, ready: list[Session]) -> tuple[dict[str, SampleRanges], dict[str, int]]:
    """The samples of the members, a global batch a local step in all; and of leases that are to last several
    rounds, how many."""
    s, round, free = hub.settings, hub.round, hub.leases.free
    granted = hub.leases.of(round, [p.id for p in ready])
    takers = [p.id for p in ready if p.id not in granted]
    if not takers:
        return granted, {}
    batch = min(max(0, s.round_batch - sum(map(count_samples, granted.values()))), free)
    longest = min(s.longest_lease, free // s.round_batch)
    portions = dict(zip(takers, hub.speeds.portions(batch, takers, round, longest), strict=True))
    granted |= hub.leases.grant(round, {p: portion.samples for p, portion in portions.items()})
    return granted, {p: portion.spans for p, portion in portions.items() if portion.spans > 1}


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
