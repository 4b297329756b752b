from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from composer_trl_host.embedded import embedded_model

from ..composer_trl_host.conftest import model, tokenizer  # noqa: F401  (fixtures)

SMOKE = Path(__file__).resolve().parents[2] / "examples" / "sdpo_drgrpo_step_smoke" / "run.py"
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)


def smoke(*arguments: str) -> int:
    return runpy.run_path(str(SMOKE))["main"](list(arguments))


def test_the_five_gates_hold_on_a_tiny_model(model, tokenizer, tmp_path, capsys):  # noqa: F811
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert smoke("--model", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert printed.count("ok  ") == 5
    assert "FAIL" not in printed


def test_the_five_gates_hold_on_the_embedded_model(capsys):
    embedded_model()
    assert smoke() == 0
    assert capsys.readouterr().out.count("ok  ") == 5


def test_it_says_why_it_cannot_run(tmp_path, capsys):
    assert smoke("--model", str(tmp_path / "gone")) == 2
    assert capsys.readouterr().out.startswith("cannot run: ")
