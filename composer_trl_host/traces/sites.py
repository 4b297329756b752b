"""From messages to turns with their error sites: the part that every format shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_trl_host.traces.errors import classify
from composer_trl_host.traces.model import REJECTED, ReadReport, Role, ToolCall, ToolFailure, Turn, TurnTokens


@dataclass
class Draft:
    """A turn before its failures are known. ``refused``: the file says apart from the text that a
    person refused the call."""

    role: Role
    content: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    is_error: bool | None = None
    exit_code: int | None = None
    refused: bool = False
    sampled: bool = True
    tokens: TurnTokens | None = None


def finish(drafts: Sequence[Draft], report: ReadReport, known: int = 0) -> tuple[Turn, ...]:
    """The turns, each failed result on the next assistant turn, which answers it.

    All failures between two assistant turns belong to one site. A failure with no assistant turn after
    it, or answered by a turn that no model wrote, is counted in ``report.unanswered``, unless it stands
    in the first ``known`` turns, which another trace holds too.
    """
    calls: dict[str, ToolCall] = {}
    pending: list[ToolFailure] = []
    turns: list[Turn] = []
    for place, draft in enumerate(drafts):
        failures: tuple[ToolFailure, ...] = ()
        name = draft.name
        if draft.role == "assistant":
            calls.update((call.id, call) for call in draft.calls)
            if draft.sampled:
                failures = tuple(pending)
            else:
                report.unanswered += _own(pending, known)
            pending = []
        elif draft.role == "tool":
            call = calls.get(draft.call_id) if draft.call_id is not None else None
            if call is None and place >= known:
                report.notes["tool result without a call"] += 1
            name = name or (call.name if call is not None else None)
            failure = _failure(place, draft, name, call)
            if failure is not None:
                pending.append(failure)
        turns.append(
            Turn(
                role=draft.role,
                content=draft.content,
                thinking=draft.thinking,
                tool_calls=draft.calls,
                tool_call_id=draft.call_id,
                tool_name=name if draft.role == "tool" else None,
                is_error=draft.is_error,
                exit_code=draft.exit_code,
                failures=failures,
                sampled=draft.sampled,
                tokens=draft.tokens,
            )
        )
    report.unanswered += _own(pending, known)
    return tuple(turns)


def _own(failures: Sequence[ToolFailure], known: int) -> int:
    return sum(not failure.rejected for failure in failures if failure.turn >= known)


def _failure(place: int, draft: Draft, name: str | None, call: ToolCall | None) -> ToolFailure | None:
    if draft.refused:
        return ToolFailure(place, REJECTED, "toolUseResult", draft.content, call)
    found = classify(
        draft.content,
        is_error=draft.is_error,
        exit_code=draft.exit_code,
        tool_name=name,
        arguments=call.arguments if call is not None else "",
    )
    return None if found is None else ToolFailure(place, found[0], found[1], draft.content, call)
