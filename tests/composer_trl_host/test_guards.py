"""The guards in the trainer and in `composer-rl run`: metrics, one warning, the stop, the checkpoint, two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from composer_prime_plugin.cli import main
from composer_prime_plugin.config import GUARD_NAMES, GuardConfig
from composer_trl_host.guard_rules import GUARDS
from composer_trl_host.guards import GUARD_EXIT, STATE_FILE

from .guards_worker import TRIPS, config, guard_metrics, overflowing_advantages
from .test_run import records, toml  # noqa: F401
from .test_trainer import build, steps_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
"""A case on two ranks ends within a minute on a busy machine; one that waits for another rank is killed here."""


def test_the_trainer_logs_the_guards_once_the_window_is_full_and_warns_once(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, steps=4, micro=2, config=config(**TRIPS))
    said: list[str] = []
    trainer.guards.say = said.append
    trainer.train()
    rows = steps_of(trainer)
    assert ["guard/jsd_collapsed" in row for row in rows] == [False, True, True, True]
    for pair in pairwise(rows):
        row = pair[1]
        assert row["guard/jsd_collapsed"] == 1.0
        tokens = sum(each["sdpo/error_tokens"] for each in pair)
        mean = sum(each["loss/sdpo_jsd"] * each["sdpo/error_tokens"] for each in pair) / tokens
        assert row["guard/jsd"] == pytest.approx(mean, rel=1e-9)
        # The advantages are all 0 here: no try ever succeeds.
        assert "guard/weighted_ratio" not in row
    assert [line.split(": ")[0] for line in said] == ["guard jsd_collapsed, steps 1 to 2"]
    assert "hint sources that move nothing, 1 of 1: fake/password" in said[0]


def with_advantages(trainer, values: list[float]) -> None:
    plain = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: {
        **plain(inputs),
        "advantages": torch.tensor(values),
    }


def test_the_ratio_is_taken_from_the_two_terms_of_the_loss(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, steps=2, micro=2, config=config(window=2))
    with_advantages(trainer, [1.0, -0.5, 0.25, -0.125])
    trainer.train()
    rows = steps_of(trainer)
    policy = sum(abs(row["loss/policy"]) for row in rows)
    wanted = sum(row["loss/sdpo_weighted"] for row in rows) / policy
    assert wanted > 0
    assert rows[1]["guard/weighted_ratio"] == pytest.approx(wanted, rel=1e-9)
    # Every completion has 10 tokens: |1| + |-0.5| + |0.25| + |-0.125| over 4 rows.
    advantage = [row["advantage"] for row in trainer.guards.state()["steps"]]
    assert advantage == pytest.approx([0.46875] * 2, rel=1e-6)


def test_advantages_that_cancel_over_equally_long_completions_give_no_ratio(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, steps=2, micro=2, config=config(window=2))
    with_advantages(trainer, [0.5, -0.5, 0.25, -0.25])
    trainer.train()
    row = steps_of(trainer)[1]
    assert abs(row["loss/policy"]) < 1e-6
    assert "guard/jsd" in row
    assert "guard/weighted_ratio" not in row


def test_the_guards_change_no_weight(model, tokenizer, tmp_path):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    after = []
    for guards in (TRIPS, {"window": 0, "no_sites_for": 0}):
        model.load_state_dict(state)
        build(model, tokenizer, tmp_path, config=config(**guards)).train()
        after.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*after)


def test_evaluation_is_not_watched(model, tokenizer, tmp_path):
    trainer = build(
        model,
        tokenizer,
        tmp_path,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        config=config(**TRIPS),
    )
    trainer.eval_dataset = trainer.train_dataset
    metrics = trainer.evaluate()
    assert not [name for name in metrics if "guard/" in name]
    assert trainer.guards.state()["steps"] == []


def test_a_resumed_run_logs_the_guards_of_one_that_was_not_stopped(model, tokenizer, tmp_path):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    shared = {
        "save_strategy": "steps",
        "save_steps": 1,
        "optim": "adamw_torch",
        "config": config(window=3, collapsed_below=10.0),
    }
    whole = build(model, tokenizer, tmp_path, steps=4, **shared)
    whole.train()
    wanted = guard_metrics(steps_of(whole))
    model.load_state_dict(state)
    again = build(model, tokenizer, tmp_path, steps=4, **shared)
    said: list[str] = []
    again.guards.say = said.append
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    # The log of the checkpoint comes first, then the two steps that were trained again.
    assert guard_metrics(steps_of(again)) == wanted
    assert "guard/jsd" in wanted[2]
    assert [line.split(": ")[0] for line in said] == ["guard jsd_collapsed, steps 1 to 3"]
    assert again.guards.findings == whole.guards.findings


def test_a_checkpoint_without_guards_is_said_and_starts_with_empty_windows(
    model, tokenizer, tmp_path, caplog
):
    shared = {"save_strategy": "steps", "save_steps": 1, "config": config(**TRIPS)}
    build(model, tokenizer, tmp_path, steps=1, **shared).train()
    folder = tmp_path / "run" / "checkpoint-1"
    (folder / STATE_FILE).unlink()
    again = build(model, tokenizer, tmp_path, steps=2, **shared)
    again.train(resume_from_checkpoint=str(folder))
    assert f"holds no {STATE_FILE}: the guards' windows start empty" in caplog.text
    assert "guard/jsd" not in steps_of(again)[-1]


GUARDS_FLAG = "--trainer.loss.kwargs.trl_host.guards"


def flags(**guards) -> list[str]:
    return [word for name, value in guards.items() for word in (f"{GUARDS_FLAG}.{name}", json.dumps(value))]


def test_a_run_prints_a_guard_s_line_once_and_names_it_at_the_end(toml, capsys):  # noqa: F811
    assert main(["run", "@", str(toml), "--max-steps", "3", *flags(**TRIPS)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("guard jsd_collapsed, steps 1 to 2: ") == 1
    assert "guards that spoke: jsd_collapsed (step 2)" in printed
    rows = [row for row in records(toml.parent / "out") if "loss/total" in row]
    assert [row.get("guard/jsd_collapsed") for row in rows] == [None, 1.0, 1.0]


def test_a_guard_of_stop_ends_the_run_with_a_checkpoint_and_it_can_go_on(toml, capsys):  # noqa: F811
    arguments = [
        "run",
        "@",
        str(toml),
        "--max-steps",
        "5",
        "--ckpt.interval",
        "5",
        *flags(**TRIPS, stop=["jsd_collapsed"]),
    ]
    out = toml.parent / "out"
    assert main(arguments) == GUARD_EXIT
    printed = capsys.readouterr().out
    assert "stopped by guard jsd_collapsed after step 2; go on with: composer-rl run @ " in printed
    assert "run folder: " in printed
    assert (out / "checkpoint-2" / STATE_FILE).is_file()
    assert (out / "loss.png").is_file()
    assert [row["step"] for row in records(out) if "loss/total" in row] == [1, 2]
    # A window of its own: steps 3 and 4. Without the guard it ends.
    assert main([*arguments, "--resume"]) == GUARD_EXIT
    assert "stopped by guard jsd_collapsed after step 4" in capsys.readouterr().out
    assert main([*arguments[:-1], "[]", "--resume"]) == 0
    assert [row["step"] for row in records(out) if "loss/total" in row] == [1, 2, 3, 4, 5]


def test_a_guard_of_stop_at_the_last_step_leaves_a_complete_run_and_its_exit_code(toml, capsys):  # noqa: F811
    assert main(["run", "@", str(toml), *flags(**TRIPS, stop=["jsd_collapsed"])]) == GUARD_EXIT
    printed = capsys.readouterr().out
    assert "stopped by guard jsd_collapsed after step 2; the run is complete" in printed
    assert [row["evaluation"] for row in records(toml.parent / "out") if "evaluation" in row] == [
        "start",
        "end",
    ]


# Two ranks


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> list[dict]:
    """What the ranks of ``guards_worker`` wrote: every case in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    result = torchrun(folder, "-m", "tests.composer_trl_host.guards_worker", str(folder))
    assert result.returncode == 0, result.stdout + result.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--log-dir", str(folder / "logs")),
        *words,
    ]
    try:
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{words} did not end within {SECONDS} s: a rank waits for another; {late.stderr}")


