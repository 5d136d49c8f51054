"""A joiner's way to x': files of the base, weights by the cheapest way, packets, all of it under way early.

The order is that of the line, which is never idle: weights, then packets, far ahead. Reading, checking and
loading the model happen while packets come, and applying them while the next ones do.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.ui import Event, Progressed, Warning, counted

from .base_weights import (
    File,
    bring,
    check_names,
    fetch_base,
    fetched_snapshot,
    folder_of,
    is_weights,
    lacking,
    room,
    snapshot_files,
    to_fetch,
)

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.training import Peer
    from transport import CatchUpDownloads, PeerLink
    from transport.peer import Progress

    from .checkpoint_store import Kept
    from .gpu_processes import Ranks

LEAVE_WITHIN = 5.0  # seconds
ANEW = "its optimizer begins anew: what it keeps is of another number of devices, or cannot be kept"


@dataclass(frozen=True)
class Prepared:
    """A peer at some x' of the run, and what it was made from."""

    peer: Peer
    holds: dict[str, str]  # digests that the hub compares with its own


class Preparation:
    """From a welcome to a peer that can train.

    Args:
        device, micro_batch: what this machine's owner lends; None: as the recipe says.
        tell: hears of progress.
        interruptible: inside this context a wish to leave is raised: for work that polls nothing.
        kept: what this peer has of an earlier stay in this run; used up.
        max_disk: bytes that fetched models may take here.
    """

    def __init__(
        self,
        link: PeerLink,
        device: str,
        micro_batch: int | None,
        tell: Callable[[Event], None],
        interruptible: Callable[[], AbstractContextManager[None]],
        kept: Kept | None = None,
        max_disk: int | None = None,
    ) -> None:
        from recipes.config import recipe_from_json
        from transport import CatchUp
        from transport.peer import LocalCopy

        welcome = link.welcome
        self.recipe = recipe_from_json(welcome.recipe)
        check_names(welcome.base, self.recipe.model.trust_remote_code)
        self.link, self.device, self.tell, self.interruptible = link, device, tell, interruptible
        self.max_disk = max_disk
        self.files, self.folder = welcome.base, folder_of(welcome.base)
        self.micro_batch = micro_batch_of(self.recipe, micro_batch)
        self.imports = Imports(self.recipe)
        self.frozen = self.recipe.lora is not None  # the base is needed whatever way x' comes
        self.ranks: Ranks | None = None  # which the peer is to be spread over
        weights = [file for file in self.files if is_weights(file)]
        lacking = to_fetch(weights, self.folder)
        # What is kept goes into a model made from the base: without its weights it is no way by itself.
        own = LocalCopy(kept.round) if kept is not None and (self.frozen or not lacking) else None
        self.kept, self.machine = kept, CatchUp(welcome, lacking, own, room(max_disk), self.frozen)

    @property
    def bytes(self) -> int:
        """To be fetched before this peer can train, as far as known."""
        return to_fetch(snapshot_files(self.files), self.folder) + self.machine.plan.bytes

    def carry_out(self) -> Prepared:
        """The peer at x' of the newest committed round.

        Raises:
            Failure: rejected, out_of_disk.
            NotServed, Leaving, RunOver, LinkLost.
        """
        from transport import CatchUpDownloads

        with closing(CatchUpDownloads(self.link, self.machine, self.told)) as supply, self.imports:
            prepared = self.begun(supply)
            worker = prepared.peer.worker
            first = worker.common.round
            for _, packet in supply.packets():
                worker.catch_up(packet)
        packets = counted(worker.common.round - first, "packet")
        self.tell(Progressed(f"caught up to round {worker.common.round} with {packets}"))
        return prepared

    def begun(self, supply: CatchUpDownloads) -> Prepared:
        """The peer where its way begins: the cheapest way that can be gone."""
        from transport.peer import CatchUpState
        from transport.protocol import NotServed

        while True:
            try:
                return self.by_plan(supply)
            except NotServed:
                if self.machine.state is not CatchUpState.WEIGHTS or not self.machine.gone(supply.ask_anew):
                    raise

    def by_plan(self, supply: CatchUpDownloads) -> Prepared:
        plan, go_on = self.machine.plan, self.link.leave_or_go_on
        small, new = snapshot_files(self.files), lacking(self.files, self.folder)
        fetch_base(small, self.folder, supply.files, go_on, self.max_disk)
        self.imports.read(self.folder)
        needed = self.files if self.frozen or plan.offer is None else small
        fetch_base(needed, self.folder, supply.files, go_on, self.max_disk)
        with ExitStack() as guest:
            snapshot = None
            if plan.offer is not None:
                fetched = fetched_snapshot(plan.offer, self.files, supply.files, go_on, self.max_disk)
                snapshot = guest.enter_context(fetched)
            self.weights_here(supply)
            bring([file for file in needed if file not in new], self.folder, supply.files, go_on)
            return self.loaded(snapshot, plan.start, needed)

    def take_up(self, peer: Peer) -> None:
        """What this peer kept when it left: all of it, or what is its own where x' came another way."""
        from transport.peer import CatchUpSource

        if self.kept is not None:
            whole = self.machine.plan.way is CatchUpSource.OWN
            (self.kept.restore if whole else self.kept.restore_residual)(peer)
            self.tell(Progressed(f"back with what it kept at round {self.kept.round}"))
            if not peer.local.stepped and peer.recipe.training.optim != "sgd":  # which keeps nothing
                self.tell(Warning(ANEW))

    def weights_here(self, supply: CatchUpDownloads) -> None:
        self.machine.weights_here()
        supply.ask_ahead()

    def loaded(self, snapshot: Path | None, round: int, read: Sequence[File]) -> Prepared:
        """A peer with x' of `round`. `read`: what of the base it was made from."""
        self.imports.wait(self.link.leave_or_go_on)
        from recipes.models import available_attention, base_digests, load_trained
        from recipes.multi_gpu import spread_peer
        from recipes.training import build_peer, micro_batch_for

        self.tell(Progressed("loading the model"))
        wanted = self.recipe.model.attn_implementation
        if available_attention(wanted, self.device) != wanted:
            self.tell(Warning(f"{wanted} is not on this machine: transformers chooses, which may be slower"))
        as_peer = self.recipe, self.micro_batch or 1, self.link.name, round
        with self.interruptible():
            if self.ranks is not None:
                peer = spread_peer(self.ranks, self.folder, snapshot, *as_peer)
            else:
                peer = build_peer(load_trained(self.recipe, self.folder, self.device, snapshot), *as_peer)
            if self.micro_batch is None:
                peer.micro_batch = micro_batch_for(peer.local, self.recipe, self.link.leave_or_go_on)
        self.take_up(peer)
        recipe = hashlib.sha256(self.link.welcome.recipe.encode()).hexdigest()
        return Prepared(peer, {**base_digests(read), "recipe": recipe})

    def told(self, p: Progress) -> None:
        from transport.peer import CatchUpState

        self.imports.check()
        what = f"fetching the {p.way.value}" if p.state is CatchUpState.WEIGHTS else "catching up"
        self.tell(Progressed(what, p.done, p.total, "bytes", round(p.rate), p.eta))


