"""A trace as token ids, rendered once, and where each turn of the model stands in them.

The chat template renders the whole conversation; control tokens that only the template can write
show where turns begin and end, since message text never becomes one. A template that rewrites
history (drops earlier thinking, joins tool results) is read as it came out, never re-rendered in
parts. Each turn is then encoded by itself, as it would have been sampled behind its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from composer_prime_plugin.errors import ModelError
from composer_trl_host.chat import Chat, unused_nonce
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


@dataclass(frozen=True)
class _Frame:
    """How a template marks a turn of the model: ``opening`` matches the text before it, all of which is
    generation prompt where ``opens_with_prompt``; ``ending`` is the control token behind it."""

    opening: re.Pattern[str]
    opens_with_prompt: bool
    ending: str


class TemplateRenderer:
    """Renders traces with a tokenizer's chat template, once per trace."""

    def __init__(self, chat: Chat, strip_thinking: bool = False) -> None:
        self.chat = chat
        self.strip_thinking = strip_thinking
        self.renderings = 0

    @cached_property
    def abilities(self) -> Abilities:
        return Abilities.of(self.chat)

    @cached_property
    def frame(self) -> _Frame | None:
        """None: the template marks turns with ordinary text alone."""
        return _find_frame(self.chat)

    def render(self, traces: Sequence[Trace]) -> list[RenderedTrace | Refused]:
        """One rendering per trace, in order, all encoded in one call."""
        texts = [self._text(trace) for trace in traces]
        cut = [
            [self.chat.parts(piece, text.spelled) for piece in text.pieces]
            for text in texts
            if isinstance(text, _Text)
        ]
        plain = [part for pieces in cut for parts in pieces for part in parts if isinstance(part, str)]
        encoded = iter(self.chat.encode(plain))
        pieces_of = iter(cut)
        return [
            text.rendered(
                [
                    [i for part in parts for i in (next(encoded) if isinstance(part, str) else part)]
                    for parts in next(pieces_of)
                ]
            )
            if isinstance(text, _Text)
            else text
            for text in texts
        ]

    def _text(self, trace: Trace) -> _Text | Refused:
        written = write_messages(trace, self.abilities, self.strip_thinking)
        try:
            try:
                return self._located(written)
            except ModelError:
                raw = write_messages(trace, self.abilities, self.strip_thinking, plain_calls=True)
                if raw.messages == written.messages:
                    raise
                return self._located(raw)
        except ModelError as error:
            return Refused(f"the chat template refuses the conversation: {_reason(error)}")
        except Refused as refusal:
            return refusal

    def _located(self, written: Written) -> _Text:
        if not written.messages:
            raise Refused("the trace has no turns")
        nonce = unused_nonce(written.messages)
        text, spelled = self.chat.render(written.messages, nonce, tools=written.tools)
        self.renderings += 1
        model_turns = [
            (turns[0], index)
            for index, (message, turns) in enumerate(zip(written.messages, written.turns, strict=True))
            if message["role"] == "assistant"
        ]
        cuts = None if self.frame is None else _cuts_by_frame(text, self.frame)
        if cuts is None or len(cuts) != len(model_turns):
            cuts = self._cuts_by_prefix(text, written, nonce, [index for _, index in model_turns])
        return _Text.cut(text, cuts, [turn for turn, _ in model_turns], spelled, written.notes, self.frame)

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
            if not (text.startswith(prompt) and text.startswith(after)) or len(after) < len(prompt):
                raise Refused(
                    "the turns of the model cannot be found: the chat template marks them with ordinary text and rewrites history"
                )
            cuts.append((len(before), len(prompt), len(after.rstrip())))
        return cuts


