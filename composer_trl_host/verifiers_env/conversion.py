"""Finished episodes as the host's rollouts: recorded ids as they are, error sites, hints, rewards.

Error sites come from the environment where it says which results failed: ``trace.info["tool_errors"]``, a
list of ``{"node": number of the tool message in trace.nodes, "kind": name, "hint": text or absent}``. The
list is complete: a result that it does not name did not fail. Without it the results' text decides, as for
recorded traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import TaskError
from composer_trl_host.collation import TraceRow
from composer_trl_host.collator import ComposerDataCollator
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator
from composer_trl_host.rollout import Rollout
from composer_trl_host.traces.model import ReadReport, Trace, Turn
from composer_trl_host.traces.values import Refused
from composer_trl_host.traces.verifiers import traces as read_traces

ERRORS_KEY = "tool_errors"
SOLVED_KEY = "solved"
SOLVED_REWARD = 1.0
"""A rollout counts as solved from this reward on, where the environment has no metric ``solved``."""


@dataclass(frozen=True)
class _Failed:
    """What the environment says about one failed result."""

    kind: str
    hint: str | None


class EnvironmentHints:
    """The environment's own hint for a failed result, then what ``then`` has."""

    def __init__(self, then: HintGenerator | None, name: str) -> None:
        self.then = then
        self.name = name
        self.known: dict[str, _Failed] = {}
        """By the name that the failed call has in the converted trace."""

    def generate(self, context: ErrorContext) -> Hint | None:
        for failure in context.details.get("failures", ()):
            found = self.known.get(failure.call.id) if failure.call is not None else None
            if found is not None and found.hint:
                return Hint(found.hint, f"{self.name}/{found.kind}")
        return None if self.then is None else self.then.generate(context)


class Converter:
    """Turns the episodes of one environment into rollouts. ``dropped`` counts what was left out, by reason."""

    def __init__(
        self,
        tokenizer: Any,
        config: ComposerConfig,
        hints: HintGenerator | None,
        name: str,
        seq_len: int | None = None,
    ) -> None:
        self.hints = EnvironmentHints(hints, name)
        self.collator = ComposerDataCollator(tokenizer, config, hints=self.hints, seq_len=seq_len)
        self.name = name
        self.dropped: Counter[str] = Counter()

    def rollout(self, episode: Any, row: Mapping[str, Any]) -> Rollout | None:
        """The rollout of one episode; None, with the reason counted, where it cannot be trained on."""
        trace = self._trained_trace(episode)
        if trace is None:
            return None
        record = trace.to_record(float_decimals=None)
        self.hints.known = _named_failures(record, self.name)
        report = ReadReport()
        try:
            branches = list(read_traces(record, "", 0, report))
        except Refused as refused:
            self._drop(f"rollout left out: {refused.reason}")
            return None
        rows = [pair for branch in branches for pair in self._rows(branch)]
        trained = [(branch, piece) for branch, piece in rows if any(piece.trained)]
        if not trained:
            self._drop("rollout left out: no turn of the model that can be trained")
            return None
        if len(rows) > 1:
            # TRL's batch has one row per rollout.
            self.dropped["branch or window left out: a rollout is one row"] += len(rows) - 1
        branch, piece = trained[0]
        return _as_rollout(branch, piece, row, float(trace.reward), _is_solved(trace))

    def _trained_trace(self, episode: Any) -> Any:
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        if not episode.ok or not traces or not all(trace.ok for trace in traces):
            self._drop(f"rollout left out: the episode failed with {_error_name(episode)}")
            return None
        if len(traces) > 1:
            self.dropped["trace of a further trained agent left out: a rollout is one row"] += len(traces) - 1
        return traces[0]

    def _rows(self, branch: Trace) -> list[tuple[Trace, TraceRow]]:
        known = self.hints.known
        branch = replace(branch, turns=tuple(_with_kinds(turn, known) for turn in branch.turns))
        collated = self.collator.collate([branch])[0]
        for outcome in collated.outcomes:
            if outcome.dropped is not None:
                self.dropped[outcome.dropped] += 1
        if not collated.rows:
            for note in self.collator.report.notes:
                self._drop(note)
        self.collator.report.notes.clear()
        return [(branch, row) for row in collated.rows]

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1


def with_stand_ins(
    found: Sequence[Rollout | None],
    rows: Sequence[Mapping[str, Any]],
    group: int,
    why: Callable[[], str],
) -> list[Rollout]:
    """One rollout per row. ``group``: how many in a row share a prompt.

    A failed episode trains nothing and has its group's mean reward, so that it moves no advantage. Raises
    ``TaskError`` with ``why()``, the first failure, where every episode failed.
    """
    some = next((rollout for rollout in found if rollout is not None), None)
    if found and some is None:
        raise TaskError(
            f"at least one episode of a batch must end without an error; found none in {len(found)}; the first: {why()}; "
            "mend the environment"
        )
    complete = []
    for place, rollout in enumerate(found):
        if rollout is None:
            assert some is not None
            first = place - place % group
            others = [other.reward for other in found[first : first + group] if other is not None]
            rollout = Rollout(
                prompt_ids=list(some.prompt_ids),
                row=rows[place],
                completion_ids=some.completion_ids[:1],
                sampled=[0],
                logprobs=[0.0],
                reward=sum(others) / len(others) if others else 0.0,
            )
        complete.append(rollout)
    return complete