def test_a_rank_without_error_sites_is_not_waited_for(on_two_ranks):
    """Whether each rank's loss is finite is asked behind it; the teacher must ask nothing of the other rank."""
    assert [result["one-sided"]["sites"] for result in on_two_ranks] == [[4, 4], [4, 4]]


def test_both_ranks_stop_at_the_same_step_with_the_same_figures(on_two_ranks):
    first, second = (result["stop"] for result in on_two_ranks)
    assert first["step"] == second["step"] == 2
    assert first["metrics"] == second["metrics"]
    assert (len(first["said"]), second["said"]) == (1, [])
    assert first["checkpoints"] == ["checkpoint-2"]


def test_a_loss_that_is_not_finite_on_one_rank_stops_both_and_saves_its_batch(on_two_ranks):
    first, second = (result["loss"] for result in on_two_ranks)
    assert "the loss must be finite on every rank; found none at step 2 on rank 1" in first["error"]
    assert "step 2: advantages must be finite" in second["error"]
    assert "it comes from channel 1" in second["error"]
    assert first["files"] == ["bad_batch-2-rank1.pt"]
    assert first["unchanged"]
    assert second["unchanged"]


def test_a_gradient_that_is_not_finite_on_one_rank_stops_both_and_saves_its_batch(on_two_ranks):
    first, second = (result["gradient"] for result in on_two_ranks)
    assert "every gradient must be finite before the optimizer step; found nan" in first["error"]
    assert "a batch of rank 1 makes it" in first["error"]
    assert "it comes from channel 2" in second["error"]
    assert first["files"] == ["bad_batch-1-rank1.pt"]
    assert first["unchanged"]
    assert second["unchanged"]


