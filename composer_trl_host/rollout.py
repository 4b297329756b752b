"""Live rollouts: the model and an environment take turns, and nothing sampled is rendered again."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ComposerError, TaskError
from composer_trl_host.alignment import ErrorSite
from composer_trl_host.chat import Chat
from composer_trl_host.environment import Environment, Episode, Reply
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator, Message

Generate = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]] | None]]
"""Contexts to sampled turns (ids, ending with an end token unless cut off) and their log-probs, if known."""


@dataclass
class Rollout:
    """One finished episode.

    ``completion_ids`` holds the model's turns and the environment's answers in order,
    ``sampled`` is 1 on tokens that the model sampled; ``logprobs`` (nats, 0 where not sampled) is
    None where the generator gives none. ``turn_ids`` are the model's turns as sampled,
    ``failed_turns`` the numbers of those whose call failed and could be answered.
    """

    prompt_ids: list[int]
    row: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    sites: list[ErrorSite] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    solved: bool = False
    turn_ids: list[list[int]] = field(default_factory=list)
    failed_turns: list[int] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Failed calls that the model could answer."""
        return len(self.failed_turns)

    def up_to_first_error(self) -> list[list[int]]:
        """The model's turns up to and including the first failed one."""
        return self.turn_ids[: self.failed_turns[0] + 1]


@dataclass(frozen=True)
class _Failure:
    """A failed call that waits for the model's next turn."""

    splice_at: int
    hint: Hint | None
    hint_ids: tuple[int, ...]
    error_kind: str


class Player(Protocol):
    """Whatever plays rows: ``RolloutRunner``, or ``verifiers_env.runner.VerifiersRunner``."""

    dropped: Counter[str]

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        generate: Generate,
        show_hints: bool = False,
        given: Sequence[Sequence[list[int]]] | None = None,
    ) -> list[Rollout]:
        """Play each row once; see ``RolloutRunner.play``."""
        ...


