"""The one schema: what stands under ``[trainer.loss.kwargs]`` of a PRIME-RL TOML.

PRIME-RL passes that table through untouched, so the same file is valid for both backends. Total
loss: ``policy_loss + sdpo_weight(step) * sdpo_loss``, in nats per token. This module imports no torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator
from pydantic_config import BaseConfig

Objective = Literal["dppo", "ipo", "dr_grpo"]
KLEstimator = Literal["k1", "squared", "k3"]
ClipMode = Literal["entry", "token", "rescale"]
Estimator = Literal["full", "top_k", "sampled"]
TopKSupport = Literal["student", "teacher"]
HintScope = Literal["isolated", "cumulative"]
HintRole = Literal["system", "user", "tool_result"]
GuardName = Literal["jsd_collapsed", "jsd_rising", "ratio_outside", "mostly_clipped", "no_sites"]

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

    estimator: Estimator = "full"
    """Which part of the distribution the divergence reads. ``full``: every vocabulary entry. ``top_k``:
    the likeliest ones of one side. ``sampled``: the sampled token alone, a noisy estimate of reverse KL,
    so ``jsd_beta`` must be 1. Source: the SDPO reference (github.com/lasgroup/SDPO) and TRL 1.16."""

    top_k: int | None = Field(None, ge=1)
    """Vocabulary entries kept by ``estimator = "top_k"``; at or above the vocabulary it is ``full``. The
    SDPO reference trains with 100."""

    top_k_support: TopKSupport = "student"
    """Whose likeliest entries ``estimator = "top_k"`` keeps. ``student``: the SDPO reference's. ``teacher``:
    sees what the hint makes likely and the student does not think of."""

    top_k_tail: bool = True
    """True: one more bucket holds the rest of each side's probability, as in the SDPO reference. False:
    both sides are renormalized over the kept entries, and what lies outside is not seen."""

    importance_cap: float | None = Field(None, gt=0)
    """Every position's divergence is multiplied by ``min(r, importance_cap)``, with
    ``r = exp(trainer_logprobs - inference_logprobs)`` of its sampled token, detached. None: by 1. Read by
    all estimators. The SDPO reference trains with 2 (``is_clip``), TRL's default is 2."""

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
        for name, unread in (("top_k_support", "student"), ("top_k_tail", True)):
            value = getattr(self, name)
            if self.estimator != "top_k" and value != unread:
                raise ValueError(
                    f'{name} is read by estimator = "top_k" alone; found {name} = {value!r} with {self.estimator!r}; remove one'
                )
        if self.top_k == 1 and not self.top_k_tail:
            raise ValueError(
                "top_k_tail = false needs a top_k of at least 2: one entry renormalized is certain on both sides and the "
                "divergence always 0; found top_k = 1; set sdpo.top_k_tail = true or a larger sdpo.top_k"
            )
        if self.estimator == "sampled" and self.jsd_beta != 1.0:
            raise ValueError(
                'estimator = "sampled" estimates reverse KL, which is jsd_beta = 1; '
                f"found jsd_beta = {self.jsd_beta}; set sdpo.jsd_beta = 1"
            )
        if self.estimator == "sampled" and self.token_clip is not None and self.clip_mode == "entry":
            raise ValueError(
                'estimator = "sampled" has no vocabulary entries to clamp; found clip_mode = "entry" with token_clip = '
                f'{self.token_clip}; set sdpo.clip_mode = "token" or "rescale"'
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


class GuardConfig(_Table):
    """``[trainer.loss.kwargs.trl_host.guards]``: what is watched while channel 2 trains (docs/guards.md).

    A guard that is off writes no metric and gives no warning.
    """

    window: int = Field(20, ge=0)
    """Optimizer steps that every guard but ``no_sites`` looks back over. 0: those are off. At least 2:
    ``jsd_rising`` compares its halves."""

    collapsed_below: float = Field(1e-3, ge=0)
    """``jsd_collapsed``: smallest mean divergence over the window, in nats per error token. 0: off.
    The shell example starts at 0.22."""

    rise_factor: float | None = Field(1.5, ge=1)
    """``jsd_rising``: largest mean divergence of the window's second half, as a multiple of the first
    half's. None: off. The shell example's three seeds give 0.7."""

    ratio_low: float = Field(0.1, ge=0)
    """``ratio_outside``: smallest ``weight * jsd`` as a share of the policy loss's size, after the
    warm-up. 0: no lower bound."""

    ratio_high: float | None = Field(0.3, gt=0)
    """``ratio_outside``: the largest such share. None: no upper bound."""

    clip_fraction: float = Field(0.5, ge=0, le=1)
    """``mostly_clipped``: largest share of the window's error tokens that ``sdpo.token_clip`` may act on.
    1: off."""

    no_sites_for: int = Field(20, ge=0)
    """``no_sites``: steps in a row without an error site at which it speaks. 0: off."""

    stop: tuple[GuardName, ...] = ()
    """Guards that end the run, with a checkpoint and exit code 3. Empty: all of them only warn."""

    @property
    def on(self) -> tuple[GuardName, ...]:
        """The guards that are on."""
        windowed = self.window > 0
        switches: dict[GuardName, bool] = {
            "jsd_collapsed": windowed and self.collapsed_below > 0,
            "jsd_rising": windowed and self.rise_factor is not None,
            "ratio_outside": windowed and (self.ratio_low > 0 or self.ratio_high is not None),
            "mostly_clipped": windowed and self.clip_fraction < 1,
            "no_sites": self.no_sites_for > 0,
        }
        return tuple(name for name, on in switches.items() if on)

    @model_validator(mode="after")
    def _fits(self) -> GuardConfig:
        if self.window == 1:
            raise ValueError("window must be 0 (off) or at least 2; found 1; set for example window = 20")
        if self.ratio_high is not None and self.ratio_low >= self.ratio_high:
            raise ValueError(
                f"ratio_low must be below ratio_high; found {self.ratio_low} and {self.ratio_high}; lower the one or "
                "raise the other"
            )
        off = [name for name in self.stop if name not in self.on]
        if off:
            raise ValueError(
                f"stop must name guards that are on; found {', '.join(off)}; set their thresholds or take them out of stop"
            )
        return self


class JudgeConfig(_Table):
    """Where the judge is and what it may take. Every process of a run has the budget for itself."""

    model_config = ConfigDict(protected_namespaces=())

    base_url: str
    """Address of the endpoint, up to and including ``/v1``. The transcripts are sent there."""

    model: str = Field(min_length=1)
    """The model's name at the endpoint."""

    api_key_env: str | None = Field("OPENAI_API_KEY", min_length=1)
    """Environment variable that holds the key. None: the endpoint wants none."""

    timeout_seconds: float = Field(20.0, gt=0)
    """Longest wait for one hint in seconds, retries included."""

    budget_seconds: float = Field(600.0, ge=0)
    """Longest wait for all hints of a run in seconds. 0: only stored answers are used."""

    budget_tokens: int = Field(1_000_000, ge=0)
    """Tokens that all hints of a run may take, prompts included. 0: only stored answers are used."""

    max_retries: int = Field(2, ge=0, le=10)
    """Further tries after a lost connection, HTTP 408, 409, 429 or 5xx."""

    cache_dir: str | None = None
    """Folder in which answers are kept between runs. None: they are not kept."""

    max_hint_tokens: int = Field(60, ge=1)
    """Longest hint in tokens. A longer one is refused, never cut."""

    max_answer_tokens: int = Field(256, ge=1)
    """The endpoint's limit for one answer in tokens. A judge that thinks first needs more."""

    max_context_characters: int = Field(12_000, ge=400)
    """Characters of a context that are sent. The beginning of a longer conversation is left out."""

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if "@" in value:
            raise ValueError(
                "must hold no user name or password; put the key into the variable of api_key_env"
            )
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must start with http:// or https:// and name a host; found {value!r}")
        return value


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

    judge: JudgeConfig | None = None
    """A model behind an OpenAI-compatible endpoint that writes hints for errors of recorded traces that no rule
    knows (docs/hints.md). None: nobody is asked, and nothing leaves the machine."""

    skip_hints: tuple[str, ...] = ()
    """Layers (``"judge"``) and sources (``"rule/timeout"``) of the shipped hints to leave out."""

    adapter: str | None = None
    """A LoRA adapter folder merged into the model when the run starts, relative to the TOML."""

    train_rows: int = Field(256, ge=1)
    """Rows of the training split."""

    heldout_rows: int = Field(64, ge=0)
    """Rows of the held-out split, evaluated at the start and the end. 0: no evaluation."""

    vllm_base_url: str | None = None
    """Address of a running vLLM server that environments of verifiers sample from (docs/verifiers.md), for example
    ``http://localhost:8000``. None: the host samples with transformers."""

    seed: int | None = Field(None, ge=0, lt=2**32)
    """Seed of data, sampling and training. None: ``orchestrator.seed``, which v0.5.0 alone has, else 42."""

    micro_batch_size: int = Field(8, ge=1)
    """Rollouts per forward and backward on each process. It changes memory and speed, not gradients."""

    max_turns: int = Field(4, ge=1)
    """Turns of the model per rollout."""

    max_hint_tokens: int = Field(256, ge=1)
    """Longest hint in tokens. A longer one is left out and counted; it is never cut."""

    strict: bool = False
    """A PRIME-RL key that the host cannot honour is an error instead of a listed line."""

    guards: GuardConfig = Field(default_factory=GuardConfig)
    """What is watched while channel 2 trains, and what of it ends the run."""


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
GUARD_NAMES: tuple[GuardName, ...] = get_args(GuardName)
