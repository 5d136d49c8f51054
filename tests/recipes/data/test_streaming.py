"""Rows read as they are needed: the same samples for the same positions, whenever and in whatever order
they are asked for.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.config import load_recipe
from recipes.data import StreamedCorpus, build_corpus
from recipes.data import corpus as corpora
from recipes.data.corpus import index_line, record_in
from recipes.errors import DataError
from recipes.models import BUILTIN_MODELS, open_tokenizer

RECIPE = """\
version: 1
name: streamed
model: {model_name_or_path: "builtin:tiny-gpt-neox"}
datasets: [{path: DATA}]
data: {max_length: 64, streaming: true}
training: {max_steps: 20, global_batch_size: 4}
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "ROWS", 8)
    monkeypatch.setattr(corpora, "CACHED", 2)


@pytest.fixture
def streamed(tmp_path: Path, request: pytest.FixtureRequest):
    """Build a stream from a number of rows and overrides; its index outlives it."""
    tokenizer: Any = open_tokenizer(BUILTIN_MODELS["builtin:tiny-gpt-neox"])
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def opened(rows: int, *overrides: str, index: str = "index.jsonl") -> StreamedCorpus:
        text = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(rows))
        (tmp_path / "rows.jsonl").write_text(text)
        recipe = load_recipe(tmp_path / "recipe.yaml", list(overrides), data=str(tmp_path / "rows.jsonl"))
        corpus = build_corpus(recipe, tokenizer, tmp_path / index)
        assert isinstance(corpus, StreamedCorpus)
        request.addfinalizer(corpus.close)
        return corpus

    return opened


def texts(corpus: StreamedCorpus, positions: Any) -> list[str]:
    tokenizer: Any = open_tokenizer(BUILTIN_MODELS["builtin:tiny-gpt-neox"])
    return [tokenizer.decode(corpus.sample(p).tokens).removesuffix("<|endoftext|>") for p in positions]


def test_every_row_comes_once_before_any_comes_again(streamed) -> None:
    corpus = streamed(30)

    found = texts(corpus, range(80))

    assert len(corpus) == 80
    assert sorted(found[:30]) == sorted(found[30:60]) == sorted(f"row {i}" for i in range(30))
    assert max(Counter(found[60:]).values()) == 1
    assert found[:8] != [f"row {i}" for i in range(8)]
    assert found[:8] != found[30:38]


def test_a_position_holds_the_same_sample_whatever_was_asked_for_before(streamed) -> None:
    found = texts(streamed(30), range(80))

    jumping = streamed(30, index="other.jsonl")

    for position in (79, 3, 40, 0, 41, 78, 12):
        assert texts(jumping, [position]) == [found[position]]


def test_a_run_that_goes_on_passes_over_what_came_before(streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    found = texts(streamed(300), range(80))
    tokenized: list[int] = []
    tokenize = corpora.RowTokenizer.tokenize

    def counted(self: corpora.RowTokenizer, rows: Any) -> Any:
        tokenized.append(len(rows))
        return tokenize(self, rows)

    monkeypatch.setattr(corpora.RowTokenizer, "tokenize", counted)

    again = streamed(300)

    assert texts(again, range(72, 80)) == found[72:]
    again.close()
    assert sum(tokenized) <= 8 * 5  # the first chunk and its next, the ninth, its next, and one more


def test_without_its_index_a_stream_comes_to_the_same(streamed, tmp_path: Path) -> None:
    found = texts(streamed(30), range(40))
    (tmp_path / "index.jsonl").unlink()

    assert texts(streamed(30), range(30, 40)) == found[30:]


def test_a_line_of_the_index_that_a_crash_cut_off_is_made_again(streamed, tmp_path: Path) -> None:
    found = texts(streamed(30), range(40))
    index = tmp_path / "index.jsonl"
    whole = index.read_bytes()
    index.write_bytes(whole[:-20])

    assert texts(streamed(30), range(40)) == found
    assert index.read_bytes().startswith(whole)


@pytest.mark.parametrize("damage", ["flipped", "no JSON", "binary"])
def test_a_damaged_line_of_the_index_is_told_and_its_chunks_are_made_again(
    streamed, tmp_path: Path, damage: str
) -> None:
    """One altered hash was blamed on the rows; text that is no JSON was a bug."""
    found = texts(streamed(30), range(40))
    index = tmp_path / "index.jsonl"
    whole = index.read_bytes()
    at = whole.index(b'"sha256": "', whole.index(b"\n")) + 12
    broken = {"flipped": bytes([whole[at] ^ 1]), "no JSON": b'"', "binary": b"\xff"}[damage]
    index.write_bytes(whole[:at] + broken + whole[at + 1 :])

    again = streamed(30)
    assert f"{index} is damaged in line 2: the stream is read again from there" in again.warnings
    assert texts(again, range(40)) == found
    assert index.read_bytes().startswith(whole)
    assert (tmp_path / "index.jsonl.before").read_bytes()[at : at + 1] == broken


def test_rows_that_changed_since_are_found_out(streamed, tmp_path: Path) -> None:
    texts(streamed(30), range(16))
    index = tmp_path / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    lines[1] = index_line(replace(record_in(lines[1]), sha256="0"))
    index.write_text("".join(lines))

    with pytest.raises(DataError, match="the rows up to 16 are not what they were earlier in this run"):
        texts(streamed(30), range(8, 16))


def test_the_first_rows_are_held_out_and_never_trained(streamed) -> None:
    corpus = streamed(30, "val_set_size=5")

    assert len(corpus.held_out) == 5
    assert sorted(texts(corpus, range(25))) == sorted(f"row {i}" for i in range(5, 30))


def test_streams_are_mixed_by_their_weights(streamed, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n' * 3)

    corpus = streamed(
        300, "datasets.0.weight=3", "datasets.1.weight=1", f"datasets.1.path={tmp_path / 'b.jsonl'}"
    )

    assert 10 <= texts(corpus, range(80)).count("b") <= 30


def test_a_stream_with_nothing_to_train_on_is_an_error(streamed, tmp_path: Path) -> None:
    (tmp_path / "masked.jsonl").write_text(json.dumps({"prompt": "x" * 99, "completion": "y"}) + "\n")

    with pytest.raises(DataError, match="no sample has a token to train on"):
        streamed(3, f"datasets.0.path={tmp_path / 'masked.jsonl'}").sample(0)
