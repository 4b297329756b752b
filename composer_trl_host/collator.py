"""``ComposerDataCollator``: traces to the batch that ``compose_loss`` and the trainer read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ModelError, TaskError
from composer_trl_host.alignment import ErrorSite, build_site_batch
from composer_trl_host.chat import Chat
from composer_trl_host.collation import CollatedTrace, CollationReport, SiteOutcome, TraceRow, trace_of
from composer_trl_host.hint_splice import HintSplicer, Splice
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator
from composer_trl_host.recorded import render_recorded
from composer_trl_host.rendering import Refused, RenderedTrace, TemplateRenderer, TurnSpan
from composer_trl_host.trace_messages import Abilities
from composer_trl_host.traces.model import Trace, Turn
from composer_trl_host.typed_rendering import TypedRenderer, is_renderer
from composer_trl_host.windows import Window, cut_windows

HintHook = Callable[[ErrorContext], Hint | None]


class ComposerDataCollator:
    """Traces in, a padded batch out.

    ``tokenizer_or_renderer``: a tokenizer with a chat template, or a renderer of the ``renderers``
    package. ``hints``: a generator or a function of an ``ErrorContext``; None: no site has a hint.
    ``seq_len``: the most tokens of a student or teacher sequence; None: no limit. A longer trace gives its
    longest beginning and, for each site behind it, a row cut from the left at a turn of the model. ``report`` counts everything that was kept, dropped, cut or changed. Raises ``ModelError`` for
    a tokenizer without a template and ``TaskError`` for a feature that is no trace.
    """

    def __init__(
        self,
        tokenizer_or_renderer: Any,
        config: ComposerConfig,
        *,
        hints: HintGenerator | HintHook | None = None,
        seq_len: int | None = None,
        include_rejected: bool | None = None,
    ) -> None:
        host = config.trl_host
        self.config = config
        self.seq_len = seq_len
        self.include_rejected = host.rejected_are_errors if include_rejected is None else include_rejected
        self.report = CollationReport()
        self._hint = hints.generate if isinstance(hints, HintGenerator) else hints
        typed = is_renderer(tokenizer_or_renderer)
        self.chat = Chat(
            TypedRenderer.tokenizer_of(tokenizer_or_renderer) if typed else tokenizer_or_renderer
        )
        abilities = Abilities.of(self.chat)
        self.renderer: TemplateRenderer | TypedRenderer = (
            TypedRenderer(tokenizer_or_renderer, self.chat, host.strip_thinking)
            if typed
            else TemplateRenderer(self.chat, abilities, host.strip_thinking)
        )
        self._splicer = HintSplicer(self.chat, abilities)

    def __call__(self, features: Iterable[Trace | Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of ``features``: traces, or rows that hold one under ``trace`` (``collation.to_row``),
        an ``advantage`` beside it."""
        pairs = [trace_of(feature) for feature in features]
        collated = self.collate([trace for trace, _ in pairs], [advantage for _, advantage in pairs])
        return self.batch([row for each in collated for row in each.rows])

    def collate_trace(self, trace: Trace, advantage: float | None = None) -> CollatedTrace:
        """The rows of one trace and what became of its sites."""
        return self.collate([trace], [advantage])[0]

    def collate(
        self, traces: Sequence[Trace], advantages: Sequence[float | None] | None = None
    ) -> list[CollatedTrace]:
        """The rows of each trace. ``advantages``: one per trace, for turns without recorded ones; None is 0."""
        given = [None] * len(traces) if advantages is None else advantages
        text = [trace for trace in traces if not _is_recorded(trace)]
        rendered = iter(self.renderer.render(text))
        return [
            self._collate(
                trace,
                render_recorded(trace, self.chat) if _is_recorded(trace) else next(rendered),
                advantage or 0.0,
            )
            for trace, advantage in zip(traces, given, strict=True)
        ]

    def _collate(self, trace: Trace, rendered: RenderedTrace | Refused, advantage: float) -> CollatedTrace:
        turns = trace.sites(self.include_rejected)
        self.report.traces += 1
        self.report.sites_in += len(turns)
        if isinstance(rendered, Refused):
            self.report.notes[f"trace left out: {rendered}"] += 1
            return self._close([], [self._dropped(trace, turn, None, str(rendered)) for turn in turns])
        for note in rendered.notes:
            self.report.notes[note] += 1
        if not _is_recorded(trace) and any(turn.tokens is not None for turn in trace.turns):
            self.report.notes["token ids on some turns alone: the trace was rendered instead"] += 1
        not_ours = {
            number for number, turn in enumerate(trace.turns) if turn.role == "assistant" and not turn.sampled
        }
        rendered = dataclasses.replace(rendered, foreign=rendered.foreign | not_ours)
        outcomes: dict[int, SiteOutcome] = {}
        splices: dict[int, Splice] = {}
        for turn in turns:
            result = self._site(trace, rendered, turn)
            if isinstance(result, Splice):
                splices[turn] = result
            else:
                outcomes[turn] = result
        sdpo = self.config.sdpo
        windows, unfit = cut_windows(
            len(rendered.ids),
            rendered.spans,
            {turn: len(splice.ids) for turn, splice in splices.items()},
            self.seq_len,
            add_up=sdpo.hint_scope == "cumulative" or sdpo.student_context == "placeholder",
        )
        if not rendered.spans:
            self.report.notes["trace left out: it has no turn of the model"] += 1
        trained = sum(window.stop - window.start for window in windows if window.trains)
        if rendered.spans and not windows and not unfit:
            self.report.notes["trace left out: its first turn does not fit seq_len"] += 1
        if windows and trained < len(rendered.ids):
            self.report.notes["trace cut: channel 1 trains its beginning alone"] += 1
        rows: list[TraceRow] = []
        for window in windows:
            rows.append(self._row(trace, rendered, window, splices, advantage))
            for turn in window.sites:
                outcomes[turn] = self._outcome(
                    trace, turn, rendered.spans[turn], splices[turn], row=len(rows) - 1
                )
            if window.start:
                self.report.cut_rows += 1
                self.report.cut_tokens += window.start
        for turn, reason in unfit.items():
            outcomes[turn] = self._outcome(trace, turn, rendered.spans[turn], splices[turn], dropped=reason)
        return self._close(rows, [outcomes[turn] for turn in turns])

    def _close(self, rows: list[TraceRow], outcomes: list[SiteOutcome]) -> CollatedTrace:
        self.report.rows += len(rows)
        for outcome in outcomes:
            if outcome.dropped is None:
                self.report.sites_kept += 1
            else:
                self.report.dropped[outcome.dropped] += 1
        return CollatedTrace(tuple(rows), tuple(outcomes))

    # Sites

    def _site(self, trace: Trace, rendered: RenderedTrace, number: int) -> Splice | SiteOutcome:
        """The hint's ids and place for one site, or why there is none."""
        span = rendered.spans.get(number)
        if span is None:
            return self._dropped(trace, number, None, "the recovery turn is not in the rendering")
        if number in rendered.foreign:
            return self._dropped(trace, number, None, "no model's turn, or another branch has it")
        if span.empty:
            return self._dropped(trace, number, None, "empty recovery turn")
        hint, why = self._ask(_context(trace, number))
        if hint is None:
            return self._dropped(trace, number, None, why, span)
        before = _between(trace, number)
        try:
            splice = self._splicer.splice(before, hint, self.config.sdpo.hint_role, rendered.ids, span)
        except ModelError as error:
            return self._dropped(trace, number, hint, f"the hint has no place: {error}", span)
        if splice.role != self.config.sdpo.hint_role:
            self.report.notes[
                f'hint_role "{self.config.sdpo.hint_role}" has no place in this chat template: "{splice.role}" taken'
            ] += 1
        if len(splice.ids) > self.config.trl_host.max_hint_tokens:
            return self._dropped(trace, number, hint, "hint longer than trl_host.max_hint_tokens", span)
        return splice

    def _ask(self, context: ErrorContext) -> tuple[Hint | None, str]:
        """A hint, or why there is none. A generator that fails costs the site, not the run."""
        if self._hint is None:
            return None, "no hint for this error"
        try:
            hint = self._hint(context)
        except Exception as error:
            return None, f"the hint generator failed with {type(error).__name__}"
        if hint is not None and not (isinstance(hint, Hint) and isinstance(hint.text, str)):
            return None, f"the hint generator gave {type(hint).__name__}, no Hint with a text"
        return (hint, "") if hint is not None and hint.text.strip() else (None, "no hint for this error")

    def _dropped(
        self, trace: Trace, turn: int, hint: Hint | None, reason: str, span: TurnSpan | None = None
    ) -> SiteOutcome:
        tokens = 0 if span is None else span.stop - span.start
        return SiteOutcome(turn, trace.turns[turn].failures, hint, None, tokens, None, reason)

    def _outcome(
        self,
        trace: Trace,
        turn: int,
        span: TurnSpan,
        splice: Splice,
        row: int | None = None,
        dropped: str | None = None,
    ) -> SiteOutcome:
        failures = trace.turns[turn].failures
        return SiteOutcome(turn, failures, splice.hint, splice.role, span.stop - span.start, row, dropped)

    # Rows

    def _row(
        self,
        trace: Trace,
        rendered: RenderedTrace,
        window: Window,
        splices: Mapping[int, Splice],
        advantage: float,
    ) -> TraceRow:
        """One window of a trace, with placeholders in it where they are asked for."""
        ids = list(rendered.ids[window.start : window.stop])
        length = len(ids)
        sampled, trained = [False] * length, [False] * length
        spans = [
            (number, span)
            for number, span in rendered.spans.items()
            if span.start >= window.start and span.stop <= window.stop
        ]
        for number, span in spans:
            if number in rendered.foreign:
                continue
            here = slice(span.start - window.start, span.stop - window.start)
            sampled[here] = [True] * (span.stop - span.start)
            if window.trains:
                trained[here] = [True] * (span.stop - span.start)
        first = min((span.start for _, span in spans), default=window.stop) - window.start
        recorded = rendered.advantages
        credit = (
            [advantage if flag else 0.0 for flag in trained]
            if recorded is None
            else [
                value if flag else 0.0
                for value, flag in zip(recorded[window.start : window.stop], trained, strict=True)
            ]
        )
        logprobs = None
        if rendered.logprobs is not None:
            logprobs = [
                value if flag else 0.0
                for value, flag in zip(rendered.logprobs[window.start : window.stop], sampled, strict=True)
            ]
        sites: list[ErrorSite] = []
        shift = -window.start
        for number in window.sites:
            span, splice = rendered.spans[number], splices[number]
            at = splice.at + shift
            placeholder = 0
            if self.config.sdpo.student_context == "placeholder":
                neutral = self._splicer.neutral(_between(trace, number), splice)
                placeholder = len(neutral)
                ids[at:at] = neutral
                sampled[at:at] = trained[at:at] = [False] * placeholder
                credit[at:at] = [0.0] * placeholder
                if logprobs is not None:
                    logprobs[at:at] = [0.0] * placeholder
                shift += placeholder
            sites.append(
                ErrorSite(
                    start=span.start + shift,
                    stop=span.stop + shift,
                    splice_at=at,
                    hint_ids=splice.ids,
                    hint_source=splice.hint.source,
                    error_kind=_kind(trace.turns[number]),
                    placeholder=placeholder,
                )
            )
        return TraceRow(
            trace_id=trace.id,
            ids=tuple(ids),
            prompt_length=first,
            sampled=tuple(sampled),
            trained=tuple(trained),
            advantages=tuple(credit),
            logprobs=None if logprobs is None else tuple(logprobs),
            sites=tuple(sites),
            site_turns=window.sites,
        )

    # Batches

    def batch(self, rows: Sequence[TraceRow]) -> dict[str, Any]:
        """Rows, padded on the right, with the keys that ``compose_loss`` reads.

        ``(B, T)``: ``input_ids`` and ``attention_mask`` long; ``completion_mask``, ``response_mask`` and
        ``sdpo_loss_mask`` (the recovery tokens) bool; ``advantages``, ``inference_logprobs`` float32.
        ``logprobs_known`` ``(B,)`` bool: rows without recorded log-probs count as on-policy. The keys of
        ``SiteBatch`` for the ``S`` sites, and one ``site_id`` (``trace:turn``) per site.
        Raises ``TaskError`` for no rows.
        """
        if not rows:
            raise TaskError(
                "a batch needs at least one row; the traces given have none; see the collator's report for why"
            )
        width = max(len(row.ids) for row in rows)
        pad = self.chat.tokenizer.pad_token_id
        pad = self.chat.tokenizer.eos_token_id if pad is None else pad
        if pad is None:
            raise ModelError(
                "the tokenizer must have a pad or an end token; found neither; set tokenizer.pad_token"
            )

        def padded(values: Sequence[Sequence[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], dtype=dtype)

        batch: dict[str, Any] = {
            "input_ids": padded([row.ids for row in rows], pad, torch.long),
            "attention_mask": padded([[1] * len(row.ids) for row in rows], 0, torch.long),
            "completion_mask": padded(
                [[False] * row.prompt_length + [True] * (len(row.ids) - row.prompt_length) for row in rows],
                False,
                torch.bool,
            ),
            "response_mask": padded([row.trained for row in rows], False, torch.bool),
            "advantages": padded([row.advantages for row in rows], 0.0, torch.float32),
            "inference_logprobs": None,
            "logprobs_known": torch.tensor([row.logprobs is not None for row in rows]),
        }
        if any(row.logprobs is not None for row in rows):
            batch["inference_logprobs"] = padded(
                [(0.0,) * len(row.ids) if row.logprobs is None else row.logprobs for row in rows],
                0.0,
                torch.float32,
            )
        sites = build_site_batch(
            [row.ids for row in rows],
            [row.sites for row in rows],
            [0] * len(rows),
            pad,
            self.config.sdpo.hint_scope,
        )
        mask = torch.zeros_like(batch["completion_mask"])
        row_of = sites.site_row.unsqueeze(1).expand_as(sites.student_response_idx)
        valid = sites.student_response_valid
        mask[row_of[valid], sites.student_response_idx[valid]] = True
        batch["sdpo_loss_mask"] = mask
        batch["site_id"] = tuple(f"{row.trace_id}:{turn}" for row in rows for turn in row.site_turns)
        batch.update(sites.as_batch())
        return batch


def _is_recorded(trace: Trace) -> bool:
    return bool(trace.turns) and all(turn.tokens is not None for turn in trace.turns)


def _kind(turn: Turn) -> str:
    return turn.tool_error or (turn.failures[0].kind if turn.failures else "unknown")


def _between(trace: Trace, number: int) -> list[Turn]:
    """The turns between the model's last turn and turn ``number``."""
    first = number
    while first > 0 and trace.turns[first - 1].role != "assistant":
        first -= 1
    return list(trace.turns[first:number])


def _context(trace: Trace, number: int) -> ErrorContext:
    turn = trace.turns[number]
    failures = turn.failures
    calls = [failure.call for failure in failures if failure.call is not None]
    return ErrorContext(
        error_kind=_kind(turn),
        result="\n".join(failure.result for failure in failures),
        call="\n".join(f"{call.name} {call.arguments}" for call in calls),
        messages=tuple(earlier.as_message() for earlier in trace.turns[:number]),
        details={"failures": failures, "trace": trace.id, "turn": number},
    )


def group_advantages(traces: Sequence[Trace]) -> list[float | None]:
    """Reward minus the mean of the trace's group (Dr. GRPO: no division by a deviation). Branches of one
    rollout count once in the mean. None where the trace has no reward or its group no second rollout."""
    groups: dict[str, dict[str, float]] = {}
    for number, trace in enumerate(traces):
        if trace.reward is not None and not math.isfinite(trace.reward):
            raise TaskError(
                f"a reward must be a finite number; found {trace.reward} in trace {trace.id}; leave it out"
            )
        if trace.reward is not None and trace.group_id is not None:
            groups.setdefault(trace.group_id, {})[trace.rollout or f"#{number}"] = trace.reward
    result: list[float | None] = []
    for trace in traces:
        rewards = groups.get(trace.group_id or "", {}).values()
        alone = trace.reward is None or trace.group_id is None or len(rewards) < 2
        result.append(None if alone else float(trace.reward or 0.0) - sum(rewards) / len(rewards))
    return result
