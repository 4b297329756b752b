"""The benches of a training step: their batches, their sums and the checks before a figure is printed."""

from __future__ import annotations

import importlib
import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

BENCH = Path(__file__).resolve().parents[1] / "bench"
NAMES = ("measuring", "step", "trl_steps", "memory", "scaling")
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in (*NAMES, "shapes"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model and a tokenizer, as ``--model`` takes them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=2,
        # Predictions as far from uniform as a trained model's, so that a hint moves them.
        initializer_range=0.3,
    )
    place = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(place)
    words = {"<eos>": 0, "<bos>": 1, "<pad>": 2, "<unk>": 3}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
    ).save_pretrained(place)
    return str(place)


@pytest.fixture
def model(bench, folder):
    return bench.measuring.load(folder)[0]


@pytest.fixture
def shape(bench):
    return bench.measuring.Shape(rows=2, prompt=12, completion=40, recovery=16, hint=8)


# Batches


def test_more_sites_share_the_same_tokens(bench, shape):
    one, four = (bench.measuring.make_batch(replace(shape, sites=n), 264) for n in (1, 4))
    for name in ("input_ids", "advantages", "completion_mask"):
        assert torch.equal(one[name], four[name])
    assert one["student_response_valid"].sum() == four["student_response_valid"].sum() == 2 * 16
    assert four["site_row"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert int(four["student_response_idx"].max()) == 51


def test_the_teachers_tokens_are_counted_as_it_reads_them(bench, shape):
    # Per row: 16 recovery and 8 hint tokens, and per site 3 of the generation prompt and 1 read again.
    for sites, tokens in ((1, 2 * 28), (4, 2 * 40)):
        batch = bench.measuring.make_batch(replace(shape, sites=sites), 264)
        assert bench.measuring.teacher_tokens(batch) == tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": 3}, "recovery must divide"),
        ({"sites": 16}, "hint must divide"),
        ({"completion": 20, "sites": 4}, "must fit into the completion"),
        ({"prompt": 3}, "must fit into the completion"),
    ],
)
def test_a_shape_that_would_not_hold_the_tokens_is_refused(bench, shape, changes, message):
    with pytest.raises(SystemExit, match=message):
        bench.measuring.make_batch(replace(shape, **changes), 264)


def test_a_model_in_half_precision_is_refused(bench, folder, monkeypatch):
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    monkeypatch.setattr(bench.measuring.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: half)
    with pytest.raises(SystemExit, match="float32"):
        bench.measuring.load(folder)


# Measuring


def test_calls_are_taken_in_turn_and_every_second_round_backwards(bench):
    seen = []
    calls = {name: (lambda name=name: seen.append(name) or len(seen)) for name in "ab"}
    assert bench.measuring.in_turn(calls, 2) == {"a": [3, 6], "b": [4, 5]}
    assert seen == ["a", "b", "a", "b", "b", "a"]


def test_a_row_is_the_median_of_the_ratios_of_each_round(bench):
    # 2/4, 6/5, 9/10: 0.5, 1.2, 0.9; the ratio of the medians would be 6/5.
    values = bench.measuring.ratios([2.0, 6.0, 9.0], [4.0, 5.0, 10.0])
    row = bench.measuring.Row("x", "a over b", values, target=0.9)
    assert row.median == pytest.approx(0.9)
    assert "at most 0.9: met" in str(row)
    assert "at most 0.8: MISSED" in str(replace(row, target=0.8))


def test_a_loss_that_is_not_finite_is_refused(bench):
    layer = nn.Linear(1, 1)
    with pytest.raises(SystemExit, match="must be finite"):
        bench.measuring.seconds(layer, lambda: layer.weight.sum() * float("nan"))


def test_a_record_holds_what_the_figures_hang_on_and_no_path(bench, shape, tmp_path, folder, capsys):
    record = bench.measuring.Record("step", Path(folder).name, 10)
    record.add(bench.measuring.Row("x", "a over b", [1.0, 3.0], shape, target=1.5))
    record.write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert {"torch", "transformers", "trl", "python"} <= written["versions"].keys()
    assert written["threads"] == torch.get_num_threads()
    (row,) = written["rows"]
    assert (row["median"], row["met"], row["values"]) == (2.0, False, [1.0, 3.0])
    assert row["shape"]["completion"] == 40
    assert str(tmp_path.parent) not in json.dumps(written)
    assert "x: a over b: 2.000" in capsys.readouterr().out


# The step


