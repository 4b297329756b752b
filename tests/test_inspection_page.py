"""The page as text; ``test_inspection_browser`` opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from composer_trl_host.collation import CollationReport, SiteOutcome
from composer_trl_host.hints import Hint
from composer_trl_host.inspection.conversation import RUN, conversation
from composer_trl_host.inspection.model import InspectedTrace, Inspection, Site
from composer_trl_host.inspection.page import STEPS, level, render_page, token_data
from composer_trl_host.inspection.text import visible
from composer_trl_host.traces.model import ReadReport, ToolCall, ToolFailure, Trace, Turn
from tests.test_inspection_samples import HOSTILE, by_hand, failing, page_of


class Reader(HTMLParser):
    """Tags with their attributes, and the text of each element of a class."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_policy_names_the_only_style_and_the_only_script():
    page = render_page(page_of(by_hand(failing(), ["a"], [0.1]), model="tiny"))
    (style,) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    policy = next(
        attributes["content"]
        for tag, attributes in Reader(page).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src '{digest(style)}'",
        f"script-src '{digest(script)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_nothing_is_loaded_from_elsewhere():
    page = render_page(page_of(by_hand(failing(), ["a"], [0.1]), model="tiny"))
    for tag, attributes in Reader(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"https?:|@import|url\(", page)


def test_hostile_text_is_text_wherever_it_stands():
    call = ToolCall(HOSTILE, HOSTILE, HOSTILE)
    failure = ToolFailure(turn=2, kind=HOSTILE, rule=HOSTILE, result=HOSTILE, call=call)
    trace = Trace(
        id=HOSTILE,
        turns=(
            Turn("user", HOSTILE),
            Turn("assistant", HOSTILE, thinking=HOSTILE, tool_calls=(call,)),
            Turn("tool", HOSTILE, tool_name=HOSTILE),
            Turn("assistant", HOSTILE, thinking=HOSTILE, tool_calls=(call,), failures=(failure,)),
        ),
        format=HOSTILE,
        path=HOSTILE,
        line=1,
    )
    kept = by_hand(trace, [HOSTILE, " x"], [0.2, 0.3], hint=HOSTILE)
    outcome = SiteOutcome(3, (failure,), Hint(HOSTILE, HOSTILE), None, 1, None, HOSTILE)
    found = page_of(kept, InspectedTrace(trace, (Site(outcome),)), model=HOSTILE)
    found.collation.dropped[HOSTILE] = 1
    read = ReadReport(files=1, lines=1, traces=2, bad_lines={HOSTILE: [1]}, skipped_files={HOSTILE: HOSTILE})
    page = render_page(Inspection(HOSTILE, HOSTILE, HOSTILE, found.traces, read, found.collation))
    reader = Reader(page)
    tags = [tag for tag, _ in reader.tags]
    # One script of the page's own, and one data island for the one measured site.
    assert tags.count("script") == 2
    assert tags.count("style") == 1
    assert "img" not in tags
    assert reader.text.count(visible(HOSTILE)) > 10
    assert "49" not in re.findall(r"7 \* 7|49", reader.text)
    page.encode()


def test_the_data_island_cannot_be_left():
    (site,) = by_hand(failing(), ["</script><script>hit()</script>"], [0.2]).sites
    data = token_data(site)
    assert "<" not in data
    parsed = json.loads(data)
    own, student, teacher, *sides = parsed["tokens"][0]
    assert parsed["labels"][own] == "</script><script>hit()</script>"
    assert (student, teacher) == (0.25, 0.5)
    assert parsed["labels"][sides[1][0]] == "·the"
    assert [len(side) for side in sides] == [10, 10]


def test_equal_inspections_give_equal_bytes():
    found = page_of(by_hand(failing(), ["a", "\n"], [0.1, 0.2]), model="tiny")
    again = page_of(by_hand(failing(), ["a", "\n"], [0.1, 0.2]), model="tiny")
    assert render_page(found) == render_page(again)


def test_the_limit_is_told_on_the_page():
    found = page_of(*(by_hand(failing(f"t{number}"), ["a"]) for number in range(3)))
    page = render_page(found, limit=2)
    assert "the first 2 of 3 conversations with error sites, and 2 of 3 sites" in page
    assert 'id="site-2"' in page
    assert 'id="site-3"' not in page
    assert "This page holds the first" not in render_page(found)


def test_a_page_without_sites_says_so_and_has_no_script():
    page = render_page(
        Inspection("p", "tiny", None, (), ReadReport(files=1, lines=2, traces=2), CollationReport())
    )
    assert "no error sites" in page
    assert "<script>" not in page


def test_long_text_is_folded_with_its_length_and_all_there():
    long = "line\n" * 2000
    page = render_page(page_of(by_hand(failing(result=long), ["w "] * 900)))
    assert "9,930 more characters" in page
    assert "500 more tokens, 1,000 characters" in page
    assert Reader(page).text.count("line\n") == 2000
    assert page.count('<span class="t">w </span>') == 900


def test_what_the_recovery_says_beyond_its_tokens_is_shown_too():
    trace = failing(recovery="said")
    turn = Turn("assistant", "said", thinking="thought", failures=trace.turns[3].failures)
    whole = Trace(id="t", turns=(*trace.turns[:3], turn))
    page = render_page(page_of(by_hand(whole, ["sa", "id"])))
    assert "thinking, not among the tokens as they stand" in page
    assert "text, not among the tokens as they stand" not in page


def test_levels_follow_the_steps():
    assert [level(step) for step in STEPS] == [1, 2, 3, 4, 5]
    assert level(0.0) == 0
    assert level(0.0999) == 2


def test_a_conversation_is_cut_into_sites_and_the_turns_between():
    first = failing()
    later = ToolFailure(turn=10, kind="timeout", rule="exit_code", result="slow", call=None)
    chat = [Turn("user" if number % 2 else "assistant", f"turn {number}") for number in range(4, 9)]
    turns = (
        *first.turns,
        *chat,
        Turn("assistant", "calls"),
        Turn("tool", "slow"),
        Turn("assistant", "again", failures=(later,)),
        Turn("user", "thanks"),
    )
    trace = Trace(id="t", turns=turns)
    sites = tuple(
        Site(SiteOutcome(turn, turns[turn].failures, None, None, 1, None, "no hint"))
        for turn in trace.sites()
    )
    parts = conversation(InspectedTrace(trace, sites), 1, 5).parts
    assert [(part.number, part.folded, len(part.turns)) for part in parts] == [
        (0, False, 1),
        (5, False, 3),
        (0, len(chat) > RUN, len(chat)),
        (6, False, 3),
        (0, False, 1),
    ]
    assert [numbered.number for part in parts for numbered in part.turns] == list(range(1, len(turns) + 1))
    assert [numbered.number for part in parts for numbered in part.turns if numbered.failure] == [3, 11]


@pytest.mark.parametrize("field", ["kind", "rule", "result"])
def test_the_failed_result_is_marked_in_words(field):
    page = render_page(page_of(by_hand(failing(), ["a"])))
    trace = failing()
    assert visible(getattr(trace.turns[3].failures[0], field)) in Reader(page).text
    assert "failed:" in Reader(page).text
