"""The one schema: what stands under ``[trainer.loss.kwargs]`` of a PRIME-RL TOML.

PRIME-RL passes that table through untouched, so the same file is valid for both backends. Total
loss: ``policy_loss + sdpo_weight(step) * sdpo_loss``, in nats per token. This module imports no torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import AliasChoices, ConfigDict, Field, model_validator
from pydantic_config import BaseConfig

Objective = Literal["dppo", "ipo", "dr_grpo"]
KLEstimator = Literal["k1", "squared", "k3"]
ClipMode = Literal["entry", "token", "rescale"]
HintScope = Literal["isolated", "cumulative"]
HintRole = Literal["system", "user", "tool_result"]

DEFAULT_KL_ESTIMATOR: dict[Objective, KLEstimator] = {"dppo": "squared", "ipo": "squared", "dr_grpo": "k1"}


class _Table(BaseConfig):
    """A table of PRIME-RL's own kind ("None" is null) that names its keys when it refuses one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        known: set[str] = set()
        for name, field in cls.model_fields.items():
            known.add(name)
            if isinstance(field.validation_alias, AliasChoices):
                known.update(str(choice) for choice in field.validation_alias.choices)
        unknown = sorted(str(key) for key in data if key not in known)
        if unknown:
            raise ValueError(
                f"unknown key {', '.join(map(repr, unknown))}; valid keys are {', '.join(sorted(known))}"
            )
        return data


class PolicyConfig(_Table):
    """Channel 1, the policy objective. Names and defaults are PRIME-RL's own."""

    objective: Objective = "dppo"
    """``dppo``: PRIME-RL's default loss from v0.6.0 on. ``ipo``: a trust region that ignores the
    advantage's sign. ``dr_grpo``: no clipping, k1 KL, for the Dr. GRPO recipe."""

    dppo_mask_low: float = Field(0.2, ge=0)
    """Largest fall of a token's probability (trainer minus inference) that still trains where the
    advantage is not positive. 0: any fall is dropped. Source: PRIME-RL ``DefaultLossConfig``."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """Largest rise of a token's probability that still trains where the advantage is positive.
    0: any rise is dropped. Source: PRIME-RL ``DefaultLossConfig``."""

    ipo_mask_low: float = Field(0.2, ge=0)
    """``ipo`` with two thresholds (v0.5.0): largest fall of a token's probability that still
    trains. Setting this, ``ipo_mask_high`` or ``teacher_tau`` selects the two-threshold form."""

    ipo_mask_high: float = Field(0.2, ge=0)
    """``ipo`` with two thresholds (v0.5.0): largest rise of a token's probability that still trains."""

    ipo_threshold: float = Field(0.1, ge=0, validation_alias=AliasChoices("ipo_threshold", "eps"))
    """``ipo`` with one threshold (v0.6.0 and later): largest absolute change of a token's
    probability that still trains. Also spelt ``eps``. Setting it selects the one-threshold form."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor on the advantage in ``dppo`` and ``ipo``. 0: no policy gradient. ``dr_grpo`` has no such factor."""

    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the KL term against the sampling policy, per token. 0: no KL term."""

    teacher_tau: float = Field(0.0, ge=0)
    """``ipo`` with two thresholds: weight of the detached ``teacher_logprobs - trainer_logprobs``
    added to the advantage, where PRIME-RL hands over teacher log-probs. 0: nothing is added."""

    kl_estimator: KLEstimator | None = None
    """``k1`` is ``-log r``, ``squared`` is ``(log r)**2``, ``k3`` is ``r - 1 - log r``, with
    ``r = exp(trainer_logprobs - inference_logprobs)``. None: ``squared`` for ``dppo`` and ``ipo``
    (PRIME-RL's), ``k1`` for ``dr_grpo``."""

    @property
    def resolved_kl_estimator(self) -> KLEstimator:
        """The estimator in force."""
        return self.kl_estimator or DEFAULT_KL_ESTIMATOR[self.objective]

    @property
    def ipo_form(self) -> Literal["two_thresholds", "one_threshold"] | None:
        """The form of ``ipo`` that the knobs select; None where none of them is set."""
        if self.model_fields_set & {"ipo_mask_low", "ipo_mask_high", "teacher_tau"}:
            return "two_thresholds"
        return "one_threshold" if "ipo_threshold" in self.model_fields_set else None

    @model_validator(mode="after")
    def _one_ipo_form(self) -> PolicyConfig:
        two = self.model_fields_set & {"ipo_mask_low", "ipo_mask_high", "teacher_tau"}
        if self.objective == "ipo" and "ipo_threshold" in self.model_fields_set and two:
            raise ValueError(
                "objective 'ipo' takes either ipo_threshold (v0.6.0 and later) or ipo_mask_low, ipo_mask_high "
                f"and teacher_tau (v0.5.0); found ipo_threshold together with {', '.join(sorted(two))}; remove one side"
            )
        return self


class SDPOConfig(_Table):
    """Channel 2: the divergence between the un-hinted and the hinted policy on recovery tokens."""

    weight: float = Field(0.0, ge=0)
    """Factor on the SDPO loss after warm-up. 0: off, and channel 1 is reproduced bit for bit."""

    weight_start: float = Field(0.0, ge=0)
    """Factor at step 0 of the warm-up. Read only with ``warmup_steps > 0``."""

    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the factor goes linearly from ``weight_start`` to ``weight``.
    0: ``weight`` from the first step."""

    jsd_beta: float = Field(0.5, ge=0, le=1)
    """Interpolation of the divergence: 0 is forward KL(teacher || student), 1 is reverse
    KL(student || teacher), 0.5 the Jensen-Shannon divergence. Source: OPSD (arXiv:2601.18734)."""

    temperature: float = Field(1.0, gt=0)
    """Both logits are divided by it before the softmax; no squared factor is applied."""

    token_clip: float | None = Field(None, gt=0)
    """Bound in nats, applied as ``clip_mode`` says. None: no clip, the default, since a clamped
    position or entry has no gradient and the far positions are the ones to learn (docs/sdpo.md)."""

    clip_mode: ClipMode = "rescale"
    """``entry`` clamps every vocabulary entry's contribution (OPSD's rule; it can make the loss
    negative and turn the gradient away from the teacher). ``token`` clamps each position's sum (no
    gradient there). ``rescale`` scales a position above the bound down to it, direction kept."""

    normalization: Literal["loss_tokens", "error_tokens"] = "loss_tokens"
    """``loss_tokens``: the sum over error tokens divided by the rl-token count that channel 1 is
    divided by. ``error_tokens``: the mean over all error tokens of the step, TRL host only."""

    estimator: Literal["full", "top_k", "sampled"] = "full"
    """Which part of the distribution the divergence reads. ``full``: every vocabulary entry."""

    top_k: int | None = Field(None, ge=1)
    """Vocabulary entries kept by ``estimator = "top_k"``."""

    teacher: Literal["live", "ema", "initial"] = "live"
    """Whose weights read the hinted context: the ones being trained, their average, or the run's first."""

    ema_decay: float = Field(0.99, ge=0, lt=1)
    """``teacher = "ema"``: share of the average that one optimizer step keeps. 0: the live weights
    of the last step; the time constant is ``1 / (1 - ema_decay)`` steps."""

    student_context: Literal["raw", "placeholder"] = "raw"
    """``raw``: the student's sequence stays as it was sampled. ``placeholder``: a neutral message
    of the hint's token length stands where the teacher has the hint (training on traces alone)."""

    hint_scope: HintScope = "isolated"
    """``isolated``: each site's teacher sees its own hint alone. ``cumulative``: earlier hints stay in."""

    hint_role: HintRole = "user"
    """The role of the hint's message. A user message moved the embedded model far more than a system one."""

    strict: bool = True
    """An alignment mismatch is an error. False: the site is left out and counted."""

    @model_validator(mode="after")
    def _needs(self) -> SDPOConfig:
        if self.estimator == "top_k" and self.top_k is None:
            raise ValueError('estimator = "top_k" needs top_k; found none; set sdpo.top_k, for example 100')
        if self.estimator != "top_k" and self.top_k is not None:
            raise ValueError(
                f'top_k is read by estimator = "top_k" alone; found top_k = {self.top_k} with {self.estimator!r}; remove one'
            )
        return self

    def weight_at(self, step: int) -> float:
        """The factor at optimizer step ``step`` (0-based)."""
        if self.warmup_steps == 0 or step >= self.warmup_steps:
            return self.weight
        return self.weight_start + (self.weight - self.weight_start) * step / self.warmup_steps

    @property
    def active(self) -> bool:
        """Whether channel 2 has a factor above zero at any step."""
        return self.weight > 0 or (self.warmup_steps > 0 and self.weight_start > 0)


