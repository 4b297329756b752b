"""Fixtures of the parity tests: PRIME-RL-shaped checkouts written on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parity.suite import one_thread

CONFIGS = """
from pydantic import BaseModel

class IPOLossConfig(BaseModel):
    eps: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
"""

LOSS = """
from dataclasses import dataclass, field
import torch
from composer_prime_plugin.config import PolicyConfig
from composer_prime_plugin.objectives import PolicyInputs, policy_loss

@dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None
    brand_new: int = 0

@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict

def ipo_loss_fn(inputs, loss_config):
    config = PolicyConfig(objective="ipo", **loss_config.model_dump())
    result = policy_loss(
        PolicyInputs(
            trainer_logprobs=inputs.trainer_logprobs,
            inference_logprobs=inputs.inference_logprobs,
            advantages=inputs.advantages,
            loss_mask=inputs.loss_mask,
            loss_weights=inputs.loss_weights,
        ),
        config,
        "one_threshold",
    )
    return LossOutputs(result.loss, result.metrics)
"""

MakeCheckout = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the suite runs: the order of a long sum depends on the number of threads."""
    with one_thread():
        yield


@pytest.fixture
def make_checkout(tmp_path: Path) -> MakeCheckout:
    """Writes a checkout of the shape that PRIME-RL's main has since its pull request 3418."""

    def make(loss: str = LOSS, configs: str = CONFIGS) -> Path:
        root = tmp_path / "newer"
        files = {
            "src/prime_rl/__init__.py": "",
            "src/prime_rl/configs/__init__.py": "",
            "src/prime_rl/configs/trainer.py": configs,
            "src/prime_rl/trainer/__init__.py": "",
            "src/prime_rl/trainer/rl/__init__.py": "",
            "src/prime_rl/trainer/rl/loss.py": loss,
        }
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return root

    return make
