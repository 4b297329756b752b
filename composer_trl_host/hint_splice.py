"""Where a hint goes in a rendered trace, and its token ids there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_prime_plugin.config import HintRole
from composer_prime_plugin.errors import ModelError
from composer_trl_host.chat import Chat
from composer_trl_host.hints import Hint, Message
from composer_trl_host.rendering import TurnSpan, common_length
from composer_trl_host.trace_messages import Abilities
from composer_trl_host.traces.model import Turn

INLINE = "inline"
"""No message of its own: the hint's text goes at the end of the message before the recovery."""

_ROLES: tuple[HintRole, ...] = ("user", "tool_result", "system")
_NEUTRAL = "."


@dataclass(frozen=True)
class Splice:
    """A hint's ``ids``, to be inserted ``at`` a position of the trace, as ``role``."""

    at: int
    ids: tuple[int, ...]
    hint: Hint
    role: str


class HintSplicer:
    """Places hints with one chat template. A role that the template refuses, drops or answers by
    rewriting what stands before is replaced by the next that it takes."""

    def __init__(self, chat: Chat, abilities: Abilities) -> None:
        self.chat = chat
        self.abilities = abilities
        self._role: dict[tuple[tuple[str, ...], HintRole], str] = {}
        self._closing: dict[tuple[str, ...], tuple[int, ...]] = {}

    def splice(
        self, before: Sequence[Turn], hint: Hint, role: HintRole, ids: Sequence[int], span: TurnSpan
    ) -> Splice:
        """``before``: the turns since the model's last one. Raises ``ModelError`` where no role has a place."""
        stubs = self._stubs(before)
        key = tuple(str(stub["role"]) for stub in stubs), role
        taken = self._role.get(key)
        if taken is None:
            taken = self._role[key] = self._choose(stubs, role)
        if taken != INLINE:
            return Splice(span.opening, tuple(self._ids(stubs, hint.text, taken)), hint, taken)
        closing = self._closing_ids(stubs)
        at = span.opening - len(closing)
        if tuple(ids[at : span.opening]) != closing:
            raise ModelError(
                "the end of the message before the recovery is not where the chat template puts it"
            )
        return Splice(at, tuple(self.chat.text_ids(f"\n\n{hint.text}")), hint, INLINE)

    def neutral(self, before: Sequence[Turn], splice: Splice) -> list[int]:
        """As many tokens as the hint's, in the same message, that say nothing."""
        if splice.role == INLINE:
            return [self._neutral_id()] * len(splice.ids)
        stubs = self._stubs(before)
        one, other = (self._ids(stubs, text, splice.role) for text in ("a", "Z"))
        head = common_length(one, other)
        tail = common_length(one[::-1], other[::-1])
        inside = len(splice.ids) - head - tail
        if inside < 0 or tuple(one[:head]) != splice.ids[:head]:
            return [self._neutral_id()] * len(splice.ids)
        return [*one[:head], *[self._neutral_id()] * inside, *one[len(one) - tail :]]

    def _choose(self, stubs: list[Message], role: HintRole) -> str:
        has = {"user": True, "tool_result": self.abilities.tool, "system": self.abilities.system}
        for candidate in (role, *(other for other in _ROLES if other != role)):
            if not has[candidate]:
                continue
            try:
                self._ids(stubs, "xqh", candidate)
            except ModelError:
                continue
            return candidate
        try:
            self._closing_ids(stubs)
        except ModelError as error:
            raise ModelError(f"no role of a hint fits the chat template: {error}") from error
        return INLINE

    def _ids(self, stubs: list[Message], text: str, role: str) -> list[int]:
        found = self.chat.hint_ids(stubs, text, role)  # type: ignore[arg-type]  # INLINE never comes here
        if not found:
            raise ModelError("the chat template drops the hint")
        return found

    def _closing_ids(self, stubs: list[Message]) -> tuple[int, ...]:
        """Ids of what the template writes behind the last message before the generation prompt."""
        key = tuple(str(stub["role"]) for stub in stubs)
        if key not in self._closing:
            marked = (
                [*stubs[:-1], {**stubs[-1], "content": "xqm"}]
                if stubs
                else [{"role": "user", "content": "xqm"}]
            )
            text, _ = self.chat.render(
                [{"role": "user", "content": "xqu"}, {"role": "assistant", "content": "xqa"}, *marked]
                if stubs
                else marked,
                "xqzj",
            )
            _, found, tail = text.rpartition("xqm")
            control = self.chat.control_pattern.search(tail)
            if not found or control is None:
                raise ModelError("the chat template closes messages with ordinary text")
            self._closing[key] = tuple(self.chat.ids(tail[control.start() :], {}))
        return self._closing[key]

    def _stubs(self, before: Sequence[Turn]) -> list[Message]:
        """``before`` as messages of the same roles: what a hint's frame is does not hang on what they say."""
        can = self.abilities
        stubs: list[Message] = []
        for turn in before:
            role = turn.role
            if (role == "tool" and not can.tool) or (role == "system" and not can.system):
                role = "user"
            if stubs and role == "user" and stubs[-1]["role"] == "user" and not can.two_in_a_row:
                continue
            stub: Message = {"role": role, "content": "x"}
            if role == "tool":
                stub |= {"tool_call_id": "a" * 9, "name": turn.tool_name or "x"}
            stubs.append(stub)
        return stubs

    def _neutral_id(self) -> int:
        return self.chat.text_ids(_NEUTRAL)[-1]
