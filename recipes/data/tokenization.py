"""Tokenize rows, mask the tokens that are not trained, and make samples of the documents.

Five types of rows: text, prompt_completion, alpaca (an instruction, turned into a prompt), chat, tokenized.
Each becomes token ids and a loss mask; masked tokens are context only. An objective may read others.
Documents become samples of at most `max_length` tokens: truncated, wrapped, or packed in isolation.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from recipes.config import Data, Dataset, ObjectiveSection
from recipes.errors import DataError

from .conversations import END_OF_TURN, ChatTemplate, ConversationReader, Span, common_length, messages_column
from .samples import Sample
from .sources import Row, decoded, separator_hint, unread_files

TYPED = "in a message's text is read as the token of that name, which may end a turn"
TWICE = "comes twice in a row: leave out of the data what tokenizer or template add, and mask what is padding"
EMPTY = "an empty answer is trained: the model learns to say nothing there"
NO_END = "the tokenizer has no eos token: the model learns no end (model.eos_token=TOKEN)"
TEMPLATES = Path(__file__).parent.parent / "templates"
COLUMNS = {  # of each type of row, in the order in which types are detected
    "chat": ("messages",),  # or conversations
    "alpaca": ("instruction", "output", "input"),
    "prompt_completion": ("prompt", "completion"),
    "tokenized": ("input_ids", "attention_mask"),  # and masks of what is trained
    "text": ("text",),
}
OPTIONAL = {"input", "attention_mask"}
ANSWERS = ("chat", "alpaca", "prompt_completion")
SYNONYMS: dict[str, tuple[str, ...]] = {  # usual names of columns elsewhere, for hints
    "text": ("content", "txt", "body", "document", "article"),
    "prompt": ("question", "input", "query", "q"),
    "completion": ("answer", "response", "output", "target", "reply", "a"),
    "instruction": (),
    "output": ("response", "answer"),
    "messages": ("dialog", "dialogue", "chat", "conversation"),
}

ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document before it is truncated or packed: one sequence, or several, one after the other."""

    tokens: np.ndarray  # (T,) int64
    trained: np.ndarray  # (T,) bool
    sequences: tuple[int, ...] = ()  # lengths of several
    # of a conversation: documents that end with an earlier answer
    earlier: tuple[TokenizedDocument, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.sequences, default=len(self.tokens))

    @property
    def teaches(self) -> bool:
        """True where each sequence has a trained token; the first of a sequence never is."""
        return all(bool(part[1:].any()) for part in self.parts(self.trained))

    def cut(self, length: int) -> TokenizedDocument:
        """Truncate each sequence to `length` tokens."""
        if self.longest <= length:
            return self
        tokens, trained = (
            [part[:length] for part in self.parts(array)] for array in (self.tokens, self.trained)
        )
        sequences = tuple(len(part) for part in tokens) if self.sequences else ()
        return TokenizedDocument(np.concatenate(tokens), np.concatenate(trained), sequences)

    def parts(self, array: np.ndarray) -> list[np.ndarray]:
        """Split an array with a value for each token into those of its sequences."""
        return np.split(array, np.cumsum(self.sequences[:-1], dtype=np.int64))


class RowReader(Protocol):
    """Reads rows of a type that an objective adds; it goes to other processes."""

    columns: tuple[str, ...]

    def talks(self, dataset: Dataset, first: Row) -> bool:
        """True where rows are conversations."""

    def tokenize(self, of: RowTokenizer, rows: Sequence[Row]) -> list[TokenizedDocument]:
        """Tokenize rows with the tokenizer, or the template, of their data set."""


