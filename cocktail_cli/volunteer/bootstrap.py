"""A joiner's way to the global model: base files, weights by the cheapest way, then packets.

The line is never idle: weights first, then packets, far ahead. The model is read, verified and loaded while
packets arrive, and packets are applied while the next ones arrive.
"""

from __future__ import annotations

import gc
import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.assembly import model_extensions
from cocktail_cli.errors import hubs_fault
from cocktail_cli.machine import weaknesses
from cocktail_cli.ui import Event, Progressed, ProgressMeter, Warning, counted, megabytes

from .base_weights import (
    DownloadPlan,
    check_headers,
    fetch_base,
    fetch_files,
    fetch_gated,
    fetched_snapshot,
    is_weights,
    missing_files,
    snapshot_files,
    spool_within,
)

if TYPE_CHECKING:
    from torch import nn

    from cocktail_cli.assembly import PeerBuilder, PeerExtension
    from recipes.config import Recipe
    from recipes.training import Peer
    from transport import CatchUpDownloads, PeerLink, WantedFile
    from transport.peer import Progress
    from transport.protocol import messages
    from transport.transfer import Download

    from .checkpoint_store import StoredCheckpoint
    from .limits import VolunteerLimits
    from .run_link import RunBounds

LEAVE_WITHIN = 5.0  # seconds
A_BYTE = 2  # parameters for a byte of stored weights, at most
ADAPTERS = 16  # parameters of adapters for a byte of the base's, at most
A_NUMBER, BESIDE = 16, 1 << 30  # bytes of stored weights for a parameter, at most, and for all else in them
HEADER = 16 << 20  # bytes of a snapshot that are no numbers, beside the buffers of the base
LARGE = 64 << 30  # bytes of weights whose model is made before one of them is asked for
MOST_LAYERS = 2048  # of a model: its modules are made before its weights are here
WEIGHTS_FILE = "model.safetensors"  # of a snapshot
OPTIMIZER_RESTARTS = (
    "its optimizer begins anew: what it keeps is of another number of devices, or cannot be kept"
)


@dataclass(frozen=True)
class Prepared:
    """A peer that holds some round's global model, and what it was built from."""

    peer: Peer
    holds: dict[str, str]  # digests that the hub compares with its own
    bounds: RunBounds  # of the run's objects


