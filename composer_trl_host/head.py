"""The output head in chunks: per-token results from hidden states, without ``(tokens, vocab)`` logits.

Logits are formed for a few rows at a time, in the forward and once more in the backward, where the
gradients of the hidden states and of the head are accumulated row block by row block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        return self.finish(_product(hidden, self.weight, self.bias))

    def finish(self, raw: Tensor) -> Tensor:
        """Scale and cap the product."""
        if self.scale != 1.0:
            raw = raw * self.scale
        if self.soft_cap is not None:
            raw = torch.tanh(raw / self.soft_cap) * self.soft_cap
        return raw


def chunked_rows(
    hidden: Tensor, head: OutputHead, rows_fn: RowsFn, gradient_with_forward: bool = False
) -> Tensor:
    """``rows_fn`` of the logits of ``hidden`` ``(n, hidden)``, block by block: ``(n, ...)``.

    Gradients reach ``hidden``, the head's weight and its bias. They equal those of the plain
    ``rows_fn(head.logits(hidden))``; the memory is one block of logits and the head's gradient.

    ``gradient_with_forward``: for results ``(n, m)`` of which the first column alone is trained, with
    one factor on all rows, as in a sum. The gradient is then taken while the logits exist instead of
    forming them again; should the factors differ after all, they are formed again.
    """
    if hidden.size(0) == 0:
        # A zero that hangs on the hidden states, so that every rank runs the same backward.
        return rows_fn(head.logits(hidden), slice(0, 0)) + hidden.sum() * 0.0
    early = gradient_with_forward and torch.is_grad_enabled()
    result: Tensor = _ChunkedRows.apply(hidden, head.weight, head.bias, head, rows_fn, early)
    return result


@dataclass
class _Gradients:
    """The gradients of the inputs, filled block by block; None for one that is not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> _Gradients:
        # The head's gradient is summed over blocks, in float32 for half-precision weights.
        wide = torch.promote_types(weight.dtype, torch.float32)
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if needed[1] else None,
            torch.zeros(weight.size(0), dtype=wide, device=weight.device)
            if bias is not None and needed[2]
            else None,
        )

    def add(self, rows: slice, grad_raw: Tensor, block: Tensor, weight: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[rows] = (grad_raw @ weight).to(self.hidden.dtype)
        if self.weight is not None:
            self.weight.addmm_(grad_raw.to(self.weight.dtype).T, block.to(self.weight.dtype))
        if self.bias is not None:
            self.bias += grad_raw.to(self.bias.dtype).sum(dim=0)

    def scaled(self, factor: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The three, times ``factor`` in place (None: as they are)."""
        filled = (self.hidden, self.weight, self.bias)
        if factor is not None:
            for gradient in filled:
                if gradient is not None:
                    gradient.mul_(factor)
        return tuple(None if gradient is None else gradient.to(dtype) for gradient in filled)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Under autocast, or behind norms of another dtype, hidden states come in another one than the head's.
    return linear(hidden.to(weight.dtype), weight, bias)


def _blocks(rows: int, vocab: int) -> Iterator[slice]:
    size = max(1, CHUNK_ENTRIES // vocab)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        rows_fn: RowsFn,
        early: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head, ctx.rows_fn = head, rows_fn
        needed = ctx.needs_input_grad[:3]
        ctx.early = _Gradients.zeros(hidden, weight, bias, needed) if early and any(needed) else None
        results: list[Tensor] = []
        for rows in _blocks(hidden.size(0), weight.size(0)):
            if ctx.early is None:
                results.append(rows_fn(head.finish(_product(hidden[rows], weight, bias)), rows))
                continue
            out, raw = _differentiable(hidden[rows], weight, bias, head, rows_fn, rows)
            unit = torch.zeros_like(out)
            unit[:, 0] = 1.0
            (grad_raw,) = torch.autograd.grad(out, raw, unit)
            ctx.early.add(rows, grad_raw, hidden[rows], weight)
            results.append(out.detach())
        return torch.cat(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        hidden, weight, bias = ctx.saved_tensors
        # Scaled in place, so it serves one backward; a graph that is kept forms the logits again.
        early, ctx.early = ctx.early, None
        if early is not None:
            factor = grad_output[0, 0]
            if bool((grad_output[:, 0] == factor).all() & (grad_output[:, 1:] == 0).all()):
                return (*early.scaled(factor, weight.dtype), None, None, None)
        gradients = _Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad[:3])
        for rows in _blocks(hidden.size(0), weight.size(0)):
            out, raw = _differentiable(hidden[rows], weight, bias, ctx.head, ctx.rows_fn, rows)
            (grad_raw,) = torch.autograd.grad(out, raw, grad_output[rows])
            gradients.add(rows, grad_raw, hidden[rows], weight)
        return (*gradients.scaled(None, weight.dtype), None, None, None)


def _differentiable(
    block: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, rows_fn: RowsFn, rows: slice
) -> tuple[Tensor, Tensor]:
    """A block's results and the product they hang on, as a leaf."""
    raw = _product(block, weight, bias).detach().requires_grad_()
    with torch.enable_grad():
        return rows_fn(head.finish(raw), rows), raw
