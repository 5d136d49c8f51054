"""What users' files and folders hold: the rows of a plain reader, or an error that names file and line."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from recipes.config import Dataset, load_recipe
from recipes.data import build_corpus, read_rows
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
    "long.csv": (
        "text\n0012345678901234567890.10\n1e5\nNA\n-0\n",
        texts("0012345678901234567890.10", "1e5", "NA", "-0"),
    ),
    "mixed.json": ('[{"a": 1}, {"a": "x", "b": null}, {"a": [1, {"c": null}]}]',) * 1
    + ([{"a": 1}, {"a": "x", "b": None}, {"a": [1, {"c": None}]}],),
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
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-12], "cut.jsonl.gz: cannot be read: "),
    "my.xlsx": (LINES, r"my.xlsx: unknown kind of file \(known: .jsonl, .json, .csv, .tsv"),
    "bom.txt": (BOM + "a\nb\n", texts("a", "b")),
    "gap.jsonl": ('\n\n{"text": "a"}\n  \r\n{"text": "b"}', texts("a", "b")),
    "separator.jsonl": ('{"text": "a\u2028b\u0085c"}\n', texts("a\u2028b\u0085c")),
    "upper.JSONL": (LINES, ROWS),
    "dots.v1.2.jsonl": (LINES, ROWS),
    "packed.json.gz": (gzip.compress(json.dumps(ROWS).encode()), ROWS),
    "packed.TSV.GZ": (gzip.compress(b"text\na\n"), texts("a")),
    "lines.csv": ('text\n"a\nb, ""c"""\n5" pipe\n', texts('a\nb, "c"', '5" pipe')),
    "quotes.tsv": (
        'text\tn\n"a, ""b"""\t1\n5" pipe\t2\n',
        [{"text": 'a, "b"', "n": "1"}, {"text": '5" pipe', "n": "2"}],
    ),
    "open.tsv": (
        'p\tc\n1\ta\n"open\tb\ncloses"\tc\n4\td\n',
        "open.tsv:3: a quote is open at the end of the line",
    ),
    "unclosed.tsv": ('p\tc\n"open\ta\n2\tb\n', "unclosed.tsv:2: not a valid table"),
    "behind.tsv": ('p\tc\n"open" word\ta\n', "behind.tsv:2: not a valid table"),
    "old-mac.csv": ("text\ra\rb\r", "old-mac.csv:1: not a valid table"),
    "list.jsonl": (
        json.dumps(ROWS),
        "list.jsonl:1: each row must be an object with named fields, not a list",
    ),
    "indented.jsonl": (json.dumps(ROWS[0], indent=1), r"indented.jsonl:1: not valid JSON"),
    "control.jsonl": (
        '{"text": "a\tb"}\n',
        r"control.jsonl:1: not valid JSON: Invalid control character at column 12$",
    ),
    "control.json": (
        '[{"text": "a"},\n{"text": "a\tb"}]',
        r"control.json:2: not valid JSON: Invalid control character at column",
    ),
    "comma.json": ('[{"text": "a"}\n{"text": "b"}]', "comma.json:2: not valid JSON: Expecting ','"),
    "cut.json": ('[{"text": "a"},\n{"text": "b"}', "cut.json:2: not valid JSON"),
    "two-lists.json": (
        '[{"text": "a"}]\n[{"text": "b"}]',
        "two-lists.json: not valid JSON: something is behind",
    ),
    "scalar.json": ('[{"text": "a"},\n7]', "scalar.json:2: each row must be an object .* not 7"),
    "digits.json": (
        f'[{{"n": {"9" * 5000}}}]',
        "digits.json:1: not valid JSON: an integer of more than 4,300",
    ),
    "deep.json": ("[" * 100_000, "deep.json:1: not valid JSON: nested deeper than 64 levels"),
    "latin.json": ('[{"text": "a"},\n{"text": "é"}]'.encode("latin-1"), "latin.json:2: not UTF-8 text"),
    "gzip.jsonl": (gzip.compress(LINES.encode()), "gzip.jsonl: compressed by gzip"),
    "no-gzip.json.gz": (LINES, "no-gzip.json.gz: cannot be read"),
    "text.parquet": (LINES, "text.parquet: cannot be read"),
    **{
        f"lfs.{end}": (LFS, f"lfs.{end}: a git-lfs pointer")
        for end in ("jsonl", "json", "csv", "tsv", "txt", "parquet")
    },
}


