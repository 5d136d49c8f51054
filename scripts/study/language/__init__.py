"""A language model as people have it, in place of the study's own, and documents to train it on.

Documents are files of a folder, each wholly of one part: trained on, of the half that settings are chosen
on, or of the half that is reported. Without a folder they are this machine's manual pages in other
languages than English. Their tokens are a file, so that a machine without such pages trains on the same.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compress import brought
from recipes.config import load_recipe
from recipes.models import load_trained
from recipes.training import FlatParameters, embeddings_of
from scripts.study.adapters import SCALE
from scripts.study.language.gguf_folder import model_folder
from scripts.study.train import Size, Text, Texts

PAGES = [Path("/usr/share/man") / language for language in ("de", "fr")]
OF_TWENTY = {0: "chosen", 1: "chosen", 2: "reported", 3: "reported"}  # parts of the documents
ANSWER = 16  # tokens of a continuation
AT_ONCE = {"cpu": 2048, "cuda": 1 << 15}  # tokens whose losses are measured together


class Beside(nn.Module):
    """A linear layer with the adapters of N peers: each works on rows of its own, the layer on all of them.

    Args:
        parts: all adapters of the peers, (N, ...) each, filled before a pass.
        first: number of A (N, r, in) among them; B (N, out, r) follows.
    """

    def __init__(self, base: nn.Module, parts: list[Tensor], first: int) -> None:
        super().__init__()
        self.base, self.parts, self.first = base, parts, first

    def forward(self, x: Tensor) -> Tensor:  # (N B, T, in)
        a, b = self.parts[self.first : self.first + 2]
        own = x.unflatten(0, (len(a), -1)).flatten(1, 2)  # (N, B T, in)
        added = torch.bmm(torch.bmm(own, a.mT), b.mT).unflatten(1, (-1, x.shape[1])).flatten(0, 1)
        return torch.add(self.base(x), added, alpha=SCALE)


class LanguageModel:
    """A causal language model, or LoRA adapters beside it. A `Model`.

    On a GPU it computes in bfloat16 beside FP32 weights, as the product does. Forward and backward pass are
    one CUDA graph for each shape of rows, so nobody waits for the device. Adapters of all peers are computed
    in one pass, as the base is the same; whole models one after the other.

    Args:
        folder: as transformers reads it.
        rank: of adapters at all linear layers; 0: the model itself is trained.
    """

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        kind = "bfloat16" if device != "cpu" else "float32"
        words = [f"model.dtype={kind if rank else 'auto'}", "training.activation_checkpointing=false"]
        if rank:
            words += [f"lora.lora_r={rank}", f"lora.lora_alpha={SCALE * rank:g}", "lora.lora_dropout=0"]
        recipe = load_recipe("finetune", words, model=str(folder.absolute()))
        self.device = torch.device(device)
        self.flat = FlatParameters(load_trained(recipe, folder, device), device=self.device)
        self.start, self.embeddings = self.flat.vector.clone(), embeddings_of(self.flat.model)
        self.parts: list[Tensor] | None = [] if rank else None  # adapters of the peers in the pass under way
        self.network = self.flat.model.train()
        if self.parts is not None:
            self._share(self.parts)
        self.graphs = dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]]()

    def _share(self, parts: list[Tensor]) -> None:
        """Put adapters of several peers in the place of PEFT's."""
        untyped: Any = self.flat.model
        self.network = untyped.get_base_model()
        numbers = {name.partition(".lora_A")[0]: n for n, name in enumerate(self.flat.layout.names)}
        for name, module in [*untyped.named_modules()]:
            if (first := numbers.get(name)) is not None:
                where, _, last = name.rpartition(".")
                setattr(untyped.get_submodule(where), last, Beside(module.base_layer, parts, first))

    def new_flat(self) -> FlatParameters:
        """Make parameters of a peer's own. There is no model to run."""
        parts = self.flat.layout.views(self.start)
        return FlatParameters(nn.ParameterList([part.clone() for part in parts]))

    def gradients(self, vectors: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Compute the gradients (N, P) of the vectors' mean losses, each over its own rows (B, T)."""
        here = [brought(own, self.device) for own in rows]
        if self.parts is not None:
            return self._run(self._of_adapters, torch.stack(list(vectors)), torch.stack(here))
        found = torch.empty(len(vectors), len(self.start), device=self.device)
        for out, vector, own in zip(found, vectors, here, strict=True):
            self.flat.vector.copy_(vector)
            out.copy_(self._run(self._of_whole, own))
        return found

    def _of_adapters(self, vectors: Tensor, rows: Tensor) -> Tensor:
        """Compute the gradients (N, P) with vectors (N, P) and rows (N, B, T)."""
        x = vectors.detach().requires_grad_()
        with self._with(x):
            losses = self._token_losses(rows.flatten(0, 1))
            return torch.autograd.grad(len(x) * losses.mean(), x)[0]

    def _of_whole(self, rows: Tensor) -> Tensor:
        """Compute the gradient (P,) of the model with its vector."""
        self.flat.grad.zero_()
        self._token_losses(rows).mean().backward()  # type: ignore[no-untyped-call]
        return self.flat.grad

    def _run(self, compute: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Compute; on a GPU by replaying a graph, whose result is valid until the next replay."""
        if self.device.type != "cuda":
            return compute(*given)
        shapes = tuple(one.shape for one in given)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._captured(compute, [one.clone() for one in given])
        graph, places, found = self.graphs[shapes]
        for place, one in zip(places, given, strict=True):
            place.copy_(one)
        graph.replay()
        return found

    def _captured(
        self, compute: Callable[..., Tensor], places: list[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        """Record a computation: its graph, and where its input and its result are."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):  # what libraries allocate at first is not recorded
            for _ in range(3):
                compute(*places)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        with torch.cuda.graph(graph):
            found = compute(*places)
        return graph, places, found

    def loss(self, vector: Tensor, rows: Tensor) -> float:
        return float(self.losses(vector, rows).mean())

    @torch.no_grad()
    def losses(self, vector: Tensor, rows: Tensor, last: int = 0) -> Tensor:
        """Measure the mean loss of each row (R,), or of its last tokens alone."""
        parts = rows.split(max(AT_ONCE[self.device.type] // rows.shape[1], 1))
        with self.flat.use(vector) if self.parts is None else self._with(vector[None]):
            each = [self._token_losses(brought(part, self.device))[:, -last:].mean(1) for part in parts]
        return torch.cat(each)

    @contextmanager
    def _with(self, vectors: Tensor) -> Iterator[None]:
        """Compute with the adapters of these vectors (N, P) meanwhile."""
        assert self.parts is not None
        layout = self.flat.layout
        sizes = [stop - start for start, stop in pairwise(layout.offsets)]
        each = zip(vectors.split(sizes, 1), layout.shapes, strict=True)
        self.parts[:] = [part.unflatten(1, shape) for part, shape in each]
        yield
        self.parts.clear()

    def _token_losses(self, rows: Tensor) -> Tensor:
        """(R, T - 1)."""
        half = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, half, cache_enabled=False):
            logits = self.network(input_ids=rows, use_cache=False).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
        return losses.view(len(rows), -1)


# ---- documents ---------------------------------------------------------------------------------------------


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Read a folder's files of UTF-8 text, also gzipped ones: name and text, without comments of roff."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            try:
                lines = raw.decode().splitlines()
            except UnicodeDecodeError:
                continue  # a picture, say
            text = "\n".join(line for line in lines if not line.startswith(('.\\"', "'\\\"")))
            if "\0" not in text:
                yield path.name, text


def resolved(size: Size, folder: Path) -> Size:
    """Name the file of tokens that a size is of, and make it where it is not in `folder` yet. The name has a
    fingerprint: cells on other documents are of another size."""
    text, place = Path(size.text), model_folder(size.model, folder)
    if text.suffix == ".safetensors":
        return size
    known = sorted(folder.glob(f"pages-*-{place.name}.safetensors"))
    if size.text or not known:
        parts = tokens_of([text] if size.text else PAGES, place, 8 * size.length)
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts.values())).hexdigest()
        known = [folder / f"{text.name or 'pages'}-{digest[:8]}-{place.name}.safetensors"]
        folder.mkdir(parents=True, exist_ok=True)
        save_file(parts, known[0])
    return replace(size, text=str(known[0]))


def tokens_of(sources: Sequence[Path], place: Path, least: int) -> dict[str, Tensor]:
    """Read documents as tokens, (n,) int32 for each part: trained, chosen, reported; and another text."""
    from transformers import AutoTokenizer

    untyped: Any = AutoTokenizer
    tokenizer = untyped.from_pretrained(place)
    parts: dict[str, list[int]] = {name: [] for name in ("trained", "chosen", "reported", "other")}
    for source in sources:
        for name, written in documents(source):
            # by name: translations of a page are of one part
            part = parts[OF_TWENTY.get(crc32(name.encode()) % 20, "trained")]
            part += [*tokenizer.encode(written, add_special_tokens=False), tokenizer.eos_token_id]
    for topic in topics.topics.values():
        parts["other"] += tokenizer.encode(topic, add_special_tokens=False)
    for name, found in parts.items():
        if len(found) < least:
            where = " and ".join(map(str, sources))
            raise SystemExit(
                f"{where}: {len(found):,} tokens of the part `{name}`, expected {least:,} or more (hint: "
                "--text FOLDER with a hundred documents, or the file of tokens of a machine that has them)"
            )
    return {name: torch.tensor(found, dtype=torch.int32) for name, found in parts.items()}


def some(rows: Tensor, count: int) -> Tensor:
    """Take this many rows at even distances, or all."""
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()]