def test_weights_that_nothing_can_be_sampled_from_end_the_run_in_one_line(toml, model, capsys):  # noqa: F811
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(toml.parent / "model")
    for words in ([], ["--trainer.loss.kwargs.trl_host.heldout_rows", "0"]):
        assert main(["run", "@", str(toml), *words]) == GUARD_EXIT
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("composer-rl: step 1: the model's logits must be finite to sample from")


def test_a_run_of_two_ranks_ends_with_a_line_of_each(toml, tmp_path):  # noqa: F811
    """Rewards whose advantages overflow: the first step's loss is not finite on either rank."""
    overflowing_advantages(toml)
    result = torchrun(
        tmp_path,
        *("-m", "composer_prime_plugin.cli", "run", "@", str(toml), "--max-steps", "1"),
        *("--trainer.loss.kwargs.trl_host.heldout_rows", "0"),
    )
    assert result.returncode != 0
    assert "composer-rl: step 1: " in result.stderr
    assert "Traceback" not in result.stderr.split("composer-rl: step 1: ")[1].split("torch.distributed")[0]
    assert list((toml.parent / "out").glob("bad_batch-1-rank*.pt"))


# The page


def page() -> str:
    return (ROOT / "docs" / "guards.md").read_text()


def test_the_page_s_table_is_the_code_s():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page().splitlines()
        if line.startswith("| `")
    ]
    fields = GuardConfig.model_fields
    guards = {row[0].strip("`"): row for row in rows if row[0].strip("`") in GUARD_NAMES}
    assert list(guards) == [guard.name for guard in GUARDS] == list(GUARD_NAMES)
    for guard in GUARDS:
        _, speaks, metric, knobs, _ = guards[guard.name]
        assert metric == f"`{guard.metric}`"
        assert speaks
        for name, default in re.findall(r"`(\w+)` (\S+?)(?:,|$)", knobs):
            assert str(fields[name].default) == default
    named = {name for row in guards.values() for name in re.findall(r"`(\w+)` \S", row[3])}
    assert named == set(fields) - {"window", "stop"}
    assert f"`window` ({fields['window'].default})" in page()
    assert f"exit code {GUARD_EXIT}" in page()


def test_the_guards_of_the_code_are_those_of_the_schema():
    assert tuple(guard.name for guard in GUARDS) == GUARD_NAMES == GuardConfig().on
    assert len({guard.metric for guard in GUARDS}) == len(GUARDS)
