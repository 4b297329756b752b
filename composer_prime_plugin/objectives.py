"""Channel 1: the policy objectives, once, for both backends.

Every function takes 1-D ``(seq,)`` tensors and returns a **sum** over the sample's tokens; the
trainer divides by the global token count. Operations and their order are those of the PRIME-RL
function that each one names, since equality is to the bit (``python -m parity``).

Notation: ``log_r = trainer_logprobs - inference_logprobs``, ``r = exp(log_r)``, ``m`` the
loss mask (True: the token is trained), ``w`` the loss weights, ``A`` the advantages, ``p`` and ``q`` the
trainer's and the sampling policy's probability of the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime_plugin.config import KLEstimator, PolicyConfig
from composer_prime_plugin.contract import IpoForm


@dataclass(frozen=True)
class PolicyInputs:
    """One sample of channel 1. ``(seq,)`` each; log-probs in nats, float; ``loss_mask`` bool."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None
    teacher_logprobs: Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """``loss``: 0-d, the sum over tokens, with gradient. ``kl``: detached 0-d sum of the weighted
    and masked KL term without ``kl_tau``, None unless asked for. ``metrics``: detached, 0-d."""

    loss: Tensor
    metrics: dict[str, Tensor]
    kl: Tensor | None = None


def kl_term(log_ratio: Tensor, ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token KL term against the sampling policy, in nats.

    ``k1``: ``-log r``, unbiased for KL(sampling || trainer), negative on single tokens. Taken
    against the sampling policy its expected gradient at ``r = 1`` is zero by construction (the
    expected score of a distribution under itself), so on-policy it adds variance and no pull. Off
    policy its expectation is the cross-entropy to the sampling policy, so it pulls back towards it.
    ``squared``: ``(log r)**2``, PRIME-RL's (Kimi K2.5's regularizer), zero gradient at ``r = 1``
    per token. ``k3``: ``r - 1 - log r``, unbiased and never negative (http://joschu.net/blog/kl-approx.html).
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "squared":
        return log_ratio**2
    return ratio - log_ratio - 1


def policy_loss(
    inputs: PolicyInputs, config: PolicyConfig, ipo_form: IpoForm, with_kl: bool = False
) -> PolicyLoss:
    """The configured objective on one sample.

    ``ipo_form`` is the form in force where the configuration's knobs select none.
    """
    if config.objective == "dppo":
        return _dppo(inputs, config, with_kl)
    if config.objective == "dr_grpo":
        return _dr_grpo(inputs, config, with_kl)
    if (config.ipo_form or ipo_form) == "two_thresholds":
        return _ipo_two_thresholds(inputs, config, with_kl)
    return _ipo_one_threshold(inputs, config, with_kl)


class _Masked:
    """Means over masks. PRIME-RL gathers ``values[mask]`` for each; a boolean's sum is exact either
    way, so only the float means gather (a gather synchronizes the device)."""

    @staticmethod
    def mean(values: Tensor, mask: Tensor) -> Tensor:
        return values.detach()[mask].sum() / torch.clamp_min(mask.sum(), 1)

    @staticmethod
    def share(flags: Tensor, mask: Tensor) -> Tensor:
        return (flags & mask).sum() / torch.clamp_min(mask.sum(), 1)


def _weighted(per_token: Tensor, weights: Tensor | None) -> Tensor:
    return per_token if weights is None else per_token * weights


def _finish(
    inputs: PolicyInputs,
    config: PolicyConfig,
    keep: Tensor,
    advantages: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    metrics: dict[str, Tensor],
    with_kl: bool,
) -> PolicyLoss:
    """``sum(w * (-keep * A * r + kl_tau * m * k))``, the tail that ``dppo`` and ``ipo`` share."""
    kl = inputs.loss_mask * kl_term(log_ratio, ratio, config.resolved_kl_estimator)
    per_token = -(keep * advantages * ratio) + config.kl_tau * kl
    loss = _weighted(per_token, inputs.loss_weights).sum()
    return PolicyLoss(loss, metrics, _weighted(kl, inputs.loss_weights).detach().sum() if with_kl else None)


def _ratios(inputs: PolicyInputs) -> tuple[Tensor, Tensor, Tensor]:
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    ratio = torch.exp(log_ratio)
    with torch.no_grad():
        mismatch_kl = ratio - log_ratio - 1
    return log_ratio, ratio, mismatch_kl


@torch.no_grad()
def _probability_change(inputs: PolicyInputs) -> Tensor:
    return torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)


