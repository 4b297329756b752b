"""The learning bench: its measures, its levers, its conditions and its tables."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.alignment import ErrorSite
from composer_trl_host.hints import ErrorContext, Hint
from composer_trl_host.rollout import Rollout

BENCH = Path(__file__).resolve().parents[1] / "bench"
NAMES = ("conditions", "levers", "results", "run", "report")


@pytest.fixture(scope="module")
def bench():
    """The bench's modules by the last part of their names, and the command line as ``command``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        modules = {name: importlib.import_module(f"learning_{name}") for name in NAMES}
        yield SimpleNamespace(command=importlib.import_module("learning"), **modules)
    for name in ("learning", *(f"learning_{name}" for name in NAMES)):
        del sys.modules[name]


class Bigrams(nn.Module):
    """A language model whose next-token probabilities hang on the last token alone."""

    def __init__(self, probabilities):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, input_ids, logits_to_keep=0, **_):
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


# Drift


def test_drift_is_zero_for_the_same_weights(bench):
    model = Bigrams([[0.5, 0.25, 0.25]] * 3)
    assert bench.run.Drift(model, [([0], [1, 2]), ([1, 1], [0])])(model) == (0.0, 0.0)


def test_drift_is_the_kl_worked_by_hand(bench):
    model = Bigrams([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    drift = bench.run.Drift(model, [([0], [1, 2])])
    with torch.no_grad():
        model.table[0] = torch.tensor([0.25, 0.5, 0.25]).log()
    # Two positions: behind token 0 the distribution moved, behind token 1 it did not.
    # 1/2 log 2 + 1/4 log 1/2 + 1/4 log 1 = 1/4 log 2; the mean of two is 1/8 log 2. One of two maxima moved.
    kl, changed = drift(model)
    assert kl == pytest.approx(math.log(2) / 8, rel=1e-5)
    assert changed == 0.5


def test_drift_reads_the_positions_that_predict_the_answer_and_no_other(bench):
    model = Bigrams([[0.5, 0.25, 0.25]] * 4)
    # Token 3 stands in the context before its last token, token 2 ends the answer: neither predicts an answer token.
    drift = bench.run.Drift(model, [([3, 0], [1, 2]), ([0], [1])])
    with torch.no_grad():
        model.table[2:] = torch.tensor([0.1, 0.1, 0.8]).log()
    assert drift(model) == (0.0, 0.0)


def test_drift_keeps_the_direction_of_the_kl(bench):
    start, now = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    # KL(start || now) = 0.9 log 1.8 + 0.1 log 0.2 = 0.3681, the other way round 0.5108.
    assert bench.run.mean_kl_and_changed(start, now)[0] == pytest.approx(0.3681, abs=1e-4)


# Levers


class Right:
    def generate(self, context):
        return Hint(f"hint: {context.details['command']}", "shell/x") if context.details else None


WORDS = ("trash", "view", "dir", "make")


def contexts(count):
    return [
        ErrorContext(
            "x", "", f"remove {i}", ({"role": "user", "content": f"remove {i}"},), {"command": "trash a"}
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_false_hints_falsify_the_asked_share(bench, share):
    hints = bench.levers.FalseHints(Right(), WORDS, share, seed=1)
    texts = [hints.generate(context).text for context in contexts(2000)]
    wrong = [text for text in texts if text != "hint: trash a"]
    # Five standard deviations of 2000 draws at one half.
    assert len(wrong) / 2000 == pytest.approx(share, abs=0.056 if 0 < share < 1 else 0)
    assert set(wrong) <= {"hint: view a", "hint: dir a", "hint: make a"}
    assert not wrong or len(set(wrong)) == 3


def test_false_hints_say_the_same_to_the_same_context(bench):
    once = [bench.levers.FalseHints(Right(), WORDS, 0.5, 1).generate(c).text for c in contexts(50)]
    hints = bench.levers.FalseHints(Right(), WORDS, 0.5, 1)
    again = [hints.generate(c).text for c in reversed(contexts(50))][::-1]
    other = [bench.levers.FalseHints(Right(), WORDS, 0.5, 2).generate(c).text for c in contexts(50)]
    assert once == again != other


def test_no_hint_stays_none(bench):
    context = ErrorContext("x", "", "remove a")
    assert bench.levers.FalseHints(Right(), WORDS, 1.0, 0).generate(context) is None
    assert bench.levers.Worded(Right(), "{command}").generate(context) is None


def test_a_wording_keeps_the_command_and_the_source(bench):
    hint = bench.levers.Worded(Right(), bench.conditions.WORDINGS["sentence"]).generate(contexts(1)[0])
    assert hint == Hint("In this shell the command for that request is trash a and nothing else.", "shell/x")


@pytest.mark.parametrize(
    ("written", "would", "kept"),
    [
        ([7, 8, 9], [7, 8, 9], 3),
        ([7, 8, 9], [7, 5, 9], 2),
        ([7, 8, 9], [5, 8, 9], 1),
        ([7, 8, 9], [7, 8, 5], 3),
    ],
)
def test_the_first_disagreement_is_the_last_token_kept(bench, written, would, kept):
    assert bench.levers.agreed_length(written, would) == kept


def test_cut_sites_end_where_the_hinted_model_first_disagrees(bench):
    # Greedily 0 -> 1 -> 2 -> 3 -> 0, and behind the hint's token 4 comes 2.
    follows = {0: 1, 1: 2, 2: 3, 3: 0, 4: 2}
    model = Bigrams([[0.8 if column == follows[row] else 0.05 for column in range(5)] for row in range(5)])
    # Prompt 0, failed turn 1, boundary at 2, recovery from 2 on; the hint (4) stands before the recovery.
    agreeing = Rollout([0], completion_ids=[1, 2, 3, 0], sites=[ErrorSite(2, 5, 2, (4,), "s", "x")])
    late = Rollout([0], completion_ids=[1, 2, 3, 1, 1], sites=[ErrorSite(2, 6, 2, (4,), "s", "x")])
    early = Rollout([0], completion_ids=[1, 3, 0, 1], sites=[ErrorSite(2, 5, 2, (4,), "s", "x")])
    none = Rollout([0], completion_ids=[1])
    runner = SimpleNamespace(play=lambda rows, generate: [agreeing, none, late, early])
    played = bench.levers.CutSites(runner, model, pad_token_id=0).play([], None)
    assert [[(site.start, site.stop) for site in rollout.sites] for rollout in played] == [
        [(2, 5)],
        [],
        [(2, 5)],
        [(2, 3)],
    ]


def test_one_site_shares_the_first_turn_of_a_group_and_nothing_behind_it(bench):
    seen = []

    class Runner:
        def play(self, rows, generate):
            seen.append(generate([[1], [1], [2], [2]]))
            seen.append(generate([[5], [5], [6], [6]]))

    sampled = iter(
        [([[10], [11], [12], [13]], [[-1.0], [-2.0], [-3.0], [-4.0]]), ([[20], [21], [22], [23]], None)]
    )
    bench.levers.OneSite(Runner(), 2).play([], lambda contexts: next(sampled))
    assert seen == [
        ([[10], [10], [12], [12]], [[-1.0], [-1.0], [-3.0], [-3.0]]),
        ([[20], [21], [22], [23]], None),
    ]


def test_one_site_refuses_rows_that_are_no_groups(bench):
    runner = SimpleNamespace(play=lambda rows, generate: generate([[1], [2]]))
    with pytest.raises(ConfigError, match="groups of 2 with one prompt"):
        bench.levers.OneSite(runner, 2).play([], lambda contexts: ([[3], [4]], None))


# Conditions


def test_every_condition_is_a_valid_run_that_changes_something(bench):
    base = bench.run.settings_of(bench.conditions.CONDITIONS["both"], 42, 20, "out")
    for name, condition in bench.conditions.CONDITIONS.items():
        settings = bench.run.settings_of(condition, 42, 20, "out")
        assert settings.unhonoured == (), name
        assert settings.config.trl_host.heldout_rows == bench.run.HELDOUT_ROWS
        levers = (condition.wording, condition.wrong, condition.cut, condition.one_site)
        assert (settings != base) != (name == "both") or any(levers), name
        assert condition.wording is None or condition.wording in bench.conditions.WORDINGS
        assert condition.steps % condition.every == 0


def test_channel_2_alone_differs_in_the_policy_table_alone(bench):
    base, alone = (
        bench.run.settings_of(bench.conditions.CONDITIONS[name], 1, 40, "out").config
        for name in ("both", "channel_2")
    )
    assert (alone.policy.adv_tau, alone.policy.kl_tau) == (0, 0)
    assert (alone.sdpo, alone.trl_host) == (base.sdpo, base.trl_host)


def test_a_finished_run_is_not_run_again(bench, tmp_path, monkeypatch, capsys):
    ran = []

    def train(name, seed, steps, every):
        ran.append((name, seed, steps))
        return {"condition": name, "seed": seed, "steps": steps, "trail": []}

    monkeypatch.setattr(bench.run, "train", train)
    results = tmp_path / "results.jsonl"
    bench.run.run_queue(["lora", "both"], [42, 1], None, results)
    assert ran == [("both", 42, 20), ("both", 1, 20), ("lora", 42, 10), ("lora", 1, 10)]
    bench.run.run_queue(["lora", "both"], [42, 1, 2], None, results)
    assert ran[4:] == [("both", 2, 20), ("lora", 2, 10)]
    with bench.results.claim(results, ("cut", 1, 10)) as mine:
        bench.run.run_queue(["cut"], [1], None, results)
    assert mine
    assert len(ran) == 6
    bench.run.run_queue(["cut"], [1], None, results)
    assert ran[6:] == [("cut", 1, 10)]


def test_an_interrupted_run_is_kept_as_far_as_it_came_and_ends_the_queue(bench, tmp_path, monkeypatch):
    def train(name, seed, steps, every):
        return {"condition": name, "seed": seed, "steps": 5, "trail": []}

    monkeypatch.setattr(bench.run, "train", train)
    results = tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bench.run.run_queue(["cut", "lora"], [1], None, results)
    assert bench.results.finished(results, "cut", 1, 5)
    assert bench.results.finished(results, "cut", 1, 3)
    assert not bench.results.finished(results, "cut", 1, 10)
    assert not bench.results.finished(results, "lora", 1, 5)


# Report


def point(step, first, recovered, replayed=40, hinted=40, drift=0.0):
    return {
        "step": step,
        "episodes": 40,
        "first_try": first,
        "replayed": replayed,
        "replay_recovered": recovered,
        "hinted_recovered": hinted,
        "drift": drift,
        "changed": 0.0,
    }


def run(name, seed, steps, points, every=5):
    trail = [points.get(step) or point(step, 0, 0) for step in range(0, steps + 1, every)]
    return {"condition": name, "seed": seed, "steps": steps, "trail": trail}


def lines():
    # At step 10 first turns 20, 28 and 22 of 40, recoveries 10/40, 10/20 and 30/40; one seed ran longer.
    at_10 = {
        42: point(10, 20, 10, 40, hinted=20, drift=0.2),
        1: point(10, 28, 10, 20, hinted=10, drift=0.28),
        2: point(10, 22, 30, 40, hinted=20, drift=0.22),
    }
    return [
        *(run("both", seed, 40 if seed == 42 else 30, {10: at_10[seed]}) for seed in (42, 1, 2)),
        run("both", 42, 10, {10: point(10, 40, 40)}),  # shorter than the one above: not read
        run("lora", 2, 10, {10: point(10, 18, 40, drift=0.1)}, every=10),
        run("lora", 42, 10, {10: point(10, 13, 40)}, every=10),
        run(
            "lora", 42, 10, {10: point(10, 12, 22, drift=0.1)}, every=10
        ),  # as long as the one above and later: read
        run("unknown", 42, 10, {}),
    ]


def test_the_tables_hold_medians_and_ranges_worked_by_hand(bench, monkeypatch):
    monkeypatch.setattr(bench.report, "SHOWN_STEPS", (10, 40))
    made = bench.report.tables(lines())
    assert made["channels"].splitlines() == [
        "    python bench/learning.py run --only both --seeds 42 --steps 40",
        "    python bench/learning.py run --only both --seeds 1 2 --steps 30",
        "",
        "| condition | step | seeds | first turn | recovery, no hint | recovery, hinted (the teacher) | drift, nats a token | changed tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `both` | 10 | 3 | 55% (50% to 70%) | 50% (25% to 75%) | 50% (50% to 50%) | 0.220 (0.200 to 0.280) | 0% (0% to 0%) |",
        "| `both` | 40 | 1 | 0% | 0% | 100% | 0.000 | 0% |",
    ]
    command, _, caption, _, _, _, base, lora = made["parameters"].splitlines()
    assert command == "    python bench/learning.py run --only lora --seeds 42 2"
    assert caption.startswith("After 10 steps; differences in percentage points from `both` at the same seed")
    assert base == (
        "| `both` |  | 42, 1, 2 | 55% (50% to 70%) | 50% (25% to 75%) | 50% (50% to 50%) | 0.220 (0.200 to 0.280) |  |  |"
    )
    # First turns 12/40 and 18/40 against 20/40 and 22/40 of the same seeds: -20 and -10, two values with a standard
    # error of half their distance. Recoveries 22/40 and 40/40 against 10/40 and 30/40: +30 and +25, 27.5 ± 2.5.
    assert "| 42, 2 | 38% (30% to 45%) | 78% (55% to 100%) |" in lora
    assert lora.endswith("| -15 ± 5 (-20, -10) | +28 ± 2 (+30, +25) |")
    assert made["clip"] == "Not run."


def test_differences_are_taken_within_a_seed_and_the_seeds_own_spread_cancels(bench):
    # First turns of the base: 10, 20 and 30 of 40, each from the longest run of its seed, whatever its spacing.
    # The lever has 14, 24 and 36: +10, +10 and +15 points, mean 11 2/3. Deviations of -5/3, -5/3 and 10/3 give a
    # variance of (25/9 + 25/9 + 100/9) / 2 = 25/3, so the standard error is sqrt(25/9) = 5/3.
    runs = bench.report.longest_runs(
        [
            run("both", 1, 30, {10: point(10, 20, 0)}, every=10),
            run("both", 1, 20, {10: point(10, 0, 40)}),
            run("both", 42, 10, {10: point(10, 40, 40)}),
            run("both", 42, 40, {10: point(10, 10, 0), 40: point(40, 40, 40)}),
            run("both", 2, 10, {10: point(10, 30, 0)}, every=10),
            run("cut", 2, 10, {10: point(10, 36, 0)}, every=10),
            run("cut", 1, 20, {10: point(10, 24, 0), 20: point(20, 40, 0)}, every=10),
            run("cut", 42, 10, {10: point(10, 14, 0)}, every=10),
        ]
    )
    found = bench.report.differences(runs, "cut", 10, "first")
    assert found == pytest.approx({42: 0.1, 1: 0.1, 2: 0.15})
    assert bench.report.mean_and_error(list(found.values())) == pytest.approx((0.35 / 3, 0.05 / 3))
    assert bench.report.against_base(runs, "cut", 10, "first") == "+12 ± 2 (+10, +10, +15)"


def test_one_run_has_no_error_and_a_seed_without_its_base_is_a_dash(bench):
    def against(*runs):
        return bench.report.against_base(bench.report.longest_runs(runs), "cut", 10, "first")

    base, cut = run("both", 1, 10, {10: point(10, 16, 0)}), run("cut", 1, 10, {10: point(10, 19, 0)})
    # 19/40 - 16/40 in floats is a little under 7.5 points, which is printed as the even one beside it.
    assert against(base, cut) == "+8"
    assert against(base, cut, run("cut", 2, 10, {})) == "+8 (+8, –)"
    assert against(base, cut, run("cut", 42, 10, {})) == "+8 (–, +8)"
    assert against(cut) == "–"
    assert against(base, run("both", 2, 10, {}), cut) == "+8"


def test_no_difference_has_one_sign(bench):
    runs = bench.report.longest_runs(
        # 17/38 - 18/40 is a quarter of a point below 0.
        [run("both", 1, 10, {10: point(10, 0, 18)}), run("cut", 1, 10, {10: point(10, 0, 17, 38)})]
    )
    assert bench.report.against_base(runs, "cut", 10, "recovery") == "+0"


def test_single_channels_are_compared_with_both_at_the_same_seed_and_step(bench, monkeypatch):
    monkeypatch.setattr(bench.report, "SHOWN_STEPS", (0, 10, 20))
    made = bench.report.tables(
        [
            run("both", 42, 20, {10: point(10, 20, 10), 20: point(20, 30, 10)}),
            run("both", 1, 10, {10: point(10, 10, 10)}),
            run("channel_2", 42, 20, {10: point(10, 24, 20), 20: point(20, 28, 40)}),
            run("channel_2", 1, 10, {10: point(10, 10, 12)}),
        ]
    )["channels"]
    assert made.splitlines()[-4:] == [
        "| condition | step | seeds | first turn: difference | recovery, no hint: difference |",
        "| --- | --- | --- | --- | --- |",
        "| `channel_2` | 10 | 42, 1 | +5 ± 5 (+10, +0) | +15 ± 10 (+25, +5) |",
        "| `channel_2` | 20 | 42 | -5 | +75 |",
    ]


def test_the_commands_repeat_every_run_for_as_long_and_as_often_measured_as_it_was(bench):
    done = [
        run("both", 42, 40, {}),
        run("both", 1, 40, {}, every=10),
        run("both", 2, 20, {}),
        run("lora", 42, 10, {}, every=10),
        run("lora", 1, 20, {}, every=10),
        run("lora", 2, 10, {}, every=5),
        run("lora_1e-5", 42, 10, {}, every=10),
        run("cut", 2, 20, {}, every=10),
        run("lr_3e-5", 1, 5, {}),
    ]
    runs = bench.report.longest_runs(done)
    found = bench.report.commands(runs, list(runs))
    assert found == [
        "python bench/learning.py run --only both --seeds 42 --steps 40",
        "python bench/learning.py run --only both --seeds 1 --steps 40 --every 10",
        "python bench/learning.py run --only both --seeds 2",
        "python bench/learning.py run --only lr_3e-5 --seeds 1 --steps 5",
        "python bench/learning.py run --only cut --seeds 2 --steps 20",
        "python bench/learning.py run --only lora lora_1e-5 --seeds 42",
        "python bench/learning.py run --only lora --seeds 1 --steps 20",
        "python bench/learning.py run --only lora --seeds 2 --every 5",
    ]


def test_a_lever_without_a_point_to_compare_is_not_run(bench):
    made = bench.report.tables([*lines(), run("cut", 42, 5, {})])
    assert made["recovery tokens"] == "Not run."


def dots(axis):
    """The dots of a panel: seed label to (row, value), rows counted from the top."""
    return {
        dot.get_label(): [(round(y), pytest.approx(x)) for x, y in dot.get_offsets().tolist()]
        for dot in axis.collections
        if dot.get_label().startswith("seed")
    }


def test_the_levers_picture_has_one_dot_a_run_and_the_difference_within_its_seed(bench):
    figure = bench.report.levers_figure(bench.report.longest_runs(lines()))
    first, first_less, recovery, recovery_less, hinted, drift = figure.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["both", "lora"]
    assert dots(first) == {
        "seed 42": [(0, 0.5), (1, 0.3)],
        "seed 1": [(0, 0.7)],
        "seed 2": [(0, 0.55), (1, 0.45)],
    }
    assert dots(first_less) == {"seed 42": [(1, -20)], "seed 2": [(1, -10)]}
    assert dots(recovery)["seed 42"] == [(0, 0.25), (1, 0.55)]
    assert dots(recovery_less) == {"seed 42": [(1, 30)], "seed 2": [(1, 25)]}
    assert dots(hinted)["seed 2"] == [(0, 0.5), (1, 1)]
    assert dots(drift)["seed 1"] == [(0, 0.28)]
    # The mean with its standard error, -15 ± 5.
    ((_, _, (bar,)),) = first_less.containers
    assert bar.get_segments()[0].ravel().tolist() == pytest.approx([-20, 1, -10, 1])


def test_seeds_are_told_apart_by_colour_by_mark_and_by_place(bench):
    runs = bench.report.longest_runs(
        [run("both", seed, 10, {10: point(10, 20, 20, drift=0.1)}) for seed in (2, 42, 7, 1)]
    )
    shown = [
        d for d in bench.report.levers_figure(runs).axes[0].collections if d.get_label().startswith("seed")
    ]
    assert [dot.get_label() for dot in shown] == ["seed 42", "seed 1", "seed 2", "seed 7"]
    places = [dot.get_offsets().tolist()[0][1] for dot in shown]
    assert places == sorted(set(places))
    assert sum(places) == pytest.approx(0)
    assert all(abs(place) < 0.5 for place in places)
    assert len({tuple(dot.get_facecolor()[0]) for dot in shown}) == 4
    assert len({dot.get_paths()[0].vertices.tobytes() for dot in shown}) == 4


def test_a_seed_keeps_its_line_where_a_condition_lacks_others(bench):
    runs = bench.report.longest_runs(
        [run("both", 42, 10, {}), run("both", 1, 10, {}), run("channel_1", 1, 10, {})]
    )
    axis = bench.report.channels_figure(runs).axes[0]
    assert {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axis.lines} == {
        "both, seed 42": ("C0", "-"),
        "both, seed 1": ("C0", "--"),
        "channel_1, seed 1": ("C1", "--"),
    }
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend == ["both", "channel_1", "seed 42", "seed 1"]


def test_best_is_where_a_run_was_best(bench):
    rows = bench.report.tables(lines())["best"].splitlines()
    assert "| `both` | 1 | 70% at 10 | 0% at 30 | 50% at 10 | 0% at 30 |" in rows
    assert "| `both` | 42 | 50% at 10 | 0% at 40 | 25% at 10 | 0% at 40 |" in rows


def test_a_report_rewrites_what_stands_between_the_markers_alone(bench, tmp_path):
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    names = bench.report.tables(lines())
    page.write_text(
        "before\n" + "".join(f"<!-- table: {n} -->\nold\n<!-- end -->\nkept {n}\n" for n in names)
    )
    bench.report.report(results, page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- table: channels -->\n    python bench/learning.py run")
    assert all(f"<!-- end -->\nkept {name}\n" in text for name in names)
    bench.report.report(results, page)
    assert page.read_text() == text
    for picture in ("channels.png", "levers.png"):
        assert b"Creation" not in (tmp_path / picture).read_bytes()
    page.write_text(text.replace("<!-- table: clip -->", ""))
    with pytest.raises(ConfigError, match="one marker per table"):
        bench.report.report(results, page)


def test_the_page_holds_what_its_results_give(bench):
    page = bench.report.PAGE.read_text()
    assert bench.report.rewrite(page, bench.report.tables(bench.results.read(bench.results.RESULTS))) == page


# Command line


def test_the_conditions_are_listed(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning.py", "list"])
    bench.command.main()
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(bench.conditions.CONDITIONS)
    assert listed[0].split(maxsplit=2)[1:] == [
        "channels",
        "20 steps  both channels, the example as it stands",
    ]


def test_what_the_command_line_asks_for_is_run(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(bench.run, "run_queue", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(bench.command.signal, "signal", lambda *_: None)
    words = "run --only cut lora --seeds 7 --steps 3 --every 2 --results here.jsonl"
    monkeypatch.setattr(sys, "argv", ["learning.py", *words.split()])
    bench.command.main()
    monkeypatch.setattr(sys, "argv", ["learning.py", "run"])
    bench.command.main()
    assert asked == [
        (["cut", "lora"], [7], 3, Path("here.jsonl"), 2),
        (list(bench.conditions.CONDITIONS), [42, 1, 2], None, bench.results.RESULTS, None),
    ]


def test_a_list_and_a_report_need_no_torch():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import learning; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code, str(BENCH)], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
