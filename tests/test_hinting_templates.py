"""Templates: one hint per kind, always an answer."""

from __future__ import annotations

import re

import pytest

from composer_trl_host.hinting import KINDS, TEMPLATES, TemplateHints
from composer_trl_host.hinting.text import estimated_tokens
from composer_trl_host.hints import ErrorContext
from composer_trl_host.traces.errors import ERROR_KINDS
from composer_trl_host.traces.model import REJECTED


def test_the_kinds_are_the_ones_that_errors_are_told_apart_by():
    wanted = """
        missing_file permission unknown_tool wrong_argument invalid_json edit_not_found edit_not_unique
        not_read_before_edit command_not_found nonzero_exit failing_test traceback timeout output_too_long
        network merge_conflict syntax_error type_error import_error rate_limit rejected unknown
    """
    assert set(KINDS) == set(wanted.split())
    assert set(KINDS) == set(ERROR_KINDS)
    assert REJECTED in KINDS
    assert len(KINDS) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_one_or_two_short_sentences(kind):
    text = TEMPLATES[kind]
    assert estimated_tokens(text) <= 40
    assert 1 <= len(re.findall(r"\.(?: |$)", text)) <= 2
    assert text.isprintable()
    hint = TemplateHints().generate(ErrorContext(kind, "anything", ""))
    assert (hint.text, hint.source) == (text, f"template/{kind}")


def test_no_two_kinds_share_a_template():
    assert len(set(TEMPLATES.values())) == len(TEMPLATES)


@pytest.mark.parametrize("kind", ["no_such_file", "", "Missing_File"])
def test_a_kind_of_an_environment_s_own_gets_the_template_for_unknown(kind):
    assert TemplateHints().generate(ErrorContext(kind, "x", "")).source == "template/unknown"
