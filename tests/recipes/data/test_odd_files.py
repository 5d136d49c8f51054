"""Users' files and folders give the rows of a plain reader, or an error that names file and line."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from recipes.config import Dataset
from recipes.data import read_rows, unread_files
from recipes.errors import DataError

ROWS = [{"text": f"row {i}"} for i in range(25)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DATES = [{"prompt": "When?", "completion": f"2021-03-{i:02d}T10:00:00Z"} for i in range(10, 13)]
LONG = '{"text": "0012345678901234567890.10", "number": 123456789012345678901234567890}'
BOM = "\ufeff"


def read(path: Path | str, split: str = "train", **keys: object) -> list[dict]:
    return [row.fields for row in read_rows(Dataset(path=str(path), split=split, **keys))]


def texts(*found: str) -> list[dict]:
    return [{"text": each} for each in found]


ODD: dict[str, tuple[str | bytes, list[dict] | str]] = {  # name: content, rows or error
    "dates.json": (json.dumps(DATES), DATES),
    "dates-in-lines.json": ("\n".join(map(json.dumps, DATES)), DATES),
    "dates.csv": ("prompt,completion\nWhen?,2021-03-01\n", [{"prompt": "When?", "completion": "2021-03-01"}]),
    "long.jsonl": (LONG, [json.loads(LONG)]),
    "long.json": (f"[{LONG}]", [json.loads(LONG)]),
    "long.csv": ("text\n00123456789012345678.10\n1e5\nNA\n", texts("00123456789012345678.10", "1e5", "NA")),
    "mixed.json": (
        '[{"a": 1}, {"a": "x", "b": null}, {"a": [1]}]',
        [{"a": 1}, {"a": "x", "b": None}, {"a": [1]}],
    ),
    "texts.json": ('["a", "b\\"c"]', texts("a", 'b"c')),
    "indented.json": (json.dumps(ROWS, indent=2), ROWS),
    "behind-each-other.json": ("\n".join(json.dumps(row, indent=1) for row in ROWS), ROWS),
    "crlf.json": (LINES.replace("\n", "\r\n"), ROWS),
    "none.json": ("[]", []),
    "bom.json": (BOM + json.dumps(ROWS), ROWS),
    "bom.jsonl": (BOM + LINES, ROWS),
    "bom.csv": (BOM + "text\na\n", texts("a")),
    "lines.txt": ("one\ntwo\n\n", texts("one", "two")),
    "paragraphs.TXT.gz": (gzip.compress(b"one\r\ntwo\n\n \nthree\n"), texts("one\ntwo", "three")),
    "bom.txt": (BOM + "a\nb\n", texts("a", "b")),
    "gap.jsonl": ('\n\n{"text": "a"}\n  \r\n{"text": "b"}', texts("a", "b")),
    "separator.jsonl": ('{"text": "a\u2028b\u0085c"}\n', texts("a\u2028b\u0085c")),
    "upper.JSONL": (LINES, ROWS),
    "dots.v1.2.jsonl": (LINES, ROWS),
    "packed.json.gz": (gzip.compress(json.dumps(ROWS).encode()), ROWS),
    "packed.TSV.GZ": (gzip.compress(b"text\na\n"), texts("a")),
    "lines.csv": ('text\n"a\nb, ""c"""\n5" pipe\n', texts('a\nb, "c"', '5" pipe')),
    "quotes.tsv": ('text\n"a, ""b"""\n5" pipe\n', texts('a, "b"', '5" pipe')),
    # errors, behind the file's name
    "open.tsv": ('p\tc\n1\ta\n"open\tb\ncloses"\tc\n4\td\n', ":3: a quote is open at the end of the line"),
    "unclosed.tsv": ('p\tc\n"open\ta\n2\tb\n', ":2: not a valid table"),
    "behind.tsv": ('p\tc\n"open" word\ta\n', ":2: not a valid table"),
    "old-mac.csv": ("text\ra\rb\r", ":1: not a valid table"),
    "list.jsonl": (json.dumps(ROWS), ":1: each row must be an object with named fields, not a list"),
    "indented.jsonl": (json.dumps(ROWS[0], indent=1), ":1: not valid JSON"),
    "control.jsonl": ('{"text": "a\tb"}\n', ":1: not valid JSON: Invalid control character at column 12$"),
    "control.json": (
        '[{"text": "a"},\n{"text": "a\tb"}]',
        ":2: not valid JSON: Invalid control character at col",
    ),
    "comma.json": ('[{"text": "a"}\n{"text": "b"}]', ":2: not valid JSON: Expecting ','"),
    "cut.json": ('[{"text": "a"},\n{"text": "b"}', ":2: not valid JSON"),
    "two-lists.json": ('[{"text": "a"}]\n[{"text": "b"}]', ": not valid JSON: something is behind"),
    "scalar.json": ('[{"text": "a"},\n7]', ":2: each row must be an object .* not 7"),
    "digits.json": (f'[{{"n": {"9" * 5000}}}]', ":1: not valid JSON: an integer of more than 4,300"),
    "deep.json": ("[" * 100_000, ":1: not valid JSON: nested deeper than 64 levels"),
    "latin.json": ('[{"text": "a"},\n{"text": "é"}]'.encode("latin-1"), ":2: not UTF-8 text"),
    "zero.txt": ("a\nb\0c\n", ":2: not UTF-8 text: a zero byte at byte 1"),
    "torn.jsonl": (LINES + "\0" * 9, ":26: not UTF-8 text: a zero byte"),
    "gzip.jsonl": (gzip.compress(LINES.encode()), ": compressed by gzip"),
    "zip.csv": (b"PK\3\4and more", ": compressed by zip"),
    "xz.jsonl.gz": (b"\xfd7zXZ\0", ": compressed by xz"),
    "no-gzip.json.gz": (LINES, ": cannot be read"),
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-12], ": cannot be read"),
    "text.parquet": (LINES, ": cannot be read"),
    "my.xlsx": (LINES, r": unknown kind of file \(known: .jsonl, .json, .csv, .tsv"),
    **{
        f"lfs.{end}": (LFS, ": a git-lfs pointer")
        for end in ("jsonl", "json", "csv", "tsv", "txt", "parquet")
    },
}


