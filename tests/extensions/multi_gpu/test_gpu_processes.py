"""`--gpus`: which devices, and what becomes of the processes that share a peer when one of them is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Command, Forked, needs_fork
from stalling_hub import Material, stalling_hub
from test_resume import arguments_of, record

from cocktail_cli.assembly import Given, pick_devices
from cocktail_cli.errors import Failure
from cocktail_cli.extensions.multi_gpu.fsdp_peer import check_fsdp
from cocktail_cli.host import LocalSettings, hosted_before
from cocktail_cli.machine import load_run, save_run
from recipes.config import load_recipe
from recipes.errors import ModelError

SECONDS = 10.0  # for a peer to end, on a busy machine
TWO = ("--gpus", "2", "--device", "cpu")


def over(gpus: int) -> Given:
    return {"multi_gpu": {"gpus": gpus}}


def children(peer: Command) -> list[int]:
    """Its ranks, in their order; the first child is what forks them."""
    return [int(pid) for pid in Path(f"/proc/{peer.pid}/task/{peer.pid}/children").read_text().split()][1:]


def runs(pid: int) -> bool:
    """A dead child of nobody may stay as a zombie where no init collects it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@needs_fork
def test_a_rank_that_is_killed_ends_its_peer_with_the_reason_and_the_others(
    forked: Forked, tmp_path: Path
) -> None:
    material = Material.prepare(tmp_path / "base", "max_steps=1000")
    with stalling_hub(material, tmp_path / "ledger", commits=True) as hub:
        (tmp_path / "ann").mkdir()
        (tmp_path / "ann" / "url").write_text(f"{hub.url}\n")
        ann = forked.start(
            tmp_path / "ann", "join", "@url", "-y", "--json", "--name", "ann", *TWO, forks=True
        )
        ann.until("step")
        ranks = children(ann)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()

        assert ann.wait() == 75
        assert time.monotonic() - killed < SECONDS

    error = ann.told[-1]["error"]
    assert (error["code"], error["message"]) == ("rank_lost", "rank 1 of 2 (cpu) was ended by SIGKILL")
    assert hub.left("ann") == ["left: rank lost"]
    assert len(ranks) == 2
    assert not any(map(runs, ranks))


@pytest.mark.slow
def test_a_rank_does_not_outlive_who_asks_it(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cocktail_cli.extensions.multi_gpu.gpu_process"],
        cwd=root,
        stdin=subprocess.PIPE,
    ) as rank:
        assert rank.stdin is not None
        rank.stdin.write(b'{"do": "start", "bytes": 0, "number": 0}')  # half a question
        rank.stdin.close()

        assert rank.wait(120) == 75


def test_devices_are_as_many_as_gpus_are_asked_for() -> None:
    assert [*pick_devices("cpu", over(3))] == ["cpu"] * 3
    assert [*pick_devices("cpu", over(1))] == ["cpu"]
    for wanted in ("cpu,cpu,cpu", "mps", "cuda:0,0"):
        with pytest.raises(Failure):
            pick_devices(wanted, over(2))


def test_local_peers_get_as_many_devices_each() -> None:
    four = LocalSettings("cuda:0,1,2,3", given=over(2))

    assert four.devices_of(3) == ["cuda:0,cuda:1", "cuda:2,cuda:3", "cuda:0,cuda:1"]
    assert LocalSettings("cpu", given=over(2)).devices_of(2) == ["cpu", "cpu"]
    assert LocalSettings("cuda:0,1").devices_of(3) == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize(
    "key", ["training.optim=muon", "training.optim=soap", "compression.momentum_masking=true"]
)
def test_what_several_gpus_cannot_do_is_refused_by_name(key: str) -> None:
    """The name of a switch stands for itself, as it is off otherwise."""
    recipe = load_recipe("smoke", ["compression.topk_ratio=0.05", "compression.staleness=0", key])
    with pytest.raises(
        ModelError, match=f"{key.removesuffix('=true')}: a peer on several GPUs cannot do that"
    ):
        check_fsdp(recipe)


def test_a_resumed_run_has_the_gpus_of_its_launch(tmp_path: Path) -> None:
    launched = LocalSettings("cuda:0,1", given={"multi_gpu": {"gpus": 2}})
    save_run(record(tmp_path, arguments=arguments_of(launched, 3)))

    assert hosted_before(load_run("amber-otter-42")) == (launched, 3)
