"""A volunteer presses Ctrl-C and comes back: what it hands over, keeps, finds again. Real processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import Forked, needs_fork
from test_processes import LAUNCH

from cocktail_cli.assembly import Joining
from cocktail_cli.ui import Event, Progressed, events
from cocktail_cli.volunteer import VolunteerLimits, VolunteerSession, take_turns
from transport import parse_url

pytestmark = [pytest.mark.slow, needs_fork]


def states(told: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Select the states that begin with these words."""
    return [event for event in told if event.get("state", "").startswith(first)]


def test_a_leaver_hands_over_keeps_the_rest_and_finds_it_when_it_comes_back(
    forked: Forked, tmp_path: Path
) -> None:
    kept = Path(os.environ["COCKTAIL_HOME"]) / "kept"
    launch = forked.start(tmp_path / "launch", *LAUNCH, "max_steps=5000", "--peers", "0")
    started = launch.next("run_started")
    join = forked.join(tmp_path / "gus", started["url"])
    for _ in range(3):
        join.next("step")
    join.send(signal.SIGINT)
    assert join.wait() == 0
    (handed_over,), (wrote,) = states(join.told, "handed over"), states(join.told, "kept")
    gone = launch.next("peer_left", peer="gus")
    assert gone["legacy_bytes"] == handed_over["done"] > 0
    assert "of its residual's length" in handed_over["state"]
    (path,) = kept.rglob("*.*")
    assert (path.name, path.stat().st_size) == ("gus.safetensors", wrote["done"])
    assert 16 * started["parameters"] <= wrote["done"] < 16.1 * started["parameters"]

    again = forked.join(tmp_path / "again", started["url"], "--name", "gus")
    back = again.next("step")
    assert len(states(again.told, "back with what it kept")) == 1
    assert not path.exists(), "or a crash later on would bring it back twice"
    assert back["round"] >= max(step["round"] for step in join.events("step"))
    launch.next("step", accepted=["gus"])
    launch.send(signal.SIGINT)
    assert (again.wait(), launch.wait()) == (75, 0)
    assert list(kept.rglob("*")), "the run goes on later"
    assert "run_paused" in [event["event"] for event in launch.told[-2:]]

    resumed = forked.start(tmp_path / "launch", "resume", "out", "--json")
    assert resumed.next("run_started")["round"] > back["round"]
    resumed.send(signal.SIGKILL)


class Pause(Joining):
    """Ends this machine's part after its third step, once."""

    why = "outside 22:00-07:00, back at 22:00"

    def __init__(self, told: list[Event]) -> None:
        self.told, self.paused = told, False

    @contextmanager
    def beside(self, processes: set[int], leave: Callable[[str], None]) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not (self.paused or over.wait(0.1)):
                if sum(isinstance(event, events.Step) for event in self.told) >= 3:
                    self.paused = True
                    leave(self.why)

        threading.Thread(target=watch, daemon=True).start()
        yield
        over.set()

    def returns_after(self, reason: str) -> bool:
        return reason == self.why


def test_a_machine_outside_its_hours_leaves_in_good_order_and_is_back_with_what_it_kept(
    forked: Forked, tmp_path: Path
) -> None:
    told = list[Event]()
    view, limits = SimpleNamespace(show=told.append), VolunteerLimits("gus", ["cpu"])
    joining = [Pause(told)]
    launch = forked.start(tmp_path / "launch", *LAUNCH, "max_steps=12", "--peers", "0")
    url = parse_url(launch.next("run_started")["url"])

    def session(again: bool) -> VolunteerSession:
        member = VolunteerSession(url, limits, view, joining)
        member.take_part(60.0, life_line=None)
        return member

    assert take_turns(joining, session, False, view.show) == 0
    assert launch.wait() == 0

    (left,) = launch.events("peer_left")[:1]
    assert left["reason"].startswith("left: outside 22:00-07:00")
    assert left["legacy_bytes"] > 0
    said = [event.state for event in told if isinstance(event, Progressed)]
    assert any(state.startswith("back with what it kept") for state in said)
    assert [event.finished for event in told if isinstance(event, events.Left)] == [False, True]
    assert launch.told[-1]["steps"] == 12
