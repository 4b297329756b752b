"""`composer-rl run` on environments of verifiers, from the TOML to the run folder, with a tiny model."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("verifiers.v1")

from composer_prime_plugin.cli import main
from composer_trl_host.verifiers_env.heldout import HeldOut
from tests.test_verifiers_live import EXAMPLE, byte_tokenizer

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

AGENT = 'runtime = { type = "subprocess" }, max_turns = 2'
TOML = f"""
max_steps = 2
output_dir = "OUT"
model.name = "MODEL"

[orchestrator]
batch_size = 8
group_size = 2
renderer = {{ name = "custom", import_path = "verifiers_tool.renderer.LineRenderer" }}
train.sampling.max_completion_tokens = 5

[[orchestrator.train.source]]
name = "one"
env = {{ taskset = {{ id = "verifiers-tool" }}, agent = {{ {AGENT} }} }}

[[orchestrator.train.source]]
name = "two"
ratio = 3.0
env = {{ taskset = {{ id = "verifiers-tool", seed = 1 }}, agent = {{ {AGENT}, timeout = {{ rollout = 100.0 }} }} }}

[orchestrator.eval]
interval = 1
num_examples = 3

[[orchestrator.eval.source]]
name = "three"
env = {{ taskset = {{ id = "verifiers-tool", seed = 2 }}, agent = {{ {AGENT}, timeout = {{ rollout = 100.0 }} }} }}

[trainer.optim]
lr = 1e-3

[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"

[trainer.loss.kwargs.sdpo]
weight = 0.5

[trainer.loss.kwargs.trl_host]
train_rows = 4
micro_batch_size = 4
"""


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    # The tool servers are programs of their own.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE), str(EXAMPLE.parents[1])]))
    byte_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=258,
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    path = tmp_path / "rl.toml"
    path.write_text(TOML.replace("OUT", str(tmp_path / "out")).replace("MODEL", str(tmp_path / "model")))
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def episodes(row: dict[str, Any], name: str) -> float:
    """Those that can be trained on, and those that failed: a random model says things that no tool takes."""
    return float(row[f"{name}/rollouts"] + row[f"{name}/left_out"])


def test_two_environments_train_by_their_ratio_and_a_third_is_held_out(
    toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = toml.parent / "out"
    handlers: list[Any] = []
    evaluate = HeldOut.evaluate

    def evaluate_and_look(self: HeldOut, *given: Any) -> Any:
        handlers.append(signal.getsignal(signal.SIGTERM))
        return evaluate(self, *given)

    monkeypatch.setattr(HeldOut, "evaluate", evaluate_and_look)
    assert main(["run", "@", str(toml)]) == 0
    # A signal is heeded in every evaluation, the one before the first step included.
    assert [getattr(handler, "__qualname__", None) for handler in handlers] == ["GracefulStop._ask"] * 3
    printed = capsys.readouterr().out
    assert "not honoured" not in printed
    for part in (
        # 4 rows at 1 : 3.
        "environment: one, of verifiers, with its own code, tools and rewards; 1 of 4 prompts",
        "environment: two, of verifiers, with its own code, tools and rewards; 3 of 4 prompts",
        "warning: orchestrator.train.source[0].env.agent.timeout.rollout is not set",
        "held-out evaluation (start): three, 3 episodes",
        "held-out evaluation (step 1): three, 3 episodes",
        "held-out evaluation (end): three, 3 episodes",
        "held-out three: first try solved",
    ):
        assert part in printed
    assert printed.count("warning: ") == 1
    logged = [row for row in records(out) if "loss/total" in row]
    # Every step of 4 prompts sees each of the 4 rows once: 2 rollouts of one, 6 of the other.
    assert [episodes(row, "env/one") for row in logged] == [2, 2]
    assert [episodes(row, "env/two") for row in logged] == [6, 6]
    assert all("env/two/reward" in row for row in logged)
    assert sum(row["sdpo/sites"] for row in logged) > 0
    assert all(math.isfinite(value) for row in logged for value in row.values() if isinstance(value, float))
    evaluated = [row for row in records(out) if "evaluation" in row]
    assert [(row["evaluation"], row["step"]) for row in evaluated] == [
        ("start", 0),
        ("interval", 1),
        ("end", 2),
    ]
    assert [row["heldout/three/episodes"] + row["heldout/three/left_out"] for row in evaluated] == [3, 3, 3]