def _named_failures(record: dict[str, Any], name: str) -> dict[str, _Failed]:
    """Give every call of ``record`` a name of its own, and mark its results as the environment says.

    Renderers number calls per turn, so that ``call_0`` may be there many times. Returns the failed ones.
    """
    said = _said(record, name)
    nodes = record["nodes"]
    failed: dict[str, _Failed] = {}
    for number, node in enumerate(nodes):
        message = node["message"]
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or []:
                call["id"] = f"{call['id']}@{number}"
        elif message["role"] == "tool":
            caller = _caller(nodes, number, message["tool_call_id"])
            if caller is not None:
                message["tool_call_id"] = f"{message['tool_call_id']}@{caller}"
            if said is None:
                continue
            message["is_error"] = number in said
            if number in said:
                failed[message["tool_call_id"]] = said[number]
    return failed


def _caller(nodes: Sequence[Mapping[str, Any]], number: int, call_id: str) -> int | None:
    """The nearest turn before node ``number`` that made the call."""
    at = nodes[number].get("parent")
    while at is not None:
        calls = nodes[at]["message"].get("tool_calls") or []
        if nodes[at]["message"]["role"] == "assistant" and any(
            call["id"] in (call_id, f"{call_id}@{at}") for call in calls
        ):
            return int(at)
        at = nodes[at].get("parent")
    return None


def _said(record: Mapping[str, Any], name: str) -> dict[int, _Failed] | None:
    """What the environment says about its results; None where it says nothing."""
    entries = (record.get("info") or {}).get(ERRORS_KEY)
    if entries is None:
        return None
    said: dict[int, _Failed] = {}
    tools = [n for n, node in enumerate(record["nodes"]) if node["message"]["role"] == "tool"]
    for entry in entries if isinstance(entries, list) else [entries]:
        node = entry.get("node") if isinstance(entry, Mapping) else None
        kind = entry.get("kind") if isinstance(entry, Mapping) else None
        hint = entry.get("hint") if isinstance(entry, Mapping) else None
        if node not in tools or not isinstance(kind, str) or not kind or not isinstance(hint, str | None):
            raise TaskError(
                f'{name}: trace.info["{ERRORS_KEY}"] must be a list of {{"node": number of a tool message, "kind": text, '
                f'"hint": text or absent}}; found {entry!r}, with tool messages at {tools}; mend the environment'
            )
        said[node] = _Failed(kind, hint)
    return said


def _with_kinds(turn: Turn, known: Mapping[str, _Failed]) -> Turn:
    """The turn with the environment's own names for what failed."""
    failures = tuple(
        replace(failure, kind=known[failure.call.id].kind, rule="environment")
        if failure.call is not None and failure.call.id in known
        else failure
        for failure in turn.failures
    )
    return replace(turn, failures=failures)


def _as_rollout(
    branch: Trace, piece: TraceRow, row: Mapping[str, Any], reward: float, solved: bool
) -> Rollout:
    start = piece.prompt_length
    own = [turn for turn in branch.turns if turn.role == "assistant" and turn.sampled]
    failed = [number - 1 for number, turn in enumerate(own) if turn.tool_error is not None and number > 0]
    return Rollout(
        prompt_ids=list(piece.ids[:start]),
        row=row,
        completion_ids=list(piece.ids[start:]),
        sampled=[int(flag) for flag in piece.trained[start:]],
        logprobs=None if piece.logprobs is None else list(piece.logprobs[start:]),
        sites=list(piece.sites),
        messages=[turn.as_message() for turn in branch.turns],
        reward=reward,
        solved=solved,
        turn_ids=[_sampled_ids(turn) for turn in own],
        failed_turns=failed,
    )


def _sampled_ids(turn: Turn) -> list[int]:
    assert turn.tokens is not None
    return [token for token, flag in zip(turn.tokens.ids, turn.tokens.sampled, strict=True) if flag]


def _is_solved(trace: Any) -> bool:
    metric = trace.metrics.get(SOLVED_KEY)
    return bool(metric) if metric is not None else trace.reward >= SOLVED_REWARD


def _error_name(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return errors[-1].type if errors else "no error said"


def first_error(episode: Any) -> str:
    """What an episode failed with, its message cut."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message.strip()[:300]}" if errors else "no error said"
