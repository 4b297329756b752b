"""The shape of a step's batch. Imports nothing heavy: the calculator reads it too."""

from __future__ import annotations

from dataclasses import dataclass

GENERATION_PROMPT = 3
"""Tokens between a hint and its recovery: the template's opening of the assistant's turn."""


@dataclass(frozen=True)
class Shape:
    """A batch: rows, prompt and completion tokens, and of each row the tokens of all recoveries and of all
    hints, shared evenly between its sites."""

    rows: int = 4
    prompt: int = 256
    completion: int = 512
    recovery: int = 128
    hint: int = 48
    sites: int = 1

    @property
    def total(self) -> int:
        return self.prompt + self.completion

    @property
    def teacher_tokens(self) -> int:
        """Of a row, behind the student's prefix: per site the token before the hint, the hint, the generation
        prompt and the recovery."""
        return self.recovery + self.hint + self.sites * (1 + GENERATION_PROMPT)

    def __str__(self) -> str:
        sites = f", {self.sites} sites a row" if self.sites > 1 else ""
        return (
            f"B {self.rows}, prompt {self.prompt}, completion {self.completion}, "
            f"recovery {self.recovery}, hint {self.hint}{sites}"
        )
