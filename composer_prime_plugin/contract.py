"""What the installed PRIME-RL hands a custom loss, and what it expects back.

The only module that touches ``prime_rl``, and it never requires it. Facts are read off the fields
of ``LossInputs`` and the functions beside it, never off a version number.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

PRIME_LOSS_MODULE = "prime_rl.trainer.rl.loss"
LOGIT_FIELDS = ("teacher_logits", "trainer_logits")
STEP_FIELD = "step"
TOKENS_FIELD = "token_ids"
UNVERSIONED = "of unknown version"

IpoForm = Literal["two_thresholds", "one_threshold"]


@dataclass
class LossInputs:
    """One sample, as PRIME-RL hands it to a custom loss (main of 2026-08-21), plus the optional
    fields that channel 2 needs. The host builds these; PRIME-RL builds its own.

    All tensors are 1-D ``(seq,)`` except the logits ``(seq, vocab)``; position ``t`` of the logits
    is the distribution that token ``t`` was drawn from, so it is aligned to ``trainer_logprobs``.
    Log-probs are in nats. ``loss_mask`` and ``sdpo_mask`` are bool, True where a token counts.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    trainer_logits: Tensor | None = None
    teacher_logits: Tensor | None = None
    sdpo_mask: Tensor | None = None
    step: int | None = None
    token_ids: Tensor | None = None


@dataclass
class LossOutputs:
    """The same two fields as PRIME-RL's own: a 0-d ``loss`` (a sum over tokens; the trainer
    divides) and detached 0-d ``metrics``."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class BrokenPrimeRLError(ImportError):
    """prime_rl is installed and its loss module does not import."""


@lru_cache(maxsize=1)
def prime_loss_module() -> ModuleType | None:
    """PRIME-RL's loss module, or None where prime_rl is not importable.

    Raises ``BrokenPrimeRLError`` where prime_rl is there but its loss module fails to import:
    treating that as "not installed" would route a run to the wrong backend.
    """
    if PRIME_LOSS_MODULE in sys.modules:
        return sys.modules[PRIME_LOSS_MODULE]
    try:
        if importlib.util.find_spec("prime_rl") is None:
            return None
    except (ImportError, ValueError):
        return None
    try:
        return importlib.import_module(PRIME_LOSS_MODULE)
    except Exception as error:
        raise BrokenPrimeRLError(
            f"prime_rl is importable, so {PRIME_LOSS_MODULE} must be too; it failed with "
            f"{type(error).__name__}: {error}; repair the PRIME-RL environment or uninstall prime_rl"
        ) from error


def prime_version() -> str | None:
    """The installed distribution's version; ``"of unknown version"`` for a bare checkout; None without prime_rl."""
    if prime_loss_module() is None:
        return None
    try:
        return importlib.metadata.version("prime-rl")
    except importlib.metadata.PackageNotFoundError:
        return UNVERSIONED


def output_class() -> type[Any]:
    """PRIME-RL's ``LossOutputs`` where it is importable, else ours."""
    module = prime_loss_module()
    return LossOutputs if module is None else module.LossOutputs


@dataclass(frozen=True)
class LossContract:
    """What a trainer hands a custom loss.

    ``fields`` are the names of its ``LossInputs``, ``ipo_form`` the form of its own ``ipo``
    objective, ``version`` the installed PRIME-RL's (None: not installed).
    """

    fields: frozenset[str]
    ipo_form: IpoForm = "one_threshold"
    version: str | None = None

    @classmethod
    def installed(cls) -> LossContract | None:
        """The contract of the importable PRIME-RL, or None without one."""
        module = prime_loss_module()
        if module is None:
            return None
        return cls.of(module.LossInputs)

    @classmethod
    def of(cls, inputs_class: type[Any]) -> LossContract:
        """The contract that a ``LossInputs`` class stands for."""
        if inputs_class is LossInputs:
            module = prime_loss_module()
            version = None
        else:
            module = sys.modules.get(inputs_class.__module__)
            version = prime_version() if inputs_class.__module__ == PRIME_LOSS_MODULE else UNVERSIONED
        names = frozenset(item.name for item in dataclasses.fields(inputs_class))
        return cls(fields=names, ipo_form=_ipo_form(module), version=version)

    @property
    def missing_logits(self) -> tuple[str, ...]:
        """Full-vocabulary fields that channel 2 needs and this contract lacks."""
        return tuple(name for name in LOGIT_FIELDS if name not in self.fields)

    @property
    def has_logits(self) -> bool:
        """Whether channel 2 can run on this contract."""
        return not self.missing_logits

    @property
    def has_tokens(self) -> bool:
        """Whether the sample's token ids are handed over, as the sampled estimator needs."""
        return TOKENS_FIELD in self.fields

    @property
    def has_step(self) -> bool:
        """Whether the optimizer step is handed over, as warm-up needs."""
        return STEP_FIELD in self.fields


def _ipo_form(module: ModuleType | None) -> IpoForm:
    # v0.5.0's default_loss_fn is the two-threshold form; every later release has ipo_loss_fn.
    if module is None or hasattr(module, "ipo_loss_fn") or not hasattr(module, "default_loss_fn"):
        return "one_threshold"
    return "two_thresholds"


def as_scalar(value: Tensor | float, like: Tensor) -> Tensor:
    """A detached 0-d float32 tensor beside ``like``, as PRIME-RL's metric gathering expects."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32)
    return torch.tensor(value, dtype=torch.float32, device=like.device)
