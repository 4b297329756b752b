# ruff: noqa: F401, F811  (fixtures are imported by name)
from __future__ import annotations

import pytest

from composer_trl_host.inspection.text import folded, label, one_line, segments, visible
from composer_trl_host.inspection.tokens import TokenTexts
from tests.composer_trl_host.conftest import tokenizer
from tests.test_inspection_samples import HOSTILE


def test_text_that_has_a_glyph_stays_as_it_is():
    text = "a <b> & 'c' \"d\"\n\te שלום z\u200bw 🎉"
    assert visible(text) == text


def test_control_characters_are_spelled_and_lone_surrogates_replaced():
    assert visible("\x1b[31m\x00\x85\x7f\rx\r\n\ud83d") == "\\x1b[31m\\x00\\x85\\x7f\\x0dx\n�"
    visible(HOSTILE).encode()


def test_a_cell_of_the_terminal_holds_no_line_end_and_turns_no_direction():
    shown = one_line("a\n\n b\t\x1b[2J \u202ec\u2066")
    assert shown == "a b \\x1b[2J \\u202ec\\u2066"


@pytest.mark.parametrize("text", ["", "one", "x\n" * 14, "x\n" * 17, "y" * 2000])
def test_what_is_a_little_long_is_not_folded(text):
    assert folded(text) == (text, "")


@pytest.mark.parametrize(
    "text", ["x\n" * 30, "y" * 5000, "z" * 900 + "\n" + "z" * 5000, "ab\n" * 5 + "y" * 9000]
)
def test_a_fold_loses_nothing_and_shows_a_beginning(text):
    shown, rest = folded(text)
    assert shown + rest == text
    assert rest
    assert 0 < len(shown) <= 1600
    assert shown.count("\n") <= 14


def test_blanks_in_a_token_are_marked():
    assert [(piece.kind, piece.text) for piece in segments(" a\n\t  ")] == [
        ("", " a"),
        ("newline", "\n"),
        ("tab", "\t"),
        ("blank", "  "),
    ]
    assert segments("\u200b\u202e")[0].mark == "U+200B U+202E"
    assert "".join(piece.text for piece in segments("x \n y\u200b")) == "x \n y\u200b"


def test_labels_are_one_line():
    assert label(" the ") == "·the·"
    assert label("  ") == "··"
    assert label("a\n\tb") == "a⏎⇥b"
    assert label("\u200b") == "U+200B"
    assert label("") == ""


def test_the_pieces_of_tokens_are_the_decoded_text(tokenizer):
    text = "a b\n日本 🎉 é\t<tool>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = TokenTexts(tokenizer).pieces(ids, 0, len(ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces) == len(ids)
    # 日 has three bytes: two tokens wait for the third.
    at = ids.index(tokenizer.encode("日", add_special_tokens=False)[0])
    assert pieces[at : at + 3] == ["", "", "日"]


def test_a_span_that_ends_inside_a_character_still_shows_something(tokenizer):
    ids = tokenizer.encode("a日", add_special_tokens=False)
    assert TokenTexts(tokenizer).pieces(ids, 0, len(ids) - 1) == ["a", "", "�"]


def test_a_token_that_is_part_of_a_character_is_named(tokenizer):
    texts = TokenTexts(tokenizer)
    part = tokenizer.encode("日", add_special_tokens=False)[0]
    assert texts.alone(part).startswith("⟨")
    assert texts.alone(tokenizer.encode(" ", add_special_tokens=False)[0]) == " "
