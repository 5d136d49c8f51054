"""A recipe at an https address: read as one in a file, but it may name nothing on this machine."""

import urllib.error
from pathlib import Path

import pytest

from recipes.config import load_recipe, source_of
from recipes.config.loader import RecipeError, recipe_path
from recipes.errors import Problem

ADDRESS = "https://example.org/recipes/mine.yaml"
HEAD = "version: 1\nname: mine\n"
MODEL = "model: {model_name_or_path: me/model}\n"
DATA = "datasets: [{path: me/data}]\n"


def problems(address: str = ADDRESS, *overrides: str, model: str | None = None) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(address, list(overrides), model=model)
    return caught.value.problems


def test_it_is_the_recipe_of_the_same_text_in_a_file_and_is_asked_for_once(web) -> None:
    served = web(recipe_path("smoke").read_bytes())

    for _ in range(2):
        assert load_recipe(ADDRESS).recipe_hash == load_recipe("smoke").recipe_hash

    assert served.asked == 1


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (ADDRESS, "mine.yaml"),
        ("https://example.org/raw?file=3", "raw.yaml"),
        ("https://a.org", "recipe.yaml"),
    ],
)
def test_a_copy_of_it_is_named_as_the_address_ends(web, address: str, name: str) -> None:
    web(b"name: mine")

    assert source_of(address).name == name


def test_a_problem_in_it_is_reported_with_address_and_line(web) -> None:
    web(f"{HEAD}{MODEL}{DATA}training: {{learing_rate: 1}}\n".encode())
    [problem] = problems()

    assert problem.place == f"{ADDRESS}:5"
    assert "learning_rate" in problem.message + problem.hint


@pytest.mark.parametrize(
    ("text", "key", "mended"),
    [
        (MODEL + "datasets: [{path: ~/.ssh/id_rsa}]", "datasets.0.path", "datasets.0.path=mine.jsonl"),
        (MODEL + "datasets: [{path: rows.jsonl}]", "datasets.0.path", "datasets.0.path=mine.jsonl"),
        (
            MODEL + "datasets: [{path: me/data, data_files: /etc/passwd}]",
            "datasets.0.data_files",
            "datasets.0.data_files=mine.jsonl",
        ),
        (DATA + "model: {model_name_or_path: ./model}", "model.model_name_or_path", "model_name_or_path=./m"),
        (MODEL + DATA + "data: {chat_template: ./a.jinja}", "data.chat_template", "chat_template=./a.jinja"),
        (MODEL + DATA + "checkpoint: {output_dir: ../../x}", "checkpoint.output_dir", "output_dir=../x"),
        (MODEL + DATA + "checkpoint: {output_dir: /srv/x}", "checkpoint.output_dir", "output_dir=/srv/x"),
    ],
)
def test_what_it_says_lies_here_is_refused_and_the_same_said_here_is_not(
    web, text: str, key: str, mended: str
) -> None:
    """A run's data goes to all its peers: a stranger's recipe must not choose it from this disk."""
    web((HEAD + text + "\n").encode())
    [problem] = problems()

    assert (problem.key, problem.file) == (key, ADDRESS)
    assert "is of this machine" in problem.message
    assert load_recipe(ADDRESS, [mended]).name == "mine"


def test_a_file_in_the_place_of_a_hub_id_is_this_machines_too(
    web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web((HEAD + MODEL + DATA).encode())
    assert load_recipe(ADDRESS).name == "mine"
    (tmp_path / "me" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert [problem.key for problem in problems()] == ["datasets.0.path"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"url": "http://example.org/mine.yaml"},
            "leads to http://example.org/mine.yaml, which is not https",
        ),
        ({"announced": 9}, "4 bytes came, 9 were announced"),
        ({"kind": "text/html; charset=utf-8"}, "is a page to look at"),
        ({"body": b"#" * (2 << 20)}, "is larger than 1,024 KiB"),
        ({"body": b"\xff\xfe"}, "not UTF-8 text"),
    ],
)
def test_what_is_no_whole_text_is_no_recipe(web, answer: dict, message: str) -> None:
    web(**{"body": b"text", **answer})
    [problem] = problems()

    assert message in problem.message


def test_a_server_that_says_a_letter_now_and_then_is_given_up(web, monkeypatch: pytest.MonkeyPatch) -> None:
    served = web(b"name: mine")
    monkeypatch.setattr(served, "read1", lambda size: served.body.read(1))
    clock = iter(range(0, 100, 20))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    [problem] = problems()

    assert problem.message == "has not come within 30 s"


def test_no_and_no_answer_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, message in (
        (urllib.error.HTTPError(ADDRESS, 404, "Not Found", None, None), "the server answers 404 Not Found"),  # type: ignore[arg-type]
        (urllib.error.URLError("no such host"), "cannot be fetched: no such host"),
    ):

        def refuses(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("urllib.request.urlopen", refuses)
        assert [problem.message for problem in problems()] == [message]

    assert [p.message for p in problems("http://example.org/r.yaml")] == [
        "recipes are read from https addresses only"
    ]
