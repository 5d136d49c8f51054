"""Tokenize rows, and mask the tokens that are not trained.

Five types of rows: text, prompt_completion, alpaca (an instruction, turned into a prompt), chat, and
tokenized. Each becomes token ids and a loss mask; masked tokens are context only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.config import Data, Dataset
from recipes.errors import DataError

from .sources import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).parent.parent / "templates"
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # ShareGPT's names

GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")

ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document before it is truncated or packed."""

    tokens: np.ndarray  # (T,) int64
    trained: np.ndarray  # (T,) bool


@dataclass
class RowTokenizer:
    """Tokenizes the rows of one data set; collects warnings for the user."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    dataset: Dataset
    row_type: str  # text, prompt_completion, alpaca, chat or tokenized
    warnings: list[str] = field(default_factory=list)
    template: str | None = None  # chat template; None: the tokenizer's

    def __post_init__(self) -> None:
        if self.row_type == "chat":
            self._choose_template()

    def tokenize(self, rows: Sequence[Row]) -> list[TokenizedDocument]:
        """Tokenize rows. Errors: DataError naming the place of the first row that does not fit."""
        if self.row_type == "text":
            column = self._column("text", self.dataset.dataset_text_field)
            return self._texts([_text(row, column) for row in rows])
        if self.row_type == "chat":
            return [self._chat(self._messages(row), row.place) for row in rows]
        if self.row_type == "tokenized":
            return [self._tokenized(row) for row in rows]
        if self.row_type == "alpaca":
            return self._pairs([self._alpaca(row) for row in rows])
        prompt, completion = self._column("prompt"), self._column("completion")
        return self._pairs([(_text(row, prompt), _text(row, completion)) for row in rows])

    def _column(self, name: str, default: str | None = None) -> str:
        """Name of the data set's column for our column `name`."""
        return self.dataset.column_map.get(name, name if default is None else default)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        untyped: Any = self.tokenizer
        found: list[list[int]] = untyped(texts, **options)["input_ids"]
        return found

    def _end(self, ids: list[int]) -> list[int]:
        """Append the eos token, as TRL does."""
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]

    def _texts(self, texts: list[str]) -> list[TokenizedDocument]:
        """Tokenize texts; an empty text becomes no token, not even eos."""
        ended = zip(texts, self._ids(texts) if texts else [], strict=True)
        return [_all_trained(self._end(ids) if text.strip() else []) for text, ids in ended]

    def _pairs(self, pairs: list[tuple[str, str]]) -> list[TokenizedDocument]:
        """Tokenize prompt and completion as one text, and mask the prompt's tokens. Where the last token of
        the prompt merged with the completion, the merged token is trained: the model must write it first."""
        if not pairs:
            return []
        prompts = self._ids([prompt for prompt, _ in pairs])
        wholes = self._ids([prompt + completion for prompt, completion in pairs])
        encoded = []
        for prompt, whole in zip(prompts, wholes, strict=True):
            tokens = _all_trained(self._end(whole))
            if self.data.completion_only_loss is not False:
                tokens.trained[: _common(prompt, whole)] = False
            encoded.append(tokens)
        return encoded

    def _alpaca(self, row: Row) -> tuple[str, str]:
        instruction, name = _text(row, self._column("instruction")), self._column("input")
        context = _text(row, name) if row.fields.get(name) else ""
        prompt = ALPACA.format(
            paired=", paired with an input that provides further context" if context else "",
            instruction=instruction,
            input=f"### Input:\n{context}\n\n" if context else "",
        )
        return prompt, _text(row, self._column("output"))

    def _messages(self, row: Row) -> list[dict[str, str]]:
        """Convert the conversation to {role, content}; ShareGPT's from/value and role names are known."""
        name = self._column("messages")
        if (
            name not in row.fields
            and "messages" not in self.dataset.column_map
            and "conversations" in row.fields
        ):
            name = "conversations"
        listed = row.fields.get(name)
        if not isinstance(listed, list) or not listed:
            raise DataError(f"{row.place}: `{name}` must be a list of messages with at least one")
        messages = []
        for number, message in enumerate(listed):
            place = f"{row.place}: message {number}"
            if not isinstance(message, dict):
                raise DataError(f"{place} must be an object with role and content")
            sharegpt = "from" in message and "role" not in message
            inner = Row(message, place)
            role = _text(inner, self._column("role", "from" if sharegpt else "role"))
            content = _text(inner, self._column("content", "value" if sharegpt else "content"))
            messages.append({"role": ROLES.get(role, role), "content": content})
        return messages

    def _tokenized(self, row: Row) -> TokenizedDocument:
        """Take tokens unchanged; masked: -100 in `labels`, 0 in completion_mask or assistant_masks."""
        tokens = _numbers(row, self._column("input_ids"))
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= len(self.tokenizer):
            met = f"{tokens.min()} to {tokens.max()}" if len(tokens) else "none"
            raise DataError(f"{row.place}: token ids must be 0 to {len(self.tokenizer) - 1}, there are {met}")
        trained = np.ones(len(tokens), dtype=bool)
        for ours in self._masks():
            name = self._column(ours)
            if row.fields.get(name) is None:
                continue
            values = _numbers(row, name)
            if len(values) != len(tokens):
                raise DataError(f"{row.place}: {len(tokens)} input_ids and {len(values)} `{name}`")
            trained &= values == tokens if ours == "labels" else values == 1
            if ours == "labels" and (trained != (values != -100)).any():
                raise DataError(
                    f"{row.place}: `{name}` must be -100 or the token itself: cocktail shifts them"
                )
        return TokenizedDocument(tokens, trained)

    def _masks(self) -> list[str]:
        """Mask columns that the recipe uses."""
        asked = {
            "completion_mask": self.data.completion_only_loss,
            "assistant_masks": self.data.assistant_only_loss,
        }
        return ["labels", *(name for name, wanted in asked.items() if wanted is not False)]

    def _choose_template(self) -> None:
        """Set the tokenizer's chat template to the one used, so that the exported model has it."""
        wanted = self.data.chat_template
        shipped = {file.stem: file for file in TEMPLATES.glob("*.jinja")}
        if wanted == "auto":
            if self.tokenizer.chat_template is None:
                self.warnings.append(
                    "the tokenizer has no chat template: `plain` is used (data.chat_template chooses another)"
                )
                self.tokenizer.chat_template = shipped["plain"].read_text(encoding="utf-8")
            elif self.data.assistant_only_loss is not False:
                self.template = training_template(self.tokenizer)
            return
        path = shipped.get(wanted, Path(wanted).expanduser())
        if not path.is_file():
            near = difflib.get_close_matches(wanted, shipped, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"shipped: {', '.join(sorted(shipped))}"
            raise DataError(f"data.chat_template `{wanted}`: no such template and no such file ({hint})")
        self.tokenizer.chat_template = path.read_text(encoding="utf-8")

    def _chat(self, messages: list[dict[str, str]], place: str) -> TokenizedDocument:
        text = self._render(messages, place)
        spans = [(0, len(text))]
        if self.data.assistant_only_loss is not False:
            spans = self._assistant_spans(messages, text, place)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = np.asarray(found["input_ids"], dtype=np.int64)
        offsets = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        trained = np.zeros(len(tokens), dtype=bool)
        for start, end in spans:
            trained |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return TokenizedDocument(tokens, trained)

    def _render(self, messages: list[dict[str, str]], place: str, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
                )
            )
        except TemplateError as error:
            raise DataError(f"{place}: the chat template refuses this conversation: {error}") from error

    def _assistant_spans(
        self, messages: list[dict[str, str]], text: str, place: str
    ) -> list[tuple[int, int]]:
        """Find the assistant's words in `text`: ranges of characters.

        A template with `{% generation %}` marks gives them; TRL has such variants of many. With any other the
        conversation is rendered up to each answer and past it; that needs a template which only appends, and
        this is checked.
        """
        template = self.template or self.tokenizer.chat_template
        if isinstance(template, str) and GENERATION_MARK.search(template):
            from transformers.utils import chat_template_utils

            render: Any = chat_template_utils.render_jinja_template
            _, spans = render(
                conversations=[messages],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
            return [(start, end) for start, end in spans[0]]
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], place, prompt=True) if number else ""
            after = self._render(messages[: number + 1], place)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"{place}: the tokenizer's chat template rewrites earlier messages, so the assistant's "
                    "words cannot be told apart "
                    "(hint: data.chat_template=chatml, or data.assistant_only_loss=false)"
                )
            found.append((len(before), len(after)))
        return found


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """TRL's variant of the tokenizer's template, with marks around the assistant's words; None where the
    template has marks, or TRL does not know it. Used here only: the exported tokenizer keeps its own."""
    if not isinstance(tokenizer.chat_template, str) or GENERATION_MARK.search(tokenizer.chat_template):
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # an unknown template: answers are found by rendering instead
        return None


