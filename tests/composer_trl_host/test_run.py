"""`composer-rl run` from the TOML to the run folder, on a tiny model and a tiny task."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest

from composer_prime_plugin.cli import main
from composer_trl_host import report

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

TASK = Path(__file__).with_name("fakes.py")

TOML = """
max_steps = 2
output_dir = "{out}"

[model]
name = "{model}"

[orchestrator]
batch_size = 4
group_size = 2

[orchestrator.train.sampling]
max_completion_tokens = 5

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
environment = "task.py:PasswordEnvironment"
max_turns = 2
train_rows = 8
heldout_rows = 4
micro_batch_size = 2
"""


FAULTY = [
    "--trainer.loss.kwargs.trl_host.environment",
    "task.py:Faulty",
    "--trainer.loss.kwargs.trl_host.environment_kwargs.fault",
]


@pytest.fixture
def toml(tmp_path, model, tokenizer) -> Path:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK.read_text())
    path = tmp_path / "rl.toml"
    path.write_text(TOML.format(out=tmp_path / "out", model=tmp_path / "model"))
    return path


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_folder_and_prints_its_route_losses_and_table(toml, capsys):
    assert main(["run", "@", str(toml)]) == 0
    printed = capsys.readouterr().out
    out = toml.parent / "out"
    for part in (
        "trl-host",
        "needs full-vocabulary logits",
        "step    1/2  total",
        "error sites seen",
        "mean JSD",
        "held-out: recovery without a hint",
        f"run folder: {out}",
    ):
        assert part in printed
    logged = [row for row in records(out) if "loss/total" in row]
    assert [row["step"] for row in logged] == [1, 2]
    assert all(math.isfinite(value) for row in logged for value in row.values() if isinstance(value, float))
    assert [row["evaluation"] for row in records(out) if "evaluation" in row] == ["start", "end"]
    resolved = json.loads((out / "config.json").read_text())
    assert resolved["config"]["sdpo"]["weight"] == 0.5
    assert resolved["config"]["policy"]["dppo_mask_low"] == 0.2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint-2" / "model.safetensors").is_file()


def test_the_same_run_gives_the_same_numbers(toml):
    timeless = []
    for name in ("a", "b"):
        assert main(["run", "@", str(toml), "--output-dir", str(toml.parent / name)]) == 0
        timeless.append(
            [{k: v for k, v in row.items() if k != "step_time"} for row in records(toml.parent / name)]
        )
    assert timeless[0] == timeless[1]


def test_an_earlier_run_is_moved_aside_not_written_over(toml, capsys):
    assert main(["run", "@", str(toml), "--max-steps", "1"]) == 0
    first = (toml.parent / "out" / "metrics.jsonl").read_bytes()
    assert main(["run", "@", str(toml), "--max-steps", "1"]) == 0
    assert (toml.parent / "out.1" / "metrics.jsonl").read_bytes() == first
    assert "an earlier run was moved to" in capsys.readouterr().out


def test_a_stopped_run_keeps_its_metrics_and_resumes_to_the_same_end(toml, monkeypatch, capsys):
    three = ["run", "@", str(toml), "--max-steps", "3"]
    assert main([*three, "--output-dir", str(toml.parent / "whole")]) == 0
    written = report.MetricsWriter.on_log

    # Logging follows the step's end, so the signal arrives in step 2 and that step is finished.
    def interrupt_in_step_two(self, args, state, control, **kwargs):
        written(self, args, state, control, **kwargs)
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(report.MetricsWriter, "on_log", interrupt_in_step_two)
    assert main(three) == 130
    assert f"go on with: composer-rl run @ {toml} --max-steps 3 --resume" in capsys.readouterr().out
    monkeypatch.setattr(report.MetricsWriter, "on_log", written)
    out = toml.parent / "out"
    assert [row["step"] for row in records(out) if "loss/total" in row] == [1, 2]
    assert main([*three, "--resume"]) == 0
    whole = {row["step"]: row["loss/total"] for row in records(toml.parent / "whole") if "loss/total" in row}
    resumed = {row["step"]: row["loss/total"] for row in records(out) if "loss/total" in row}
    assert resumed == whole
    # The table and the curves cover the whole run, and a complete run is not trained on.
    assert [row["evaluation"] for row in records(out) if "evaluation" in row] == ["start", "end"]
    assert re.search(r"steps +3\n", capsys.readouterr().out)
    assert main([*three, "--resume"]) == 2
    assert "found step 3 of max_steps = 3: that run is complete" in capsys.readouterr().err


def test_an_interrupt_before_any_checkpoint_says_to_start_again(toml, monkeypatch, capsys):
    def twice(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(report.MetricsWriter, "on_step_begin", twice)
    assert main(["run", "@", str(toml)]) == 130
    assert f"no checkpoint was written; start again with: composer-rl run @ {toml}" in capsys.readouterr().out


def test_a_run_without_sdpo_trains_channel_one_on_the_host(toml, capsys):
    assert main(["run", "@", str(toml), "--trainer.loss.kwargs.sdpo.weight", "0", "--max-steps", "1"]) == 0
    assert "PRIME-RL is the path to scale" in capsys.readouterr().out
    row = next(row for row in records(toml.parent / "out") if "loss/total" in row)
    assert (row["sdpo/sites"], row["loss/sdpo_weighted"]) == (0, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.model.lora.rank", "4"],
        ["--trainer.model.ac"],
        ["--trainer.model.optimization-dtype", "bfloat16"],
        ["--trainer.optim.type", "sgd"],
        ["--trainer.scheduler.type", "cosine", "--trainer.scheduler.warmup-steps", "1"],
    ],
    ids=["lora", "activation checkpointing", "bfloat16", "sgd", "cosine"],
)
def test_the_rest_of_the_toml_trains_too(toml, arguments):
    assert main(["run", "@", str(toml), "--max-steps", "2", *arguments]) == 0
    logged = [row for row in records(toml.parent / "out") if "loss/total" in row]
    assert all(row["loss/sdpo_jsd"] > 0 and math.isfinite(row["loss/total"]) for row in logged)
    adapter = toml.parent / "out" / "checkpoint-2" / "adapter_model.safetensors"
    assert adapter.is_file() == ("--trainer.model.lora.rank" in arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.loss.kwargs.trl_host.environment", "gone.py:X"], "must name an existing file"),
        (["--trainer.loss.kwargs.trl_host.environment", "task.py:Gone"], "has no 'Gone'"),
        (
            ["--trainer.loss.kwargs.trl_host.environment", "no.such.Thing"],
            "must be file.py:Name or package.module.Name",
        ),
        (["--trainer.loss.kwargs.trl_host.adapter", "gone"], "has no adapter_config.json"),
        (["--orchestrator.group-size", "1"], "group_size must be at least 2"),
        (["--orchestrator.batch-size", "5"], "must be a multiple of"),
        (["--trainer.loss.kwargs.sdpo.student-context", "placeholder"], "must come with trl_host.traces"),
        (["--ckpt.resume-step", "7"], "resume must name a checkpoint"),
        (["--wandb"], "wandb must be installed"),
        (["--trainer.loss.kwargs.trl_host.environment", "task.py:NoHints"], "needs hints"),
        (
            ["--trainer.loss.kwargs.trl_host.environment", "task.py:FewRows"],
            "must give 8 rows; password gave 1",
        ),
        (["--trainer.loss.kwargs.trl_host.environment", "task.py:Nameless"], "lacks name and episode"),
        (["--trainer.loss.kwargs.trl_host.environment", "wordle"], "must be file.py:Name"),
        (
            ["--trainer.loss.kwargs.trl_host.train_rows", "1"],
            "a step needs batch_size / group_size = 2 prompts",
        ),
        ([*FAULTY, "nan"], "reward() must be a finite number; found nan for row"),
        ([*FAULTY, "dict"], "step() must return a composer_trl_host.environment.Reply; found dict"),
        ([*FAULTY, "raise"], "step() must not fail; it raised KeyError('boom') at task.py:"),
        (["--output-dir", "rl.toml"], "output_dir must be a folder that can be written"),
        (["--model.name", "./gone"], "found no folder ./gone"),
        (["--model.name", "no-such-folder/x"], "the model must come with a tokenizer"),
        (
            ["--seq-len", "20", "--orchestrator.train.sampling.max-completion-tokens", "None"],
            "seq_len must leave room",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(toml, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(toml.parent)
    assert main(["run", "@", str(toml), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("composer-rl: ")
    assert len(error.splitlines()) == 1


def test_a_model_folder_without_a_tokenizer_is_named(toml, capsys):
    for file in (toml.parent / "model").glob("*token*"):
        file.unlink()
    assert main(["run", "@", str(toml)]) == 2
    assert "the model must come with a tokenizer" in capsys.readouterr().err


def test_a_template_that_refuses_the_environments_role_is_named(toml, tokenizer, capsys):
    tokenizer.chat_template = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(toml.parent / "model")
    assert main(["run", "@", str(toml)]) == 2
    assert "it refused: no tools here" in capsys.readouterr().err
