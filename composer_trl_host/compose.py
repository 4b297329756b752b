"""``compose_loss``: both channels of one micro-batch from one student forward.

A pure function of model, batch and configuration; the trainer adds counting, gathering and logging.
Each row's valid completion tokens become one sample of the plugin's own objective, so the numbers
are those that the plugin gives on PRIME-RL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_prime_plugin.config import ComposerConfig, SDPOConfig
from composer_prime_plugin.contract import LossContract, LossInputs
from composer_prime_plugin.divergence import configured_divergence
from composer_prime_plugin.errors import LossInputError
from composer_prime_plugin.objectives import PolicyInputs
from composer_prime_plugin.plugin import channel_one, check_sample
from composer_trl_host.alignment import Pairs, paired_positions
from composer_trl_host.logprobs import token_logprobs
from composer_trl_host.reading import (
    Reading,
    any_rank,
    forwards_are_collective,
    join_teacher,
    read_student,
    read_teacher,
)
from composer_trl_host.teachers import Teacher


@dataclass(frozen=True)
class ComposedLoss:
    """The loss of a micro-batch and what the metrics are made of.

    ``loss``: 0-d, ``policy_sum / num_loss_tokens + weight * sdpo_sum / denominator``, with
    gradient. ``policy_sum``, ``policy_kl_sum``, ``sdpo_sum``: detached sums in nats (the KL without
    ``kl_tau``). ``sdpo_tokens``, ``sdpo_clipped``: error tokens and how many of them the clip
    acted on. ``sources``: per hint source the summed divergence and its tokens.
    ``policy_metrics``: the objective's own metrics, one dict per row. ``trainer_logprobs``: each
    row's ``(tokens,)`` log-probs, detached.
    """

    loss: Tensor
    policy_sum: Tensor
    policy_kl_sum: Tensor
    loss_tokens: int
    sdpo_sum: Tensor
    sdpo_tokens: int
    sdpo_sites: int
    sites_left_out: int
    sdpo_clipped: int
    weight: float
    sources: dict[str, tuple[float, int]]
    policy_metrics: tuple[dict[str, Tensor], ...]
    trainer_logprobs: tuple[Tensor, ...]


def compose_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: ComposerConfig,
    *,
    teacher: Teacher | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ComposedLoss:
    """Channel 1 and channel 2 of a padded batch, in nats per token.

    ``batch`` holds

    - ``input_ids``, ``attention_mask`` ``(B, T)`` long: the student's sequences, prompts padded on
      the left, completions on the right;
    - ``completion_mask`` ``(B, T)`` bool: the tokens behind the prompt, which form the row's sample;
    - ``response_mask`` ``(B, T)`` bool: those of them that are trained (sampled by the model);
    - ``advantages`` ``(B,)`` or ``(B, T)``;
    - ``inference_logprobs`` ``(B, T)`` of the sampling policy, or None: on-policy, taken from this
      forward without gradient, as for rows where ``logprobs_known`` ``(B,)`` bool is False;
      ``loss_weights`` ``(B, T)`` or None;
    - for channel 2 the keys of ``SiteBatch``; absent or empty: no error site;
    - ``num_loss_tokens``, ``num_error_tokens``: the counts over the whole optimizer step and all
      ranks that the sums are divided by; default this batch's own;
    - ``step`` (0), the optimizer step, for the warm-up; ``temperature`` (1.0), the sampling
      temperature that channel 1's log-probs are taken at.

    The student is read once, in the mode that it is in; the teacher in eval mode without gradient,
    by the live weights or those of ``teacher``. ``autocast`` makes the context that ``model``'s own
    forward runs in (accelerate wraps the forward of the whole model, which the teacher does not go
    through), so that both sides are read in one precision.
    Raises ``LossInputError``, ``AlignmentError``; never returns a non-finite loss.
    """
    _check_batch(batch)
    sdpo = config.sdpo
    weight = sdpo.weight_at(int(batch.get("step", 0)))
    input_ids = batch["input_ids"]
    has_sites = sdpo.active and _has_sites(batch)
    student = read_student(
        model, input_ids, batch["attention_mask"], _first_column(batch), has_sites and teacher is None
    )
    samples = _samples(student.reading, batch, float(batch.get("temperature", 1.0)))
    contract = _host_contract()
    # PRIME-RL's own accumulation, term by term: from zero, one sum per sample, one division. Its zero hangs
    # on the log-probs and so turns NaN with them; every sample's sum hangs on the graph as it is.
    policy = torch.zeros((), dtype=samples[0].trainer_logprobs.dtype, device=input_ids.device)
    kl = torch.zeros((), dtype=torch.float32, device=input_ids.device)
    policy_metrics: list[dict[str, Tensor]] = []
    loss_tokens = 0
    for sample in samples:
        result = channel_one(sample, config, contract, with_kl=True)
        policy = policy + result.loss
        kl = kl + result.kl if result.kl is not None else kl
        policy_metrics.append(result.metrics)
        loss_tokens += int(sample.loss_mask.sum())
    num_loss_tokens = max(int(batch.get("num_loss_tokens", loss_tokens)), 1)
    loss = policy / num_loss_tokens

    sdpo_sum = torch.zeros((), dtype=torch.float32, device=input_ids.device)
    tokens = sites = left_out = clipped = 0
    sources: dict[str, tuple[float, int]] = {}
    # Where forwards are collective, a rank without a site runs the teacher's too.
    shared = sdpo.active and forwards_are_collective(model)
    teacher_runs = any_rank(has_sites, input_ids.device) if shared else has_sites
    if has_sites:
        pairs, left_out = paired_positions(input_ids, dict(batch), sdpo.strict)
        with autocast(), nullcontext(model) if teacher is None else teacher.reader(model) as reader:
            reading, start = read_teacher(reader, batch, student if teacher is None else None)
        log_ratio = _log_ratio(samples, batch) if sdpo.importance_cap is not None else None
        values, clip_flags = _divergence(student.reading, reading, start, pairs, sdpo, input_ids, log_ratio)
        sdpo_sum = values.sum()
        tokens, clipped = values.numel(), int(clip_flags.sum())
        sites = int(pairs.site.unique().numel())
        sources = _by_source(values.detach(), pairs, batch.get("hint_source"))
        denominator = num_loss_tokens
        if sdpo.normalization == "error_tokens":
            denominator = max(int(batch.get("num_error_tokens", tokens)), 1)
        loss = loss + weight * (sdpo_sum / denominator)
    elif teacher_runs:
        with autocast(), nullcontext(model) if teacher is None else teacher.reader(model) as reader:
            if forwards_are_collective(reader):
                join_teacher(reader, batch)
    return ComposedLoss(
        loss=loss,
        policy_sum=policy.detach(),
        policy_kl_sum=kl,
        loss_tokens=loss_tokens,
        sdpo_sum=sdpo_sum.detach(),
        sdpo_tokens=tokens,
        sdpo_sites=sites,
        sites_left_out=left_out,
        sdpo_clipped=clipped,
        weight=weight if sdpo.active else 0.0,
        sources=sources,
        policy_metrics=tuple(policy_metrics),
        trainer_logprobs=tuple(sample.trainer_logprobs.detach() for sample in samples),
    )


def _host_contract() -> LossContract:
    return LossContract.of(LossInputs)


def _has_sites(batch: Mapping[str, Any]) -> bool:
    idx = batch.get("student_response_idx")
    return idx is not None and idx.numel() > 0


def _check_batch(batch: Mapping[str, Any]) -> None:
    shape = batch["input_ids"].shape
    for name in ("attention_mask", "completion_mask", "response_mask", "inference_logprobs", "loss_weights"):
        value = batch.get(name)
        if value is not None and value.shape != shape:
            raise LossInputError(
                f"{name} must have input_ids' shape {tuple(shape)}; found {tuple(value.shape)}"
            )
    for name in ("completion_mask", "response_mask"):
        if batch[name].dtype != torch.bool:
            raise LossInputError(f"{name} must be bool, True where a token counts; found {batch[name].dtype}")
    if bool((batch["response_mask"] & ~batch["completion_mask"]).any()):
        raise LossInputError(
            "response_mask must lie inside completion_mask; found a trained token outside the completion"
        )
    completion, real = batch["completion_mask"], batch["attention_mask"].bool()
    if bool((completion & ~real).any()) or bool((completion[:, 1:] & ~real[:, :-1]).any()):
        raise LossInputError(
            "every completion token and the token before it must be real (attention_mask 1), since the one predicts the "
            "other; found padding there; pad prompts on the left and completions on the right"
        )
    if bool(batch["completion_mask"][:, 0].any()):
        raise LossInputError(
            "a completion must have a prompt before it; found a completion token in column 0"
        )


def _first_column(batch: Mapping[str, Any]) -> int:
    """The earliest column that is asked for: one before the first completion or recovery token."""
    completion = batch["completion_mask"]
    columns = [completion.any(dim=0).nonzero().flatten()]
    if _has_sites(batch):
        columns.append(batch["student_response_idx"][batch["student_response_valid"]])
    asked = torch.cat(columns)
    return max(int(asked.min()) - 1, 0) if asked.numel() else completion.size(1) - 1


def _samples(reading: Reading, batch: Mapping[str, Any], temperature: float) -> list[PolicyInputs]:
    """One objective sample per row: its valid completion tokens, in order."""
    rows, columns = batch["completion_mask"].nonzero(as_tuple=True)
    tokens = batch["input_ids"][rows, columns]
    logprobs = reading.per_token(
        rows, columns - 1, lambda logits, block: token_logprobs(logits, tokens[block], temperature)
    )
    lengths = batch["completion_mask"].sum(dim=1).tolist()
    inference, weights = batch.get("inference_logprobs"), batch.get("loss_weights")
    known = batch.get("logprobs_known")
    unknown = [inference is None] * len(lengths) if known is None else (~known).tolist()
    samples: list[PolicyInputs] = []
    for row, (trainer, here) in enumerate(zip(logprobs.split(lengths), columns.split(lengths), strict=True)):
        advantage = batch["advantages"][row]
        sample = PolicyInputs(
            trainer_logprobs=trainer,
            inference_logprobs=trainer.detach()
            if inference is None or unknown[row]
            else inference[row, here].to(trainer.dtype),
            advantages=(advantage[here] if advantage.dim() else advantage.expand(here.numel())).to(
                trainer.dtype
            ),
            loss_mask=batch["response_mask"][row, here],
            loss_weights=None if weights is None else weights[row, here].to(trainer.dtype),
        )
        check_sample(sample)
        samples.append(sample)
    return samples


def _log_ratio(samples: Sequence[PolicyInputs], batch: Mapping[str, Any]) -> Tensor:
    """``(B, T)`` trainer minus inference log-prob of every completion token, in nats, detached. 0, as
    on-policy, for any other token: nobody knows what it was sampled with."""
    per_token = torch.cat(
        [sample.trainer_logprobs.detach() - sample.inference_logprobs for sample in samples]
    )
    zeros = torch.zeros(batch["input_ids"].shape, dtype=per_token.dtype, device=per_token.device)
    return zeros.masked_scatter(batch["completion_mask"], per_token)


def _divergence(
    student: Reading,
    teacher: Reading,
    start: Tensor,
    pairs: Pairs,
    sdpo: SDPOConfig,
    input_ids: Tensor,
    log_ratio: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(N,)`` divergences of the pairs and whether the clip acted, read one position earlier.
    ``start``: ``(S,)``, the column of each site's teacher sequence that the reading begins at.
    ``input_ids``, ``log_ratio``: ``(B, T)``, what the estimator may ask for."""
    teacher_column = pairs.teacher - 1 - start[pairs.site]
    tokens = input_ids[pairs.row, pairs.student]
    log_ratios = None if log_ratio is None else log_ratio[pairs.row, pairs.student]

    def rows(logits: Tensor, block: slice) -> Tensor:
        teacher_logits = teacher.block(pairs.site[block], teacher_column[block])
        result = configured_divergence(
            logits,
            teacher_logits,
            sdpo,
            tokens=tokens[block],
            log_ratio=None if log_ratios is None else log_ratios[block],
        )
        return torch.stack([result.values, result.clipped.to(result.values.dtype)], dim=-1)

    values, clipped = student.per_token(pairs.row, pairs.student - 1, rows, first_column=True).unbind(dim=-1)
    return values, clipped.detach() > 0


def _by_source(values: Tensor, pairs: Pairs, names: Sequence[str] | None) -> dict[str, tuple[float, int]]:
    if names is None:
        return {}
    sums: dict[str, tuple[float, int]] = {}
    for site in pairs.site.unique().tolist():
        here = values[pairs.site == site]
        total, count = sums.get(names[site], (0.0, 0))
        sums[names[site]] = (total + float(here.sum()), count + here.numel())
    return sums
