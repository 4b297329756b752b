"""A taskset of verifiers 0.4 and the harness that plays it: ``env.taskset.id = "verifiers-tool"``."""

from verifiers_tool.harness import InlineChat
from verifiers_tool.taskset import ShellTaskset

__all__ = ["InlineChat", "ShellTaskset"]
