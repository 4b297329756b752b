"""Recorded conversations: the types, and ``read_traces``, which reads them from files."""

from composer_prime_plugin.errors import ComposerError, TaskError
from composer_trl_host.traces.errors import ERROR_KINDS, classify
from composer_trl_host.traces.model import (
    REJECTED,
    ReadReport,
    Role,
    ToolCall,
    ToolFailure,
    Trace,
    Turn,
    TurnTokens,
)
from composer_trl_host.traces.reader import FORMATS, TraceFormat, read_traces

__all__ = [
    "ERROR_KINDS",
    "FORMATS",
    "REJECTED",
    "ComposerError",
    "ReadReport",
    "Role",
    "TaskError",
    "ToolCall",
    "ToolFailure",
    "Trace",
    "TraceFormat",
    "Turn",
    "TurnTokens",
    "classify",
    "read_traces",
]
