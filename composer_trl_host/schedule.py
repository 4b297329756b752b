"""PRIME-RL's learning-rate schedules as a factor on the base rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

SchedulerName = Literal["constant", "linear", "cosine"]


def lr_factor(
    name: SchedulerName,
    *,
    max_steps: int,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    min_factor: float = 0.0,
) -> Callable[[int], float]:
    """``factor(step)`` for 0-based optimizer steps.

    ``constant``: 1. ``linear``: up over ``warmup_steps``, 1, then down to ``min_factor`` over the
    last ``decay_steps``. ``cosine``: up over ``warmup_steps``, then a half cosine down to
    ``min_factor`` at ``max_steps``. Source: PRIME-RL ``setup_scheduler``.
    """

    def factor(step: int) -> float:
        if name == "constant":
            return 1.0
        if step < warmup_steps:
            return max(step, 1e-8) / warmup_steps
        if name == "linear":
            left = max_steps - step
            if decay_steps == 0 or left >= decay_steps:
                return 1.0
            return min_factor + (1.0 - min_factor) * max(left, 0) / decay_steps
        span = max(max_steps - warmup_steps, 1)
        progress = min((step - warmup_steps) / span, 1.0)
        return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
