"""A real disk without room, under a real launch: exit 8, the reason for everybody, and the run goes on once
there is room. And the other ways in which an output folder cannot be had."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from forked import Command, Forked, needs_fork, paced
from small_disk import small_disk
from stalling_hub import SMALL

from transport import Ledger

pytestmark = [pytest.mark.slow, needs_fork]

LAUNCH = ("launch", "smoke", "--json", "--no-train", "--port", "0", "--bind", "127.0.0.1", *SMALL)


def test_a_full_disk_stops_the_run_with_its_reason_and_loses_nothing(forked: Forked, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=16) as disk:

        def inside(name: str, *command: str, first: str = "") -> Command:
            return forked.start(tmp_path / name, *command, before=disk.enter + first)

        out = disk.path / "out"
        command = (*LAUNCH, "max_steps=40", "-o", str(out))
        launch = inside("launch", *command)
        url = launch.until("run_started")["url"]
        guest = forked.join(tmp_path / "guest", url, before=paced(0.03))
        launch.until("step", step=3)
        resume = ("resume", str(out), "--json")
        again = [inside(f"second {words[0]}", *words) for words in (command, resume)]
        assert [second.wait() for second in again] == [4, 4], "one hub a ledger"
        assert "is going on: its hub (process" in again[0].told[-1]["error"]["message"]
        no_room = forked.join(tmp_path / "poor", url, before=disk.enter, home=disk.path / "home")
        assert no_room.wait() == 8
        assert str(disk.path / "home") in no_room.told[-1]["error"]["message"]
        reached = max(event["step"] for event in launch.told if event["event"] == "step")
        launch.until("step", step=reached + 1)
        disk.fill()

        assert launch.wait() == 8
        error = launch.told[-1]["error"]
        assert (error["code"], error["message"]) == (
            "out_of_disk",
            f"the disk is full: no space left at {out}",
        )
        assert "cocktail resume " in error["hints"][0]
        assert "Traceback" not in launch.said
        assert (guest.wait(), guest.told[-1]["reason"]) == (75, "the hub's disk is full"), "restart me"
        announced = max(event["round"] for event in launch.told if event.get("event") == "step")

        disk.empty()
        # of the disk that is kept free for others
        little = "from recipes import weight_files; weight_files.DISK_RESERVE = 0"
        resumed = inside("resumed", *resume, first=little)
        started = resumed.until("run_started")
        assert (started["url"], started["round"] > announced) == (url, True)
        guest = forked.join(tmp_path / "guest-again", url, "--name", "guest")  # so nobody waits for it
        assert (resumed.wait(), guest.wait()) == (0, 0), resumed.told[-1]
        shutil.copytree(disk.outside / "out" / "ledger", tmp_path / "ledger")
        with Ledger(tmp_path / "ledger", write=False) as ledger:
            assert ledger.verify(complete=True).missing == 0
        told = [json.loads(line) for line in (disk.outside / "out" / "events.jsonl").read_text().splitlines()]
        assert told[-1]["event"] == "run_finished"

        subprocess.run([*disk.inside, "mount", "-o", "remount,ro", str(disk.path)], check=True)
        barred = inside("barred", *LAUNCH, "-o", str(disk.path / "other"))
        assert barred.wait() == 4
        assert "other: Read-only file system" in barred.told[-1]["error"]["message"]
