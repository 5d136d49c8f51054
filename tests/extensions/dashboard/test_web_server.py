"""The page over HTTP: who is shown what, and what nobody is shown."""

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from a_run import ARun, a_run

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.dashboard.run_history import RunFolderReader, RunHistory
from cocktail_cli.extensions.dashboard.web_server import PARTS, PORT, Answer, Page, listen, read_part

KEY = "the-hosts-key"
LINE = "cocktail join cocktail://key.token@203.0.113.7:29400/amber-otter-42"
HERE, ADDRESS = "127.0.0.1", "127.0.0.1:29480"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with a_run(tmp_path / "out") as run:
        run.join("ann", 5.0)
        run.commit("ann")
        yield run


def pages(reader: RunFolderReader) -> Callable[[], Sequence[RunHistory]]:
    return lambda: [reader.look()]


@dataclass
class Client:
    """Asks a page as a browser does."""

    page: Page
    address: str = HERE

    def get(self, target: str, method: str = "GET", **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.page.answer(method, target, {"host": ADDRESS} | named, self.address)


def open_page(run: ARun, address: str = HERE) -> Client:
    return Client(Page(pages(run.reader()), KEY, lambda: LINE, again=0.0), address)


def test_who_looks_gets_the_run_and_not_the_line_to_join_it(run: ARun) -> None:
    page = open_page(run)
    got = [page.get(path).text for path in ("/run.json", "/metrics", "/", *(f"/{name}" for name in PARTS))]

    assert "amber-otter-42 is running, step 1 of 20" in got[0]
    keys = run.record.keys
    for secret in (KEY, LINE, "cocktail://", keys["token"], keys["stop"], keys["secret"], str(run.folder)):
        assert not any(secret in text for text in got)


def test_of_a_run_that_nobody_can_join_there_is_no_line_and_no_error(run: ARun) -> None:
    page = Client(Page(pages(run.reader()), KEY, lambda: "", again=0.0))

    assert page.get("/join", authorization=f"Bearer {KEY}").status == 204


def test_the_line_is_for_the_key_and_for_this_machine(run: ARun) -> None:
    def asked(key: str, address: str) -> tuple[int, bool]:
        got = open_page(run, address).get("/join", authorization=f"Bearer {key}")
        return got.status, got.text == LINE

    assert asked(KEY, HERE) == (200, True)
    assert asked(KEY, "::1") == (200, True)
    assert asked(KEY, "203.0.113.9") == (403, False)
    assert asked("", HERE) == asked("another", HERE) == asked("ü", HERE) == (403, False)
    assert open_page(run).get("/join").status == 403
    assert open_page(run).get(f"/join?key={KEY}").status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:29480", "localhost.evil", "", "[::1"]
)
def test_a_strangers_name_for_this_machine_is_refused(run: ARun, host: str) -> None:
    """DNS rebinding: a browser at evil.example, which resolves to 127.0.0.1 by now, says so in Host."""
    got = open_page(run).get("/", host=host)

    assert (got.status, "otter" in got.text) == (421, False)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:29480", "192.168.1.5:29480"])
def test_an_address_is_no_strangers_name(run: ARun, host: str) -> None:
    assert open_page(run).get("/", host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/run.json", "/metrics", "/join"])
def test_nothing_can_be_changed_through_it(run: ARun, method: str, path: str) -> None:
    assert open_page(run).get(path, method).status == 405


def test_nothing_comes_from_elsewhere_and_nothing_stands_inline(run: ARun) -> None:
    """The policy default-src 'self' would block it: a page that needs it would be broken."""
    text = open_page(run).get("/").text
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)

    assert sorted(sources) == sorted(PARTS)
    assert re.findall(r"<style|<script(?! src)| style=| on\w+=", text) == []
    for name in PARTS.keys() - {"icon.svg"}:
        code = re.sub(r"/\*!.*?\*/", "", read_part(name))  # the address of uPlot in its first line
        unsafe = r"https?:|@import|url\(|innerHTML|outerHTML|insertAdjacent|\beval\(|import\(|Function\("
        assert re.findall(unsafe, code) == [], name


def test_who_has_the_newest_look_is_sent_nothing(run: ARun) -> None:
    page = open_page(run)
    tag = page.get("/run.json").headers["ETag"]

    again = page.get("/run.json", if_none_match=tag)
    run.commit("ann")
    later = page.get("/run.json", if_none_match=tag)

    assert (again.status, again.text) == (304, "")
    assert (later.status, "step 2 of 20" in later.text) == (200, True)


NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan)"
LABEL = r'\{run="(?:[^"\\\n]|\\[n"\\])*"\}'
# the grammar of OpenMetrics, as far as it is used: families one after the other, each with its samples
METRICS = (
    rf"(?:# TYPE (\w+) (?:gauge\n(?:\1{LABEL} {NUMBER}\n)*|counter\n(?:\1_total{LABEL} {NUMBER}\n)*))+# EOF\n"
)


