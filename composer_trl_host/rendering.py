"""A trace as token ids, rendered once, and where each turn of the model stands in them.

The chat template renders the whole conversation; control tokens that only the template can write
show where turns begin and end, since message text never becomes one. A template that rewrites
history (drops earlier thinking, joins tool results) is read as it came out. Every cut must hold what its
message says; where the marks do not give such cuts, and the template only appends, the borders are those of
the conversation's beginnings. The text is encoded whole and cut at the borders; only where a token would
reach over one is each piece encoded by itself, as it would have been sampled behind its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from composer_prime_plugin.errors import ModelError
from composer_trl_host.chat import Chat, encodable, unused_nonce
from composer_trl_host.hints import Message
from composer_trl_host.trace_messages import Abilities, Written, write_messages
from composer_trl_host.traces.model import Trace


@dataclass(frozen=True)
class TurnSpan:
    """One turn of the model, in positions of the trace's ids: its generation prompt begins at
    ``opening``, its own tokens (with the one that ends it) are ``[start, stop)``. ``empty``: there is
    nothing in it but the ending."""

    opening: int
    start: int
    stop: int
    empty: bool


@dataclass(frozen=True)
class RenderedTrace:
    """``ids`` and the span of each assistant turn by its number; a turn without one could not be
    found. ``logprobs``, ``advantages``: per token where recorded, else None. ``foreign``: turns that no
    model wrote or that another branch trains. ``notes``: what was changed to fit the template."""

    ids: tuple[int, ...]
    spans: Mapping[int, TurnSpan]
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    foreign: frozenset[int] = frozenset()
    notes: tuple[str, ...] = field(default=())


class Refused(Exception):
    """Why a trace has no rendering."""


_COMPARED = 60
"""Characters of a turn's end that must stand in the cut that is taken for it."""
_NOT_FOUND = (
    "the turns of the model cannot be told apart in the chat template's rendering; hand over a renderer of the "
    "renderers package that knows the model"
)


@dataclass(frozen=True)
class _Frame:
    """How a template marks a turn of the model: ``opening`` matches the text before it, all of which is
    generation prompt where ``opens_with_prompt``; ``ending`` matches the control tokens that end one;
    ``message``: the control token that opens any message, which no turn holds (None: there is none)."""

    opening: re.Pattern[str]
    opens_with_prompt: bool
    ending: re.Pattern[str]
    message: str | None


