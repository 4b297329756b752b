"""What the two formats of chat messages share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from scenarios.turns import Call, Model, Prompt, Result, Turn, User

Record = dict[str, Any]


def tool(name: str, description: str, *required: str) -> Record:
    properties = {argument: {"type": "string"} for argument in required}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(required)},
    }


def arguments(call: Call) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)


def flat(turns: Sequence[Turn]) -> Iterator[tuple[User | Model | Result, bool]]:
    """The turns one by one, each with whether it was given in the prompt."""
    for turn in turns:
        match turn:
            case Prompt(inner):
                yield from ((each, True) for each, _ in flat(inner))
            case User() | Model() | Result():
                yield turn, False
            case _:
                raise ValueError(f"a chat has no {type(turn).__name__}")
