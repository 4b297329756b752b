"""The guards on hand-made steps: at which step each one speaks first, what it says, and when it says nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from composer_prime_plugin.config import GUARD_NAMES, ComposerConfig, GuardConfig
from composer_trl_host.guard_rules import GUARDS, StepFigures
from composer_trl_host.guards import GuardWatch

# 0.1 nats per error token, weight * jsd at 0.2 of the policy loss: nothing to say about such a step.
HEALTHY: dict[str, Any] = {
    "weight": 0.5,
    "policy": -0.1,
    "advantage": 0.25,
    "weighted": 0.02,
    "divergence": 1.0,
    "tokens": 10.0,
    "clipped": 0.0,
    "sites": 2.0,
    "sources": {"a": (1.0, 10.0)},
}
NONE = {"divergence": 0.0, "tokens": 0.0, "sites": 0.0, "weighted": 0.0, "sources": {}}


def steps(*changes: dict[str, Any]) -> list[StepFigures]:
    """One step per change of ``HEALTHY``, numbered from 1."""
    return [StepFigures(step=number, **{**HEALTHY, **change}) for number, change in enumerate(changes, 1)]


def nats(*values: float) -> list[dict[str, Any]]:
    """Steps of four error tokens whose mean divergence is the value."""
    return [{"divergence": 4 * value, "tokens": 4.0} for value in values]


def watch_of(sdpo: dict[str, Any] | None = None, **guards: Any) -> tuple[GuardWatch, list[str]]:
    said: list[str] = []
    config = ComposerConfig(sdpo={"weight": 0.5, **(sdpo or {})}, trl_host={"guards": guards})
    return GuardWatch(config, said.append), said


def metrics_of(watch: GuardWatch, figures: list[StepFigures]) -> list[dict[str, float]]:
    return [watch.update(each) for each in figures]


def tripped(metrics: list[dict[str, float]], name: str) -> list[int]:
    """The steps at which ``guard/<name>`` is 1."""
    return [step for step, row in enumerate(metrics, 1) if row.get(f"guard/{name}") == 1.0]


def test_a_healthy_run_says_nothing_and_shows_its_figures_once_the_window_is_full():
    watch, said = watch_of({"token_clip": 1.0}, window=3, no_sites_for=3)
    first, second, third, *rest = metrics_of(watch, steps(*[{}] * 10))
    assert first == second == {"guard/steps_without_sites": 0.0, "guard/no_sites": 0.0}
    assert third == {
        "guard/jsd": pytest.approx(0.1),
        "guard/jsd_collapsed": 0.0,
        "guard/jsd_rise": pytest.approx(1.0),
        "guard/jsd_rising": 0.0,
        "guard/weighted_ratio": pytest.approx(0.2),
        "guard/ratio_outside": 0.0,
        "guard/clip_fraction": 0.0,
        "guard/mostly_clipped": 0.0,
        "guard/steps_without_sites": 0.0,
        "guard/no_sites": 0.0,
    }
    assert all(set(row) == set(third) for row in rest)
    assert said == []


def test_collapse_is_the_mean_per_error_token_over_the_window():
    watch, said = watch_of(window=4, collapsed_below=0.25)
    figures = steps(*nats(1, 1, 1, 1, 0, 0, 0, 0, 1))
    # Means over steps 1-4, 2-5, ...: 1, 0.75, 0.5, 0.25 (at the threshold), 0, then 0.25 again.
    metrics = metrics_of(watch, figures)
    assert [row.get("guard/jsd") for row in metrics] == [None, None, None, 1, 0.75, 0.5, 0.25, 0, 0.25]
    assert tripped(metrics, "jsd_collapsed") == [8]
    assert said[0].startswith(
        "guard jsd_collapsed, steps 5 to 8: the divergence must be at least 0.25 nats per error token; found 0"
    )


def test_collapse_weighs_steps_by_their_error_tokens_and_skips_steps_without_any():
    watch, _ = watch_of(window=3, collapsed_below=0.25, no_sites_for=0)
    figures = steps({"divergence": 1.0, "tokens": 1.0}, {"divergence": 0.0, "tokens": 4.0}, NONE, NONE, NONE)
    # 1 nat over 5 tokens; then 0 over 4; then nothing to take a mean of.
    metrics = metrics_of(watch, figures)
    assert [row.get("guard/jsd") for row in metrics] == [None, None, 0.2, 0.0, None]
    assert tripped(metrics, "jsd_collapsed") == [3, 4]


def test_a_negative_divergence_of_the_entry_clamp_is_no_collapse():
    watch, _ = watch_of(window=2)
    assert tripped(metrics_of(watch, steps(*nats(-0.5, -0.5, -0.5))), "jsd_collapsed") == []


def test_collapse_names_the_hint_sources_that_move_nothing():
    watch, said = watch_of(window=2, collapsed_below=0.01)
    dead = {"dead": (0.0, 50.0), "faint": (0.25, 50.0), "live": (0.5, 5.0)}
    figures = steps(*[{"divergence": 0.75, "tokens": 105.0, "sources": dead}] * 2)
    metrics_of(watch, figures)
    assert "hint sources that move nothing, 2 of 3: dead (0), faint (0.005); let those hints" in said[0]
    assert "live" not in said[0]


def test_rising_compares_the_halves_of_the_window():
    watch, said = watch_of(window=4, rise_factor=1.5)
    # Later half over earlier: step 4: 1; 5: 1.25; 6: 1.5 (at the bound); 7: 1.75/1.25; 8: 2.5/1.5.
    metrics = metrics_of(watch, steps(*nats(1, 1, 1, 1, 1.5, 1.5, 2, 3)))
    found = [row.get("guard/jsd_rise") for row in metrics]
    assert found == [None, None, None, 1, 1.25, 1.5, pytest.approx(1.4), pytest.approx(5 / 3)]
    assert tripped(metrics, "jsd_rising") == [8]
    assert said[0].startswith("guard jsd_rising, steps 5 to 8: ")
    assert "at most 1.5 times the earlier half's; found 1.67 times" in said[0]
    assert "lower trainer.optim.lr or sdpo.weight = 0.5" in said[0]


def test_a_rise_from_nothing_to_nothing_is_none():
    watch, _ = watch_of(window=2, collapsed_below=1e-3)
    # The later step over the threshold of collapse, not over 1e-9.
    (_, row) = metrics_of(watch, steps(*nats(1e-9, 1e-4)))
    assert row["guard/jsd_rise"] == pytest.approx(0.1)
    watch, _ = watch_of(window=2, collapsed_below=0)
    (_, row) = metrics_of(watch, steps(*nats(0, 1e-4)))
    assert "guard/jsd_rise" not in row


@pytest.mark.parametrize(
    ("weighted", "outside"),
    [(0.124, True), (0.125, False), (0.25, False), (0.5, False), (0.501, True)],
)
def test_the_ratio_may_lie_on_its_bounds(weighted, outside):
    # |policy| is 1 on every step, whatever its sign: the ratio is the weighted divergence.
    watch, said = watch_of(window=2, ratio_low=0.125, ratio_high=0.5)
    figures = steps({"policy": 1.0, "weighted": weighted}, {"policy": -1.0, "weighted": weighted})
    (_, row) = metrics_of(watch, figures)
    assert row["guard/weighted_ratio"] == weighted
    assert row["guard/ratio_outside"] == float(outside)
    assert len(said) == outside


def test_the_ratio_is_one_of_means_not_a_mean_of_ratios_and_names_the_weight_to_set():
    watch, said = watch_of(window=2)
    figures = steps({"policy": 0.0, "weighted": 0.125}, {"policy": 0.25, "weighted": 0.125})
    (_, row) = metrics_of(watch, figures)
    assert row["guard/weighted_ratio"] == 1.0
    # 0.5 * 0.2 / 1: the middle of 0.1 and 0.3.
    assert "must be between 0.1 and 0.3; found 1; set sdpo.weight to about 0.1 (it is 0.5)" in said[0]


def test_the_ratio_waits_until_the_whole_window_is_behind_the_warm_up():
    watch, _ = watch_of({"warmup_steps": 3}, window=2)
    metrics = metrics_of(watch, steps(*[{}] * 6))
    # Steps 1 to 3 warm up; the first window without them is steps 4 and 5.
    assert ["guard/weighted_ratio" in row for row in metrics] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"policy": 0.0, "advantage": 0.0},
        {"policy": 1e-3, "advantage": 0.0},
        {"policy": 0.0025, "advantage": 0.25},
        {"weight": 0.0, "weighted": 0.0},
        NONE,
    ],
    ids=[
        "no advantages",
        "no advantages and a KL term",
        "terms that cancel",
        "weight 0",
        "no error tokens",
    ],
)
def test_the_ratio_says_nothing_where_it_means_nothing(change):
    watch, said = watch_of(window=2, no_sites_for=0)
    metrics = metrics_of(watch, steps(*[change] * 4))
    assert all("guard/weighted_ratio" not in row and "guard/ratio_outside" not in row for row in metrics)
    assert said == []


def test_a_collapsed_divergence_is_not_answered_with_a_larger_weight():
    watch, said = watch_of(window=2)
    metrics_of(watch, steps(*[{"divergence": 1e-6, "weighted": 1e-7}] * 2))
    (line,) = [line for line in said if "ratio_outside" in line]
    assert "no weight mends a divergence of nothing" in line


def test_clipping_speaks_above_the_share_and_only_where_there_is_a_clip():
    figures = steps({"clipped": 4.0}, {"clipped": 6.0}, {"clipped": 5.0})
    watch, said = watch_of({"token_clip": 0.05}, window=2)
    metrics = metrics_of(watch, figures)
    # 10 of 20 is the half itself; 11 of 20 is above.
    assert [row.get("guard/clip_fraction") for row in metrics] == [None, 0.5, 0.55]
    assert tripped(metrics, "mostly_clipped") == [3]
    assert "found 0.55; raise sdpo.token_clip = 0.05 or remove it" in said[0]
    watch, said = watch_of(window=2)
    assert all("guard/clip_fraction" not in row for row in metrics_of(watch, figures))


def test_no_sites_counts_steps_in_a_row_whatever_the_window():
    watch, said = watch_of(window=0, no_sites_for=3)
    metrics = metrics_of(watch, steps({}, NONE, NONE, {}, NONE, NONE, NONE, NONE, {}))
    assert [row["guard/steps_without_sites"] for row in metrics] == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert tripped(metrics, "no_sites") == [7, 8]
    assert [line.split(": ")[0] for line in said] == ["guard no_sites, steps 5 to 7"]


def test_a_guard_warns_once_however_often_it_trips():
    watch, said = watch_of(window=2)
    metrics = metrics_of(watch, steps(*nats(1, 1, 0, 0, 1, 1, 0, 0)))
    assert tripped(metrics, "jsd_collapsed") == [4, 8]
    assert sum("jsd_collapsed" in line for line in said) == 1
    assert [finding.step for finding in watch.findings if finding.name == "jsd_collapsed"] == [4]


OFF = {
    "jsd_collapsed": {"collapsed_below": 0},
    "jsd_rising": {"rise_factor": None},
    "ratio_outside": {"ratio_low": 0, "ratio_high": None},
    "mostly_clipped": {"clip_fraction": 1},
    "no_sites": {"no_sites_for": 0},
}


@pytest.mark.parametrize("name", GUARD_NAMES)
def test_a_guard_that_is_off_writes_nothing_and_cannot_stop(name):
    watch, _ = watch_of({"token_clip": 1.0}, window=2, **OFF[name])
    (guard,) = [guard for guard in GUARDS if guard.name == name]
    rows = metrics_of(watch, steps({}, {}, {}))
    assert all(guard.metric not in row and f"guard/{name}" not in row for row in rows)
    on, _ = watch_of({"token_clip": 1.0}, window=2)
    assert guard.metric in metrics_of(on, steps({}, {}))[-1]
    with pytest.raises(ValidationError, match=f"stop must name guards that are on; found {name}"):
        GuardConfig(stop=[name], **OFF[name])


def test_without_channel_two_there_is_nothing_to_watch():
    watch, said = watch_of({"weight": 0.0}, window=2, no_sites_for=1)
    assert metrics_of(watch, steps(NONE, NONE, NONE)) == [{}, {}, {}]
    assert said == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"window": 1}, "window must be 0"),
        ({"ratio_low": 0.3}, "ratio_low must be below ratio_high"),
        ({"stop": ["jsd"]}, "'jsd_collapsed', 'jsd_rising', 'ratio_outside', 'mostly_clipped' or 'no_sites'"),
        ({"windows": 3}, "valid keys are clip_fraction, collapsed_below"),
        ({"window": 0, "stop": ["jsd_rising"]}, "found jsd_rising"),
    ],
)
def test_a_wrong_table_is_refused_with_what_is_valid(table, message):
    with pytest.raises(ValidationError, match=message):
        GuardConfig(**table)


def test_a_guard_of_stop_ends_the_run_at_its_step_and_others_only_warn():
    watch, said = watch_of(window=2, no_sites_for=2, stop=["no_sites"])
    figures = steps(*nats(0, 0), NONE, NONE)
    metrics_of(watch, figures[:3])
    assert watch.stopped_by is None
    assert said
    assert all("no_sites" not in line for line in said)
    watch.update(figures[3])
    assert watch.stopped_by is not None
    assert (watch.stopped_by.name, watch.stopped_by.step) == ("no_sites", 4)


def test_a_run_that_goes_on_after_a_stop_has_empty_windows_and_may_be_stopped_again():
    watch, _ = watch_of(window=2, no_sites_for=2, stop=["no_sites"])
    metrics_of(watch, steps(*nats(0, 0), NONE, NONE))
    watch.forget()
    again, said = watch_of(window=2, no_sites_for=2, stop=["no_sites"])
    again.load(json.loads(json.dumps(watch.state())))
    later = [StepFigures(step=number, **{**HEALTHY, **NONE}) for number in (5, 6)]
    assert again.update(later[0]) == {"guard/steps_without_sites": 1.0, "guard/no_sites": 0.0}
    assert again.stopped_by is None
    again.update(later[1])
    assert again.stopped_by is not None
    assert [line.split(": ")[0] for line in said] == ["guard no_sites, steps 5 to 6"]


SEQUENCE = steps(
    *nats(0.1, 0.3, 1 / 3, 0.2),
    {"policy": 0.01},
    NONE,
    NONE,
    {"clipped": 9.0},
    *nats(0.7, 0.9, 1e-5, 1e-6, 0, 0),
)


@pytest.mark.parametrize("cut", range(1, len(SEQUENCE)))
def test_a_resumed_watch_gives_the_metrics_and_warnings_of_one_that_was_not_stopped(cut):
    guards = {"window": 4, "no_sites_for": 2}
    whole, wanted_lines = watch_of({"token_clip": 1.0}, **guards)
    wanted = metrics_of(whole, SEQUENCE)
    assert {line.split(",")[0] for line in wanted_lines} >= {"guard no_sites", "guard jsd_rising"}
    first, lines = watch_of({"token_clip": 1.0}, **guards)
    metrics = metrics_of(first, SEQUENCE[:cut])
    second, more = watch_of({"token_clip": 1.0}, **guards)
    second.load(json.loads(json.dumps(first.state())))
    assert metrics + metrics_of(second, SEQUENCE[cut:]) == wanted
    assert lines + more == wanted_lines
    assert second.findings == whole.findings