def test_a_scraper_reads_the_figures_of_the_page(run: ARun) -> None:
    got = open_page(run).get("/metrics")
    lines = got.text.split("\n")
    samples = [line for line in lines if line and not line.startswith("#")]

    assert (got.status, got.kind) == (200, "application/openmetrics-text; version=1.0.0")
    assert re.fullmatch(METRICS, got.text)
    families = re.findall(r"# TYPE (\w+)", got.text)
    assert len(families) == len({*families})
    for sample in ("step", "steps", "loss", "tokens_total", "sent_bytes_total", "below_fp16", "running"):
        [line] = [line for line in samples if line.startswith(f"cocktail_{sample}{{")]
        family = sample.removesuffix("_total")
        kind = "counter" if sample != family else "gauge"
        assert f"# TYPE cocktail_{family} {kind}" in lines[: lines.index(line)]
    assert {
        'cocktail_step{run="amber-otter-42"} 1',
        'cocktail_sent_bytes_total{run="amber-otter-42"} 20000',
    } <= {*samples}


def test_however_many_watch_the_run_is_looked_at_once(run: ARun) -> None:
    class Counting(RunFolderReader):
        looks = 0

        def look(self) -> RunHistory:
            self.looks += 1
            return super().look()

    source = Counting(run.record, lambda _: True)
    page = Client(Page(pages(source), KEY, lambda: LINE, again=60.0))

    assert {page.get(f"/{path}").status for path in 10 * ["run.json", "metrics"]} == {200}
    assert source.looks == 1


def test_a_run_that_cannot_be_read_is_told_without_its_path_and_comes_back(run: ARun) -> None:
    page = open_page(run)
    database = run.folder / "ledger" / "ledger.db"
    away = database.rename(run.folder / "elsewhere")
    gone = page.get("/run.json")
    away.rename(database)

    assert (gone.status, str(run.folder) in gone.text) == (503, False)
    assert page.get("/run.json").status == 200


def test_a_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Failure, match=f"127.0.0.1:{port}") as refused:
            listen("127.0.0.1", port)

    assert refused.value.exit == 4


def test_without_a_port_a_free_one_is_found_where_the_usual_is_taken() -> None:
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        ports = {sock.getsockname()[1] for sock in (first, second)}

    assert len(ports) == 2
    assert first.family == second.family == socket.AF_INET
    assert PORT == 29480


def luminance(color: str) -> float:
    """Compute relative luminance as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(scheme: int) -> None:
    """WCAG 2 AA: 4.5 for text, 3 for what is drawn."""
    blocks = re.findall(r":root \{(.*?)\}", read_part("style.css"), re.DOTALL)
    colors = dict(re.findall(r"--(\w+): (#\w{6})", blocks[scheme]))
    wanted = {"ink": 4.5, "faint": 4.5, "a": 3.0, "b": 3.0, "c": 3.0, "d": 3.0, "alarm": 3.0}

    for name, least in wanted.items():
        for paper in ("paper", "box"):
            bright, dim = sorted((luminance(colors[name]), luminance(colors[paper])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= least, (name, paper)
