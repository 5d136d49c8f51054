"""A real run's folder, made by the product's own parts: whatever is altered in it is found and named."""

import hashlib
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
import torch
from flipped_bytes import altered
from hypothesis import given, settings
from hypothesis import strategies as st
from test_snapshot_thread import RECIPE, Story, minding, told

from cocktail_cli.errors import Failure, explain
from cocktail_cli.extensions.proofs.receipts import Receipt, ReceiptWriter, receipt_document
from cocktail_cli.extensions.proofs.run_verification import RunVerification
from cocktail_cli.extensions.proofs.seals import check_sealed_model
from cocktail_cli.extensions.proofs.signed_documents import NotGenuine, SignedDocument, signer_of
from cocktail_cli.host import CommittedModel, hashes_of
from cocktail_cli.machine import RunRecord, save_run
from recipes.algorithm import GlobalModel, compressor_of
from recipes.config import Recipe, load_recipe
from recipes.models import open_tokenizer, open_trained, prepare_base
from recipes.snapshots import write_chunk_hashes
from transport.ledger import UPDATES, Counted, EvaluationRow, Ledger, RoundRow, RungRow, UpdateLog
from transport.protocol import CurveKeys, RunKeys, WeightedPacket, short_key
from transport.scheduling import CommitSeconds

NAME, ROUNDS, SNAPSHOT = "amber-otter-42", 6, 3
KEYS, PEER = RunKeys.generate(), CurveKeys.generate().public
LORA = load_recipe("smoke", ["lora.lora_r=4", "max_steps=40"])


def begin(folder: Path, recipe: Recipe = RECIPE, keys: RunKeys = KEYS) -> Story:
    """A run that is about to begin."""
    base = prepare_base(recipe, folder / "base")
    open_tokenizer(base.folder).save_pretrained(folder / "tokenizer")
    (folder / "recipe.json").write_text(recipe.to_json())
    with closing(open_trained(recipe, base.folder)) as stored:
        vector = torch.from_numpy(stored.read(0, stored.layout.size))
    origin = {"recipe": recipe.recipe_hash, "base": base.digest, "hub": short_key(keys.public)}
    origin |= {"signer": signer_of(keys.signing), **hashes_of(folder, (), base.files)}
    ledger = Ledger(folder / "ledger", run=NAME, samples=4 * ROUNDS, origin=origin)
    save_run(record(folder, keys))
    return Story(folder, ledger, GlobalModel(vector, compressor_of(recipe.compression), recipe.training.seed))


def record(folder: Path, keys: RunKeys = KEYS) -> RunRecord:
    base = str(folder / "base")
    return RunRecord(NAME, "url", asdict(keys), 1, 1, "", str(folder), base, "smoke", "h", "t")


def commit(
    story: Story, says: Callable[[int], int] = lambda number: number, rung: RungRow | None = None
) -> str:
    """Commit one more round of four samples; returns the receipt of its peer."""
    x, round = story.common, story.common.round
    writer = ReceiptWriter(KEYS, story.ledger)
    [(_, sample)] = x.samples()
    packet = x.compressor.encode(0.01 * torch.randn(sample.m)).packet
    counted = (Counted(round, "ann", "s", ((4 * round, 4 * round + 4),), PEER),)
    row = RoundRow(round, round, 1.0, 2.0, says(x.fingerprint), ("ann",), ("ann",), 1.5, 9)
    updates = UpdateLog(story.folder / "ledger" / UPDATES, round)
    updates.begin(round, [WeightedPacket("ann", packet, 1.0)])
    updates.seal(hashlib.sha256(packet).digest())
    updates.close()
    rung = rung or RungRow(round, 1 if x.compressor.random_ratios else 0, 0.0, 1)
    story.ledger.commit(row, packet, counted, rung.note())
    x.apply(packet)
    receipt = msgspec.msgpack.decode(
        writer.counted(round, counted, CommitSeconds(0.0, 0.0))["s"], type=Receipt
    )
    return receipt_document(NAME, KEYS.public, PEER, round, receipt).text()


