"""Read rows from builtin text, files, folders, https addresses, saved data sets and hub ids.

A row maps column names to values and knows where it was read, for error texts. Local files are parsed here
and not by `datasets`: it reads a path as a pattern, caches by path and time, makes times of texts that look
like times, and its errors name no line. Data of the hub are read by `datasets`.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from io import BufferedReader
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.config import DATA_SUFFIXES, Dataset, data_suffix, is_hub_id
from recipes.downloads import Progress, fetch_dataset_files, https_file, is_hub_outage, licence_hint
from recipes.errors import DataError, HubUnreachable
from recipes.foreign_json import LFS_POINTER, parse_json, unique_keys

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

UTF16 = re.compile(rb"\xff\xfe|\xfe\xff|\0[^\0]\0[^\0]|[^\0]\0[^\0]\0")  # the beginning of a text
COPY_AGAIN = "download or copy it again"
LONGEST_FIELD = (1 << 31) - 1  # bytes; more is no C long on Windows
FIELDS = "each row as many fields as the header, and quotes around fields with commas"
LINE_QUOTES = "put quotes around a text that begins with one and double those in it, or save it as .jsonl"
JSON_LINE = "correct this line, or remove it; one list, or indented objects, are read of a .json"
JSON_PLACE = "correct it there"
LISTED, SEARCHED = 5, 100_000  # broken lines that an error names; lines that are searched for them
PACKED = re.compile(  # the beginnings of compressed files
    rb"(?P<gzip>\x1f\x8b)|(?P<zip>PK\x03\x04)|(?P<bzip2>BZh\d1AY)|(?P<xz>\xfd7zXZ)|(?P<zstd>\x28\xb5\x2f\xfd)"
)
NO_DATA = "corresponds to no data"  # words of `datasets`
PYTHON_DOCS = "builtin:python-docs"
COLUMNS_HINT = "column_map: {ours: theirs} names the columns of this data set"
HUB_FILE = "hf://datasets/"  # prefix of repository@commit/path


@dataclass(frozen=True)
class Row:
    """One row of a data set, unprocessed."""

    fields: dict[str, Any]
    place: str  # "my.jsonl:17", for messages
    warning: str = ""  # of how it is written

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
            hint = "save the column as text: a date can be written in many ways" * kind.startswith("date")
            raise DataError(f"{self.place}: field `{name}` must be text, not {kind}", hint)
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
    if is_hub_id(dataset.path):
        return islice(_hub_rows(dataset, streaming), dataset.max_samples)
    return islice(_of_split(dataset, _splits(dataset, progress)), dataset.max_samples)


def count_rows(dataset: Dataset, builder: Any = None) -> int | None:
    """Count the rows: those here by reading, hub data by their metadata; None where these have no number.

    Errors: DataError, HubUnreachable.
    """
    if not is_hub_id(dataset.path):
        rows = _of_split(dataset, _splits(dataset, lambda done, total: None), parse=False)
        return sum(1 for _ in islice(rows, dataset.max_samples))
    try:
        count = int((builder or _builder(dataset)).info.splits[dataset.split].num_examples)
    except (KeyError, TypeError, ValueError):  # its card has no numbers
        return None
    return min(count, dataset.max_samples or count)


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
    return count_rows(dataset, found)


def _builder(dataset: Dataset) -> Any:
    """Load what `datasets` knows of hub data, or of a folder with a card, before it reads them."""
    from datasets import load_dataset_builder

    try:
        with without_progress_bars():
            return load_dataset_builder(**_options(dataset))
    except Exception as error:
        raise _unreadable(dataset.path, error) from error


def _options(dataset: Dataset) -> dict[str, Any]:
    """Options of `load_dataset` that say which data are meant."""
    files = list(dataset.data_files) if isinstance(dataset.data_files, tuple) else dataset.data_files
    return {"path": dataset.path, "name": dataset.name, "data_files": files, "revision": dataset.revision}


# ---- splits ------------------------------------------------------------------------------------------------

Splits = dict[str, Callable[..., Iterator[Row]]]  # name -> reads its rows; parse=False: counts them at least


def _splits(dataset: Dataset, progress: Progress) -> Splits:
    """Find the splits of data that are not on the hub; a file is `train`. Errors: DataError."""
    path, local = dataset.path, Path(os.path.expanduser(dataset.path))
    remote = path.startswith("https://")
    if "://" in path and not remote:
        raise DataError(f"{path}: data are files here, hub ids, or at https", "of file://PATH the PATH alone")
    if local.is_symlink() and not local.exists():
        raise DataError(f"{path}: a link to {os.readlink(local)}, which is not there", "check the link")
    if not (remote or path.startswith("builtin:") or local.exists()):
        raise DataError(f"{path}: no such file or folder", nearest_file(local, dataset))
    if local.exists() and not (local.is_file() or local.is_dir()):
        raise DataError(f"{path}: neither a file nor a folder", "save it as a file: it is read several times")
    plain = local.is_dir() and not _is_saved(local)
    for key, known in {"name": plain, "data_files": plain, "revision": remote}.items():
        if getattr(dataset, key) is not None and not known:
            raise DataError(f"{path}: `{key}` chooses nothing of it", f"leave {dataset.key_path(key)} out")
    if local.is_dir():
        return _folder_splits(local, dataset)
    if path.startswith("builtin:"):
        return {"train": partial(_builtin, path)}
    file = https_file(path, dataset.revision).fetch(progress) if remote else local
    return {"train": partial(_file, file, path)}


def _of_split(dataset: Dataset, splits: Splits, parse: bool = True) -> Iterator[Row]:
    """Read the rows of `dataset.split`: a name, or parts of splits as `load_dataset` takes them."""
    split = "+".join(splits) if dataset.split == "all" else dataset.split
    if split in splits:
        return splits[split](parse=parse)
    try:
        from datasets import ReadInstruction

        counted = {name: read for name, read in splits.items() if name in split}
        lengths = {name: sum(1 for _ in read(parse=False)) for name, read in counted.items()}
        parts = ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        said = f"{dataset.path}: no split `{dataset.split}`; there is {', '.join(sorted(splits))}"
        hint = f"{dataset.key_path('split')}={min(splits)}, or a part of it: {min(splits)}[:90%]"
        raise DataError(said, hint) from error
    return chain.from_iterable(islice(splits[p.splitname](parse=parse), p.from_, p.to) for p in parts)


def nearest_file(path: Path, dataset: Dataset) -> str:
    """Return the hint for a file that is not there: the nearest name beside it, if there is one."""
    if any(c in path.name for c in "*?"):
        return f"--data FOLDER {dataset.key_path('data_files')}='{path.name}': a path is no pattern"
    beside = [file.name for file in path.parent.iterdir() if file.exists()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.with_name(near[0])}?" if near else "check the path: it begins at this folder"


def _builtin(path: str, parse: bool = True) -> Iterator[Row]:
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


# ---- folders -----------------------------------------------------------------------------------------------

# as `datasets` tells splits by the names of files and folders
SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}")
WORDS = "(?P<train>train(ing)?)|(?P<validation>valid(ation)?|val|dev)|(?P<test>test(ing)?|eval(uation)?)"
SPLIT_WORD = re.compile(rf"(?:^|[-._ 0-9/])(?:{WORDS})(?=[-._ 0-9/]|$)", re.IGNORECASE)
NO_DATA_FILES = {"config.json", "dataset_info.json", "dataset_infos.json"}


def _is_saved(folder: Path) -> bool:
    """True for a folder that `save_to_disk` wrote."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _folder_splits(folder: Path, dataset: Dataset) -> Splits:
    if not _is_saved(folder):
        found = _folder_files(folder, dataset)
        return {split: partial(_files, dataset, files) for split, files in found.items()}
    with _reading_saved(folder):
        if (folder / "dataset_dict.json").exists():
            names = parse_json((folder / "dataset_dict.json").read_bytes())["splits"]
            return {name: partial(_saved, folder / name) for name in names}
        split = parse_json((folder / "state.json").read_bytes())["_split"] or "train"
        return {split.partition("[")[0]: partial(_saved, folder)}


