"""What an inspection holds: the conversations with error sites, and per site what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from composer_trl_host.collation import CollationReport, SiteOutcome
from composer_trl_host.traces.model import ReadReport, Trace


@dataclass(frozen=True)
class TokenShare:
    """A token that one side could have said next, and its probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class TokenReading:
    """One recovery token as both sides read it.

    ``divergence``: nats. ``student_probability``, ``teacher_probability``: of the token itself.
    ``student``, ``teacher``: the likeliest tokens of each side, the likeliest first.
    """

    divergence: float
    student_probability: float
    teacher_probability: float
    student: tuple[TokenShare, ...]
    teacher: tuple[TokenShare, ...]


@dataclass(frozen=True)
class RecoveryToken:
    """One supervised token; ``text`` is "" where it is a part of the next token's character."""

    text: str
    reading: TokenReading | None = None


@dataclass(frozen=True)
class Site:
    """One error site. ``tokens`` is empty where the site is dropped."""

    outcome: SiteOutcome
    tokens: tuple[RecoveryToken, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What failed, each kind once."""
        return tuple(dict.fromkeys(failure.kind for failure in self.outcome.failures))

    @property
    def rules(self) -> tuple[str, ...]:
        """What decided that it failed, each rule once."""
        return tuple(dict.fromkeys(failure.rule for failure in self.outcome.failures))

    @property
    def divergences(self) -> tuple[float, ...]:
        """Nats per measured token."""
        return tuple(token.reading.divergence for token in self.tokens if token.reading is not None)


@dataclass(frozen=True)
class InspectedTrace:
    """A conversation that has error sites, in order of its turns."""

    trace: Trace
    sites: tuple[Site, ...]

    @property
    def place(self) -> str:
        """The file and line that it was read from."""
        return f"{self.trace.path}:{self.trace.line}" if self.trace.line else self.trace.path


@dataclass(frozen=True)
class Inspection:
    """Everything that the table and the page show.

    ``path``: what was inspected. ``tokenizer``: whose tokens are counted. ``model``: what the
    divergence was measured with, None where nothing was measured. ``traces``: those with sites alone;
    ``read.traces`` counts all.
    """

    path: str
    tokenizer: str
    model: str | None
    traces: tuple[InspectedTrace, ...]
    read: ReadReport
    collation: CollationReport

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for trace in self.traces for site in trace.sites)


@dataclass(frozen=True)
class Tally:
    """Counts over the sites of one error kind or one hint source. ``mean``: nats per measured token."""

    name: str
    sites: int
    kept: int
    tokens: int
    mean: float | None


def by_kind(sites: tuple[Site, ...]) -> list[Tally]:
    """One tally per combination of kinds, the most frequent first."""
    return _tallies([(", ".join(site.kinds), site) for site in sites])


def by_source(sites: tuple[Site, ...]) -> list[Tally]:
    """One tally per source of hints."""
    return _tallies(
        [(site.outcome.hint.source if site.outcome.hint else "(no hint)", site) for site in sites]
    )


def mean(values: tuple[float, ...]) -> float | None:
    """The mean, None of nothing."""
    return sum(values) / len(values) if values else None


def _tallies(named: list[tuple[str, Site]]) -> list[Tally]:
    groups: dict[str, list[Site]] = {}
    for name, site in named:
        groups.setdefault(name, []).append(site)
    rows = [
        Tally(
            name=name,
            sites=len(sites),
            kept=sum(site.outcome.kept for site in sites),
            tokens=sum(site.outcome.recovery_tokens for site in sites if site.outcome.kept),
            mean=mean(tuple(value for site in sites for value in site.divergences)),
        )
        for name, sites in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.sites, row.name))