class RolloutRunner:
    """Plays an environment's rows with a generator of turns.

    ``longest_context`` is the most tokens a turn may start from (None: no limit); a longer episode
    ends there. ``dropped`` counts by reason the error sites that train nothing and such ends.
    """

    def __init__(
        self,
        environment: Environment,
        chat: Chat,
        hints: HintGenerator | None,
        config: ComposerConfig,
        eos_token_ids: Sequence[int],
        longest_context: int | None = None,
    ) -> None:
        self.longest_context = longest_context
        self.environment = environment
        self.chat = chat
        self.hints = hints
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.dropped: Counter[str] = Counter()

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        generate: Generate,
        show_hints: bool = False,
        given: Sequence[Sequence[list[int]]] | None = None,
    ) -> list[Rollout]:
        """Play each row once.

        ``show_hints``: the model itself reads the hints (to measure the teacher). ``given``: turns
        per row that are replayed instead of sampled, before the model takes over.
        """
        episodes = [self._ask("episode", row, partial(self.environment.episode, row)) for row in rows]
        rollouts = [
            Rollout(prompt_ids=self.chat.prompt_ids(episode.prompt), row=row)
            for row, episode in zip(rows, episodes, strict=True)
        ]
        for rollout, episode in zip(rollouts, episodes, strict=True):
            rollout.messages.extend(episode.prompt)
        replay = [list(turns) for turns in given] if given is not None else [[] for _ in rows]
        failures: dict[int, _Failure] = {}
        active = list(range(len(rows)))
        for number in range(self.config.trl_host.max_turns):
            active = [i for i in active if self._has_room(rollouts[i])]
            if not active:
                break
            sampling = [i for i in active if number >= len(replay[i])]
            contexts = [self._context(rollouts[i], failures.get(i), show_hints) for i in sampling]
            turns, logprobs = generate(contexts) if contexts else ([], None)
            if len(turns) != len(sampling):
                raise TaskError(
                    f"the generator must give one turn per context, {len(sampling)}; found {len(turns)}"
                )
            taken = {i: (replay[i][number], None) for i in active if number < len(replay[i])} | {
                i: (turns[k], None if logprobs is None else logprobs[k]) for k, i in enumerate(sampling)
            }
            last = number + 1 == self.config.trl_host.max_turns
            still: list[int] = []
            for i in active:
                turn, turn_logprobs = taken[i]
                if self._take_turn(rollouts[i], episodes[i], turn, turn_logprobs, failures, i, last):
                    still.append(i)
            active = still
        for rollout, episode in zip(rollouts, episodes, strict=True):
            rollout.reward = float(self._ask("reward", rollout.row, episode.reward))
            if not math.isfinite(rollout.reward):
                raise TaskError(
                    f"{self.environment.name}: reward() must be a finite number; found {rollout.reward} for row {rollout.row!r}"
                )
            rollout.solved = bool(self._ask("solved", rollout.row, episode.solved))
        return rollouts

    def _ask(self, method: str, row: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """Call into the environment; what it raises is named with its place and the row."""
        try:
            return call()
        except ComposerError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise TaskError(
                f"{self.environment.name}: {method}() must not fail; it raised {error!r} at {Path(frame.filename).name}:"
                f"{frame.lineno} for row {dict(row)!r}; mend the environment"
            ) from error

    def _has_room(self, rollout: Rollout) -> bool:
        length = len(rollout.prompt_ids) + len(rollout.completion_ids)
        if self.longest_context is None or length <= self.longest_context:
            return True
        self.dropped["episode ended: no room for a turn in seq_len"] += 1
        return False

    def _context(self, rollout: Rollout, failure: _Failure | None, show_hints: bool) -> list[int]:
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        if show_hints and failure is not None:
            return [*ids[: failure.splice_at], *failure.hint_ids, *ids[failure.splice_at :]]
        return ids

    def _take_turn(
        self,
        rollout: Rollout,
        episode: Episode,
        turn: list[int],
        logprobs: list[float] | None,
        failures: dict[int, _Failure],
        index: int,
        last: bool,
    ) -> bool:
        """Append one sampled turn and the answer to it. Returns whether the episode goes on."""
        start = len(rollout.prompt_ids) + len(rollout.completion_ids)
        _append(rollout, turn, 1, logprobs)
        rollout.turn_ids.append(turn)
        text = self.chat.tokenizer.decode(turn, skip_special_tokens=True)
        rollout.messages.append({"role": "assistant", "content": text})
        self._close_site(rollout, failures.pop(index, None), start, start + len(turn))
        reply = self._ask("step", rollout.row, lambda: episode.step(text))
        if not isinstance(reply, Reply):
            raise TaskError(
                f"{self.environment.name}: step() must return a composer_trl_host.environment.Reply; found "
                f"{type(reply).__name__}"
            )
        if reply.done or not reply.messages or last:
            return False
        bridge = self.chat.bridge(reply.messages)
        _append(rollout, self.chat.after_turn(turn, bridge, self.eos_token_ids), 0, logprobs)
        splice_at = len(rollout.prompt_ids) + len(rollout.completion_ids)
        if reply.tool_error is not None:
            rollout.failed_turns.append(len(rollout.turn_ids) - 1)
            failures[index] = self._failure(rollout, reply, text, splice_at)
        rollout.messages.extend(reply.messages)
        _append(rollout, list(bridge.generation_prompt), 0, logprobs)
        return True

    def _failure(self, rollout: Rollout, reply: Reply, call: str, splice_at: int) -> _Failure:
        assert reply.tool_error is not None
        result = "\n".join(str(message.get("content", "")) for message in reply.messages)
        context = ErrorContext(
            error_kind=reply.tool_error,
            result=result,
            call=call,
            messages=(*rollout.messages, *reply.messages),
            details=reply.details,
        )
        hint, why = self._hint(context)
        if hint is None:
            self.dropped[why] += 1
            return _Failure(splice_at, None, (), reply.tool_error)
        ids = tuple(self.chat.hint_ids(reply.messages, hint.text, self.config.sdpo.hint_role))
        if len(ids) > self.config.trl_host.max_hint_tokens:
            self.dropped["hint longer than trl_host.max_hint_tokens"] += 1
            return _Failure(splice_at, None, (), reply.tool_error)
        return _Failure(splice_at, hint, ids, reply.tool_error)

    def _hint(self, context: ErrorContext) -> tuple[Hint | None, str]:
        """A hint, or why there is none. Training does not end because a generator fails."""
        if self.hints is None:
            return None, "no hint for this error"
        try:
            return self.hints.generate(context), "no hint for this error"
        except Exception as error:
            return None, f"the hint generator failed with {type(error).__name__}"

    def _close_site(self, rollout: Rollout, failure: _Failure | None, start: int, stop: int) -> None:
        if failure is None or failure.hint is None:
            return
        if stop == start:
            self.dropped["empty recovery turn"] += 1
            return
        rollout.sites.append(
            ErrorSite(
                start, stop, failure.splice_at, failure.hint_ids, failure.hint.source, failure.error_kind
            )
        )


def _append(rollout: Rollout, ids: list[int], sampled: int, logprobs: list[float] | None) -> None:
    before = len(rollout.completion_ids)
    rollout.completion_ids.extend(ids)
    rollout.sampled.extend([sampled] * len(ids))
    if logprobs is None:
        return
    if rollout.logprobs is None:
        rollout.logprobs = [0.0] * before  # replayed turns have none
    values = list(logprobs) if sampled else [0.0] * len(ids)
    if len(values) != len(ids):
        raise TaskError(
            f"the generator must give one log-prob per sampled token, {len(ids)}; found {len(values)}"
        )
    rollout.logprobs.extend(values)
