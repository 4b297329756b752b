"""The guards' rules: pure functions of what the last optimizer steps measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from composer_prime_plugin.config import ComposerConfig, GuardConfig, GuardName

TABLE = "trl_host.guards"

CANCELS = 0.01
"""The policy loss is a sum of signed terms, and 0 by construction where a group's completions are equally
long. Below this share of the mean ``|advantage|`` its value says nothing about channel 1's size."""


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step, summed over micro-batches and ranks.

    ``step``: its number as logged, from 1. ``policy``, ``weighted``: the two terms of the loss, in nats per
    trained token. ``advantage``: mean ``|advantage|`` per trained token. ``divergence``: summed over the
    ``tokens`` error tokens, in nats; the clip acted on ``clipped`` of them. ``sources``: per hint source its part
    of ``divergence`` and of ``tokens``.
    """

    step: int
    weight: float
    policy: float
    advantage: float
    weighted: float
    divergence: float
    tokens: float
    clipped: float
    sites: float
    sources: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What the rules read: the last ``steps``, a whole window of them or fewer, and ``quiet``, how many
    steps in a row had no error site."""

    steps: Sequence[StepFigures]
    quiet: int
    config: ComposerConfig

    @property
    def guards(self) -> GuardConfig:
        """The thresholds."""
        return self.config.trl_host.guards

    @property
    def whole(self) -> bool:
        """Whether a window has passed."""
        return 0 < self.guards.window == len(self.steps)


@dataclass(frozen=True)
class Guard:
    """``measure``: the figure logged as ``metric``, None where it says nothing. ``trips``: whether it is out of
    bounds. ``since``: the first step that it is taken over. ``found``: bounds, figure, what to set."""

    name: GuardName
    metric: str
    measure: Callable[[Look], float | None]
    trips: Callable[[float, GuardConfig], bool]
    since: Callable[[Look], int]
    found: Callable[[float, Look], str]


def mean_divergence(steps: Sequence[StepFigures]) -> float | None:
    """Nats per error token over all of ``steps``; None without any."""
    tokens = sum(step.tokens for step in steps)
    return sum(step.divergence for step in steps) / tokens if tokens else None


def still_sources(look: Look) -> dict[str, float]:
    """The hint sources whose own mean over the window is below ``collapsed_below``, lowest first."""
    totals: dict[str, tuple[float, float]] = {}
    for step in look.steps:
        for name, (nats, tokens) in step.sources.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + nats, before[1] + tokens)
    means = {name: nats / tokens for name, (nats, tokens) in totals.items() if tokens}
    still = {name: mean for name, mean in means.items() if abs(mean) < look.guards.collapsed_below}
    return dict(sorted(still.items(), key=lambda item: (abs(item[1]), item[0])))


def _window_jsd(look: Look) -> float | None:
    return mean_divergence(look.steps) if look.whole else None


def _rise(look: Look) -> float | None:
    """The second half's mean divergence over the first's. A collapsed first half counts as the threshold of
    collapse, so that noise near zero is no rise."""
    if not look.whole:
        return None
    middle = len(look.steps) // 2
    first, second = mean_divergence(look.steps[:middle]), mean_divergence(look.steps[middle:])
    if first is None or second is None:
        return None
    base = max(first, look.guards.collapsed_below)
    return second / base if base > 0 else None


def _ratio(look: Look) -> float | None:
    """``weight * jsd`` over the policy loss's size, both as means over the window. None during the warm-up,
    with weight 0, without error tokens, and where the policy loss says nothing (no advantages, or ``CANCELS``)."""
    if not look.whole or any(step.weight == 0 for step in look.steps) or not _tokens(look):
        return None
    if look.steps[0].step <= look.config.sdpo.warmup_steps:
        return None
    policy = sum(abs(step.policy) for step in look.steps)
    advantage = sum(step.advantage for step in look.steps)
    if not advantage or policy <= CANCELS * advantage:
        return None
    return sum(step.weighted for step in look.steps) / policy


def _clip(look: Look) -> float | None:
    if not look.whole or not _tokens(look) or look.config.sdpo.token_clip is None:
        return None
    return sum(step.clipped for step in look.steps) / _tokens(look)


