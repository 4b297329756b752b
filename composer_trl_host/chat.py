"""Chat templates as pieces that can be put behind ids that were really sampled.

Nothing that the model sampled is ever rendered again: the environment's messages, the next
generation prompt and a hint's message are rendered behind a stand-in conversation and their text
is cut off there. Text inside a message is data: a control token's spelling in it never becomes
that control token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from composer_prime_plugin.config import HintRole
from composer_prime_plugin.errors import ModelError
from composer_trl_host.hints import Message

_SENTINEL = "xqzj{}jzqx"
"""Stands for a message's content while the scaffold around it is found. No template writes it."""

_HINT_ROLES: dict[HintRole, str] = {"system": "system", "user": "user", "tool_result": "tool"}


@dataclass(frozen=True)
class Bridge:
    """The ids between two turns of the model: ``messages`` closes the turn and holds the
    environment's messages, ``generation_prompt`` opens the next turn."""

    messages: tuple[int, ...]
    generation_prompt: tuple[int, ...]


class Chat:
    """A tokenizer's chat template, cut into pieces.

    Raises ``ModelError`` for a tokenizer without a template and for a role that the template refuses.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "the model's tokenizer must have a chat template; found none; use an instruct model or set "
                "tokenizer.chat_template"
            )
        self.tokenizer = tokenizer

    @cached_property
    def _control(self) -> re.Pattern[str]:
        spellings = sorted((token.content for token in self.tokenizer.added_tokens_decoder.values()), key=len)
        return re.compile("|".join(re.escape(spelling) for spelling in reversed(spellings)) or r"(?!)")

    def text_ids(self, text: str) -> list[int]:
        """Ids of text that is data: control tokens' spellings in it stay ordinary text."""
        pieces: list[str] = []
        start = 0
        for match in self._control.finditer(text):
            # Cutting behind the first character leaves two pieces, neither of which spells the token.
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(text[start:])
        return [
            i for piece in pieces if piece for i in self.tokenizer.encode(piece, add_special_tokens=False)
        ]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to and including the generation prompt."""
        return self._ids(*self._render(messages, add_generation_prompt=True))

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """What stands between a turn of the model and its next one.

        ``messages`` begins with the token that closes the finished turn; see ``after_turn``.
        """
        closed, contents = self._behind_turn(messages, add_generation_prompt=False)
        opened, _ = self._behind_turn(messages, add_generation_prompt=True)
        if not opened.startswith(closed):
            raise ModelError(
                "the chat template must only append when it adds a generation prompt; this one rewrites what stands "
                "before it; use another template"
            )
        return Bridge(tuple(self._ids(closed, contents)), tuple(self._ids(opened[len(closed) :], {})))

    def after_turn(self, turn: Sequence[int], bridge: Bridge, eos_token_ids: Sequence[int]) -> list[int]:
        """``bridge.messages`` without the closing token where the sampled turn already ends with it."""
        ids = list(bridge.messages)
        if turn and ids and turn[-1] == ids[0] and turn[-1] in eos_token_ids:
            return ids[1:]
        return ids

    def hint_ids(self, messages: Sequence[Message], hint: str, role: HintRole) -> list[int]:
        """Ids of a hint's message behind ``messages``, at the boundary before the generation prompt.

        An empty hint has no ids. Raises ``ModelError`` where the template refuses the role or
        rewrites ``messages`` because of the hint: then it could not be spliced in.
        """
        if not hint:
            return []
        before, _ = self._behind_turn(messages, add_generation_prompt=False)
        extended = [*messages, {"role": _HINT_ROLES[role], "content": hint}]
        after, contents = self._behind_turn(extended, add_generation_prompt=False)
        if not after.startswith(before):
            raise ModelError(
                f"a hint must not change what stands before it, and this chat template rewrites the environment's "
                f'messages when a {role!r} message follows; set sdpo.hint_role = "tool_result" or "user"'
            )
        return self._ids(after[len(before) :], contents)

    def _behind_turn(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[str, dict[str, str]]:
        stand_in = _SENTINEL.format("turn")
        conversation: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": stand_in},
            *messages,
        ]
        text, contents = self._render(conversation, add_generation_prompt, first=2)
        _, found, tail = text.partition(stand_in)
        if not found or stand_in in tail:
            raise ModelError(
                "the chat template must render an assistant's content once and verbatim; this one does not; "
                "use another template"
            )
        return tail, contents

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, first: int = 0
    ) -> tuple[str, dict[str, str]]:
        """The template's text. Contents that spell a control token are stood for by sentinels."""
        contents: dict[str, str] = {}
        safe: list[Message] = []
        for index, message in enumerate(messages):
            content = message.get("content")
            if index >= first and isinstance(content, str) and self._control.search(content):
                key = _SENTINEL.format(index)
                contents[key] = content
                message = {**message, "content": key}
            safe.append(message)
        try:
            text = self.tokenizer.apply_chat_template(
                safe, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"the chat template must render the roles {roles} in this order; it refused: {error}; set "
                "sdpo.hint_role or use a template that takes them"
            ) from error
        return str(text), contents

    def _ids(self, text: str, contents: dict[str, str]) -> list[int]:
        if not contents:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, contents)) + ")", text):
            if piece in contents:
                ids += self.text_ids(contents[piece])
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids
