"""Conversations for the tests of ``inspect``, and that they are what the tests take them for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer_prime_plugin.config import ComposerConfig
from composer_trl_host.collation import CollationReport, SiteOutcome
from composer_trl_host.collator import ComposerDataCollator
from composer_trl_host.hints import ErrorContext, Hint
from composer_trl_host.inspection.build import build_inspection
from composer_trl_host.inspection.measure import Measurer
from composer_trl_host.inspection.model import (
    InspectedTrace,
    Inspection,
    RecoveryToken,
    Site,
    TokenReading,
    TokenShare,
)
from composer_trl_host.inspection.tokens import TokenTexts
from composer_trl_host.traces.model import REJECTED, ReadReport, ToolCall, ToolFailure, Trace, Turn

HOSTILE = (
    '<script>window.hit = 1</script><img src=x onerror="window.hit = 2"></script></style>'
    "<!-- {{ 7 * 7 }} {% raw %} ${hit} &lt; ' \" ` \u202egnp.exe\u202c z\u200bw \u05e9\u05dc\u05d5\u05dd \ud83d end\u0000\u001b[31m"
)
"""Everything that a page must show and not do."""


class KindHints:
    """A hint for every kind but ``"unhinted"``."""

    def generate(self, context: ErrorContext) -> Hint | None:
        if context.error_kind == "unhinted":
            return None
        return Hint(f"about {context.error_kind}: look first", f"test/{context.error_kind}")


def failing(
    name: str = "t1",
    kind: str = "missing_file",
    result: str = "no such file",
    recovery: str = "I list the folder.",
) -> Trace:
    """Four turns: a request, a call that fails, its result, and the recovery."""
    call = ToolCall("c1", "run", '{"command": "cat x"}')
    failure = ToolFailure(turn=2, kind=kind, rule="is_error", result=result, call=call)
    return Trace(
        id=name,
        turns=(
            Turn("user", "show x"),
            Turn("assistant", "I read it.", tool_calls=(call,)),
            Turn("tool", result, tool_call_id="c1", tool_name="run", is_error=True),
            Turn("assistant", recovery, failures=(failure,)),
        ),
        format="openai",
        path="traces/one.jsonl",
        line=1,
    )


def calm(name: str = "calm") -> Trace:
    """Two turns without an error."""
    return Trace(id=name, turns=(Turn("user", "hi"), Turn("assistant", "hello")))


def read_of(*traces: Trace) -> ReadReport:
    return ReadReport(files=1, lines=len(traces), traces=len(traces))


def inspection_of(
    tokenizer: Any,
    *traces: Trace,
    model: Any = None,
    report: ReadReport | None = None,
    seq_len: int | None = None,
    include_rejected: bool = False,
) -> Inspection:
    """What the command makes of ``traces``."""
    config = ComposerConfig()
    collator = ComposerDataCollator(
        tokenizer, config, hints=KindHints(), seq_len=seq_len, include_rejected=include_rejected
    )
    texts = TokenTexts(tokenizer)
    return build_inspection(
        traces,
        collator.collate_trace,
        texts,
        None if model is None else Measurer(model, texts, config.sdpo),
        path="traces",
        tokenizer="tiny",
        model=None if model is None else "tiny",
        read=report or read_of(*traces),
        collation=collator.report,
    )


def by_hand(
    trace: Trace, words: list[str], divergences: list[float] | None = None, hint: str = "look first"
) -> InspectedTrace:
    """``trace`` with its one site kept and these tokens, for pages that need no tokenizer."""
    tokens = tuple(
        RecoveryToken(word, None if divergences is None else reading(divergences[i], word))
        for i, word in enumerate(words)
    )
    turn = trace.sites()[0]
    outcome = SiteOutcome(
        turn, trace.turns[turn].failures, Hint(hint, "test/hand"), "user", len(words), 0, None
    )
    return InspectedTrace(trace, (Site(outcome, tokens),))


def reading(divergence: float, word: str) -> TokenReading:
    others = tuple(TokenShare(text, 0.1) for text in (" a", "\n", "<b>", "</script>"))
    own = TokenShare(word, 0.25)
    return TokenReading(divergence, 0.25, 0.5, (own, *others), (TokenShare(" the", 0.5), own, *others[1:]))


def page_of(*traces: InspectedTrace, model: str | None = None, read: ReadReport | None = None) -> Inspection:
    outcomes = [site.outcome for trace in traces for site in trace.sites]
    collation = CollationReport(
        traces=len(traces), sites_in=len(outcomes), sites_kept=sum(outcome.kept for outcome in outcomes)
    )
    return Inspection("traces", "tiny", model, traces, read or read_of(*(t.trace for t in traces)), collation)


Make = Callable[..., Trace]


def test_the_samples_hold_the_sites_that_their_names_say():
    assert failing().sites() == [3]
    assert failing(kind=REJECTED).sites() == []
    assert failing(kind=REJECTED).sites(include_rejected=True) == [3]
    assert calm().sites() == []
