"""The registry of runs: found by name or folder, private, and never in the way."""

import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail_cli.errors import Failure
from cocktail_cli.machine import (
    FILE,
    RunRecord,
    home,
    known_runs,
    load_run,
    new_name,
    read_run,
    save_run,
    the_run_going_on,
)
from transport import RunKeys


def record(folder: Path, run: str = "amber-otter-42") -> RunRecord:
    return RunRecord(
        run=run,
        url="cocktail://k.t@203.0.113.7:29400/r",
        keys={"stop": "s"},
        pid=1,
        port=29400,
        bind="0.0.0.0",
        output_dir=str(folder),
        base="base",
        recipe="smoke",
        recipe_hash="abc",
        started="2026-11-20T12:00:00Z",
    )


def test_the_local_url_reaches_the_hub_without_its_public_address(tmp_path: Path) -> None:
    assert record(tmp_path).local_url() == "cocktail://k.t@127.0.0.1:29400/r"
    assert replace(record(tmp_path), bind="::").local_url() == "cocktail://k.t@[::1]:29400/r"


def test_a_run_is_found_by_its_name_and_by_its_folder(tmp_path: Path) -> None:
    save_run(record(tmp_path))

    assert load_run("amber-otter-42") == load_run(str(tmp_path)) == record(tmp_path)
    assert [known.run for known in known_runs()] == ["amber-otter-42"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits; the user's profile is private there")
def test_run_json_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    save_run(record(tmp_path))

    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((home() / "runs" / "amber-otter-42").stat().st_mode) == 0o600


@given(st.floats(0, 1), st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_a_record_with_any_bit_flipped_is_refused_and_named(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
) -> None:
    """Else a run would go on with another key, at another port, or be called one of other data."""
    folder = tmp_path_factory.mktemp("run")
    save_run(record(folder))
    whole = (folder / FILE).read_bytes()
    at = int(place * (len(whole) - 1))
    (folder / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])

    with pytest.raises(Failure, match=r"run\.json is damaged: ") as refused:
        load_run(str(folder))
    assert refused.value.exit == 9
    assert read_run(folder) is None
    (folder / FILE).write_bytes(whole)
    assert load_run(str(folder)) == record(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 3}', "null"])
def test_a_record_that_is_none_is_refused_and_named(tmp_path: Path, text: str) -> None:
    """The error names the file, and does not say that the folder holds no run."""
    save_run(record(tmp_path))
    (tmp_path / FILE).write_text(text)

    with pytest.raises(Failure, match=r"run\.json is damaged: "):
        load_run("amber-otter-42")


def test_a_record_that_is_gone_is_missed_by_name_too(tmp_path: Path) -> None:
    """The error does not say that there is no such run."""
    save_run(record(tmp_path))
    (tmp_path / FILE).unlink()

    for run in ("amber-otter-42", str(tmp_path)):
        with pytest.raises(Failure, match=rf"{tmp_path} holds no run \(no run\.json\)"):
            load_run(run)


def test_a_record_without_a_hash_is_that_of_an_older_version(tmp_path: Path) -> None:
    """One that was changed by hand is read too, once its hash was removed; a flipped key is no other
    version."""
    save_run(record(tmp_path))
    found = json.loads((tmp_path / FILE).read_text())
    del found["sha256"]
    (tmp_path / FILE).write_text(json.dumps(found | {"bind": "::"}))
    assert load_run("amber-otter-42") == replace(record(tmp_path), bind="::")

    (tmp_path / FILE).write_text(json.dumps(found | {"shaB56": "0"}))
    assert read_run(tmp_path) is None


def test_the_error_of_an_unknown_run_names_the_nearest(tmp_path: Path) -> None:
    save_run(record(tmp_path))

    with pytest.raises(Failure, match="no run 'amber-oter'") as caught:
        load_run("amber-oter")

    assert caught.value.exit == 3
    assert "amber-otter-42" in caught.value.hints[0]


def test_a_name_cannot_point_out_of_the_registry(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(str(tmp_path))

    with pytest.raises(Failure):
        load_run("../elsewhere")


def test_a_run_whose_folder_was_deleted_is_not_listed(tmp_path: Path) -> None:
    save_run(record(tmp_path / "run"))
    (tmp_path / "run" / FILE).unlink()

    assert list(known_runs()) == []


def test_a_damaged_record_reads_as_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"run": "amb')

    assert read_run(tmp_path) is None


def test_new_run_names_are_valid_in_a_url() -> None:
    from transport.protocol import RUN_NAME

    assert all(RUN_NAME.fullmatch(new_name()) for _ in range(50))


def test_a_run_whose_hub_does_not_listen_has_died(tmp_path: Path) -> None:
    keys = RunKeys.generate()
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        url = str(keys.url("127.0.0.1", port, "amber-otter-42"))
        known = replace(record(tmp_path), url=url, port=port, bind="127.0.0.1")
        save_run(known)
        assert known.state_now() == "running"
        assert the_run_going_on() == known

    assert known.state_now() == "died"
    assert replace(known, state="finished").state_now() == "finished"
    assert the_run_going_on() == known, "it should be going on"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_run_whose_process_writes_the_model_has_not_died(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "print(flush=True); input()", "cocktail"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        known = replace(record(tmp_path), pid=process.pid, port=1, bind="127.0.0.1")
        assert known.state_now() == "running"
        process.stdin.write(b"end\n")

    assert known.state_now() == "died"


def test_which_run_goes_on_is_asked_where_none_or_several_do(tmp_path: Path) -> None:
    for names in ("none", "amber-otter-42, brisk-finch-10"):
        with pytest.raises(Failure, match=f"Going on here: {names}") as caught:
            the_run_going_on()
        assert "cocktail runs" in caught.value.hints[0]
        save_run(record(tmp_path / "a"))
        save_run(record(tmp_path / "b", "brisk-finch-10"))