def questions(rows: Tensor, most: int) -> Tensor:
    """Ask how rows (R, T) end: (Q, 4, T), the first rightly, the others as the three rows that follow."""
    asked = torch.linspace(0, len(rows) - 4, min(most, len(rows) - 3)).long()
    found = rows[asked][:, None].repeat(1, 4, 1)
    for other in (1, 2, 3):
        found[:, other, -ANSWER:] = rows[asked + other][:, -ANSWER:]
    return found


def prepared(size: Size, rank: int, folder: Path) -> tuple[LanguageModel, Texts]:
    """Load a language model and its texts."""
    model = LanguageModel(model_folder(size.model, folder), rank, size.device)
    tokens = load_file(resolved(size, folder).text)
    rows = {name: Text(part.long(), size.length).all() for name, part in tokens.items()}
    chosen, reported, other = (some(rows[name], size.held) for name in ("chosen", "reported", "other"))
    asked = questions(rows["reported"], size.held)

    def beyond(vector: Tensor) -> dict[str, float]:
        """Measure what a loss does not say."""
        each = model.losses(vector, asked.flatten(0, 1), ANSWER).view(-1, 4)
        right = float((each.argmin(1) == 0).float().mean())
        return {"choice": right, "other": model.loss(vector, other)}

    return model, Texts(Text(tokens["trained"], size.length), (chosen, reported), chosen[::4], beyond)
