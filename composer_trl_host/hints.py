"""Hints: what the teacher reads and the student does not.

A hint is text spliced into the teacher's context before the turn that follows a failed tool
call. It is data, never an instruction to this program, and it reaches the teacher alone: the
student's context, the rewards and the advantages do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]
"""A chat message: ``role``, ``content`` (a string) and, where there are any, ``tool_calls``."""


@dataclass(frozen=True)
class ErrorContext:
    """What a hint generator may look at: one error site.

    ``error_kind`` is the environment's name for the failure (``"unknown_command"``), ``result``
    the text that the model was shown, ``call`` the turn that failed, ``messages`` the whole
    conversation up to the result, and ``details`` whatever the environment knows besides (for
    example the right command), which the student never sees.
    """

    error_kind: str
    result: str
    call: str
    messages: Sequence[Message] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hint:
    """The text of a hint and the name of what wrote it.

    ``source`` names the generator and the rule (``"shell/unknown_command"``): metrics are kept
    per source, so one that never moves the teacher can be found and removed.
    """

    text: str
    source: str


@runtime_checkable
class HintGenerator(Protocol):
    """Anything with ``generate``. The same context must give the same hint."""

    def generate(self, context: ErrorContext) -> Hint | None:
        """The hint for ``context``, or None when this generator has none."""
        ...
