"""The report: one file that says what became of a run, to anybody, and gives nothing away."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from a_run import ARun, a_run
from in_this_process import Run

from cocktail_cli.extensions.dashboard import command
from cocktail_cli.extensions.dashboard.report_page import page_of, ratio_of, words
from cocktail_cli.extensions.dashboard.run_history import Round, RunHistory
from cocktail_cli.ui import events


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with a_run(tmp_path / "out") as run:
        run.join("ann", 5.0)
        run.join("bob", 5.0, hardware="A10G")
        run.evaluate(6.0)
        run.commit("ann", "bob", loss=5.0)
        run.commit("ann", "bob", late=("bob",), loss=4.0)
        run.evaluate(4.25)
        run.leave("bob", 25.0, "preempted")
        run.finish(30.0)
        yield run


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ARun]:
    with a_run(tmp_path / "other", name="rusty-heron-7", overrides=["learning_rate=1e-3"]) as run:
        run.commit("ann", "bob", loss=3.5)
        run.commit("ann", "bob", loss=3.5)
        yield run


def as_html(told: RunHistory) -> str:
    return command.as_html(page_of([told]))


def as_text(told: RunHistory) -> list[str]:
    return [*command.as_text(page_of([told]))]


def run_in(text: str) -> str:
    """The JSON of a report's run."""
    (found,) = re.findall(r'<script id="run" type="application/json">(.*?)</script>', text, re.DOTALL)
    return found


def test_the_report_is_written_beside_the_run_and_its_path_printed(cocktail: Run, run: ARun) -> None:
    said = cocktail("report", "amber-otter-42", "--json")
    told = json.loads(said.out)

    path = run.folder / "report.html"
    assert (said.exit, told) == (0, {"v": 1, "report": str(path), "bytes": path.stat().st_size})
    assert cocktail("report", str(run.folder), "-o", "mine.html", "-q").out.endswith("mine.html\n")
    assert Path("mine.html").read_bytes() == path.read_bytes()


def test_the_report_shows_recipe_data_and_peers(run: ARun) -> None:
    text = run_in(as_html(run.reader().look()))

    for said in (
        "is finished",
        "fell from 5.0000 to 4.0000",
        "fell from 6.0000 to 4.2500",
        "tiny-gpt-neox",  # the recipe
        run.record.recipe_hash,
        "cocktail-sgd 0.1.0",  # versions
        "A10G",  # contributors
        "preempted",
        "cocktail launch smoke.yaml --peers 2",  # how to do it again
        run.record.base_sha256,
        run.record.data_sha256,
    ):
        assert said in text, said
    kinds = [kind for one in json.loads(text)["sections"] for kind, _ in one["blocks"]]
    assert (kinds.count("chart"), kinds.count("bars")) == (7, 1)


def test_the_report_loads_nothing_and_a_policy_allows_only_its_own_style_and_script(run: ARun) -> None:
    text = as_html(run.reader().look())

    assert re.findall(r"<link|<img| src=| href=| style=| on\w+=\"|url\(|@import", text) == []
    assert re.findall(r"<script.*?>", text) == ['<script id="run" type="application/json">', "<script>"]
    (style,), (script,) = (
        re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script")
    )
    of_style, of_script = (
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)
    )
    policy = f"default-src 'none'; style-src 'sha256-{of_style}'; script-src 'sha256-{of_script}'"
    assert text.index(policy) < text.index("<style>")


def test_the_report_contains_no_secret_and_no_path(run: ARun) -> None:
    told = run.reader().look()
    text = as_html(told) + "\n".join(as_text(told))

    keys = run.record.keys
    for secret in (keys["token"], keys["stop"], keys["secret"], "cocktail://", str(run.folder)):
        assert secret not in text


def test_the_report_escapes_peer_names(run: ARun) -> None:
    evil = "</script><script>alert(1)</script><!--"
    run.join(evil, 26.0, hardware="<img src=x onerror=alert(1)>")
    run.commit("ann", evil)
    text = as_html(run.reader().look())

    assert text.count("<script") == text.count("</script>") == 2
    assert "<!--" not in text
    assert "<img" not in text
    assert evil in str(json.loads(run_in(text)))


def test_a_text_report_goes_to_the_terminal_and_to_no_file(cocktail: Run, run: ARun) -> None:
    said = cocktail("report", "amber-otter-42", "--text")

    assert "2 peers took part, 0 are there now; 1 of 4 packets were late or refused." in said.out
    assert "best 4.2500 at step 2" in said.out
    assert "┤" in said.out  # the loss curve
    assert re.search(r"ann +RTX 3090 +66\.7% +8 +2 +0 +25\.0% +40\.0 kB +60\.0 kB", said.out)
    assert not (run.folder / "report.html").exists()