def finish(story: Story, recipe: Recipe = RECIPE) -> None:
    """End the run as `launch` does: the model, and the seal of all files."""
    story.ledger.evaluated(EvaluationRow(ROUNDS, ROUNDS, 1.25, 40, True))
    story.ledger.close()
    model = CommittedModel(recipe, story.folder / "base", story.folder)
    model.write_model(story.folder)
    updates = story.folder / "ledger" / UPDATES
    updates.rename(story.folder.with_name(UPDATES))
    model.wrote_run(story.common.round)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is over, with a snapshot and an export, and a receipt of its fourth round."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("a-run")
        patch.setenv("COCKTAIL_HOME", str(folder.with_name("home")))
        story = begin(folder / "run")
        with minding(story, every=SNAPSHOT + 1) as (snapshots, _):
            for _ in range(SNAPSHOT + 1):
                (folder / "receipt.json").write_text(commit(story))
            snapshots.committed(SNAPSHOT, SNAPSHOT + 1)
            told(snapshots)
        while story.common.round < ROUNDS:
            commit(story)
        finish(story)
        model = CommittedModel(RECIPE, folder / "run" / "base", folder / "run")
        model.write_model(folder / "half", "bfloat16", round=4)
    return folder


@pytest.fixture(scope="module")
def going_on(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run before it was over: with neither model nor seal."""
    model = "model.safetensors", "seal.json", "README.md"
    folder = Path(shutil.copytree(finished / "run", tmp_path_factory.mktemp("going-on") / "run"))
    for name in model:
        (folder / name).unlink()
    shutil.copyfile(finished / UPDATES, folder / "ledger" / UPDATES)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, at another place."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def verified(folder: Path, model: tuple[Path, int] | None = None) -> RunVerification:
    checked = RunVerification(folder)
    checked.check_hashes(check_sealed_model(model[0]) if model else None)
    checked.replay(False, lambda done, total: None, model)
    return checked


def failure_of(check: Callable[[], object]) -> Failure:
    """Explain the failure as the user reads it: exit 9, and no bug."""
    with pytest.raises((Failure, NotGenuine)) as raised:
        check()
    failure = explain(raised.value)
    assert failure.exit == 9, failure
    return failure


def test_a_run_that_is_over_is_replayed_from_its_base_to_its_final_hash(run: Path) -> None:
    """Wherever the folder lies: x' of every round, the model and the snapshot are compared to the bit."""
    found = verified(run).found

    assert (found["run"], found["rounds"], found["samples"], found["models"]) == (NAME, ROUNDS, 24, 2)
    assert found["head"] in (run / "README.md").read_text(), "the card names the ledger's head"
    assert found["not_covered"] == ["ledger/ledger.lock"]


def covered_files(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in files if path.name not in ("run.json", "ledger.lock"))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_altered_byte_of_any_sealed_file_is_found(finished: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(covered_files(finished / "run")), "file")
    size = path.stat().st_size
    at = data.draw(st.integers(0, min(size, 128) - 1) | st.integers(0, size - 1), "offset")

    with altered(path, at, data.draw(st.integers(1, 255), "flip")):
        failure = failure_of(RunVerification(finished / "run").check_hashes)

    assert path.name in failure.message or "ledger" in failure.message or "round" in failure.message


def test_the_first_bytes_and_the_last_of_every_sealed_file_count(finished: Path) -> None:
    for path in covered_files(finished / "run"):
        for at in (0, -1):
            with altered(path, at):
                failure_of(RunVerification(finished / "run").check_hashes)


def test_a_missing_file_is_named_and_a_deleted_snapshot_is_no_error(run: Path) -> None:
    shutil.rmtree(run / "snapshots")
    assert verified(run).found["models"] == 1
    (run / "tokenizer" / "tokenizer.json").unlink()

    assert "tokenizer.json is missing" in failure_of(RunVerification(run).check_hashes).message


def facts(folder: Path) -> tuple[object, ...]:
    """Read the facts of a ledger."""
    with Ledger(folder / "ledger", write=False) as ledger:
        counted = [one for r in range(ROUNDS) for one in ledger.counted(r, r + 1)]
        return ledger.run, ledger.samples, ledger.origin, ledger.rounds(), counted, ledger.evaluations()


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_while_a_run_goes_on_no_byte_of_its_ledger_changes_what_it_says(
    going_on: Path, data: st.DataObject
) -> None:
    """Without a seal: an altered byte is found, or it lies where SQLite keeps nothing."""
    path = going_on / "ledger" / data.draw(st.sampled_from(["ledger.db", "packets.log"]), "file")
    at = data.draw(st.integers(0, path.stat().st_size - 1), "offset")
    before = facts(going_on)
    with altered(path, at, data.draw(st.integers(1, 255), "flip")):
        try:
            RunVerification(going_on).check_hashes()
        except Failure as failure:
            exit = failure.exit
        else:
            exit = 0 if path.name == "ledger.db" and facts(going_on) == before else 1
    assert exit in (0, 9)


def test_a_round_whose_x_is_not_what_its_peers_had_is_named(tmp_path: Path) -> None:
    """A host that wrote another packet into its ledger, with all hashes right."""
    story = begin(tmp_path / "run")
    commit(story), commit(story), commit(story, says=lambda number: number ^ 1), commit(story)
    story.ledger.close()

    checked = RunVerification(story.folder)
    checked.check_hashes()
    failure = failure_of(lambda: checked.replay(False, lambda done, total: None))

    assert failure.message.startswith("x' before round 2 is ")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (RungRow(2, 2, 0.0, 1), "the rung of round 2 is 2, expected 1"),
        (None, "the length of the sample of round 5 is"),
    ],
)
def test_a_round_on_another_rung_than_lines_and_members_ask_for_is_named(
    row: RungRow | None, said: str, tmp_path: Path
) -> None:
    """The second host has measured lines of 20 Mbit/s, and goes on as if it had not."""
    story = begin(tmp_path / "run")
    for round in range(6):
        thin = RungRow(round, 1 if round < 5 else 2, 7.0, 4)
        commit(story, rung=thin if row is None else row if row.round == round else None)
    story.ledger.close()

    checked = RunVerification(story.folder)
    checked.check_hashes()
    failure = failure_of(lambda: checked.replay(False, lambda done, total: None))

    assert failure.message.startswith(said)


