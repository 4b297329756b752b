"""A conversation laid out for reading: sites with their failed results, hint and recovery, and the turns between."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_trl_host.inspection.model import InspectedTrace, Site
from composer_trl_host.traces.model import ToolFailure, Trace, Turn

RUN = 3
"""Turns in a row without a site that are shown; a longer run is folded into one line."""


@dataclass(frozen=True)
class NumberedTurn:
    """A turn, its number counted from 1, and how its result failed, where it did."""

    number: int
    turn: Turn
    failure: ToolFailure | None = None


@dataclass(frozen=True)
class Part:
    """A stretch of the conversation.

    ``site``: its last turn is the recovery, and ``number`` counts the sites of the page from 1.
    Without a site it is a run of turns, ``folded`` where it is a long one.
    """

    turns: tuple[NumberedTurn, ...]
    site: Site | None = None
    number: int = 0
    folded: bool = False


@dataclass(frozen=True)
class Conversation:
    """One trace of the page. ``number`` counts them from 1."""

    number: int
    inspected: InspectedTrace
    parts: tuple[Part, ...] = field(default=())

    @property
    def site_parts(self) -> list[tuple[Part, Site]]:
        return [(part, part.site) for part in self.parts if part.site is not None]


def conversation(inspected: InspectedTrace, number: int, first_site: int) -> Conversation:
    """Lay out ``inspected``, whose first site has the number ``first_site``."""
    failures = {f.turn: f for site in inspected.sites for f in site.outcome.failures}
    turns = [NumberedTurn(i + 1, turn, failures.get(i)) for i, turn in enumerate(inspected.trace.turns)]
    parts: list[Part] = []
    position = 0
    for count, site in enumerate(sorted(inspected.sites, key=lambda site: site.outcome.turn)):
        begin = max(position, _beginning(inspected.trace, site))
        parts += _between(turns[position:begin])
        position = site.outcome.turn + 1
        parts.append(Part(tuple(turns[begin:position]), site, first_site + count))
    parts += _between(turns[position:])
    return Conversation(number, inspected, tuple(parts))


def _beginning(trace: Trace, site: Site) -> int:
    """The turn whose calls failed, which stands before the first failed result."""
    begin = min((f.turn for f in site.outcome.failures), default=site.outcome.turn)
    while begin > 0 and trace.turns[begin].role == "tool":
        begin -= 1
    return begin


def _between(turns: list[NumberedTurn]) -> list[Part]:
    return [Part(tuple(turns), folded=len(turns) > RUN)] if turns else []