@dataclass
class RowTokenizer:
    """Tokenizes the rows of one data set; collects what to tell the user. `make_row_tokenizer` makes one."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    dataset: Dataset
    row_type: str  # a key of COLUMNS, or that of the objective
    reader: RowReader | None = None  # of the objective
    vocabulary: int | None = None  # tokens in the model's embedding
    template: ChatTemplate | None = None  # for rows that are conversations
    used: frozenset[str] = frozenset()  # columns that are read, those of messages aside
    special: frozenset[int] = frozenset()  # tokens of which no text has two in a row
    # in order, each once
    unused: dict[str, None] = field(default_factory=dict)  # columns that are not read
    warnings: dict[str, None] = field(default_factory=dict)

    def tokenize(self, rows: Sequence[Row]) -> list[TokenizedDocument]:
        """Tokenize rows. Errors: DataError naming the place of the first row that does not fit."""
        for row in rows:
            read = self.used | ({messages_column(self.dataset, row)} if self.row_type == "chat" else set())
            self.unused |= {n: None for n, value in row.fields.items() if value is not None and n not in read}
            self.warnings |= {row.warning: None} if row.warning else {}
            if row.fields.get(label := self.dataset.column("label")) is False and self.row_type in ANSWERS:
                said = f"{row.place}: `{label}` false calls this answer a bad one, and it would be trained"
                raise DataError(said, f"{self.dataset.key_path('column_map')}.label=- trains it all the same")
        documents = self._documents(rows)
        for row, document in zip(rows, documents, strict=True):
            for one in (document, *document.earlier):
                self._check(row, one)
        return documents

    def _documents(self, rows: Sequence[Row]) -> list[TokenizedDocument]:
        if self.reader is not None:
            return self.reader.tokenize(self, rows)
        if self.template is not None:
            return self._conversations(rows, self.template)
        if self.row_type == "text":
            return self._texts([row.text(self.dataset.column("text")) for row in rows])
        if self.row_type == "tokenized":
            return [self._tokenized(row) for row in rows]
        if self.row_type == "alpaca":
            return self._pairs(rows, [self._alpaca(row) for row in rows])
        prompt, completion = self.dataset.column("prompt"), self.dataset.column("completion")
        return self._pairs(rows, [(row.text(prompt), row.text(completion)) for row in rows])

    def _check(self, row: Row, document: TokenizedDocument) -> None:
        """Warn of special tokens that are repeated. Errors: DataError for a token that the model lacks."""
        named, highest = self.tokenizer.convert_ids_to_tokens, int(document.tokens.max(initial=0))
        if self.vocabulary is not None and highest >= self.vocabulary:
            said = f"{row.place}: token {highest}, `{named(highest)}`, is beyond the model's embedding"
            ends = highest == self.tokenizer.eos_token_id
            hint = "model.eos_token names another one that ends a text" if ends else "remove it from this row"
            raise DataError(f"{said} of {self.vocabulary} tokens", hint)
        for part in document.parts(document.tokens):
            twice = self.special.intersection(part[1:][part[1:] == part[:-1]].tolist())
            if twice:
                self._warn(row, f"`{named(min(twice))}` ", TWICE)

    def _warn(self, row: Row, what: str, text: str) -> None:
        """Warn of the first row of which `text` is true."""
        if not any(text in warning for warning in self.warnings):
            self.warnings[f"{row.place}: {what}{text}"] = None

    @property
    def unused_columns(self) -> str:
        """Name the unused columns for people, in brackets; empty where all are used."""
        names = (name if name and name == name.strip() else repr(name) for name in self.unused)
        return f" (not used: {', '.join(names)})" if self.unused else ""

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Tokenize texts, with the special tokens that the tokenizer adds."""
        return self.encoded(texts, add_special_tokens=True)["input_ids"]

    def ended(self, ids: list[int]) -> list[int]:
        """Append the eos token, as TRL does."""
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]

    def _texts(self, texts: list[str]) -> list[TokenizedDocument]:
        """Tokenize texts; an empty text becomes no token, not even eos."""
        ended = zip(texts, self.ids(texts), strict=True)
        return [_all_trained(self.ended(ids) if text.strip() else []) for text, ids in ended]

    def _pairs(self, rows: Sequence[Row], pairs: list[tuple[str, str]]) -> list[TokenizedDocument]:
        """Tokenize prompt and completion as one text, and mask the prompt's tokens. Where the last token of
        the prompt merged with the completion, the merged token is trained: the model must write it first."""
        for row, (_, completion) in zip(rows, pairs, strict=True):
            if not completion.strip():
                self._warn(row, "", EMPTY)
        prompts = self.ids([prompt for prompt, _ in pairs])
        wholes = self.ids([prompt + completion for prompt, completion in pairs])
        encoded = []
        for prompt, whole in zip(prompts, wholes, strict=True):
            tokens = _all_trained(self.ended(whole))
            if self.data.completion_only_loss is not False:
                tokens.trained[: common_length(prompt, whole)] = False
            encoded.append(tokens)
        return encoded

    def _alpaca(self, row: Row) -> tuple[str, str]:
        instruction, name = row.text(self.dataset.column("instruction")), self.dataset.column("input")
        context = "" if row.fields.get(name) is None else row.text(name)
        prompt = ALPACA.format(
            paired=", paired with an input that provides further context" if context else "",
            instruction=instruction,
            input=f"### Input:\n{context}\n\n" if context else "",
        )
        return prompt, row.text(self.dataset.column("output"))

    def _tokenized(self, row: Row) -> TokenizedDocument:
        """Take tokens unchanged, padding (0 in attention_mask) aside; masked: -100 in `labels`, 0 in
        completion_mask or assistant_masks."""
        tokens, found = row.numbers(self.dataset.column("input_ids")), dict[str, np.ndarray]()
        for ours in ("attention_mask", *self.masks):
            if row.fields.get(name := self.dataset.column(ours)) is None:
                continue
            found[ours] = row.numbers(name)
            if len(found[ours]) != len(tokens):
                raise DataError(f"{row.place}: {len(tokens)} input_ids and {len(found[ours])} `{name}`")
            if ours != "labels" and not np.isin(found[ours], (0, 1)).all():
                raise DataError(f"{row.place}: `{name}` must be 0 or 1 for each token")
        at = np.flatnonzero(found.pop("attention_mask", np.ones(len(tokens))))
        real = slice(at[0], at[-1] + 1) if len(at) else slice(0)
        tokens = tokens[real]
        if len(tokens) > len(at):
            raise DataError(f"{row.place}: attention_mask must be 0 before or behind all tokens, not between")
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= len(self.tokenizer):
            met = f"{tokens.min()} to {tokens.max()}" if len(tokens) else "none"
            said = f"{row.place}: token ids must be 0 to {len(self.tokenizer) - 1}, there are {met}"
            raise DataError(said, "tokenize with the model's own tokenizer, or give text")
        trained = np.ones(len(tokens), dtype=bool)
        for ours, values in found.items():
            trained &= values[real] == (tokens if ours == "labels" else 1)
            if ours == "labels" and (trained != (values[real] != -100)).any():
                said = f"{row.place}: `{ours}` must be -100 or the token itself: cocktail shifts them"
                raise DataError(said)
        return TokenizedDocument(tokens, trained)

    @property
    def masks(self) -> list[str]:
        """Columns, beside the tokens, that the recipe lets say what is trained."""
        asked = {
            "completion_mask": self.data.completion_only_loss,
            "assistant_masks": self.data.assistant_only_loss,
        }
        return ["labels", *(name for name, wanted in asked.items() if wanted is not False)]

    def _conversations(self, rows: Sequence[Row], template: ChatTemplate) -> list[TokenizedDocument]:
        """Render and tokenize conversations. The tokens that are trained are as in TRL: of a chat what the
        assistant wrote, of prompt and completion those after what both renderings have in common."""
        reader = ConversationReader(self.dataset, template.texts)
        paired = self.row_type == "prompt_completion"
        read = reader.prompt_and_completion if paired else reader.conversation
        conversations = [read(row) for row in rows]
        words = "|".join(re.escape(self.tokenizer.added_tokens_decoder[i].content) for i in self.special)
        for row, each in zip(rows, conversations, strict=True) if words else ():
            said = "\n".join(str(message.get("content")) for message in each.messages)
            if met := re.search(words, said):
                self._warn(row, f"`{met[0]}` ", TYPED)
        completes = paired and self.data.completion_only_loss is not False
        found: list[list[tuple[str, list[Span]]]] = [
            template.render_answers(each, each.prompt * completes)
            if self.masks_assistant
            else [(template.render(each), [])]
            for each in conversations
        ]
        self.warnings |= template.warnings
        texts = [one for row in found for one in row]
        encoded = self.encoded([text for text, _ in texts], return_offsets_mapping=True)
        made = [_all_trained(ids) for ids in encoded["input_ids"]]
        marked = zip(texts, made, encoded["offset_mapping"], strict=True)
        for (_, spans), document, offsets in marked if self.masks_assistant else ():
            document.trained[:] = _inside(spans, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
        rest = iter(made)
        documents = [replace(next(rest), earlier=tuple(islice(rest, len(row) - 1))) for row in found]
        for row, document in zip(rows, documents, strict=True) if self.masks_assistant else ():
            if not document.trained.any():
                hint = "(hint: data.assistant_only_loss=false trains all messages)"
                raise DataError(f"{row.place}: no message of an assistant to train on {hint}")
        if completes:
            prompts = self.encoded([template.render_prompt(each) for each in conversations])["input_ids"]
            for prompt, document in zip(prompts, documents, strict=True):
                document.trained[: common_length(prompt, document.tokens.tolist())] = False
        return documents

    @property
    def masks_assistant(self) -> bool:
        """True where what the assistant wrote is trained alone: null means so for chat, as TRL's default is
        completion_only_loss for prompt and completion."""
        wanted = self.data.assistant_only_loss
        return self.row_type == "chat" if wanted is None else wanted

    def encoded(
        self, texts: list[str], add_special_tokens: bool = False, **options: bool
    ) -> dict[str, list[Any]]:
        """Tokenize texts: rendered ones have their special tokens."""
        if not texts:
            return {"input_ids": [], "offset_mapping": []}
        options |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        untyped: Any = self.tokenizer
        return dict(untyped(texts, add_special_tokens=add_special_tokens, **options))


def make_row_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    dataset: Dataset,
    first: Row,
    objective: ObjectiveSection = ObjectiveSection(),  # noqa: B008
    vocabulary: int | None = None,
) -> RowTokenizer:
    """Make the tokenizer of a data set whose first row is `first`. Errors: DataError.

    Where rows are conversations, `tokenizer` gets the chat template that is used, and remembers what ends a
    turn: the exported model has both.
    """
    reader: RowReader | None = objective.row_reader()
    row_type = objective.row_type or detect_row_type(dataset, first)
    rows = RowTokenizer(tokenizer, data, dataset, row_type, reader, vocabulary)
    rows.warnings |= dict.fromkeys(unread_files(dataset))
    columns = [*(reader.columns if reader else COLUMNS[row_type])]
    columns += rows.masks if row_type == "tokenized" else []
    talks = isinstance(first.fields.get(dataset.column("prompt")), list) and row_type == "prompt_completion"
    talks = reader.talks(dataset, first) if reader is not None else row_type == "chat" or talks
    rows.special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    if talks:
        columns += ["tools", "chat_template_kwargs"]
        said = choose_template(tokenizer, data.chat_template)
        rows.template = ChatTemplate(tokenizer, marked=rows.masks_assistant)
        end = rows.template.end_of_turn()
        if end and end != tokenizer.eos_token:
            tokenizer.init_kwargs[END_OF_TURN] = end
        if not end and rows.masks_assistant:
            said.append("the chat template marks no end of the assistant's turn as trained")
        rows.warnings |= dict.fromkeys(said)
    elif tokenizer.eos_token_id is None and row_type != "tokenized":
        rows.warnings[NO_END] = None
    rows.used = frozenset(map(dataset.column, columns))
    return rows


