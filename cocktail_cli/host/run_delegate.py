"""RunDelegate: a run's model side, built from recipes for transport's hub; and the hub's settings."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli import __version__
from cocktail_cli.assembly import Extension, UpdateJudge, prepared, update_judges
from cocktail_cli.ui import counted
from transport import Ledger, RunSettings
from transport.protocol import Rung, UpdateRejected, WeightedPacket, messages

from .durable_aggregator import DurableAggregator
from .snapshot_thread import CommittedModel, replayed, snapshot_object

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.data import Corpus, StreamedCorpus
    from recipes.models import Base, BaseFile
    from recipes.planning import MemoryPlan

log = logging.getLogger(__name__)

LONGEST_LEASE = 16  # rounds; without staleness an update belongs to its own round
QUICKLY_REPLAYED = 256 << 20  # bytes of a model and its packets
TOLD = {10**i for i in range(9)}  # the counts of shortened packets at which a peer is warned of


class RunDelegate:
    """A run's corpus, base model and aggregator, as the hub calls them (transport.HubDelegate says when).

    `recover` comes first, `close` last.

    Args:
        ledger: folder of the run's ledger, where the aggregator's error feedback is stored too.
    """

    def __init__(self, recipe: Recipe, base: Base, corpus: Corpus | StreamedCorpus, ledger: Path) -> None:
        from recipes.algorithm import aggregator_of
        from recipes.errors import ModelError
        from recipes.models import count_trainable

        self.recipe, self.base, self.corpus = recipe, base, corpus
        self.parameters = count_trainable(recipe, base.folder)  # P
        if (shards := recipe.compression.shard_count) > self.parameters:
            few = f"the model's {self.parameters:,} parameters"
            raise ModelError(f"compression.shards is {shards:,}, more than {few}")
        self.aggregator = aggregator_of(recipe, self.parameters)
        self.durable = DurableAggregator(self.aggregator, ledger)
        self.opens = self.aggregator.open
        self.model = CommittedModel(recipe, base.folder, ledger.parent)
        served = () if base.licence.gated else base.files
        self.files = {f"base/{file.name}": base.folder / file.name for file in served}
        self.hashes = {f"hashes/base/{file.name}": file.blocks for file in served}
        self.held_out = corpus.pack_held_out()
        self._held_out_terms: list[int] | None = None
        self.shortened = Counter[str]()  # rounds in which a peer's packet was taken only in part
        self.tell: Callable[[str, str], None] = lambda peer, message: None
        self.judges: Sequence[UpdateJudge] = ()  # from `recover` on
        self.taken: Sequence[WeightedPacket] = ()  # the updates in the newest aggregate

    @cached_property
    def memory(self) -> MemoryPlan | None:
        """Plan the memory of an ordinary peer, whose machine is not known; None where the model cannot be
        traced. Takes seconds the first time."""
        from recipes.planning import Machine, plan_memory

        recipe = self.recipe
        asked, wants = recipe.training.per_device_train_batch_size, recipe.swarm.requires
        machine = Machine(wants.vram or 0 if wants else 0, gpu=wants is not None)
        try:
            return plan_memory(recipe, self.base.folder, 1 if asked == "auto" else asked, machine)
        # code of the model may raise anything on tensors without data, and train all the same
        except Exception:
            log.debug("no estimate for joiners", exc_info=True)
            return None

    @property
    def needs(self) -> dict[str, int]:
        """Estimate what a step takes of a peer, for the question that joiners are asked: bytes of memory and
        of a packet. Empty where the model cannot be traced."""
        from recipes.planning import packet_bytes

        if self.memory is None:
            return {}
        return {"memory": self.memory.bytes, "packet": packet_bytes(self.recipe, self.memory.parameters)}

    @cached_property
    def prepared(self) -> dict[Extension, Any]:
        """Compute what extensions need of it at a hub. Takes seconds the first time."""
        return prepared(self)

    @cached_property
    def data_digest(self) -> str:
        """Return the digest of the corpus. Takes seconds the first time."""
        return self.corpus.digest()

    def recover(self, ledger: Ledger, drop_error_feedback: bool = False) -> list[str]:
        """Bring the error feedback to where the ledger stands, before the hub starts; return a sentence about
        what was dropped. Raises LedgerDamaged where it is lost, and is not to be dropped."""
        said = self.durable.recover(ledger, drop_error_feedback)
        self.judges = update_judges(self, ledger.next_round)
        return said

    def mend_fingerprints(self, ledger: Ledger, failed: bool) -> list[str]:
        """Replay the ledger, whose packets and base are whole, and correct the fingerprints of rounds in
        which a peer that was alone has lied. Long ledgers are replayed only where the run has `failed`. Where
        most differ it is not the fingerprints that are false, and none are corrected.

        Returns a sentence about them; none where every fingerprint is true.
        """
        rows, packets = ledger.rounds(), sum(row.length for row in ledger.rounds())
        if not rows or (4 * self.parameters + packets > QUICKLY_REPLAYED and not failed):
            return []
        with self.model.fold(len(rows), snapshots=False) as fold:
            truths = {x.round: x.fingerprint for x in replayed(fold)}
        known = [row for row in rows if row.fingerprint]
        false = [row.round for row in known if row.fingerprint != truths[row.round]]
        if not false or 2 * len(false) >= len(known):
            return []
        for round in false:
            ledger.proven(round, truths[round])
        places = ", ".join(map(str, false))
        return [f"{ledger.folder}: fingerprints that a replay has not found were corrected: rounds {places}"]

    def close(self) -> None:
        from recipes.data import StreamedCorpus

        if isinstance(self.corpus, StreamedCorpus):
            self.corpus.close()
        for judge in self.judges:
            judge.close()
        self.durable.close()

    def samples(self, ids: Sequence[int]) -> bytes:
        return self.corpus.pack(ids)

    def tokens(self, ids: Sequence[int]) -> int:
        return self.corpus.tokens(ids)

    def weight(self, ids: Sequence[int]) -> float:
        """Count the terms of the loss that these samples add: trained tokens, or samples."""
        return float(self.corpus.tokens(ids) if self.recipe.objective.term == "token" else len(ids))

    def held_out_terms(self, part: int, parts: int) -> int:
        """Count the terms of the loss in every `parts`-th held-out sample from `part` on."""
        if self._held_out_terms is None:
            from recipes.objectives import objective_of

            objective = objective_of(self.recipe)
            self._held_out_terms = [objective.terms([sample]) for sample in self.corpus.held_out]
        return sum(self._held_out_terms[part::parts])

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Return what the loss of a term, and each further figure of the objective, lies between."""
        from recipes.models import vocabulary_of
        from recipes.objectives import objective_of

        return objective_of(self.recipe).bounds(vocabulary_of(self.base.folder) or 0)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self.aggregator.add(round, peer, packet)

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        weighted = [one._replace(weight=one.weight * self._judged(one.peer)) for one in updates]
        packet = self.durable.aggregate(round, weighted)
        self.taken = updates
        for taken in self.aggregator.shortened:
            self.shortened[taken.peer] += 1
            if (count := self.shortened[taken.peer]) in TOLD:
                times = counted(count, "time")
                said = f"its packet of round {round} was shortened ({times} so far): {taken.why}"
                self.tell(taken.peer, said)
        return packet

    def _judged(self, peer: str, packet: bool = True) -> float:
        """Return what a peer's updates count for. Raises UpdateRejected where a judge objects."""
        for judge in self.judges:
            if why := judge.objection(peer, packet):
                raise UpdateRejected(peer, why)
        return math.prod(judge.weight(peer) for judge in self.judges)

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        share *= self._judged(peer, packet=False)
        if (scale := self.durable.inherit(peer, packet, share)) < 1:
            self.tell(peer, f"its handoff was shortened to {scale:.0%}: no honest residual is so long")

    def committed(self, round: int, packet: bytes) -> None:
        self.durable.committed(round)
        held = frozenset(taken.peer for taken in self.aggregator.shortened)
        for judge in self.judges:
            judge.committed(packet, self.taken, held)
        self.taken = ()

    def fingerprint(self, round: int) -> int:
        return self.model.load(round).global_model.fingerprint

    def object(self, name: str) -> bytes | Path:
        if name == "eval":
            return self.held_out
        if name in self.hashes:
            return self.hashes[name]
        if name in self.files:
            return self.files[name]
        if not self.serves_snapshots:
            raise KeyError(f"{name} has the weights of a gated model, which are not passed on")
        return snapshot_object(self.model.snapshots, name)

    @property
    def serves_snapshots(self) -> bool:
        """True unless they contain the weights of a gated base; adapters do not."""
        return self.recipe.lora is not None or not self.base.licence.gated


