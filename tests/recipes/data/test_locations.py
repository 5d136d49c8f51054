"""Rows are read from files, folders, the web, saved data sets and the hub."""

import hashlib
import json

import pytest

from recipes.config import Dataset, load_recipe
from recipes.data import build_corpus, read_rows
from recipes.data.sources import python_docs
from recipes.errors import DataError
from recipes.models import pin_revisions


def test_a_file_on_the_web_is_fetched_once_and_its_lines_are_reported_by_its_address(web, tokenizer) -> None:
    served = web(b'{"text": "one"}\n{"text": 2}\n')
    recipe = load_recipe("smoke", data="https://example.org/my.jsonl?x=1")

    for _ in range(2):
        with pytest.raises(
            DataError, match=r"https://example.org/my.jsonl\?x=1:2: field `text` must be text"
        ):
            build_corpus(recipe, tokenizer)

    assert served.asked == 1


def test_a_file_on_the_web_is_reported_of_as_it_comes(web) -> None:
    served = web(b'{"text": "one"}\n' * 10_000)
    (dataset,) = load_recipe("smoke", data="https://example.org/my.jsonl").datasets
    told: list[tuple[int, int]] = []

    read_rows(dataset, progress=lambda done, total: told.append((done, total)))

    assert told == [(65536, 160_000), (131_072, 160_000), (160_000, 160_000)]
    assert served.asked == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"announced": 99}, "4 bytes came, 99 were announced"),
        ({"url": "http://example.org/my.jsonl"}, "leads to http://example.org/my.jsonl, which is not https"),
    ],
)
def test_what_the_web_gave_only_in_part_or_in_the_open_is_not_kept(web, tokenizer, answer, message) -> None:
    web(b"text", **answer)
    recipe = load_recipe("smoke", data="https://example.org/my.jsonl")

    with pytest.raises(DataError, match=message):
        build_corpus(recipe, tokenizer)
    served = web(b'{"text": "whole"}\n')
    with pytest.raises(DataError):
        build_corpus(recipe, tokenizer)  # there are too few rows to hold any out

    assert served.asked == 1


def test_each_command_asks_for_a_file_on_the_web_and_a_resumed_run_has_that_of_before(web, tmp_path) -> None:
    def read(body: bytes, etag: str | None = None, revision: str | None = None) -> tuple[str, int]:
        served = web(b'{"text": "%s"}\n' % body, etag=etag)
        (row,) = read_rows(Dataset(path="https://example.org/my.jsonl", revision=revision))
        return row.text("text"), served.asked

    assert read(b"one", '"1"') == ("one", 1)
    begun = pin_revisions(load_recipe("smoke", data="https://example.org/my.jsonl"), tmp_path).datasets[0]
    assert begun.revision == hashlib.sha256(b'{"text": "one"}\n').hexdigest()
    assert read(b"not read: the tag is that of before", '"1"') == ("one", 1)
    assert read(b"two", '"2"') == ("two", 1)
    assert [read(body, 'W/"1"') for body in (b"three", b"four")] == [("three", 1), ("four", 1)]
    assert [read(body) for body in (b"five", b"six")] == [("five", 1), ("six", 1)]
    assert read(b"seven", '"7"', begun.revision) == ("one", 0)
    for cached in (tmp_path / "cache" / "cocktail").iterdir():
        cached.unlink()
    with pytest.raises(DataError, match=r"my\.jsonl has changed: its sha256 is "):
        read(b"eight", None, begun.revision)


@pytest.mark.slow
def test_nulls_that_arrow_adds_to_structs_are_absent_and_those_of_json_columns_stay(
    tmp_path, monkeypatch
) -> None:
    """Parquet has one struct for all messages, and one for the arguments of all calls."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    calls = [[{"function": {"name": n, "arguments": a}}] for n, a in (("f", {"a": 1}), ("g", {"b": None}))]
    rows = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": call}],
            "note": None,
        }
        for call in calls
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "structs.parquet")
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "json.parquet")
    (tmp_path / "my.json").write_text(json.dumps(rows))

    def read(name: str, **options: bool) -> list[dict]:
        (dataset,) = load_recipe("smoke", data=str(tmp_path / name)).datasets
        return [row.fields for row in read_rows(dataset, **options)]

    assert read("json.parquet") == read("my.json") == read("my.json", streaming=True) == rows
    merged = read("structs.parquet")
    assert merged[0] == rows[0]
    assert merged[1]["messages"][1] == {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "g", "arguments": {}}}],  # Arrow cannot tell null from absent
    }


def test_several_data_sets_follow_each_other_and_max_samples_takes_the_first(
    tmp_path, corpus_of, tokenizer
) -> None:
    corpus_of([{"text": f"a{i}"} for i in range(5)], file="a.jsonl")
    corpus = corpus_of(
        [{"prompt": "b", "completion": "c"}],
        "datasets.0.max_samples=1",
        "datasets.1.path=" + str(tmp_path / "a.jsonl"),
        "datasets.1.max_samples=2",
    )

    texts = [tokenizer.decode(s.tokens).removesuffix("<|endoftext|>") for s in corpus.samples]
    assert texts == ["bc", "a0", "a1"]


def test_the_builtin_text_says_nothing_twice() -> None:
    paragraphs = [line for piece in python_docs() for line in piece.splitlines()]

    assert len(set(paragraphs)) == len(paragraphs)
    assert sum(map(len, paragraphs)) > 100_000
