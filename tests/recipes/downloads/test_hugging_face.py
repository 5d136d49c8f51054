"""The real client of the hub, and a hub on the loopback: fetching, what a no becomes, pushing."""

import errno
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from local_hub import OTHER, TOKEN, LocalHub, ask_only, contents
from safetensors.torch import load_file

from recipes.config import Dataset, Recipe, load_recipe
from recipes.data import prefetch_dataset, read_rows
from recipes.downloads import (
    Licence,
    Repository,
    check_cache_space,
    dataset_commit,
    fetch_model_files,
    licence_of,
)
from recipes.errors import DataError, HubUnreachable, ModelError
from recipes.models import cached_commit, fetch_model, pin_revisions, prepare_base

ROWS = b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(5))
CARD = b"---\nconfigs:\n- config_name: default\n  data_files: rows.jsonl\n---\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_base(load_recipe("smoke"), tmp_path_factory.mktemp("made") / "base").folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub() as found:
        ask_only(found, monkeypatch, tmp_path / "cache")
        for kind in ("open", "gated"):
            found.add(f"a/{kind}", folder, gated=kind == "gated")
            found.add(f"a/{kind}", {"rows.jsonl": ROWS, "README.md": CARD}, "datasets", kind == "gated")
        yield found


def recipe(model: str, *overrides: str) -> Recipe:
    return load_recipe("smoke", [f"model_name_or_path={model}", *overrides])


def test_what_is_needed_is_fetched_once_and_the_weights_in_one_form(
    hub: LocalHub, folder: Path, tmp_path: Path
) -> None:
    files = contents(folder)
    both = hub.add("a/both", {**files, "pytorch_model.bin": b"", "README.md": b"", "model.onnx": b""})

    first = prepare_base(recipe("a/both"), tmp_path)
    again = prepare_base(recipe("a/both"), tmp_path)

    assert sorted(both.asked) == sorted(contents(folder))
    assert first.files == again.files


def test_a_model_of_bin_files_is_written_anew_and_stays_the_commit_that_it_is(
    hub: LocalHub, folder: Path, tmp_path: Path
) -> None:
    files, saved = contents(folder), BytesIO()
    torch.save(load_file(folder / "model.safetensors"), saved)
    del files["model.safetensors"]
    old = hub.add("a/old", {**files, "pytorch_model.bin": saved.getvalue()})

    base = prepare_base(recipe("a/old"), tmp_path / "run")

    assert "pytorch_model.bin" in old.asked
    assert {file.name for file in base.files} == set(contents(folder))
    assert cached_commit(base.folder) == cached_commit(fetch_model("a/old", None))
    assert pin_revisions(recipe("a/old"), base.folder).model.model_revision == cached_commit(base.folder)