class Imports:
    """Imports and compiles what this very model needs, in a thread, while its weights come: it takes seconds.

    A model that this machine's transformers cannot make is found out before its weights are here. No other
    thread may import these meanwhile: transformers' lazy modules do not bear it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.thread = threading.Thread(target=self.bring, name="imports", daemon=True)
        self.folders: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.error: Exception | None = None

    def bring(self) -> None:
        try:
            from transformers import AutoModelForCausalLM, get_scheduler  # noqa: F401

            from recipes.algorithm import mix_of, rehearse
            from recipes.models import meta_trained_model
            from recipes.weight_files import layout_of

            if (folder := self.folders.get()) is not None:
                model = meta_trained_model(self.recipe, folder)
                rehearse(mix_of(self.recipe.compression), layout_of(model).size)
        except Exception as error:
            self.error = error

    def read(self, folder: Path) -> None:
        """The model's config is here."""
        self.folders.put(folder)

    def check(self) -> None:
        """Raises what the thread met."""
        if self.error is not None:
            raise self.error

    def wait(self, go_on: Callable[[], object]) -> None:
        while self.thread.is_alive():
            go_on()
            self.thread.join(0.1)
        self.check()

    def __enter__(self) -> Imports:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.folders.put(None)
        self.thread.join(LEAVE_WITHIN)  # Python does not like to end in the middle of an import


def micro_batch_of(recipe: Recipe, wanted: int | None) -> int | None:
    """Sequences in memory at once: this machine's word, else the recipe's; None: what there is memory for."""
    asked = recipe.training.per_device_train_batch_size
    return wanted or (None if asked == "auto" else asked)
