"""The text of token ids: pieces that put together are the decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "�"
"""What decoding gives for a character of which bytes are missing."""

_CONTEXT = 4
"""Ids before a token that its decoding is given: tokenizers drop a blank at the beginning of a text."""

_LONGEST_CHARACTER = 4
"""Tokens that one character takes at most, one per byte of UTF-8."""


class TokenTexts:
    """Texts of a tokenizer's tokens. Control tokens are shown as they are spelled."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)
        self._alone: dict[int, str] = {}

    def pieces(self, ids: Sequence[int], start: int, stop: int) -> list[str]:
        """One text for each of ``ids[start:stop]``. A token that holds a part of a character has "";
        the token that completes the character has all of it."""
        texts: list[str] = []
        shown = start
        for end in range(start + 1, stop + 1):
            begin = max(0, shown - _CONTEXT)
            before, now = self._decode(ids[begin:shown]), self._decode(ids[begin:end])
            waits = now.endswith(UNFINISHED) and end < stop and end - shown < _LONGEST_CHARACTER
            # Where the context itself begins inside a character its decoding is no prefix.
            own = now[len(before) :] if now.startswith(before) else self._decode(ids[shown:end])
            texts.append("" if waits else own)
            if not waits:
                shown = end
        return texts

    def alone(self, token: int) -> str:
        """The text of one id behind other text."""
        if token not in self._alone:
            text = self._decode([*self._anchor, token])[len(self._decode(self._anchor)) :]
            if UNFINISHED in text or not text:
                text = str(self._tokenizer.convert_ids_to_tokens(token) or f"id {token}")
                text = f"⟨{text}⟩"
            self._alone[token] = text
        return self._alone[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
