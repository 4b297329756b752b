"""The output head in chunks: per-token results from hidden states, without ``(tokens, vocab)`` logits.

Logits are formed for a few rows at a time, in the forward and once more in the backward, where the
gradients of the hidden states and of the head are accumulated row block by row block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

CHUNK_ENTRIES = 2**23
"""Logits held at once (32 MiB in float32): small enough to stay far below a step's activations,
large enough that the matrix product, not the loop, takes the time."""

RowsFn = Callable[[Tensor, slice], Tensor]
"""``(logits of a block of rows, which rows) -> (rows, ...)`` results, differentiable in the logits."""


@dataclass(frozen=True)
class OutputHead:
    """The map from hidden states to logits: ``cap * tanh(scale * (W h + b) / cap)``.

    ``weight``: ``(vocab, hidden)``; tied weights are simply the embedding's. ``bias`` may be None.
    ``scale`` multiplies the logits; ``soft_cap`` bounds them (None: no bound).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> OutputHead:
        """The head of a transformers model, with the scale and the cap that its configuration names."""
        embeddings: Any = model.get_output_embeddings()  # type: ignore[operator]
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        scaling = getattr(config, "logits_scaling", None)
        scale = getattr(config, "logit_scale", None)
        return cls(
            weight=embeddings.weight,
            bias=getattr(embeddings, "bias", None),
            scale=float(scale if scale is not None else 1.0 / scaling if scaling else 1.0),
            soft_cap=getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``(n, vocab)`` logits of ``(n, hidden)``."""
        return self.finish(linear(hidden, self.weight, self.bias))

    def finish(self, raw: Tensor) -> Tensor:
        """Scale and cap the product."""
        if self.scale != 1.0:
            raw = raw * self.scale
        if self.soft_cap is not None:
            raw = torch.tanh(raw / self.soft_cap) * self.soft_cap
        return raw


def chunked_rows(hidden: Tensor, head: OutputHead, rows_fn: RowsFn) -> Tensor:
    """``rows_fn`` of the logits of ``hidden`` ``(n, hidden)``, block by block: ``(n, ...)``.

    Gradients reach ``hidden``, the head's weight and its bias. They equal those of the plain
    ``rows_fn(head.logits(hidden))``; the memory is one block of logits and the head's gradient.
    """
    if hidden.size(0) == 0:
        # A zero that hangs on the hidden states, so that every rank runs the same backward.
        return rows_fn(head.logits(hidden), slice(0, 0)) + hidden.sum() * 0.0
    result: Tensor = _ChunkedRows.apply(hidden, head.weight, head.bias, head, rows_fn)
    return result


def _blocks(rows: int, vocab: int) -> Iterator[slice]:
    size = max(1, CHUNK_ENTRIES // vocab)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, rows_fn: RowsFn
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head, ctx.rows_fn = head, rows_fn
        return torch.cat(
            [
                rows_fn(head.finish(linear(hidden[rows], weight, bias)), rows)
                for rows in _blocks(hidden.size(0), weight.size(0))
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The head's gradient is summed over blocks, in float32 for half-precision weights.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(weight.size(0), dtype=wide, device=weight.device) if needs_bias else None
        for rows in _blocks(hidden.size(0), weight.size(0)):
            block = hidden[rows]
            with torch.enable_grad():
                raw = linear(block, weight, bias).detach().requires_grad_()
                out = ctx.rows_fn(ctx.head.finish(raw), rows)
                (grad_raw,) = torch.autograd.grad(out, raw, grad_output[rows])
            if grad_hidden is not None:
                grad_hidden[rows] = grad_raw @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_raw.to(wide).T, block.to(wide))
            if grad_bias is not None:
                grad_bias += grad_raw.to(wide).sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )
