"""A run goes on after its hub was killed: `cocktail resume`."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import Forked, needs_fork
from in_this_process import Run as Command
from test_processes import LAUNCH

from cocktail_cli import __version__
from cocktail_cli.errors import Failure, explain
from cocktail_cli.host import (
    HostSession,
    LaunchSettings,
    LocalSettings,
    as_yaml,
    hosted_before,
    launch_run,
    run_folder,
)
from cocktail_cli.host.host_session import (
    arguments_of,
    check_corpus,
    check_unfinished,
    recipe_to_resume,
    reopened_ledger,
    same_base,
    url_at,
)
from cocktail_cli.host.run_delegate import settings_of
from cocktail_cli.machine import FILE, ListenAddress, RunRecord, load_run, save_run
from cocktail_cli.machine.run_registry import text_of
from cocktail_cli.ui.display import QuietView
from recipes.config import load_recipe, recipe_from_json
from recipes.models import prepare_base
from transport import Ledger, RunKeys
from transport.ledger import RoundRow
from transport.protocol import LedgerDamaged, RunEnded

SMOKE = load_recipe("smoke")


def record(folder: Path, **changes: Any) -> RunRecord:
    known: dict[str, Any] = {
        "run": "amber-otter-42",
        "url": "cocktail://k.t@203.0.113.7:29444/amber-otter-42",
        "keys": {"stop": "s"},
        "pid": 1,
        "port": 29444,
        "bind": "127.0.0.1",
        "output_dir": str(folder),
        "base": str(folder / "base"),
        "recipe": "smoke",
        "recipe_hash": SMOKE.recipe_hash,
        "started": "2026-11-20T12:00:00Z",
    }
    return RunRecord(**(known | changes))


def test_a_run_whose_hub_has_ended_may_be_resumed(tmp_path: Path) -> None:
    for state in ("running", "failed"):
        save_run(record(tmp_path, state=state))
        Ledger(tmp_path / "ledger", run="amber-otter-42", samples=9).close()

        check_unfinished(load_run("amber-otter-42"))


def test_the_error_of_an_unfinished_run_in_the_folder_names_the_command_that_resumes_it(
    tmp_path: Path,
) -> None:
    save_run(record(tmp_path))
    with pytest.raises(Failure, match="holds the unfinished run amber-otter-42 of this recipe") as refused:
        run_folder.claim(tmp_path, SMOKE.recipe_hash)
    assert refused.value.hints[0] == "go on with it: cocktail resume amber-otter-42"

    with pytest.raises(Failure, match="of another recipe") as refused:
        run_folder.claim(tmp_path, "abc")
    assert not any("resume" in hint for hint in refused.value.hints)


def test_a_launch_does_not_wipe_the_ledger_of_a_run_whose_record_is_gone(tmp_path: Path) -> None:
    """Every file of the ledger stays; `launch` removed them all, and began anew."""
    save_run(record(tmp_path))
    with Ledger(tmp_path / "ledger", run="amber-otter-42", samples=9) as ledger:
        row = RoundRow(0, 0, 1.0, 2.0, 0, (), (), None, 0)
        ledger.commit(row, b"packet", ())
    packets = (tmp_path / "ledger" / "packets.log").read_bytes()
    for damage in (b"", b"{}", None):
        (tmp_path / FILE).write_bytes(damage) if damage is not None else (tmp_path / FILE).unlink()
        with pytest.raises(Failure, match=r"run\.json is (damaged|gone)") as refused:
            run_folder.claim(tmp_path, SMOKE.recipe_hash)
        assert any("put" in hint and "back from a copy" in hint for hint in refused.value.hints)
        assert run_folder.unused_folder(tmp_path) == tmp_path.with_name(f"{tmp_path.name}-2")
    assert (tmp_path / "ledger" / "packets.log").read_bytes() == packets


def test_what_a_launch_left_that_ended_before_its_run_began_is_removed(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger", run="amber-otter-42", samples=9).close()
    (tmp_path / "ledger" / "aside").mkdir()

    run_folder.claim(tmp_path, SMOKE.recipe_hash)

    assert not (tmp_path / "ledger").exists()


def test_a_damaged_recipe_is_made_anew_from_the_one_for_people(tmp_path: Path) -> None:
    changed = load_recipe("smoke", ["max_steps=9", "seed=3"])
    old = record(tmp_path, recipe_hash=changed.recipe_hash)
    (tmp_path / "recipe.yaml").write_text(as_yaml(changed.to_json()))
    text = changed.to_json()
    for damaged in (None, "", text[: len(text) // 2], text.replace('"seed":3', '"seed":2')):
        (tmp_path / "recipe.json").unlink(missing_ok=True)
        if damaged is not None:
            (tmp_path / "recipe.json").write_text(damaged)
        said = f"{tmp_path}/recipe.json was damaged or gone: it was made anew from recipe.yaml"
        assert recipe_to_resume(old) == (changed, said)
        assert (tmp_path / "recipe.json").read_text() == text
        assert recipe_to_resume(old) == (changed, "")


def test_with_both_recipes_damaged_the_one_for_programs_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(SMOKE.to_json().replace('"seed"', '"sead"'))
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\x00")

    with pytest.raises(Failure, match=r"recipe\.json is damaged: its sha256 is not") as refused:
        recipe_to_resume(record(tmp_path))

    assert refused.value.exit == 9


def test_a_ledger_that_cannot_be_mended_names_the_snapshot_to_go_on_from(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", run="amber-otter-42", samples=9) as ledger:
        ledger.commit(RoundRow(0, 0, 1.0, 2.0, 0, (), (), None, 0), b"packet", ())
    (tmp_path / "ledger" / "packets.log").write_bytes(b"")
    for round in ("8", "12", "9"):
        (tmp_path / "snapshots" / round).mkdir(parents=True)

    with pytest.raises(LedgerDamaged, match=r"packets\.log is damaged") as refused:
        reopened_ledger(record(tmp_path), wal=True)

    assert refused.value.hints[-1].endswith(f"from {tmp_path}/snapshots/12, the model after 12 rounds")
    assert explain(refused.value).exit == 4


def test_a_launch_that_ends_unfinished_shows_the_url_and_the_resume_command(
    tmp_path: Path,
) -> None:
    save_run(record(tmp_path, url="cocktail://k.new-token@203.0.113.7:29444/amber-otter-42"))
    told: list[Any] = []
    diary: list[Any] = []
    views: Any = [SimpleNamespace(show=told.append), SimpleNamespace(show=diary.append)]
    nothing: Any = SimpleNamespace(rounds=0, step=0, eval_loss=None)

    ended = RunEnded(0.0, False, "too few peers", 7, 0, 0)

    session = HostSession(SMOKE, tmp_path, views)
    session.record = record(tmp_path)

    with pytest.raises(Failure, match="too few peers"):
        session.hand_over(nothing, nothing, ended, full=False)

    assert "cocktail resume amber-otter-42 goes on" in told[0].message
    assert told[0].message.endswith("at cocktail://k.new-token@203.0.113.7:29444/amber-otter-42")
    assert diary == [], "the URL lets in"


def test_resume_refuses_a_finished_run(tmp_path: Path) -> None:
    save_run(record(tmp_path, state="finished"))

    with pytest.raises(Failure, match=r"the run amber-otter-42 in .* is over") as refused:
        check_unfinished(load_run("amber-otter-42"))

    assert refused.value.exit == 4


def test_resume_refuses_a_run_whose_hub_is_alive(cocktail: Command, tmp_path: Path) -> None:
    save_run(record(tmp_path / "out"))
    with Ledger(tmp_path / "out" / "ledger", run="amber-otter-42", samples=9):
        said = cocktail("launch", "smoke", "-o", "out")

    assert said.exit == 4
    assert "amber-otter-42 is going on: its hub (process 1)" in said.err
    assert "cocktail stop amber-otter-42" in said.err


def test_a_resumed_run_keeps_its_url_unless_it_listens_at_another_port(tmp_path: Path) -> None:
    url = str(RunKeys.generate().url("203.0.113.7", 29444, "amber-otter-42"))
    old = record(tmp_path, url=url)
    forwarded = replace(old, port=29400)  # a router forwards 29444 to it

    assert url_at(old, 29444) == url
    assert url_at(old, 5000) == url.replace(":29444/", ":5000/")
    assert url_at(forwarded, 5000) == url


def test_a_resumed_run_has_the_options_of_its_launch_but_for_those_typed_now(tmp_path: Path) -> None:
    launched = LocalSettings("cuda:0", 4, 1e6, None, 20 << 30, True)
    old = record(tmp_path, arguments=arguments_of(launched, 3))
    save_run(old)
    old = load_run("amber-otter-42")

    assert hosted_before(old) == (launched, 3)
    assert hosted_before(old, peers=0, device="cpu", max_up=None) == (replace(launched, device="cpu"), 0)
    assert hosted_before(record(tmp_path)) == (LocalSettings(), 1), "a launch before this was recorded"


@pytest.mark.parametrize("which", ["amber-otter-42", "out"])
def test_resume_hosts_the_run_with_its_own_recipe_address_and_options(
    cocktail: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The launch is run up to the point where its hub would be started."""
    hosted: list[Any] = []
    changed = load_recipe("smoke", ["max_steps=9"])
    old = record(tmp_path / "out", recipe_hash=changed.recipe_hash, state="paused")
    save_run(replace(old, arguments=arguments_of(LocalSettings("cpu", 4), 2)))
    (tmp_path / "out" / "recipe.json").write_text(changed.to_json())

    def run(session: HostSession, *how: Any) -> None:
        hosted.append((session.recipe, session.folder, session.resumed, how))

    monkeypatch.setattr(HostSession, "run", run)
    said = cocktail("resume", which, "--peers", "3", "--port", "5000")

    assert (said.exit, said.err.partition(" ")[2]) == (0, "starting\n")
    assert hosted == [
        (
            changed,
            tmp_path / "out",
            load_run("amber-otter-42"),
            (ListenAddress("127.0.0.1", 5000), LocalSettings("cpu", 4), 3, 0),
        )
    ]


def test_resume_of_an_unknown_run_names_the_nearest(cocktail: Command, tmp_path: Path) -> None:
    save_run(record(tmp_path / "out"))
    said = cocktail("resume", "amber-oter-42")

    assert said.exit == 3
    assert said.err.splitlines()[-1] == "hint: did you mean amber-otter-42?"


def test_resume_refuses_changed_data_by_name(tmp_path: Path) -> None:
    from recipes.data import build_corpus
    from recipes.models import BUILTIN_MODELS, open_tokenizer

    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {i} of many"}) + "\n" for i in range(20)))
    recipe = load_recipe("smoke", ["data.val_set_size=0.2"], data=str(data))
    tokenizer = open_tokenizer(BUILTIN_MODELS["builtin:tiny-gpt-neox"])
    corpus = build_corpus(recipe, tokenizer)
    old = record(tmp_path, data_sha256=corpus.digest())
    check_corpus(old, recipe, build_corpus(recipe, tokenizer))
    data.write_text(data.read_text().replace("row 7 of", "row 8 of"))

    with pytest.raises(Failure, match=r"the data \(.*mine\.jsonl\) are not those") as refused:
        check_corpus(old, recipe, build_corpus(recipe, tokenizer))

    assert refused.value.exit == 3


def test_resume_refuses_a_changed_base_model_by_name(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"other weights")

    with pytest.raises(Failure, match=r"is not the one .*: .*config\.json is altered or gone") as refused:
        same_base(record(tmp_path), SMOKE, {"base": "0" * 64, "file:base/config.json": "0" * 64})

    assert refused.value.exit == 3


