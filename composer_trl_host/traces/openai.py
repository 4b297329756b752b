"""OpenAI-style chat files: one conversation per record, under ``messages``.

A record may hold ``id``, ``tools``, ``reward`` and ``group_id`` besides; a record that is a bare list
of messages is taken as well. An assistant message with ``"weight": 0`` is no turn to train.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_trl_host.traces.messages import Conversation
from composer_trl_host.traces.model import ReadReport, Trace
from composer_trl_host.traces.sites import finish
from composer_trl_host.traces.values import Refused, identifier, number, shape, tool_definitions

FORMAT = "openai"


def recognizes(value: object) -> bool:
    """Whether a record is of this format."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) for item in value) and _is_conversation(value[0])
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


def _is_conversation(item: dict[str, Any]) -> bool:
    return isinstance(item.get("role"), str) or isinstance(item.get("messages"), list)


def traces(value: object, path: str, line: int, report: ReadReport) -> Iterator[Trace]:
    """The trace of one record, or of each in a list; ``Refused`` goes to the caller."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" not in value[0]:
        for item in value:
            if isinstance(item, list):
                raise Refused("record that is a list of lists")
            yield from traces(item, path, line, report)
        return
    record: dict[str, Any] = {"messages": value} if isinstance(value, list) else {}
    if isinstance(value, dict):
        record = value
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise Refused(f"record whose messages are {shape(messages)}")
    yield conversation(record, messages, 0, path, line, report, FORMAT)


def conversation(
    record: dict[str, Any],
    messages: list[Any],
    given: int,
    path: str,
    line: int,
    report: ReadReport,
    name: str,
) -> Trace:
    """The trace of a list of messages, of which the first ``given`` were written by no model."""
    builder = Conversation(report)
    drafts = [builder.add(message) for message in messages]
    for draft in drafts[:given]:
        draft.sampled = False
    if not any(draft.role == "assistant" and draft.sampled for draft in drafts):
        raise Refused("trace without a turn of the model")
    reward = record.get("reward")
    trace_id = identifier(record.get("id")) or identifier(record.get("trace_id"))
    group = identifier(record.get("group_id"))
    tools = tool_definitions(record.get("tools"))
    score = None if reward is None else number(reward, "reward")
    return Trace(
        id=trace_id or f"{path}:{line}",
        turns=finish(drafts, report),
        tools=tools,
        reward=score,
        group_id=group,
        format=name,
        path=path,
        line=line,
    )