class TemplateRenderer:
    """Renders traces with a tokenizer's chat template, once per trace."""

    def __init__(self, chat: Chat, abilities: Abilities, strip_thinking: bool = False) -> None:
        self.chat = chat
        self.abilities = abilities
        self.strip_thinking = strip_thinking
        self.renderings = 0

    @cached_property
    def frame(self) -> _Frame | None:
        """None: the template marks turns with ordinary text alone."""
        return _find_frame(self.chat)

    def render(self, traces: Sequence[Trace]) -> list[RenderedTrace | Refused]:
        """One rendering per trace, in order, all encoded in one call."""
        texts = [self._text(trace) for trace in traces]
        whole = [text for text in texts if isinstance(text, _Text) and not text.spelled]
        encoded = iter(self._encode([text.text for text in whole]))
        return [
            text
            if isinstance(text, Refused)
            else self._rendered(text, None if text.spelled else next(encoded))
            for text in texts
        ]

    def _encode(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]] | None]:
        """Ids and the characters that each stands for; None where the tokenizer does not say."""
        if not texts:
            return []
        if not getattr(self.chat.tokenizer, "is_fast", False):
            return [None] * len(texts)
        found = self.chat.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
        )
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def _rendered(
        self, text: _Text, encoded: tuple[list[int], list[tuple[int, int]]] | None
    ) -> RenderedTrace:
        if encoded is not None:
            positions = _token_borders(*encoded, text.borders, self._control_ids)
            if positions is not None:
                return text.at(encoded[0], positions)
        # A token that reaches over a border, or text that is data: each piece by itself.
        pieces = [self.chat.ids(piece, text.spelled) for piece in text.pieces]
        ids = [i for piece in pieces for i in piece]
        return text.at(ids, list(accumulate(len(piece) for piece in pieces[:-1])))

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.chat.tokenizer.added_tokens_decoder)

    def _text(self, trace: Trace) -> _Text | Refused:
        try:
            written = write_messages(trace, self.abilities, self.strip_thinking)
            try:
                return self._located(written)
            except ModelError:
                raw = write_messages(trace, self.abilities, self.strip_thinking, plain_calls=True)
                if raw.messages == written.messages:
                    raise
                return self._located(raw)
        except ModelError as error:
            return Refused(f"the chat template refuses the conversation: {_reason(error)}")
        except RecursionError:
            return Refused("a message is nested too deeply")
        except Refused as refusal:
            return refusal

    def _located(self, written: Written) -> _Text:
        if not written.messages:
            raise Refused("the trace has no turns")
        nonce = unused_nonce([*written.messages, *written.tools])
        text, spelled = self.chat.render(written.messages, nonce, tools=written.tools)
        self.renderings += 1
        model_turns = [
            (turns[0], index)
            for index, (message, turns) in enumerate(zip(written.messages, written.turns, strict=True))
            if message["role"] == "assistant"
        ]
        messages = [written.messages[index] for _, index in model_turns]
        cuts: list[tuple[int, int, int]] | None = None
        if self.frame is not None:
            cuts = _cuts_by_frame(text, self.frame, written.messages[-1]["role"] == "assistant")
            if not _hold(text, cuts, messages, spelled, self.frame):
                cuts = None
        if cuts is None:
            cuts = self._cuts_by_prefix(text, written, nonce, [index for _, index in model_turns])
            if not _hold(text, cuts, messages, spelled, None):
                raise Refused(_NOT_FOUND)
        return _Text.cut(
            text, cuts, [turn for turn, _ in model_turns], messages, spelled, written.notes, self.frame
        )

    def _cuts_by_prefix(
        self, text: str, written: Written, nonce: str, indices: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Turn borders from renderings of the conversation's beginnings, where those are prefixes."""
        cuts: list[tuple[int, int, int]] = []
        for index in indices:
            before, _ = self.chat.render(written.messages[:index], nonce, tools=written.tools)
            prompt, _ = self.chat.render(
                written.messages[:index], nonce, add_generation_prompt=True, tools=written.tools
            )
            after, _ = self.chat.render(written.messages[: index + 1], nonce, tools=written.tools)
            self.renderings += 3
            if not (text.startswith(prompt) and text.startswith(after)):
                raise Refused(_NOT_FOUND)
            start, stop = len(prompt), max(len(after.rstrip()), len(prompt))
            cuts.append((min(len(before), start), start, stop))
        return cuts


@dataclass(frozen=True)
class _Text:
    """A rendering and, for each turn of the model, the three ``borders`` in it: where its generation prompt
    begins, where it begins, where it ends."""

    text: str
    borders: tuple[int, ...]
    turns: tuple[int, ...]
    empty: tuple[bool, ...]
    spelled: dict[str, str]
    notes: tuple[str, ...]

    @classmethod
    def cut(
        cls,
        text: str,
        cuts: Sequence[tuple[int, int, int]],
        turns: Sequence[int],
        messages: Sequence[Message],
        spelled: dict[str, str],
        notes: tuple[str, ...],
        frame: _Frame | None,
    ) -> _Text:
        empty: list[bool] = []
        for (_, start, stop), message in zip(cuts, messages, strict=True):
            body = text[start:stop]
            body = frame.ending.sub("", body) if frame else body
            written = (
                message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
            )
            empty.append(not body.strip() or not written)
        return cls(
            text, tuple(border for cut in cuts for border in cut), tuple(turns), tuple(empty), spelled, notes
        )

    @property
    def pieces(self) -> list[str]:
        """The text between the borders."""
        return [self.text[a:b] for a, b in pairwise((0, *self.borders, len(self.text)))]

    def at(self, ids: Sequence[int], positions: Sequence[int]) -> RenderedTrace:
        """The rendering with its borders at ``positions`` of ``ids``."""
        spans: dict[int, TurnSpan] = {}
        for number, (turn, empty) in enumerate(zip(self.turns, self.empty, strict=True)):
            opening, start, stop = positions[3 * number : 3 * number + 3]
            spans[turn] = TurnSpan(opening, start, stop, empty)
        return RenderedTrace(tuple(ids), spans, notes=self.notes)


def _token_borders(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], borders: Sequence[int], control: frozenset[int]
) -> list[int] | None:
    """The token that each border stands before; None where a token of text reaches over one. A control token
    that takes in the blanks behind it moves the border behind itself."""
    positions: list[int] = []
    token = 0
    for border in borders:
        while token < len(ids) and offsets[token][0] < border:
            if offsets[token][1] > border and ids[token] not in control:
                return None
            token += 1
        positions.append(token)
    return positions


def _hold(
    text: str,
    cuts: Sequence[tuple[int, int, int]],
    messages: Sequence[Message],
    spelled: Mapping[str, str],
    frame: _Frame | None,
) -> bool:
    """Whether the cuts are the turns of ``messages``: as many, each with what its message says, none with the
    beginning of another message in it."""
    if len(cuts) != len(messages):
        return False
    end = 0
    for (opening, start, stop), message in zip(cuts, messages, strict=True):
        if not end <= opening <= start <= stop:
            return False
        end = stop
        body = text[start:stop]
        if frame is not None and frame.message is not None and frame.message in body:
            return False
        blank = "".join(_spell(body, spelled).split())
        said = [str(call["function"]["name"]) for call in message.get("tool_calls") or []]
        if not said:
            said = [_last_words(message["content"])]
        if any("".join(words.split()) not in blank for words in said):
            return False
    return True