def choose_template(tokenizer: PreTrainedTokenizerBase, wanted: str) -> list[str]:
    """Set the tokenizer's chat template to the one the recipe wants; returns warnings. Errors: DataError."""
    shipped = {file.stem: file for file in TEMPLATES.glob("*.jinja")}
    if wanted == "auto":
        if tokenizer.chat_template is not None:
            return []
        tokenizer.chat_template = shipped["plain"].read_text(encoding="utf-8")
        return ["the tokenizer has no chat template: `plain` is used (data.chat_template chooses another)"]
    path = shipped.get(wanted, Path(wanted).expanduser())
    if not path.is_file():
        near = difflib.get_close_matches(wanted, shipped, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"shipped: {', '.join(sorted(shipped))}"
        raise DataError(f"data.chat_template `{wanted}`: no such template and no such file ({hint})")
    tokenizer.chat_template = decoded(path.read_bytes(), str(path)).removeprefix("\ufeff")
    return []


def tokenize_batches(
    tokenizer: RowTokenizer, batches: Iterable[Sequence[Row]], processes: int = 1
) -> Iterator[list[TokenizedDocument]]:
    """Tokenize batches in order, in several processes where wanted. Fast tokenizers use all cores by
    themselves: processes help where chat templates are rendered."""
    if processes == 1:
        yield from map(tokenizer.tokenize, batches)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _set_tokenizer, (tokenizer,)) as pool:
        for documents, unused, warnings in pool.map(_tokenize, batches):
            tokenizer.unused |= unused
            tokenizer.warnings |= warnings
            yield documents


