"""What stops a run before it harms the weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from composer_prime_plugin.errors import LossInputError


class FiniteGradients(TrainerCallback):
    """Stops before the optimizer step when a gradient is not finite.

    The loss is checked where it is made; a backward can still overflow. Stepping with such a
    gradient would make every weight NaN, and clipping by the norm would not help.
    """

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        if not named:
            return
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in named], dtype=torch.float32))
        finite = torch.isfinite(norms)
        if bool(finite.all()):
            return
        where = int((~finite).nonzero()[0])
        raise LossInputError(
            f"every gradient must be finite before the optimizer step; found {float(norms[where])} in "
            f"{named[where][0]} at step {state.global_step + 1} ({int((~finite).sum())} of {len(named)} tensors); the "
            "weights were not changed; resume from the last checkpoint with a lower learning rate or in float32"
        )