class Bootstrap:
    """Leads from the hub's welcome to a peer that can train.

    Args:
        show: shows progress.
        interruptible: context that raises a request to leave, for work that polls nothing.
        checkpoint: of an earlier session in this run; used up.
    """

    def __init__(
        self,
        link: PeerLink,
        limits: VolunteerLimits,
        show: Callable[[Event], None],
        interruptible: Callable[[], AbstractContextManager[None]],
        checkpoint: StoredCheckpoint | None = None,
    ) -> None:
        welcome = link.welcome
        self.downloads = DownloadPlan(welcome, limits.max_disk, checkpoint.round if checkpoint else None)
        self.recipe, self.machine = self.downloads.recipe, self.downloads.machine
        self.link, self.limits, self.show, self.interruptible = link, limits, show, interruptible
        self.files, self.folder = self.downloads.files, self.downloads.folder
        self.micro_batch = micro_batch_of(self.recipe, limits.micro_batch_size)
        self.imports = Imports(self.recipe, self._check_sizes)
        self.frozen, self.checkpoint = self.downloads.frozen, checkpoint
        self.builder: PeerBuilder | None = None  # of the peer; None: it is built here
        self.extensions: Sequence[PeerExtension] = ()  # of this peer
        self.stays = False  # a snapshot stays on the disk until `kept` is closed
        self.kept = ExitStack()
        self.spool = spool_within(limits.max_disk)
        self._snapshot: dict[str, Path] = {}  # object -> its file

    def carry_out(self) -> Prepared:
        """Build the peer and bring it to the newest committed round.

        Raises:
            Failure: rejected, out_of_disk.
            NotServed, TooLong, NoRoom, ForeignPacket, Leaving, RunOver, LinkLost.
        """
        from recipes.training import foreign_packet
        from transport import CatchUpDownloads

        if self.builder is None:
            self.imports.device = self.limits.devices[0]
        with (
            closing(CatchUpDownloads(self.link, self.machine, self.spool, self._progress)) as supply,
            self.imports,
        ):
            supply.beside = self._fetch_elsewhere
            prepared = self._begun(supply)
            worker = prepared.peer.worker
            first = worker.global_model.round
            for round, packet in supply.packets():
                if round >= worker.global_model.round:  # a peer of an earlier session has what it had
                    with foreign_packet():
                        worker.catch_up(packet)
        packets = counted(worker.global_model.round - first, "packet")
        self.show(Progressed(f"caught up to round {worker.global_model.round} with {packets}"))
        return prepared

    def _fetch_elsewhere(self, downloads: Sequence[Download]) -> None:
        for one in self.extensions:
            one.files(downloads)

    @property
    def files_here(self) -> dict[str, Path]:
        """Map objects of the run to files on this disk, but for a gated base, which is not passed on."""
        missing = missing_files(self.files, self.folder)
        base = [file.name for file in self.files if not file.gated and file not in missing]
        return {f"base/{name}": self.folder / name for name in base} | self._snapshot

    def _begun(self, supply: CatchUpDownloads) -> Prepared:
        """Build the peer at the first round of the cheapest way that the hub can serve."""
        from transport.peer import CatchUpState
        from transport.protocol import NotServed

        while True:
            try:
                return self._by_plan(supply)
            except NotServed:
                if self.machine.state is not CatchUpState.WEIGHTS or not self.machine.gone(supply.ask_anew):
                    raise

    def _by_plan(self, supply: CatchUpDownloads) -> Prepared:
        plan, go_on = self.machine.plan, self.link.raise_if_leaving
        fetch = self._fetch(supply)
        small, new = snapshot_files(self.files), missing_files(self.files, self.folder)
        fetch_base(small, self.folder, fetch, go_on, self.limits.max_disk)
        self.imports.read(self.folder)
        needed = self.files if self.frozen or plan.offer is None else small
        if sum(file.size for file in needed) + (plan.offer.size if plan.offer else 0) > LARGE:
            self.imports.wait(go_on)
            self._check_sizes(self.imports)
        fetch_base(needed, self.folder, fetch, go_on, self.limits.max_disk)
        with ExitStack() as guest:
            snapshot = None
            if plan.offer is not None:
                fetched = fetched_snapshot(plan.offer, self.files, fetch, go_on, self.limits.max_disk)
                stays = self.kept if self.stays else guest
                snapshot = stays.enter_context(fetched)
                name = f"snapshot/{plan.offer.round}/{WEIGHTS_FILE}"
                self._snapshot = {name: snapshot / WEIGHTS_FILE} if self.stays else {}
            self.machine.weights_here()
            supply.ask_ahead()
            fetch_files([file for file in needed if file not in new], self.folder, fetch, go_on)
            self.imports.wait(go_on)
            self._check_sizes(self.imports)
            weights = [self.folder / file.name for file in needed if is_weights(file)]
            check_headers([*weights, *([snapshot / WEIGHTS_FILE] if snapshot is not None else [])])
            from .run_link import RunBounds  # here: it brings in ZeroMQ

            bounds = RunBounds(self.recipe, self.imports.parameters, self.imports.vocabulary)
            self.machine.longest = bounds.packet
            supply.ask_ahead()  # of packets that are longer than could be asked for before
            return self._loaded(snapshot, plan.start, needed, bounds)

    def _check_sizes(self, made: Imports) -> None:
        """Raise Failure (rejected) where config.json is of a model that the offered weights cannot be."""
        if made.given is not None:
            return
        weights, offer = sum(file.size for file in self.files if is_weights(file)), self.machine.plan.offer
        if made.stored > A_BYTE * weights or made.parameters > ADAPTERS * weights:
            makes = max(made.stored, made.parameters)
            model = f"the run's config.json and recipe make {makes:,} parameters"
            raise hubs_fault(f"{model} of weights that have {weights:,} bytes")
        if weights > A_NUMBER * made.stored + BESIDE:
            model = f"weights of {megabytes(weights)} as a model of {made.stored:,} parameters"
            raise hubs_fault(f"the run offers {model}")
        least = 4 * made.parameters
        if offer is not None and not least <= offer.size <= least + weights + HEADER:
            trained = f"{made.parameters:,} parameters are trained, of {least:,} bytes"
            raise hubs_fault(f"the run offers a snapshot of {offer.size:,} bytes; {trained}")

    def _fetch(self, supply: CatchUpDownloads) -> Callable[[Sequence[WantedFile]], None]:
        """Return a fetch from the run's hub, of gated files from the Hugging Face hub."""
        gated = {f"base/{file.name}" for file in self.files if file.gated}
        model = self.recipe.model
        what = f"fetching {model.model_name_or_path} from the Hugging Face hub"
        meter = ProgressMeter(self.show, what, "bytes")

        def fetch(wanted: Sequence[WantedFile]) -> None:
            own = [file for file in wanted if file.name in gated]
            if own:
                with self.interruptible():
                    fetch_gated(model, own, meter)
            supply.files([file for file in wanted if file.name not in gated])

        return fetch

    def restore_checkpoint(self, peer: Peer) -> None:
        """Restore the checkpoint; only residual and optimizer where the model came another way."""
        from transport.peer import CatchUpSource

        if self.checkpoint is not None:
            self.checkpoint.restore(peer, self.machine.plan.way is CatchUpSource.OWN)
            self.show(Progressed(f"back with what it kept at round {self.checkpoint.round}"))
            if not peer.trainer.stepped and peer.recipe.training.optim != "sgd":  # which keeps nothing
                self.show(Warning(OPTIMIZER_RESTARTS))

    def _loaded(
        self, snapshot: Path | None, round: int, read: Sequence[messages.File], bounds: RunBounds
    ) -> Prepared:
        """Build the peer with the global model of `round`. `read`: the base files it is made from."""
        from recipes.models import available_attention, base_digests, load_trained
        from recipes.training import build_peer, micro_batch_for

        self.show(Progressed("loading the model"))
        recipe, device = self.recipe, self.limits.devices[0]
        batch, name = self.micro_batch or 0, self.link.name
        wanted = recipe.model.attn_implementation
        if available_attention(wanted, device) != wanted:
            self.show(Warning(f"{wanted} is not on this machine: transformers chooses, which may be slower"))
        for weakness in weaknesses(self.limits.devices, recipe):
            self.show(Warning(weakness))
        with self.interruptible():
            if self.builder is not None:
                peer = self.builder.build(recipe, self.folder, snapshot, batch, round)
            else:
                model = load_trained(recipe, self.folder, device, snapshot)
                peer = build_peer(model, recipe, batch, name, round, device)
            if not peer.micro_batch:
                peer.micro_batch = micro_batch_for(peer.trainer, recipe, self.link.raise_if_leaving)
        peer.trainer.extensions = [*peer.trainer.extensions, *model_extensions(recipe)]
        self.restore_checkpoint(peer)
        recipe_hash = hashlib.sha256(self.link.welcome.recipe.encode()).hexdigest()
        return Prepared(peer, {**base_digests(read), "recipe": recipe_hash}, bounds)

    def _progress(self, p: Progress) -> None:
        from transport.peer import CatchUpState

        self.imports.check()
        what = f"fetching the {p.way.value}" if p.state is CatchUpState.WEIGHTS else "catching up"
        self.show(Progressed(what, p.done, p.total, "bytes", round(p.rate), p.eta))