@pytest.mark.parametrize("name", ODD)
def test_rows_of_an_odd_file_are_those_of_a_plain_reader_or_an_error_with_its_line(
    tmp_path, name: str
) -> None:
    content, wanted = ODD[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    if isinstance(wanted, str):
        with pytest.raises(DataError, match=wanted):
            read(tmp_path / name)
    else:
        assert read(tmp_path / name) == wanted


def test_parquet_is_read_as_datasets_reads_it(tmp_path) -> None:
    rows = [
        {"text": "2021-03-01", "n": 1 << 60, "list": [{"a": "x"}]},
        {"text": "007", "n": None, "list": []},
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "my.parquet", row_group_size=1)
    (tmp_path / "my.parquet.gz").write_bytes(gzip.compress((tmp_path / "my.parquet").read_bytes()))

    assert read(tmp_path / "my.parquet") == read(tmp_path / "my.parquet.gz") == list(datasets.Dataset(table))


def test_an_error_names_up_to_five_broken_lines(tmp_path) -> None:
    (tmp_path / "my.jsonl").write_text(LINES + ('{"text"\n' + LINES) * 7)

    with pytest.raises(
        DataError, match=r"my.jsonl:26: not valid JSON: .* \(so too in line 52, 78, 104, 130\)$"
    ):
        read(tmp_path / "my.jsonl")


PATHS = (
    "part[1].json",
    "part[1].parquet",
    "*.jsonl",
    "what?.csv",
    "set [a]/x.json",
    "a::b/x.parquet",
    "a$HOME/x.json",
)


@pytest.mark.parametrize("name", [*PATHS, "~x/{y}.tsv", "file:x.txt", "set [a]", "set*", "a::[b]", "$HOME"])
def test_a_path_is_never_a_pattern(tmp_path, monkeypatch, name: str) -> None:
    """A file or folder is read that has this very name, among others that it could match; saved ones too."""
    monkeypatch.chdir(tmp_path)
    others = (
        "part1.json",
        "part1.parquet",
        "x.jsonl",
        "what1.csv",
        "set a/x.json",
        "b/x.parquet",
        "setb",
    )
    for path, text in (*((other, "another") for other in others), (name, "right")):
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
            file.write_text(
                f'{{"text": "{text}"}}'
                if ".json" in file.suffix
                else f"text\n{text}\n"[5 * (file.suffix == ".txt") :]
            )

    assert read(name) == texts("right")


@pytest.mark.parametrize("name", ["part[1].json", "*.jsonl", "what?.csv", "a b"])
def test_a_path_that_is_not_there_matches_nothing(tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("part1.json", "x.jsonl", "what1.csv"):
        Path(other).write_text(LINES)

    with pytest.raises(DataError, match="no such file or folder"):
        read(name)


def of_file(folder: Path) -> str:
    (folder / "my.jsonl").write_text(LINES)
    return str(folder / "my.jsonl")


def of_folder(folder: Path) -> str:
    (folder / "train.jsonl").write_text(LINES)
    (folder / "test.jsonl").write_text('{"text": "held out"}\n')
    return str(folder)


def of_saved(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved", num_shards=2)
    return str(folder / "saved")


def of_dict(folder: Path) -> str:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(folder / "dict")
    return str(folder / "dict")


SPLITS = ("train", "train[:10]", "train[90%:]", "train[-3:]", "train[:2]+train[5:7]", "train[30:]")


@pytest.mark.parametrize("source", [of_file, of_folder, of_saved, of_dict], ids=lambda made: made.__name__)
def test_split_is_honoured_or_refused_by_every_source(tmp_path, source: Callable[[Path], str]) -> None:
    path = source(tmp_path)
    table = datasets.Dataset.from_list(ROWS)
    plain = datasets.ReadInstruction.from_spec

    for split in SPLITS:
        parts = plain(split).to_absolute({"train": len(ROWS)})
        assert read(path, split) == [table[i] for part in parts for i in range(part.from_, part.to)]
    assert read(path, "all") == (read(path, "test+train") if source is of_folder else ROWS)
    for split in ("nosuch", "train[:", "train[:200%]", "nosuch[:1]"):
        with pytest.raises(DataError, match=r"no split .*; there is "):
            read(path, split)
    for key in ("name", "revision", "data_files"):
        with pytest.raises(DataError):
            read(path, **{key: "nosuch"})


FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | str]] = {  # files; those of train, or an error
    "splits": (("train.jsonl", "test.jsonl", "valid-1.jsonl"), ("train.jsonl",)),
    "folders": (("train/a.jsonl", "dev/b.jsonl", "latest.jsonl"), ("train/a.jsonl",)),
    "shards": (
        ("data/train-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"),
        ("data/train-00000-of-00001.jsonl",),
    ),
    "no split": (("b.jsonl", "a.jsonl", "contest.jsonl"), ("a.jsonl", "b.jsonl", "contest.jsonl")),
    "others": (("a.jsonl", "eval.jsonl"), ("a.jsonl",)),
    "hidden": (("a.jsonl", "._a.jsonl", ".b/a.jsonl", "__c/a.jsonl"), ("a.jsonl",)),
    "formats": (("a.jsonl", "b.csv"), "several formats: a.jsonl, b.csv"),
    "twice": (("a.jsonl", "a.jsonl.gz"), "a.jsonl is there twice"),
    "none": (("README.md", ".a.jsonl"), "no data in this folder"),
    "test alone": (("test.jsonl",), "no split `train`; there is test"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_its_splits_and_says_what_it_leaves_out(tmp_path, tokenizer, name: str) -> None:
    files, wanted = FOLDERS[name]
    for file in files:
        path = tmp_path / "my" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "{file}"}}\n')
    (tmp_path / "bare.yaml").write_text(
        "version: 1\nname: bare\nmodel: {model_name_or_path: builtin:tiny-gpt-neox}\n"
    )

    if isinstance(wanted, str):
        with pytest.raises(DataError, match=wanted):
            read(tmp_path / "my")
        return
    assert read(tmp_path / "my") == texts(*wanted)
    said = " ".join(
        build_corpus(load_recipe(tmp_path / "bare.yaml", data=str(tmp_path / "my")), tokenizer).warnings
    )
    shown = [file for file in files if file not in wanted and not file.startswith((".", "__"))]
    assert all(file in said for file in shown), said
    assert ("not read" in said) == bool(shown)


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
