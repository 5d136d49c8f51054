"""Read rows from builtin text, .jsonl files, folders, globs, https addresses, saved data sets and hub ids.

A row maps column names to values and knows where it was read, for error texts. Local .jsonl, .csv and .txt
are parsed here and not by `datasets`: its errors name neither line nor file, and pandas takes the first
column for row labels where a row has more fields than the header.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import os
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from recipes.config import DATA_SUFFIXES, Dataset, data_suffix, is_hub_id, looks_like_data_file
from recipes.downloads import (
    DownloadError,
    Progress,
    fetch_dataset_files,
    is_hub_outage,
    licence_hint,
    open_url,
)
from recipes.errors import DataError, HubUnreachable
from recipes.foreign_json import parse_json, unique_keys

UTF8 = "save the file as UTF-8, such as with iconv -t UTF-8"
COPY_AGAIN = "download or copy it again"
LONGEST_FIELD = (1 << 31) - 1  # bytes; more is no C long on Windows
FIELDS = "each row as many fields as the header, and quotes around fields with commas"
# words in exceptions of `datasets`, pandas and Arrow
EMPTY = ("corresponds to no data", "at least one example", "No columns to parse")
REMEDIES = {
    "codec can't decode": UTF8,
    "Parquet": COPY_AGAIN,
    "Error tokenizing data": FIELDS,
    "Expected object or value": "`python -m json.tool FILE` names the place",
}
PYTHON_DOCS = "builtin:python-docs"
COLUMNS_HINT = "column_map: {ours: theirs} names the columns of this data set"
HUB_FILE = "hf://datasets/"  # prefix of repository@commit/path


@dataclass(frozen=True)
class Row:
    """One row of a data set, unprocessed."""

    fields: dict[str, Any]
    place: str  # "my.jsonl:17", for messages

    def value(self, name: str) -> Any:
        """The field `name`. Errors: DataError where the row has none."""
        if name not in self.fields:
            names = ", ".join(map(str, self.fields)) or "none"
            raise DataError(f"{self.place}: no field `{name}`; there is {names}", COLUMNS_HINT)
        return self.fields[name]

    def text(self, name: str) -> str:
        """The text in field `name`. Errors: DataError where it is none, or no valid Unicode."""
        value = self.value(name)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise DataError(f"{self.place}: field `{name}` must be text, not {kind}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{self.place}: field `{name}` holds half a character at {error.start}") from None
        return value

    def numbers(self, name: str) -> np.ndarray:
        """The list of whole numbers in field `name`: (T,) int64. Errors: DataError."""
        value = self.value(name)
        try:
            numbers = np.asarray(value)
        except ValueError:  # lists in it, of different lengths
            numbers = np.zeros((0, 0))
        if numbers.ndim != 1 or (numbers.dtype.kind not in "iub" and len(numbers)):
            raise DataError(f"{self.place}: `{name}` must be a list of whole numbers")
        return numbers.astype(np.int64)


def read_rows(
    dataset: Dataset, streaming: bool = False, progress: Progress = lambda done, total: None
) -> Iterator[Row]:
    """Read the rows of `dataset`, at most `max_samples`. Errors: DataError, HubUnreachable.

    Args:
        streaming: fetch only what is read of hub data.
        progress: of a file at an https address, which is fetched now; hub data are fetched later, or by
            `prefetch_dataset`.
    """
    return islice(_rows(dataset, streaming, progress), dataset.max_samples)


def count_rows(dataset: Dataset) -> int | None:
    """Count the rows: local ones by reading, hub data by their metadata; None where these have no number.

    Errors: DataError, HubUnreachable.
    """
    if not is_hub_id(dataset.path):
        return sum(1 for _ in read_rows(dataset))
    return _announced(dataset, _builder(dataset))


def prefetch_dataset(dataset: Dataset, progress: Progress) -> int | None:
    """Fetch hub data into the cache of `datasets`; returns the number of rows as `count_rows` does.

    Errors: DataError, HubUnreachable, OSError where there is no room for them.
    """
    found, wanted = _builder(dataset), dict[tuple[str, str], list[str]]()
    for url in [url for urls in (found.config.data_files or {}).values() for url in urls]:
        if url.startswith(HUB_FILE):
            repository, _, place = url.removeprefix(HUB_FILE).partition("@")
            commit, _, path = place.partition("/")
            wanted.setdefault((repository, commit), []).append(path)
    for (repository, commit), paths in wanted.items():
        if not Path(found.cache_dir).exists():  # else they were prepared before
            fetch_dataset_files(repository, commit, paths, progress)
    try:
        with without_progress_bars():
            found.download_and_prepare()  # finds the files in the cache
    except Exception as error:
        raise _unreadable(dataset.path, error) from error
    return _announced(dataset, found)


def _builder(dataset: Dataset) -> Any:
    """Load what `datasets` knows of hub data before it reads them."""
    from datasets import load_dataset_builder

    named = dataset.data_files
    files: Any = list(named) if isinstance(named, tuple) else named
    try:
        with without_progress_bars():
            return load_dataset_builder(
                dataset.path, dataset.name, data_files=files, revision=dataset.revision
            )
    except Exception as error:
        raise _unreadable(dataset.path, error) from error


def _announced(dataset: Dataset, builder: Any) -> int | None:
    split = (builder.info.splits or {}).get(dataset.split)
    most = dataset.max_samples
    return None if split is None else min(split.num_examples, most or split.num_examples)


def count_lines(dataset: Dataset) -> int | None:
    """Count the lines of a local .jsonl, which is quick; None for anything else."""
    path = Path(dataset.path).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        found = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return min(found, dataset.max_samples or found)


def _rows(dataset: Dataset, streaming: bool, progress: Progress) -> Iterator[Row]:
    path = dataset.path
    if path.startswith("builtin:"):
        return _builtin(path)
    if path.startswith("http://"):
        raise DataError(f"{path}: data are read from https addresses only")
    if path.startswith("https://"):
        return _file(fetch_https_file(path, progress), dataset, streaming, called=path)
    local = Path(path).expanduser()
    if local.is_file():
        return _file(local, dataset, streaming)
    if local.is_dir():
        return _folder(local, dataset, streaming)
    if any(c in path for c in "*?["):
        matches = sorted(glob.glob(str(local), recursive=True))
        if not matches:
            raise DataError(f"{path}: no file matches", "a pattern begins at this folder; quote it")
        return (row for match in matches for row in _file(Path(match), dataset, streaming))
    if local.is_symlink():
        raise DataError(f"{path}: a link to {os.readlink(local)}, which is not there", "check the link")
    if looks_like_data_file(path):
        raise DataError(f"{path}: no such file or folder", nearest_file(local))
    return _loaded(path, dataset, streaming=streaming)


def _builtin(path: str) -> Iterator[Row]:
    if path != PYTHON_DOCS:
        raise DataError(f"no builtin data `{path}`; there is {PYTHON_DOCS}")
    for number, text in enumerate(python_docs()):
        yield Row({"text": text}, f"{path} row {number}")


def python_docs(length: int = 1000) -> Iterator[str]:
    """Yield English prose that comes with every CPython, the topics of `help()`, in pieces of about `length`
    characters.

    Tables, grammar and code are left out. A paragraph that is part of several topics is yielded once:
    otherwise held-out rows would be training rows too.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(f"{PYTHON_DOCS}: this Python was installed without its module pydoc_data") from None
    seen: set[str] = set()
    for name in sorted(topics):  # by name: the module's own order may change
        piece = ""
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            letters = sum(c.isalpha() or c in ' .,"()' for c in text)
            if text in seen or len(text) < 40 or letters < 0.95 * len(text):
                continue
            seen.add(text)
            piece += text + "\n"
            if len(piece) >= length:
                yield piece
                piece = ""
        if piece:
            yield piece


