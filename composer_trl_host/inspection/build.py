"""From traces to an inspection: every trace is collated once, and its sites are read where asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from composer_trl_host.collation import CollatedTrace, CollationReport, TraceRow
from composer_trl_host.inspection.measure import Measurer
from composer_trl_host.inspection.model import InspectedTrace, Inspection, RecoveryToken, Site, TokenReading
from composer_trl_host.inspection.tokens import TokenTexts
from composer_trl_host.traces.model import ReadReport, Trace


def build_inspection(
    traces: Iterable[Trace],
    collate: Callable[[Trace], CollatedTrace],
    texts: TokenTexts,
    measurer: Measurer | None,
    *,
    path: str,
    tokenizer: str,
    model: str | None,
    read: ReadReport,
    collation: CollationReport,
    progress: Callable[[int], None] = lambda sites: None,
) -> Inspection:
    """Collate every trace and keep those with error sites. ``read`` and ``collation`` are the reports
    that ``traces`` and ``collate`` fill; ``progress`` is called with the sites done so far."""
    kept: list[InspectedTrace] = []
    done = 0
    for trace in traces:
        collated = collate(trace)
        if not collated.outcomes:
            continue
        readings = [measurer.measure(row) if measurer and row.sites else None for row in collated.rows]
        sites = tuple(
            Site(outcome)
            if outcome.row is None
            else Site(
                outcome,
                _tokens(collated.rows[outcome.row], outcome.turn, readings[outcome.row], texts),
            )
            for outcome in collated.outcomes
        )
        kept.append(InspectedTrace(trace, sites))
        done += len(sites)
        progress(done)
    return Inspection(
        path=path,
        tokenizer=tokenizer,
        model=model,
        traces=tuple(kept),
        read=read,
        collation=collation,
    )


def _tokens(
    row: TraceRow, turn: int, readings: list[list[TokenReading]] | None, texts: TokenTexts
) -> tuple[RecoveryToken, ...]:
    number = row.site_turns.index(turn)
    site = row.sites[number]
    pieces = texts.pieces(row.ids, site.start, site.stop)
    if readings is None:
        return tuple(RecoveryToken(piece) for piece in pieces)
    return tuple(
        RecoveryToken(piece, reading) for piece, reading in zip(pieces, readings[number], strict=True)
    )
