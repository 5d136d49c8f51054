"""Local peers: where they run, what they said last, and that they do not outlive their launcher."""

import subprocess
import sys
from pathlib import Path

import pytest

from cocktail_cli import key_options
from cocktail_cli.errors import TRACEBACK_HINT, Failure
from cocktail_cli.host import LocalPeers, LocalSettings
from cocktail_cli.host.local_peers import Child, EndedPeer, failure_of, last_line
from cocktail_cli.machine import ListenAddress, default_peer_name, parse_listen, pick_device, split_devices


def peers_folder(folder: Path, told: str, log: str, name: str = "local-1") -> Path:
    (folder / f"{name}.jsonl").write_text(told)
    (folder / f"{name}.log").write_text(log)
    return folder


FORWARD = Failure("unexpected", "RuntimeError: the forward pass fails", hints=(TRACEBACK_HINT,))


def peers_that_ended(folder: Path, *failures: Failure | None, running: int = 0) -> LocalPeers:
    """Make local peers that have ended, with these failures or killed; `running`: others that have not."""
    peers = LocalPeers(folder, LocalSettings())
    peers.folder.mkdir()
    for number, failure in enumerate(failures, 1):
        name, told = f"local-{number}", f"{failure.as_json()}\n" if failure else ""
        peers_folder(peers.folder, told, "", name)
        process = subprocess.Popen([sys.executable, "-c", "exit(1)"], text=True, stdin=subprocess.PIPE)
        process.wait(120)
        peers.children.append(Child(name, process))
    for number in range(running):
        process = subprocess.Popen([sys.executable, "-c", "input()"], text=True, stdin=subprocess.PIPE)
        peers.children.append(Child(f"running-{number}", process))
    peers.newly_ended()
    return peers


def test_the_error_a_peer_told_is_why_it_ended(tmp_path: Path) -> None:
    told = '{"v": 1, "event": "joined"}\n' + Failure("out_of_memory", "memory is full").as_json() + "\n"

    failure = failure_of(peers_folder(tmp_path, told, "a warning\n"), "local-1")
    assert failure is not None
    assert (failure.code, failure.message) == ("out_of_memory", "memory is full")


@pytest.mark.parametrize("told", ["", '{"v": 1, "ev', '{"v": 1, "event": "joined"}\n'])
def test_without_one_it_is_the_last_line_of_its_stderr(tmp_path: Path, told: str) -> None:
    folder = peers_folder(tmp_path, told, "first\nKilled\n\n")

    assert failure_of(folder, "local-1") is None
    assert last_line(folder, "local-1") == "Killed"


def test_where_all_local_peers_fail_the_run_ends_with_their_error(tmp_path: Path) -> None:
    peers = peers_that_ended(tmp_path, FORWARD, FORWARD)

    with pytest.raises(Failure) as raised:
        peers.check(present=(), met={"local-1", "local-2"}, rounds=3)
    assert raised.value.message == "every local peer failed: RuntimeError: the forward pass fails"
    assert raised.value.exit == FORWARD.exit
    assert raised.value.hints == (f"what it said: {tmp_path / 'peers' / 'local-2'}.log",)


def test_a_run_goes_on_while_others_can_do_the_work(tmp_path: Path) -> None:
    failed = peers_that_ended(tmp_path, FORWARD)
    failed.check(present={"attic"}, met={"local-1", "attic"}, rounds=3)
    failed.check(present=(), met={"local-1", "attic"}, rounds=3)  # it may come back


def test_a_run_goes_on_while_a_local_peer_does(tmp_path: Path) -> None:
    peers = peers_that_ended(tmp_path, FORWARD, running=1)
    try:
        peers.check(present=(), met=(), rounds=0)
    finally:
        peers.stop(0.0)


def test_killed_local_peers_end_a_run_only_before_its_first_step(tmp_path: Path) -> None:
    peers = peers_that_ended(tmp_path, None)

    peers.check(present=(), met={"local-1"}, rounds=3)
    with pytest.raises(Failure, match="every local peer failed before the first step"):
        peers.check(present=(), met={"local-1"}, rounds=0)


def test_a_list_of_devices_is_dealt_out_one_each() -> None:
    assert split_devices("cuda:0,1,3") == ["cuda:0", "cuda:1", "cuda:3"]
    assert split_devices("cpu") == ["cpu"]
    assert split_devices("cuda:0,cpu") == ["cuda:0", "cpu"]


def test_where_peers_own_shards_a_local_one_listens_where_the_hub_is_known(tmp_path: Path) -> None:
    door = ListenAddress("::", 0, "[2001:db8::1]")
    alone = LocalPeers(tmp_path, LocalSettings()).command("local-1", "cpu")
    owning = LocalPeers(tmp_path, LocalSettings(door=door)).command("local-1", "cpu")

    assert "--listen" not in alone
    listen = owning[owning.index("--listen") :]
    assert listen == ["--listen", ":::0", "--advertise", "[2001:db8::1]"]
    assert parse_listen(listen[1], listen[3]) == door
    assert door.dialled(40123) == "[2001:db8::1]:40123"


def test_a_local_peer_has_no_limits_of_a_volunteer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('max-up = "8mbit"\n')
    monkeypatch.setenv("COCKTAIL_CONFIG", str(settings))
    assert key_options.defaults()

    monkeypatch.setenv(
        "COCKTAIL_CONFIG", LocalPeers(tmp_path, LocalSettings()).environment(1)["COCKTAIL_CONFIG"]
    )
    assert key_options.defaults() == {"launch": {}, "join": {}}


@pytest.mark.parametrize("trusts", [False, True])
def test_a_local_peer_runs_model_code_where_its_launch_does(tmp_path: Path, trusts: bool) -> None:
    peers = LocalPeers(tmp_path, LocalSettings(trust_remote_code=trusts))

    assert ("--trust-remote-code" in peers.command("local-1", "cpu")) == trusts


def test_a_device_may_be_named_plainly() -> None:
    assert pick_device("cpu") == "cpu"


def test_this_machine_has_a_name_that_can_be_shown() -> None:
    assert default_peer_name().replace("-", "").isalnum()


LIFE_LINE = """
import sys, time
from cocktail_cli import key_options
from cocktail_cli.host.local_peers import LifeLine
busy = sys.argv[1] == "keeping"
with LifeLine(grace=0.1).leaving(lambda why: print(why, flush=True), lambda: busy):
    print("ready", flush=True)
    if busy:
        sys.stdin.buffer.read()
        time.sleep(1)
        print("kept", flush=True)
        busy = False
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["training", "keeping"])
def test_a_peer_asks_to_leave_and_then_ends_when_its_life_line_does(root: Path, what: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIFE_LINE, what],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.close()

        assert process.stdout.readline() == "its launching process ended\n"
        assert (process.stdout.readline() == "kept\n") == (what == "keeping")
        assert process.wait(120) == 75


@pytest.mark.skipif(sys.platform == "win32", reason="no process is killed by a signal")
@pytest.mark.parametrize(
    ("exit", "said"),
    [
        (8, "ended with exit 8: out of memory"),
        (-9, "was killed by SIGKILL, perhaps as memory ran out"),
        (-11, "was killed by SIGSEGV: out of memory"),
    ],
)
def test_how_a_local_peer_ended_is_said_in_words(exit: int, said: str) -> None:
    assert EndedPeer("local-1", exit, "out of memory").how == said
