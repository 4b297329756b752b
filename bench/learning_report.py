"""The report of the learning bench: the page's tables and the pictures beside the results.

A seed draws the prompts and the held-out names, for every condition alike. Differences to the base are therefore
taken within a seed, and only then summed up over the seeds: what the draw does to both cancels.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_conditions import BASE, CONDITIONS, LEVER_STEPS, SEEDS
from learning_results import read
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from composer_prime_plugin.errors import ConfigError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "experiments.md"
CHANNELS = (BASE, "channel_1", "channel_2")
SHOWN_STEPS = (0, 10, 20, 30, 40)


@dataclass(frozen=True)
class Measure:
    """One column: how to read it off a point, and how to print it."""

    title: str
    of: Callable[[Mapping[str, Any]], float]
    show: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _nats(value: float) -> str:
    return f"{value:.3f}"


def _over(count: str, total: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda point: point[count] / point[total] if point[total] else math.nan


MEASURES: dict[str, Measure] = {
    "first": Measure("first turn", _over("first_try", "episodes"), _percent),
    "recovery": Measure("recovery, no hint", _over("replay_recovered", "replayed"), _percent),
    "hinted": Measure("recovery, hinted (the teacher)", _over("hinted_recovered", "replayed"), _percent),
    "drift": Measure("drift, nats a token", lambda point: point["drift"], _nats),
    "changed": Measure("changed tokens", lambda point: point["changed"], _percent),
}
COMPARED = ("first", "recovery")
"""The measures of which the tables hold the difference to the base."""


# Runs

Runs = Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]
"""Condition to seed to points."""


def longest_runs(lines: Sequence[Mapping[str, Any]]) -> Runs:
    """The longest run of every condition and seed; of equals the last."""
    kept: dict[tuple[str, int], Mapping[str, Any]] = {}
    for line in lines:
        key = (line["condition"], line["seed"])
        if line["condition"] in CONDITIONS and line["steps"] >= kept.get(key, line)["steps"]:
            kept[key] = line
    runs: dict[str, dict[int, Sequence[Mapping[str, Any]]]] = {}
    for name in CONDITIONS:
        for seed in in_order({seed for key, seed in kept if key == name}):
            runs.setdefault(name, {})[seed] = kept[name, seed]["trail"]
    return runs


def in_order(seeds: set[int]) -> list[int]:
    """The bench's own seeds as it runs them, then any others."""
    return [*(seed for seed in SEEDS if seed in seeds), *sorted(seeds.difference(SEEDS))]


