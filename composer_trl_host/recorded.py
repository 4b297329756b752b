"""Traces that hold token ids: read as they are, never rendered."""

from __future__ import annotations

from collections.abc import Sequence

from composer_trl_host.chat import Chat
from composer_trl_host.rendering import Refused, RenderedTrace, TurnSpan
from composer_trl_host.traces.model import Trace, Turn

_COMPARED = 200
"""Characters of a turn that are compared with what its ids decode to."""


def render_recorded(trace: Trace, chat: Chat) -> RenderedTrace | Refused:
    """The ids of ``trace`` with its turns' spans, or why they are not this tokenizer's."""
    vocabulary = len(chat.tokenizer)
    prompt = list(chat.bridge([]).generation_prompt)
    ids: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    spans: dict[int, TurnSpan] = {}
    foreign: set[int] = set()
    have_logprobs, have_advantages = True, True
    for number, turn in enumerate(trace.turns):
        assert turn.tokens is not None
        own = turn.tokens
        offset = len(ids)
        outside = next((i for i in own.ids if not 0 <= i < vocabulary), None)
        if outside is not None:
            return Refused(
                f"ids of another tokenizer: {outside} is outside this one's vocabulary of {vocabulary}; set model.name to the model that sampled them"
            )
        ids.extend(own.ids)
        sampled = [position for position, flag in enumerate(own.sampled) if flag]
        have_logprobs &= not sampled or own.logprobs is not None
        have_advantages &= not sampled or own.advantages is not None
        logprobs.extend(_spread(own.sampled, own.logprobs))
        advantages.extend(_spread(own.sampled, own.advantages))
        if turn.role != "assistant":
            continue
        if not sampled or not turn.sampled:
            foreign.add(number)
            begin = _prompt_length(own.ids, prompt)
            if begin is not None and begin < len(own.ids):
                spans[number] = TurnSpan(
                    offset + begin - len(prompt), offset + begin, offset + len(own.ids), False
                )
            continue
        start, stop = sampled[0], sampled[-1] + 1
        if stop - start != len(sampled):
            return Refused(f"a turn's sampled tokens must be one run; those of turn {number} are not")
        if not _says(turn, chat, own.ids[start:stop]):
            return Refused(
                f"ids of another tokenizer: those of turn {number} do not decode to its text; set model.name to the model that sampled them"
            )
        # The hint goes before the generation prompt; with another one recorded there, before all that the
        # recorded turn begins with.
        known = list(own.ids[:start])[-len(prompt) :] == prompt if prompt else True
        opening = start - len(prompt) if known else 0
        only_end = (
            stop - start == 1
            and not chat.tokenizer.decode(list(own.ids[start:stop]), skip_special_tokens=True).strip()
        )
        if offset + opening == 0:
            return Refused(
                "a recorded trace must begin with a prompt; this one begins with a turn of the model"
            )
        spans[number] = TurnSpan(offset + opening, offset + start, offset + stop, only_end)
    return RenderedTrace(
        tuple(ids),
        spans,
        logprobs=tuple(logprobs) if have_logprobs else None,
        advantages=tuple(advantages) if have_advantages else None,
        foreign=frozenset(foreign),
        notes=() if have_logprobs else ("recorded ids without log-probs: read as on-policy",),
    )


def _spread(sampled: Sequence[bool], values: Sequence[float] | None) -> list[float]:
    """One value per token: 0 where nothing was sampled."""
    if values is None:
        return [0.0] * len(sampled)
    each = iter(values)
    return [next(each) if flag else 0.0 for flag in sampled]


def _prompt_length(ids: Sequence[int], prompt: list[int]) -> int | None:
    for begin in range(len(ids) - len(prompt) + 1):
        if list(ids[begin : begin + len(prompt)]) == prompt:
            return begin + len(prompt)
    return None


def _says(turn: Turn, chat: Chat, ids: Sequence[int]) -> bool:
    """Whether ``ids`` decode to something that holds the turn's text, blanks aside."""
    wanted = "".join(turn.content.split())[:_COMPARED]
    if not wanted:
        return True
    found = "".join(chat.tokenizer.decode(list(ids), skip_special_tokens=False).split())
    return wanted in found or "�" in wanted
