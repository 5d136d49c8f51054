"""A signal in every phase of a stay, and Ctrl-C, SIGTERM and a closed terminal in some: gone in time, in good
order, with the exit status that says which it was.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import Command, Forked, needs_fork
from hub_swarm import HubSwarm
from stalling_hub import SMALL, Material, stalling_hub
from waiting import until

from cocktail_cli.volunteer import base_folder, fetch_base
from scripts.swarms.tcp_link import Link
from transport import WantedFile
from transport.protocol import messages

pytestmark = [pytest.mark.slow, needs_fork]

SIGNALS = {"SIGINT": 0, "SIGTERM": 75, "SIGHUP": 0}  # -> exit status of a stay that it ends
WITHIN = 60.0
# what is in flight gets 20 s, and a peer that does not look 22: shorter here, to keep the test short
SHORT = (
    "import cocktail_cli.signals as signals, transport.peer.peer_link as link\n"
    "signals.LEAVE_WITHIN, link.LEAVE_S = min(signals.LEAVE_WITHIN, 8), min(link.LEAVE_S, 4)\n"
)


def slow(place: str, seconds: float) -> str:
    """Python that makes a function take its time, in C, where no flag is looked at."""
    module, _, name = place.rpartition(".")
    return (
        f"import time, {module} as module\nfast = module.{name}\n"
        f"def slow(*args, **options):\n    time.sleep({seconds})\n    return fast(*args, **options)\n"
        f"module.{name} = slow\n"
    )


@dataclass(frozen=True)
class Phase:
    """A phase in which a signal arrives, and how a peer is held in it."""

    name: str
    reached: Callable[[Command, HubSwarm], object]  # true once it is there
    settings: dict[str, Any]  # of the hub
    arguments: tuple[str, ...] = ("-y",)
    before: str = ""
    cached: bool = True  # the base model is in the cache
    left: bool = True  # the hub hears of it


def told(state: str) -> Callable[[Command, HubSwarm], object]:
    return lambda peer, _: any(str(event.get("state", "")).startswith(state) for event in peer.told)


def ready(peer: Command, hub: HubSwarm) -> object:
    return any(type(event).__name__ == "PeerReady" for event in hub.events)


def in_a_round(peer: Command, hub: HubSwarm) -> object:
    return any(type(event).__name__ == "RoundOpened" for event in hub.events)


def sent(peer: Command, hub: HubSwarm) -> object:
    """Its packet is at the hub, which does not commit it."""
    return hub.hub._state.rounds.phase.name == "CLOSED"


NEVER, ALONE = {"min_peers": 99, "eval": False}, {"min_peers": 1, "eval": False}
ALL_SIGNALS = ("at the question", "computing")  # phases that meet each; the others meet one, in turn
PHASES = (
    Phase("dialling", told("dialling"), NEVER, ("-y", "--wait", "10m"), left=False),
    Phase("at the question", lambda peer, _: "Join as" in peer.said, NEVER, (), left=False),
    Phase("fetching the model", told("fetching"), NEVER, ("-y", "--max-down", "20kbit"), cached=False),
    Phase(
        "loading the model", told("loading"), NEVER, before=slow("recipes.models.causal_lm.load_model", 60)
    ),
    Phase("catching up", told("loading"), NEVER | {"rounds": 40}, ("-y", "--max-down", "20kbit")),
    Phase("waiting for a round", ready, NEVER),
    Phase("computing", in_a_round, ALONE, before=slow("recipes.objectives.loss_sum", 1.5)),
    Phase("in an exchange", sent, ALONE),
    Phase("evaluating", in_a_round, {"min_peers": 1}, before=slow("recipes.training.trainer.evaluate", 60)),
    Phase("dialling a hub that is gone", ready, NEVER, left=False),
)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.prepare(tmp_path_factory.mktemp("base"))


@dataclass
class Stay:
    """One peer in one phase, and the signal it is to get."""

    phase: Phase
    signal: str
    hub: HubSwarm
    peer: Command
    proxy: Link
    asked: float = 0.0

    def be_there(self) -> None:
        end = time.monotonic() + WITHIN * 2
        while not self.phase.reached(self.peer, self.hub):
            assert self.peer.poll() is None, (
                self.phase.name,
                self.peer.status,
                self.peer.said,
                self.peer.told,
            )
            assert time.monotonic() < end, (self.phase.name, self.peer.told, self.hub.events)
            time.sleep(0.05)

    def lose_the_hub(self) -> None:
        if self.phase.name.endswith("gone"):
            self.proxy.close()

    def notice(self) -> None:
        if self.phase.name.endswith("gone"):
            self.peer.until("warning")

    def check(self) -> None:
        status = self.peer.wait(WITHIN)
        name = f"{self.phase.name}, {self.signal}"

        assert status == SIGNALS[self.signal], (name, self.peer.told, self.peer.said)
        assert "Traceback" not in self.peer.said, name
        if self.phase.left:
            until(lambda: self.hub.left("ann"), 5.0)
            assert self.hub.left("ann")[0].startswith("left"), name
            assert self.peer.told[-1]["event"] == "left", "nobody is gone without a last line"


def test_a_peer_leaves_in_every_phase_and_on_any_signal(
    forked: Forked, material: Material, tmp_path: Path
) -> None:
    cache(material)
    with ExitStack() as stack:
        stays = [
            begin(stack, forked, material, phase, name, tmp_path / f"{number}-{name}")
            for number, phase in enumerate(PHASES)
            for turn, name in enumerate(SIGNALS)
            if phase.name in ALL_SIGNALS or number % len(SIGNALS) == turn
        ]
        for stay in stays:
            stay.be_there()
        for stay in stays:
            stay.lose_the_hub()
        for stay in stays:
            stay.notice()
        for stay in stays:
            stay.peer.send(getattr(signal, stay.signal))
        for stay in stays:
            stay.check()


def begin(
    stack: ExitStack, forked: Forked, material: Material, phase: Phase, name: str, folder: Path
) -> Stay:
    hub = stack.enter_context(stalling_hub(material, folder / "ledger", **phase.settings))
    proxy = Link(hub.hub.port)
    stack.callback(proxy.close)
    url = hub.url.__class__(hub.url.key, hub.url.token, "127.0.0.1", proxy.port, hub.url.run)
    if phase.name == "dialling":
        proxy.close()
    (folder / "url").write_text(str(url) + "\n")
    terminal = "" if "-y" in phase.arguments else terminal_of(stack)
    home = None if phase.cached else folder / "home"
    arguments = ("join", "@url", "--json", "--device", "cpu", "--name", "ann", *phase.arguments)
    peer = forked.start(folder, *arguments, before=SHORT + phase.before, terminal=terminal, home=home)
    return Stay(phase, name, hub, peer, proxy)


def terminal_of(stack: ExitStack) -> str:
    """A terminal that nobody types on."""
    import pty

    ours, theirs = pty.openpty()
    stack.callback(os.close, ours)
    stack.callback(os.close, theirs)
    return os.ttyname(theirs)


def cache(material: Material) -> None:
    """The base model is in the cache of this machine, as after an earlier stay."""
    files = [messages.File(file.name, file.size, file.sha256) for file in material.base.files]

    def copy(wanted: Sequence[WantedFile]) -> None:
        for file in wanted:
            file.path.write_bytes((material.base.folder / file.path.name).read_bytes())

    fetch_base(files, base_folder(files), copy)


@pytest.mark.parametrize(
    ("second", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_the_second_signal_ends_a_peer_at_once(
    forked: Forked, material: Material, tmp_path: Path, second: int, status: int
) -> None:
    """The first comes in the middle of an exchange, which has 20 s to end."""
    cache(material)
    with stalling_hub(material, tmp_path / "ledger", **ALONE) as hub:
        (tmp_path / "url").write_text(f"{hub.url}\n")
        peer = forked.start(tmp_path, "join", "@url", "-y", "--json", "--device", "cpu")
        until(lambda: sent(peer, hub), WITHIN * 2)
        peer.send(signal.SIGINT)
        time.sleep(1.0)
        assert peer.poll() is None, "it minds the exchange in flight"
        peer.send(second)

        assert peer.wait(5.0) == status


LAUNCH = (
    "launch",
    "smoke",
    "--json",
    "--no-train",
    "--port",
    "0",
    "--bind",
    "127.0.0.1",
    "-o",
    "out",
    *SMALL,
)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_launch_that_has_trained_nothing_pauses(forked: Forked, tmp_path: Path, name: str) -> None:
    """While it prepares there is nothing to end in good order; then it tells whoever is there."""
    signum = getattr(signal, name)
    early = forked.start(tmp_path / "early", *LAUNCH, before=slow("recipes.data.corpus.build_corpus", 60))
    early.until("progressed", state="reading the data")
    early.send(signum)
    launch = forked.start(tmp_path / "late", *LAUNCH)
    launch.until("run_started")
    launch.send(signum)

    assert early.wait(WITHIN) == (130 if name == "SIGINT" else -signum)
    assert launch.wait(WITHIN) == (75 if name == "SIGTERM" else 0)
    assert "run_paused" in [event["event"] for event in launch.told[-2:]]
    assert "Traceback" not in early.said + launch.said


def launch_with_a_slow_peer(forked: Forked, folder: Path, seconds: float) -> tuple[Command, Command]:
    """Start a launch, and a peer that takes so many seconds for a micro-batch."""
    launch = forked.start(folder / "run", *LAUNCH)
    (folder / "ann").mkdir()
    (folder / "ann" / "url").write_text(launch.until("run_started")["url"] + "\n")
    slowly = slow("recipes.objectives.loss_sum", seconds)
    return launch, forked.start(folder / "ann", "join", "@url", "-y", "--json", before=slowly)


def test_a_second_ctrl_c_ends_a_run_with_its_model(
    forked: Forked, material: Material, tmp_path: Path
) -> None:
    launch, _ = launch_with_a_slow_peer(forked, tmp_path, 1.0)
    launch.until("step")
    launch.send(signal.SIGINT)
    launch.until("progressed", state="pausing (Ctrl-C): finishing the exchange in flight")
    launch.send(signal.SIGINT)

    assert launch.wait(WITHIN) == 0
    assert launch.told[-1]["event"] == "run_finished"
    assert launch.told[-1]["reason"] == "stopped by its host (Ctrl-C)"
    assert launch.told[-1]["eval_loss"] is None, "none was measured of this model"


def test_the_third_ctrl_c_ends_a_launch_at_once_and_it_can_be_resumed(
    forked: Forked, material: Material, tmp_path: Path
) -> None:
    launch, peer = launch_with_a_slow_peer(forked, tmp_path, 60)
    until(lambda: told("caught up")(peer, None), WITHIN * 2)  # type: ignore[arg-type]
    time.sleep(1.0)
    launch.send(signal.SIGINT)
    launch.until("progressed", state="pausing (Ctrl-C): finishing the exchange in flight")
    launch.send(signal.SIGINT)
    launch.until("progressed", state="ending (Ctrl-C): finishing the exchange in flight")
    launch.send(signal.SIGINT)

    assert launch.wait(8.0) == 130
    forked.start(tmp_path / "run", "resume", "out", "--json").until("run_started")
