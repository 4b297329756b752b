"""Text that comes out of error messages, made safe to put into a hint."""

from __future__ import annotations

import unicodedata

MAX_QUOTE = 60
"""Longest piece of an error text that a hint repeats, in characters."""

MAX_HINT_CHARACTERS = 240
"""Longest hint in characters where no tokenizer counts: about 60 tokens of English."""

CHARACTERS_PER_TOKEN = 4
"""English prose in a common vocabulary. Only where no tokenizer is at hand."""

_CUT = "…"


def clean(text: str) -> str:
    """One line: blanks joined; control, format, private and unpaired surrogate characters removed."""
    line = " ".join(text.split())
    kept = "".join(char for char in line if unicodedata.category(char)[0] != "C")
    return " ".join(kept.split())


def quoted(text: str, keep_end: bool = False) -> str:
    """``text`` cleaned, without backquotes, at most ``MAX_QUOTE`` long. ``keep_end``: its start is cut."""
    # A name that is megabytes long is cut before it is looked at.
    bounded = text[-4 * MAX_QUOTE :] if keep_end else text[: 4 * MAX_QUOTE]
    line = clean(bounded.replace("`", ""))
    line = line.strip("'\"") or line
    if len(line) <= MAX_QUOTE:
        return line
    return _CUT + line[-(MAX_QUOTE - 1) :] if keep_end else line[: MAX_QUOTE - 1] + _CUT


def estimated_tokens(text: str) -> int:
    """About how many tokens ``text`` is: a quarter of its characters, rounded up."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)