def test_the_report_says_that_the_hub_was_killed(cocktail: Run, tmp_path: Path) -> None:
    with a_run(tmp_path / "killed") as run:
        run.commit("ann")
        said = cocktail("report", str(run.folder), "--text")

    assert "has stopped: its hub is gone" in said.out


def test_two_runs_are_compared_in_a_file_of_their_own(cocktail: Run, run: ARun, other: ARun) -> None:
    said = cocktail("report", "amber-otter-42", "--with", "rusty-heron-7", "-q")
    path = run.folder / "comparison.html"
    text = path.read_text()

    assert (said.exit, said.out) == (0, f"{path}\n")
    assert not (run.folder / "report.html").exists()
    assert json.loads(run_in(text))["headline"] == "amber-otter-42 and rusty-heron-7, compared"


def test_a_comparison_is_printed_as_text(cocktail: Run, run: ARun, other: ARun) -> None:
    said = cocktail("report", "amber-otter-42", "--with", "rusty-heron-7", "--text")

    assert re.search(r"^loss +4\.0000 +3\.5000$", said.out, re.MULTILINE)
    assert re.search(r"^best +4\.2500 at 2 +-$", said.out, re.MULTILINE)
    assert re.search(r"^training\.learning_rate +0\.006 +0\.001$", said.out, re.MULTILINE)


def test_a_run_is_not_compared_with_itself(cocktail: Run, run: ARun) -> None:
    said = cocktail("report", "amber-otter-42", "--with", str(run.folder))

    assert (said.exit, "cannot be compared with itself" in said.err) == (2, True)


def test_an_unknown_run_is_exit_3(cocktail: Run) -> None:
    assert cocktail("report", "nobody-42").exit == 3


def test_a_run_without_committed_rounds_has_a_report_too(tmp_path: Path) -> None:
    with a_run(tmp_path / "young") as run:
        text = as_html(run.reader().look())

    assert "step 0 of 20" in text


def many_rounds(count: int) -> tuple[Round, ...]:
    peers = tuple(f"peer-{i}" for i in range(64))
    return tuple(
        Round(r, r + 1, 1000.0 + r, 1.0, 4.0 - r / count, peers, up=10**6, down=10**6, compute_s=60, wait_s=4)
        for r in range(count)
    )


def test_the_report_of_a_long_run_stays_small(run: ARun) -> None:
    short = run.reader().look()
    few, many = (RunHistory(short.about, "running", rounds=many_rounds(n)) for n in (500, 5_000))

    assert len(as_html(many)) < 1.1 * len(as_html(few)) < 120_000


def test_two_reports_of_an_unchanged_run_are_equal(run: ARun) -> None:
    assert as_html(run.reader().look()) == as_html(run.reader().look())


def test_the_report_separates_joiners_downloads_from_the_rounds_traffic(run: ARun) -> None:
    """Eve fetches the model meanwhile; Ann had, in the round that was her first."""
    before = ratio_of(run.reader().look())
    fetched = {"ann": 500_000, "eve": 10**9}
    step = events.Step(3, 20, 2, loss=3.0, peers=1, up_bytes={"ann": 20_000}, fetched_bytes=fetched)
    run.commit("ann", told=False)
    run.tell(replace(step, down_bytes=fetched | {"ann": 530_000}, rung="p 0.113", need=1.25), 30.0)

    after = run.reader().look()

    assert ratio_of(after) == before
    assert "To join they fetched another 1.0 GB" in " ".join(words(after))
    assert any(line.startswith("Rounds have p 0.113: an exchange") for line in words(after))


def test_a_peer_that_was_in_no_round_is_no_contributor(run: ARun) -> None:
    """The doctor, who had a look, or somebody who did not stay for long enough."""
    run.join("doctor", 26.0, hardware="doctor")
    run.leave("doctor", 27.0)

    told = run.reader().look()

    assert "2 peers took part" in " ".join(words(told))
    assert not any(line.startswith("doctor") for line in as_text(told))
    assert '"doctor"' not in json.dumps(page_of([told])["sections"])


def test_the_report_omits_unknown_values(run: ARun) -> None:
    told = RunHistory(run.reader().look().about, "running", rounds=(Round(0, 1, 9.0, 1.0, 4.0, ("ann",)),))

    said = " ".join(words(told))

    assert "sent" not in said
    assert "waited" not in said
