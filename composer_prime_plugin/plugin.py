"""``loss_fn``: the object that ``[trainer.loss] import_path`` names.

PRIME-RL calls it once per sample on 1-D ``(seq,)`` tensors, adds the sums up and divides by the
global number of rl tokens. The maths lives in ``objectives`` and ``divergence``; here are the
contract's checks, the gate of channel 2, and the sum of both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from composer_prime_plugin.config import ComposerConfig, SDPOConfig
from composer_prime_plugin.contract import LossContract, as_scalar, output_class
from composer_prime_plugin.divergence import check_logits, configured_divergence
from composer_prime_plugin.errors import ConfigError, LossInputError, NonFiniteInputError
from composer_prime_plugin.objectives import PolicyInputs, PolicyLoss, policy_loss
from composer_prime_plugin.routing import sdpo_unavailable

_STREAMS = ("inference_logprobs", "advantages", "loss_mask", "loss_weights", "teacher_logprobs", "sdpo_mask")


def loss_fn(inputs: Any, **kwargs: Any) -> Any:
    """The composed loss of one sample: a PRIME-RL custom loss.

    ``inputs`` is PRIME-RL's ``LossInputs`` of any release (or ours): 1-D ``(seq,)`` tensors
    ``trainer_logprobs`` (with gradient), ``inference_logprobs``, ``advantages``, a bool
    ``loss_mask``, optional ``loss_weights``. For channel 2 also ``teacher_logits`` and
    ``trainer_logits`` ``(seq, vocab)``, row ``t`` the distribution that token ``t`` was drawn from,
    and an optional bool ``sdpo_mask`` (default: the loss mask). ``sdpo.estimator = "sampled"`` also needs
    ``token_ids`` ``(seq,)``, the ids of the sample's tokens.

    ``kwargs`` is the table ``[trainer.loss.kwargs]``, validated once per distinct content.

    Returns ``LossOutputs`` (PRIME-RL's own where importable): ``loss`` is the **sum** over tokens
    in nats, never a mean, since the trainer divides; ``metrics`` are detached and 0-d, with the same
    keys on every call. Finite values at masked positions never matter; non-finite ones are replaced
    by zero there, where PRIME-RL's own loss becomes NaN.

    Raises ``pydantic.ValidationError`` for the table, ``SDPOUnavailableError`` when channel 2 is
    asked for and the logits are not handed over, ``LossInputError`` for tensors that break the
    contract, among them a NaN at an unmasked position, which is named.
    """
    config = parse_kwargs(kwargs)
    contract = _contract(inputs.__class__)
    check_sample(inputs)
    sdpo = config.sdpo
    if sdpo.active:
        # Before any arithmetic: channel 1 alone must never be trained in silence.
        reason = sdpo_unavailable(config, contract)
        if reason is not None:
            raise reason
    policy = channel_one(policy_inputs(inputs), config, contract)
    loss, metrics = policy.loss, policy.metrics
    if sdpo.active:
        weight = sdpo.weight_at(int(getattr(inputs, "step", None) or 0))
        total, extra = _channel_two(inputs, sdpo, weight)
        loss = loss + weight * total
        metrics = {**metrics, **extra}
    return output_class()(loss=loss, metrics=metrics)


def parse_kwargs(kwargs: dict[str, Any]) -> ComposerConfig:
    """``[trainer.loss.kwargs]`` as a ``ComposerConfig``; the same content is validated once."""
    return _parse(_freeze(kwargs))


def channel_one(
    inputs: PolicyInputs, config: ComposerConfig, contract: LossContract, with_kl: bool = False
) -> PolicyLoss:
    """The policy objective of one sample, checked for finiteness.

    A finite sum proves that nothing non-finite went in: ``0 * inf`` and ``0 * nan`` are NaN, so the
    usual case costs one scalar read. Otherwise masked positions are zeroed and the sum is taken
    again; what is still not finite is an error that names the position.
    """
    result = policy_loss(inputs, config.policy, contract.ipo_form, with_kl)
    if bool(torch.isfinite(result.loss.detach())):
        return result
    clean = _zero_non_finite_masked(inputs)
    result = policy_loss(clean, config.policy, contract.ipo_form, with_kl)
    if not bool(torch.isfinite(result.loss.detach())):
        raise NonFiniteInputError(_name_non_finite(clean))
    return result


def policy_inputs(inputs: Any) -> PolicyInputs:
    """The fields that channel 1 reads; those a release lacks are None."""
    return PolicyInputs(
        trainer_logprobs=inputs.trainer_logprobs,
        inference_logprobs=inputs.inference_logprobs,
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        loss_weights=getattr(inputs, "loss_weights", None),
        teacher_logprobs=getattr(inputs, "teacher_logprobs", None),
    )


def check_sample(inputs: Any) -> None:
    """Raise ``LossInputError`` unless every stream is 1-D, of one length, and masks are bool.
    Reads shapes and dtypes alone, so no device is synchronized."""
    trainer = inputs.trainer_logprobs
    if not isinstance(trainer, Tensor) or trainer.dim() != 1 or not trainer.is_floating_point():
        raise LossInputError(
            "trainer_logprobs must be a 1-D floating tensor (seq,), one sample a call; found "
            f"{tuple(trainer.shape) if isinstance(trainer, Tensor) else type(trainer).__name__}"
        )
    for name in _STREAMS:
        stream = getattr(inputs, name, None)
        if stream is None:
            if name in ("loss_weights", "teacher_logprobs", "sdpo_mask"):
                continue
            raise LossInputError(f"{name} must be a tensor (seq,); found None")
        if stream.shape != trainer.shape:
            raise LossInputError(
                f"{name} must have trainer_logprobs' shape {tuple(trainer.shape)}; found {tuple(stream.shape)}; "
                "give every stream one value per token of the sample"
            )
        if name.endswith("_mask") and stream.dtype != torch.bool:
            raise LossInputError(
                f"{name} must be bool, True where a token counts; found {stream.dtype}; use mask.bool()"
            )


def _channel_two(inputs: Any, sdpo: SDPOConfig, weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence summed over the sample's error tokens, in float32, and its metrics."""
    student, teacher = inputs.trainer_logits, inputs.teacher_logits
    mask = getattr(inputs, "sdpo_mask", None)
    mask = inputs.loss_mask if mask is None else mask
    like = inputs.trainer_logprobs
    if student is None or teacher is None:
        missing = [name for name in ("teacher_logits", "trainer_logits") if getattr(inputs, name) is None]
        if bool(mask.any()):
            raise LossInputError(
                f"with sdpo.weight = {sdpo.weight} a sample that has error tokens must carry full logits; found "
                f"{' and '.join(missing)} = None with {int(mask.sum())} error tokens; hand them over, or clear sdpo_mask"
            )
        values, clipped = like.new_zeros(0, dtype=torch.float32), mask[:0]
    else:
        check_logits(student, teacher)
        if student.dim() != 2 or student.size(0) != like.size(0):
            raise LossInputError(
                f"trainer_logits must be (seq, vocab) with seq = {like.size(0)} as in trainer_logprobs; found {tuple(student.shape)}"
            )
        if torch.is_grad_enabled() and like.requires_grad and not student.requires_grad:
            raise LossInputError(
                "trainer_logits must carry gradient where trainer_logprobs does; found a detached tensor, on which "
                "channel 2 would train nothing; hand over the logits of the same forward"
            )
        rows = mask.nonzero().squeeze(-1)
        tokens, log_ratio = None, None
        if sdpo.estimator == "sampled":
            tokens = _token_ids(inputs, like)[rows]
        if sdpo.importance_cap is not None:
            log_ratio = (like.detach() - inputs.inference_logprobs)[rows]
        result = configured_divergence(student, teacher, sdpo, rows=rows, tokens=tokens, log_ratio=log_ratio)
        values, clipped = result.values, result.clipped
    total = values.sum()
    count = max(values.numel(), 1)
    metrics = {
        "loss/sdpo_jsd": as_scalar(values.detach().sum() / count, like),
        "loss/sdpo_weighted": as_scalar(weight * values.detach().sum(), like),
        "sdpo/weight": as_scalar(weight, like),
        "sdpo/error_tokens": as_scalar(float(values.numel()), like),
        "sdpo/clip_fraction": as_scalar(clipped.sum() / count, like),
    }
    return total, metrics


def _token_ids(inputs: Any, like: Tensor) -> Tensor:
    ids = getattr(inputs, "token_ids", None)
    if not isinstance(ids, Tensor) or ids.shape != like.shape or ids.is_floating_point():
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise LossInputError(
            f'sdpo.estimator = "sampled" needs token_ids, the integer id of each of the {like.numel()} tokens; found {found}; '
            'hand them over, or set sdpo.estimator = "full"'
        )
    return ids


def _zero_non_finite_masked(inputs: PolicyInputs) -> PolicyInputs:
    """``inputs`` with zeros at masked positions where any stream, or the ratio made of them, is not
    finite. Other positions keep their bits."""
    with torch.no_grad():
        log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
        size = log_ratio.abs() + torch.exp(log_ratio) + log_ratio**2 + torch.exp(inputs.trainer_logprobs)
        size = size + torch.exp(inputs.inference_logprobs) + (inputs.advantages * torch.exp(log_ratio)).abs()
        for stream in (inputs.loss_weights, inputs.teacher_logprobs):
            if stream is not None:
                size = size + stream.abs()
        zero = ~inputs.loss_mask & ~torch.isfinite(size)

    def clean(stream: Tensor) -> Tensor:
        return torch.where(zero, torch.zeros((), dtype=stream.dtype, device=stream.device), stream)

    return PolicyInputs(
        trainer_logprobs=clean(inputs.trainer_logprobs),
        inference_logprobs=clean(inputs.inference_logprobs),
        advantages=clean(inputs.advantages),
        loss_mask=inputs.loss_mask,
        loss_weights=None if inputs.loss_weights is None else clean(inputs.loss_weights),
        teacher_logprobs=None if inputs.teacher_logprobs is None else clean(inputs.teacher_logprobs),
    )


@torch.no_grad()
def _name_non_finite(inputs: PolicyInputs) -> str:
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    named = {
        "trainer_logprobs": inputs.trainer_logprobs,
        "inference_logprobs": inputs.inference_logprobs,
        "advantages": inputs.advantages,
        "loss_weights": inputs.loss_weights,
        "teacher_logprobs": inputs.teacher_logprobs,
        "the importance ratio exp(trainer_logprobs - inference_logprobs)": ratio,
    }
    for name, stream in named.items():
        if stream is None:
            continue
        bad = (inputs.loss_mask & ~torch.isfinite(stream)).nonzero()
        if bad.numel():
            where = int(bad[0])
            return (
                f"{name} must be finite at unmasked positions; found {float(stream[where])} at position {where} "
                f"({bad.numel()} such positions); mask the token or look for an overflow in the forward that made it"
            )
    return "the summed policy loss must be finite; every input is, so the sum overflowed; use float32 or smaller advantages"


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return ("table", tuple((key, _freeze(value[key])) for key in sorted(value, key=str)))
    if isinstance(value, list | tuple):
        return ("array", tuple(_freeze(item) for item in value))
    # 1, 1.0 and True are equal and hash alike; pydantic tells them apart.
    return (type(value), value)


def _thaw(value: Any) -> Any:
    kind, content = value
    if kind == "table":
        return {key: _thaw(item) for key, item in content}
    if kind == "array":
        return [_thaw(item) for item in content]
    return content


@lru_cache(maxsize=256)
def _parse(frozen: Any) -> ComposerConfig:
    config = ComposerConfig(**_thaw(frozen))
    if config.replay.weight > 0:
        raise ConfigError(
            f"replay.weight must be 0: the replay channel does not exist yet; found {config.replay.weight}; remove it"
        )
    return config


@lru_cache(maxsize=64)
def _contract(inputs_class: type[Any]) -> LossContract:
    return LossContract.of(inputs_class)
