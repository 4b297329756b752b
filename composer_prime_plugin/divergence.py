"""Channel 2's divergence: the generalized Jensen-Shannon divergence between two next-token
distributions.

With student ``p``, teacher ``q`` and mixture ``m = (1 - beta) * p + beta * q``::

    D = beta * KL(q || m) + (1 - beta) * KL(p || m)      0 < beta < 1
    D = KL(q || p)                                       beta = 0, forward
    D = KL(p || q)                                       beta = 1, reverse

The end points are branches of their own: the interior formula vanishes there. Sources: GKD
(arXiv:2306.13649, equation 1) and OPSD (arXiv:2601.18734).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_prime_plugin.config import CLIP_MODES, ClipMode, SDPOConfig
from composer_prime_plugin.errors import LossInputError

Reduction = Literal["batchmean", "sum", "none"]

IGNORE_INDEX = -100
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
    _check_knobs(beta, temperature, token_clip, clip_mode)
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student, teacher = student_logits.to(dtype), teacher_logits.detach().to(dtype)
    if token_clip is not None and clip_mode == "entry":
        log_p, log_q = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
        entries = _entries(log_p, log_q, beta)
        return TokenDivergence(entries.clamp(max=token_clip).sum(dim=-1), (entries > token_clip).any(dim=-1))
    values: Tensor = _Divergence.apply(student, teacher, beta, temperature)
    if token_clip is None:
        return TokenDivergence(values, torch.zeros_like(values, dtype=torch.bool))
    clipped = values > token_clip
    if clip_mode == "token":
        return TokenDivergence(values.clamp(max=token_clip), clipped)
    scale = torch.where(clipped, token_clip / values.detach().clamp(min=token_clip), torch.ones_like(values))
    return TokenDivergence(values * scale, clipped)


def configured_divergence(
    student_logits: Tensor, teacher_logits: Tensor, sdpo: SDPOConfig
) -> TokenDivergence:
    """``token_divergence`` as ``[trainer.loss.kwargs.sdpo]`` says, with both sides checked."""
    check_logits(student_logits, teacher_logits)
    result = token_divergence(
        student_logits,
        teacher_logits,
        beta=sdpo.jsd_beta,
        temperature=sdpo.temperature,
        token_clip=sdpo.token_clip,
        clip_mode=sdpo.clip_mode,
    )
    check_finite_divergence(result.values, student_logits, teacher_logits)
    return result


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_clip: float | None = None,
    clip_mode: ClipMode = "entry",
    reduction: Reduction = "batchmean",
) -> Tensor:
    """Generalized Jensen-Shannon divergence between student and teacher, in nats.

    Args:
        student_logits: ``(..., vocab)``, with gradient.
        teacher_logits: the same shape; detached here.
        labels: ``(...)`` integers; positions of ``-100`` are ignored and add neither value nor
            gradient, whatever their logits hold. None: every position counts.
        beta: 0 is forward KL(teacher || student), 1 reverse KL(student || teacher).
        temperature: divides both logits; no squared factor.
        token_clip: bound in nats, None for none.
        clip_mode: ``"entry"`` clamps each vocabulary entry's contribution before the sum (OPSD's
            rule). Contributions below zero are not clamped, so the sum can become negative and the
            gradient can point away from the teacher. ``"token"`` clamps each position's sum: never
            negative, zero gradient where it acts. ``"rescale"`` multiplies a position above the
            bound by the detached ``token_clip / divergence``: bounded, direction kept.
        reduction: ``"batchmean"`` is the mean over counted positions, ``"sum"`` their sum,
            ``"none"`` the ``(...)`` tensor with zeros at ignored positions.

    Returns float32 (float64 for float64 logits). No counted position gives a zero that still
    backpropagates. Raises ``LossInputError`` for shapes, vocabularies or knobs that do not fit and
    for non-finite logits at counted positions (``-inf``, a forbidden entry, is allowed).

    Differs from TRL's function of the same name: ``batchmean`` without labels divides by positions,
    not by the first dimension, and the end points are exact.
    """
    if reduction not in get_args(Reduction):
        raise LossInputError(
            f"reduction must be one of {', '.join(get_args(Reduction))}; found {reduction!r}"
        )
    check_logits(student_logits, teacher_logits)
    if labels is None:
        counted = torch.ones(student_logits.shape[:-1], dtype=torch.bool, device=student_logits.device)
    else:
        if labels.shape != student_logits.shape[:-1]:
            raise LossInputError(
                f"labels must have the logits' shape without the vocabulary, {tuple(student_logits.shape[:-1])}; "
                f"found {tuple(labels.shape)}"
            )
        counted = labels != IGNORE_INDEX
    student, teacher = student_logits[counted], teacher_logits[counted]
    result = token_divergence(
        student,
        teacher,
        beta=beta,
        temperature=temperature,
        token_clip=token_clip,
        clip_mode=clip_mode,
    )
    check_finite_divergence(result.values, student, teacher)
    if reduction == "none":
        zeros = torch.zeros(counted.shape, dtype=result.values.dtype, device=result.values.device)
        return zeros.masked_scatter(counted, result.values)
    total = result.values.sum()
    return total / counted.sum().clamp(min=1) if reduction == "batchmean" else total


def check_logits(student_logits: Tensor, teacher_logits: Tensor) -> None:
    """Raise ``LossInputError`` unless both logits have one shape with a vocabulary dimension."""
    if (
        student_logits.dim() < 1
        or teacher_logits.dim() < 1
        or student_logits.size(-1) != teacher_logits.size(-1)
    ):
        raise LossInputError(
            "student and teacher logits must share one vocabulary (last dimension); found "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}; use the same model or tokenizer for both"
        )
    if student_logits.shape != teacher_logits.shape:
        raise LossInputError(
            "student and teacher logits must have the same shape, position by position; found "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        )


def check_finite_divergence(values: Tensor, student_logits: Tensor, teacher_logits: Tensor) -> None:
    """Raise ``LossInputError`` naming the first position whose divergence is not finite."""
    if bool(torch.isfinite(values.detach().sum())):
        return
    bad = (~torch.isfinite(values.detach())).nonzero()
    where = int(bad[0]) if bad.numel() else 0
    sides = [
        name
        for name, logits in (("student", student_logits), ("teacher", teacher_logits))
        if bool((torch.isnan(logits[where]) | (logits[where] == torch.inf)).any())
        or bool((logits[where] == -torch.inf).all())
    ]
    raise LossInputError(
        f"logits must be finite or -inf at counted positions; found a non-finite divergence at counted position {where} "
        f"({' and '.join(sides) or 'neither side'} holds NaN or +inf); look for an overflow in the model's forward"
    )


def _check_knobs(beta: float, temperature: float, token_clip: float | None, clip_mode: str) -> None:
    if not 0.0 <= beta <= 1.0:
        raise LossInputError(f"beta must lie in [0, 1]; found {beta}")
    if not temperature > 0.0:
        raise LossInputError(f"temperature must be above 0; found {temperature}")
    if token_clip is not None and not token_clip > 0.0:
        raise LossInputError(f"token_clip must be above 0, or None for no clip; found {token_clip}")
    if clip_mode not in CLIP_MODES:
        raise LossInputError(f"clip_mode must be one of {', '.join(CLIP_MODES)}; found {clip_mode!r}")


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits if temperature == 1.0 else logits / temperature
    return torch.log_softmax(scaled, dim=-1).clamp(min=LOG_PROB_FLOOR)


class _Divergence(torch.autograd.Function):
    """Values ``(n,)`` and, while the distributions are at hand, the gradient on the student's logits.

    With ``g = dD/dp`` up to a constant, the gradient on the logits is ``p * (g - sum(p * g)) / T``:
    ``g = (1 - beta) * log(p / m)`` inside, ``log(p / q)`` at ``beta = 1``; at ``beta = 0`` it is
    ``(p - q) / T``. One tensor is kept for the backward instead of every intermediate.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
        log_p, log_q = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
        p, q = log_p.exp(), log_q.exp()
        needed = ctx.needs_input_grad[0]
        gradient: Tensor | None = None
        if beta == 0.0:
            values = (q * (log_q - log_p)).sum(dim=-1)
            if needed:
                # A forbidden entry of the student has no gradient, whatever the teacher gives it.
                q = q.masked_fill_(log_p <= LOG_PROB_FLOOR, 0.0)
                gradient = p.mul_(q.sum(dim=-1, keepdim=True)).sub_(q)
        elif beta == 1.0:
            g = log_p.sub_(log_q)
            values = (p * g).sum(dim=-1)
            gradient = p.mul_(g.sub_(values.unsqueeze(-1))) if needed else None
        else:
            log_m_over_p, log_m_over_q = _mixture(log_p, log_q, beta)
            own = (p * log_m_over_p).sum(dim=-1)
            values = -(beta * (q * log_m_over_q).sum(dim=-1) + (1.0 - beta) * own)
            if needed:
                gradient = p.mul_(log_m_over_p.sub_(own.unsqueeze(-1))).mul_(-(1.0 - beta))
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(temperature) if temperature != 1.0 else gradient)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].unsqueeze(-1), None, None, None


def _mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``log(m / p)`` and ``log(m / q)``, written with ``d = log q - log p`` so that ``d = 0`` gives
    exactly 0 and a large ``|d|`` does not overflow: one shared log1p of a number in (-1, 0], plus
    the positive part."""
    d = log_q - log_p
    share = torch.full_like(d, beta).masked_fill_(d > 0, 1.0 - beta)
    common = torch.log1p(share * torch.expm1(-d.abs()))
    return common + torch.relu(d), common + torch.relu(-d)


def _entries(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Each vocabulary entry's contribution, ``(n, vocab)``; the divergence is their sum."""
    if beta == 0.0:
        return log_q.exp() * (log_q - log_p)
    if beta == 1.0:
        return log_p.exp() * (log_p - log_q)
    log_m_over_p, log_m_over_q = _mixture(log_p, log_q, beta)
    return -(beta * log_q.exp() * log_m_over_q + (1.0 - beta) * log_p.exp() * log_m_over_p)
