"""What a recorded conversation is, whatever file it came from.

A trace is a list of turns in order. Where tool calls failed, the assistant turn that answers them
holds the failures: that turn is the error site, and what it says is the recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

REJECTED = "rejected"
"""The kind of a result by which a person refused or interrupted a call: no error of the model's."""


@dataclass(frozen=True)
class ToolCall:
    """One call. ``arguments`` is the JSON text as the model wrote it, which may be broken."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFailure:
    """One failed result.

    ``turn``: number of the tool turn in the trace. ``kind``: what failed (``"missing_file"``).
    ``rule``: what decided it (``"is_error"``, ``"exit_code"``, ``"text: Traceback"``). ``result``: the
    text that the model was shown. ``call``: what failed, None where the file does not pair it.
    """

    turn: int
    kind: str
    rule: str
    result: str
    call: ToolCall | None

    @property
    def rejected(self) -> bool:
        """Whether a person refused the call."""
        return self.kind == REJECTED


@dataclass(frozen=True)
class TurnTokens:
    """Token ids as recorded. ``ids`` is what the turn adds to the sequence, template pieces
    included (an assistant turn begins with its generation prompt), ``sampled`` (same length) is True
    where the model sampled. ``logprobs`` (nats) and ``advantages`` hold one number per sampled
    token, or are None where the file has none.
    """

    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Turn:
    """One message. ``failures`` is filled on the assistant turn that answers failed calls."""

    role: Role
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    """On a tool turn: the file's own flag. None: the file does not say."""
    exit_code: int | None = None
    """On a tool turn: the status that the file records apart from the text."""
    failures: tuple[ToolFailure, ...] = ()
    sampled: bool = True
    """On an assistant turn: False where the file says that no model wrote it."""
    tokens: TurnTokens | None = None

    @property
    def tool_error(self) -> str | None:
        """Error kind of the first failure that is the model's own, or None."""
        return next((failure.kind for failure in self.failures if not failure.rejected), None)

    def as_message(self) -> dict[str, Any]:
        """The turn as a chat message of the common form, thinking under ``reasoning_content``."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_name is not None:
            message["name"] = self.tool_name
        return message


@dataclass(frozen=True)
class Trace:
    """One conversation. ``reward`` and ``group_id`` (rollouts of one prompt share it) where recorded.
    ``path`` and ``line`` (of its first record, from 1) say where it was read. ``rollout``: where a recorded
    rollout gives several traces (branches), they share its name and its reward, which counts once."""

    id: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    group_id: str | None = None
    format: str = ""
    path: str = ""
    line: int = 0
    rollout: str | None = None

    def sites(self, include_rejected: bool = False) -> list[int]:
        """Numbers of the assistant turns that answer a failed call."""
        return [
            number
            for number, turn in enumerate(self.turns)
            if turn.tool_error is not None or (include_rejected and turn.failures)
        ]


@dataclass
class ReadReport:
    """What reading met. ``bad_lines``: numbers (from 1) of lines that could not be parsed, per file.
    ``skipped``: records, turns or branches left out, by reason. ``unanswered``: failed results that
    the model got no turn to answer, which are no sites. ``skipped_files``: files of a folder that gave
    nothing, with the reason. ``notes``: what was kept although something is odd about it, by what."""

    files: int = 0
    lines: int = 0
    traces: int = 0
    bad_lines: dict[str, list[int]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    skipped_files: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
