"""Traces that hold token ids: read as they are, never rendered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from composer_prime_plugin.errors import ModelError
from composer_trl_host.chat import Chat
from composer_trl_host.rendering import Refused, RenderedTrace, TurnSpan
from composer_trl_host.traces.model import Trace, Turn, TurnTokens

_COMPARED = 200
"""Characters of a turn that are compared with what its ids decode to."""


def render_recorded(trace: Trace, chat: Chat) -> RenderedTrace | Refused:
    """The ids of ``trace`` with its turns' spans, or why they are not this tokenizer's."""
    try:
        prompt = list(chat.bridge([]).generation_prompt)
    except ModelError as error:
        return Refused(f"the chat template's generation prompt cannot be told: {error}")
    vocabulary = len(chat.tokenizer)
    ids: list[int] = []
    spans: dict[int, TurnSpan] = {}
    foreign: set[int] = set()
    owned: list[Turn] = []
    for number, turn in enumerate(trace.turns):
        own = turn.tokens
        assert own is not None
        problem = _broken(own, vocabulary)
        if problem is not None:
            return Refused(f"turn {number}: {problem}")
        if not _says(turn, chat, own.ids):
            return Refused(
                f"ids of another tokenizer: those of turn {number} do not decode to its text; set model.name to the model that sampled them"
            )
        offset = len(ids)
        ids.extend(own.ids)
        sampled = [position for position, flag in enumerate(own.sampled) if flag]
        if sampled and turn.sampled:
            owned.append(turn)
        if turn.role != "assistant":
            continue
        if not sampled or not turn.sampled:
            foreign.add(number)
        start = sampled[0] if sampled else _behind_prompt(own.ids, prompt)
        stop = sampled[-1] + 1 if sampled else len(own.ids)
        if start is None or start >= stop:
            continue
        if sampled and stop - start != len(sampled):
            return Refused(f"a turn's sampled tokens must be one run; those of turn {number} are not")
        opening = _opening(ids, offset, offset + start, prompt)
        if opening is None:
            continue  # nothing stands before it: neither a hint nor a prediction has a place there
        text = chat.tokenizer.decode(list(own.ids[start:stop]), skip_special_tokens=True)
        spans[number] = TurnSpan(opening, offset + start, offset + stop, not text.strip())
    have_logprobs = bool(owned) and all(_tokens(turn).logprobs is not None for turn in owned)
    have_advantages = bool(owned) and all(_tokens(turn).advantages is not None for turn in owned)
    notes: list[str] = []
    if owned and not have_logprobs:
        some = any(_tokens(turn).logprobs is not None for turn in owned)
        notes.append(
            f"recorded ids {'with log-probs on some turns alone' if some else 'without log-probs'}: read as on-policy"
        )
    if owned and not have_advantages and any(_tokens(turn).advantages is not None for turn in owned):
        notes.append("recorded advantages on some turns alone: the group's is taken instead")
    return RenderedTrace(
        tuple(ids),
        spans,
        logprobs=_joined(trace, [turn.tokens.logprobs if turn.tokens else None for turn in trace.turns])
        if have_logprobs
        else None,
        advantages=_joined(trace, [turn.tokens.advantages if turn.tokens else None for turn in trace.turns])
        if have_advantages
        else None,
        foreign=frozenset(foreign),
        notes=tuple(notes),
    )


def _tokens(turn: Turn) -> TurnTokens:
    assert turn.tokens is not None
    return turn.tokens


def _broken(own: TurnTokens, vocabulary: int) -> str | None:
    """Why a turn's streams do not fit, or None."""
    outside = next((i for i in own.ids if not 0 <= i < vocabulary), None)
    if outside is not None:
        return (
            f"ids of another tokenizer: {outside} is outside this one's vocabulary of {vocabulary}; set model.name to the "
            "model that sampled them"
        )
    if len(own.sampled) != len(own.ids):
        return f"there must be one sampled flag per id, {len(own.ids)}; found {len(own.sampled)}"
    count = sum(own.sampled)
    for name, values in (("log-probs", own.logprobs), ("advantages", own.advantages)):
        if values is not None and (len(values) != count or not all(map(math.isfinite, values))):
            return f"there must be one finite number per sampled token among the {name}, {count}; found {len(values)}"
    return None


def _joined(trace: Trace, streams: Sequence[Sequence[float] | None]) -> tuple[float, ...]:
    """One value per token of the trace: 0 where nothing was sampled."""
    joined: list[float] = []
    for turn, values in zip(trace.turns, streams, strict=True):
        each = iter(values or ())
        joined += [next(each, 0.0) if flag else 0.0 for flag in _tokens(turn).sampled]
    return tuple(joined)


def _behind_prompt(ids: Sequence[int], prompt: list[int]) -> int | None:
    for begin in range(len(ids) - len(prompt) + 1):
        if list(ids[begin : begin + len(prompt)]) == prompt:
            return begin + len(prompt)
    return None


def _opening(ids: Sequence[int], offset: int, start: int, prompt: list[int]) -> int | None:
    """Where the hint goes: before the generation prompt, wherever the record holds it; with another prompt than
    the template's, before its first token that is the same, else before all that the turn begins with."""
    if prompt and list(ids[max(start - len(prompt), 0) : start]) == prompt:
        found = start - len(prompt)
    else:
        same = [position for position in range(offset, start) if prompt and ids[position] == prompt[0]]
        found = same[-1] if same else offset
    return found if found > 0 else None


def _says(turn: Turn, chat: Chat, ids: Sequence[int]) -> bool:
    """Whether ``ids`` decode to something that holds what the turn says, blanks aside."""
    said = (
        [turn.content] if turn.content.strip() else [turn.thinking, *(call.name for call in turn.tool_calls)]
    )
    wanted = ["".join(text.split())[:_COMPARED] for text in said if text.strip()]
    if not wanted:
        return True
    found = "".join(chat.tokenizer.decode(list(ids), skip_special_tokens=False).split())
    return all(text in found or "�" in text for text in wanted)