def as_noted(folder: Path, values: dict[str, Any]) -> RunRecord:
    """A run.json with these values, as some version wrote it, read here."""
    (folder / FILE).write_text(text_of(values))
    return load_run(str(folder))


@pytest.mark.parametrize(
    ("noted", "named"),
    [
        ({}, "cocktail of a version that it does not name, in format 1"),
        ({"format": 9, "version": "0.9.1", "a_key_of_it": 5}, "cocktail 0.9.1, in format 9"),
    ],
)
def test_a_run_of_another_version_is_refused_in_one_sentence_that_names_both(
    tmp_path: Path, noted: dict[str, Any], named: str
) -> None:
    """`resume` changes nothing there. Its record is read as ever."""
    values = {
        key: value for key, value in asdict(record(tmp_path)).items() if key not in ("format", "version")
    }
    old = as_noted(tmp_path, values | noted)
    (tmp_path / "recipe.json").write_text("damaged")
    expected = f"the run amber-otter-42 in {tmp_path} was written by {named}: cocktail {__version__} goes on"
    wanted = LaunchSettings(tmp_path, ListenAddress(), LocalSettings(), 0, run=old)

    quiet = QuietView(sys.stdout, sys.stderr)
    for act in (partial(launch_run, wanted, quiet), partial(check_unfinished, old)):
        with pytest.raises(Failure, match=re.escape(expected)) as refused:
            act()
        assert refused.value.exit == 4
    assert (tmp_path / "recipe.json").read_text() == "damaged"
    assert (old.run, old.recipe_hash) == ("amber-otter-42", SMOKE.recipe_hash)


def test_a_resumed_run_has_the_pinned_commits_of_before(tmp_path: Path) -> None:
    """Its recipe, as it was typed, names a branch; the run's own names what that was."""
    pinned = SMOKE.model_copy(update={"model": SMOKE.model.model_copy(update={"model_revision": "a0" * 20})})
    (tmp_path / "recipe.json").write_text(pinned.to_json())
    old = record(tmp_path, recipe_hash=pinned.recipe_hash, asked_hash=SMOKE.recipe_hash)
    save_run(old)
    Ledger(tmp_path / "ledger", run="amber-otter-42", samples=9).close()

    assert recipe_to_resume(old) == (pinned, "")


