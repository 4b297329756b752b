"""The terminal's view: every site, the totals, and everything that was left out with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_trl_host.inspection.model import (
    InspectedTrace,
    Inspection,
    Site,
    Tally,
    by_kind,
    by_source,
    mean,
)
from composer_trl_host.inspection.text import counted, one_line

WIDE = 110
"""Columns from which the sites are a table. Below, and in a pipe, a site is a block of lines."""

KEPT = "kept"


def show(inspection: Inspection, console: Console) -> None:
    """Print ``inspection``. Nothing is cut: long cells are wrapped."""
    if inspection.traces:
        if console.is_terminal and console.width >= WIDE:
            console.print(_site_table(inspection))
        else:
            for line in _site_lines(inspection):
                _print(console, line)
        _print(console, "")
        console.print(_tally_table("error kind", by_kind(inspection.sites), inspection.model is not None))
        _print(console, "")
        console.print(_tally_table("hint source", by_source(inspection.sites), inspection.model is not None))
        _print(console, "")
    for line in [*totals(inspection), *left_out(inspection)]:
        _print(console, line)


def totals(inspection: Inspection) -> Iterator[str]:
    """What was read and what would be trained, a sentence a line."""
    read, collation = inspection.read, inspection.collation
    yield f"read: {counted(read.traces, 'trace')} in {counted(read.files, 'file')}, {counted(read.lines, 'line')}"
    if not inspection.traces:
        yield "no error sites: no turn answers a failed tool call, so there is nothing to hint"
        return
    tokens = sum(site.outcome.recovery_tokens for site in inspection.sites if site.outcome.kept)
    yield (
        f"sites: {collation.sites_in} in {counted(len(inspection.traces), 'trace')}; {collation.sites_kept} kept with "
        f"{counted(tokens, 'recovery token')}, {collation.sites_in - collation.sites_kept} left out"
    )
    values = tuple(value for site in inspection.sites for value in site.divergences)
    average = mean(values)
    if average is None:
        yield f"tokens: counted with {one_line(inspection.tokenizer)}; nothing is measured without --model"
    else:
        yield (
            f"divergence: mean {average:.4f}, largest {max(values):.4f} nats per recovery token, measured with "
            f"{one_line(inspection.model or '')}"
        )


def left_out(inspection: Inspection) -> Iterator[str]:
    """Everything that reading or collating left out or changed, with its reason."""
    read, collation = inspection.read, inspection.collation
    for path, numbers in sorted(read.bad_lines.items()):
        lines = ", ".join(map(str, numbers))
        yield f"unreadable: {one_line(path)}, {'line' if len(numbers) == 1 else 'lines'} {lines}"
    for path, reason in sorted(read.skipped_files.items()):
        yield f"skipped: {one_line(path)}, {one_line(reason)}"
    yield from (f"skipped: {count} × {one_line(reason)}" for reason, count in _sorted(read.skipped.items()))
    if read.unanswered:
        yield f"no site: {counted(read.unanswered, 'failed result')} that the model got no turn to answer"
    yield from (
        f"left out: {count} × {one_line(reason)}" for reason, count in _sorted(collation.dropped.items())
    )
    if collation.cut_rows:
        yield f"cut: {counted(collation.cut_rows, 'row')} lost {counted(collation.cut_tokens, 'token')} at the beginning to fit"
    yield from (
        f"note: {count} × {one_line(note)}" for note, count in _sorted((read.notes + collation.notes).items())
    )


def turn_numbers(site: Site) -> str:
    """The failed results and the turn that answers them, counted from 1: ``6 → 7``."""
    failed = ",".join(str(number + 1) for number in sorted({f.turn for f in site.outcome.failures}))
    return f"{failed} → {site.outcome.turn + 1}"


def verdict(site: Site) -> str:
    """``kept`` or why not."""
    return site.outcome.dropped or KEPT


def _site_table(inspection: Inspection) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True, header_style="bold", show_edge=False)
    measured = inspection.model is not None
    table.add_column("trace", max_width=18, overflow="fold")
    table.add_column("turn", no_wrap=True)
    table.add_column("error kind\nrule", max_width=20, overflow="fold")
    table.add_column("hint\nsource", ratio=1, min_width=24, overflow="fold")
    table.add_column("recovery tokens", justify="right", width=8)
    if measured:
        table.add_column("mean nats", justify="right", width=6)
    table.add_column("kept or why not", max_width=26, overflow="fold")
    for trace in inspection.traces:
        for site in trace.sites:
            name, turn, kind, rule, hint, source, tokens, outcome = _cells(trace, site)
            row = [
                Text(name),
                Text(turn),
                Text.assemble(kind, "\n", (rule, "dim")),
                Text.assemble(hint, "\n", (source, "dim")) if site.outcome.hint else Text(hint),
                Text(tokens),
                *([Text(_nats(mean(site.divergences)))] if measured else []),
                Text(outcome, style="green" if site.outcome.kept else "yellow"),
            ]
            table.add_row(*row)
    return table


def _cells(trace: InspectedTrace, site: Site) -> list[str]:
    hint = site.outcome.hint
    return [
        one_line(trace.trace.id),
        turn_numbers(site),
        one_line(", ".join(site.kinds)),
        one_line(", ".join(site.rules)),
        one_line(hint.text) if hint else "-",
        one_line(hint.source) if hint else "-",
        str(site.outcome.recovery_tokens),
        one_line(verdict(site)),
    ]


def _site_lines(inspection: Inspection) -> Iterator[str]:
    for trace in inspection.traces:
        for site in trace.sites:
            name, turn, kind, rule, hint, source, tokens, outcome = _cells(trace, site)
            average = mean(site.divergences)
            measured = "" if average is None else f", mean {_nats(average)} nats"
            yield f"{name}  turn {turn}  {kind}  ({rule})"
            yield f"  hint: {hint}"
            yield f"  source: {source}; recovery tokens: {tokens}{measured}; {outcome}"


def _tally_table(name: str, rows: Iterable[Tally], measured: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(name, overflow="fold")
    for heading in ("sites", "kept", "recovery tokens", *(["mean nats"] if measured else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [one_line(row.name), str(row.sites), str(row.kept), str(row.tokens)]
        table.add_row(*(Text(cell) for cell in [*cells, *([_nats(row.mean)] if measured else [])]))
    return table


def _print(console: Console, line: str) -> None:
    """One line, wrapped in a terminal and whole in a pipe, without markup and highlighting."""
    console.print(Text(line), soft_wrap=not console.is_terminal)


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _sorted(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(items, key=lambda item: (-item[1], item[0]))
