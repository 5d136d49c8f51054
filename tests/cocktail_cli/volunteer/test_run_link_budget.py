import time

import pytest
from msgspec.structs import replace

from cocktail_cli.assembly import PeerExtension
from cocktail_cli.volunteer.run_link import RunBounds, RunLink
from recipes.config import load_recipe
from recipes.training import Delivery
from transport.peer import StopRequest
from transport.protocol import messages
from transport.transfer import BandwidthBudget
from transport.transfer.bandwidth_budget import AIM, SHARE

SIZE = 10**6


class Line:
    """A PeerLink on which a packet takes a while."""

    name = "ann"

    def __init__(self, spans: int, rungs: tuple[int, ...] = (0, 0, 0)) -> None:
        self.leave_requested, self.upload_s = StopRequest(), 0.0
        self.rounds = [
            messages.Round(n, n, 9, ["ann"], 4, True, spans=spans, rung=rung) for n, rung in enumerate(rungs)
        ]
        self.reports: list[messages.Report] = []
        self.leases_first = list[bool]().append

    def next_round(self) -> messages.Round:
        return self.rounds.pop(0)

    def fetch(self, name: str, most: int) -> bytes:
        time.sleep(0.01)
        return bytes(SIZE)

    def exchange(self, round: int, packet: bytes, report: messages.Report) -> messages.Committed:
        self.reports.append(report)
        self.upload_s = 2.0
        return messages.Committed(round, SIZE, "", ["ann"])


class Listener(PeerExtension):
    """Notes what a link calls."""

    name = "toy"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.times: list[float] = []
        self.uploads: list[float] = []  # seconds

    def took_round(self, round: messages.Round, asked: float, now: float) -> None:
        self.note("round", asked, now)

    def fetched(self, kind: str, started: float, now: float) -> None:
        self.note(kind, started, now)

    def report(self, delivery: Delivery, now: float) -> bytes:
        self.note("report", now)
        return b"" if delivery.round else b"a body"

    def exchanged(self, uploaded: float, now: float) -> None:
        self.uploads.append(round(uploaded - self.times[-1], 6))
        self.note("exchanged", now)

    def committed(self, message: messages.Committed) -> None:
        self.note(f"committed {message.round}")

    def note(self, call: str, *times: float) -> None:
        self.calls.append(call)
        self.times += times


def run_link(
    line: Line, staleness: int = 1, *extensions: PeerExtension, auto: tuple[str, ...] = ()
) -> RunLink:
    run = RunLink(line, None, extensions)  # type: ignore[arg-type]
    recipe = load_recipe("smoke", [f"staleness={staleness}", f"auto={[*auto]}"])
    run.knows(RunBounds(recipe, 50_000, 321))
    return run


@pytest.mark.parametrize("spans", [1, 4])
def test_the_bandwidth_budget_reaches_what_the_line_carries_during_compute(spans: int) -> None:
    line = Line(spans)
    run = run_link(line)
    for round in range(3):
        run.next_round()
        run.exchange(bytes(SIZE), Delivery(round, 0, [], 0.0, 0, compute_s=10.0, wait_s=0.0))
        run.fetch("lease/0")
        run.fetch(f"packet/{round}")
    a_round = 10.0 / spans

    assert run.fits == pytest.approx(run.budget.share * a_round * SIZE / 2.0, rel=0.01)
    assert line.reports[0].fits == 0, "nothing has come down yet"
    assert line.reports[-1].fits > SHARE * a_round * SIZE / 0.1


def test_where_the_run_chooses_its_local_steps_a_peer_reports_how_many_its_line_needs() -> None:
    """`compute_s` is of the round before: the first here has a step, the others have four, of 2.5 s each. The
    recipe's own packet is half of what is sent."""
    line = Line(1, rungs=(0, 2, 2, 2, 2))
    run = run_link(line, 1, auto=("local_steps",))
    for round, compute_s in enumerate((0.0, 2.5, 10.0, 10.0, 10.0)):
        run.next_round()
        said = Delivery(round, 0, [], 0.0, 0, compute_s, wait_s=0.0, usual=SIZE // 2)
        run.exchange(bytes(SIZE), said)
        run.fetch(f"packet/{round}")
    fixed = run_link(Line(1))
    fixed.next_round()
    fixed.exchange(bytes(SIZE), said)

    assert [report.needs for report in line.reports[:1]] == [0], "nothing was measured yet"
    assert line.reports[-1].needs == pytest.approx(1.0 / 2.5 / AIM, rel=0.1)
    assert run.fits == pytest.approx(run.budget.share * 10.0 * SIZE / 2.0, rel=0.01)
    assert fixed.link.reports[0].needs == 0  # type: ignore[attr-defined]


def test_the_bandwidth_budget_shrinks_where_a_round_ended_late() -> None:
    run = run_link(Line(1))
    run.next_round()
    run.exchange(bytes(SIZE), Delivery(0, 0, [], 0.0, 0, compute_s=0.005, wait_s=0.0))
    assert run.budget.share == SHARE
    run.fetch("packet/0")

    assert run.budget.share < SHARE


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Waiting(Line):
    """A line on which an update of 1 s waits for that of another peer, which then takes 3 s."""

    def __init__(self, clock: Clock, waited: float) -> None:
        super().__init__(1)
        self.clock, self.waited = clock, waited

    def exchange(self, round: int, packet: bytes, report: messages.Report) -> messages.Committed:
        committed = super().exchange(round, packet, report)
        self.clock.sleep(4.0)
        return replace(committed, waited=self.waited)

    def fetch(self, name: str, most: int) -> bytes:
        self.clock.sleep(1.0)
        return bytes(SIZE)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_peer_that_waits_for_others_sends_no_less_for_it(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round's compute takes 3 s, and all of the exchange 5; without the waiting it takes 2."""

    def share(waited: float) -> float:
        clock = Clock()
        monkeypatch.setattr("cocktail_cli.volunteer.run_link.time", clock)
        run = run_link(Waiting(clock, waited), staleness)
        run.next_round()
        run.exchange(bytes(SIZE), Delivery(0, 0, [], 0.0, 0, compute_s=3.0, wait_s=0.0))
        run.fetch("packet/0")
        return run.budget.share

    assert share(waited=0.0) < share(waited=3.0) == BandwidthBudget().opened(1, staleness).share


def test_an_extension_hears_of_each_step_of_a_round_in_its_order() -> None:
    line, listener = Line(1), Listener()
    run = run_link(line, 1, listener)
    for round in range(2):
        run.next_round()
        run.exchange(bytes(SIZE), Delivery(round, 0, [], 0.0, 0, compute_s=1.0, wait_s=0.0))
        run.fetch(f"lease/{round}")
        run.fetch(f"packet/{round}")

    a_round = ["round", "report", "exchanged", "committed {}", "lease", "packet"]
    assert listener.calls == [call.format(round) for round in range(2) for call in a_round]
    assert listener.times == sorted(listener.times)
    assert listener.uploads == [2.0, 2.0]
    assert [report.extra for report in line.reports] == [{"toy": b"a body"}, {}]