def _dppo(inputs: PolicyInputs, config: PolicyConfig, with_kl: bool) -> PolicyLoss:
    """PRIME-RL ``default_loss_fn``, v0.6.0 and later: DPPO's binary total-variation trust region
    (arXiv:2602.04879), conditioned on the advantage's sign, with the squared log-ratio of
    arXiv:2602.02276."""
    mask = inputs.loss_mask
    log_ratio, ratio, mismatch_kl = _ratios(inputs)
    change = _probability_change(inputs)
    positive = inputs.advantages > 0
    negative = inputs.advantages < 0
    too_high = change > config.dppo_mask_high
    too_low = change < -config.dppo_mask_low
    outside = torch.where(positive, too_high, too_low)
    drop = mask & outside
    keep = mask & ~outside
    metrics = {
        "masked_mismatch_kl": _Masked.mean(mismatch_kl, drop),
        "unmasked_mismatch_kl": _Masked.mean(mismatch_kl, keep),
        "is_masked": _Masked.share(outside, mask),
        "is_masked_low": _Masked.share(negative & too_low, mask),
        "is_masked_high": _Masked.share(positive & too_high, mask),
        "masked_advantage_positive": _Masked.share(positive, drop),
        "masked_advantage_negative": _Masked.share(negative, drop),
    }
    advantages = config.adv_tau * inputs.advantages
    return _finish(inputs, config, keep, advantages, ratio, log_ratio, metrics, with_kl)


def _ipo_one_threshold(inputs: PolicyInputs, config: PolicyConfig, with_kl: bool) -> PolicyLoss:
    """PRIME-RL ``ipo_loss_fn``, v0.6.0 and later: one bound on the absolute change of a token's
    probability, whatever the advantage's sign."""
    mask = inputs.loss_mask
    log_ratio, ratio, mismatch_kl = _ratios(inputs)
    outside = torch.abs(_probability_change(inputs)) > config.ipo_threshold
    keep = mask & ~outside
    metrics = {
        "masked_mismatch_kl": _Masked.mean(mismatch_kl, mask & outside),
        "unmasked_mismatch_kl": _Masked.mean(mismatch_kl, keep),
        "is_masked": _Masked.share(outside, mask),
    }
    advantages = config.adv_tau * inputs.advantages
    return _finish(inputs, config, keep, advantages, ratio, log_ratio, metrics, with_kl)


def _ipo_two_thresholds(inputs: PolicyInputs, config: PolicyConfig, with_kl: bool) -> PolicyLoss:
    """PRIME-RL ``default_loss_fn`` of v0.5.0: two bounds whatever the advantage's sign, and the
    detached teacher log-ratio added to the advantage where teacher log-probs are handed over."""
    mask = inputs.loss_mask
    log_ratio, ratio, mismatch_kl = _ratios(inputs)
    change = _probability_change(inputs)
    too_high = change > config.ipo_mask_high
    too_low = change < -config.ipo_mask_low
    outside = too_high | too_low
    keep = mask & ~outside
    metrics = {
        "mismatch_kl": _Masked.mean(mismatch_kl, mask),
        "masked_mismatch_kl": _Masked.mean(mismatch_kl, mask & outside),
        "unmasked_mismatch_kl": _Masked.mean(mismatch_kl, keep),
        "is_masked": _Masked.share(outside, mask),
        "is_masked_low": _Masked.share(too_low, mask),
        "is_masked_high": _Masked.share(too_high, mask),
    }
    advantages = config.adv_tau * inputs.advantages
    if inputs.teacher_logprobs is not None:
        teacher_kl = (inputs.teacher_logprobs - inputs.trainer_logprobs).detach()
        advantages = advantages + config.teacher_tau * teacher_kl
        metrics["teacher_kl"] = _Masked.mean(teacher_kl, mask)
    return _finish(inputs, config, keep, advantages, ratio, log_ratio, metrics, with_kl)


def _dr_grpo(inputs: PolicyInputs, config: PolicyConfig, with_kl: bool) -> PolicyLoss:
    """``sum(w * m * (-A * r + kl_tau * k))``: no clipping, no ``1/length``; ``A`` is the reward
    minus the group's mean, without a standard deviation. Source: Dr. GRPO (arXiv:2503.20783); k1
    KL from the Composer 2 report (arXiv:2603.24477, section 4.1)."""
    mask = inputs.loss_mask
    log_ratio, ratio, mismatch_kl = _ratios(inputs)
    kl = mask * kl_term(log_ratio, ratio, config.resolved_kl_estimator)
    per_token = mask * (-inputs.advantages * ratio) + config.kl_tau * kl
    loss = _weighted(per_token, inputs.loss_weights).sum()
    metrics = {"mismatch_kl": _Masked.mean(mismatch_kl, mask)}
    return PolicyLoss(loss, metrics, _weighted(kl, inputs.loss_weights).detach().sum() if with_kl else None)
