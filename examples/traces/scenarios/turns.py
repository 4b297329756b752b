"""What a conversation is made of before a format gives it records, ids and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One tool call. Text for ``arguments`` is what a model wrote that is no JSON."""

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class Model:
    text: str = ""
    calls: Sequence[Call] = ()
    thinking: str = ""


@dataclass(frozen=True)
class Result:
    """The result of the first call that has none yet. ``error``: what the flag says, where a file has one.
    ``side_chain``: what a sub-agent did for it. ``image``: the result is a picture."""

    text: str = ""
    error: bool = False
    side_chain: Sequence[Turn] = ()
    image: bool = False


@dataclass(frozen=True)
class Note:
    """Text that a program put into the conversation: ``meta`` (an explanation for the model), ``queued``
    (typed while the model worked) or ``command`` (the output of a command of the program)."""

    kind: str
    text: str


@dataclass(frozen=True)
class Abandoned:
    """Turns that the person went back behind."""

    turns: Sequence[Turn]


@dataclass(frozen=True)
class Prompt:
    """Turns that were given to the model, its own role included."""

    turns: Sequence[Turn]


Turn = User | Model | Result | Note | Abandoned | Prompt


@dataclass(frozen=True)
class Scenario:
    """One conversation. ``title``: for a summary record. ``reward`` and ``group`` where its file has them."""

    name: str
    turns: Sequence[Turn]
    title: str = ""
    reward: float = 0.0
    group: str = ""
