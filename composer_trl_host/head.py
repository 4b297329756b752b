"""The output head in chunks: per-token results from hidden states, without ``(tokens, vocab)`` logits.

Logits are formed for a few rows at a time, in the forward and once more in the backward, where the
gradients of the hidden states and of the head are accumulated row block by row block. All that is asked
of one head (``OutputHead.summing``) adds its gradient into one tensor of the head's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK_ENTRIES = 2**23
"""Logits held at once (32 MiB in float32): small enough to stay far below a step's activations,
large enough that the matrix product, not the loop, takes the time."""

ACCELERATOR_ROWS = 512
"""Rows of a block off the CPU at least. A block reads the whole head; with few rows an accelerator waits
for memory, and it has the memory for more. A bound by that reasoning, not a measured one."""

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
    sums: HeadSums | None = None
    """Where the gradients of weight and bias are added up."""

    def summing(self) -> OutputHead:
        """This head with one gradient for all ``chunked_rows`` of it. Autograd alone would hold as many
        tensors of the head's size as there are calls."""
        sums = HeadSums()
        weight, bias = _Summed.apply(self.weight, self.bias, sums)
        return replace(self, weight=weight, bias=bias, sums=sums)

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

    ``gradient_with_forward``: for results ``(n, m)`` of which the first column alone is trained. The gradient
    on the logits is then taken while they exist and held, instead of forming them again, for as many rows as
    fill a tensor of the head's size; should another column be trained after all, they are formed again.
    """
    if head.sums is None:
        head = head.summing()
    early = gradient_with_forward and torch.is_grad_enabled()
    result: Tensor = _ChunkedRows.apply(hidden, head.weight, head.bias, head, rows_fn, early)
    return result


@dataclass
class HeadSums:
    """The gradients of a head's weight and bias while a backward adds them up; None where nothing is yet."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    task: int | None = None

    def begin(self) -> None:
        """Forget what another backward left, one that asked for the hidden states' gradient alone."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.weight = self.bias = None
        self.task = task

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Both; nothing is left."""
        taken = self.weight, self.bias
        self.weight = self.bias = None
        return taken


class _Summed(torch.autograd.Function):
    """Weight and bias as they are. Its backward runs after that of every call which reads them, gets
    nothing from those, and hands on what they left in ``sums``."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, sums: HeadSums
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.dtype = sums, weight.dtype
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(gradient is not None for gradient in grad_outputs):
            raise RuntimeError("a summing head must be read through chunked_rows alone")
        ctx.sums.begin()
        weight, bias = (None if sum_ is None else sum_.to(ctx.dtype) for sum_ in ctx.sums.take())
        return weight, bias, None


@dataclass
class _Gradients:
    """The gradients of the inputs, filled block by block; None for one that is not needed."""

    hidden: Tensor | None
    head: HeadSums

    @classmethod
    def zeros(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool], head: HeadSums
    ) -> _Gradients:
        # The head's gradient is summed over blocks, in float32 for half-precision weights.
        wide = torch.promote_types(weight.dtype, torch.float32)
        if needed[1] and head.weight is None:
            head.weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        if bias is not None and needed[2] and head.bias is None:
            head.bias = torch.zeros(weight.size(0), dtype=wide, device=weight.device)
        return cls(torch.empty_like(hidden) if needed[0] else None, head)

    def add(self, rows: slice, grad_raw: Tensor, block: Tensor, weight: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[rows] = (grad_raw @ weight).to(self.hidden.dtype)
        if self.head.weight is not None:
            self.head.weight.addmm_(grad_raw.to(self.head.weight.dtype).T, block.to(self.head.weight.dtype))
        if self.head.bias is not None:
            self.head.bias += grad_raw.to(self.head.bias.dtype).sum(dim=0)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Under autocast, or behind norms of another dtype, hidden states come in another one than the head's.
    return linear(hidden.to(weight.dtype), weight, bias)


def block_rows(vocab: int, device: torch.device) -> int:
    """Rows whose logits are formed at once."""
    rows = max(1, CHUNK_ENTRIES // vocab)
    return rows if device.type == "cpu" else max(rows, ACCELERATOR_ROWS)


def _blocks(rows: int, weight: Tensor) -> Iterator[slice]:
    # No row is one block of none: its result hangs on the inputs too, so that every rank runs the same backward.
    size = block_rows(weight.size(0), weight.device)
    for start in range(0, max(rows, 1), size):
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
        ctx.held = {}
        early = early and any(ctx.needs_input_grad[:3])
        results: list[Tensor] = []
        with _own_dtypes(hidden):
            for rows in _blocks(hidden.size(0), weight):
                if not early or rows.stop > weight.size(1):
                    results.append(rows_fn(head.finish(_product(hidden[rows], weight, bias)), rows))
                    continue
                out, raw = _differentiable(hidden[rows], weight, bias, head, rows_fn, rows)
                (ctx.held[rows.start],) = torch.autograd.grad(out, raw, _on_first_column(out))
                results.append(out.detach())
        return torch.cat(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        hidden, weight, bias = ctx.saved_tensors
        ctx.head.sums.begin()
        # Scaled in place, so they serve one backward; a graph that is kept forms the logits again.
        held, ctx.held = ctx.held, {}
        if held and bool((grad_output[:, 1:] != 0).any()):
            held = {}
        gradients = _Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad[:3], ctx.head.sums)
        with _own_dtypes(hidden):
            for rows in _blocks(hidden.size(0), weight):
                grad_raw = held.pop(rows.start, None)
                if grad_raw is not None:
                    grad_raw.mul_(grad_output[rows, :1])
                else:
                    out, raw = _differentiable(hidden[rows], weight, bias, ctx.head, ctx.rows_fn, rows)
                    (grad_raw,) = torch.autograd.grad(out, raw, grad_output[rows])
                gradients.add(rows, grad_raw, hidden[rows], weight)
        return gradients.hidden, None, None, None, None, None


def _own_dtypes(hidden: Tensor) -> AbstractContextManager[Any]:
    """Products in the head's dtype: autocast is on in a forward at most, and the backward must meet the same."""
    return torch.autocast(hidden.device.type, enabled=False)


def _on_first_column(out: Tensor) -> Tensor:
    unit = torch.zeros_like(out)
    unit[:, 0] = 1.0
    return unit


def _differentiable(
    block: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, rows_fn: RowsFn, rows: slice
) -> tuple[Tensor, Tensor]:
    """A block's results and the product they hang on, as a leaf."""
    raw = _product(block, weight, bias).detach().requires_grad_()
    with torch.enable_grad():
        return rows_fn(head.finish(raw), rows), raw