_own: list[RowTokenizer] = []  # of a worker process: sent once, since a tokenizer is megabytes


def _set_tokenizer(tokenizer: RowTokenizer) -> None:
    _own[:] = [tokenizer]


def _tokenize(rows: Sequence[Row]) -> tuple[list[TokenizedDocument], dict[str, None], dict[str, None]]:
    return _own[0].tokenize(rows), _own[0].unused, _own[0].warnings


def detect_row_type(dataset: Dataset, first: Row) -> str:
    """Detect the type of rows by the columns of the first. Errors: DataError with the columns."""
    if dataset.type != "auto":
        return dataset.type
    renamed = {theirs: ours for ours, theirs in dataset.column_map.items()}
    columns = {renamed.get(name, name) for name in first.fields}
    columns |= {"messages"} if "conversations" in columns else set()
    for row_type, names in COLUMNS.items():
        if {*names} - OPTIONAL <= columns:
            return row_type
    raise DataError(
        f"{first.place}: columns {', '.join(sorted(first.fields)) or '(none)'} are no known kind of data: "
        "expected text, prompt and completion, instruction and output, messages, or input_ids "
        f"(hint: {_columns_hint(dataset, first.fields)})",
        columns=columns,
    )


def _columns_hint(dataset: Dataset, fields: Mapping[str, Any]) -> str:
    """Suggest the column_map that makes the columns of a row a known kind of data."""
    columns, texts = list(fields), [name for name, value in fields.items() if isinstance(value, str)]
    if {"role", "content"} <= fields.keys() or {"from", "value"} <= fields.keys():
        return 'a row is a whole conversation: {"messages": [...]}'
    for name, value in fields.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and not {"role", "from"} & inner.keys():
            return f"rows within `{name}` are not found: save them as a list of rows, or a .jsonl"
    if hint := separator_hint(columns):
        return hint
    maps = [
        {ours: _alike(ours, columns) for ours in wanted}
        for wanted in (("instruction", "output"), ("prompt", "completion"), ("messages",), ("text",))
    ]
    maps += [dict(zip(("prompt", "completion"), texts, strict=True))] if len(texts) == 2 else []
    key = dataset.key_path("column_map")
    if (chosen := next((each for each in maps if None not in each.values()), None)) is None:
        return f"{key}.text=COLUMN, with the column that holds the text"
    named = ((ours, name) for ours, name in chosen.items() if name)
    spaced = {ours: name if name == name.strip() else json.dumps(name) for ours, name in named}
    return " ".join(shlex.quote(f"{key}.{ours}={theirs}") for ours, theirs in spaced.items())


