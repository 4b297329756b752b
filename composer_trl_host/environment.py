"""What a live task gives the host: rows, episodes, replies.

An environment is named in the TOML by import path (``trl_host.environment``). The host asks it
for rows (one per prompt), opens one episode per rollout and feeds it the model's turns as text.
What happened in the episode decides the reward and the error sites; nothing is guessed from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from composer_trl_host.hints import HintGenerator, Message

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Reply:
    """What the environment answers to one turn of the model.

    ``messages`` is appended to the conversation (empty when the episode is over without an
    answer). ``tool_error`` is the error kind when the call failed, else None; ``details`` goes
    to the hint generator and to nobody else. With ``done`` the model gets no further turn, so
    an error on a reply that is ``done`` is no error site.
    """

    messages: Sequence[Message] = ()
    tool_error: str | None = None
    done: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Episode(Protocol):
    """One rollout of one row. Not shared between rollouts."""

    prompt: list[Message]
    """The conversation before the model's first turn."""

    def step(self, turn: str) -> Reply:
        """Feed one turn of the model (its text, control tokens removed)."""
        ...

    def reward(self) -> float:
        """The reward of the episode so far, read off the environment's state."""
        ...

    def solved(self) -> bool:
        """Whether the task is done as asked. Success rates are counted with it."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A live task."""

    name: str
    hints: HintGenerator | None
    """The task's own hints, asked before any other layer. None: there are none."""

    def rows(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """``count`` rows of a split, the same for the same seed. Splits share no row."""
        ...

    def episode(self, row: Mapping[str, Any]) -> Episode:
        """Open a fresh episode of a row."""
        ...