class ReplayConfig(_Table):
    """Channel 3, preference pairs from replayed traces. Reserved; ``weight`` above 0 is refused when a run starts."""

    weight: float = Field(0.0, ge=0)
    """Factor on the replay loss. 0: off."""

    dpo_beta: float = Field(0.1, gt=0)
    """Inverse temperature of the preference loss."""


class TRLHostConfig(_Table):
    """What only the TRL host reads. PRIME-RL ignores this table."""

    environment: str | None = None
    """The live task: ``package.module.Class``, or ``file.py:Class`` relative to the TOML."""

    traces: str | None = None
    """Recorded traces to train on instead of a live task: a file or a folder, relative to the TOML."""

    trace_format: Literal["auto", "claude-code", "openai", "verifiers"] = "auto"
    """What the files of ``traces`` are. ``auto``: found out per file."""

    strip_thinking: bool = False
    """Leave out the model's thinking when traces are rendered. A recovery that is then empty is no site."""

    rejected_are_errors: bool = False
    """Calls that a person refused or interrupted are error sites too."""

    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""

    hints: str | None = None
    """A ``HintGenerator`` of one's own, named like ``environment``. None: the environment's hints."""

    adapter: str | None = None
    """A LoRA adapter folder merged into the model when the run starts, relative to the TOML."""

    train_rows: int = Field(256, ge=1)
    """Rows of the training split."""

    heldout_rows: int = Field(64, ge=0)
    """Rows of the held-out split, evaluated at the start and the end. 0: no evaluation."""

    micro_batch_size: int = Field(8, ge=1)
    """Rollouts per forward and backward on each process. It changes memory and speed, not gradients."""

    max_turns: int = Field(4, ge=1)
    """Turns of the model per rollout."""

    max_hint_tokens: int = Field(256, ge=1)
    """Longest hint in tokens. A longer one is left out and counted; it is never cut."""

    strict: bool = False
    """A PRIME-RL key that the host cannot honour is an error instead of a listed line."""


class ComposerConfig(_Table):
    """``[trainer.loss.kwargs]``. ``ComposerConfig(**kwargs)`` validates it."""

    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    """Channel 1."""

    sdpo: SDPOConfig = Field(default_factory=SDPOConfig)
    """Channel 2."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Channel 3."""

    trl_host: TRLHostConfig = Field(default_factory=TRLHostConfig)
    """The TRL host."""


CLIP_MODES: tuple[str, ...] = get_args(ClipMode)