@dataclass(frozen=True)
class _Text:
    """A rendering cut into pieces: what stands before a turn, its generation prompt, the turn, and so on."""

    pieces: tuple[str, ...]
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
        spelled: dict[str, str],
        notes: tuple[str, ...],
        frame: _Frame | None,
    ) -> _Text:
        pieces: list[str] = []
        empty: list[bool] = []
        end = 0
        for opening, start, stop in cuts:
            pieces += [text[end:opening], text[opening:start], text[start:stop]]
            body = text[start:stop]
            empty.append(not (body.removesuffix(frame.ending) if frame else body).strip())
            end = stop
        return cls((*pieces, text[end:]), tuple(turns), tuple(empty), spelled, notes)

    def rendered(self, encoded: Sequence[Sequence[int]]) -> RenderedTrace:
        ids: list[int] = []
        spans: dict[int, TurnSpan] = {}
        for number, (turn, empty) in enumerate(zip(self.turns, self.empty, strict=True)):
            before, prompt, body = encoded[3 * number : 3 * number + 3]
            ids.extend(before)
            opening = len(ids)
            ids.extend(prompt)
            start = len(ids)
            ids.extend(body)
            spans[turn] = TurnSpan(opening, start, len(ids), empty)
        ids.extend(encoded[-1])
        return RenderedTrace(tuple(ids), spans, notes=self.notes)


def _cuts_by_frame(text: str, frame: _Frame) -> list[tuple[int, int, int]]:
    """``(opening, start, stop)`` of every turn of the model. Control tokens cannot come from messages."""
    cuts: list[tuple[int, int, int]] = []
    position = 0
    while (first := frame.opening.search(text, position)) is not None:
        end = text.find(frame.ending, first.end())
        stop = len(text) if end < 0 else end + len(frame.ending)
        opening = first
        for later in frame.opening.finditer(text, first.end(), stop):
            opening = later
        cuts.append((opening.start() if frame.opens_with_prompt else opening.end(), opening.end(), stop))
        position = stop
    return cuts


def _find_frame(chat: Chat) -> _Frame | None:
    user, reply = {"role": "user", "content": "xqu"}, {"role": "assistant", "content": "xqa"}
    control = chat.control_pattern
    asked = _behind(chat, [user], "xqu")
    prompted = _behind(chat, [user], "xqu", add_generation_prompt=True)
    answered = _behind(chat, [user, reply], "xqu")
    between, _, tail = answered.partition("xqa")
    ending = control.search(tail)
    if ending is None or not prompted.startswith(asked):
        return None
    prompt = prompted[len(asked) :]
    header = _common_prefix(prompt, between[len(asked) :]) if between.startswith(asked) else ""
    if control.search(header):
        return _Frame(re.compile(re.escape(header)), True, ending.group())
    if prompt:
        return None
    # No generation prompt: a turn begins behind the control token that closes a message before it.
    closings = {_last(control, between)}
    try:
        called = [
            user,
            reply,
            {"role": "tool", "content": "xqr", "tool_call_id": "a" * 9, "name": "xqf"},
            reply,
        ]
        closings.add(_last(control, _behind(chat, called, "xqr").partition("xqa")[0]))
    except ModelError:
        pass
    found = sorted(closing for closing in closings if closing)
    if not found:
        return None
    return _Frame(re.compile("|".join(map(re.escape, found))), False, ending.group())


def _behind(chat: Chat, messages: Sequence[Any], needle: str, add_generation_prompt: bool = False) -> str:
    text, _ = chat.render(messages, "xqzj", add_generation_prompt=add_generation_prompt)
    return text.rpartition(needle)[2]


def _common_prefix(one: str, other: str) -> str:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]


def _last(control: re.Pattern[str], text: str) -> str:
    found = control.findall(text)
    return str(found[-1]) if found else ""


def _reason(error: Exception) -> str:
    cause: BaseException = error.__cause__ or error
    return " ".join(str(cause).split())[:200]


Render = Callable[[Sequence[Trace]], list[RenderedTrace | Refused]]
"""What the collator asks: one rendering per trace, or why there is none."""