def tokenize_batches(
    tokenizer: RowTokenizer, batches: Iterable[Sequence[Row]], processes: int = 1
) -> Iterator[list[TokenizedDocument]]:
    """Tokenize batches in order, in several processes where wanted. Fast tokenizers use all cores by
    themselves: processes help where chat templates are rendered."""
    if processes == 1:
        yield from map(tokenizer.tokenize, batches)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _set_tokenizer, (tokenizer,)) as pool:
        yield from pool.map(_tokenize, batches)


_own: list[RowTokenizer] = []  # of a worker process: sent once, since a tokenizer is megabytes


def _set_tokenizer(tokenizer: RowTokenizer) -> None:
    _own.append(tokenizer)


def _tokenize(rows: Sequence[Row]) -> list[TokenizedDocument]:
    return _own[0].tokenize(rows)


def detect_row_type(dataset: Dataset, first: Row) -> str:
    """Detect the type of rows by the columns of the first. Errors: DataError with the columns."""
    if dataset.type != "auto":
        return dataset.type
    renamed = {theirs: ours for ours, theirs in dataset.column_map.items()}
    columns = {renamed.get(name, name) for name in first.fields}
    if columns & {"messages", "conversations"}:
        return "chat"
    if {"instruction", "output"} <= columns:
        return "alpaca"
    if {"prompt", "completion"} <= columns:
        return "prompt_completion"
    if "input_ids" in columns:
        return "tokenized"
    if columns & {"text", dataset.dataset_text_field}:
        return "text"
    raise DataError(
        f"{first.place}: columns {', '.join(sorted(first.fields)) or '(none)'} are no known kind of data: "
        "expected text, prompt and completion, instruction and output, messages, or input_ids "
        "(hint: datasets.0.column_map)"
    )


def _field(row: Row, name: str) -> Any:
    if name not in row.fields:
        raise DataError(
            f"{row.place}: no field `{name}`; there is {', '.join(map(str, row.fields)) or 'none'}"
        )
    return row.fields[name]


def _text(row: Row, name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise DataError(f"{row.place}: field `{name}` must be text, not {kind}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{row.place}: field `{name}` holds half a character at {error.start}") from None
    return value


def _numbers(row: Row, name: str) -> np.ndarray:
    """Read a list of whole numbers: (T,) int64."""
    value = _field(row, name)
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists in it, of different lengths
        numbers = np.zeros((0, 0))
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iub" and len(numbers)):
        raise DataError(f"{row.place}: `{name}` must be a list of whole numbers")
    return numbers.astype(np.int64)


def _all_trained(ids: list[int]) -> TokenizedDocument:
    return TokenizedDocument(np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=bool))


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