def _tokens(look: Look) -> float:
    return sum(step.tokens for step in look.steps)


def _outside(value: float, guards: GuardConfig) -> bool:
    return value < guards.ratio_low or (guards.ratio_high is not None and value > guards.ratio_high)


def _found_collapse(value: float, look: Look) -> str:
    still = still_sources(look)
    seen = len({name for step in look.steps for name in step.sources})
    named = ", ".join(f"{name} ({mean:.2g})" for name, mean in still.items())
    which = f"; hint sources that move nothing, {len(still)} of {seen}: {named}" if named else ""
    return (
        f"the divergence must be at least {look.guards.collapsed_below:g} nats per error token; found {value:.2g}{which}; "
        f"let those hints say what to do, or leave them out; long recoveries dilute it: lower {TABLE}.collapsed_below"
    )


def _found_rise(value: float, look: Look) -> str:
    sdpo = look.config.sdpo
    clip = (
        'set sdpo.token_clip with clip_mode = "rescale"'
        if sdpo.token_clip is None
        else f"lower sdpo.token_clip = {sdpo.token_clip:g}"
    )
    return (
        f"the divergence of the later half must be at most {look.guards.rise_factor:g} times the earlier half's; found "
        f"{value:.3g} times; lower trainer.optim.lr or sdpo.weight = {sdpo.weight:g}, or {clip}"
    )


def _found_ratio(value: float, look: Look) -> str:
    guards, weight = look.guards, look.config.sdpo.weight
    bounds = [guards.ratio_low, *([] if guards.ratio_high is None else [guards.ratio_high])]
    must = (
        f"at least {guards.ratio_low:g}"
        if guards.ratio_high is None
        else f"between {guards.ratio_low:g} and {guards.ratio_high:g}"
    )
    # The ratio is proportional to the weight; aim at the middle of the bounds.
    middle = sum(bounds) / len(bounds)
    moved = value > 0 and abs(mean_divergence(look.steps) or 0.0) >= guards.collapsed_below
    advice = (
        f"set sdpo.weight to about {weight * middle / value:.2g} (it is {weight:g})"
        if moved
        else "no weight mends a divergence of nothing: see which hints move the teacher (sdpo/jsd/<hint source>)"
    )
    return f"weight * jsd over |policy loss| must be {must}; found {value:.3g}; {advice}"


def _found_clip(value: float, look: Look) -> str:
    sdpo = look.config.sdpo
    return (
        f"sdpo.token_clip must act on at most {look.guards.clip_fraction:g} of the error tokens; found {value:.3g}; raise "
        f"sdpo.token_clip = {sdpo.token_clip:g} or remove it"
    )


def _found_quiet(value: float, look: Look) -> str:
    return (
        f"an error site must come within {look.guards.no_sites_for} steps; found none in {value:.0f}, so channel 2 trains "
        "nothing; see that the environment reports tool_error and gives hints, or train on rows on which calls still fail"
    )


def _first(look: Look) -> int:
    return look.steps[0].step


GUARDS: tuple[Guard, ...] = (
    Guard(
        "jsd_collapsed",
        "guard/jsd",
        _window_jsd,
        # The entry clamp can make a divergence negative; that is not collapse.
        lambda value, guards: abs(value) < guards.collapsed_below,
        _first,
        _found_collapse,
    ),
    Guard(
        "jsd_rising",
        "guard/jsd_rise",
        _rise,
        lambda value, guards: guards.rise_factor is not None and value > guards.rise_factor,
        _first,
        _found_rise,
    ),
    Guard("ratio_outside", "guard/weighted_ratio", _ratio, _outside, _first, _found_ratio),
    Guard(
        "mostly_clipped",
        "guard/clip_fraction",
        _clip,
        lambda value, guards: value > guards.clip_fraction,
        _first,
        _found_clip,
    ),
    Guard(
        "no_sites",
        "guard/steps_without_sites",
        lambda look: float(look.quiet),
        lambda value, guards: value >= guards.no_sites_for,
        lambda look: look.steps[-1].step - look.quiet + 1,
        _found_quiet,
    ),
)
