"""The generalized Jensen-Shannon divergence between two next-token distributions, position by position.

With student ``p``, teacher ``q`` and mixture ``m = (1 - beta) * p + beta * q``::

    D = beta * KL(q || m) + (1 - beta) * KL(p || m)      0 < beta < 1
    D = KL(q || p)                                       beta = 0, forward
    D = KL(p || q)                                       beta = 1, reverse

The end points are branches of their own: the interior formula vanishes there. Sources: GKD
(arXiv:2306.13649, equation 1) and OPSD (arXiv:2601.18734).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_prime_plugin.config import CLIP_MODES, ClipMode
from composer_prime_plugin.errors import LossInputError

LOG_PROB_FLOOR = -1.0e4
"""Log-probabilities below this many nats are raised to it. ``exp`` of it is exactly 0, so only
entries of probability zero are touched, and ``0 * log 0`` stays 0 instead of NaN."""


@dataclass(frozen=True)
class TokenDivergence:
    """``values``: ``(n,)`` nats per position, float32 at least, with gradient to the student.
    ``clipped``: ``(n,)`` bool, True where the clip acted on the position."""

    values: Tensor
    clipped: Tensor


def token_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_clip: float | None = None,
    clip_mode: ClipMode = "entry",
) -> TokenDivergence:
    """The divergence of each position, not reduced.

    Shapes: both logits ``(n, vocab)``, any float dtype; computed in float32 at least. The gradient
    flows to ``student_logits`` alone; the teacher is detached here. Equal logits give exactly zero.
    """
    check_knobs(beta, temperature, token_clip, clip_mode)
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student, teacher = student_logits.to(dtype), teacher_logits.detach().to(dtype)
    entry_clip = token_clip if clip_mode == "entry" else None
    values, clipped = _Divergence.apply(student, teacher, beta, temperature, entry_clip)
    if token_clip is None or entry_clip is not None:
        return TokenDivergence(values, clipped)
    clipped = values > token_clip
    if clip_mode == "token":
        return TokenDivergence(values.clamp(max=token_clip), clipped)
    scale = torch.where(clipped, token_clip / values.detach().clamp(min=token_clip), torch.ones_like(values))
    return TokenDivergence(values * scale, clipped)


def check_knobs(beta: float, temperature: float, token_clip: float | None, clip_mode: str) -> None:
    """Raise ``LossInputError`` for a knob outside its range."""
    if not 0.0 <= beta <= 1.0:
        raise LossInputError(f"beta must lie in [0, 1]; found {beta}")
    if not temperature > 0.0:
        raise LossInputError(f"temperature must be above 0; found {temperature}")
    if token_clip is not None and not token_clip > 0.0:
        raise LossInputError(f"token_clip must be above 0, or None for no clip; found {token_clip}")
    if clip_mode not in CLIP_MODES:
        raise LossInputError(f"clip_mode must be one of {', '.join(CLIP_MODES)}; found {clip_mode!r}")


class _Divergence(torch.autograd.Function):
    """``(n,)`` values and whether an entry was clamped, with the gradient on the student's logits taken
    while the distributions are at hand: one tensor is kept instead of every intermediate.

    With ``g = dD/dp`` entry by entry, the gradient is ``(p * g - p * sum(p * g)) / T``. ``g`` is
    ``(1 - beta) * log(p / m)`` inside, ``log(p / q) + 1`` at ``beta = 1``, ``-q / p`` at ``beta = 0``; a
    constant in ``g`` cancels where no entry is clamped, and a clamped entry has ``g = 0``. Everything is
    done in place: on a CPU the time goes into memory, not arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, beta: float, temperature: float, entry_clip: float | None
    ) -> tuple[Tensor, Tensor]:
        log_p, log_q = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
        p = log_p.exp()
        if beta == 0.0:
            # An entry that the student forbids (log_p at the floor) has no gradient.
            constant = log_p <= LOG_PROB_FLOOR
            q = log_q.exp()
            entries = log_q.sub_(log_p).mul_(q)
            pg = q.neg_()
        elif beta == 1.0:
            constant = None
            entries = log_p.sub_(log_q).mul_(p)
            pg = entries.clone() if entry_clip is None else entries + p
        else:
            constant = None
            q = log_q.exp()
            log_m_over_p, log_m_over_q = _mixture(log_q.sub_(log_p), beta)
            pg = log_m_over_p.mul_(p).mul_(beta - 1.0)
            entries = log_m_over_q.mul_(q).mul_(-beta).add_(pg)
        if entry_clip is None:
            clipped = torch.zeros(p.shape[:-1], dtype=torch.bool, device=p.device)
        else:
            over = entries > entry_clip
            clipped = over.any(dim=-1)
            entries.clamp_(max=entry_clip)
            constant = over if constant is None else constant | over
        values = entries.sum(dim=-1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(_onto_logits(p, pg, constant, beta).div_(temperature))
        ctx.mark_non_differentiable(clipped)
        return values, clipped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].unsqueeze(-1), None, None, None, None


def _onto_logits(p: Tensor, pg: Tensor, constant: Tensor | None, beta: float) -> Tensor:
    """``p * g - p * sum(p * g)``, with ``g = 0`` at ``constant`` entries. At ``beta = 0`` the sum of ``q``
    is 1 less what is left out: then equal distributions have a gradient of exactly zero."""
    if beta == 0.0 and constant is not None:
        left_out = (-pg).masked_fill_(~constant, 0.0).sum(dim=-1, keepdim=True)
        return pg.masked_fill_(constant, 0.0).addcmul_(p, 1.0 - left_out)
    if constant is not None:
        pg.masked_fill_(constant, 0.0)
    return pg.addcmul_(p, pg.sum(dim=-1, keepdim=True), value=-1.0)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits if temperature == 1.0 else logits / temperature
    return torch.log_softmax(scaled, dim=-1).clamp_(min=LOG_PROB_FLOOR)


def _mixture(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``log(m / p)`` and ``log(m / q)`` from ``d = log q - log p``, which is consumed. Written so that
    ``d = 0`` gives exactly 0 and a large ``|d|`` neither overflows nor loses the small one: one shared log1p
    of a number in (-1, 0], plus the positive part."""
    common = d.abs().neg_().expm1_()
    # The share of the less likely side's partner: beta where q is below p, 1 - beta elsewhere.
    common.mul_(beta if beta == 0.5 else torch.full_like(d, beta).masked_fill_(d > 0, 1.0 - beta))
    common.log1p_()
    log_m_over_p = d.clamp(min=0.0).add_(common)
    return log_m_over_p, common.sub_(d.clamp_(max=0.0))
