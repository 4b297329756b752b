"""Recorded conversations: the types. The readers are behind ``read_traces``."""

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

__all__ = ["REJECTED", "ReadReport", "Role", "ToolCall", "ToolFailure", "Trace", "Turn", "TurnTokens"]