@pytest.mark.parametrize("name", ODD)
def test_rows_of_an_odd_file_are_those_of_a_plain_reader_or_an_error_with_its_line(tmp_path, name) -> None:
    content, wanted = ODD[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    if isinstance(wanted, str):
        with pytest.raises(DataError, match=re.escape(name) + wanted):
            read(tmp_path / name)
    else:
        assert read(tmp_path / name) == wanted


def test_parquet_is_read_as_datasets_reads_it(tmp_path) -> None:
    rows = [{"text": "2021-03-01", "list": [{"a": "x"}]}, {"text": "007", "list": []}]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "my.parquet", row_group_size=1)
    (tmp_path / "my.parquet.gz").write_bytes(gzip.compress((tmp_path / "my.parquet").read_bytes()))

    assert read(tmp_path / "my.parquet") == read(tmp_path / "my.parquet.gz") == list(datasets.Dataset(table))


@pytest.mark.parametrize(
    ("columns", "names", "cause"),
    [
        ([["a"], ["b"]], ["text", "text"], "two columns are named 'text'"),
        ([["a"], pyarrow.array([2**62], pyarrow.timestamp("us"))], ["text", "at"], "out of range"),
        (
            [["a"], pyarrow.array([[("k", "v")]], pyarrow.map_("string", "string"))],
            ["text", "m"],
            "map<string",
        ),
    ],
)
def test_columns_of_arrow_that_no_row_can_hold_are_an_error(tmp_path, columns, names, cause: str) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "my.parquet")

    with pytest.raises(DataError, match=cause) as error:
        read(tmp_path / "my.parquet")
    assert "save it again" in error.value.hint


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_text_in_utf_16_is_refused_by_its_name(tmp_path, encoding: str) -> None:
    (tmp_path / "my.csv").write_bytes("text\na\n".encode(encoding))

    with pytest.raises(DataError, match="not UTF-8 text") as error:
        read(tmp_path / "my.csv")
    assert "iconv -f UTF-16 -t UTF-8" in error.value.hint