def rungs_of(recipe: Recipe) -> tuple[Rung, ...]:
    """Return what the hub has to know of the settings that a round may have."""
    both = zip(recipe.compression.ladder, recipe.compression.rungs, strict=True)
    return tuple(Rung(one.need, setting.local_steps, one.peers, setting.words) for one, setting in both)


def settings_of(
    work: RunDelegate, run: str, local_peers: int = 1, own_key: str = "", guests: int = 0
) -> RunSettings:
    """Describe the run for its hub.

    Args:
        local_peers: started on this machine, with `own_key`.
        guests: peers from elsewhere that the first round waits for.
    """
    from recipes.algorithm import PacketLimits
    from recipes.models import base_digests, width_of

    recipe = work.recipe
    limits = PacketLimits(recipe.compression, work.parameters)
    swarm, batch = recipe.swarm, recipe.training.global_batch_size
    width = width_of(work.base.folder)
    steps = math.ceil(len(work.corpus) / batch)
    return RunSettings(
        run=run,
        recipe=recipe.to_json(),
        recipe_hash=recipe.recipe_hash,
        samples=len(work.corpus),
        global_batch=batch,
        rungs=rungs_of(recipe),
        cost=work.corpus.costs(width) if width else None,
        base=tuple(announced(file, bool(work.base.licence.gated)) for file in work.base.files),
        versions=package_versions(),
        holds={**base_digests(work.base.files), "recipe": recipe.recipe_hash},
        parameters=work.parameters,
        max_update=limits.upload(),
        needs=work.needs,
        licence=str(work.base.licence),
        longest_lease=LONGEST_LEASE if recipe.compression.staleness else 1,
        bounds=work.bounds,
        eval_terms=work.held_out_terms,
        eval=bool(work.corpus.held_out),
        eval_every=recipe.checkpoint.eval_every(steps),
        join=swarm.join,
        own_key=own_key,
        min_peers=swarm.min_peers,
        first_peers=local_peers + guests,
        guests=guests,
        max_peers=swarm.max_peers,
        start_timeout=swarm.start_timeout,
        step_timeout=swarm.step_timeout,
        peer_timeout=swarm.peer_timeout,
    )


def announced(file: BaseFile, gated: bool) -> messages.File:
    hashes = hashlib.sha256(file.blocks).hexdigest()
    return messages.File(file.name, file.size, file.sha256, hashes, gated)


def package_versions() -> dict[str, str]:
    """Return the versions that hub and peers must share, beside the protocol's."""
    from compress import PACKET_VERSION

    return {"codec": str(PACKET_VERSION)}


def versions() -> dict[str, str]:
    """Return the versions that a peer states in its handshake: cocktail's own, and `package_versions`."""
    return {"cocktail": __version__, **package_versions()}