class Imports:
    """Imports and compiles what the model needs, for seconds, in a thread, while its weights arrive.

    So a model that this machine's transformers cannot make is found before its weights are fetched. No other
    thread may import these meanwhile: transformers' lazy modules are not thread-safe.

    check: raises where the weights that are offered cannot be this model's.
    """

    def __init__(self, recipe: Recipe, check: Callable[[Imports], None] = lambda _: None) -> None:
        self.recipe, self._check_made = recipe, check
        self.thread = threading.Thread(target=self.bring, name="imports", daemon=True)
        self.folders: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.made = threading.Event()  # the model is known; the exchange is compiled while it is loaded
        self.error: Exception | None = None
        self.device = "cpu"  # of the exchange: its kernels are compiled
        self.given: nn.Module | None = None  # the model that trains, where config.json does not make it
        self.parameters = self.stored = 0  # trained, and in the base: once the model is known
        self.vocabulary: int | None = None

    def bring(self) -> None:
        try:
            collects = gc.isenabled()
            gc.disable()  # it would look through the libraries again and again: a fifth of this time
            try:
                from transformers import AutoModelForCausalLM, get_scheduler  # noqa: F401

                from recipes.algorithm import compressor_of, warm_up_codec
                from recipes.models import layers_of, meta_trained_model
                from recipes.weight_files import layout_of
            finally:
                if collects:  # the collector is the whole program's, which may have turned it off
                    gc.enable()

            if (folder := self.folders.get()) is not None:
                if (layers := layers_of(folder) or 0) > MOST_LAYERS:
                    said = f"the run's model has {layers:,} layers by its config.json"
                    raise hubs_fault(f"{said}, at most {MOST_LAYERS:,} are possible")
                model = self.given or meta_trained_model(self.recipe, folder)
                self.parameters = layout_of(model).size
                adapters = self.recipe.lora is not None
                self.stored = sum(p.numel() for p in model.parameters() if not (adapters and p.requires_grad))
                self.vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
                self._check_made(self)
                self.made.set()
                warm_up_codec(compressor_of(self.recipe.compression), self.parameters, self.device)
        except Exception as error:
            self.error = error
        finally:
            self.made.set()

    def read(self, folder: Path) -> None:
        """Hand over the folder in which the model's config now is."""
        self.folders.put(folder)

    def check(self) -> None:
        """Raise what the thread met."""
        if self.error is not None:
            raise self.error

    def wait(self, go_on: Callable[[], object]) -> None:
        while not self.made.wait(0.1):
            go_on()
        self.check()

    def __enter__(self) -> Imports:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.folders.put(None)
        self.thread.join(LEAVE_WITHIN)  # Python does not like to end in the middle of an import


def micro_batch_of(recipe: Recipe, wanted: int | None) -> int | None:
    """Choose the sequences in memory at once: this machine's, else the recipe's; None: to be measured."""
    asked = recipe.training.per_device_train_batch_size
    return wanted or (None if asked == "auto" else asked)
