"""Log-probs of sampled tokens from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """``(n,)`` log-probs (nats) of ``tokens`` ``(n,)`` long under ``logits`` ``(n, vocab)``, in float32 at
    least, taken at ``temperature``. Gradient to the logits, once."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs: Tensor = _TokenLogprobs.apply(wide, tokens, temperature)
    return logprobs


class _TokenLogprobs(torch.autograd.Function):
    """The gradient is ``(onehot(token) - softmax) / temperature``, written into one tensor of the logits' size
    where autograd would hold four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        scaled = _scaled(logits, temperature)
        log_sum = torch.logsumexp(scaled, dim=-1)
        ctx.save_for_backward(logits, tokens, log_sum)
        ctx.temperature = temperature
        return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, log_sum = ctx.saved_tensors
        upstream = grad_outputs[0].unsqueeze(-1)
        gradient = _scaled(logits, ctx.temperature) - log_sum.unsqueeze(-1)
        gradient.exp_().mul_(-upstream).scatter_add_(-1, tokens.unsqueeze(-1), upstream)
        if ctx.temperature != 1.0:
            gradient.div_(ctx.temperature)
        return gradient, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature
