"""What was called: the tool's name and its arguments, read off an error's context."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_trl_host.hints import ErrorContext, Message
from composer_trl_host.traces.model import ToolFailure

_PATH_KEYS = ("file_path", "path", "notebook_path", "filename", "filepath", "file", "target_file")
_COMMAND_KEYS = ("command", "cmd")
_LONGEST_CALL = 20_000
_MOST_BRACES = 8

_NAME_BEFORE = re.compile(r"([A-Za-z_][\w.-]{0,80})[ \t:=(]{0,3}$")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Called:
    """A call as far as it can be read. ``name`` is empty and ``arguments`` has nothing where it cannot."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The file that the call is about, or an empty string."""
        return _first_text(self.arguments, _PATH_KEYS)

    @property
    def command(self) -> str:
        """First line of the command that was run, or an empty string."""
        return _first_text(self.arguments, _COMMAND_KEYS).strip().partition("\n")[0]


def failed(context: ErrorContext) -> tuple[Called, str]:
    """The failed call and its result: of the failure that gave the context its kind, where a recorded
    trace lists them; else of the conversation where it pairs calls and results; else of the turn's text."""
    failures = context.details.get("failures", ())
    for failure in failures if isinstance(failures, (list, tuple)) else ():
        if isinstance(failure, ToolFailure) and failure.kind == context.error_kind:
            call = failure.call
            return Called(call.name, _arguments(call.arguments)) if call else Called(), failure.result
    return _paired(context) or _from_text(context.call[:_LONGEST_CALL]), context.result


def _paired(context: ErrorContext) -> Called | None:
    """The call that the result answers, or the only one; None where several are left."""
    answers: list[Message] = []
    for message in reversed(context.messages):
        if message.get("role") == "tool":
            answers.append(message)
            continue
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
            return None
        ids = {answer.get("tool_call_id") for answer in answers if answer.get("content") == context.result}
        own = [
            call for call in calls if isinstance(call, Mapping) and (len(calls) == 1 or call.get("id") in ids)
        ]
        return _from_message(own[0]) if len(own) == 1 else None
    return None


def _from_message(call: Mapping[str, Any]) -> Called:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return Called()
    return Called(_text(function.get("name")), _arguments(function.get("arguments")))


def _from_text(text: str) -> Called:
    """``{"name": ..., "arguments": {...}}`` in the text, or ``Name {...}`` with bare arguments. Nothing
    where it holds several calls: which one failed is not known."""
    whole: list[Called] = []
    bare: list[Called] = []
    start = 0
    for _ in range(_MOST_BRACES):
        start = text.find("{", start)
        if start < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        if "name" in value and "arguments" in value:
            whole.append(_from_message(value))
        else:
            name = _NAME_BEFORE.search(text[max(0, start - 100) : start])
            bare.append(Called(name.group(1) if name else "", value))
        start = end
    found = whole or bare
    return found[0] if len(found) == 1 else Called()


def _arguments(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value[:_LONGEST_CALL])
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}


def _first_text(arguments: Mapping[str, Any], keys: Sequence[str]) -> str:
    for key in keys:
        value = arguments.get(key)
        if isinstance(value, (list, tuple)):
            value = " ".join(part for part in value if isinstance(part, str))
        if isinstance(value, str) and value.strip():
            return value
    return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
