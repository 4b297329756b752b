"""Transcript text made fit to show: nothing of it is dropped, nothing of it acts."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

FOLD_LINES = 14
FOLD_CHARACTERS = 1600

REMEMBERED = 2**16
"""Texts of tokens whose marked form is kept: a page has few of them, many times each."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_BIDI = {
    code: f"\\u{code:04x}"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def visible(text: str) -> str:
    """``text`` with control characters spelled out (ESC as ``\\x1b``) and lone surrogates as U+FFFD, which
    no file can hold otherwise. Line ends and tabs stay; CR LF is a line end."""
    if text.isascii() and text.isprintable():
        return text
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def one_line(text: str) -> str:
    """``text`` for one cell of a terminal: runs of blanks are one, and nothing in it moves the cursor
    or turns the direction of what follows."""
    return " ".join(visible(text).translate(_BIDI).split())


def counted(number: int, noun: str) -> str:
    """``number`` and the noun in the form that it takes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def folded(text: str, lines: int = FOLD_LINES, characters: int = FOLD_CHARACTERS) -> tuple[str, str]:
    """``text`` in two parts of which the second is folded away, "" where it is short enough.

    A text that is a little too long stays whole: a fold must be worth a click.
    """
    end = _line_end(text, lines)
    if len(text) <= characters * 5 // 4 and _line_end(text, lines * 5 // 4) == len(text):
        return text, ""
    if end > characters:
        end = text.rfind("\n", 0, characters) + 1 or characters
    return text[:end], text[end:]


def _line_end(text: str, lines: int) -> int:
    """Where line number ``lines`` ends, its line end included."""
    position = 0
    for _ in range(lines):
        found = text.find("\n", position)
        if found < 0:
            return len(text)
        position = found + 1
    return position


@dataclass(frozen=True)
class Segment:
    """A piece of a token. ``kind``: "" for text, ``"newline"``, ``"tab"``, ``"blank"`` or ``"unseen"``
    for what has no glyph of its own; ``mark`` stands beside an unseen one."""

    kind: str
    text: str
    mark: str = ""


_SEGMENTS = re.compile(r"\n|\t|[^\n\t]+")


@lru_cache(REMEMBERED)
def segments(text: str) -> tuple[Segment, ...]:
    """A token's text in pieces, so that what cannot be seen can be marked."""
    pieces: list[Segment] = []
    for piece in _SEGMENTS.findall(visible(text)):
        if piece == "\n":
            pieces.append(Segment("newline", piece))
        elif piece == "\t":
            pieces.append(Segment("tab", piece))
        elif piece.strip(" ") == "":
            pieces.append(Segment("blank", piece))
        elif not any(_has_glyph(letter) for letter in piece):
            pieces.append(Segment("unseen", piece, _names(piece)))
        else:
            pieces.append(Segment("", piece))
    return tuple(pieces)


@lru_cache(REMEMBERED)
def label(text: str) -> str:
    """A token's text in one line with its blanks marked, for lists of tokens."""
    shown = "".join(_mark(letter) for letter in visible(text))
    inner = shown.strip(" ")
    start = len(shown) - len(shown.lstrip(" "))
    return "·" * start + inner + "·" * (len(shown) - start - len(inner))


def _mark(letter: str) -> str:
    if letter == "\n":
        return "⏎"
    if letter == "\t":
        return "⇥"
    return letter if letter == " " or _has_glyph(letter) else _names(letter)


def _has_glyph(letter: str) -> bool:
    return unicodedata.category(letter) not in ("Cf", "Cc", "Cn", "Co", "Mn", "Me", "Zs", "Zl", "Zp") or (
        letter == "�"
    )


def _names(piece: str) -> str:
    return " ".join(f"U+{ord(letter):04X}" for letter in piece)