def _file(path: Path, dataset: Dataset, streaming: bool, called: str = "") -> Iterator[Row]:
    called, suffix = called or str(path), data_suffix(path)
    if path.is_file() and not path.stat().st_size:
        raise no_rows(called)
    if suffix in OWN:
        return OWN[suffix](path, called)
    if suffix in DATA_SUFFIXES:
        return _loaded(suffix.removeprefix("."), dataset, str(path), called, streaming)
    known = ", ".join(DATA_SUFFIXES)
    raise DataError(f"{called}: unknown kind of file (known: {known}, and each with .gz)")


def _jsonl(path: Path, called: str) -> Iterator[Row]:
    """Parse one JSON object a line; empty lines are skipped."""
    for number, line in _lines(path, called):
        if line.strip():
            place = f"{called}:{number}"
            yield Row(_object(line, place), place)


def _texts(path: Path, called: str) -> Iterator[Row]:
    """Read a .txt: a text a paragraph where empty lines separate them, else a text a line."""
    filled = [key for key, _ in groupby(bool(line.strip()) for _, line in _lines(path, called))]
    by_paragraph, part, begin = filled.count(True) > 1, list[str](), 0
    for number, line in chain(_lines(path, called), [(0, b"")]):
        text = _decoded(line, f"{called}:{number}").rstrip("\r\n")
        if part and not (by_paragraph and text.strip()):
            yield Row({"text": "\n".join(part)}, f"{called}:{begin}")
            part = []
        if text.strip():
            begin = begin if part else number
            part.append(text)