def test_a_snapshot_that_is_not_the_replayed_x_is_named_while_the_run_goes_on(going_on: Path) -> None:
    """With the hashes of its chunks made anew. Else they name it before the replay."""
    assert verified(going_on).found["models"] == 1
    folder = going_on / "snapshots" / str(SNAPSHOT)
    with altered(folder / "model.safetensors", -3):
        damaged = failure_of(lambda: verified(going_on))
        with altered(folder / "model.safetensors.sha256", 0):
            write_chunk_hashes(folder, lambda: False)
            another = failure_of(lambda: verified(going_on))

    assert f"snapshots/{SNAPSHOT}/model.safetensors (or its hashes" in damaged.message
    assert f"snapshots/{SNAPSHOT} is not that of x' after {SNAPSHOT} rounds" in another.message


def test_a_base_model_that_is_another_one_is_found_while_the_run_goes_on(going_on: Path) -> None:
    with altered(going_on / "base" / "model.safetensors", -3):
        assert (
            "model.safetensors is damaged: the run began with another"
            in failure_of(lambda: verified(going_on)).message
        )


def test_a_model_without_the_seal_that_was_written_with_it_is_not_believed(run: Path) -> None:
    (run / "seal.json").unlink()

    assert "seal.json is missing" in failure_of(RunVerification(run).check_hashes).message


def test_a_model_of_the_run_is_x_of_its_round_rounded_to_its_dtype(run: Path, finished: Path) -> None:
    assert verified(run, (finished / "half", 4)).found["models"] == 3

    forged = Path(shutil.copytree(finished / "half", run.with_name("forged")))
    data = bytearray((forged / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (forged / "model.safetensors").write_bytes(data)
    assert "model.safetensors was altered" in failure_of(lambda: check_sealed_model(forged)).message
    checked = RunVerification(run)
    checked.check_hashes()
    failure = failure_of(lambda: checked.replay(False, lambda done, total: None, (forged, 4)))
    assert f"in {forged} is not that of x' after 4 rounds" in failure.message


def test_a_seal_that_another_key_made_is_not_the_runs(run: Path) -> None:
    statement = SignedDocument.parse((run / "seal.json").read_text(), "seal").statement
    forged = SignedDocument.sign("seal", statement, RunKeys.generate().signing)
    (run / "seal.json").write_text(forged.text())

    assert "the signer of the seal is " in failure_of(RunVerification(run).check_hashes).message


def test_a_receipt_contradicts_a_ledger_that_counts_less(run: Path, finished: Path, tmp_path: Path) -> None:
    receipt = SignedDocument.parse((finished / "receipt.json").read_text(), "receipt")
    RunVerification(run).check_receipt(receipt)

    story = begin(tmp_path / "other")
    for _ in range(SNAPSHOT + 1):
        commit(story)  # the same host, key and samples, and another history
    story.ledger.close()
    failure = failure_of(lambda: RunVerification(story.folder).check_receipt(receipt))
    assert "the head after 4 rounds of the receipt is " in failure.message


def test_adapters_and_the_model_they_are_merged_into_are_verified(tmp_path: Path) -> None:
    story = begin(tmp_path / "run", LORA)
    commit(story), commit(story)
    finish(story, LORA)
    CommittedModel(LORA, story.folder / "base", story.folder).write_merged(tmp_path / "merged")

    assert verified(story.folder).found["models"] == 1
    assert verified(story.folder, (tmp_path / "merged", 2)).compared == [story.folder], "merged: by its seal"