def _alike(ours: str, columns: list[str]) -> str | None:
    """Return the column that probably holds what we call `ours`."""
    known = {column.strip().lower(): column for column in columns}
    same = next((known[name] for name in (ours, *SYNONYMS[ours]) if name in known), None)
    near = difflib.get_close_matches(ours, known, n=1, cutoff=0.75)
    return same if same is not None or not near else known[near[0]]


def _all_trained(ids: list[int]) -> TokenizedDocument:
    return TokenizedDocument(np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=bool))


def _inside(spans: Sequence[Span], offsets: np.ndarray) -> np.ndarray:
    """Mark the tokens from the first to the last that lies in each span of characters: (T,) bool.

    `offsets`: (T, 2), the characters of each token. Tokens of no character between two others count too.
    """
    marked = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        touched = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if len(touched):
            marked[touched[0] : touched[-1] + 1] = True
    return marked


# ---- documents to samples ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropped:
    """Tokens of the documents that are in no sample."""

    documents: int = 0  # in all
    truncated: int = 0  # of them, cut to max_length
    longest: int = 0  # tokens of the longest
    tokens: int = 0  # cut off, or in samples that were left out
    samples: int = 0  # left out for want of a trained token

    def __add__(self, other: Dropped) -> Dropped:
        summed = Dropped(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        longest = max(self.longest, other.longest)
        return Dropped(summed.documents, summed.truncated, longest, summed.tokens, summed.samples)

    def warnings(self, max_length: int, what: str = "") -> Iterator[str]:
        """Yield warnings for the user; `what`: kind of rows, with a space after it."""
        if self.truncated:
            share = 100 * self.truncated / self.documents
            yield (
                f"{self.truncated:,} {what}rows ({share:.1f} %) longer than max_length {max_length} were cut "
                f"(the longest has {self.longest:,} tokens)"
            )
        if self.samples:
            yield f"{self.samples:,} {what}samples have no token to train on and are left out"


NOTHING_DROPPED = Dropped()


@dataclass(frozen=True)
class PackedDocuments:
    """Samples, and what was dropped of their documents."""

    samples: list[Sample]
    dropped: Dropped


def make_samples(documents: Sequence[TokenizedDocument], data: Data) -> PackedDocuments:
    """Truncate or pack documents as the recipe says; samples without a trained token are left out."""
    max_length, parts = data.max_length, [one for whole in documents for one in (whole, *whole.earlier)]
    documents = [d for d in parts if len(d.tokens)]
    lengths = [len(d.tokens) for d in documents]
    truncated = sum(d.longest > max_length for d in documents) if data.truncates else 0
    if not data.packing:
        cut = [d.cut(max_length) for d in documents]
        made = [_sample(d.tokens, d.trained & d.teaches, d.sequences) for d in cut]
    elif not documents:
        made = []
    elif data.packing_strategy == "wrapped":
        made = _wrap(documents, max_length)
    else:
        made = _pack(documents, max_length, data.packing_strategy)
    kept = [sample for sample in made if sample.count]
    tokens = sum(lengths) - sum(len(sample.tokens) for sample in kept)
    longest = max((d.longest for d in documents), default=0)
    left_out = len(made) - len(kept) + len(parts) - len(documents)  # those without a token are not made
    return PackedDocuments(kept, Dropped(len(documents), truncated, longest, tokens, left_out))


def _wrap(documents: Sequence[TokenizedDocument], length: int) -> list[Sample]:
    """Cut the concatenated documents into blocks of `length`, as the reference implementation does; documents
    attend to each other."""
    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    starts = range(0, len(tokens), length)
    return [_sample(tokens[s : s + length], trained[s : s + length]) for s in starts if len(tokens) - s > 1]


def _pack(documents: Sequence[TokenizedDocument], length: int, strategy: str) -> list[Sample]:
    """Pack by TRL's best fit decreasing: documents longer than `length` are truncated (bfd) or continue in
    another sample (bfd_split).

    TRL packs positions in the concatenated text, so it needs to know nothing of tokens and masks.
    """
    from datasets import Dataset
    from trl import pack_dataset

    from recipes.data.sources import without_progress_bars

    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    ends = np.cumsum([len(d.tokens) for d in documents])
    places = np.split(np.arange(len(tokens)), ends[:-1])
    rows = Dataset.from_dict({"places": places})
    options = {"batch_size": len(rows), "load_from_cache_file": False}
    with without_progress_bars():
        packed = pack_dataset(rows, length, strategy, options)
    made = []
    for row in packed.with_format("numpy"):
        sizes = tuple(row["seq_lengths"].tolist())
        made.append(_sample(tokens[row["places"]], trained[row["places"]], sizes if len(sizes) > 1 else ()))
    return made


def _sample(tokens: np.ndarray, trained: np.ndarray, documents: tuple[int, ...] = ()) -> Sample:
    """Make a sample; the first token of each document is not trained: nothing predicts it."""
    trained = trained.copy()
    trained[np.cumsum((0, *documents[:-1]))] = False
    return Sample(tokens.astype(np.int32), trained, documents)
