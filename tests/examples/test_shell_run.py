"""The shipped TOML on the real model: one short step, every metric of the design finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from composer_prime_plugin.cli import main

TOML = Path(__file__).resolve().parents[2] / "examples" / "shell" / "rl.toml"
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

NAMED = [
    "loss/policy",
    "loss/policy_kl",
    "loss/sdpo_jsd",
    "loss/sdpo_weighted",
    "sdpo/weight",
    "sdpo/error_tokens",
    "sdpo/sites",
    "sdpo/clip_fraction",
    "sdpo/jsd/shell/unknown_command",
    "loss/total",
]


def test_one_step_on_the_embedded_model(tmp_path, capsys):
    out = tmp_path / "out"
    overrides = ["--max-steps", "1", "--orchestrator.batch-size", "4", "--output-dir", str(out)]
    short = ["--trainer.loss.kwargs.trl_host.heldout_rows", "4"]
    assert main(["run", "@", str(TOML), *overrides, *short]) == 0
    printed = capsys.readouterr().out
    assert "SmolLM2" in printed or "trl-host" in printed
    (row,) = [
        r for r in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss/total" in r
    ]
    assert all(math.isfinite(row[name]) for name in NAMED)
    # The adapter knows no command of this shell, so nearly every first try is a site.
    assert row["sdpo/sites"] >= 3
    assert row["loss/sdpo_jsd"] > 0
