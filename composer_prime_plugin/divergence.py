"""Channel 2's divergence as it is asked for: by the configuration, or by ``generalized_jsd_loss``.

The formula is ``jsd``'s, its estimators are those of ``estimators``. Here are the checks of what goes in
and comes out, and the walk over blocks of positions (``blocks``).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from composer_prime_plugin.blocks import in_blocks
from composer_prime_plugin.config import ClipMode, SDPOConfig
from composer_prime_plugin.errors import LossInputError, NonFiniteInputError
from composer_prime_plugin.estimators import importance_ratio, sampled_divergence, top_k_divergence
from composer_prime_plugin.jsd import TokenDivergence as TokenDivergence
from composer_prime_plugin.jsd import token_divergence as token_divergence

Reduction = Literal["batchmean", "sum", "none"]

IGNORE_INDEX = -100


def configured_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    sdpo: SDPOConfig,
    *,
    rows: Tensor | None = None,
    tokens: Tensor | None = None,
    log_ratio: Tensor | None = None,
) -> TokenDivergence:
    """The divergence of each position as ``[trainer.loss.kwargs.sdpo]`` says, both sides checked.

    Shapes: both logits ``(m, vocab)``, any float dtype; ``rows`` ``(n,)`` long, distinct, the positions that
    are read (None: all of them). Per position read: ``tokens`` ``(n,)`` long, the sampled token, which
    ``estimator = "sampled"`` reads; ``log_ratio`` ``(n,)``, trainer minus inference log-prob of that token
    in nats at the sampling temperature, which ``importance_cap`` reads. Returns ``(n,)`` nats, ratio
    included, not reduced; float32 at least. Beside the student's gradient the memory is one block's.

    Raises ``LossInputError`` for shapes that do not fit, for a missing ``tokens`` or ``log_ratio``, and for
    a position whose divergence is not finite, which is named.
    """
    check_logits(student_logits, teacher_logits)
    vocab = student_logits.size(-1)
    if student_logits.dim() != 2:
        raise LossInputError(f"logits must be (positions, vocab); found {tuple(student_logits.shape)}")
    count = student_logits.size(0) if rows is None else rows.numel()
    sampled, ratio = None, None
    if sdpo.estimator == "sampled":
        sampled = _checked_tokens(tokens, count, vocab)
    if sdpo.importance_cap is not None:
        ratio = importance_ratio(_checked_log_ratio(log_ratio, count), sdpo.importance_cap)

    def block_fn(student: Tensor, teacher: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        result = _estimate(student, teacher, sdpo, None if sampled is None else sampled[block])
        return result.values if ratio is None else result.values * ratio[block], result.clipped

    values, clipped = in_blocks(student_logits, teacher_logits, rows, block_fn)
    check_finite_divergence(values, student_logits, teacher_logits, rows)
    return TokenDivergence(values, clipped)


def _estimate(student: Tensor, teacher: Tensor, sdpo: SDPOConfig, tokens: Tensor | None) -> TokenDivergence:
    clip: dict[str, Any] = {"token_clip": sdpo.token_clip, "clip_mode": sdpo.clip_mode}
    if tokens is not None:
        return sampled_divergence(student, teacher, tokens, temperature=sdpo.temperature, **clip)
    options: dict[str, Any] = {"beta": sdpo.jsd_beta, "temperature": sdpo.temperature, **clip}
    if sdpo.estimator != "top_k":
        return token_divergence(student, teacher, **options)
    assert sdpo.top_k is not None
    options |= {"top_k": sdpo.top_k, "support": sdpo.top_k_support, "tail": sdpo.top_k_tail}
    return top_k_divergence(student, teacher, **options)


def _checked_tokens(tokens: Tensor | None, count: int, vocab: int) -> Tensor:
    if tokens is None or tokens.shape != (count,) or tokens.is_floating_point():
        found = "None" if tokens is None else f"{tokens.dtype} {tuple(tokens.shape)}"
        raise LossInputError(
            f'sdpo.estimator = "sampled" needs the sampled token id of each of the {count} positions; found {found}; hand '
            'over the ids, or set sdpo.estimator = "full"'
        )
    # A gather outside the vocabulary would end a CUDA process, not raise.
    if count and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab):
        raise LossInputError(
            f"sampled token ids must lie in [0, {vocab}); found {int(tokens.min())} to {int(tokens.max())}"
        )
    return tokens.long()


def _checked_log_ratio(log_ratio: Tensor | None, count: int) -> Tensor:
    if log_ratio is None or log_ratio.shape != (count,):
        found = "None" if log_ratio is None else f"{tuple(log_ratio.shape)}"
        raise LossInputError(
            f"sdpo.importance_cap needs trainer minus inference log-prob of each of the {count} positions; found {found}; "
            "hand them over, or leave importance_cap out"
        )
    bad = torch.isnan(log_ratio.detach()).nonzero()
    if bad.numel():
        raise LossInputError(
            f"trainer_logprobs - inference_logprobs must not be NaN where sdpo.importance_cap reads it; found NaN at counted "
            f"position {int(bad[0, 0])}; give every error token the log-prob that it was sampled with"
        )
    return log_ratio


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
    vocab = student_logits.size(-1)
    student, teacher = student_logits.reshape(-1, vocab), teacher_logits.reshape(-1, vocab)
    rows = None if labels is None else counted.flatten().nonzero().squeeze(-1)

    def block_fn(mine: Tensor, theirs: Tensor, _block: slice) -> tuple[Tensor, Tensor]:
        result = token_divergence(
            mine,
            theirs,
            beta=beta,
            temperature=temperature,
            token_clip=token_clip,
            clip_mode=clip_mode,
        )
        return result.values, result.clipped

    values, _ = in_blocks(student, teacher, rows, block_fn)
    check_finite_divergence(values, student, teacher, rows)
    if reduction == "none":
        zeros = torch.zeros(counted.shape, dtype=values.dtype, device=values.device)
        return zeros.masked_scatter(counted, values)
    total = values.sum()
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


def check_finite_divergence(
    values: Tensor, student_logits: Tensor, teacher_logits: Tensor, rows: Tensor | None = None
) -> None:
    """Raise ``NonFiniteInputError`` naming the first position whose divergence is not finite. ``values``: ``(n,)``
    of the rows ``rows`` ``(n,)`` (None: all) of both ``(m, vocab)`` logits."""
    if bool(torch.isfinite(values.detach().sum())):
        return
    bad = (~torch.isfinite(values.detach())).nonzero()
    where = int(bad[0]) if bad.numel() else 0
    row = where if rows is None else int(rows[where])
    sides = [
        name
        for name, logits in (("student", student_logits), ("teacher", teacher_logits))
        if bool((torch.isnan(logits[row]) | (logits[row] == torch.inf)).any())
        or bool((logits[row] == -torch.inf).all())
    ]
    advice = "look for an overflow in the model's forward"
    if not sides:
        advice = "where one side forbids the whole top-k support of the other, set sdpo.top_k_tail = true"
    raise NonFiniteInputError(
        f"logits must be finite or -inf at counted positions; found a non-finite divergence at counted position {where} "
        f"({' and '.join(sides) or 'neither side'} holds NaN or +inf); {advice}"
    )
