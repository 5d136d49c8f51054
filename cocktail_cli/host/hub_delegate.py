"""What the hub cannot know, put together from recipes: transport's `Work`, its settings, and x' as the
ledger has it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli import __version__
from cocktail_cli.aggregation import KeptOwner
from cocktail_cli.ui import counted
from transport import Ledger, RunSettings
from transport.protocol import File, UpdateRejected, WeightedPacket

from .contribution_probe import Probing
from .run_folder import SNAPSHOTS
from .snapshot_thread import Folded, Place, served

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.data import Corpus, StreamedCorpus
    from recipes.models import Base, BaseFile
    from recipes.training import Probe


LONGEST_LEASE = 16  # rounds; a packet that follows its own round's work cannot be late by any
TOLD = {10**i for i in range(9)}  # how often a peer was held, where that is told


class RunWork:
    """A run's corpus, its base model and the owner's half of Algorithm 1. `recover` first, `close` last.

    Args:
        ledger: the folder of the run's ledger; `owner` keeps its error there, else it is only read here.
    """

    def __init__(self, recipe: Recipe, base: Base, corpus: Corpus | StreamedCorpus, ledger: Path) -> None:
        from recipes.algorithm import aggregator_of
        from recipes.errors import ModelError
        from recipes.models import check_trainable, count_trainable

        self.recipe, self.base, self.corpus, self.ledger = recipe, base, corpus, ledger
        check_trainable(recipe, base.folder)
        self.parameters = count_trainable(recipe, base.folder)  # P
        if (shards := recipe.compression.shards) > self.parameters:
            few = f"the model's {self.parameters:,} parameters"
            raise ModelError(f"compression.shards is {shards:,}, more than {few}")
        self.owner = KeptOwner(aggregator_of(recipe, self.parameters), ledger)
        self.files = {f"base/{file.name}": base.folder / file.name for file in base.files}
        self.hashes = {f"hashes/base/{file.name}": file.blocks for file in base.files}
        self.held_out = corpus.pack_held_out()
        self.held = Counter[str]()  # rounds in which a peer's packet was taken only in part
        self.tell: Callable[[str, str], None] = lambda peer, message: None
        self.probing: Probing | None = None  # where the recipe asks for it, from `recover` on
        self.taken: Sequence[tuple[str, bytes, float]] = ()  # what the newest aggregate was made of

    def recover(self, ledger: Ledger) -> None:
        """Bring all that is kept to where the ledger stands, before the hub starts. Raises LedgerError."""
        self.owner.recover(ledger)
        if self.recipe.swarm.probe_batch_size:
            round = len(ledger.rounds())
            self.probing = Probing(lambda: self.probe(round), lambda peer, what: self.tell(peer, what))
            self.probing.start()

    def probe(self, round: int) -> Probe:
        """The probe, at x' of `round`. Slow."""
        from recipes.data import Corpus
        from recipes.models import load_trained
        from recipes.training import Probe

        assert isinstance(self.corpus, Corpus)  # a recipe with both a probe and a stream is refused
        model = load_trained(self.recipe, self.base.folder, quantized=False)
        probe = Probe(model, self.recipe, self.corpus)
        if round:
            probe.start_from(folded(self.recipe, self.base.folder, self.ledger, round).common)
        return probe

    def close(self) -> None:
        """The hub has ended."""
        from recipes.data import StreamedCorpus

        if isinstance(self.corpus, StreamedCorpus):
            self.corpus.close()
        if self.probing:
            self.probing.close()
        self.owner.close()

    def samples(self, ids: Sequence[int]) -> bytes:
        return self.corpus.pack(ids)

    def tokens(self, ids: Sequence[int]) -> int:
        return self.corpus.tokens(ids)

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        self.owner.owner.arrived(round, peer, packet)

    def fits(self, size: int) -> None:
        self.owner.owner.fits(size)

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        from recipes.algorithm import equal_weights

        if self.recipe.compression.weighting == "uniform":
            updates = equal_weights(updates)
        if self.probing:
            for peer, _, _ in updates:
                if why := self.probing.objection(peer):
                    raise UpdateRejected(peer, why)
        weighed = self.probing.weighed(updates) if self.probing else updates
        packet = self.owner.aggregate(round, [WeightedPacket(*one) for one in weighed])
        self.taken = updates
        for taken in self.owner.owner.held:
            self.held[taken.peer] += 1
            if self.held[taken.peer] in TOLD:
                times = counted(self.held[taken.peer], "time")
                told = f"its packet of round {round} was shortened ({times} so far): {taken.why}"
                self.tell(taken.peer, told)
        return packet

    def own(self, round: int, shards: Sequence[int], keep: Callable[[bytes], int]) -> bool:
        return self.owner.own(round, shards, keep)

    def joined(
        self,
        round: int,
        hubs: Sequence[int],
        own: bytes,
        parts: Sequence[tuple[str, Sequence[int], bytes]],
    ) -> bytes:
        return self.owner.joined(round, own, parts) if parts else own

    def restricted(self, peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
        from compress import PacketError
        from recipes.algorithm import select_shards, shards_in

        try:
            part = select_shards(packet, shards, self.recipe.compression.shards)
            return part, shards_in(part, self.recipe.compression.shards)
        except PacketError as error:
            raise UpdateRejected(peer, str(error)) from error

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        if self.probing:
            if peer in self.probing.found:
                raise UpdateRejected(peer, self.probing.found[peer])
            share *= self.probing.weights.get(peer, 1.0)
        if (scale := self.owner.inherit(peer, packet, share)) < 1:
            self.tell(peer, f"its legacy was shortened to {scale:.0%}: no honest residual is so long")

    def committed(self, round: int, packet: bytes) -> None:
        """The owner's error moved with the aggregate already, and x' is folded from the ledger when asked
        for.
        """
        self.owner.committed(round)
        if self.probing:
            held = frozenset(taken.peer for taken in self.owner.owner.held)
            self.probing.committed(packet, self.taken, held)
        self.taken = ()

    def fingerprint(self, round: int) -> int:
        return folded(self.recipe, self.base.folder, self.ledger, round).common.fingerprint

    @property
    def place(self) -> Place:
        """Where x' of this run is folded from."""
        return Place(self.recipe, self.base.folder, self.ledger.parent)

    def object(self, name: str) -> bytes | Path:
        if name == "eval":
            return self.held_out
        if name in self.hashes:
            return self.hashes[name]
        return self.files[name] if name in self.files else served(self.ledger.parent / SNAPSHOTS, name)


def settings_of(work: RunWork, run: str, first_peers: int = 1, own_key: str = "") -> RunSettings:
    """The run as its hub sees it. `first_peers`: how many start with it on this machine, by its key."""
    from recipes.models import base_digests

    recipe = work.recipe
    swarm, batch, local_steps = (
        recipe.swarm,
        recipe.training.global_batch_size,
        recipe.compression.local_steps,
    )
    steps = math.ceil(len(work.corpus) / batch)
    return RunSettings(
        run=run,
        recipe=recipe.to_json(),
        recipe_hash=recipe.recipe_hash,
        samples=len(work.corpus),
        global_batch=batch,
        local_steps=local_steps,
        base=tuple(announced(file) for file in work.base.files),
        versions=package_versions(),
        holds={**base_digests(work.base.files), "recipe": recipe.recipe_hash},
        parameters=work.parameters,
        shards=recipe.compression.shards,
        owners=swarm.owners,
        longest_lease=LONGEST_LEASE if recipe.compression.staleness else 1,
        eval=bool(work.corpus.held_out),
        eval_every=recipe.checkpoint.eval_every(steps),
        join=swarm.join,
        own_key=own_key,
        min_peers=swarm.min_peers,
        first_peers=first_peers,
        max_peers=swarm.max_peers,
        start_timeout=swarm.start_timeout,
        step_timeout=swarm.step_timeout * local_steps,
        peer_timeout=swarm.peer_timeout,
    )


def announced(file: BaseFile) -> File:
    return File(file.name, file.size, file.sha256, hashlib.sha256(file.blocks).hexdigest())


def package_versions() -> dict[str, str]:
    """What hub and peers must have in common, beside the protocol: the packets' format."""
    from compress import PACKET_VERSION

    return {"codec": str(PACKET_VERSION)}


def folded(recipe: Recipe, base: Path, ledger: Path, stop: int | None = None) -> Folded:
    """x' before round `stop` (None: after all that are committed), in memory: the newest snapshot before it,
    or the base weights, plus packets, in order.
    """
    return Place(recipe, base, ledger.parent).folded(stop)


def versions() -> dict[str, str]:
    """Versions that a peer states in its handshake: cocktail's own beside those of `package_versions`."""
    return {"cocktail": __version__, **package_versions()}