def _table(path: Path, called: str, delimiter: str) -> Iterator[Row]:
    """Read a table whose first line names the columns; every field is text, empty lines are skipped."""
    lines = (_decoded(line, f"{called}:{number}") for number, line in _lines(path, called))
    csv.field_size_limit(LONGEST_FIELD)  # of the whole process; the module's own is 128 KiB
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header, place = list[str](), f"{called}:1"
    try:
        for fields in reader:
            if not header:
                header = fields
                if twice := next((name for name in header if header.count(name) > 1), None):
                    raise DataError(f"{place}: two columns are named {twice!r}", "rename one of them")
            elif fields and len(fields) != len(header):
                raise DataError(f"{place}: fields: {len(fields)}, in the header: {len(header)}", FIELDS)
            elif fields:
                yield Row(dict(zip(header, fields, strict=True)), place)
            place = f"{called}:{reader.line_num + 1}"  # where the next row begins: a field may have lines
    except csv.Error as error:
        raise DataError(f"{place}: not a valid table: {error}", FIELDS) from None


def _lines(path: Path, called: str) -> Iterator[tuple[int, bytes]]:
    """Number the lines of a file, which may be compressed by gzip; a byte order mark is left out."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{called}: cannot be decompressed: {error}", COPY_AGAIN) from error
    except OSError as error:
        raise DataError(f"{called}: cannot be read: {error.strerror}") from error


# the others are read by `datasets`
OWN: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".csv": partial(_table, delimiter=","),
    ".tsv": partial(_table, delimiter="\t"),
    ".txt": _texts,
}


def fetch_https_file(url: str, progress: Progress = lambda done, total: None) -> Path:
    """Fetch the file at an https address into the Hugging Face cache. It is fetched once: a resumed run
    continues with the data it began with. Errors: DataError."""
    from huggingface_hub.constants import HF_HOME

    name = Path(urllib.parse.urlparse(url).path).name
    target = Path(HF_HOME) / "cocktail" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}"
    if target.exists():
        return target
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_url(url) as answer, part.open("wb") as file:
            wanted = int(answer.headers["Content-Length"] or 0)
            while block := answer.read(1 << 16):
                file.write(block)
                progress(file.tell(), wanted)
            size = file.tell()
        if wanted and size != wanted:
            raise DataError(f"{url}: {size:,} bytes came, {wanted:,} were announced")
        os.replace(part, target)
    except DownloadError as error:
        raise DataError(f"{url}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text: {error.reason} at byte {error.start}", UTF8) from None


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = parse_json(_decoded(line, place).rstrip(), unique_keys)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON: {error}", "correct this line, or remove it") from None
    if not isinstance(value, dict):
        raise DataError(f"{place}: each line must be an object with named fields, not {_kind(value)}")
    return value


def _folder(path: Path, dataset: Dataset, streaming: bool) -> Iterator[Row]:
    """Read a folder of .jsonl, or else .csv, .tsv or .txt, one of `save_to_disk`, or any of `datasets`."""
    if dataset.data_files is None:
        for suffix, read in OWN.items():
            if found := sorted([*path.glob(f"*{suffix}"), *path.glob(f"*{suffix}.gz")]):
                return chain.from_iterable(read(file, str(file)) for file in found)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(path, dataset)
    return _loaded(str(path), dataset, streaming=streaming)


def _saved(path: Path, dataset: Dataset) -> Iterator[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except Exception as error:  # pyarrow, json and OS errors alike: the folder is damaged
        hint = "copy the whole folder again, as save_to_disk wrote it"
        raise DataError(f"{path}: cannot be read as a saved data set: {error}", hint) from error
    if isinstance(found, DatasetDict):
        if dataset.split not in found:
            raise DataError(f"{path}: no split `{dataset.split}`; there is {', '.join(sorted(found))}")
        found = found[dataset.split]
    for number, fields in enumerate(found):
        yield Row(_row_fields(fields, found.features), f"{path} row {number}")


def _loaded(
    name: str, dataset: Dataset, data_files: str | None = None, called: str = "", streaming: bool = False
) -> Iterator[Row]:
    """Read hub ids, local folders, and files that are not .jsonl by `datasets.load_dataset`."""
    from datasets import load_dataset

    called = called or name
    files: Any = data_files or dataset.data_files
    files = list(files) if isinstance(files, tuple) else files
    split = "train" if data_files else dataset.split
    streaming = streaming and "[" not in split  # a slice needs the whole data set
    try:
        with without_progress_bars():
            found = load_dataset(
                name,
                dataset.name,
                data_files=files,
                split=split,
                revision=dataset.revision,
                streaming=streaming,
            )
        for number, fields in enumerate(found):
            yield Row(_row_fields(fields, found.features), f"{called} row {number}")
    except Exception as error:
        raise _unreadable(called, error) from error


def _row_fields(fields: dict[str, Any], features: dict[str, Any] | None) -> dict[str, Any]:
    """The columns of a row of `datasets`, without the nulls that Arrow adds: a struct has the keys of all
    rows, and null where this row has none. Columns stored as JSON keep the nulls that are the user's."""
    known = features or {}
    return {name: _without_merged_nulls(value, known.get(name)) for name, value in fields.items()}


