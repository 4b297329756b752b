"""What holds for every rule, whatever it reads."""

from __future__ import annotations

import json
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_trl_host.hinting import KINDS, RuleHints, TemplateHints, rule
from composer_trl_host.hinting.rule_table import RULES
from composer_trl_host.hinting.rules import fields
from composer_trl_host.hinting.text import MAX_HINT_CHARACTERS, MAX_QUOTE, quoted
from composer_trl_host.hints import ErrorContext
from composer_trl_host.traces.model import ToolCall, ToolFailure
from tests.test_hinting_cases import BASH_CALL, CASES, EDIT_CALL, READ_CALL


def test_rules_have_distinct_names_and_fields_that_can_be_filled():
    assert len({one.name for one in RULES}) == len(RULES)
    for one in RULES:
        groups = {name for pattern in (*one.patterns, *one.also) for name in pattern.groupindex}
        for template in one.hints:
            assert set(fields(template)) <= groups | {"path", "tool", "command"}, one.name
        used = {name for template in one.hints for name in fields(template)}
        assert groups <= used, one.name


def test_a_rule_for_an_unheard_of_kind_is_refused():
    with pytest.raises(ValueError, match=r"rule 'x' must name known kinds; found \['misisng_file'\]"):
        rule("x", "misisng_file", ["a"], "b")


def test_the_thing_is_found_at_the_end_of_a_long_log():
    log = "building\n" * 100_000
    hint = RuleHints().generate(
        ErrorContext("nonzero_exit", f"{log}bash: line 9: ninja: command not found\n", "")
    )
    assert hint is not None
    assert "`ninja`" in hint.text


def test_a_failing_test_is_named_before_what_it_raised():
    text = "ModuleNotFoundError: No module named 'yaml'\nERROR tests/test_a.py::test_x - ModuleNotFoundError"
    named = {
        kind: RuleHints().generate(ErrorContext(kind, text, "")).source
        for kind in ("failing_test", "nonzero_exit")
    }
    assert named == {"failing_test": "rule/failing_test", "nonzero_exit": "rule/module"}


def test_a_long_path_keeps_its_end_and_a_long_name_its_start():
    path = "/very" * 40 + "/end.py"
    hint = RuleHints().generate(ErrorContext("missing_file", f"cat: {path}: No such file or directory", ""))
    assert "/end.py`" in hint.text
    assert len(hint.text) <= MAX_HINT_CHARACTERS
    assert quoted(path, keep_end=True) == "…" + path[-(MAX_QUOTE - 1) :]
    assert quoted("ab" * 100) == ("ab" * 100)[: MAX_QUOTE - 1] + "…"


def test_what_is_quoted_is_one_clean_line():
    assert quoted("a\x00b\u202ec\ud800 \n\td`e`\u2028f") == "abc de f"


def parallel_calls(**answered: str) -> list[dict]:
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"path": f"/{name}.py"})},
        }
        for name in ("first", "second")
    ]
    answers = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in answered.items()]
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *answers,
    ]


def test_of_parallel_calls_the_one_that_failed_is_named():
    messages = parallel_calls(first="fine", second="File does not exist.")
    hint = RuleHints().generate(ErrorContext("missing_file", "File does not exist.", "", messages))
    assert "`/second.py`" in hint.text


def test_of_parallel_calls_that_cannot_be_told_apart_none_is_named():
    messages = parallel_calls(first="File does not exist.", second="File does not exist.")
    assert RuleHints().generate(ErrorContext("missing_file", "File does not exist.", "", messages)) is None


def test_of_several_failures_the_one_that_gave_the_kind_is_read_and_named():
    failures = tuple(
        ToolFailure(
            1, kind, "is_error", text, ToolCall("1", "Read", json.dumps({"file_path": f"/{kind}.py"}))
        )
        for kind, text in [("rejected", "No such file: /x"), ("missing_file", "File does not exist.")]
    )
    joined = "\n".join(failure.result for failure in failures)
    context = ErrorContext("missing_file", joined, "", details={"failures": failures})
    assert "`/missing_file.py`" in RuleHints().generate(context).text


@pytest.mark.parametrize("failures", [None, 3, "text", [3], (), {"a": 1}])
def test_odd_details_are_passed_over(failures):
    context = ErrorContext("missing_file", "File does not exist.", READ_CALL, details={"failures": failures})
    assert "core.py`" in RuleHints().generate(context).text


def test_of_several_calls_in_one_turn_none_is_named():
    two = READ_CALL + READ_CALL.replace("core", "other")
    assert RuleHints().generate(ErrorContext("missing_file", "File does not exist.", two)) is None
    noise = 'The settings are {"path": "/etc"}.\n' + READ_CALL
    assert (
        "core.py`" in RuleHints().generate(ErrorContext("missing_file", "File does not exist.", noise)).text
    )


def test_an_earlier_call_is_not_taken_for_the_failed_one():
    messages = [*parallel_calls(first="fine", second="fine"), {"role": "assistant", "content": "reads"}]
    assert RuleHints().generate(ErrorContext("missing_file", "File does not exist.", "", messages)) is None


ODD = st.sampled_from([result for _, result, *_ in CASES]) | st.text() | st.text(st.characters(codec=None))
PIECES = st.lists(
    ODD | st.sampled_from(["\n", "\x00", "\u202e", "\ud800", "{path}", "{", "`", ": "]), max_size=4
)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS) | st.text(max_size=20),
    result=PIECES.map("".join),
    call=st.sampled_from([EDIT_CALL, READ_CALL, BASH_CALL, "{" * 50]) | st.text(),
)
def test_any_text_gives_a_short_clean_hint_or_none_and_the_same_again(kind, result, call):
    context = ErrorContext(kind, result, call)
    for generator in (RuleHints(), TemplateHints()):
        hint = generator.generate(context)
        assert hint == generator.generate(context)
        if hint is not None:
            assert 0 < len(hint.text) <= MAX_HINT_CHARACTERS
            assert not [char for char in hint.text if unicodedata.category(char)[0] == "C"]
            assert hint.text == " ".join(hint.text.split())


HOSTILE = [
    "file " * 4000,
    ("file " + "/." * 290) * 40,
    ": " * 8000,
    "multiple occurrences " * 800,
    "E " * 8000,
    "a." * 8000,
    "(" * 16000,
    "_" * 16000,
    "cannot a b c d e f " * 800,
    "\n" * 16000,
    "error\n" * 3000,
    "ConnectionPool(host='" * 800,
    "tool " * 3200,
    "search block text " * 800,
    "output " * 2200,
    '{"a":' * 4000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:12] for text in HOSTILE])
def test_no_text_keeps_the_rules_busy(text):
    start = time.process_time()
    RuleHints().generate(ErrorContext("unknown", text, text))
    # The slowest takes half a second; a pattern that backtracks without bound takes minutes.
    assert time.process_time() - start < 4
