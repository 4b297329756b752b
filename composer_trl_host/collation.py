"""What a trace becomes: rows of token ids with their error sites, and what happened to every site."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_prime_plugin.errors import TaskError
from composer_trl_host.alignment import ErrorSite
from composer_trl_host.hints import Hint
from composer_trl_host.traces.model import ToolFailure, Trace


@dataclass(frozen=True)
class TraceRow:
    """One student sequence. A trace longer than the limit gives several.

    ``ids``: the tokens. ``prompt_length``: those before the first turn of the model. ``sampled``: per
    token, True in a turn of the model. ``trained``: per token, True where channel 1 trains it; each
    token of a trace is trained in one row at most. ``advantages``: per token, 0 where it is not trained;
    ``logprobs``: per token, 0 where it is not sampled, None where the trace has none. ``site_turns``: the
    turn of each site.
    """

    trace_id: str
    ids: tuple[int, ...]
    prompt_length: int
    sampled: tuple[bool, ...]
    trained: tuple[bool, ...]
    advantages: tuple[float, ...]
    logprobs: tuple[float, ...] | None
    sites: tuple[ErrorSite, ...]
    site_turns: tuple[int, ...]


@dataclass(frozen=True)
class SiteOutcome:
    """What became of one error site: kept in ``row`` (its number among the trace's rows), or ``dropped``
    for a reason. ``recovery_tokens`` is 0 where the turn could not be found."""

    turn: int
    failures: tuple[ToolFailure, ...]
    hint: Hint | None
    hint_role: str | None
    recovery_tokens: int
    row: int | None
    dropped: str | None

    @property
    def kept(self) -> bool:
        return self.dropped is None


@dataclass(frozen=True)
class CollatedTrace:
    """The rows of one trace and the outcome of each of its sites, in order of the turns."""

    rows: tuple[TraceRow, ...]
    outcomes: tuple[SiteOutcome, ...]


@dataclass
class CollationReport:
    """Counts over everything collated: ``sites_in == sites_kept + sum(dropped.values())``.

    ``cut_rows``: rows whose beginning was cut off to fit, ``cut_tokens`` what they lost there.
    ``notes``: other things done to the input, by what was done.
    """

    traces: int = 0
    rows: int = 0
    sites_in: int = 0
    sites_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut_rows: int = 0
    cut_tokens: int = 0
    notes: Counter[str] = field(default_factory=Counter)


def to_row(trace: Trace, advantage: float | None = None) -> dict[str, Any]:
    """``trace`` as a row of a ``datasets.Dataset``: JSON text, so that the columns have one type."""
    return {"trace": json.dumps(dataclasses.asdict(trace)), "advantage": advantage}


def trace_of(feature: Trace | Mapping[str, Any]) -> tuple[Trace, float | None]:
    """The trace and the advantage of a feature. Raises ``TaskError`` for anything else."""
    if isinstance(feature, Trace):
        return feature, None
    if not isinstance(feature, Mapping) or "trace" not in feature:
        raise TaskError(
            f"a feature must be a Trace or a row with the key trace (collation.to_row); found {type(feature).__name__}"
        )
    value = feature["trace"]
    if isinstance(value, Trace):
        return value, _advantage(feature)
    try:
        # Not validate_json, which refuses the lone surrogates that a transcript may hold.
        trace = _TRACE.validate_python(json.loads(value))
    except (ValidationError, ValueError, TypeError) as error:
        found = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise TaskError(f"a row's trace must be what collation.to_row wrote; found {found}") from error
    return trace, _advantage(feature)


def _advantage(feature: Mapping[str, Any]) -> float | None:
    value = feature.get("advantage")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TaskError(f"a row's advantage must be a finite number or None; found {value!r}")
    return float(value)


_TRACE = TypeAdapter(Trace)
