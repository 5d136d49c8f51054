"""What the hub does about owners that are peers: who owns in a round, whose parts are here, who is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from transport import actions as do
from transport.ledger import PendingHandoff, after_deliveries, handoffs_for, merge_deliveries
from transport.membership import Kind, Session, State
from transport.protocol import AggregatorInfo, Close, HandoffOffer, Holds, Resigns, Round, Unusable
from transport.scheduling import Exchange, Phase

from .shard_assignment import assign

if TYPE_CHECKING:
    from transport.hub import HubState

RESTS = 16  # rounds in which an owner of which nothing came owns nothing


def name_owners(hub: HubState, ex: Exchange, ready: list[Session]) -> None:
    """Who owns what in a round that opens."""
    s = hub.settings
    peers = [p for p in ready if p.owns and p.rests <= ex.round and s.owners == "peers"]
    able = {f"{p.key} {p.name}": p.id for p in peers}
    ex.owners = {able[who]: shards for who, shards in assign(s.shards, able).items()}
    for p in ready:
        p.owned |= set(ex.owners.get(p.id, ()))
    taken = {shard for shards in ex.owners.values() for shard in shards}
    ex.hubs = tuple(shard for shard in range(s.shards) if shard not in taken)


def with_owners(hub: HubState, ex: Exchange, session: Session, message: Round) -> Round:
    """The announcement with who owns what; to owners, with the keys of those who may knock."""
    here = hub.members.sessions
    owners = sorted(ex.owners, key=lambda s: ex.members[s])
    told = [
        AggregatorInfo(ex.members[s], ex.owners[s], here[s].key, here[s].address) for s in owners if s in here
    ]
    return replace(message, owners=told, keys=dict(ex.keys) if session.id in ex.owners else {})


def heard(hub: HubState, session: Session, m: Holds | Unusable | Resigns, now: float) -> None:
    """What an owner says."""
    if isinstance(m, Holds):
        holds(hub, session, m, now)
    elif isinstance(m, Unusable):
        unusable(hub, session, m)
    else:  # what it owns in the open round is the last
        session.owns = False
        if m.lost:
            lose_owner(hub, session.id, now)
        if m.last and session.state in (State.TRAINING, State.READY):
            hub.members.move(session, Kind.LEAVING)


def holds(hub: HubState, session: Session, m: Holds, now: float) -> None:
    """An owner tells whose parts it has."""
    ex = hub.exchange
    if ex is None or ex.round != m.round or session.id not in ex.owners:
        hub.members.ignored += 1
        return
    for member, name in ex.members.items():
        if name in m.parts:
            ex.held[session.id, member] = m.parts[name]
            part_came(hub, ex, member, now)


def part_uploaded(hub: HubState, member: str, owner: str, round: int, digest: str, now: float) -> None:
    """What this session sends to that owner is here, whole."""
    session, ex = hub.members.get(member), hub.exchange
    if session is not None:
        session.seen = now
    if ex is not None and ex.round == round:
        ex.passed[owner, member] = digest
        part_came(hub, ex, member, now)


def part_came(hub: HubState, ex: Exchange, member: str, now: float) -> None:
    """What this session sends an owner is where the owner can have it."""
    session = hub.members.get(member)
    if hub.phase is Phase.OPEN and session is not None:
        hub.maybe_arrived(session, ex, now)


def reached(hub: HubState, session_id: str, ok: bool) -> None:
    """Its door was dialled."""
    session = hub.members.get(session_id)
    if session is not None:
        session.owns, session.looked_for = ok, False
        if not ok:
            hub.out.warn(f"does not answer at {session.address}: it owns nothing", session.name)


def lose_owner(hub: HubState, owner: str, now: float) -> None:
    """Its shards will not move in this round; what was sent for them stays with who sent it."""
    ex = hub.exchange
    if ex is None or owner not in ex.owners or owner in ex.lost:
        return
    ex.lost.add(owner)
    if hub.phase is Phase.CLOSED:
        hub.out.add(do.LoseOwner(owner))
    elif hub.phase is Phase.OPEN:
        for session in [hub.members.sessions[s] for s in ex.members if s in hub.members.sessions]:
            hub.maybe_arrived(session, ex, now)


def lose_the_silent(hub: HubState, now: float) -> None:
    """Owners that are gone, or have been silent for as long as no round waits for anybody. One whose
    connection is lost may be back in a moment."""
    ex = hub.exchange
    for owner in sorted(ex.owners.keys() - ex.lost) if ex is not None else ():
        session = hub.members.get(owner)
        if session is None or hub.members.suspect(session, now):
            lose_owner(hub, owner, now)


def close(hub: HubState, round: int, attempt: int, weights: Mapping[str, float]) -> None:
    """These updates are to be aggregated: ask each owner for the packet of its shards."""
    ex = hub.exchange
    if ex is None or ex.round != round or hub.phase is not Phase.CLOSED:
        return
    for owner, shards in ex.owners.items():
        session = hub.members.get(owner)
        if owner not in ex.lost and session is not None:
            left = estates_of(hub, shards)
            ex.closes[owner] = Close(
                round, attempt, shards, dict(weights), ex.parts_for(owner, weights), left
            )
            hub.out.send(session.conn, ex.closes[owner])


def estates_of(hub: HubState, shards: Iterable[int]) -> list[HandoffOffer]:
    found = sorted(handoffs_for(hub.estates, shards).items())
    return [HandoffOffer(number, one.peer, one.share) for number, one in found]


def given_to(ex: Exchange, owners: Iterable[str]) -> dict[int, list[int]]:
    """What these owners add to their errors if the round is committed: number -> shards."""
    found: dict[int, list[int]] = {}
    for owner in owners:
        for estate in ex.closes[owner].estates if owner in ex.closes else ():
            found.setdefault(estate.number, []).extend(ex.owners[owner])
    return found


def unusable(hub: HubState, session: Session, m: Unusable) -> None:
    ex = hub.exchange
    told = ex.closes.get(session.id) if ex is not None and ex.round == m.round else None
    if told is None or told.attempt != m.attempt or m.peer not in told.weights:
        hub.members.ignored += 1
    else:
        hub.out.add(do.Unusable(session.id, m.attempt, m.peer, m.reason))


def judge(hub: HubState, ex: Exchange, done: do.CommitDone) -> None:
    """Who is to own nothing for a while, whether the round is committed or opened again."""
    rest_the_lost(hub, ex, done)
    judge_ourselves(hub, ex, done)


def rest_the_lost(hub: HubState, ex: Exchange, done: do.CommitDone) -> None:
    """Owners of which nothing came, or nothing usable."""
    lost = (ex.lost | done.lost.keys()) & ex.owners.keys() - done.moved.keys()
    for owner in sorted(lost, key=lambda s: ex.members[s]):
        why = done.lost.get(owner, "it is gone or silent")
        hub.out.warn(f"its shards have not moved in round {ex.round}: {why}", ex.members[owner])
        if (session := hub.members.get(owner)) is not None:
            session.rests = ex.round + RESTS


def judge_ourselves(hub: HubState, ex: Exchange, done: do.CommitDone) -> None:
    """An owner has refused a peer's part: its word against the other's, so nobody has a strike. The hub owns
    its shards for a while, and sees for itself what that peer sends.
    """
    for name, owner in sorted(done.denied.items()):
        said = f"{ex.members[owner]}, which owns shards, cannot use its part: {done.rejected[name]}"
        hub.out.warn(f"{said}; it owns none for {RESTS} rounds", name)
        if (session := hub.members.get(owner)) is not None:
            session.rests = ex.round + RESTS


def left(hub: HubState, number: int, estate: PendingHandoff) -> None:
    """Owners are to have this: it is on the disk."""
    hub.estates[number] = estate


def error_taken(hub: HubState, session_id: str, shards: Sequence[int]) -> None:
    """The errors of these shards wait for their next owners. One that hands over what it owns, owns no more:
    it would have a second error to hand over, and a third.
    """
    session, ex = hub.members.get(session_id), hub.exchange
    if session is not None:
        session.handing = False
        session.owned -= set(shards)
        if ex is not None and set(shards) & set(ex.owners.get(session_id, ())):
            session.rests = ex.round + RESTS


def settle(hub: HubState, ex: Exchange, done: do.CommitDone) -> None:
    """The round is durable: what owners were to add is in their errors."""
    mine = {estate.number: ex.hubs for estate in ex.estates}
    given = merge_deliveries(given_to(ex, done.moved), mine)
    hub.estates |= after_deliveries(hub.estates, given)
    hub.estates = {number: one for number, one in hub.estates.items() if one.shards}
