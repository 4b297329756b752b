"""A trace that is longer than the limit, cut into windows that keep every site with the context that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    of them. A trace that fits is one window. Otherwise the first one is the longest beginning that ends
    with a turn of the model; the sites behind it get windows that end with a recovery and begin at a
    turn of the model, as early as fits and no later than the failed call. Each site is in one window.
    """
    order = sorted(spans)
    if not order:
        return [], {}
    begins = _beginnings(order, spans)

    def fits(start: int, stop: int, sites: Iterable[int]) -> bool:
        if seq_len is None:
            return True
        sites = list(sites)
        if add_up:
            return stop - start + sum(hints[site] for site in sites) <= seq_len
        return stop - start <= seq_len and all(
            spans[site].stop - start + hints[site] <= seq_len for site in sites
        )

    def up_to(turn: int) -> list[int]:
        return [site for site in sorted(hints) if site <= turn]

    if fits(0, length, hints):
        return [Window(0, length, tuple(sorted(hints)), True)], {}
    windows: list[Window] = []
    last = next((turn for turn in reversed(order) if fits(0, spans[turn].stop, up_to(turn))), None)
    if last is not None:
        windows.append(Window(0, spans[last].stop, tuple(up_to(last)), True))
    waiting = [site for site in sorted(hints) if last is None or site > last]
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
        start = min(begin for begin in begins if begin <= start and fits(begin, stop, held))
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
