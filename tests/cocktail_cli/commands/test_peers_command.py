"""The host's commands about who is in a run, against a hub on the loopback."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from in_this_process import Run
from toy_swarm import ToyPeer, ToyWork, toy_settings
from waiting import until

from cocktail_cli.machine import RunRecord, load_run, own_keys, save_run
from recipes.config import load_recipe
from recipes.errors import RecipeError
from transport import Ledger, PeerLink, ask_admin, parse_url
from transport.ledger import KnownPeer
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, RefusedByHub, short_key


class Running(HubSwarm):
    """A hub with a toy of a run, and the record by which commands find it."""

    def __init__(self, folder: Path, **changes: object) -> None:
        recipe = load_recipe("smoke").to_json()  # a joiner reads it
        settings = toy_settings(**({"samples": 10**6, "linger_s": 0.5, "recipe": recipe} | changes))
        super().__init__(settings, ToyWork(), folder / "ledger", 0)
        self.record = RunRecord(
            run=settings.run,
            url=str(self.url),
            keys=asdict(self.keys),
            pid=1,
            port=self.hub.port,
            bind="127.0.0.1",
            output_dir=str(folder),
            base="base",
            recipe="toy",
            recipe_hash="",
            started="",
        )
        save_run(self.record)
        self.start()

    def when_asked(self, order: str, word: str, reason: str) -> threading.Thread:
        """Have the host decide about a newcomer as soon as there is one."""

        def decide() -> None:
            secret = self.record.keys["stop"]
            until(lambda: ask_admin(self.url, secret, "list")["peers"])
            ask_admin(self.url, secret, order, peer=word, reason=reason)  # type: ignore[arg-type]

        thread = threading.Thread(target=decide, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with closing(Running(tmp_path)) as run:
        yield run


@pytest.fixture
def approving(tmp_path: Path) -> Iterator[Running]:
    with closing(Running(tmp_path, join="approve")) as run:
        yield run


def test_the_host_lists_the_peers_and_kicks_one_in_training(cocktail: Run, running: Running) -> None:
    keys = CurveKeys.generate()
    peer = ToyPeer(PeerLink(running.url, PeerIdentity("ann", "RTX 3090", keys=keys)))
    thread = peer.start()
    until(lambda: peer.rounds)
    (row,) = json.loads(cocktail("peers", "toy-run", "--json").out)["peers"]
    assert (row["name"], row["key"], row["gpu"]) == ("ann", short_key(keys.public), "RTX 3090")
    assert row["up_bytes"] > 0
    said = cocktail("kick", "toy-run", "ann", "--ban", "--reason", "too hot")
    assert (said.exit, said.out) == (0, f"banned ann (key {row['key']})\n")
    thread.join(120)

    assert isinstance(peer.error, RefusedByHub)
    assert (peer.error.code, str(peer.error)) == ("kicked", "banned by the run's host: too hot")
    assert "banned by the run's host: too hot" in cocktail("peers", "toy-run").out
    with Ledger(running.ledger.folder, write=False) as ledger:
        assert [k.standing for k in ledger.recover().peers] == ["banned"]
    assert cocktail("peers", "toy-run", "--unban", row["key"], "-q").exit == 0


@pytest.mark.slow  # imports torch
def test_a_banned_peer_exits_with_6_and_the_hosts_reason(cocktail: Run, running: Running) -> None:
    link = PeerLink(running.url, PeerIdentity("me", keys=own_keys()))
    link.connect()
    assert cocktail("kick", "toy-run", "me", "--ban", "--reason", "goodbye").exit == 0
    link.close()
    said = cocktail("join", str(running.url), "-y", "--device", "cpu")

    assert said.exit == 6
    assert "the hub refused: banned by the run's host: goodbye" in said.err


@pytest.mark.slow
def test_a_joiner_learns_that_the_host_is_asked_and_what_the_host_answers(
    cocktail: Run, approving: Running
) -> None:
    mine = short_key(own_keys().public)
    host = approving.when_asked("deny", mine, "who are you?")
    said = cocktail("join", str(approving.url), "-y", "--device", "cpu", "--name", "attic")
    host.join(120)

    assert said.exit == 6
    assert f"waiting for the host's approval, as attic, key {mine}" in said.err
    assert "the hub refused: the run's host says no: who are you?" in said.err


def test_an_approved_peer_joins(cocktail: Run, approving: Running) -> None:
    link = PeerLink(approving.url, PeerIdentity("attic"))
    thread = threading.Thread(target=link.connect, daemon=True)
    thread.start()
    until(lambda: json.loads(cocktail("peers", "toy-run", "--json").out)["peers"])
    assert "wants in" in cocktail("peers", "toy-run").out
    assert cocktail("peers", "toy-run", "--approve", "attic").exit == 0
    thread.join(120)

    assert link.name == "attic"
    link.leave("done")


def test_a_rotated_token_is_the_only_one_that_admits_joiners(cocktail: Run, running: Running) -> None:
    inside = PeerLink(running.url, PeerIdentity("ann"))
    inside.connect()
    said = cocktail("peers", "toy-run", "--rotate-token")
    new = parse_url(said.out)
    assert replace(new, token=running.url.token) == running.url
    assert load_run("toy-run").url == said.out.strip(), "a resumed run has the new one"
    assert load_run("toy-run").keys["token"] == new.token
    with pytest.raises(RefusedByHub, match="no longer"):
        PeerLink(running.url, PeerIdentity("bob")).connect()
    outside = PeerLink(new, PeerIdentity("bob"))
    outside.connect()

    assert {row["name"] for row in json.loads(cocktail("status", "toy-run", "--json").out)["peers"]} == {
        "ann",
        "bob",
    }
    inside.leave("done")
    outside.leave("done")


def test_a_resumed_run_has_its_rotated_token(cocktail: Run, tmp_path: Path) -> None:
    run = Running(tmp_path)
    run.close()
    save_run(replace(run.record, state="failed"))
    said = cocktail("peers", "toy-run", "--rotate-token", "--json")

    assert load_run("toy-run").url == json.loads(said.out)["url"] != run.record.url


def test_the_recipe_decides_whether_the_host_is_asked() -> None:
    assert load_recipe("smoke", []).swarm.join == "token"
    assert load_recipe("smoke", ["swarm.join=approve"]).swarm.join == "approve"
    with pytest.raises(RecipeError, match="approve"):
        load_recipe("smoke", ["swarm.join=open"])


def test_wrong_peers_commands_of_the_host_are_usage_errors(cocktail: Run, running: Running) -> None:
    nobody = cocktail("kick", "toy-run", "eve")
    assert (nobody.exit, nobody.err.splitlines()[0]) == (2, "error: no peer is called 'eve'")
    assert cocktail("peers", "toy-run", "--approve", "a", "--deny", "b").exit == 2
    save_run(replace(running.record, state="finished"))
    assert cocktail("peers", "toy-run").exit == 3
    assert cocktail("peers", "toy-run", "--rotate-token").exit == 3


def test_stop_promises_no_model_of_a_run_without_a_step(running: Running, cocktail: Run) -> None:
    said = cocktail("stop", running.record.run)

    assert (said.exit, said.out) == (
        0,
        f"{running.record.run} is ending before its first step, so there is no model\n",
    )


def test_a_list_of_thousands_is_read_page_by_page_and_shows_those_that_are_here(
    cocktail: Run, running: Running
) -> None:
    """Each key that has ever joined stays in the ledger."""
    link = PeerLink(running.url, PeerIdentity("ann", "RTX 3090"))
    link.connect()
    known = running.hub._state.admission.known
    known |= {
        f"{number:043d}": KnownPeer(f"{number:043d}", f"s-{number}", "member") for number in range(8000)
    }
    shown, everybody = cocktail("peers", "toy-run"), cocktail("peers", "toy-run", "--all")
    rows = json.loads(cocktail("peers", "toy-run", "--json").out)["peers"]
    quiet = cocktail("peers", "toy-run", "-q").out.splitlines()
    kicked = cocktail("kick", "toy-run", "s-7999", "--ban")
    link.close()

    assert shown.out.splitlines()[1].startswith("ann ")
    assert len(shown.out.splitlines()) == 1 + 1 + 50
    assert shown.err == "and 7,950 more that are gone or banned; --all shows them\n"
    assert len(everybody.out.splitlines()) == 1 + 8001
    assert len(rows) == len(quiet) == len({row["name"] for row in rows}) == 8001
    assert (kicked.exit, kicked.out[:14]) == (0, "banned s-7999 ")
    assert known[f"{7999:043d}"].standing == "banned"
