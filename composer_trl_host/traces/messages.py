"""Chat messages of the common form, as OpenAI-style files and verifiers nodes hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from composer_trl_host.traces.model import ReadReport, Role, ToolCall
from composer_trl_host.traces.sites import Draft
from composer_trl_host.traces.values import (
    Refused,
    content_text,
    identifier,
    json_text,
    label,
    shape,
    string,
)

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_THINKING = ("reasoning_content", "reasoning", "thinking")


class Conversation:
    """Turns messages into drafts, in order: a result without an id answers the next open call."""

    def __init__(self, report: ReadReport) -> None:
        self._report = report
        self._open: list[ToolCall] = []
        self._calls = 0

    def add(self, message: object) -> Draft:
        """The draft of one message, or ``Refused`` where the whole trace is not to be trusted."""
        if not isinstance(message, Mapping):
            raise Refused(f"message that is {shape(message)}")
        name = message.get("role")
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise Refused(f"message whose role is {label(name)}")
        content = content_text(message.get("content"), self._report.skipped, f"{role} message")
        if role == "assistant":
            return self._assistant(message, content)
        if role == "tool":
            return self._tool(message, content)
        return Draft(role, content)

    def _assistant(self, message: Mapping[str, Any], content: str) -> Draft:
        thinking = next((text for key in _THINKING if (text := string(message.get(key)))), "")
        items = message.get("tool_calls")
        if items is None:
            legacy = message.get("function_call")
            items = [] if legacy is None else [legacy]
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise Refused(f"tool_calls that are {shape(items)}")
        calls = tuple(self._call(item) for item in items)
        self._open = list(calls)
        return Draft("assistant", content, thinking, calls, sampled=message.get("weight") != 0)

    def _call(self, item: object) -> ToolCall:
        if isinstance(item, str):
            try:
                item = json.loads(item)
            except ValueError as error:
                raise Refused("tool call that is no JSON") from error
        if not isinstance(item, Mapping):
            raise Refused(f"tool call that is {shape(item)}")
        function = item.get("function")
        if not isinstance(function, Mapping):
            custom = item.get("custom")
            function = custom if isinstance(custom, Mapping) else item
        name = string(function.get("name"))
        if name is None:
            raise Refused("tool call without a name")
        arguments = function.get("arguments", function.get("input"))
        self._calls += 1
        return ToolCall(identifier(item.get("id")) or f"call_{self._calls}", name, json_text(arguments))

    def _tool(self, message: Mapping[str, Any], content: str) -> Draft:
        given = identifier(message.get("tool_call_id"))
        name = string(message.get("name"))
        call = next(
            (
                call
                for call in self._open
                if (call.id == given if given is not None else name is None or call.name == name)
            ),
            None,
        )
        if call is not None:
            self._open.remove(call)
            given = call.id
        return Draft(
            "tool",
            content,
            call_id=given,
            name=name,
            is_error=_flag(message),
            exit_code=_status(message),
        )


def _flag(message: Mapping[str, Any]) -> bool | None:
    """The message's own word on whether it is an error; two spellings, and LangChain's ``status``."""
    for key in ("is_error", "isError"):
        value = message.get(key)
        if isinstance(value, bool):
            return value
    status = message.get("status")
    return {"error": True, "success": False}.get(status) if isinstance(status, str) else None


def _status(message: Mapping[str, Any]) -> int | None:
    metadata = message.get("metadata")
    for holder in (message, metadata if isinstance(metadata, Mapping) else {}):
        for key in ("exit_code", "exitCode", "returncode", "return_code"):
            value = holder.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