def test_the_step_is_measured_with_and_without_its_update(bench, model, shape):
    before = deepcopy(model.state_dict())
    plain, updated = bench.step.measure("base", model, shape, 2)
    assert (plain.name, updated.name) == ("base", "base with update")
    assert all(a > b for a, b in zip(updated.details["seconds_on"], plain.details["seconds_on"], strict=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_readings_that_disagree_are_refused(bench, model, shape, monkeypatch):
    batch = bench.measuring.make_batch(shape, 264)
    bench.step.check(model, batch)
    losses = iter([1.0, 1.01])
    monkeypatch.setattr(bench.step, "compose_loss", lambda *_: SimpleNamespace(loss=next(losses)))
    with pytest.raises(SystemExit, match=r"one loss; found 1\.0 and 1\.01"):
        bench.step.check(model, batch)


# TRL's steps


@pytest.fixture
def sides(bench, shape):
    return bench.measuring.make_batch(shape, 264), bench.trl_steps.their_inputs(shape, 264)


def test_trl_computes_the_same_loss_and_the_ratios_come_out(bench, model, folder, shape):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = bench.trl_steps.measure(model, tokenizer, shape, 1, list(bench.trl_steps.PARTS))
    assert [row.name for row in rows] == ["recovery", "all", "masked"]
    assert rows[0].target == 0.55
    assert rows[0].values[0] == rows[0].details["recovery"][0] / rows[0].details["theirs"][0]
    assert rows[2].values[0] == rows[2].details["recovery"][0] / rows[2].details["theirs_masked"][0]


@pytest.mark.parametrize(
    ("change", "term"),
    [({"weight": 0.9}, "loss"), ({"jsd_beta": 0.49}, "divergence"), ({"temperature": 1.01}, "divergence")],
)
def test_another_loss_than_trls_is_refused(bench, model, folder, shape, change, term):
    trl_steps = bench.trl_steps
    trainer = trl_steps.build_trainer(
        "sdpo", model, AutoTokenizer.from_pretrained(folder), shape, Path(folder)
    )
    batch = bench.measuring.make_batch(trl_steps.everywhere(shape), 264)
    inputs = trl_steps.their_inputs(shape, 264)
    config = trl_steps.CONFIG.model_copy(update={"sdpo": trl_steps.CONFIG.sdpo.model_copy(update=change)})
    with pytest.raises(SystemExit, match=f"must compute one {term};"):
        trl_steps.check_losses(
            model,
            lambda: trl_steps.our_terms(trl_steps.compose_loss(model, batch, config)),
            lambda: trl_steps.their_terms(trainer, trainer.compute_loss(model, inputs)),
        )


def test_one_loss_with_another_gradient_is_refused(bench):
    layer = nn.Linear(2, 1, bias=False)
    total = layer.weight.detach().sum()
    with pytest.raises(SystemExit, match="one gradient; found entries 1 apart, the largest 1"):
        bench.trl_steps.check_losses(
            layer, lambda: (2 * layer.weight.sum() - total, {}), lambda: (layer.weight.sum(), {})
        )


def _spoil(name, row, column):
    def change(mine, theirs):
        tensor = mine[name] if name in mine else theirs[name]
        tensor[row, column] += 1

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_spoil("input_ids", 1, 3), "input_ids"),
        (_spoil("completion_ids", 0, 0), "input_ids, taught completion"),
        (lambda mine, _: mine["advantages"].add_(1.0), "advantages"),
        # The hint stands at 36 - 3 in our teacher's sequence and at 12 - 3 in theirs.
        (_spoil("teacher_input_ids", 0, 33), "hint"),
        (lambda _, theirs: theirs["teacher_input_ids"][0].__setitem__(9, 0), "hint"),
        (lambda _, theirs: theirs["teacher_input_ids"][1].__setitem__(-1, 0), "taught completion"),
    ],
)
def test_sides_that_read_other_tokens_are_refused(bench, sides, change, named):
    mine, theirs = ({k: v.clone() if torch.is_tensor(v) else v for k, v in side.items()} for side in sides)
    bench.trl_steps.check_inputs(mine, theirs)
    change(mine, theirs)
    with pytest.raises(SystemExit, match=f"difference in {named}$"):
        bench.trl_steps.check_inputs(mine, theirs)


def test_masking_moves_the_mean_to_the_recovery_and_is_undone(bench, model, folder, shape):
    trl_steps = bench.trl_steps
    trainer = trl_steps.build_trainer(
        "sdpo", model, AutoTokenizer.from_pretrained(folder), shape, Path(folder)
    )
    inputs = trl_steps.their_inputs(shape, 264)
    everything, recovery = torch.ones(2, 40), torch.zeros(2, 40)
    recovery[:, -16:] = 1
    with torch.no_grad():
        plain = trainer.compute_loss(model, inputs)
        assert torch.equal(trl_steps.masked(trainer, inputs, everything)(), plain)
        first, last = (trl_steps.masked(trainer, inputs, mask)() for mask in (1 - recovery, recovery))
        # Each loss is half the policy's and half a mean: 24 tokens of one and 16 of the other make all 40.
        assert float((24 * first + 16 * last) / 40) == pytest.approx(float(plain), rel=1e-5)
        assert abs(float(first) - float(last)) > 1e-3
        assert torch.equal(trainer.compute_loss(model, inputs), plain)


def test_a_trainer_with_a_copy_of_the_model_is_refused(bench, model, folder, shape, monkeypatch):
    copied = SimpleNamespace(model=deepcopy(model))
    monkeypatch.setattr("trl.experimental.sdpo.SDPOTrainer", lambda **_: copied)
    with pytest.raises(SystemExit, match="found a copy"):
        bench.trl_steps.build_trainer(
            "sdpo", model, AutoTokenizer.from_pretrained(folder), shape, Path(folder)
        )


