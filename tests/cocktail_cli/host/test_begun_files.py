"""Files that a run began with are what they were, or named."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cocktail_cli.errors import Failure
from cocktail_cli.host import altered_base_files, begun_files, check_begun_files, hashes_of


@dataclass
class File:
    name: str
    sha256: str


BASE = [File("config.json", "aa"), File("model.safetensors", "bb")]


def a_run(folder: Path) -> dict[str, str]:
    (folder / "tokenizer").mkdir()
    (folder / "recipe.yaml").write_text("version: 1\n")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return {"recipe": "cc"} | hashes_of(folder, ("recipe.yaml", "tokenizer", "gone"), BASE)


def test_every_file_of_the_folder_is_compared_and_others_are_not(tmp_path: Path) -> None:
    origin = a_run(tmp_path)
    (tmp_path / "tokenizer" / "more.txt").write_text("added later")

    check_begun_files(tmp_path, origin)
    assert sorted(begun_files(origin)) == ["recipe.yaml", "tokenizer/tokenizer.json"]
    for name in begun_files(origin):
        path = tmp_path / name
        was = path.read_bytes()
        path.write_bytes(was[:-1] + bytes([was[-1] ^ 1]))
        with pytest.raises(Failure, match=f"{path} is damaged: its sha256 is ") as refused:
            check_begun_files(tmp_path, origin)
        assert refused.value.exit == 9
        path.unlink()
        with pytest.raises(Failure, match=f"{path} is damaged: its sha256 is that of no file"):
            check_begun_files(tmp_path, origin)
        path.write_bytes(was)


def test_only_files_below_a_folder_are_compared_where_it_is_named(tmp_path: Path) -> None:
    origin = a_run(tmp_path)
    (tmp_path / "recipe.yaml").unlink()

    check_begun_files(tmp_path, origin, "tokenizer")


def test_altered_files_of_the_base_are_named_and_an_older_run_knows_none(tmp_path: Path) -> None:
    origin = a_run(tmp_path)

    assert altered_base_files(origin, BASE) == []
    assert altered_base_files(origin, BASE[:1]) == ["model.safetensors"]
    assert altered_base_files(origin, [File("config.json", "ab"), *BASE[1:]]) == ["config.json"]
    check_begun_files(tmp_path, {"base": "dd"})
