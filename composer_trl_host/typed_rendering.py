"""Traces rendered by a typed renderer of the ``renderers`` package, which says whose each token is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer_prime_plugin.errors import ModelError
from composer_trl_host.chat import Chat
from composer_trl_host.rendering import Refused, RenderedTrace, TurnSpan
from composer_trl_host.trace_messages import Abilities, write_messages
from composer_trl_host.traces.model import Trace


def _everything(trace: Trace) -> str:
    """All text of a trace that a renderer shows, but for the model's own thinking."""
    parts: list[str] = []
    for turn in trace.turns:
        parts.append(turn.content)
        parts += [f"{call.name} {call.arguments}" for call in turn.tool_calls]
    return "\n".join(parts)


_EVERYTHING = Abilities(
    system=True,
    tool=True,
    calls=True,
    thinking=True,
    definitions=True,
    two_in_a_row=True,
    long_ids=True,
    text_beside_calls=True,
)


def is_renderer(candidate: Any) -> bool:
    """Whether ``candidate`` renders by itself; a ``DefaultRenderer`` only wraps a chat template."""
    return callable(getattr(candidate, "render", None)) and callable(
        getattr(candidate, "bridge_to_next_turn", None)
    )


class TypedRenderer:
    """Spans from the renderer's own attribution, one rendering per trace."""

    def __init__(self, renderer: Any, chat: Chat, strip_thinking: bool = False) -> None:
        self.renderer = renderer
        self.chat = chat
        self.strip_thinking = strip_thinking
        self.renderings = 0
        self._prompt: list[int] | None = None

    @staticmethod
    def tokenizer_of(renderer: Any) -> Any:
        """The tokenizer that ``renderer`` encodes with."""
        for name in ("tokenizer", "_tokenizer"):
            found = getattr(renderer, name, None)
            if found is not None:
                return found
        raise ModelError(
            f"a renderer must hold its tokenizer; {type(renderer).__name__} has none; hand over the tokenizer itself"
        )

    def render(self, traces: Sequence[Trace]) -> list[RenderedTrace | Refused]:
        """One rendering per trace, in order."""
        return [self._render(trace) for trace in traces]

    def _render(self, trace: Trace) -> RenderedTrace | Refused:
        written = write_messages(trace, _EVERYTHING, self.strip_thinking)
        if not written.messages:
            return Refused("the trace has no turns")
        if self.chat.control_pattern.search(_everything(trace)):
            return Refused(
                "the trace spells a control token, which this renderer would take for its own; hand over the tokenizer itself"
            )
        try:
            rendered = self.renderer.render(written.messages, tools=list(written.tools) or None)
        except Exception as error:
            return Refused(f"the renderer refuses the conversation: {' '.join(str(error).split())[:200]}")
        self.renderings += 1
        ids, owners, mask = rendered.token_ids, rendered.message_indices, rendered.sampled_mask
        if not mask:
            return Refused(
                "the renderer does not say which tokens are sampled; hand over the tokenizer itself"
            )
        prompt = self._generation_prompt()
        positions: dict[int, list[int]] = {}
        for position, (owner, flag) in enumerate(zip(owners, mask, strict=True)):
            if flag and owner >= 0:
                positions.setdefault(owner, []).append(position)
        spans: dict[int, TurnSpan] = {}
        for index, found in positions.items():
            start, stop = found[0], found[-1] + 1
            opening = start - len(prompt) if list(ids[start - len(prompt) : start]) == prompt else None
            if opening is None or stop - start != len(found):
                continue
            spans[written.turns[index][0]] = TurnSpan(opening, start, stop, len(found) <= 1)
        return RenderedTrace(tuple(ids), spans, notes=written.notes)

    def _generation_prompt(self) -> list[int]:
        if self._prompt is None:
            messages = [{"role": "user", "content": "x"}]
            plain = self.renderer.render_ids(messages)
            self._prompt = list(self.renderer.render_ids(messages, add_generation_prompt=True)[len(plain) :])
        return self._prompt
