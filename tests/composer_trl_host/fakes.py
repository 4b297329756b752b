"""A task small enough to read: say the password. A wrong one is an error that can be answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_trl_host.environment import Reply
from composer_trl_host.hints import ErrorContext, Hint


class PasswordHints:
    def generate(self, context: ErrorContext) -> Hint | None:
        return (
            None
            if context.details.get("secret") == "mute"
            else Hint(f"say {context.details['secret']}", "fake/password")
        )


class PasswordEpisode:
    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.prompt = [{"role": "user", "content": "password?"}]
        self.said: list[str] = []

    def step(self, turn: str) -> Reply:
        self.said.append(turn)
        if turn == self.secret:
            return Reply(done=True)
        answer = [{"role": "tool", "content": f"wrong: {turn}"}]
        return Reply(messages=answer, tool_error="wrong", details={"secret": self.secret})

    def reward(self) -> float:
        return float(self.solved())

    def solved(self) -> bool:
        return self.secret in self.said


class PasswordEnvironment:
    name = "password"

    def __init__(self) -> None:
        self.hints = PasswordHints()

    def rows(self, split: str, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"secret": f"{split}{number}"} for number in range(count)]

    def episode(self, row: Mapping[str, Any]) -> PasswordEpisode:
        return PasswordEpisode(row["secret"])


class NoHints(PasswordEnvironment):
    def __init__(self) -> None:
        self.hints = None


class FewRows(PasswordEnvironment):
    def rows(self, split: str, count: int, seed: int) -> list[dict[str, Any]]:
        return super().rows(split, 1, seed)


class Nameless:
    hints = None

    def rows(self, split: str, count: int, seed: int) -> list[dict[str, Any]]:
        return []


class _Episode(PasswordEpisode):
    def __init__(self, secret: str, fault: str) -> None:
        super().__init__(secret)
        self.fault = fault

    def step(self, turn: str) -> Any:
        if self.fault == "raise":
            raise KeyError("boom")
        return {"done": True} if self.fault == "dict" else super().step(turn)

    def reward(self) -> float:
        return float("nan") if self.fault == "nan" else super().reward()


class Faulty(PasswordEnvironment):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def episode(self, row: Mapping[str, Any]) -> PasswordEpisode:
        return _Episode(row["secret"], self.fault)
