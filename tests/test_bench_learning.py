"""The learning bench: its measures, its levers, its conditions and its tables."""

from __future__ import annotations

import importlib.util
import json
import math
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

PATH = Path(__file__).resolve().parents[1] / "bench" / "learning.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_learning", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
    assert bench.Drift(model, [([0], [1, 2]), ([1, 1], [0])])(model) == (0.0, 0.0)


def test_drift_is_the_kl_worked_by_hand(bench):
    model = Bigrams([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    drift = bench.Drift(model, [([0], [1, 2])])
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
    drift = bench.Drift(model, [([3, 0], [1, 2]), ([0], [1])])
    with torch.no_grad():
        model.table[2:] = torch.tensor([0.1, 0.1, 0.8]).log()
    assert drift(model) == (0.0, 0.0)


def test_drift_keeps_the_direction_of_the_kl(bench):
    start, now = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    # KL(start || now) = 0.9 log 1.8 + 0.1 log 0.2 = 0.3681, the other way round 0.5108.
    assert bench.mean_kl_and_changed(start, now)[0] == pytest.approx(0.3681, abs=1e-4)


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
    hints = bench.FalseHints(Right(), WORDS, share, seed=1)
    texts = [hints.generate(context).text for context in contexts(2000)]
    wrong = [text for text in texts if text != "hint: trash a"]
    # Five standard deviations of 2000 draws at one half.
    assert len(wrong) / 2000 == pytest.approx(share, abs=0.056 if 0 < share < 1 else 0)
    assert set(wrong) <= {"hint: view a", "hint: dir a", "hint: make a"}
    assert not wrong or len(set(wrong)) == 3


def test_false_hints_say_the_same_to_the_same_context(bench):
    once = [bench.FalseHints(Right(), WORDS, 0.5, 1).generate(c).text for c in contexts(50)]
    hints = bench.FalseHints(Right(), WORDS, 0.5, 1)
    again = [hints.generate(c).text for c in reversed(contexts(50))][::-1]
    other = [bench.FalseHints(Right(), WORDS, 0.5, 2).generate(c).text for c in contexts(50)]
    assert once == again != other


def test_no_hint_stays_none(bench):
    context = ErrorContext("x", "", "remove a")
    assert bench.FalseHints(Right(), WORDS, 1.0, 0).generate(context) is None
    assert bench.Worded(Right(), "{command}").generate(context) is None


def test_a_wording_keeps_the_command_and_the_source(bench):
    hint = bench.Worded(Right(), bench.WORDINGS["sentence"]).generate(contexts(1)[0])
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
    assert bench.agreed_length(written, would) == kept


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
    played = bench.CutSites(runner, model, pad_token_id=0).play([], None)
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
    bench.OneSite(Runner(), 2).play([], lambda contexts: next(sampled))
    assert seen == [
        ([[10], [10], [12], [12]], [[-1.0], [-1.0], [-3.0], [-3.0]]),
        ([[20], [21], [22], [23]], None),
    ]


def test_one_site_refuses_rows_that_are_no_groups(bench):
    runner = SimpleNamespace(play=lambda rows, generate: generate([[1], [2]]))
    with pytest.raises(ConfigError, match="groups of 2 with one prompt"):
        bench.OneSite(runner, 2).play([], lambda contexts: ([[3], [4]], None))


# Conditions


def test_every_condition_is_a_valid_run_that_changes_something(bench):
    base = bench.settings_of(bench.CONDITIONS["both"], 42, 20, "out")
    for name, condition in bench.CONDITIONS.items():
        settings = bench.settings_of(condition, 42, 20, "out")
        assert settings.unhonoured == (), name
        assert settings.config.trl_host.heldout_rows == bench.HELDOUT_ROWS
        levers = (condition.wording, condition.wrong, condition.cut, condition.one_site)
        assert (settings != base) != (name == "both") or any(levers), name
        assert condition.wording is None or condition.wording in bench.WORDINGS
        assert condition.steps % condition.every == 0


def test_channel_2_alone_differs_in_the_policy_table_alone(bench):
    base, alone = (
        bench.settings_of(bench.CONDITIONS[name], 1, 40, "out").config for name in ("both", "channel_2")
    )
    assert (alone.policy.adv_tau, alone.policy.kl_tau) == (0, 0)
    assert (alone.sdpo, alone.trl_host) == (base.sdpo, base.trl_host)


def test_a_finished_run_is_not_run_again(bench, tmp_path, monkeypatch, capsys):
    ran = []

    def train(name, seed, steps, every):
        ran.append((name, seed, steps))
        return {"condition": name, "seed": seed, "steps": steps, "trail": []}

    monkeypatch.setattr(bench, "train", train)
    results = tmp_path / "results.jsonl"
    bench.run_queue(["lora", "both"], [42, 1], None, results)
    assert ran == [("both", 42, 20), ("both", 1, 20), ("lora", 42, 10), ("lora", 1, 10)]
    bench.run_queue(["lora", "both"], [42, 1, 2], None, results)
    assert ran[4:] == [("both", 2, 20), ("lora", 2, 10)]
    with bench.claim(results, ("cut", 1, 10)) as mine:
        bench.run_queue(["cut"], [1], None, results)
    assert mine
    assert len(ran) == 6
    bench.run_queue(["cut"], [1], None, results)
    assert ran[6:] == [("cut", 1, 10)]


def test_an_interrupted_run_is_kept_as_far_as_it_came_and_ends_the_queue(bench, tmp_path, monkeypatch):
    def train(name, seed, steps, every):
        return {"condition": name, "seed": seed, "steps": 5, "trail": []}

    monkeypatch.setattr(bench, "train", train)
    results = tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bench.run_queue(["cut", "lora"], [1], None, results)
    assert bench.finished(results, "cut", 1, 5)
    assert bench.finished(results, "cut", 1, 3)
    assert not bench.finished(results, "cut", 1, 10)
    assert not bench.finished(results, "lora", 1, 5)


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


def lines():
    def run(name, seed, steps, points):
        trail = [points.get(step) or point(step, 0, 0) for step in range(0, steps + 1, 5)]
        return {"condition": name, "seed": seed, "steps": steps, "trail": trail}

    # At step 10 first turns 20, 28 and 22 of 40, recoveries 10/40, 10/20 and 30/40; one seed ran longer.
    at_10 = {
        42: point(10, 20, 10, 40, hinted=20, drift=0.2),
        1: point(10, 28, 10, 20, hinted=10, drift=0.28),
        2: point(10, 22, 30, 40, hinted=20, drift=0.22),
    }
    return [
        *(run("both", seed, 40 if seed == 42 else 30, {10: at_10[seed]}) for seed in (42, 1, 2)),
        run("both", 42, 10, {10: point(10, 40, 40)}),  # shorter than the one above: not read
        run("lora", 2, 10, {10: point(10, 14, 40)}),
        run("lora", 42, 10, {10: point(10, 13, 40)}),
        run("lora", 42, 10, {10: point(10, 12, 22)}),  # as long as the one above and later: read
        run("unknown", 42, 10, {}),
    ]


def test_the_tables_hold_medians_and_ranges_worked_by_hand(bench, monkeypatch):
    monkeypatch.setattr(bench, "SHOWN_STEPS", (10, 40))
    made = bench.tables(lines())
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
    assert caption == "After 10 steps:"
    assert "| 42, 1, 2 | 55% (50% to 70%) |" in base
    # First turns 12/40 and 14/40, against 20/40 and 22/40 of the same seeds; recoveries 22/40 and 40/40
    # against 10/40 and 30/40.
    assert "| 42, 2 | 32% (30% to 35%) | 78% (55% to 100%) |" in lora
    assert lora.endswith("| -20, -20 | +30, +25 |")
    assert made["clip"] == "Not run."


def test_best_is_where_a_run_was_best(bench):
    rows = bench.tables(lines())["best"].splitlines()
    assert "| `both` | 1 | 70% at 10 | 0% at 30 | 50% at 10 | 0% at 30 |" in rows
    assert "| `both` | 42 | 50% at 10 | 0% at 40 | 25% at 10 | 0% at 40 |" in rows


def test_a_report_rewrites_what_stands_between_the_markers_alone(bench, tmp_path):
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    names = bench.tables(lines())
    page.write_text(
        "before\n" + "".join(f"<!-- table: {n} -->\nold\n<!-- end -->\nkept {n}\n" for n in names)
    )
    bench.report(results, page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- table: channels -->\n    python bench/learning.py run")
    assert all(f"<!-- end -->\nkept {name}\n" in text for name in names)
    bench.report(results, page)
    assert page.read_text() == text
    for picture in ("channels.png", "levers.png"):
        assert b"Creation" not in (tmp_path / picture).read_bytes()
    page.write_text(text.replace("<!-- table: clip -->", ""))
    with pytest.raises(ConfigError, match="one marker per table"):
        bench.report(results, page)


def test_the_page_holds_what_its_results_give(bench):
    page = bench.PAGE.read_text()
    assert bench.rewrite(page, bench.tables(bench.read(bench.RESULTS))) == page
