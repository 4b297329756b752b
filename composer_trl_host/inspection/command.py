"""``composer-rl inspect``: read, collate, measure, show."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError
from composer_trl_host.inspection.model import Inspection
from composer_trl_host.inspection.options import Options, parse
from composer_trl_host.inspection.table import show
from composer_trl_host.inspection.text import counted
from composer_trl_host.traces.model import ReadReport


def main(arguments: Sequence[str]) -> int:
    """Run ``composer-rl inspect ARGUMENTS`` and return the exit code.

    Raises ``ComposerError`` for words that cannot be meant, a path without traces, a model that does
    not load and a page that cannot be written.
    """
    options = parse(arguments)
    _check_page(options.html)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A transcript may hold what the terminal's encoding has no letter for.
            stream.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    inspection = inspect(options)
    # First the page: a reader of the report may close the pipe.
    written = None if options.html is None else _write_page(inspection, options.html, options.limit)
    show(inspection, console)
    if written is not None:
        console.print(written, markup=False, soft_wrap=True)
    return 0


def inspect(options: Options) -> Inspection:
    """What the command shows. Raises ``TaskError`` where nothing is a trace."""
    from composer_trl_host.collator import ComposerDataCollator
    from composer_trl_host.hinting import default_layered
    from composer_trl_host.inspection.build import build_inspection
    from composer_trl_host.inspection.measure import Measurer
    from composer_trl_host.inspection.models import (
        embedded_tokenizer,
        longest_context,
        measuring_model,
        quiet_libraries,
    )
    from composer_trl_host.inspection.tokens import TokenTexts
    from composer_trl_host.traces import read_traces

    report = ReadReport()
    # Reading first: a path that cannot be read is told before a model is loaded.
    traces = list(read_traces(options.path, options.format, report=report))
    config = ComposerConfig.model_validate({"sdpo": {"hint_role": options.hint_role}})
    quiet_libraries()
    measurer, seq_len = None, options.seq_len
    if options.model is None:
        tokenizer, name = embedded_tokenizer()
    else:
        model, tokenizer, name = measuring_model(options.model, options.device)
        measurer = Measurer(model, TokenTexts(tokenizer), config.sdpo)
        known = longest_context(model)
        if known is not None and (seq_len is None or seq_len > known):
            seq_len = known
    collator = ComposerDataCollator(
        tokenizer,
        config,
        hints=default_layered(),
        seq_len=seq_len,
        include_rejected=options.include_rejected,
    )
    total = sum(len(trace.sites(options.include_rejected)) for trace in traces)
    with _progress(total if measurer else 0) as progress:
        return build_inspection(
            traces,
            collator.collate_trace,
            TokenTexts(tokenizer),
            measurer,
            path=options.path,
            tokenizer=name,
            model=None if measurer is None else name,
            read=report,
            collation=collator.report,
            progress=progress,
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A count of measured sites on stderr, where somebody can see it."""
    console = Console(stderr=True)
    if not total or not console.is_terminal:
        yield lambda sites: None
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("measuring sites {task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda sites: bar.update(task, completed=sites)


def _check_page(path: Path | None) -> None:
    """Fail before the measuring, not after it."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        found = (
            "a folder of that name"
            if path.is_dir()
            else "no folder"
            if not folder.is_dir()
            else "no right to write"
        )
        raise ConfigError(
            f"--html must name a file in an existing folder that can be written; found {found} at {path}; set another one"
        )


def _write_page(inspection: Inspection, path: Path, limit: int | None) -> str:
    from composer_trl_host.inspection.page import render_page

    text = render_page(inspection, limit)
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise ConfigError(
            f"--html must name a file that can be written; {path} cannot ({error.strerror}); set another one"
        ) from error
    here = inspection.traces[:limit]
    sites = sum(len(trace.sites) for trace in here)
    missing = len(inspection.traces) - len(here)
    left = f"; --limit {limit} left out {missing} more with error sites" if missing else ""
    return f"page: {path} with {counted(len(here), 'conversation')} and {counted(sites, 'site')}{left}"
