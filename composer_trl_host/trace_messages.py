"""A trace's turns as the chat messages that one chat template can show.

Templates differ in what they take: tool results, tool calls, a system message, two messages of one
role in a row. What a template cannot show is written into the text of a message instead, and each
such change is named, so that it can be counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime_plugin.errors import ModelError
from composer_trl_host.chat import Chat
from composer_trl_host.hints import Message
from composer_trl_host.traces.model import ToolCall, Trace

_LONG_ID = "call_0123456789abcdef"
_SHORT_ID_LENGTH = 9
_DEEPEST = 100
"""Levels of nesting that a template is given; deeper arguments are text."""


@dataclass(frozen=True)
class Abilities:
    """What a chat template shows, found by rendering small conversations."""

    system: bool
    tool: bool
    calls: bool
    thinking: bool
    definitions: bool
    two_in_a_row: bool
    long_ids: bool
    text_beside_calls: bool

    @classmethod
    def of(cls, chat: Chat) -> Abilities:
        """Probe ``chat``'s template. Text that is not in the rendering was refused or dropped."""
        user, reply = {"role": "user", "content": "xqu"}, {"role": "assistant", "content": "xqa"}

        def shows(messages: Sequence[Message], *needles: str, tools: Sequence[Any] = ()) -> bool:
            try:
                text, _ = chat.render(messages, "xqzj", tools=tools)
            except ModelError:
                return False
            return all(needle in text for needle in needles)

        def result(call_id: str) -> Message:
            return {"role": "tool", "content": "xqr", "tool_call_id": call_id, "name": "xqf"}

        def calling(call_id: str) -> Message:
            function = {"name": "xqf", "arguments": {"xqk": "xqv"}}
            call = {"id": call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "xqb", "tool_calls": [call]}

        short = "a" * _SHORT_ID_LENGTH
        called = {
            i: shows([user, calling(i), result(i), reply], "xqf", "xqk", "xqv", "xqr")
            for i in (_LONG_ID, short)
        }
        thinking = {**reply, "reasoning_content": "xqt"}
        parameters = {"type": "object", "properties": {}}
        definition = {
            "type": "function",
            "function": {"name": "xqd", "description": "xqe", "parameters": parameters},
        }
        return cls(
            system=shows([{"role": "system", "content": "xqs"}, user, reply], "xqs"),
            tool=any(called.values()) or shows([user, reply, result(short), reply], "xqr"),
            calls=any(called.values()),
            thinking=shows([user, thinking], "xqt"),
            definitions=shows([user, reply], "xqd", tools=[definition]),
            two_in_a_row=shows([user, {"role": "user", "content": "xqw"}, reply], "xqu", "xqw"),
            long_ids=called[_LONG_ID] or not called[short],
            text_beside_calls=shows([user, calling(short), result(short), reply], "xqb"),
        )


@dataclass(frozen=True)
class Written:
    """A trace in messages. ``turns``: for each message the numbers of the turns it holds."""

    messages: list[Message]
    turns: list[tuple[int, ...]]
    tools: tuple[Any, ...]
    notes: tuple[str, ...]


def write_messages(
    trace: Trace, can: Abilities, strip_thinking: bool = False, plain_calls: bool = False
) -> Written:
    """The messages of ``trace`` for a template with the abilities ``can``.

    ``plain_calls``: calls whose arguments are no JSON object, and several calls in one message, are
    written as text, for templates that refuse them.
    """
    notes: list[str] = []
    ids: dict[str, str] = {}

    def short(call_id: str | None) -> str | None:
        if call_id is None or can.long_ids:
            return call_id
        _note(notes, "call ids shortened: the chat template takes nine characters")
        return ids.setdefault(call_id, f"{len(ids):0{_SHORT_ID_LENGTH}d}")

    messages: list[Message] = []
    holds: list[tuple[int, ...]] = []
    for number, turn in enumerate(trace.turns):
        message: Message = {"role": turn.role, "content": turn.content}
        if turn.thinking and not strip_thinking:
            if can.thinking:
                message["reasoning_content"] = turn.thinking
            else:
                _note(notes, "thinking left out: the chat template does not show it")
        if turn.tool_calls:
            as_text = [
                call
                for call in turn.tool_calls
                if not can.calls
                or (plain_calls and (len(turn.tool_calls) > 1 or not isinstance(arguments_of(call), dict)))
            ]
            if as_text:
                _note(notes, "tool calls written as text: the chat template does not show them")
                message["content"] = "\n".join(
                    part for part in (turn.content, *map(call_text, as_text)) if part
                )
            rest = [call for call in turn.tool_calls if call not in as_text]
            if rest:
                if turn.content and not can.text_beside_calls:
                    _note(notes, "text beside a tool call left out: the chat template does not show it")
                message["tool_calls"] = [
                    {
                        "id": short(call.id),
                        "type": "function",
                        "function": {"name": call.name, "arguments": arguments_of(call)},
                    }
                    for call in rest
                ]
        if turn.role == "tool":
            if can.tool:
                if turn.tool_call_id is not None:
                    message["tool_call_id"] = short(turn.tool_call_id)
                if turn.tool_name is not None:
                    message["name"] = turn.tool_name
            else:
                _note(notes, "tool results written as user messages: the chat template has no tool role")
                message = {
                    "role": "user",
                    "content": f"<tool_response>\n{turn.content}\n</tool_response>",
                }
        if turn.role == "system" and not can.system:
            _note(notes, "system message written as a user message: the chat template refuses it")
            message["role"] = "user"
        if (
            messages
            and not can.two_in_a_row
            and message["role"] == messages[-1]["role"]
            and message["role"] == "user"
        ):
            _note(notes, "messages of one role joined: the chat template wants them in turns")
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{message['content']}"}
            holds[-1] = (*holds[-1], number)
            continue
        messages.append(message)
        holds.append((number,))
    tools: tuple[Any, ...] = tuple(dict(tool) for tool in trace.tools)
    if tools and not can.definitions:
        _note(notes, "tool definitions left out: the chat template does not show them")
        tools = ()
    return Written(messages, holds, tools, tuple(notes))


def arguments_of(call: ToolCall) -> Any:
    """The arguments as templates take them: a mapping, or the text where it is no JSON object."""
    if call.arguments.count("{") + call.arguments.count("[") > _DEEPEST and _depth(call.arguments) > _DEEPEST:
        return call.arguments
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _depth(text: str) -> int:
    """An upper bound of how deep the JSON in ``text`` is nested."""
    deepest = depth = 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        deepest = max(deepest, depth)
    return deepest


def call_text(call: ToolCall) -> str:
    """A call in the common text form."""
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)
