from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from composer_trl_host.collation import CollationReport, SiteOutcome
from composer_trl_host.hints import Hint
from composer_trl_host.inspection.model import InspectedTrace, Inspection, Site
from composer_trl_host.inspection.table import show
from composer_trl_host.traces.model import ReadReport
from tests.test_inspection_samples import by_hand, failing, page_of

REASON = "the hint has no place: the chat template drops a 'system' message there; set sdpo.hint_role"


def dropped(name: str = "t2", hint: Hint | None = None, reason: str = REASON) -> InspectedTrace:
    trace = failing(name)
    outcome = SiteOutcome(3, trace.turns[3].failures, hint, None, 6, None, reason)
    return InspectedTrace(trace, (Site(outcome),))


def printed(inspection: Inspection, width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    show(inspection, Console(file=out, width=width, force_terminal=terminal, no_color=True, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (100, True), (140, True), (80, False)])
def test_every_column_is_there_and_no_reason_is_cut(width, terminal):
    found = page_of(by_hand(failing(), ["I", " look"], [0.25, 0.5]), dropped(), model="tiny")
    text = printed(found, width, terminal)
    for word in ("t1", "3 → 4", "missing_file", "is_error", "test/hand", "0.3750", "kept", "…"):
        assert (word in text) is (word != "…"), word
    # Whatever the wrapping, the letters of the reason come in order.
    assert in_order(REASON.replace(" ", ""), text)


def in_order(letters: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in letters)


def test_in_a_pipe_a_line_is_a_line():
    lines = printed(page_of(dropped(hint=Hint("word " * 60, "test/long")))).splitlines()
    assert lines[0] == "t2  turn 3 → 4  missing_file  (is_error)"
    assert lines[1] == "  hint: " + ("word " * 60).strip()
    assert lines[2] == f"  source: test/long; recovery tokens: 6; {REASON}"


def test_totals_add_up():
    text = printed(page_of(by_hand(failing(), ["a", "b", "c"]), dropped()))
    assert "sites: 2 in 2 traces; 1 kept with 3 recovery tokens, 1 left out" in text
    assert "nothing is measured without --model" in text


def test_traces_without_errors_are_a_plain_report():
    text = printed(
        Inspection("p", "tiny", None, (), ReadReport(files=2, lines=9, traces=4), CollationReport())
    )
    assert text == (
        "read: 4 traces in 2 files, 9 lines\n"
        "no error sites: no turn answers a failed tool call, so there is nothing to hint\n"
    )


def test_everything_that_was_left_out_is_told():
    read = ReadReport(
        files=1,
        lines=9,
        traces=1,
        bad_lines={"b.jsonl": [3, 17], "a.jsonl": [1]},
        skipped=Counter({"abandoned branch": 2}),
        unanswered=1,
        skipped_files={"notes.txt": "no known format"},
        notes=Counter({"tool result without a call": 1}),
    )
    found = page_of(dropped(), read=read)
    collation = CollationReport(
        sites_in=1, dropped=Counter({REASON: 1}), cut_rows=2, cut_tokens=5000, notes=Counter({"merged": 3})
    )
    lines = printed(replace(found, collation=collation)).splitlines()
    for line in (
        "unreadable: a.jsonl, line 1",
        "unreadable: b.jsonl, lines 3, 17",
        "skipped: notes.txt, no known format",
        "skipped: 2 × abandoned branch",
        "no site: 1 failed result that the model got no turn to answer",
        f"left out: 1 × {REASON}",
        "cut: 2 rows lost 5000 tokens at the beginning to fit",
        "note: 3 × merged",
        "note: 1 × tool result without a call",
    ):
        assert line in lines


@pytest.mark.parametrize(("width", "terminal"), [(80, False), (140, True)])
def test_a_transcript_cannot_reach_the_terminal(width, terminal):
    trace = failing("[bold]\x1b[2Jid\r", kind="k\x1b]0;title\x07")
    text = printed(page_of(by_hand(trace, ["x"], hint="a [red]b[/red] \x1b[31m\n\u202ec")), width, terminal)
    own = text
    for style in ("\x1b[0m", "\x1b[1m", "\x1b[2m") if terminal else ():
        own = own.replace(style, "")
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(own)
    assert in_order("[bold]\\x1b[2Jid", own)
    assert in_order("a[red]b[/red]\\x1b[31m\\u202ec", own)