# Memory


@linux
def test_the_peak_begins_where_it_is_reset_and_outlives_what_was_freed(bench):
    memory = bench.memory
    memory.reset_peak()
    before = memory.resident("VmRSS")
    held = torch.ones(64 * memory.MIB // 4)
    del held
    assert memory.resident("VmHWM") - before > 60 * memory.MIB
    memory.reset_peak()
    assert memory.resident("VmHWM") < before + 60 * memory.MIB


@linux
def test_every_side_holds_one_model_and_computes_one_policy_loss(bench, folder, shape):
    found = {side: bench.memory.child(side, folder, shape, steps=1) for side in bench.memory.SIDES}
    assert len({each.digest for each in found.values()}) == 1
    for each in found.values():
        assert each.policy == pytest.approx(found["on"].policy, rel=1e-5)
        assert each.peak >= each.before > 0


@linux
def test_a_fresh_process_measures_the_same_weights(bench, folder, shape):
    fresh = bench.memory.fresh("on", folder, shape)
    assert fresh.digest == bench.memory.child("on", folder, shape, steps=1).digest
    assert fresh.added > 0


@linux
def test_a_process_that_fails_says_why(bench, shape, tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SystemExit, match=r"process of on failed:\nno such model"):
        bench.memory.fresh("on", None, shape)


def test_memory_is_compared_round_by_round(bench, shape):
    peaks = {"on": iter([30, 50]), "grpo": iter([50, 60])}

    def start(side, _name, _shape):
        return bench.memory.Found(before=10, peak=next(peaks[side]), policy=0.5, digest="same")

    (row,) = bench.memory.measure(None, shape, 2, ["grpo"], start)
    assert row.values == [20 / 40, 40 / 50]
    assert row.details["whole_process"] == [30 / 50, 50 / 60]


@pytest.mark.parametrize(
    ("other", "message"),
    [({"digest": "other"}, "same weights and ids"), ({"policy": 0.6}, "one policy loss")],
)
def test_processes_that_do_not_compute_the_same_are_refused(bench, shape, other, message):
    found = bench.memory.Found(before=0, peak=1, policy=0.5, digest="same")

    def start(side, _name, _shape):
        return replace(found, **other) if side == "grpo" else found

    with pytest.raises(SystemExit, match=message):
        bench.memory.measure(None, shape, 1, ["grpo"], start)


# Scaling


def test_the_sites_growth_is_taken_round_by_round(bench, model, shape, monkeypatch):
    # Rounds of off, on 1 site, on 4 sites; the second runs backwards. The first call of each warms it.
    given = iter([0, 0, 0, 10.0, 12.0, 15.0, 18.0, 12.0, 10.0])
    monkeypatch.setattr(bench.scaling, "seconds", lambda *_: next(given))
    *counts, step, extra = bench.scaling.sites(model, shape, [1, 4], 2)
    assert [row.values for row in counts] == [[1.2, 1.2], [1.5, 1.8]]
    assert [row.details["teacher_tokens"] for row in counts] == [56, 80]
    assert step.values == pytest.approx([0.25, 0.5])
    # The teacher's tokens grow by 24 / 56.
    assert step.target == pytest.approx(24 / 56)
    assert extra.values == pytest.approx([5 / 2 - 1, 8 / 2 - 1])


def test_a_step_at_every_length_reads_the_same_tokens_as_teacher(bench, model, shape, monkeypatch):
    short, long, grown = bench.scaling.time_of_lengths(model, shape, [36, 72], 1)
    assert (short.shape.total, long.shape.total) == (36, 72)
    assert short.shape.recovery == long.shape.recovery == 16
    assert grown.values == pytest.approx([long.values[0] - short.values[0]])
    monkeypatch.setattr(bench.scaling, "teacher_tokens", lambda batch: batch["input_ids"].size(1))
    with pytest.raises(SystemExit, match=r"same tokens at every length; found \[36, 72\]"):
        bench.scaling.time_of_lengths(model, shape, [36, 72], 1)


def test_the_bytes_of_the_prefix_are_those_of_its_keys_and_values(bench, model, shape):
    # 2 rows x 52 - 16 - 3 - 1 = 32 columns x (keys and values) x 2 layers x 2 heads x 8 entries x 4 bytes.
    assert bench.scaling.prefix_bytes(model, shape) == 2 * 32 * 2 * 2 * 2 * 8 * 4


def test_the_memory_of_lengths_is_the_difference_of_fresh_processes(bench, model, shape):
    def start(side, _name, each):
        added = (each.total + 5 * (side == "on")) * bench.memory.MIB
        return bench.memory.Found(before=0, peak=added, policy=0.5, digest="same")

    short, long, grown = bench.scaling.memory_of_lengths(None, model, shape, [36, 72], 2, start)
    assert short.values == long.values == [5.0, 5.0]
    assert (grown.median, grown.details["without_sdpo"]) == (0.0, 36.0)