TWO_COLUMNS = 'prompt,completion\n1,"a\nb"\n2,{}\n6,d\n'


@pytest.mark.parametrize(
    ("field", "warning"),
    [
        ('"open\n3,b\n4,c\n5,close"', ":4: its quoted field has 4 lines, each like a row"),
        ('"of\nlines, and more, of them"', ""),
    ],
)
def test_a_quote_that_swallows_rows_of_a_table_is_told_with_its_line(tmp_path, field, warning) -> None:
    (tmp_path / "my.csv").write_text(TWO_COLUMNS.format(field))

    rows = list(read_rows(Dataset(path=str(tmp_path / "my.csv"))))

    assert [row.fields["completion"] for row in rows] == ["a\nb", field.strip('"'), "d"]
    assert warning in "".join(row.warning for row in rows)
    assert any(row.warning for row in rows) == bool(warning)


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path) -> None:
    """A pipe would wait for a writer for ever."""
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "my.jsonl")
        with pytest.raises(DataError, match="neither a file nor a folder"):
            read(tmp_path / "my.jsonl")
    for address in ("file:///my.jsonl", "s3://my/my.jsonl", "http://my.invalid/my.jsonl"):
        with pytest.raises(DataError, match="data are files here, hub ids, or at https"):
            read(address)


def test_an_error_names_up_to_five_broken_lines(tmp_path) -> None:
    (tmp_path / "my.jsonl").write_text(LINES + ('{"text"\n' + LINES) * 7)

    with pytest.raises(DataError, match=r"my.jsonl:26: not valid .* \(so too in line 52, 78, 104, 130\)$"):
        read(tmp_path / "my.jsonl")


TABLES = ("part[1].parquet", "a::b/x.parquet", "what?.csv", "~x/{y}.tsv")
NAMES = (
    *TABLES,
    "part[1].json",
    "*.jsonl",
    "set [a]/x.json",
    "a$HOME/x.json",
    "set [a]",
    "set*",
    "a::[b]",
    "$HOME",
)
OTHERS = ("part1.json", "part1.parquet", "x.jsonl", "what1.csv", "set a/x.json", "b/x.parquet", "setb")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_never_a_pattern(tmp_path, monkeypatch, name: str) -> None:
    """A file or folder is read that has this very name, among others that it could match; saved ones too."""
    monkeypatch.chdir(tmp_path)
    for path, text in (*((other, "another") for other in OTHERS), (name, "right")):
        table = datasets.Dataset.from_dict({"text": [text]})
        if not Path(path).suffix and "*" not in path:
            table.save_to_disk("saved")
            Path("saved").rename(path)
            continue
        file = Path(path) if Path(path).suffix else Path(path, "x.json")
        file.parent.mkdir(exist_ok=True, parents=True)
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(table.data.table, file.open("wb"))
        else:
            file.write_text(f'{{"text": "{text}"}}' if ".json" in file.suffix else f"text\n{text}\n")

    assert read(name) == texts("right")


@pytest.mark.parametrize("name", ["part[1].json", "*.jsonl", "what?.csv", "a b"])
def test_a_path_that_is_not_there_matches_nothing(tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("part1.json", "x.jsonl", "what1.csv"):
        Path(other).write_text(LINES)

    with pytest.raises(DataError, match="no such file or folder"):
        read(name)


SOURCES: dict[str, Callable[[Path], object]] = {  # path -> writes it
    "my.jsonl": lambda path: path.write_text(LINES),
    "folder": lambda path: (path.mkdir(), (path / "train.jsonl").write_text(LINES)),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=2),
    "dict": lambda path: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path),
}
SPLITS = ("train", "train[:10]", "train[90%:]", "train[-3:]", "train[:2]+train[5:7]", "train[30:]")