def _without_merged_nulls(value: Any, feature: Any) -> Any:
    """Drop the keys that are null in structs. `feature`: schema of the value; None where it is unknown."""
    if isinstance(feature, dict) and isinstance(value, dict):
        present = {name: inner for name, inner in value.items() if inner is not None}
        return {name: _without_merged_nulls(inner, feature.get(name)) for name, inner in present.items()}
    inner = getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(inner, dict) or hasattr(inner, "feature")):
        return [_without_merged_nulls(each, inner) for each in value]
    return value


def _unreadable(called: str, error: Exception) -> DataError | HubUnreachable:
    """Convert an exception of `datasets`, which may be of any class."""
    if is_hub_outage(error):
        return HubUnreachable(f"no file {called} here, and the hub did not answer: {error}")
    if "gated dataset" in str(error):
        return DataError(f"{called}: access is gated {licence_hint(f'datasets/{called}')}")
    cause = f": {error.__cause__}" if error.__cause__ else ""
    said = f"{error}{cause}"
    if any(words in said for words in EMPTY):
        return no_rows(called)
    hint = f"it may hold files of {', '.join(DATA_SUFFIXES)}" if Path(called).is_dir() else ""
    hint = hint or next((remedy for words, remedy in REMEDIES.items() if words in said), "")
    return DataError(f"{called}: cannot be loaded: {said}", hint)


def no_rows(called: str) -> DataError:
    """Make the error of a data set without rows."""
    return DataError(f"{called}: the data set is empty", "it needs rows; --data FILE names another one")


def nearest_file(path: Path) -> str:
    """Return the hint for a file that is not there: the nearest name beside it, if there is one."""
    beside = [file.name for file in path.parent.iterdir() if file.exists()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.with_name(near[0])}?" if near else "check the path: it begins at this folder"


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence progress bars of datasets and the hub's client, and logs of datasets: the CLI shows."""
    import datasets
    from huggingface_hub import utils

    showing = [library for library in (datasets, utils) if not library.are_progress_bars_disabled()]
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
    for library in showing:
        library.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        for library in showing:
            library.enable_progress_bars()


def _kind(value: object) -> str:
    words = {str: "text", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    return "null" if value is None else words.get(type(value), type(value).__name__)
