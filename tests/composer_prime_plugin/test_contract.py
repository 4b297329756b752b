"""What is read off the installed PRIME-RL, with modules that stand for it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from composer_prime_plugin import contract
from composer_prime_plugin.contract import (
    PRIME_LOSS_MODULE,
    BrokenPrimeRLError,
    LossContract,
    LossInputs,
    LossOutputs,
    as_scalar,
    output_class,
    prime_loss_module,
    prime_version,
)

V0_5 = ("trainer_logprobs", "inference_logprobs", "teacher_logprobs", "advantages", "loss_mask")
V0_8 = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """The module is looked up once per process; here it changes from test to test."""
    prime_loss_module.cache_clear()
    yield
    prime_loss_module.cache_clear()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prime_rl, whatever this environment has."""
    monkeypatch.delitem(sys.modules, PRIME_LOSS_MODULE, raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        contract.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "prime_rl" else find(name, *rest),
    )


def install(monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], *functions: str) -> ModuleType:
    module = ModuleType(PRIME_LOSS_MODULE)
    for name in functions:
        setattr(module, name, lambda: None)

    @dataclass
    class Outputs:
        loss: Any
        metrics: dict[str, Any]

    module.LossInputs = dataclasses.make_dataclass("LossInputs", fields)  # type: ignore[attr-defined]
    module.LossInputs.__module__ = PRIME_LOSS_MODULE
    module.LossOutputs = Outputs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PRIME_LOSS_MODULE, module)
    return module


@pytest.mark.usefixtures("absent")
def test_without_prime_rl_there_is_no_contract_and_our_outputs_are_used() -> None:
    assert LossContract.installed() is None
    assert prime_version() is None
    assert output_class() is LossOutputs


def test_the_installed_contract_is_read_off_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, V0_8, "default_loss_fn", "ipo_loss_fn")
    found = LossContract.installed()
    assert found is not None
    assert found.fields == frozenset(V0_8)
    assert found.ipo_form == "one_threshold"
    assert found.missing_logits == ("teacher_logits", "trainer_logits")
    assert not found.has_logits
    assert not found.has_step
    assert output_class() is module.LossOutputs


@pytest.mark.parametrize(
    ("functions", "form"),
    [
        (("default_loss_fn",), "two_thresholds"),
        (("default_loss_fn", "ipo_loss_fn"), "one_threshold"),
        (("ipo_loss_fn",), "one_threshold"),
        ((), "one_threshold"),
    ],
)
def test_the_form_of_ipo_is_read_off_the_functions(
    monkeypatch: pytest.MonkeyPatch, functions: tuple[str, ...], form: str
) -> None:
    module = install(monkeypatch, V0_5, *functions)
    assert LossContract.of(module.LossInputs).ipo_form == form


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        (("teacher_logits",), ("trainer_logits",)),
        (("trainer_logits",), ("teacher_logits",)),
        (("teacher_logits", "trainer_logits"), ()),
        (("teacher_logits", "trainer_logits", "step"), ()),
    ],
)
def test_both_logits_are_needed(
    monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    module = install(monkeypatch, V0_8 + extra, "ipo_loss_fn")
    found = LossContract.of(module.LossInputs)
    assert found.missing_logits == missing
    assert found.has_logits == (not missing)
    assert found.has_step == ("step" in extra)


def test_our_own_inputs_have_every_optional_field() -> None:
    found = LossContract.of(LossInputs)
    assert found.has_logits
    assert found.has_step
    assert found.fields >= set(V0_8) | set(V0_5)


def test_the_version_is_unknown_without_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, V0_8)
    monkeypatch.setattr(contract.importlib.metadata, "version", _no_distribution)
    assert prime_version() == "of unknown version"


def test_the_version_is_the_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, V0_8)
    monkeypatch.setattr(contract.importlib.metadata, "version", lambda name: {"prime-rl": "0.8.0"}[name])
    assert LossContract.of(module.LossInputs).version == "0.8.0"


def _no_distribution(name: str) -> str:
    raise contract.importlib.metadata.PackageNotFoundError(name)


def test_a_prime_rl_that_does_not_import_is_an_error_and_not_an_absence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "prime_rl"
    for folder in (package, package / "trainer", package / "trainer" / "rl"):
        folder.mkdir()
        (folder / "__init__.py").write_text("", encoding="utf-8")
    (package / "trainer" / "rl" / "loss.py").write_text("import a_module_that_is_nowhere\n", encoding="utf-8")
    for name in [name for name in sys.modules if name.split(".")[0] == "prime_rl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(BrokenPrimeRLError, match="No module named 'a_module_that_is_nowhere'; repair"):
            LossContract.installed()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "prime_rl"]:
            del sys.modules[name]


def test_a_metric_becomes_a_detached_float32_scalar() -> None:
    like = torch.zeros(3, dtype=torch.bfloat16)
    value = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    for found in (as_scalar(value, like), as_scalar(2.5, like)):
        assert (found.dtype, found.dim(), found.requires_grad, float(found)) == (torch.float32, 0, False, 2.5)