def _saved(folder: Path, parse: bool = True) -> Iterator[Row]:
    """Read a split that `save_to_disk` wrote, with the columns of its format."""
    from pyarrow import ipc, memory_map

    with _reading_saved(folder):
        state = parse_json((folder / "state.json").read_bytes())
        hidden = set(state["_format_columns"] or ())
        for name in (each["filename"] for each in state["_data_files"]):
            with memory_map(str(folder / name)) as file, ipc.open_stream(file) as found:
                for row in _arrow(found.schema, found, str(folder)):
                    yield Row({k: v for k, v in row.fields.items() if not hidden or k in hidden}, row.place)


@contextmanager
def _reading_saved(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of JSON, Arrow and the system alike: the folder is damaged
        hint = "copy the whole folder again, as save_to_disk wrote it"
        raise DataError(f"{folder}: cannot be read as a saved data set: {error}", hint) from error


def _folder_files(folder: Path, dataset: Dataset) -> dict[str, list[Path]]:
    """Sort the data files of a folder into splits: as `data_files` or its card say, else by their names.

    Files without a split in their name are those of `train` where no other is.
    """
    card, files = folder / "README.md", dataset.data_files
    if files is not None:
        named = [_named(folder, name, dataset) for name in ([files] if isinstance(files, str) else files)]
        return {"train": list(dict.fromkeys(chain.from_iterable(named)))}
    if dataset.name is not None or (card.is_file() and b"\nconfigs:" in card.read_bytes()):
        found = _builder(dataset.model_copy(update={"path": str(folder)})).config.data_files
        return {str(split): [Path(path) for path in paths] for split, paths in found.items()}
    splits, others = dict[str, list[Path]](), list[Path]()
    for file in _visible(folder):
        if data_suffix(file) in DATA_SUFFIXES and file.name not in NO_DATA_FILES:
            name = file.relative_to(folder).as_posix()
            shard, word = SHARD.match(name), SPLIT_WORD.search(name)
            split = shard[1] if shard else str(word.lastgroup) if word else ""
            (splits.setdefault(split, []) if split else others).append(file)
    if not splits and not others:
        raise DataError(
            f"{folder}: no data in this folder", f"it may hold files of {', '.join(DATA_SUFFIXES)}"
        )
    return {"train": others} | splits if others else splits


def _visible(folder: Path) -> list[Path]:
    """List the files below a folder by name, hidden ones left out."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return [p for p in paths if not any(part.startswith((".", "__")) for part in p.relative_to(folder).parts)]


def _named(folder: Path, name: str, dataset: Dataset) -> list[Path]:
    """Find a file of this name, or else those that match it as a pattern of * and ?."""
    if (folder / name).is_file():
        return [folder / name]
    pattern = str(Path(name)).replace("[", "[[]")
    found = [] if Path(name).is_absolute() else sorted(p for p in folder.glob(pattern) if p.is_file())
    if not found:
        near = nearest_file(folder / name.replace("*", ""), dataset)
        raise DataError(f"{folder}: no file {name} in it", near)
    return found


def _files(dataset: Dataset, files: list[Path], parse: bool = True) -> Iterator[Row]:
    """Read the files of one split. Errors: DataError where it is not plain which of them are meant."""
    names = {file.name for file in files}
    if dataset.data_files is None and len(kinds := sorted(map(data_suffix, files))) > 1:
        hint = f"{dataset.key_path('data_files')}='*{kinds[0]}' reads these alone"
        if len(set(kinds)) > 1:
            raise DataError(f"{dataset.path}: files of several formats: {', '.join(sorted(names))}", hint)
        if twice := next((f for f in files if Path(f"{f}.gz") in files), None):
            raise DataError(f"{dataset.path}: {twice.name} is there twice, as {twice.name}.gz too", hint)
    return chain.from_iterable(_file(file, str(file), parse) for file in files)


def unread_files(dataset: Dataset) -> list[str]:
    """Warn of the files of a folder that are not read."""
    folder = Path(os.path.expanduser(dataset.path))
    if not folder.is_dir() or dataset.data_files or _is_saved(folder):
        return []
    asked = {part.partition("[")[0].strip() for part in dataset.split.split("+")}
    found = _folder_files(folder, dataset).items()
    read = {file.resolve() for split, files in found for file in files if asked & {split, "all"}}
    known = NO_DATA_FILES | {"README.md"}
    left = [file for file in _visible(folder) if file.resolve() not in read and file.name not in known]
    names = ", ".join(map(str, left[:LISTED])) + (f" and {len(left) - LISTED} more" if left[LISTED:] else "")
    return [f"not read, as the split is {dataset.split}: {names}"] if left else []


# ---- files -------------------------------------------------------------------------------------------------


def _file(path: Path, called: str, parse: bool = True) -> Iterator[Row]:
    """Read the rows of a file. Without `parse` those of a .jsonl are empty: its lines are counted."""
    suffix = data_suffix(path)
    if suffix == ".jsonl" and not parse:
        return (Row({}, called) for _, line in _lines(path, called) if line.strip())
    if suffix not in READERS:
        known = ", ".join(DATA_SUFFIXES)
        raise DataError(f"{called}: unknown kind of file (known: {known}, and each with .gz)")
    return READERS[suffix](path, called)


def _jsonl(path: Path, called: str) -> Iterator[Row]:
    """Parse one JSON object a line; empty lines are skipped. An error names the next broken lines as well."""

    def parsed(number: int, line: bytes) -> Row | DataError:
        try:
            return Row(_object(line, f"{called}:{number}", JSON_LINE), f"{called}:{number}")
        except DataError as error:
            return error

    rows = ((number, parsed(number, line)) for number, line in _lines(path, called) if line.strip())
    for _, row in rows:
        if isinstance(row, DataError):
            broken = (str(n) for n, other in islice(rows, SEARCHED) if isinstance(other, DataError))
            also = ", ".join(islice(broken, LISTED - 1))
            raise DataError(f"{row} (so too in line {also})" if also else str(row), row.hint)
        yield row


def _json(path: Path, called: str) -> Iterator[Row]:
    """Parse a list of rows, or rows one behind the other, each over as many lines as it likes; a text in a
    list is a row with the field `text`."""
    text = "".join(decoded(line, f"{called}:{number}") for number, line in _lines(path, called))
    parse, at = json.JSONDecoder().raw_decode, _skip(text, 0)
    close = "]" if text.startswith("[", at) else ""
    at, number, counted, separator = _skip(text, at + len(close)), 1, 0, ""
    while not (text.startswith(close, at) if close else at == len(text)):
        try:
            if not text.startswith(separator, at):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _skip(text, at + len(separator))
            end = parse(text, at)[1]
        except json.JSONDecodeError as error:
            said = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise DataError(f"{called}:{error.lineno}: not valid JSON: {said}", JSON_PLACE) from None
        except (ValueError, RecursionError):  # too long a number, too deep: below it is measured and said
            end = len(text)
        number, counted = number + text.count("\n", counted, at), at
        value, place = text[at:end], f"{called}:{number}"
        if close and value.startswith('"'):
            value = f'{{"text": {value}}}'
        yield Row(_object(value.encode("utf-8", "surrogatepass"), place, JSON_PLACE), place)
        at, separator = _skip(text, end), close and ","
    if _skip(text, at + len(close)) < len(text):
        raise DataError(f"{called}: not valid JSON: something is behind the list", JSON_PLACE)


def _skip(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is no white space of JSON."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _object(line: bytes, place: str, hint: str) -> dict[str, Any]:
    try:
        decoded(line, place)
        value = parse_json(line.rstrip(), unique_keys)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON: {error}", hint) from None
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else json.dumps(value)[:20]
        raise DataError(f"{place}: each row must be an object with named fields, not {kind}", hint)
    return value


def decoded(text: bytes, place: str) -> str:
    """Decode UTF-8. Errors: DataError where it is none, or has a zero byte, as UTF-16 and torn files do."""
    try:
        if "\0" not in (found := text.decode("utf-8")):
            return found
        said = f"a zero byte at byte {text.index(0)}"
    except UnicodeDecodeError as error:
        said = f"{error.reason} at byte {error.start}"
    kind = "UTF-16" if UTF16.match(text) else "ENCODING"
    raise DataError(
        f"{place}: not UTF-8 text: {said}", f"save it as UTF-8, such as with iconv -f {kind} -t UTF-8"
    )


def _texts(path: Path, called: str) -> Iterator[Row]:
    """Read a .txt: a text a paragraph where empty lines separate them, else a text a line."""
    filled = [key for key, _ in groupby(bool(line.strip()) for _, line in _lines(path, called))]
    by_paragraph, part, begin = filled.count(True) > 1, list[str](), 0
    for number, line in chain(_lines(path, called), [(0, b"")]):
        text = decoded(line, f"{called}:{number}").rstrip("\r\n")
        if part and not (by_paragraph and text.strip()):
            yield Row({"text": "\n".join(part)}, f"{called}:{begin}")
            part = []
        if text.strip():
            begin = begin if part else number
            part.append(text)


def _table(path: Path, called: str, delimiter: str) -> Iterator[Row]:
    """Read a table whose first line names the columns; every field is text, empty lines are skipped.

    A field may have lines. A warning tells of the first of which each line would be a row: a quote
    that is meant as a character swallows rows up to the next one.
    """
    lines = (decoded(line, f"{called}:{number}") for number, line in _lines(path, called))
    csv.field_size_limit(LONGEST_FIELD)  # of the whole process; the module's own is 128 KiB
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header, place, swallowed = list[str](), f"{called}:1", False
    try:
        for fields in reader:
            if delimiter == "\t" and "\n" in "".join(fields):  # rather a text's own quote: rows become one
                raise DataError(f"{place}: a quote is open at the end of the line", LINE_QUOTES)
            if not header:
                header = fields
                if twice := next((name for name in header if header.count(name) > 1), None):
                    raise DataError(f"{place}: two columns are named {twice!r}", "rename one of them")
            elif fields and len(fields) != len(header):
                hint = separator_hint(header) or FIELDS
                raise DataError(f"{place}: fields: {len(fields)}, in the header: {len(header)}", hint)
            elif fields:
                lines_in = "" if swallowed else _swallowed(fields, delimiter)
                swallowed = swallowed or bool(lines_in)
                warning = f"{place}: {lines_in}" if lines_in else ""
                yield Row(dict(zip(header, fields, strict=True)), place, warning)
            place = f"{called}:{reader.line_num + 1}"  # where the next row begins: a field may have lines
    except csv.Error as error:
        raise DataError(f"{place}: not a valid table: {error}", FIELDS) from None


def separator_hint(columns: Sequence[str]) -> str:
    """Name the separator of a table whose header was read as one column; "": it has no other one."""
    mark = next((mark for mark in ";|\t" if len(columns) == 1 and mark in columns[0]), "")
    return mark and f"its separator is {mark!r}: save it with commas, or with tabs as .tsv"


def _swallowed(fields: Sequence[str], delimiter: str) -> str:
    """Warn of a row of which each line would be a row of as many fields; "": it has no such lines."""
    lines = delimiter.join(fields).split("\n")
    rows = (
        len(fields) > 1 and len(lines) > 1 and all(line.count(delimiter) + 1 == len(fields) for line in lines)
    )
    return (
        f"its quoted field has {len(lines)} lines, each like a row: is a quote there just a character?" * rows
    )


def _parquet(path: Path, called: str) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with _opened(path, called) as file:
        found = ParquetFile(file)
        yield from _arrow(found.schema_arrow, found.iter_batches(1024), called)


def _arrow(schema: Schema, batches: Iterable[RecordBatch], called: str) -> Iterator[Row]:
    """Make rows of Arrow's as `datasets` does. Errors: DataError for columns or values that have no such."""
    from datasets import Features

    place = called
    try:
        if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
            raise ValueError(f"two columns are named {twice!r}")
        features = Features.from_arrow_schema(schema)
        for number, fields in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
            place = f"{called} row {number}"
            yield Row(_row_fields(features.decode_example(fields), features), place)
    except Exception as error:  # of any class: of Arrow, of datasets, of values that Python does not have
        hint = COPY_AGAIN if isinstance(error, OSError) else "save it again without that, or as .jsonl"
        raise DataError(f"{place}: cannot be read: {error}", hint) from error


def _lines(path: Path, called: str) -> Iterator[tuple[int, bytes]]:
    """Number the lines of a file; a byte order mark is left out."""
    with _opened(path, called) as file:
        for number, line in enumerate(file, start=1):
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


@contextmanager
def _opened(path: Path, called: str) -> Iterator[gzip.GzipFile | BufferedReader]:
    """Open a file, which may be compressed by gzip. Errors, also while it is read: DataError."""
    packed = path.suffix.lower() == ".gz"
    try:
        with path.open("rb") as file:
            beginning = file.peek(len(LFS_POINTER))
            if beginning.startswith(LFS_POINTER):
                raise DataError(
                    f"{called}: a git-lfs pointer, and not the data", "`git lfs pull` fetches them"
                )
            if (kind := PACKED.match(beginning)) and kind.lastgroup != ("gzip" if packed else ""):
                hint = f"call it {Path(called).name}.gz" if kind["gzip"] else "unpack it"
                raise DataError(f"{called}: compressed by {kind.lastgroup}", hint)
            yield gzip.GzipFile(fileobj=file) if packed else file
    except (OSError, EOFError, ValueError, zlib.error) as error:  # of gzip and Arrow too
        hint = "" if getattr(error, "errno", None) else COPY_AGAIN
        raise DataError(
            f"{called}: cannot be read: {getattr(error, 'strerror', '') or error}", hint
        ) from error


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": partial(_table, delimiter=","),
    ".tsv": partial(_table, delimiter="\t"),
    ".parquet": _parquet,
    ".txt": _texts,
}


# ---- the hub -----------------------------------------------------------------------------------------------


def _hub_rows(dataset: Dataset, streaming: bool) -> Iterator[Row]:
    from datasets import load_dataset

    streaming = streaming and not set(dataset.split) & set("[+")  # parts need the whole data set
    try:
        with without_progress_bars():
            found = load_dataset(**_options(dataset), split=dataset.split, streaming=streaming)
        for number, fields in enumerate(found):
            yield Row(_row_fields(fields, found.features), f"{dataset.path} row {number}")
    except Exception as error:
        raise _unreadable(dataset.path, error) from error


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
    if NO_DATA in str(error):
        return no_rows(called)
    cause = f": {error.__cause__}" if error.__cause__ else ""
    return DataError(f"{called}: cannot be loaded: {error}{cause}")


def no_rows(called: str) -> DataError:
    """Make the error of a data set without rows."""
    return DataError(f"{called}: the data set is empty", "it needs rows; --data FILE names another one")


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
