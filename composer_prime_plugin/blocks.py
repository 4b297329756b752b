"""Per-position results of two whole logits tensors, a block of positions at a time.

The temporaries of one block are all the memory that is taken beside the student's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ENTRIES = {"cpu": 2**18}
"""Entries of one side's block by device type: on a CPU its temporaries (1 MiB each in float32) stay in a core's cache."""

DEVICE_BLOCK_ENTRIES = 2**23
"""Entries of one side's block elsewhere (32 MiB in float32): few enough launches."""

BlockFn = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]
"""``(student (b, vocab), teacher (b, vocab), which positions) -> (values (b,), flags (b,) bool)``.
A value depends on its own position's logits alone and is differentiable in the student's."""


def in_blocks(student: Tensor, teacher: Tensor, rows: Tensor | None, fn: BlockFn) -> tuple[Tensor, Tensor]:
    """``fn`` of the rows ``rows`` ``(n,)`` long (None: all) of both ``(m, vocab)`` logits: ``(n,)`` values
    with gradient to ``student`` and ``(n,)`` bool flags.

    The student's gradient is taken block by block in the forward, while a block's distributions are at
    hand, into the one tensor that the backward scales in place and hands over. It has the student's
    dtype, so in half precision it is rounded once more than without blocks (at most one unit in the
    last place). A graph that is kept computes it again for every further backward.
    """
    blocks = list(_blocks(student.size(0) if rows is None else rows.numel(), student))
    if len(blocks) == 1:
        return fn(*_take(student, teacher, rows, blocks[0]), blocks[0])
    early = torch.is_grad_enabled() and student.requires_grad
    values, flags = _InBlocks.apply(student, teacher.detach(), rows, fn, blocks, early)
    return values, flags


def _blocks(count: int, logits: Tensor) -> Iterator[slice]:
    # Never one row alone where there are more: torch sums a single row in parts, one per thread, and the
    # last bit of a value would hang on where the blocks end.
    size = max(2, BLOCK_ENTRIES.get(logits.device.type, DEVICE_BLOCK_ENTRIES) // max(logits.size(-1), 1))
    start = 0
    while count - start > size + 1:
        yield slice(start, start + size)
        start += size
    yield slice(start, count)


def _take(student: Tensor, teacher: Tensor, rows: Tensor | None, block: slice) -> tuple[Tensor, Tensor]:
    here = block if rows is None else rows[block]
    return student[here], teacher[here]


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        rows: Tensor | None,
        fn: BlockFn,
        blocks: list[slice],
        early: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(student, teacher, rows)
        ctx.fn, ctx.blocks = fn, blocks
        values, flags, ctx.early = _run(student, teacher, rows, fn, blocks, early)
        ctx.mark_non_differentiable(flags)
        return values, flags

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, rows = ctx.saved_tensors
        # Scaled in place, so it serves one backward.
        gradient, ctx.early = ctx.early, None
        if gradient is None:
            _, _, gradient = _run(student, teacher, rows, ctx.fn, ctx.blocks, with_gradient=True)
        for block in ctx.blocks:
            factor = grad_outputs[0][block].unsqueeze(-1)
            if rows is None:
                gradient[block].mul_(factor)
            else:
                gradient[rows[block]] = (gradient[rows[block]] * factor).to(gradient.dtype)
        return gradient, None, None, None, None, None


def _run(
    student: Tensor,
    teacher: Tensor,
    rows: Tensor | None,
    fn: BlockFn,
    blocks: list[slice],
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every block's values and flags and, where asked for, the gradient of the values' sum."""
    count = blocks[-1].stop
    # Made once: small results left between a block's large temporaries would keep an allocator from
    # using their memory again.
    values = torch.empty(
        count, dtype=torch.promote_types(student.dtype, torch.float32), device=student.device
    )
    flags = torch.empty(count, dtype=torch.bool, device=student.device)
    make = torch.empty if rows is None else torch.zeros
    gradient = make(student.shape, dtype=student.dtype, device=student.device) if with_gradient else None
    for block in blocks:
        mine, theirs = _take(student.detach(), teacher, rows, block)
        mine.requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            value, flag = fn(mine, theirs, block)
        if gradient is not None:
            (unit,) = torch.autograd.grad(value, mine, torch.ones_like(value))
            gradient[block if rows is None else rows[block]] = unit
            del unit
        values[block], flags[block] = value.detach(), flag
        del mine, theirs, value, flag
    return values, flags, gradient