@pytest.mark.parametrize("name", SOURCES)
def test_split_is_honoured_or_refused_by_every_source(tmp_path, name: str) -> None:
    path = tmp_path / name
    SOURCES[name](path)
    table = datasets.Dataset.from_list(ROWS)

    for split in SPLITS:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(ROWS)})
        assert read(path, split) == [table[i] for part in parts for i in range(part.from_, part.to)]
    assert read(path, "all") == ROWS
    for split in ("nosuch", "train[:", "train[:200%]", "nosuch[:1]"):
        with pytest.raises(DataError, match=r"no split .*; there is "):
            read(path, split)
    for key in ("name", "revision", "data_files"):
        with pytest.raises(DataError):
            read(path, **{key: "nosuch"})


SHARD = "data/{}-00000-of-00001.jsonl"
FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | str]] = {  # files; those of train, or an error
    "splits": (("train.jsonl", "test.jsonl", "valid-1.jsonl"), ("train.jsonl",)),
    "folders": (("train/a.jsonl", "dev/b.jsonl", "latest.jsonl"), ("train/a.jsonl",)),
    "shards": ((SHARD.format("train"), SHARD.format("test_sft")), (SHARD.format("train"),)),
    "no split": (("b.jsonl", "a.jsonl", "contest.jsonl"), ("a.jsonl", "b.jsonl", "contest.jsonl")),
    "others": (("a.jsonl", "eval.jsonl"), ("a.jsonl",)),
    "hidden": (("a.jsonl", "._a.jsonl", ".b/a.jsonl", "__c/a.jsonl"), ("a.jsonl",)),
    "formats": (("a.jsonl", "b.csv"), "several formats: a.jsonl, b.csv"),
    "twice": (("a.jsonl", "a.jsonl.gz"), "a.jsonl is there twice"),
    "none": (("README.md", ".a.jsonl"), "no data in this folder"),
    "test alone": (("test.jsonl",), "no split `train`; there is test"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_its_splits_and_says_what_it_leaves_out(tmp_path, name: str) -> None:
    files, wanted = FOLDERS[name]
    for file in files:
        path = tmp_path / "my" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "{file}"}}\n')
    if isinstance(wanted, str):
        with pytest.raises(DataError, match=wanted):
            read(tmp_path / "my")
        return
    assert read(tmp_path / "my") == texts(*wanted)
    said = " ".join(unread_files(Dataset(path=str(tmp_path / "my"))))
    shown = [file for file in files if file not in wanted and not file.startswith((".", "__"))]
    assert all(file in said for file in shown), said
    assert bool(said) == bool(shown)


def test_data_files_name_files_or_match_them(tmp_path) -> None:
    for name in ("a[1].jsonl", "a1.jsonl", "b.csv", "sub/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\nb\n" if name.endswith(".csv") else f'{{"text": "{name}"}}\n')

    assert read(tmp_path, data_files="a[1].jsonl") == texts("a[1].jsonl")
    assert read(tmp_path, data_files=("*.jsonl", "b.csv")) == texts("a1.jsonl", "a[1].jsonl", "b")
    assert read(tmp_path, data_files="**/*.jsonl") == texts("a1.jsonl", "a[1].jsonl", "sub/c.jsonl")
    with pytest.raises(DataError, match=r"no file a\[2\].jsonl in it"):
        read(tmp_path, data_files="a[2].jsonl")


def test_the_card_of_a_folder_names_its_configurations(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("fr", "de"):
        (tmp_path / "my" / name).mkdir(parents=True)
        (tmp_path / "my" / name / "x.jsonl").write_text(f'{{"text": "{name}"}}\n')
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("fr", "de"))
    (tmp_path / "my" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")

    assert read(tmp_path / "my", name="de") == texts("de")
    with pytest.raises(DataError, match="cannot be loaded: Config name is missing"):
        read(tmp_path / "my")


@pytest.mark.parametrize("name", ["my.json", "my.parquet", "my.jsonl"])
def test_rows_are_those_that_the_file_has_now_whatever_its_time(tmp_path, name: str) -> None:
    for text in ("first", "other"):
        table = datasets.Dataset.from_dict({"text": [text]})
        table.to_parquet(tmp_path / name) if ".parquet" in name else table.to_json(tmp_path / name)
        os.utime(tmp_path / name, (1_700_000_000, 1_700_000_000))

        assert read(tmp_path / name) == texts(text)
