"""The command line as people use it: real processes, real sockets, kill -9 and Ctrl-C."""

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked import Command, Forked, needs_fork, paced
from in_process import rows

from transport import Ledger

pytestmark = [pytest.mark.slow, needs_fork]

STEPS, BATCH = 48, 8
Told = dict[str, Any]


@dataclass
class Story:
    """A run in which everything happens that a run must survive."""

    folder: Path
    forked: Forked
    url: str = ""
    events: list[Told] = field(default_factory=list)
    first: Command | None = None  # joins at the start, and stays
    victim: Command | None = None  # joins at the start, and is killed
    late: Command | None = None
    guest: Command | None = None  # joins, is stopped with Ctrl-C, and comes back
    interrupted: bool = False
    guest_again: Command | None = None
    killed: bool = False

    def of(self, kind: str) -> list[Told]:
        return [event for event in self.events if event["event"] == kind]

    def accepted(self, name: str) -> list[int]:
        return [event["round"] for event in self.of("step") if name in event["accepted"]]

    def left(self, name: str) -> list[str]:
        return [event["reason"] for event in self.of("peer_left") if event["peer"] == name]

    def join(self, name: str, folder: str = "") -> Command:
        place = self.folder.parent
        options: dict[str, Any] = {"home": place / "home", "before": paced(0.15)}
        return self.forked.join(place / (folder or name), self.url, "--name", name, **options)

    def take(self, event: Told) -> None:
        self.events.append(event)
        if event["event"] == "run_started":
            self.url = event["url"]
            self.first, self.victim = self.join("first"), self.join("victim")
        if event["event"] != "step":
            return
        if self.guest is None:
            self.guest = self.join("guest")
        elif not self.interrupted and len(self.accepted("guest")) == 3:
            self.guest.send(signal.SIGINT)
            self.interrupted = True
        elif self.guest_again is None and self.left("guest"):
            self.guest_again = self.join("guest", "guest-again")
        elif self.late is None and event["step"] >= 16:
            self.late = self.join("late")
        elif not self.killed and event["step"] >= 32 and self.victim is not None:
            self.victim.send(signal.SIGKILL)
            self.killed = True


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Story:
    folder = tmp_path_factory.mktemp("story")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(STEPS * BATCH + 8)))
    story = Story(folder / "run", forked)
    command = ["launch", "smoke", "--peers", "0", "--port", "0", "--bind", "127.0.0.1", "--json"]
    command += ["--data", str(data), "-o", str(story.folder), "max_steps=-1", "num_train_epochs=1"]
    command += ["swarm.min_peers=2"]
    command += [f"global_batch_size={BATCH}", "val_set_size=8", "eval_steps=40", "packing=false"]
    launch = forked.start(folder / "launch", *command, home=folder / "home")
    for event in launch.follow():
        story.take(event)
    assert launch.wait() == 0, launch.said
    assert "Traceback" not in launch.said
    return story


def told_by(peer: Command) -> list[Told]:
    """Its events, once it has ended with exit 0."""
    assert peer.wait(120) == 0, peer.said
    assert "Traceback" not in peer.said
    return peer.told


def test_the_run_finishes_its_steps_and_counts_every_sample_exactly_once(story: Story) -> None:
    finished = story.events[-1]

    assert finished["event"] == "run_finished"
    assert finished["steps"] == STEPS
    with Ledger(story.folder / "ledger", write=False) as ledger:
        audit = ledger.verify(complete=True)
    assert audit.missing == 0
    assert audit.counted == STEPS * BATCH


def test_a_peer_killed_with_9_is_noticed_within_seconds_and_named(story: Story) -> None:
    assert story.killed
    assert story.left("victim") == ["connection lost"]
    steps = story.of("step")
    gap = max(step["step_s"] for step in steps if step["step"] > 24)
    assert gap < 10


def test_one_stopped_with_ctrl_c_leaves_in_good_order_and_comes_back(story: Story) -> None:
    assert story.guest is not None
    assert story.guest_again is not None
    first, second = told_by(story.guest), told_by(story.guest_again)

    assert first[-1]["event"] == "left"
    assert not first[-1]["finished"]
    assert story.left("guest")[0].startswith("left")
    assert second[-1]["finished"]
    rounds = story.accepted("guest")
    assert len(rounds) > len([event for event in first if event["event"] == "step"])


def test_one_that_joins_late_takes_part_and_holds_the_same_model(story: Story) -> None:
    """Its fingerprints after each round are those of the peer that was there from the start."""
    assert story.late is not None
    mine = {event["round"]: event["fingerprint"] for event in told_by(story.late) if event["event"] == "step"}
    assert story.first is not None
    others = [event for event in told_by(story.first) if event["event"] == "step"]
    theirs = {event["round"]: event["fingerprint"] for event in others}

    assert min(mine) >= 16
    assert len(mine) > 5
    assert all(theirs[round] == fingerprint for round, fingerprint in mine.items())


def test_bytes_are_told_for_each_peer_and_direction_with_their_ratio_to_fp16(story: Story) -> None:
    """A round's bytes are those since the commit before it, so its own packet comes down within the next."""
    parameters = story.of("run_started")[0]["parameters"]
    for step in story.of("step")[1:]:
        for name in step["accepted"]:
            assert step["ratio_up"][name] == pytest.approx(2 * parameters / step["up_bytes"][name], rel=0.01)
    packets = sum(step["packet_bytes"] for step in story.of("step"))
    down = sum(
        step["down_bytes"].get("first", 0) - step["fetched_bytes"].get("first", 0)
        for step in story.of("step")
    )
    assert packets < down < 1.6 * packets


def test_the_exported_model_is_the_one_that_was_measured(story: Story) -> None:
    """The export loads with from_pretrained, and its held-out loss is the last one of the run."""
    from recipes.config import recipe_from_json
    from recipes.data import build_corpus
    from recipes.models import load_model, open_tokenizer
    from recipes.objectives import NextTokens, evaluate

    model = Path(story.events[-1]["model"])
    recipe = recipe_from_json((story.folder / "recipe.json").read_text())
    corpus = build_corpus(recipe, open_tokenizer(model))
    found = evaluate(NextTokens(), load_model(model), corpus.held_out, 8)

    told = story.of("eval")
    assert found.mean == pytest.approx(told[-1]["loss"], rel=1e-5)
    assert told[-1]["loss"] < told[0]["loss"]
    assert story.events[-1]["eval_loss"] == told[-1]["loss"]
