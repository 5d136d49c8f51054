"""The page and the report as a real browser shows them: live, by keyboard, on a phone, without a network."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from a_run import ARun, a_run
from browser import ENTER, TAB, Browser, browser, missing
from served_page import served_page

from cocktail_cli.extensions.dashboard.command import as_html
from cocktail_cli.extensions.dashboard.report_page import page_of
from cocktail_cli.extensions.dashboard.web_server import Page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
KEY, LINE = "the-hosts-key", "cocktail join cocktail://key.token@203.0.113.7:29400/amber-otter-42"


CANVASES = "return document.querySelectorAll('.chart canvas').length"
ASK_NOW = 'document.dispatchEvent(new Event("visibilitychange"))'  # not in two seconds


@dataclass
class Shown:
    run: ARun
    url: str
    page: ExitStack  # closing it ends the page


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    """A run of two peers and its page."""
    with a_run(tmp_path / "out") as run, ExitStack() as stack:
        run.join("ann", 5.0)
        run.join("bob", 5.0)
        run.evaluate(6.0)
        for number in range(5):
            run.commit("ann", "bob", late=("bob",) if number == 3 else (), loss=5.0 - number / 2)
        reader = run.reader()
        page = Page(lambda: [reader.look()], KEY, lambda: LINE, again=0.0)
        port = stack.enter_context(served_page(page))
        yield Shown(run, f"http://127.0.0.1:{port}/", stack)


def visit(chromium: Browser, url: str) -> None:
    """Open a page and wait until it has drawn the run."""
    chromium.open(url)
    chromium.wait("return document.querySelector('main section') !== null")


def test_nothing_is_asked_of_others_and_nothing_is_blocked(chromium: Browser, shown: Shown) -> None:
    chromium.complaints()
    visit(chromium, shown.url)
    asked = chromium.run('return performance.getEntriesByType("resource").map((one) => one.name)')

    assert asked
    assert [name for name in asked if not name.startswith(shown.url)] == []
    assert chromium.complaints() == []
    assert chromium.run(CANVASES) == 7


def test_a_new_round_appears_and_what_was_opened_and_focused_stays(chromium: Browser, shown: Shown) -> None:
    visit(chromium, shown.url)
    chromium.run(
        "document.querySelector('#loss summary').click(); document.querySelector('#loss summary').focus()"
    )
    shown.run.commit("ann", "bob", loss=2.125)

    chromium.wait("return document.querySelector('#summary').textContent.includes('6 / 20')")

    assert "2.125" in chromium.run("return document.querySelector('#loss details tbody').textContent")
    assert chromium.run("return document.querySelector('#loss details').open")
    assert chromium.run("return document.activeElement === document.querySelector('#loss summary')")
    assert "step 6 of 20" in chromium.run("return document.title")


def test_the_join_line_is_shown_for_the_key_and_copied(chromium: Browser, shown: Shown) -> None:
    chromium.devtools(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    visit(chromium, f"{shown.url}#key={KEY}")
    chromium.wait("return !document.querySelector('#join').hidden")
    chromium.click("#copy")
    chromium.wait("return document.querySelector('#copied').textContent === 'Copied.'")

    assert chromium.run("return navigator.clipboard.readText()") == LINE
    assert chromium.run("return location.href") == shown.url  # to be passed on, without the key


def test_without_the_key_there_is_no_line_in_the_page(chromium: Browser, shown: Shown) -> None:
    visit(chromium, f"{shown.url}#key=another")
    shown.run.commit("ann", "bob")
    chromium.run(ASK_NOW)
    chromium.wait("return document.querySelector('#summary').textContent.includes('6 / 20')")

    assert not chromium.run("return document.querySelector('#join').checkVisibility()")
    assert "cocktail://" not in chromium.run("return document.documentElement.outerHTML")


def test_all_of_it_is_reached_and_opened_by_keyboard(chromium: Browser, shown: Shown) -> None:
    visit(chromium, shown.url)
    reached = set()
    for _ in range(18):
        chromium.press(TAB)
        reached.add(chromium.run("return document.activeElement.closest('section')?.id"))
        outline = chromium.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid" or chromium.run("return document.activeElement === document.body")

    assert {"loss", "bytes", "waiting", "peers", "contributors", "recipe"} <= reached
    chromium.run("document.querySelector('#loss summary').focus()")
    chromium.press(ENTER)
    assert chromium.run("return document.querySelector('#loss table').checkVisibility()")


def test_a_screen_reader_is_told_what_each_chart_shows(chromium: Browser, shown: Shown) -> None:
    visit(chromium, shown.url)
    nodes = chromium.devtools("Accessibility.getFullAXTree")["nodes"]

    def names(role: str) -> list[str]:
        return [
            n["name"]["value"] for n in nodes if n.get("role", {}).get("value") == role and not n["ignored"]
        ]

    charts = names("image") + names("img")
    assert len(charts) == 8
    assert "Loss by step: training fell from 5 to 3; held-out is 6" in charts
    assert {"Loss", "Waiting", "Bytes", "Peers", "Recipe"} <= set(names("heading"))
    assert names("main") == [""]
    assert {"peer", "hardware", "samples"} <= set(names("columnheader"))
    assert {"ann", "bob"} <= set(names("rowheader"))


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (390, "dark"), (1280, "light")])
def test_it_fits_every_width_in_light_and_dark(
    chromium: Browser, shown: Shown, width: int, scheme: str
) -> None:
    chromium.look_like(width, 800, scheme)
    visit(chromium, shown.url)
    paper = chromium.run("return getComputedStyle(document.body).backgroundColor")

    assert chromium.run("return document.documentElement.scrollWidth") <= width
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    chart = "document.querySelector('#loss canvas').getBoundingClientRect().width"
    assert chromium.run(f"return {chart}") > min(width - 60, 400)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_the_loss_is_on_the_first_screen(chromium: Browser, shown: Shown, width: int, height: int) -> None:
    chromium.look_like(width, height, "light")
    visit(chromium, f"{shown.url}#key={KEY}")
    chromium.wait("return !document.querySelector('#join').hidden")

    bottom = "document.querySelector('#loss canvas').getBoundingClientRect().bottom"
    assert chromium.run(f"return {bottom}") < height
    below = "document.querySelector('#in-words').getBoundingClientRect().top"
    assert chromium.run(f"return {below}") > height


def test_a_page_whose_program_ended_says_so_and_keeps_what_it_knew(chromium: Browser, shown: Shown) -> None:
    visit(chromium, shown.url)
    shown.page.close()

    chromium.wait(f"{ASK_NOW}; return !document.querySelector('#notice').hidden")

    assert "has ended" in chromium.run("return document.querySelector('#notice').textContent")
    assert "5 / 20" in chromium.run("return document.querySelector('#summary').textContent")


def test_the_report_is_the_same_page_from_a_file_without_a_network(
    chromium: Browser, shown: Shown, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(as_html(page_of([shown.run.reader().look()])))
    chromium.complaints()
    visit(chromium, shown.url)
    main = "return document.querySelector('main').innerHTML"
    of_page = chromium.run(main)
    visit(chromium, path.as_uri())

    assert chromium.run(main) == of_page
    assert chromium.complaints() == []
    assert chromium.run('return performance.getEntriesByType("resource").length') == 0


def test_what_a_stranger_writes_is_shown_and_never_run(
    chromium: Browser, shown: Shown, tmp_path: Path
) -> None:
    evil = "</script><img src=x onerror=\"document.title='evil'\"><!--"
    shown.run.join(evil, 26.0, hardware=evil)
    shown.run.commit("ann", evil)
    path = tmp_path / "report.html"
    path.write_text(as_html(page_of([shown.run.reader().look()])))
    chromium.complaints()

    for url in (shown.url, path.as_uri()):
        visit(chromium, url)
        cells = (
            "return [...document.querySelectorAll('#contributors tbody th')].map((one) => one.textContent)"
        )
        assert evil in chromium.run(cells)
        assert chromium.run("return document.querySelectorAll('img, main script').length") == 0
    assert chromium.complaints() == []
    assert "step 6 of 20" in chromium.run("return document.title")
