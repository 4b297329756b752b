"""docs/hints.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from composer_trl_host.hinting import KINDS, TEMPLATES, JudgeOptions, RuleHints
from composer_trl_host.hints import ErrorContext, HintGenerator
from tests.test_hinting_cases import CASES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hints.md"


def table(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", PAGE.read_text(), flags=re.DOTALL)
    assert found is not None
    return found.group(1)


def kinds_table() -> str:
    """Each kind with its template and what a rule says about its first case."""
    lines = ["| kind | template | a rule's hint, for example |", "|---|---|---|"]
    for kind in KINDS:
        _, result, call, *_ = next(case for case in CASES if case[0] == kind)
        hint = RuleHints().generate(ErrorContext(kind, result, call))
        assert hint is not None
        lines.append(f"| `{kind}` | {TEMPLATES[kind]} | {hint.text} |")
    return "\n".join(lines)


def judge_table() -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in JudgeOptions.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default!r}`"
        lines.append(f"| `{name}` | {default} | {' '.join((field.description or '').split())} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "wanted"), [("kinds", kinds_table), ("judge", judge_table)])
def test_the_tables_are_the_code_s(name, wanted):
    # Where this fails, the text on the right is what belongs between the two marks.
    assert table(name) == wanted()


def test_the_snippets_are_generators_that_do_what_is_said():
    pruned, own = (
        snippet(text) for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    )
    plain = ErrorContext("nonzero_exit", "Exit code 2", "")
    assert pruned.generate(plain).source == "template/nonzero_exit"
    assert pruned.generate(ErrorContext("unknown", "?", "")) is None
    assert own.generate(plain).source == "rule/exit_status"
    assert own.generate(ErrorContext("unknown", "over quota", "")).source == "quota"
    assert own.generate(ErrorContext("unknown", "index users not found", "")).source == "rule/no_index"


def snippet(text: str) -> HintGenerator:
    names: dict = {}
    exec(text, names)
    assert isinstance(names["hints"], HintGenerator)
    return names["hints"]
