"""``read_traces``: recorded conversations of any known format, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Literal

from composer_prime_plugin.errors import TaskError
from composer_trl_host.traces import claude_code, openai, verifiers
from composer_trl_host.traces.files import FileProblem, list_files, opened, records
from composer_trl_host.traces.model import ReadReport, Trace
from composer_trl_host.traces.values import Refused, shape

TraceFormat = Literal["auto", "claude-code", "openai", "verifiers"]
FORMATS: tuple[str, ...] = (claude_code.FORMAT, openai.FORMAT, verifiers.FORMAT)
_LOOK = 1000
"""Records asked for their format before a file is given up."""
_CHOICE = f"name one of {', '.join(FORMATS)} as the format, or another path"

_RECOGNIZERS: dict[str, Callable[[object], bool]] = {
    verifiers.FORMAT: verifiers.recognizes,
    openai.FORMAT: openai.recognizes,
    claude_code.FORMAT: claude_code.recognizes,
}
_RECORDS: dict[str, Callable[[object, str, int, ReadReport], Iterator[Trace]]] = {
    openai.FORMAT: openai.traces,
    verifiers.FORMAT: verifiers.traces,
}


def read_traces(
    path: str | Path, format: str = "auto", *, report: ReadReport | None = None
) -> Iterator[Trace]:
    """The traces under ``path``, in file order, one held at a time (one session of Claude Code).

    ``path`` is a file or a folder, of which every ``*.jsonl`` and ``*.json`` file is read in sorted order.
    ``report`` collects what was met on the way. Raises ``TaskError`` where a file cannot be read or
    nothing in it is a trace; in a folder such a file is noted in ``report.skipped_files`` and only a
    folder without any trace is refused.
    """
    if format != "auto" and format not in FORMATS:
        raise TaskError(
            f"format must be auto or one of {', '.join(FORMATS)}; found {format!r}; set one of them"
        )
    root = Path(path).expanduser()
    return _read(root, list_files(root), format, ReadReport() if report is None else report)


def _read(root: Path, files: list[Path], format: str, report: ReadReport) -> Iterator[Trace]:
    alone = files == [root]
    problems: list[FileProblem] = []
    before, known = report.traces, frozenset(files)
    for path in files:
        effective = path.parent.parent / "effective" / path.name
        if path.parent.name == "all" and effective in known:
            # PRIME-RL writes a step's rollouts as they come and those it trained on once more.
            report.skipped_files[str(path)] = f"{effective} holds the rollouts that were trained on"
            continue
        try:
            yield from _file(path, format, report)
        except FileProblem as problem:
            if alone:
                raise
            problems.append(problem)
            report.skipped_files[str(path)] = str(problem)
    if report.traces == before and not alone:
        first = f"; the first: {problems[0]}" if problems else ""
        raise TaskError(
            f"a folder must hold at least one trace; found none in {len(files)} files of {root}{first}; {_CHOICE}"
        )


def _file(path: Path, format: str, report: ReadReport) -> Iterator[Trace]:
    before, reasons = report.traces, report.skipped.copy()
    with opened(path) as handle:
        report.files += 1
        start = handle.tell()
        name = _detect(path, handle) if format == "auto" else format
        handle.seek(start)
        for trace in _of_format(name, path, handle, report):
            report.traces += 1
            yield trace
    if str(path) in report.bad_lines:
        report.bad_lines[str(path)].sort()
    if report.traces == before:
        raise FileProblem(_nothing(path, name, report, report.skipped - reasons))


def _of_format(name: str, path: Path, handle: BufferedReader, report: ReadReport) -> Iterator[Trace]:
    if name == claude_code.FORMAT:
        yield from claude_code.traces(handle, path, report)
        return
    read, recognizes = _RECORDS[name], _RECOGNIZERS[name]
    for line, value in records(path, handle, report):
        if not recognizes(value):
            report.skipped[f"record that is no {name} trace"] += 1
            continue
        try:
            yield from read(value, str(path), line, report)
        except Refused as refused:
            report.skipped[refused.reason] += 1
        except RecursionError:
            report.skipped["record nested too deeply"] += 1


def _detect(path: Path, handle: BufferedReader) -> str:
    scratch = ReadReport()
    seen = 0
    first: object = None
    for seen, (_, value) in enumerate(records(path, handle, scratch), 1):
        for name, recognizes in _RECOGNIZERS.items():
            if recognizes(value):
                return name
        first = value if seen == 1 else first
        if seen >= _LOOK:
            break
    if not seen:
        raise FileProblem(
            f"{path} must hold one JSON record per line; none of its {scratch.lines} lines could be parsed; {_CHOICE}"
        )
    keys = (
        f"an object with {', '.join(map(repr, list(first)[:5])) or 'no keys'}"
        if isinstance(first, dict)
        else shape(first)
    )
    raise FileProblem(f"{path} must hold traces of a known format; its first record is {keys}; {_CHOICE}")


def _nothing(path: Path, name: str, report: ReadReport, reasons: dict[str, int]) -> str:
    bad = report.bad_lines.get(str(path), [])
    found = [f"{len(bad)} lines that could not be parsed, the first line {bad[0]}"] if bad else []
    found += [
        f"{count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:3]
    ]
    return f"{path} must hold at least one {name} trace; found none: {'; '.join(found) or 'no records'}; {_CHOICE}"
