"""A run's folder with one file damaged is resumed whole, or refused with the file named; `verify` finds it.

The short form of scripts/fault_injection/damage.py: a run of a few rounds, made by the product's own parts.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from cocktail_cli.host import HostSession, settings_of
from cocktail_cli.host.snapshot_thread import SnapshotThread, replayed
from cocktail_cli.machine import save_run
from recipes.algorithm import GlobalModel
from recipes.config import load_recipe
from scripts.fault_injection.damage import (
    PEOPLE,
    Bench,
    Case,
    Heard,
    Made,
    Resumed,
    judged,
    placed,
    resume,
    verify,
    word_of,
)
from transport import RunKeys
from transport.ledger import Counted, EvaluationRow, KnownPeer, Ledger, OpenSession, RoundRow, RungRow
from transport.protocol import WeightedPacket

ROUNDS, NAME = 7, "amber-otter-42"
FILES = (
    *("base/config.json", "base/model.safetensors", "events.jsonl", "ledger/journal.log", "ledger/ledger.db"),
    *("ledger/ledger.db-shm", "ledger/ledger.db-wal", "ledger/packets.log", "ledger/updates.log"),
    *("metrics.jsonl", "recipe.json", "recipe.yaml", "run.json", "snapshots/4/README.md"),
    *("snapshots/4/SHA256SUMS", "snapshots/4/config.json", "snapshots/4/model.safetensors"),
    *("snapshots/4/model.safetensors.sha256", "snapshots/4/tokenizer.json", "stream.jsonl"),
    *("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
)
NO_TRACE = (  # whatever happens to them: nothing reads their bytes, or they follow from others
    *PEOPLE,
    "ledger/ledger.db-shm",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The folder of a hub that was killed, whose data are streamed."""
    place = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COCKTAIL_HOME", str(place / "home"))
        rows = place / "rows.jsonl"
        rows.write_text("".join(json.dumps({"text": f"row {i} of many"}) + "\n" for i in range(60)))
        small = ["data.max_length=32", "global_batch_size=4", "max_steps=40", "save_steps=4"]
        recipe = load_recipe("smoke", [*small, "data.streaming=true", "val_set_size=4"], data=str(rows))
        folder = place / "run"
        folder.mkdir()
        session = HostSession(recipe, folder, [Heard()])
        work, keys = session.prepare(), RunKeys.generate()
        ledger = session._new_ledger(work, keys, settings_of(work, NAME))
        work.recover(ledger)
        url = str(keys.url("127.0.0.1", 29444, NAME))
        save_run(session._new_record(work, keys, NAME, url=url, bind="127.0.0.1", port=29444, pid=0))
        with work.model.fold(0) as found:
            *_, x = replayed(found)
        ledger.leased(0, {}, sessions=[OpenSession("s-ann", "ann", "GPU", "key-of-ann")])
        ledger.stand(KnownPeer("key-of-eve", "eve", "banned", "why", 3))
        for round in range(ROUNDS):
            commit(ledger, x, partial(work.durable.aggregate, round))
            work.durable.committed(round)
        ledger.evaluated(EvaluationRow(2, 2, 1.5, 40, False))
        ledger.leased(ROUNDS, {"s-ann": ((4 * ROUNDS, 4 * ROUNDS + 4),)})
        SnapshotThread(work.model, 4, 40, lambda offers: None)._make(4, 5)
        (folder / "events.jsonl").write_text('{"v": 1}\n' * 9)
        (folder / "metrics.jsonl").write_text('{"round": 3, "loss": 1.5}\n' * 4)
        shutil.copytree(folder, place / "killed")
        ledger.close()
        work.close()
        yield Made("killed", place / "killed")


def commit(ledger: Ledger, x: GlobalModel, aggregate: Callable[[list[WeightedPacket]], bytes]) -> None:
    """One more round, with the update of one peer."""
    [(_, sample)] = x.samples()
    update = x.compressor.encode(0.01 * torch.randn(sample.m)).packet
    ids = ((4 * x.round, 4 * x.round + 4),)
    ledger.leased(x.round, {"s-ann": ids})
    packet = aggregate([WeightedPacket("ann", update, 1.0)])
    row = RoundRow(x.round, x.round, 1.0, 2.0, x.fingerprint, ("ann",), ("ann",), 1.5, 9)
    counted = (Counted(x.round, "ann", "s-ann", ids, "key-of-ann"),)
    ledger.commit(row, packet, counted, RungRow(x.round, 1, 0.0, 1).note())  # on the ladder's first rung
    x.apply(packet)


@pytest.fixture(scope="module")
def bench(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), {made.variant: made})


def damages(made: Made, name: str) -> Iterator[Case]:
    yield from (Case(made.variant, name, how) for how in ("removed", "emptied", "halved"))
    bits = 8 * (made.folder / name).stat().st_size
    yield Case(made.variant, name, "flipped", random.Random(name).randrange(bits))


def test_what_is_tried_are_the_files_that_a_run_has(made: Made) -> None:
    there = {path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()}
    rest = {name for name in there - set(FILES) if not name.startswith(("base/", "snapshots/4/"))}

    assert set(FILES) <= there
    assert rest <= {"ledger/ledger.lock", "ledger/ledger.lock-journal"}


def test_an_undamaged_folder_is_resumed_and_verified(made: Made, tmp_path: Path) -> None:
    for work in (resume, verify):
        placed(made.folder, tmp_path / work.__name__)
        assert judged(work, tmp_path / work.__name__, made)["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_loses_no_round_in_silence(made: Made, bench: Bench, name: str) -> None:
    for case in damages(made, name):
        word = word_of(case, bench.resumed(case))
        assert word in ("whole", "mended", "refused"), (case, word)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith(NO_TRACE)])
def test_verify_finds_each_damage_of_what_a_run_uses(made: Made, bench: Bench, name: str) -> None:
    """But for bytes that SQLite does not read, and for what a host may remove."""
    hashes = partial(verify, replayed=name.startswith("base/"))
    removable = ("run.json", "stream.jsonl", "snapshots/4/model.safetensors")
    for case in damages(made, name):
        bench.damage(case)
        word = word_of(case, judged(hashes, bench.folder, made))
        unread = case.how == "flipped" and name == "ledger/ledger.db"
        cut = name == "stream.jsonl" and case.how in ("emptied", "halved")  # is made again
        may = unread or cut or (case.how == "removed" and name in removable)
        assert word == "refused" or (may and word == "whole"), (case, word)


def test_the_fingerprint_of_a_peer_that_was_alone_and_lied_is_corrected_by_resume(
    made: Made, tmp_path: Path
) -> None:
    placed(made.folder, tmp_path / "run")
    with Ledger(tmp_path / "run" / "ledger", run=NAME, samples=None) as ledger:
        row = ledger.rounds()[3]
        ledger.proven(3, 99)
    with closing(Resumed(tmp_path / "run")) as resumed:
        work, ledger = resumed.session.prepare(), resumed.ledger
        work.recover(ledger)
        assert resumed.heard.warnings == []
        (said,) = work.mend_fingerprints(ledger, failed=False)
        assert ledger.rounds()[3] == row
        assert work.mend_fingerprints(ledger, failed=False) == []
        work.close()
    assert said.endswith("fingerprints that a replay has not found were corrected: rounds 3")
    assert judged(verify, tmp_path / "run", made)["exit"] == 0