def test_the_recipe_of_a_run_pins_its_branch_to_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers and `resume` read the commit. The model is in the cache of a hub that is silent."""
    commit, entry = "a0" * 20, tmp_path / "models--some--model"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "v1").write_text(commit)
    made = prepare_base(SMOKE, tmp_path / "made")
    shutil.copytree(made.folder, entry / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {i} of many"}) + "\n" for i in range(20)))
    asked = load_recipe("smoke", ["model_revision=v1", "val_set_size=0.2"], str(rows), "some/model")
    (tmp_path / "out").mkdir()

    run = HostSession(asked, tmp_path / "out", [])
    settings = settings_of(run.prepare(), "amber-otter-42")

    told = recipe_from_json(settings.recipe)
    assert told.model.model_revision == commit
    assert (tmp_path / "out" / "recipe.json").read_text() == told.to_json()
    assert settings.recipe_hash == told.recipe_hash != run.asked_hash == asked.recipe_hash


@pytest.mark.parametrize("before", ["", '{"a": 1}\n', '{"a": 1}\n{"b'])
def test_a_line_cut_short_by_a_kill_does_not_spoil_the_next(tmp_path: Path, before: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(before)
    with run_folder.appended(path) as file:
        file.write('{"c": 3}\n')

    assert path.read_text().splitlines()[-1] == '{"c": 3}'


SMALL = [*LAUNCH, "max_steps=24", "swarm.min_peers=2", "--peers", "1", "save_steps=5"]
SMALL += ["staleness=1"]  # where a busy machine's rungs went from 2 to 1, nobody has one round's x' to report


@pytest.mark.slow
@needs_fork
def test_a_run_goes_on_after_its_hub_was_killed(forked: Forked, tmp_path: Path, cocktail: Command) -> None:
    here = [*SMALL, "-o", str(tmp_path / "out")]
    launch = forked.start(tmp_path / "launch", *here, forks=True)
    started = launch.next("run_started")
    join = forked.join(tmp_path / "volunteer", started["url"])
    launch.next("step", round=13)  # 12 steps: a round that closes without a straggler may skip a number
    launch.send(signal.SIGKILL)
    launch.wait()

    refused = cocktail(*here)
    error = json.loads(refused.out)["error"]
    assert (refused.exit, error["hints"][0]) == (4, f"go on with it: cocktail resume {started['run']}")
    killed = json.loads(cocktail("runs", "--json").out)["runs"][0]
    assert [killed[key] for key in ("run", "state")] == [started["run"], "died"]
    assert killed["step"] >= 12
    again = forked.start(tmp_path / "again", "resume", started["run"], "--json", forks=True)
    resumed = again.next("run_started")
    assert (again.wait(), join.wait()) == (0, 0)

    assert [resumed[key] for key in ("run", "url")] == [started[key] for key in ("run", "url")]
    assert resumed["round"] > max(step["round"] for step in launch.events("step")[:-1])
    assert again.told[-1]["event"] == "run_finished"
    assert len(join.events("joined")) == 1, "nobody had to join anew"
    assert join.told[-1]["finished"]
    warnings = [event["message"] for event in join.events("warning")]
    assert not [w for w in warnings if "new session" in w], "its session was resumed, its work not void"
    joined = [event["peer"] for event in again.events("peer_joined")]
    assert joined == ["local-1"], "it was started again, and nobody else joined"
    assert again.events("step")[0]["peers"] == 2, "min_peers; a later round may close without a straggler"
    with Ledger(tmp_path / "out" / "ledger", write=False) as ledger:
        rows, audit = ledger.rounds(), ledger.verify(complete=True)
    assert audit.rounds == len(rows) > resumed["round"]
    assert not list((tmp_path / "out" / "ledger").glob("updates.log"))
    made = launch.events("checkpoint") + again.events("checkpoint")
    assert again.events("checkpoint")
    assert all(one["fingerprint"] == f"{rows[one['round']].fingerprint:016x}" for one in made)
    kept = [path.name for path in (tmp_path / "out" / "snapshots").iterdir()]
    assert sorted(kept, key=int) == [str(one["round"]) for one in made[-2:]]
    told = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    rounds = [event["round"] for event in told if event["event"] == "step"]
    assert rounds == sorted(set(rounds))
    names = set()
    for name, round, fingerprint in [*fingerprints(tmp_path / "out" / "peers"), *of("volunteer", join.told)]:
        names.add(name)
        assert round + 1 == len(rows) or fingerprint == f"{rows[round + 1].fingerprint:016x}", (name, round)
    assert names == {"local-1", "volunteer"}


def of(name: str, told: list[dict[str, Any]]) -> Iterator[tuple[str, int, str]]:
    """(peer, round, fingerprint of its x' after it)."""
    return ((name, event["round"], event["fingerprint"]) for event in told if event.get("event") == "step")


def fingerprints(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Fingerprints of the local peers, before and after the kill: each process appends to the same file."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from of(path.stem, [json.loads(line) for line in path.read_text().splitlines()])
