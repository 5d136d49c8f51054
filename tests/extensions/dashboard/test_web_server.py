"""The page over HTTP: who is shown what, and what nobody is shown."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from a_run import ARun, a_run
from starlette.testclient import TestClient

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.dashboard.report_page import Document, page_of
from cocktail_cli.extensions.dashboard.run_history import RunFolderReader, RunHistory
from cocktail_cli.extensions.dashboard.web_server import HEADERS, PARTS, PORT, application, listen, read_part

KEY = "the-hosts-key"
LINE = "cocktail join cocktail://key.token@203.0.113.7:29400/amber-otter-42"
HERE = ("127.0.0.1", 50000)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with a_run(tmp_path / "out") as run:
        run.join("ann", 5.0)
        run.commit("ann")
        yield run


def pages(reader: RunFolderReader) -> Callable[[], Document]:
    return lambda: page_of([reader.look()])


def open_page(run: ARun, client: tuple[str, int] = HERE) -> TestClient:
    app = application(pages(run.reader()), KEY, lambda: LINE, again=0.0)
    return TestClient(app, base_url="http://127.0.0.1:29480", client=client)


def test_who_looks_gets_the_run_and_not_the_line_to_join_it(run: ARun) -> None:
    page = open_page(run)
    got = [page.get(path).text for path in ("/run.json", "/", *(f"/{name}" for name in PARTS))]

    assert "amber-otter-42 is running, step 1 of 20" in got[0]
    keys = run.record.keys
    for secret in (KEY, LINE, "cocktail://", keys["token"], keys["stop"], keys["secret"], str(run.folder)):
        assert not any(secret in text for text in got)


def test_of_a_run_that_nobody_can_join_there_is_no_line_and_no_error(run: ARun) -> None:
    app = application(pages(run.reader()), KEY, lambda: "", again=0.0)
    page = TestClient(app, base_url="http://127.0.0.1:29480", client=HERE)

    assert page.get("/join", headers={"Authorization": f"Bearer {KEY}"}).status_code == 204


def test_the_line_is_for_the_key_and_for_this_machine(run: ARun) -> None:
    def asked(key: str, client: tuple[str, int]) -> tuple[int, bool]:
        shown = {"Authorization": f"Bearer {key}".encode()}
        got = open_page(run, client).get("/join", headers=shown)
        return got.status_code, got.text == LINE

    assert asked(KEY, HERE) == (200, True)
    assert asked(KEY, ("::1", 50000)) == (200, True)
    assert asked(KEY, ("203.0.113.9", 50000)) == (403, False)
    assert asked("", HERE) == asked("another", HERE) == asked("%C3%BC", HERE) == (403, False)
    assert open_page(run).get("/join").status_code == 403
    assert open_page(run).get(f"/join?key={KEY}").status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:29480", "localhost.evil", "", "[::1"]
)
def test_a_strangers_name_for_this_machine_is_refused(run: ARun, host: str) -> None:
    """DNS rebinding: a browser at evil.example, which resolves to 127.0.0.1 by now, says so in Host."""
    got = open_page(run).get("/", headers={"Host": host})

    assert (got.status_code, "otter" in got.text) == (421, False)


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:29480", "192.168.1.5:29480"])
def test_an_address_is_no_strangers_name(run: ARun, host: str) -> None:
    assert open_page(run).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/run.json", "/join"])
def test_nothing_can_be_changed_through_it(run: ARun, method: str, path: str) -> None:
    assert open_page(run).request(method, path, content=b"x").status_code == 405


def test_every_answer_says_what_a_browser_may_do_with_it(run: ARun) -> None:
    page = open_page(run)
    answers = [page.get(path) for path in ("/", "/run.json", "/join", "/nothing", "/page.js")]
    answers += [page.post("/"), page.get("/", headers={"Host": "evil.example"})]

    for answer in answers:
        assert HEADERS.items() <= {name: answer.headers.get(name.lower()) for name in HEADERS}.items(), (
            answer.status_code
        )
        assert "access-control-allow-origin" not in answer.headers


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

    again = page.get("/run.json", headers={"If-None-Match": tag})
    run.commit("ann")
    later = page.get("/run.json", headers={"If-None-Match": tag})

    assert (again.status_code, again.content) == (304, b"")
    assert (later.status_code, "step 2 of 20" in later.text) == (200, True)


def test_however_many_watch_the_run_is_looked_at_once(run: ARun) -> None:
    class Counting(RunFolderReader):
        looks = 0

        def look(self) -> RunHistory:
            self.looks += 1
            return super().look()

    source = Counting(run.record, lambda _: True)
    page = TestClient(application(pages(source), KEY, lambda: LINE, again=60.0), base_url="http://127.0.0.1")

    assert {page.get("/run.json").status_code for _ in range(20)} == {200}
    assert source.looks == 1


def test_a_run_that_cannot_be_read_is_told_without_its_path_and_comes_back(run: ARun) -> None:
    page = open_page(run)
    database = run.folder / "ledger" / "ledger.db"
    away = database.rename(run.folder / "elsewhere")
    gone = page.get("/run.json")
    away.rename(database)

    assert (gone.status_code, str(run.folder) in gone.text) == (503, False)
    assert page.get("/run.json").status_code == 200


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