def _last_words(content: str) -> str:
    """The end of a message, which a template shows whatever it makes of the thinking before."""
    visible = encodable(content.rpartition("</think>")[2]).strip()
    return visible[-_COMPARED:]


def _spell(body: str, spelled: Mapping[str, str]) -> str:
    for key, value in spelled.items():
        if key in body:
            body = body.replace(key, value)
    return body


def _cuts_by_frame(text: str, frame: _Frame, ends_with_model: bool) -> list[tuple[int, int, int]]:
    """``(opening, start, stop)`` of every turn of the model. Control tokens cannot come from messages."""
    cuts: list[tuple[int, int, int]] = []
    position = 0
    while (first := frame.opening.search(text, position)) is not None:
        end = frame.ending.search(text, first.end())
        if end is None and not ends_with_model:
            break
        stop = len(text) if end is None else end.end()
        opening = first
        for later in frame.opening.finditer(text, first.end(), stop):
            opening = later
        cuts.append((opening.start() if frame.opens_with_prompt else opening.end(), opening.end(), stop))
        position = stop
    return cuts


def _find_frame(chat: Chat) -> _Frame | None:
    user, reply = {"role": "user", "content": "xqu"}, {"role": "assistant", "content": "xqa"}
    call = {"id": "a" * 9, "type": "function", "function": {"name": "xqf", "arguments": {"xqk": "xqv"}}}
    result = {"role": "tool", "content": "xqr", "tool_call_id": "a" * 9, "name": "xqf"}
    control = chat.control_pattern
    asked = _behind(chat, [user], "xqu")
    prompted = _behind(chat, [user], "xqu", add_generation_prompt=True)
    # What closes a message may differ where nothing follows it.
    asked = _common_prefix(asked, prompted)
    prompt = prompted[len(asked) :]
    between, _, tail = _behind(chat, [user, reply], "xqu").partition("xqa")
    history, _, inner = _first_behind(
        chat, [user, reply, {"role": "user", "content": "xqw"}, reply], "xqu"
    ).partition("xqa")
    endings = [_first(control, tail), _first(control, inner)]
    closings = {_last(control, between)}
    try:
        called = _first_behind(
            chat, [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result, reply], "xqv"
        )
        after_call, _, after_result = called.partition("xqr")
        if not any(ending and ending in after_call for ending in endings):
            endings.append(
                _first(re.compile("|".join(map(re.escape, _special(chat))) or r"(?!)"), after_call)
            )
        closings.add(_last(control, after_result.partition("xqa")[0]))
    except ModelError:
        pass
    found = sorted({ending for ending in endings if ending}, key=len, reverse=True)
    if not found:
        return None
    ending = re.compile("|".join(map(re.escape, found)))
    # The part of the prompt that earlier turns show as well: what only the next turn has is not a mark.
    header = prompt
    for shown in (between, history):
        header = _common_prefix(header, shown[len(asked) :]) if shown.startswith(asked) else ""
    if control.search(header):
        message = _first(control, header)
        return _Frame(re.compile(re.escape(header)), True, ending, None if message in found else message)
    if prompt:
        return None
    # No generation prompt: a turn begins behind the control token that closes a message before it.
    openings = sorted(closing for closing in closings if closing)
    if not openings:
        return None
    return _Frame(re.compile("|".join(map(re.escape, openings))), False, ending, None)


def _special(chat: Chat) -> list[str]:
    return sorted((str(token) for token in chat.tokenizer.all_special_tokens), key=len, reverse=True)


def _first_behind(chat: Chat, messages: Sequence[Any], needle: str) -> str:
    text, _ = chat.render(messages, "xqzj")
    return text.partition(needle)[2]


def _first(control: re.Pattern[str], text: str) -> str:
    found = control.search(text)
    return "" if found is None else found.group()


def _behind(chat: Chat, messages: Sequence[Any], needle: str, add_generation_prompt: bool = False) -> str:
    text, _ = chat.render(messages, "xqzj", add_generation_prompt=add_generation_prompt)
    return text.rpartition(needle)[2]


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _common_prefix(one: str, other: str) -> str:
    return one[: common_length(one, other)]


def _last(control: re.Pattern[str], text: str) -> str:
    found = control.findall(text)
    return str(found[-1]) if found else ""


def _reason(error: Exception) -> str:
    cause: BaseException = error.__cause__ or error
    return " ".join(str(cause).split())[:200]
