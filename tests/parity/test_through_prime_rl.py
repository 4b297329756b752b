"""Through PRIME-RL's own code: its builder imports ``loss_fn`` from an ``import_path`` and its
``compute_loss`` runs packed samples, for whichever release is importable."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.cases import Case, build, tensor_bytes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("prime_rl") is None,
    reason="prime_rl is not importable; put a checkout's src and packages/prime-rl-configs/src on PYTHONPATH",
)

# Ragged, with an all-masked sample in the middle.
SAMPLES = (("random", 37), ("empty", 5), ("full", 64), ("sparse", 200))
SCALE = 83


@dataclass
class Packed:
    scaled_loss: Tensor
    gradients: list[Tensor]
    metrics: dict[str, Tensor]


def modules() -> tuple[Any, Any]:
    return importlib.import_module("prime_rl.trainer.rl.loss"), importlib.import_module(
        "prime_rl.configs.trainer"
    )


def builder(loss: Any) -> Any:
    """``setup_rl_loss_fn``, or what earlier releases call it."""
    for name in ("setup_rl_loss_fn", "setup_loss_fns", "setup_loss_fn"):
        if hasattr(loss, name):
            return getattr(loss, name)
    raise AssertionError("PRIME-RL has none of the builders that this product knows")


def compute(loss: Any, config: Any, dtype: str, weighted: bool) -> Packed:
    """PRIME-RL's ``compute_loss`` of the function that ``config`` builds, and its backward."""
    samples = [
        build(Case("random", "dppo", f"packed {number}", length, dtype, mask=mask, weights="mixed"))
        for number, (mask, length) in enumerate(SAMPLES)
    ]
    leaves = [sample["trainer_logprobs"].clone().requires_grad_(True) for sample in samples]
    streams = {
        "trainer_logprobs": leaves,
        "inference_logprobs": [sample["inference_logprobs"] for sample in samples],
        "advantages": [sample["advantages"] for sample in samples],
        "loss_mask": [sample["loss_mask"] for sample in samples],
        "rl_weights": [sample["loss_weights"] for sample in samples] if weighted else None,
        "loss_scale": SCALE,
        "rl_scale": SCALE,
        "ce_scale": 1,
        "ref_kl_scale": 1,
        **dict.fromkeys(("loss_fn", "loss_fns", "rl_loss_fn"), builder(loss)(config)),
    }
    parameters = inspect.signature(loss.compute_loss).parameters
    arguments = {
        name: streams.get(name)
        for name, parameter in parameters.items()
        if name in streams or parameter.default is inspect.Parameter.empty
    }
    scaled, metrics = loss.compute_loss(**arguments)
    scaled.backward()
    return Packed(
        scaled.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves], metrics
    )


def assert_same_bytes(ours: Packed, theirs: Packed) -> None:
    assert tensor_bytes(ours.scaled_loss) == tensor_bytes(theirs.scaled_loss)
    assert ours.scaled_loss.dtype == theirs.scaled_loss.dtype
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert tensor_bytes(mine) == tensor_bytes(other)
    assert list(ours.metrics) == list(theirs.metrics)
    for name, values in theirs.metrics.items():
        assert ours.metrics[name].dtype == values.dtype
        assert tensor_bytes(ours.metrics[name]) == tensor_bytes(values)


def custom(configs: Any, **policy: Any) -> Any:
    return configs.CustomLossConfig(import_path="composer_prime_plugin.loss_fn", kwargs={"policy": policy})


@pytest.mark.parametrize("weighted", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("knobs", [{}, {"adv_tau": 0.5, "kl_tau": 0.2}], ids=["defaults", "knobs"])
def test_the_scaled_loss_and_gradient_equal_the_default_loss(dtype: str, weighted: bool, knobs: dict) -> None:
    loss, configs = modules()
    if not hasattr(configs, "DefaultLossConfig"):
        pytest.skip("this PRIME-RL has no default loss any more (its pull request 3418)")
    objective = "ipo" if "ipo_mask_low" in configs.DefaultLossConfig.model_fields else "dppo"
    theirs = compute(loss, configs.DefaultLossConfig(**knobs), dtype, weighted)
    ours = compute(loss, custom(configs, objective=objective, **knobs), dtype, weighted)
    assert float(theirs.scaled_loss) != 0.0
    assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_scaled_loss_and_gradient_equal_the_ipo_loss(dtype: str) -> None:
    loss, configs = modules()
    if not hasattr(configs, "IPOLossConfig"):
        pytest.skip("this PRIME-RL has no second loss (before v0.6.0)")
    theirs = compute(loss, configs.IPOLossConfig(), dtype, False)
    assert_same_bytes(compute(loss, custom(configs, objective="ipo"), dtype, False), theirs)


def test_the_outputs_are_prime_rls_own_class() -> None:
    loss, _ = modules()
    from composer_prime_plugin.contract import output_class

    assert output_class() is loss.LossOutputs
