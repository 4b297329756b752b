"""Channel 2 on a part of the vocabulary: top-k support, sampled token, importance ratio.

``token_divergence`` reads every entry; the estimators here read a support and, of the rest, one
number per side: the logit ``log(sum(exp(l_j)))`` of a bucket that holds all other entries together.
Sources: the reference implementation of SDPO (github.com/lasgroup/SDPO, commit 0e6d510,
``verl/trainer/ppo/core_algos.py``, ``compute_self_distillation_loss``) and TRL 1.16
(``trl/experimental/sdpo/loss_utils.py``), which agree with each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_prime_plugin.config import ClipMode, TopKSupport
from composer_prime_plugin.errors import LossInputError
from composer_prime_plugin.jsd import LOG_PROB_FLOOR, TokenDivergence, check_knobs, token_divergence


def top_k_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    top_k: int,
    support: TopKSupport = "student",
    tail: bool = True,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_clip: float | None = None,
    clip_mode: ClipMode = "entry",
) -> TokenDivergence:
    """``token_divergence`` of both sides on the ``top_k`` likeliest entries of one of them.

    With the support ``K``, held fixed, ``p_K`` and ``q_K`` are

    - ``tail``: ``(p_i for i in K, 1 - sum(p_i))`` and the same of ``q``: two distributions over
      ``top_k + 1`` outcomes. Merging outcomes never raises a divergence, so the value is a lower bound of
      the full one, and its gradient is that bound's own: biased towards zero by what differs inside the tail.
    - otherwise: ``p_i / sum(p_K)``, ``q_i / sum(q_K)``. Mass that moves into or out of the support is not
      seen at all; the value bounds nothing.

    Shapes: both logits ``(n, vocab)``, any float dtype; computed in float32 at least; ``(n,)`` nats, not
    reduced. Equal logits give exactly zero. ``top_k`` at or above the vocabulary is ``token_divergence``,
    to the bit. ``clip_mode = "entry"`` clamps the tail's contribution like any entry's.

    Without a tail a side that forbids (``-inf``) the whole support has no distribution on it: NaN, which
    ``configured_divergence`` refuses.

    Differs from the sources: the tail is formed from logits, where they take ``log(1 - sum)`` with the sum
    bounded by ``1 - 1e-7`` and so see no smaller tail; the teacher's support is TRL's for a teacher behind
    a server alone; TRL refuses a ``top_k`` above the vocabulary.
    """
    check_knobs(beta, temperature, token_clip, clip_mode)
    options: dict[str, Any] = {"beta": beta, "token_clip": token_clip, "clip_mode": clip_mode}
    if top_k >= student_logits.size(-1):
        return token_divergence(student_logits, teacher_logits, temperature=temperature, **options)
    chooser = student_logits if support == "student" else teacher_logits
    indices = chooser.detach().topk(top_k, dim=-1, sorted=False).indices
    student, teacher = _wide(student_logits), _wide(teacher_logits.detach())
    if not tail:
        return token_divergence(
            student.gather(-1, indices), teacher.gather(-1, indices), temperature=temperature, **options
        )
    return token_divergence(
        _bucketed(student, indices, temperature), _bucketed(teacher, indices, temperature), **options
    )


def sampled_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    token_clip: float | None = None,
    clip_mode: ClipMode = "token",
) -> TokenDivergence:
    """Reverse KL(student || teacher) from the sampled token ``y`` alone, by the score function.

    ``d = log p(y) - log q(y)``, detached; value ``d``, gradient ``d * grad log p(y)``. For ``y`` drawn from
    ``p`` at this temperature both are unbiased given the position's context: ``E[d] = KL(p || q)`` and
    ``E[d * grad log p(y)] = grad KL(p || q)``, since ``E[grad log p(y)] = 0``. Biased where ``y`` was drawn
    at another temperature, under ``top_p`` or by an older policy, which ``importance_ratio`` corrects up
    to its cap. The variance is that of ``d``: one sample can be negative.

    Shapes: logits ``(n, vocab)``, any float dtype, ``tokens`` ``(n,)`` long; computed in float32 at least;
    ``(n,)`` nats, not reduced. Equal logits give value and gradient exactly zero. A forbidden token
    (``-inf``) counts as ``LOG_PROB_FLOOR`` nats and has no gradient on the side of the student.
    ``token_clip`` bounds ``|d|``: ``"rescale"`` lets ``d`` end at the bound, ``"token"`` takes the gradient
    of such a position away; ``"entry"`` is refused, since there are no entries. Other ``beta`` than 1 do not exist.

    Sources: the module's (``full_logit_distillation = False``; ``"sampled_token"``). Differs from them: the
    value, which there is ``d * log p(y)`` and estimates nothing; the gradient is the same.
    """
    check_knobs(1.0, temperature, token_clip, clip_mode)
    if token_clip is not None and clip_mode == "entry":
        raise LossInputError(
            "clip_mode must be 'token' or 'rescale' with the sampled-token estimator, which has no vocabulary entries to "
            "clamp; found 'entry'"
        )
    if tokens.shape != student_logits.shape[:-1] or tokens.is_floating_point():
        raise LossInputError(
            f"tokens must be integers of shape {tuple(student_logits.shape[:-1])}, the sampled token of each position; "
            f"found {tokens.dtype} {tuple(tokens.shape)}"
        )
    log_p = _log_prob(_wide(student_logits), tokens, temperature)
    log_q = _log_prob(_wide(teacher_logits.detach()), tokens, temperature)
    gap = (log_p - log_q).detach()
    trained = 1.0 + (log_p - log_p.detach())
    if token_clip is None:
        return TokenDivergence(gap * trained, torch.zeros_like(gap, dtype=torch.bool))
    clipped, bounded = gap.abs() > token_clip, gap.clamp(-token_clip, token_clip)
    if clip_mode == "token":
        trained = torch.where(clipped, trained.detach(), trained)
    return TokenDivergence(bounded * trained, clipped)


def importance_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """``min(exp(log_ratio), cap)``, detached: the weight of a position whose token was sampled by another
    policy. ``log_ratio``: ``(n,)`` trainer minus inference log-prob of the sampled token, nats, both at the
    sampling temperature. Exactly 1 on-policy for a cap of at least 1.

    Unbiased without a cap; with one, positions that the sampling policy found too unlikely count less.
    Source: the module's (``is_clip``, ``distillation_is_clip``). Differs from them: no bound of 20 nats on
    ``log_ratio``, which the cap makes needless above and which changes a weight by 2e-9 at most below.
    """
    return log_ratio.detach().exp().clamp(max=cap)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_prob(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """``(n,)`` log-probs of ``tokens``: of two outcomes, the token and everything else."""
    both = torch.log_softmax(_bucketed(logits, tokens.unsqueeze(-1), temperature), dim=-1)
    return both[:, 0].clamp(min=LOG_PROB_FLOOR)


def _bucketed(logits: Tensor, indices: Tensor, temperature: float) -> Tensor:
    scaled = logits if temperature == 1.0 else logits / temperature
    result: Tensor = _Bucketed.apply(scaled, indices)
    return result


class _Bucketed(torch.autograd.Function):
    """``(n, k + 1)``: the logits at ``indices`` ``(n, k)`` (distinct in a row) and, last, the log of the
    summed exponentials of all others, ``-inf`` where nothing else is allowed. One ``(n, vocab)`` tensor is
    kept: the others' exponentials, which are the bucket's gradient up to a factor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor) -> Tensor:
        others = logits.scatter(-1, indices, -torch.inf)
        top = others.amax(dim=-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        others.sub_(top).exp_()
        total = others.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(others, total, indices)
        return torch.cat([logits.gather(-1, indices), total.log() + top], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        others, total, indices = ctx.saved_tensors
        (grad,) = grad_outputs
        # An empty bucket has exponentials and gradient 0; the largest of a bucket that is not empty is 1.
        gradient = others * (grad[:, -1:] / total.clamp(min=1.0))
        return gradient.scatter_(-1, indices, grad[:, :-1]), None
