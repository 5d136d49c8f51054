import json
import shutil
from pathlib import Path

import pytest
from flipped_bytes import altered
from in_this_process import Run
from test_run_verification import KEYS, NAME, PEER, RECIPE, begin, commit, finish

from cocktail_cli.extensions.proofs.signed_documents import SignedDocument
from cocktail_cli.host import CommittedModel
from cocktail_cli.machine import read_run, save_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is over, `run`; its export, `model`; and a receipt."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("verify")
        patch.setenv("COCKTAIL_HOME", str(folder / "home"))
        story = begin(folder / "run")
        for _ in range(3):
            (folder / "receipt.json").write_text(commit(story))
        finish(story)
        record = read_run(folder / "run")
        assert record is not None
        save_run(record.ended("finished", 3, None))
        CommittedModel(RECIPE, folder / "run" / "base", folder / "run").write_model(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def same_home(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKTAIL_HOME", str(made / "home"))


def test_a_run_a_model_and_a_receipt_are_verified_in_words(cocktail: Run, made: Path) -> None:
    run = cocktail("verify", NAME)
    model = cocktail("verify", str(made / "model"), "--run", str(made / "run"))
    receipt = cocktail("verify", str(made / "receipt.json"), "--run", NAME)

    assert (run.exit, model.exit, receipt.exit) == (0, 0, 0), (run.err, model.err, receipt.err)
    assert f"verified: {NAME}, 3 rounds replayed from the base model to the head below" in run.out
    assert "the weights are those of the replayed run" in model.out
    assert f"{NAME} has counted 12 samples of this peer in 3 rounds, as its ledger says" in receipt.out
    assert PEER in receipt.out
    head = SignedDocument.parse((made / "receipt.json").read_text(), "receipt").statement["head"]
    assert all(f"head         {head}" in one.out for one in (run, model, receipt)), "it is one ledger"


def test_json_has_what_was_verified(cocktail: Run, made: Path) -> None:
    run = json.loads(cocktail("verify", str(made / "run"), "--json").out)
    model = json.loads(cocktail("verify", str(made / "model"), "--json").out)
    receipt = json.loads(cocktail("verify", str(made / "receipt.json"), "--json").out)

    assert [one["verified"] for one in (run, model, receipt)] == [True, True, True]
    assert [one["kind"] for one in (run, model, receipt)] == ["run", "model", "receipt"]
    assert (run["rounds"], run["models"], model["replayed"], receipt["in_ledger"]) == (3, 1, False, False)
    assert len({run["head"], model["head"], receipt["head"]}) == 1


def test_what_differs_ends_with_9_and_is_named(cocktail: Run, made: Path) -> None:
    for target, file in (("run", "ledger/packets.log"), ("model", "config.json"), ("model", "README.md")):
        with altered(made / target / file, 100):
            done = cocktail("verify", str(made / target))
        assert (done.exit, done.out) == (9, "")
        assert Path(file).stem in done.err or "round 0" in done.err, done.err
    with altered(made / "receipt.json", 200):
        done = cocktail("verify", str(made / "receipt.json"), "--json")
    assert (done.exit, json.loads(done.out)["error"]["code"]) == (9, "altered")


def test_a_receipt_for_more_than_the_ledger_has_is_an_error(
    cocktail: Run, made: Path, tmp_path: Path
) -> None:
    said = SignedDocument.parse((made / "receipt.json").read_text(), "receipt").statement
    more = SignedDocument.sign("receipt", said | {"samples": 13}, KEYS.signing)
    (tmp_path / "more.json").write_text(more.text())
    bare = SignedDocument.sign("receipt", {"run": NAME}, KEYS.signing)
    (tmp_path / "bare.json").write_text(bare.text())

    done = cocktail("verify", "more.json", "--run", NAME)
    assert done.exit == 9
    assert "samples and rounds is (13, 3), expected (12, 3)" in done.err
    assert "it lacks one of run, hub" in cocktail("verify", "bare.json").err


def test_what_cannot_be_verified_is_told(cocktail: Run, made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no seal.json" in cocktail("verify", "empty").err
    assert cocktail("verify", "empty").exit == cocktail("verify", "no-such-run").exit == 3


def test_a_folder_without_its_secrets_is_verified_anywhere(cocktail: Run, made: Path, tmp_path: Path) -> None:
    """A third party gets it without run.json, and needs the base model alone."""
    moved = Path(shutil.copytree(made / "run", tmp_path / "moved"))
    (moved / "run.json").unlink()

    assert cocktail("verify", "moved").exit == 0
    assert cocktail("verify", str(made / "model"), "--run", "moved").exit == 0
