"""Training on recorded traces, from the TOML to the run folder, on a tiny model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from composer_prime_plugin.cli import main
from composer_prime_plugin.config import ComposerConfig
from composer_trl_host.collator import ComposerDataCollator
from composer_trl_host.compose import compose_loss
from composer_trl_host.hints import Hint
from composer_trl_host.offline import TraceTrainer, _EveryRow
from composer_trl_host.traces.model import Trace
from composer_trl_host.trainer import make_dr_grpo_config

from .test_collator import small_trace
from .test_trainer import steps_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

TOML = """
max_steps = 2
output_dir = "{out}"

[model]
name = "{model}"

[orchestrator]
batch_size = 4

[trainer.optim]
lr = 1e-3

[ckpt]
interval = 1

[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"

[trainer.loss.kwargs.sdpo]
weight = 0.5

[trainer.loss.kwargs.trl_host]
traces = "traces.jsonl"
micro_batch_size = 2
"""


def chat_line(number: int, *, fails: bool = True, error: str = "Error: no such file: a", **fields) -> dict:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    result = error if fails else "text"
    return {
        "messages": [
            {"role": "user", "content": f"task {number}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": result},
            {"role": "assistant", "content": f"look {number}"},
        ],
        **fields,
    }


@pytest.fixture
def toml(tmp_path, model, tokenizer) -> Path:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [chat_line(k, reward=float(k % 2), group_id=f"g{k // 2}") for k in range(6)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "rl.toml"
    path.write_text(TOML.format(out=tmp_path / "out", model=tmp_path / "model"))
    return path


def test_a_run_on_traces_trains_both_channels_and_leaves_its_folder(toml, capsys):
    assert main(["run", "@", str(toml)]) == 0
    printed = capsys.readouterr().out
    assert "traces: 6 from 1 files; error sites: 6 found, 6 kept" in printed
    assert "rows: 6; with an advantage 6, with recorded log-probs 0" in printed
    rows = [json.loads(line) for line in (toml.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["loss/sdpo_jsd"] > 0
        assert row["sdpo/sites"] == 4
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert (toml.parent / "out" / "checkpoint-2" / "trainer_state.json").is_file()


def test_going_on_after_a_checkpoint_gives_the_same_steps(toml):
    assert main(["run", "@", str(toml)]) == 0
    out = toml.parent / "out"
    whole = (out / "metrics.jsonl").read_text().splitlines()[1]
    out.rename(toml.parent / "kept")
    assert main(["run", "@", str(toml), "--max-steps", "1"]) == 0
    assert main(["run", "@", str(toml), "--max-steps", "2", "--resume"]) == 0
    again = (out / "metrics.jsonl").read_text().splitlines()[-1]
    for name in ("loss/total", "loss/sdpo_jsd", "grad_norm"):
        assert json.loads(again)[name] == pytest.approx(json.loads(whole)[name], rel=1e-6)


def test_a_judge_that_cannot_be_reached_costs_no_site(toml, capsys):
    lines = [chat_line(k, error="Error: zork") for k in range(4)]
    (toml.parent / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judge = ["base-url", "http://127.0.0.1:9/v1", "model", "m", "api-key-env", "None", "max-retries", "0"]
    table = "--trainer.loss.kwargs.trl_host.judge."
    words = [f"{table}{word}" if k % 2 == 0 else word for k, word in enumerate(judge)]
    assert main(["run", "@", str(toml), "--max-steps", "1", *words]) == 0
    printed = capsys.readouterr().out
    assert "hints: template 4" in printed
    assert "hint layer judge failed" in printed


def two_processes(toml: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "composer_prime_plugin.cli",
    ]
    return subprocess.run(
        [sys.executable, *command, "run", "@", str(toml), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
    )


def test_two_processes_train_the_rows_that_one_of_them_read(toml):
    assert main(["run", "@", str(toml)]) == 0
    out = toml.parent / "out"
    [alone, *_] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    done = two_processes(toml, "--output-dir", str(toml.parent / "two"))
    assert done.returncode == 0, done.stderr[-2000:]
    [shared, *_] = [
        json.loads(line) for line in (toml.parent / "two" / "metrics.jsonl").read_text().splitlines()
    ]
    # Both take the first four rows of one order; only who reads which differs.
    for name in ("loss/total", "loss/sdpo_jsd", "sdpo/sites"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-4)


def test_two_processes_stop_together_where_there_is_nothing_to_train(toml):
    (toml.parent / "traces.jsonl").write_text(json.dumps(chat_line(0, fails=False)) + "\n")
    done = two_processes(toml)
    assert done.returncode != 0
    assert "needs an error site" in done.stderr


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([chat_line(0, fails=False)] * 4, "needs an error site"),
        ([], "must"),
        (["{broken"], "must"),
    ],
)
def test_traces_with_nothing_to_train_are_one_sentence_and_exit_code_two(toml, capsys, lines, message):
    (toml.parent / "traces.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    assert main(["run", "@", str(toml)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("composer-rl: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.loss.kwargs.trl_host.traces", "gone.jsonl"], "gone.jsonl"),
        (["--trainer.loss.kwargs.trl_host.environment", "task.py:X"], "either traces or environment"),
        (
            ["--orchestrator.batch-size", "1", "--orchestrator.group-size", "1"],
            "batch_size must be at least 2",
        ),
        (["--seq-len", "12"], "kept 0"),
    ],
)
def test_bad_settings_are_one_sentence_and_exit_code_two(toml, capsys, arguments, message):
    assert main(["run", "@", str(toml), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def rows_of(tokenizer, config: ComposerConfig, traces: list[Trace], advantages: list[float]):
    collator = ComposerDataCollator(tokenizer, config, hints=lambda context: Hint("hint: look", "test"))
    return collator, [row for each in collator.collate(traces, advantages) for row in each.rows]


@pytest.mark.parametrize(
    "sdpo",
    [{}, {"student_context": "placeholder"}, {"hint_scope": "cumulative"}, {"normalization": "error_tokens"}],
)
def test_the_trainer_s_step_is_the_collator_s_batch_through_compose_loss(model, tokenizer, tmp_path, sdpo):
    config = ComposerConfig(policy={"objective": "dr_grpo"}, sdpo={"weight": 0.5, **sdpo})
    traces = [small_trace(k % 2 + 1, trace_id=f"t{k}") for k in range(4)]
    collator, rows = rows_of(tokenizer, config, traces, [0.5, -0.5, 1.0, 0.0])
    assert len(rows) == 4
    wanted = compose_loss(model, collator.batch(rows), config)
    wanted.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for micro in (4, 1):
        trainer = TraceTrainer(
            model=model,
            args=make_dr_grpo_config(
                output_dir=str(tmp_path / f"run{micro}"),
                max_steps=1,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=4 // micro,
                num_generations=4,
                max_completion_length=1,
                learning_rate=0.0,
                logging_steps=1,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                dataloader_pin_memory=False,
                max_grad_norm=0.0,
                optim="sgd",
            ),
            train_dataset=Dataset.from_list([{"row": k, "prompt": ""} for k in range(4)]),
            processing_class=tokenizer,
            composer_config=config,
            rows=rows,
        )
        seen: list[torch.Tensor] = []
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(
            lambda *_, seen=seen, trainer=trainer: seen.extend(
                p.grad.clone() for p in trainer.model.parameters()
            )
        )
        trainer.train()
        [logged] = steps_of(trainer)
        assert logged["loss/total"] == pytest.approx(float(wanted.loss), rel=1e-5)
        assert logged["sdpo/sites"] == 6
        for one, other in zip(seen, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_every_row_is_read_once_per_epoch_and_epochs_follow_without_a_gap():
    order = list(_EveryRow(rows=5, batch=4, repeats=2, micro_steps=10, seed=3))
    chunks = [order[k : k + 4] for k in range(0, len(order), 4)]
    assert len(chunks) == 10
    assert chunks[::2] == chunks[1::2]  # each batch twice, as often as it is asked for
    stream = [row for chunk in chunks[::2] for row in chunk]
    assert sorted(stream[:5]) == sorted(stream[5:10]) == sorted(stream[10:15]) == [0, 1, 2, 3, 4]
    assert list(_EveryRow(5, 4, 2, 10, seed=3)) == order
    assert list(_EveryRow(5, 4, 2, 10, seed=4)) != order
