"""A trace that is longer than the limit, cut into windows that keep every site with the context that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_trl_host.rendering import TurnSpan

TOO_LONG = "the failed call, the recovery and its hint do not fit seq_len"


@dataclass(frozen=True)
class Window:
    """The tokens ``[start, stop)`` of a trace as one row. ``sites``: the turns supervised in it.
    ``trains``: whether channel 1 trains it; where the beginning was cut off, the tokens' context is not
    the one that they were sampled in."""

    start: int
    stop: int
    sites: tuple[int, ...]
    trains: bool


def cut_windows(
    length: int, spans: Mapping[int, TurnSpan], hints: Mapping[int, int], seq_len: int | None, add_up: bool
) -> tuple[list[Window], dict[int, str]]:
    """Windows in order, and the sites that no window can hold, with the reason.

    ``hints``: the sites, with the tokens that their hints take; ``add_up``: a sequence may hold several
    of them. The first window is the trace, or its longest beginning that fits and ends with a turn of the
    model, with the sites whose hints fit beside it. The other sites get windows that end with a recovery and
    begin at the trace's beginning or at a turn of the model, as early as fits and no later than the failed
    call. Each site is in one window.
    """
    order = sorted(spans)
    if not order:
        return [], {}
    begins = _beginnings(order, spans)

    def fits(start: int, stop: int, sites: Sequence[int]) -> bool:
        if seq_len is None:
            return True
        if add_up:
            return stop - start + sum(hints[site] for site in sites) <= seq_len
        return stop - start <= seq_len and all(
            spans[site].stop - start + hints[site] <= seq_len for site in sites
        )

    windows: list[Window] = []
    whole = fits(0, length, [])
    last = (
        order[-1]
        if whole
        else next((turn for turn in reversed(order) if fits(0, spans[turn].stop, [])), None)
    )
    waiting = sorted(hints)
    if last is not None:
        stop = length if whole else spans[last].stop
        first: list[int] = []
        for site in sorted(hints):
            if site <= last and fits(0, stop, [*first, site]):
                first.append(site)
        windows.append(Window(0, stop, tuple(first), True))
        waiting = [site for site in waiting if site not in first]
    later: list[Window] = []
    unfit: dict[int, str] = {}
    while waiting:
        stop = spans[waiting[-1]].stop
        held: list[int] = []
        start = stop
        for site in reversed(waiting):
            reach = begins[max(order.index(site) - 1, 0)]
            if not fits(reach, stop, [*held, site]):
                break
            held.append(site)
            start = reach
        if not held:
            unfit[waiting.pop()] = TOO_LONG
            continue
        start = min(begin for begin in (0, *begins) if begin <= start and fits(begin, stop, held))
        later.append(Window(start, stop, tuple(sorted(held)), False))
        waiting = waiting[: -len(held)]
    return [*windows, *reversed(later)], unfit


def _beginnings(order: list[int], spans: Mapping[int, TurnSpan]) -> list[int]:
    """Where a row may begin for each turn: at its generation prompt, or behind the turn before it where the
    template has no such prompt, since a row's first turn needs a token before it."""
    begins: list[int] = []
    before = 0
    for turn in order:
        span = spans[turn]
        begins.append(span.opening if span.opening < span.start else before)
        before = span.stop
    return begins
