"""Every tolerance of the suite, in one table.

Live comparisons, and golden ones on the machine kind that recorded, are to the bit and read none of
these. They apply where torch's version, the CPU capability or the probe of ``exp`` differs from the
recording's: ``exp`` may then differ in its last bit, and a sum may be taken in another order.

A bound is a number of units in the last place of the quantity's **scale**, which is a sum of
absolute values where the quantity is a sum that may cancel (``scales``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cases import Case, Inputs

ULPS: dict[str, dict[torch.dtype, float]] = {
    # Measured: between the AVX512, AVX2 and DEFAULT kernels of torch 2.13.0 on one machine no bit differs;
    # an objective whose exp is off by one unit in the last place everywhere uses 1.4 of these at most.
    "loss": {torch.float32: 4.0, torch.bfloat16: 2.0},
    "metric": {torch.float32: 4.0, torch.bfloat16: 2.0},
    "gradient": {torch.float32: 4.0, torch.bfloat16: 4.0},
}


@dataclass(frozen=True)
class Scales:
    """Float64 magnitudes: ``loss`` 0-d, ``gradient`` ``(seq,)``."""

    loss: Tensor
    gradient: Tensor


def scales(case: Case, inputs: Inputs) -> Scales:
    """The sum of absolute per-token terms, and each token's own, trust region left out."""
    stream = {name: value.double() for name, value in inputs.items() if value is not None}
    knobs = case.policy
    trainer = stream["trainer_logprobs"]
    log_ratio = trainer - stream["inference_logprobs"]
    ratio = torch.exp(log_ratio)
    advantage = knobs.adv_tau * stream["advantages"].abs()
    if "teacher_logprobs" in stream:
        advantage = advantage + knobs.teacher_tau * (stream["teacher_logprobs"] - trainer).abs()
    counted = stream["loss_mask"] * stream.get("loss_weights", torch.ones_like(trainer)).abs()
    loss = counted * (advantage * ratio + knobs.kl_tau * log_ratio**2)
    gradient = counted * (advantage * ratio + 2.0 * knobs.kl_tau * log_ratio.abs())
    return Scales(loss.sum(), gradient)


def metric_scale(value: Tensor) -> Tensor:
    """Of a mean of ``r - log r - 1``, from its value: ``r + |log r| + 1 <= 2 * (r - log r - 1) + 4``."""
    return 2.0 * value.double().abs() + 4.0


def bound(kind: str, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """The largest absolute difference allowed."""
    return ULPS[kind][dtype] * torch.finfo(dtype).eps * scale