def at(points: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """The point of a run at ``step``, if there is one."""
    return next((point for point in points if point["step"] == step), None)


def points_at(runs: Runs, name: str, step: int) -> dict[int, Mapping[str, Any]]:
    """The points of a condition at ``step`` by seed, of the seeds that have one."""
    found = {seed: at(trail, step) for seed, trail in runs.get(name, {}).items()}
    return {seed: point for seed, point in found.items() if point is not None}


def values_at(runs: Runs, name: str, step: int, measure: str) -> dict[int, float]:
    """A measure of a condition at ``step`` by seed."""
    return {seed: MEASURES[measure].of(point) for seed, point in points_at(runs, name, step).items()}


def differences(runs: Runs, name: str, step: int, measure: str) -> dict[int, float]:
    """A measure less that of the base at the same seed and step, of the seeds that have both."""
    base = values_at(runs, BASE, step, measure)
    mine = values_at(runs, name, step, measure)
    return {seed: value - base[seed] for seed, value in mine.items() if seed in base}


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error (of the sample, n - 1), none of one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def levers_of(runs: Runs) -> dict[str, list[str]]:
    """The conditions of each lever that have a point to be compared, none where it was not run."""
    found: dict[str, list[str]] = {c.lever: [] for c in CONDITIONS.values() if c.lever != "channels"}
    for name, condition in CONDITIONS.items():
        if condition.lever in found and points_at(runs, name, LEVER_STEPS):
            found[condition.lever].append(name)
    return found


# Tables


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """``median (least to most)``, or the one value there is."""
    median = show(statistics.median(values))
    if len(values) == 1:
        return median
    low, high = show(min(values)), show(max(values))
    return f"{median} ({low} to {high})"


def cells(points: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The named measures over the seeds."""
    measures = [MEASURES[name] for name in names]
    return [spread([m.of(point) for point in points.values()], m.show) for m in measures]


def _points(share: float, sign: str = "+") -> str:
    # The inner rounding takes a float's last bits off a half, which would otherwise fall to either side.
    return f"{round(100 * share, 6):{sign}z.0f}"


def against_base(runs: Runs, name: str, step: int, measure: str) -> str:
    """``mean ± standard error (each seed)`` of the differences to the base in percentage points, or the one there is.

    The seeds are those of ``points_at``, in that order; one that the base lacks is a dash.
    """
    found = differences(runs, name, step, measure)
    each = [_points(found[seed]) if seed in found else "–" for seed in points_at(runs, name, step)]
    if not found or len(each) == 1:
        return ", ".join(each)
    mean, error = mean_and_error(list(found.values()))
    shown = _points(mean) if error is None else f"{_points(mean)} ± {_points(error, sign='')}"
    return f"{shown} ({', '.join(each)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


DIFFERENCES = f"in percentage points from `{BASE}` at the same seed and step: mean ± standard error over the seeds (each seed)"


def _seeds(points: Mapping[int, Any]) -> str:
    return ", ".join(map(str, points))


def _difference_titles() -> list[str]:
    return [f"{MEASURES[measure].title}: difference" for measure in COMPARED]


def channels_table(runs: Runs) -> str:
    """The three main conditions along the run, and the single channels against both."""
    steps = [
        (name, step, points)
        for name in CHANNELS
        for step in SHOWN_STEPS
        if (points := points_at(runs, name, step))
    ]
    rows = [
        [f"`{name}`", str(step), str(len(points)), *cells(points, list(MEASURES))]
        for name, step, points in steps
    ]
    made = table(["condition", "step", "seeds", *(m.title for m in MEASURES.values())], rows)
    compared = [
        [f"`{name}`", str(step), _seeds(points), *(against_base(runs, name, step, m) for m in COMPARED)]
        for name, step, points in steps
        if name != BASE and step > 0
    ]
    if not compared:
        return made
    head = ["condition", "step", "seeds", *_difference_titles()]
    return f"{made}\n\nDifferences {DIFFERENCES}.\n\n{table(head, compared)}"


def best_table(runs: Runs) -> str:
    """Seed by seed, where a main condition was best and where it ended."""
    rows = []
    for name in CHANNELS:
        for seed, trail in runs.get(name, {}).items():
            row = [f"`{name}`", str(seed)]
            for measure in ("first", "recovery"):
                of = MEASURES[measure].of
                best = max(trail, key=of)
                row.append(f"{_percent(of(best))} at {best['step']}")
                row.append(f"{_percent(of(trail[-1]))} at {trail[-1]['step']}")
            rows.append(row)
    head = ["first turn: best, at step", "end", "recovery: best, at step", "end"]
    return table(["condition", "seed", *head], rows)


def lever_table(runs: Runs, names: Sequence[str]) -> str:
    """The conditions of one lever below the base, after as many steps."""
    if not names:
        return "Not run."
    shown = [name for name in MEASURES if name != "changed"]
    rows = []
    if points := points_at(runs, BASE, LEVER_STEPS):
        rows.append([f"`{BASE}`", "", _seeds(points), *cells(points, shown), *("" for _ in COMPARED)])
    for name in names:
        points = points_at(runs, name, LEVER_STEPS)
        row = [f"`{name}`", CONDITIONS[name].says, _seeds(points), *cells(points, shown)]
        rows.append(row + [against_base(runs, name, LEVER_STEPS, measure) for measure in COMPARED])
    head = ["condition", "what", "seeds", *(MEASURES[m].title for m in shown), *_difference_titles()]
    return f"After {LEVER_STEPS} steps; differences {DIFFERENCES}.\n\n{table(head, rows)}"


def commands(runs: Runs, names: Sequence[str]) -> list[str]:
    """The command lines that repeat the runs of ``names``, each seed for as long and as often measured as it was."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in names:
        seeds: dict[str, list[int]] = {}
        for seed, trail in runs[name].items():
            seeds.setdefault(_flags(name, [point["step"] for point in trail]), []).append(seed)
        for flags, same in seeds.items():
            alike.setdefault((flags, tuple(same)), []).append(name)
    return [
        f"python bench/learning.py run --only {' '.join(only)} --seeds {' '.join(map(str, seeds))}{flags}"
        for (flags, seeds), only in alike.items()
    ]


def _flags(name: str, measured: Sequence[int]) -> str:
    """What gives a run of ``name`` that is measured at these steps."""
    condition, steps = CONDITIONS[name], measured[-1]
    flags = "" if condition.steps == steps else f" --steps {steps}"
    if list(measured) != sorted({*range(0, steps, condition.every), steps}):
        flags += f" --every {measured[1] - measured[0]}"
    return flags


def tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every table of the page by its marker's name, each with the command that repeats it."""
    runs = longest_runs(lines)
    levers = levers_of(runs)
    main = [name for name in CHANNELS if name in runs]
    made = {"channels": (main, channels_table(runs)), "best": (main, best_table(runs))}
    made.update({lever: (names, lever_table(runs, names)) for lever, names in levers.items()})
    return {
        marker: "".join(f"    {line}\n" for line in commands(runs, names)) + ("\n" if names else "") + text
        for marker, (names, text) in made.items()
    }


def rewrite(page: str, made: Mapping[str, str]) -> str:
    """``page`` with the text between each pair of markers replaced."""
    found = re.findall(r"<!-- table: (.+?) -->", page)
    if sorted(found) != sorted(made):
        raise ConfigError(
            f"the page must have one marker per table, {sorted(made)}; found {sorted(found)}; "
            "write <!-- table: NAME --> and <!-- end --> where each belongs"
        )
    return re.sub(
        r"<!-- table: (.+?) -->\n.*?<!-- end -->",
        lambda match: f"<!-- table: {match[1]} -->\n{made[match[1]]}\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


# Pictures


def _numbers(runs: Runs) -> dict[int, int]:
    """Seed to its number, the same in every panel, whichever seeds a condition has."""
    seen = {seed for trails in runs.values() for seed in trails}
    return {seed: number for number, seed in enumerate([*SEEDS, *in_order(seen.difference(SEEDS))])}


def _of(items: Sequence[str], number: int) -> str:
    return items[number % len(items)]


def channels_figure(runs: Runs) -> Figure:
    """The measures of the main conditions along the run, one line a seed."""
    names, numbers, lines = ("first", "recovery", "hinted", "drift"), _numbers(runs), ("-", "--", ":", "-.")
    figure = Figure(figsize=(15, 3.6), layout="constrained")
    axes = figure.subplots(1, len(names))
    for axis, measure in zip(axes, names, strict=True):
        of = MEASURES[measure].of
        for color, name in enumerate(CHANNELS):
            for seed, trail in runs.get(name, {}).items():
                axis.plot(
                    [point["step"] for point in trail],
                    [of(point) for point in trail],
                    color=f"C{color}",
                    linestyle=_of(lines, numbers[seed]),
                    marker="o",
                    markersize=3,
                    label=f"{name}, seed {seed}",
                )
        axis.set(title=MEASURES[measure].title, xlabel="optimizer step")
        if measure != "drift":
            axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    shown = [name for name in CHANNELS if name in runs]
    keys = [Line2D([], [], color=f"C{CHANNELS.index(name)}", label=name) for name in shown]
    seeds = in_order({seed for name in shown for seed in runs[name]})
    keys += [
        Line2D([], [], color="0.4", linestyle=_of(lines, numbers[seed]), label=f"seed {seed}")
        for seed in seeds
    ]
    axes[0].legend(handles=keys, frameon=False, fontsize=8)
    return figure


LEVER_PANELS = (
    ("first", False),
    ("first", True),
    ("recovery", False),
    ("recovery", True),
    ("hinted", False),
    ("drift", False),
)
"""Measures, as they are or less the base's."""


def levers_figure(runs: Runs) -> Figure:
    """The base and every lever after as many steps, one dot a run.

    The grey band is the base's range. In the panels of differences a dot is a run less the base at the same seed,
    and the black bar is their mean with its standard error.
    """
    groups = [names for names in levers_of(runs).values() if names]
    rows = [BASE, *(name for names in groups for name in names)]
    figure = Figure(figsize=(18, 0.3 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots(1, len(LEVER_PANELS), sharey=True)
    for axis, (measure, compared) in zip(axes, LEVER_PANELS, strict=True):
        found = {
            row: (differences if compared else values_at)(runs, row, LEVER_STEPS, measure) for row in rows
        }
        if compared:
            found[BASE] = {}
            _differences_panel(axis, found, measure)
        else:
            _values_panel(axis, found, measure)
        _dots(axis, found, _numbers(runs), 100 if compared else 1)
        last = 0.5
        for names in groups:
            axis.axhline(last, color="0.75", linewidth=0.8, zorder=0)
            last += len(names)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _dots(
    axis: Any, found: Mapping[str, Mapping[int, float]], numbers: Mapping[int, int], scale: float
) -> None:
    """One dot a run, those of one row a little apart so that equal values are all seen."""
    for seed, number in numbers.items():
        here = [(row, values[seed]) for row, values in enumerate(found.values()) if seed in values]
        if here:
            axis.scatter(
                [scale * value for _, value in here],
                [row + 0.5 * ((number + 0.5) / len(numbers) - 0.5) for row, _ in here],
                s=18,
                color=f"C{number}",
                marker=_of("os^Dv", number),
                label=f"seed {seed}",
            )


def _values_panel(axis: Any, found: Mapping[str, Mapping[int, float]], measure: str) -> None:
    base = found[BASE].values()
    if base:
        axis.axvspan(min(base), max(base), color="0.88", zorder=0)
    axis.set_title(MEASURES[measure].title, fontsize=10)
    if measure == "drift":
        axis.set_xscale("log")
    else:
        axis.set_xlim(-0.03, 1.03)


def _differences_panel(axis: Any, found: Mapping[str, Mapping[int, float]], measure: str) -> None:
    axis.axvline(0, color="0.6", linewidth=1, zorder=0)
    for row, values in enumerate(found.values()):
        if len(values) > 1:
            mean, error = mean_and_error([100 * value for value in values.values()])
            axis.errorbar(
                mean, row, xerr=error, color="black", marker="|", markersize=9, linewidth=1.5, zorder=1
            )
    axis.set_title(f"{MEASURES[measure].title}:\npoints from {BASE}, same seed", fontsize=10)


def report(results: Path, page: Path) -> None:
    """Rewrite the page's tables and draw the pictures beside the results."""
    lines = read(results)
    if not lines:
        raise ConfigError(f"a report needs finished runs; found none in {results}; run some first")
    page.write_text(rewrite(page.read_text(encoding="utf-8"), tables(lines)), encoding="utf-8")
    runs = longest_runs(lines)
    for name, figure in (("channels", channels_figure(runs)), ("levers", levers_figure(runs))):
        figure.savefig(results.parent / f"{name}.png", dpi=110, metadata={"Software": None})
