"""The hub's commit thread: what is slow and must happen in order. Aggregate, make durable, tell."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from transport import actions as do
from transport.aggregators import Ended, HubShards, Unmoved
from transport.ledger import Counted, Ledger
from transport.protocol import HubDelegate, UpdateRejected, WeightedPacket, sample_ids
from transport.scheduling import row_of
from transport.transfer import ChunkBuffer, ObjectStore

if TYPE_CHECKING:
    from .hub_state import HubState

FULL = (errno.ENOSPC, errno.EDQUOT)


class Commits:
    """Of one hub. `call` has the I/O thread do something; `failed` hears of the error that ends the run."""

    def __init__(
        self,
        ledger: Ledger,
        work: HubDelegate,
        objects: ObjectStore,
        shards: HubShards,
        state: HubState,
        call: Callable[[Callable[[], list[do.Action]]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.ledger, self.work, self._objects = ledger, work, objects
        self._shards, self._state = shards, state
        self._call, self._failed = call, failed
        self.opened: dict[int, float] = {}  # round -> wall clock
        self._thread = ThreadPoolExecutor(1, "cocktail-commit")

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def later(self, job: Callable[[], object]) -> None:
        """Have the commit thread do this, after what it was given before."""
        self._thread.submit(self._guarded, job)

    def shutdown(self) -> None:
        self._thread.shutdown()

    # ---- the commit thread ---------------------------------------------------------------------------------

    def _guarded(self, job: Callable[[], object]) -> None:
        """Run a job; what goes wrong in it ends the run, with its reason."""
        try:
            job()
        except Exception as error:
            reason, code = f"{type(error).__name__}: {error}", 1
            if getattr(error, "errno", None) in FULL or "disk is full" in str(error):  # SQLite's words
                reason, code = "the hub's disk is full", 8
            elif isinstance(error, MemoryError):
                reason, code = "the hub's memory is full", 8
            self._failed(error)
            self._call(lambda: self._state.failed(reason, code, time.monotonic()))

    def write_leases(self, action: do.Lease) -> None:
        self._shards.own(action.round, action.shards)
        if action.fits:
            self.work.fits(action.fits)
        self.ledger.leased(action.round, action.leases)
        self._call(lambda: self._state.leased(action.round, time.monotonic()))

    def find_fingerprint(self, action: do.FindFingerprint) -> None:
        truth = self.work.fingerprint(action.round)
        self._call(lambda: self._state.fingerprinted(action.round, truth, time.monotonic()))

    def inherit(self, action: do.Inherit, parts: ChunkBuffer) -> None:
        try:
            self.work.inherit(action.peer, parts.data(), action.share)
        except UpdateRejected as error:
            self._shards.warn(error.peer, f"its legacy cannot be used: {error.reason}")

    def commit(self, action: do.Commit, opened: dict[str, Future[bytes]]) -> None:
        """Aggregate, make durable, tell the I/O thread, in this order."""
        packets = {session: p.result() for session, p in opened.items()}
        tokens = {
            c.peer: self.work.tokens([i for ids in c.leases.values() for i in sample_ids(ids)])
            for c in action.claims
        }
        claims = {c.peer: c for c in action.claims}
        if any(tokens.values()):
            # Who delivers no work would get weight 0, and what is in the packet be lost: it stays a residual.
            claims = {peer: c for peer, c in claims.items() if tokens[peer]}
        rejected, denied = dict[str, str](), dict[str, str]()
        packet: bytes | None = None
        while claims and packet is None:
            equal = not any(tokens[peer] for peer in claims)  # nothing trained yet: everybody counts the same
            updates = [
                WeightedPacket(peer, packets.get(c.session, b""), 1.0 if equal else float(tokens[peer]))
                for peer, c in claims.items()
            ]
            try:
                packet = self._shards.aggregate(action, updates)
            except Ended:
                return
            except Unmoved:
                break
            except UpdateRejected as error:
                rejected[error.peer] = error.reason
                if error.by:
                    denied[error.peer] = error.by
                if claims.pop(error.peer, None) is None:
                    raise
        if packet is None:
            lost = dict(self._shards.gather.lost)
            done = do.CommitDone(action.round, 0, b"", {}, {}, rejected, lost, denied)
            self._call(lambda: self._state.committed(done, time.monotonic()))
            return
        accepted = tuple(claims.values())
        opened_at = self.opened.pop(action.round, time.time())
        row = row_of(action, accepted, sum(tokens[peer] for peer in claims), opened_at, time.time())
        counted = tuple(Counted(r, c.peer, c.session, ids) for c in accepted for r, ids in c.leases.items())
        row = self.ledger.commit(row, packet, counted, self._shards.given())
        self._objects.committed(action.round, packet, row.sha256)
        sizes = {peer: len(packets.get(c.session, b"")) for peer, c in claims.items()}
        done = do.CommitDone(
            action.round,
            len(packet),
            row.sha256,
            sizes,
            {peer: tokens[peer] for peer in claims},
            rejected,
            dict(self._shards.gather.lost),
            denied,
            self._shards.moved,
        )
        self._call(lambda: self._state.committed(done, time.monotonic()))
        self.work.committed(action.round, packet)
        self._shards.committed(action)
