"""Chat templates as pieces that can be put behind ids that were really sampled.

Nothing that the model sampled is ever rendered again: the environment's messages, the next
generation prompt and a hint's message are rendered behind a stand-in conversation and their text
is cut off there. Text inside a message is data: a control token's spelling in it never becomes
that control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from composer_prime_plugin.config import HintRole
from composer_prime_plugin.errors import ModelError
from composer_trl_host.hints import Message

_OWN_MARKS = re.compile(r"</?(think|thinking|tool_call|tool_calls)>")
"""Control tokens that a turn of the model may hold as its own: templates look for them in its text."""

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
    def _control(self) -> dict[str, int]:
        """Spelling to id of every added token. Runs of blanks are text in any case."""
        added = self.tokenizer.added_tokens_decoder
        return {token.content: index for index, token in added.items() if token.content.strip()}

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Spellings that are data in a message: all of them, and for the model's own turns the special
        ones and those that mark a turn, since templates look for the others there (``<think>``)."""
        every = _any_of(self._control)
        own = {str(token) for token in self.tokenizer.all_special_tokens} | self._turn_marks(every)
        return every, _any_of(self._control.keys() & own)

    def _turn_marks(self, control: re.Pattern[str]) -> set[str]:
        """The control tokens that the template writes around messages, special or not, but for those that it
        looks for in a turn of the model itself."""
        user, reply = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
        call = {"id": "a" * 9, "type": "function", "function": {"name": "x", "arguments": {"x": "x"}}}
        result = {"role": "tool", "content": "x", "tool_call_id": "a" * 9, "name": "x"}
        conversations: list[list[Message]] = [
            [user, reply, user, reply],
            [{"role": "system", "content": "x"}, user, reply],
            [user, {**reply, "tool_calls": [call]}, result, reply],
        ]
        found: set[str] = set()
        for conversation in conversations:
            for prompt in (False, True):
                try:
                    text = self.tokenizer.apply_chat_template(
                        conversation, tokenize=False, add_generation_prompt=prompt
                    )
                except Exception:
                    continue  # a template refuses what it has no place for; whoever needs it is told why
                found.update(control.findall(str(text)))
        return {mark for mark in found if not _OWN_MARKS.fullmatch(mark)}

    @property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches every control token that a piece of the template spells."""
        return self._patterns[0]

    def text_ids(self, text: str) -> list[int]:
        """Ids of text that is data: control tokens' spellings in it stay ordinary text."""
        text = encodable(text)
        pieces: list[str] = []
        start = 0
        for match in self._patterns[0].finditer(text):
            # Cutting behind the first character leaves two pieces, neither of which spells the token.
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(text[start:])
        return [i for piece in pieces if piece for i in self._plain(piece)]

    def _plain(self, piece: str) -> list[int]:
        """Ids of a piece, letter by letter where a normalizer makes a control token of it."""
        control = set(self._control.values())
        ids: list[int] = self.tokenizer.encode(piece, add_special_tokens=False)
        if control.isdisjoint(ids):
            return ids
        ids = [i for letter in piece for i in self.tokenizer.encode(letter, add_special_tokens=False)]
        if control.isdisjoint(ids):
            return ids
        raise ModelError(
            f"text must have ids that are no control tokens; the tokenizer gives {piece!r} none; use another tokenizer"
        )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to and including the generation prompt."""
        return self.ids(*self.render(messages, unused_nonce(messages), add_generation_prompt=True))

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """What stands between a turn of the model and its next one.

        ``messages`` begins with the token that closes the finished turn; see ``after_turn``.
        """
        nonce = unused_nonce(messages)
        closed, spelled = self._behind_turn(messages, nonce, add_generation_prompt=False)
        opened, _ = self._behind_turn(messages, nonce, add_generation_prompt=True)
        if messages and closed == self._behind_turn([], nonce, add_generation_prompt=False)[0]:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"the chat template must show the environment's messages; it drops the role {roles}; use a template that "
                "has it, or let the environment answer as another role"
            )
        if not opened.startswith(closed):
            raise ModelError(
                "the chat template must only append when it adds a generation prompt; this one rewrites what stands "
                "before it; use another template"
            )
        return Bridge(tuple(self.ids(closed, spelled)), tuple(self.ids(opened[len(closed) :], {})))

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
        extended = [*messages, {"role": _HINT_ROLES[role], "content": hint}]
        nonce = unused_nonce(extended)
        before, _ = self._behind_turn(messages, nonce, add_generation_prompt=False)
        after, spelled = self._behind_turn(extended, nonce, add_generation_prompt=False)
        others = " or ".join(f'"{other}"' for other in _HINT_ROLES if other != role)
        if after == before:
            raise ModelError(
                f"a hint must reach the teacher, and this chat template drops a {_HINT_ROLES[role]!r} message there; "
                f"set sdpo.hint_role = {others}"
            )
        if not after.startswith(before):
            raise ModelError(
                f"a hint must not change what stands before it, and this chat template rewrites the environment's "
                f"messages when a {_HINT_ROLES[role]!r} message follows; set sdpo.hint_role = {others}"
            )
        return self.ids(after[len(before) :], spelled)

    def _behind_turn(
        self, messages: Sequence[Message], nonce: str, add_generation_prompt: bool
    ) -> tuple[str, dict[str, str]]:
        """The template's text behind a finished turn of the model, and what its stand-ins spell."""
        stand_in = f"{nonce}turn"
        conversation: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": stand_in},
            *messages,
        ]
        text, spelled = self.render(conversation, nonce, add_generation_prompt)
        _, found, tail = text.partition(stand_in)
        if not found or stand_in in tail:
            raise ModelError(
                "the chat template must render an assistant's content once and verbatim; this one does not; "
                "use another template"
            )
        return tail, spelled

    def render(
        self,
        messages: Sequence[Message],
        nonce: str,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] = (),
    ) -> tuple[str, dict[str, str]]:
        """The template's text, with a stand-in for every control token that a message's own text spells.

        ``nonce`` begins every stand-in and stands nowhere in ``messages``; the second value is what
        each of them spells.
        """
        spelled: dict[str, str] = {}

        def stand_in(match: re.Match[str]) -> str:
            key = f"{nonce}{len(spelled)}z"
            spelled[key] = match.group()
            return key

        def protect(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(stand_in, encodable(value))
            if isinstance(value, list | tuple):
                return [protect(item, pattern) for item in value]
            if isinstance(value, dict):
                return {protect(k, pattern): protect(v, pattern) for k, v in value.items()}
            return value

        def protect_message(message: Message) -> Message:
            pattern = self._patterns[1 if message.get("role") == "assistant" else 0]
            return {k: v if k == "role" else protect(v, pattern) for k, v in message.items()}

        try:
            safe = [protect_message(message) for message in messages]
            given = {"tools": protect(list(tools), self._patterns[0])} if tools else {}
        except RecursionError as error:
            raise ModelError("a message must not be nested hundreds of levels deep; leave it out") from error
        try:
            text = self.tokenizer.apply_chat_template(
                safe, add_generation_prompt=add_generation_prompt, tokenize=False, **given
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"the chat template must render the roles {roles} in this order; it refused: {error}; set "
                "sdpo.hint_role or use a template that takes them"
            ) from error
        return str(text), spelled

    def ids(self, text: str, spelled: dict[str, str]) -> list[int]:
        """Token ids of what ``render`` gave, or of a piece of it."""
        return [
            i
            for part in self.parts(text, spelled)
            for i in (self.encode([part])[0] if isinstance(part, str) else part)
        ]

    def parts(self, text: str, spelled: dict[str, str]) -> list[str | list[int]]:
        """``text`` cut at its stand-ins: what the template wrote, to be encoded, and the ids of what is data."""
        if not spelled:
            return [text] if text else []
        nonce = next(iter(spelled)).removesuffix("0z")
        pieces = re.split(f"({re.escape(nonce)}\\d+z)", text)
        return [self.text_ids(spelled[piece]) if piece in spelled else piece for piece in pieces if piece]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text by itself, control tokens in it being control tokens."""
        if not texts:
            return []
        return list(
            self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        )


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def encodable(text: str) -> str:
    """``text`` with lone surrogates, which no tokenizer takes, as the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def unused_nonce(messages: Sequence[Any]) -> str:
    """The start of a stand-in that no message holds, so that none can be forged."""
    try:
        everything = repr(messages)
    except RecursionError as error:
        raise ModelError("a message must not be nested hundreds of levels deep; leave it out") from error
    number = 0
    while (nonce := f"xqzj{number}jzqx") in everything:
        number += 1
    return nonce
