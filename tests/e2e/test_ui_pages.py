"""The dashboard in a real browser, against the real system."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from tests.e2e.system import System, wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = ("cluster", "requests", "cache", "targets", "chat", "plan")
LONG = "The tide comes in and the tide goes out. " * 40
LIMIT_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium: apt-get install chromium"
    ),
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    state = tmp_path_factory.mktemp("ui") / "state"
    with System(state, "--ssd", "256MiB") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        # no sandbox: tests run as root in containers
        started = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield started
        started.close()


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where screenshots are kept: ``TEST_ARTEFACTS``, or with the test's files."""
    folder = Path(os.environ.get("TEST_ARTEFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Visit:
    """A page that remembers what went wrong on it and what it asked for."""

    def __init__(self, browser: Browser, url: str, width: int, theme: Any) -> None:
        self.url = url
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.faults: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda m: self._heard(m.type, m.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url))

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(text)

    def open(self, name: str) -> Page:
        self.page.goto(f"{self.url}/ui/#/{name}")
        self.page.wait_for_selector("#status:has-text('live')")
        return self.page


@pytest.fixture
def visit(system: System, browser: Browser) -> Iterator[Visit]:
    made = Visit(browser, system.url, 1280, "light")
    yield made
    made.context.close()


def serious_faults(page: Page) -> dict[str, list[str]]:
    """What axe-core finds serious or worse: the rule, and where it is broken."""
    axe: Any = Axe()  # the package has no types
    return {
        each["id"]: [node["html"][:200] for node in each["nodes"]]
        for each in axe.run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
    }


def say(page: Page, words: str, answers: int) -> None:
    page.fill("#chat-text", words)
    page.fill("#chat-most", "8")
    page.click("#main button[type=submit]")
    page.wait_for_selector(f"#turns section:nth-of-type({2 * answers}) .facts a")


def test_a_second_turn_shows_its_reuse_and_why_it_went_where_it_went(
    system: System, visit: Visit, shots: Path
) -> None:
    page = visit.open("chat")
    say(page, LONG, 1)
    say(page, "And at night?", 2)
    facts = page.locator("#turns section:last-of-type .facts")
    assert "from the cache" in facts.inner_text()
    request = facts.locator("a").get_attribute("href") or ""
    page.screenshot(path=shots / "chat.png", full_page=True)
    page.click("#turns section:last-of-type .facts a")
    page.wait_for_selector("#reason")
    # the outcome arrives a moment after the answer
    page.wait_for_selector("text=what came")
    name = request.rpartition("/")[2]
    told = system.http.get(f"/admin/ui/requests/{name}").json()
    assert page.inner_text("#reason") == told["explanation"]["reason"]
    view = told["detail"]["view"]
    assert view["cached_tokens"] >= 256
    shown = page.inner_text("#request")
    assert f"{view['cached_tokens']} (" in shown
    assert "finished" in shown
    sources = {origin["source"] for origin in told["detail"]["origins"]}
    assert sources == {"host", "computed"}
    spans = {span["name"] for span in told["detail"]["spans"]}
    assert {"placement", "first step", "tokens"} <= spans
    assert page.locator("svg rect.fill-host").count() >= 1
    page.screenshot(path=shots / "request.png", full_page=True)
    assert visit.faults == []


def test_the_pages_show_what_the_api_says(
    system: System, visit: Visit, shots: Path
) -> None:
    # twice, so that there is a prefix which was reused
    for _ in range(2):
        system.chat([{"role": "user", "content": LONG}], 4)
    page = visit.open("cluster")
    page.wait_for_selector("#nodes td")
    names = page.locator("#nodes tbody tr td:first-child").all_inner_texts()
    assert names == sorted(system.beats())
    page.wait_for_selector("#happenings :text('joined')")

    page = visit.open("requests")
    page.wait_for_selector("#request-list td")
    listed = page.locator("#request-list a").all_inner_texts()
    known = system.http.get("/admin/ui/requests").json()
    assert listed == [view["request"] for view in known]
    page.fill("#request-text", "no such name")
    page.wait_for_selector("#request-list .empty")

    page = visit.open("cache")
    page.wait_for_selector("#tree td")
    chains = system.http.get("/admin/ui/cache").json()["chains"]
    assert page.locator("#tree tbody tr").count() == len(chains)
    page.wait_for_selector("#copies :text('store-0')")
    page.wait_for_selector("#main figure canvas")
    page.wait_for_selector("#tenants td:text('default')")

    page = visit.open("targets")
    page.wait_for_selector("#verdicts :text('placed')")
    page.wait_for_selector("#pairs circle")
    page.wait_for_selector("#main figure canvas")

    assert visit.faults == []
    assert all(url.startswith(system.url) for url in visit.asked)
    assert any("/admin/ui/news" in url for url in visit.asked)


def test_reports_are_opened_in_a_sandbox(visit: Visit, shots: Path) -> None:
    page = visit.open("plan")
    page.wait_for_selector("#plan-log:has-text('keeps no workload log')")
    assert page.is_disabled("form button[type=submit]")
    report = shots / "report.html"
    report.write_text(
        "<!doctype html><title>r</title><style>h1 { color: rgb(1, 2, 3) }</style>"
        "<h1>A report</h1><script>document.querySelector('h1').textContent = 'x'</script>"
    )
    page.set_input_files("#plan-file", report)
    title = page.frame_locator("#report iframe").locator("h1")
    title.wait_for()
    assert title.evaluate("(each) => getComputedStyle(each).color") == "rgb(1, 2, 3)"
    assert title.inner_text() == "A report"
    figures = shots / "sim.json"
    figures.write_text('[{"system": "best", "goodput": 0.9, "samples": []}]')
    page.set_input_files("#plan-file", figures)
    page.wait_for_selector("#report td:text('0.900')")
    assert page.locator("#report th").all_inner_texts() == ["Figure", "best"]
    assert visit.faults == []


def test_links_are_drawn_with_what_moves_on_them(
    system: System, visit: Visit, shots: Path
) -> None:
    page = visit.open("cluster")

    def drawn() -> bool:
        system.chat([{"role": "user", "content": LONG}], 4)
        return page.locator("#links svg path").count() >= 2

    wait_for(drawn, 60, "a link is drawn")
    words = page.locator("#links svg").get_attribute("aria-label") or ""
    assert "takes" in words
    assert "/s for reuse" in words
    page.screenshot(path=shots / "links.png", full_page=True)
    assert visit.faults == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_each_page_can_be_read_by_all(
    system: System, browser: Browser, shots: Path, width: int, theme: str
) -> None:
    visit = Visit(browser, system.url, width, theme)
    try:
        for name in PAGES:
            page = visit.open(name)
            page.wait_for_timeout(1500)  # charts have their second point
            page.screenshot(path=shots / f"{name}-{width}.png", full_page=True)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is wider than the screen"
            assert serious_faults(page) == {}, name
        assert visit.faults == []
    finally:
        visit.context.close()


def test_a_bad_question_of_a_page_is_named(system: System) -> None:
    for path, param in (
        ("requests?limit=9999", "limit"),
        ("cache?minutes=x", "minutes"),
    ):
        reply = system.http.get(f"/admin/ui/{path}")
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: Input should be")
    gone = system.http.get("/admin/ui/requests/no-such-request")
    assert gone.status_code == 404
    assert "no-such-request" in gone.json()["error"]["message"]


def test_it_is_usable_by_keyboard_and_keeps_the_theme(visit: Visit) -> None:
    page = visit.open("cluster")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("nav a").first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("nav a[aria-current=page]:has-text('Requests')")
    assert page.evaluate("document.activeElement.id") == "main"
    page.click("#theme")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_killed_worker_is_seen_to_go_and_to_come_back(
    system: System, visit: Visit
) -> None:
    page = visit.open("cluster")
    page.wait_for_selector("#nodes td:text('decode-0')")
    before = page.locator("#happenings tbody tr:has-text('decode-0')").count()
    os.kill(system.processes()["decode-0"], signal.SIGKILL)

    def happened() -> bool:
        rows = page.locator("#happenings tbody tr:has-text('decode-0')")
        texts = rows.all_inner_texts()
        page.wait_for_timeout(100)
        return len(texts) > before and any(
            word in text
            for text in texts
            for word in ("goodbye", "silent", "restarted")
        )

    wait_for(happened, 60, "the page shows that decode-0 died")
    wait_for(system.ready, 60, "it is started again")
    assert visit.faults == []