def test_what_is_fetched_is_reported_as_it_comes(
    hub: LocalHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress counts the bytes that are not in the cache, from none to all; nothing else draws a bar."""
    told: list[tuple[int, int]] = []
    fetch_model_files("a/open", None, ["*.json"])
    fetched = fetch_model_files(
        "a/open", None, ["*"], progress=lambda done, total: told.append((done, total))
    )
    assert (
        fetch_model_files("a/open", None, ["*"], progress=lambda done, total: pytest.fail("it is here"))
        == fetched
    )

    new = (folder / "model.safetensors").stat().st_size
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (told[-1], {total for _, total in told}) == ((new, new), {new})
    assert "it/s" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        (
            "a/missing",
            None,
            "the hub has no model of that name (hint: its spelling; of a private one `hf auth login` first)",
        ),
        ("a/missing", TOKEN, "the hub has no model of that name"),
        ("a/gated", None, "accept the licence at https://huggingface.co/a/gated, then `hf auth login`"),
        ("a/gated", OTHER, "accept the licence at https://huggingface.co/a/gated"),
        ("a/open", "hf_revoked", "the hub answers 401 (hint: is this machine's token still valid?"),
        ("a/open@v9", None, "a/open has no revision v9 (hint: its revisions: https://"),
    ],
)
def test_what_the_hub_says_no_to_is_reported_with_what_to_do(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, name: str, token: str | None, said: str
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    name, _, revision = name.partition("@")

    with pytest.raises(ModelError) as of_model:
        fetch_model_files(name, revision or None, ["*.json"])

    assert said in str(of_model.value)
    if "gated" not in name:  # of gated data the hub tells what they are, and refuses the files
        with pytest.raises(DataError) as of_data:
            dataset_commit(name, revision or None)
        assert said.split(" (")[0].replace("no model", "no data set") in str(of_data.value)


def test_who_may_read_a_gated_model_gets_it(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert prepare_base(recipe("a/gated"), tmp_path).digest == prepare_base(recipe("a/open"), tmp_path).digest


def test_the_licence_of_a_model_is_that_of_its_card_and_says_whether_it_is_gated(
    hub: LocalHub, tmp_path: Path
) -> None:
    hub.repos["models/a/gated"].card = {"license": "llama3.1"}
    hub.repos["models/a/open"].card = {
        "license": "other",
        "license_name": "otter-1",
        "license_link": "https://o",
    }
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")

    assert licence_of("a/gated", None) == Licence("llama3.1", gated=True)
    assert licence_of("a/open", None) == Licence("other", "otter-1", "https://o")
    assert prepare_base(recipe("a/open"), tmp_path / "run").licence.title == "otter-1"
    assert licence_of(str(tmp_path), None) == Licence("mit")
    hub.down = True
    assert licence_of("a/gated", None) == Licence(gated=None)


def test_a_hub_that_is_down_or_too_busy_is_no_answer_and_the_cache_is_enough(
    hub: LocalHub, folder: Path, tmp_path: Path
) -> None:
    here = prepare_base(recipe("a/open"), tmp_path)
    hub.down = True

    assert prepare_base(recipe("a/open"), tmp_path).digest == here.digest
    with pytest.raises(
        HubUnreachable, match="no folder a/gated here, none in the cache, and the hub did not answer"
    ):
        fetch_model_files("a/gated", None, ["*.json"])
    assert dataset_commit("a/open", None) is None


def test_a_run_keeps_the_commits_it_began_with_until_they_are_gone_from_the_hub(
    hub: LocalHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = hub.repos["models/a/open"], hub.repos["datasets/a/open"]
    asked = recipe("a/open", "datasets.0.path=a/open")
    begun = prepare_base(asked, tmp_path)
    run = pin_revisions(asked, begun.folder)
    first = model.branches["main"], data.branches["main"]

    model.commit({**contents(folder), "config.json": b"{}"})
    data.commit({"rows.jsonl": b"", "README.md": CARD})

    assert (run.model.model_revision, run.datasets[0].revision) == first
    assert prepare_base(run, tmp_path).digest == begun.digest
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "another machine"))
    assert prepare_base(run, tmp_path).digest == begun.digest
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "a third"))
    del model.commits[first[0]]
    with pytest.raises(ModelError, match=f"a/open has no revision {first[0]} "):
        prepare_base(run, tmp_path)


@pytest.fixture
def of_datasets(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Point the `datasets` library at this hub too."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "data")


@pytest.mark.usefixtures("of_datasets")
def test_rows_of_the_hub_are_reported_as_they_come_and_nobody_else_draws_a_bar(
    hub: LocalHub, capfd: pytest.CaptureFixture[str]
) -> None:
    both = hub.add("a/both", {"train.jsonl": ROWS, "test.jsonl": ROWS * 9, "notes.txt": ROWS}, "datasets")
    told: list[tuple[int, int]] = []
    assert prefetch_dataset(Dataset(path="a/both"), lambda done, total: told.append((done, total))) == 5
    here = list(both.asked)

    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (told[-1], {total for _, total in told}) == ((10 * len(ROWS),) * 2, {10 * len(ROWS)})
    assert len(list(read_rows(Dataset(path="a/both")))) == 5
    assert both.asked == here
    prefetch_dataset(Dataset(path="a/both"), lambda done, total: pytest.fail("it is here"))
    assert "%|" not in capfd.readouterr().err


@pytest.mark.usefixtures("of_datasets")
def test_rows_of_the_hub_are_those_of_their_commit(hub: LocalHub) -> None:
    data = hub.repos["datasets/a/open"]
    first = data.branches["main"]
    data.commit({"rows.jsonl": b'{"text": "another"}\n', "README.md": CARD})

    for streaming in (True, False):
        read = [row.fields["text"] for row in read_rows(Dataset(path="a/open", revision=first), streaming)]
        assert read == [f"row {i}" for i in range(5)]
    with pytest.raises(DataError, match=r"accept the licence at https://huggingface\.co/datasets/a/"):
        list(read_rows(Dataset(path="a/gated"), streaming=True))


def test_a_push_is_one_commit_of_the_model_and_needs_a_token_that_may(
    hub: LocalHub, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pushed = Repository("me/out", private=True)
    with pytest.raises(ModelError, match="may not write there"):
        pushed.open()
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert pushed.open() == pushed.open() == "me/out"
    address = pushed.push(folder, "after 3 steps")

    repo = hub.repos["models/me/out"]
    assert repo.branches["main"] in address
    assert repo.commits[repo.branches["main"]].keys() == contents(folder).keys()
    assert prepare_base(recipe("me/out"), tmp_path).files == prepare_base(recipe(str(folder)), tmp_path).files


def test_a_disk_without_room_for_a_hub_model_is_found_out_before_the_first_byte(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    check_cache_space("a/b", "0" * 40, {"config.json": 800})
    with pytest.raises(OSError, match=r"a/b has 1000.0 GB still to fetch") as full:
        check_cache_space("a/b", "0" * 40, {"config.json": 800, "model.safetensors": 10**12})

    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "cache"))
