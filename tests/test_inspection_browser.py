"""The page in a browser: what it runs, loads and shows, by mouse, by keyboard and in both colour schemes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_trl_host.collation import SiteOutcome
from composer_trl_host.hints import Hint
from composer_trl_host.inspection.model import InspectedTrace, Inspection, Site
from composer_trl_host.inspection.page import STEPS, render_page
from composer_trl_host.inspection.text import visible
from composer_trl_host.traces.model import Trace, Turn
from tests.test_inspection_samples import HOSTILE, by_hand, failing, page_of
from tests.test_inspection_webdriver import Browser, started_browser

pytestmark = pytest.mark.timeout(300)

LEAST_CONTRAST = 4.5
"""WCAG 2.2, 1.4.3 (AA), for text of any size."""

SITES = 1000
SECONDS = 5.0
"""In which a page of that many sites loads; on two idle cores it takes one and a half."""

LEVELS = [0.001, *[step + 0.001 for step in STEPS]]


def sample() -> Inspection:
    """Four sites: one with tokens of every colour, one with hostile text, one left out, one long."""
    words = ["I", " list", "\n\n", "\t", "  ", " the"]
    reason = "no hint for this error"
    unhinted = failing("unhinted", kind="other")
    outcome = SiteOutcome(3, unhinted.turns[3].failures, Hint("unused", "test/u"), None, 6, None, reason)
    hostile = failing(HOSTILE, kind=HOSTILE, result=HOSTILE, recovery=HOSTILE)
    long = failing("long", result="line of a long result\n" * 400)
    chat = tuple(Turn("user", f"turn {number}") for number in range(9))
    found = page_of(
        by_hand(failing("colours"), words, LEVELS),
        by_hand(hostile, [HOSTILE, "\u202e", "\u200b"], [0.3, 0.2, 0.1], hint=HOSTILE),
        InspectedTrace(unhinted, (Site(outcome),)),
        by_hand(Trace(id="long", turns=(*long.turns, *chat)), [f" w{i}" for i in range(900)], [0.02] * 900),
        model="tiny",
    )
    found.read.bad_lines["x" * 300 + ".jsonl"] = [3]
    found.collation.dropped[reason] = 1
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "sites.html"
    path.write_bytes(render_page(sample()).encode())
    return path


def open_all(browser: Browser) -> None:
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")


def focused(browser: Browser) -> str:
    return browser.run("return document.activeElement.id || document.activeElement.className")


def test_no_script_of_a_transcript_runs_and_its_text_is_shown_as_it_is(browser, page):
    browser.open(page)
    open_all(browser)
    assert browser.run("return window.hit") is None
    assert browser.run("return document.scripts.length") == 1 + 3
    assert browser.run("return document.images.length") == 0
    wanted = visible(HOSTILE)
    for selector in (".failed .text", ".hint .text", ".tokens .t", ".verdict strong", "h2"):
        texts = browser.run(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector
        )
        assert wanted in texts, selector
    assert [entry for entry in browser.log("browser") if entry["level"] == "SEVERE"] == []


def test_a_script_that_escaping_missed_would_not_run_either(browser, page, tmp_path):
    raw = "<script>window.hit = 1</script><img src='x:y' onerror='window.hit = 2'><b onclick='window.hit = 3' id='b'>b</b>"
    broken = page.read_text(encoding="utf-8").replace("<main ", raw + "<main ", 1)
    path = tmp_path / "broken.html"
    path.write_text(broken, encoding="utf-8")
    browser.open(path)
    browser.run("document.getElementById('b').click()")
    assert browser.run("return window.hit") is None
    assert browser.run("return document.getElementById('position').textContent") == "4 sites"
    assert any("Content Security Policy" in entry["message"] for entry in browser.log("browser"))


def test_nothing_is_asked_of_the_network(browser, page):
    browser.log("performance")
    browser.open(page)
    open_all(browser)
    browser.press("n")
    browser.point("#tokens-1 .t")
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [page.resolve().as_uri()]
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


def test_the_keyboard_goes_from_site_to_site(browser, page):
    browser.open(page)
    for key, wanted in [
        ("n", 1),
        ("j", 2),
        ("n", 3),
        ("p", 2),
        ("k", 1),
        ("p", 1),
        ("n", 2),
        ("n", 3),
        ("n", 4),
        ("n", 4),
    ]:
        browser.press(key)
        assert focused(browser) == f"site-{wanted}", key
        assert browser.run("return document.getElementById('position').textContent") == f"Site {wanted} of 4"
        seen = browser.run(
            "const b = document.activeElement.getBoundingClientRect(); return [b.top, innerHeight, "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert 0 <= seen[0] < seen[1]
        assert seen[2] == "solid"
    assert browser.run("return document.querySelector('[aria-current]').hash") == "#site-4"


def test_buttons_and_links_go_to_sites_too(browser, page):
    browser.open(page)
    browser.run("document.getElementById('next').click()")
    assert focused(browser) == "site-1"
    browser.run("document.querySelector('.list a[href=\"#site-3\"]').click()")
    assert focused(browser) == "site-3"
    browser.run("document.getElementById('previous').click()")
    assert focused(browser) == "site-2"


def test_a_token_shows_both_sides_on_focus(browser, page):
    browser.open(page)
    browser.press("n", "Tab")
    assert focused(browser).startswith("t d0")
    assert shown(browser) == ("I", "0.001 nats")
    table = browser.run("return document.querySelector('#peek table').innerText")
    for word in ("student", "teacher", "25.0 %", "50.0 %", "·the", "</script>", "this token"):
        assert word in table
    browser.press("ArrowRight")
    assert shown(browser) == ("·list", "0.011 nats")
    assert "Student: ·list 25.0 %" in browser.run("return document.getElementById('say').textContent")
    browser.press("End")
    assert shown(browser) == ("·the", "0.401 nats")
    browser.press("ArrowRight", "Home", "ArrowRight", "ArrowRight")
    assert shown(browser) == ("⏎⏎", "0.051 nats")
    browser.press("Escape")
    assert shown(browser) is None
    browser.press("ArrowLeft", "n")
    assert focused(browser) == "site-2"
    assert shown(browser) is None


def test_a_token_shows_both_sides_under_the_mouse(browser, page):
    browser.open(page)
    browser.point("#tokens-1 .t:nth-child(2)")
    assert shown(browser) == ("·list", "0.011 nats")
    browser.point("#peek td")
    time.sleep(0.3)
    assert shown(browser) == ("·list", "0.011 nats"), "the box stays while the pointer is on it"
    browser.point("h1")
    time.sleep(0.3)
    assert shown(browser) is None


def shown(browser: Browser) -> tuple[str, str] | None:
    return (
        tuple(found)
        if (
            found := browser.run(
                "const p = document.getElementById('peek'); if (p.hidden) return null; "
                "return [p.querySelector('code').textContent, p.querySelector('p span').textContent]"
            )
        )
        else None
    )


def test_folded_text_opens_with_the_keyboard(browser, page):
    browser.open(page)
    browser.press("n", "n", "n", "n", "Tab")
    summary = browser.run("return document.activeElement.textContent")
    assert re.match(r"[\d,]+ more characters", summary)
    browser.press("\ue007")
    assert browser.run("return document.activeElement.parentElement.open")
    assert browser.run("return document.activeElement.innerText") == "show fewer"


def test_an_arrow_opens_folded_tokens(browser, page):
    browser.open(page)
    browser.run("document.querySelector('.list a[href=\"#site-4\"]').click()")
    browser.run("document.querySelector('#tokens-4 .t').focus()")
    browser.press("End")
    assert shown(browser) == ("·w899", "0.020 nats")


def test_the_filter_leaves_what_it_says_and_the_keys_follow(browser, page):
    browser.open(page)
    choose = (
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change'))"
    )
    browser.run(choose, "outcome", "dropped")
    assert browser.run("return document.getElementById('position').textContent") == "1 of 4 sites"
    browser.press("n")
    assert focused(browser) == "site-3"
    assert browser.run("return document.querySelectorAll('.conversation:not([hidden])').length") == 1
    browser.run(choose, "outcome", "")
    kinds = browser.run("return [...document.querySelectorAll('#kind option')].map(each => each.text)")
    assert kinds[0] == "all"
    browser.run(choose, "kind", str(kinds.index("missing_file") - 1))
    hidden = browser.run(
        "return [...document.querySelectorAll('.list li[data-kinds]')].map(each => each.hidden)"
    )
    assert hidden == [False, True, True, False]


CONTRAST = """
const numbers = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let up = element; up; up = up.parentElement) {
    const color = numbers(getComputedStyle(up).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
    if (color[3] > 0) throw new Error("translucent " + up.className);
  }
  return [255, 255, 255];
};
const worst = [];
for (const element of document.body.querySelectorAll("*")) {
  if (["SCRIPT", "STYLE", "OPTION"].includes(element.tagName) || element.closest(".skip, .unheard")) continue;
  if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && !element.className.match?.(/newline|tab|unseen/)) continue;
  if (!element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  if (style.opacity !== "1") throw new Error("opacity on " + element.className);
  const [a, b] = [light(numbers(style.color)), light(behind(element))].sort((x, y) => y - x);
  worst.push([(a + 0.05) / (b + 0.05), element.tagName + "." + element.className + ": " + element.textContent.slice(0, 30)]);
}
worst.sort((x, y) => x[0] - y[0]);
return [worst.length, ...worst.slice(0, 3)];
"""


@pytest.mark.parametrize("by", ["system", "button"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(browser, page, scheme, by):
    other = {"light": "dark", "dark": "light"}[scheme]
    browser.open(page, prefer=scheme if by == "system" else other)
    if by == "button":
        for _ in range({"light": 1, "dark": 2}[scheme]):
            browser.run("document.getElementById('theme').click()")
    ground = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) > 128) is (scheme == "light")
    open_all(browser)
    browser.press("n", "Tab")
    assert shown(browser)
    count, *worst = browser.run(CONTRAST)
    assert count > 1000
    assert worst[0][0] >= LEAST_CONTRAST, worst


@pytest.mark.parametrize("width", [320, 400, 700, 1280])
def test_the_page_does_not_scroll_sideways(browser, page, width):
    browser.open(page, width=width)
    open_all(browser)
    browser.press("n", "Tab", "End")
    assert shown(browser)
    found = browser.run(
        "const p = document.getElementById('peek').getBoundingClientRect();"
        "return [document.documentElement.scrollWidth, p.left, p.right]"
    )
    assert found[0] <= width
    assert found[1] >= 0
    assert found[2] <= width


def test_a_thousand_sites_load_quickly(browser, tmp_path):
    words = [" word"] * 100
    traces = [by_hand(failing(f"trace {number}"), words, [0.1] * 100) for number in range(SITES)]
    path = tmp_path / "many.html"
    path.write_bytes(render_page(page_of(*traces, model="tiny")).encode())
    browser.open(path)
    took = browser.run(
        "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd / 1000"
    )
    assert took < SECONDS
    began = time.monotonic()
    browser.press(*["n"] * 10)
    assert focused(browser) == "site-10"
    browser.run("document.querySelector('.list a[href=\"#site-1000\"]').click()")
    assert focused(browser) == "site-1000"
    assert time.monotonic() - began < SECONDS


def test_the_page_can_be_printed_whole(browser, page):
    browser.open(page)
    contents = (
        "return [...document.querySelectorAll('details:not([open])')]"
        ".map(each => getComputedStyle(each, '::details-content').contentVisibility)"
    )
    assert set(browser.run(contents)) == {"hidden"}
    browser.devtools("Emulation.setEmulatedMedia", {"media": "print"})
    printed = browser.run(contents)
    browser.devtools("Emulation.setEmulatedMedia", {"media": ""})
    assert set(printed) == {"visible"}


def test_landmarks_names_and_language_are_there(browser, page):
    browser.open(page)
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return document.title") == "Error sites in traces"
    assert browser.run(
        "return ['main', 'nav', 'header'].map(each => document.querySelectorAll(each).length)"
    ) == [1, 1, 1]
    assert (
        browser.run("return document.getElementById('site-1').getAttribute('aria-labelledby')") == "title-1"
    )
    nameless = browser.run(
        "return [...document.querySelectorAll('select, button')].filter(each => "
        "!each.textContent.trim() && !each.labels?.length).length"
    )
    assert nameless == 0
    twice = browser.run(
        "const ids = [...document.querySelectorAll('[id]')].map(each => each.id); return ids.length - new Set(ids).size"
    )
    assert twice == 0
