"""One record for each conversation, with the messages of a chat API."""

from __future__ import annotations

from collections.abc import Iterator

from scenarios import openai
from scenarios.turns import Model, Result, User

from formats.messages import Record, arguments, flat, tool

SYSTEM = "You repair small projects with the tools that you are given."
TOOLS = [
    {"type": "function", "function": each}
    for each in (
        tool("bash", "Run a command.", "command"),
        tool("read_file", "Show a file.", "path"),
        tool("edit_file", "Replace the one place where the old text stands.", "path", "old_str", "new_str"),
    )
]


def records() -> Iterator[Record]:
    for number, scenario in enumerate(openai.SCENARIOS, start=1):
        messages: list[Record] = [{"role": "system", "content": SYSTEM}]
        calls = 0
        waiting: list[str] = []
        for turn, _ in flat(scenario.turns):
            match turn:
                case User(text):
                    messages.append({"role": "user", "content": text})
                case Result(text):
                    messages.append({"role": "tool", "tool_call_id": waiting.pop(0), "content": text})
                case Model():
                    message: Record = {"role": "assistant", "content": turn.text or None}
                    if turn.thinking:
                        message["reasoning_content"] = turn.thinking
                    for call in turn.calls:
                        calls += 1
                        waiting.append(f"call_{number:02d}_{calls}")
                        function = {"name": call.name, "arguments": arguments(call)}
                        entry = {"id": waiting[-1], "type": "function", "function": function}
                        message.setdefault("tool_calls", []).append(entry)
                    messages.append(message)
        record: Record = {"id": scenario.name}
        if scenario.group:
            record |= {"group_id": scenario.group, "reward": scenario.reward}
        yield record | {"messages": messages, "tools": TOOLS}
