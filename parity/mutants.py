"""Mutants of the objectives: the families must reject every one, or the suite fails.

A mutant is a change of source text. Its ``old`` text must occur in the module as often as ``count``
says, so an edit of the objectives that would disarm a mutant is an error, not a silent pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer_prime_plugin import objectives, plugin
from composer_prime_plugin.errors import ConfigError
from parity import golden
from parity.cases import SHORT, build, cases
from parity.releases import RELEASES, Objective, Release
from parity.suite import ComposerLoss

ALL: tuple[Objective, ...] = ("dppo", "ipo", "ipo-two")
WEIGHTED: tuple[Objective, ...] = ("dppo", "ipo")
TWO: tuple[Objective, ...] = ("ipo-two",)


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which occurs ``count`` times, by ``new``."""

    old: str
    new: str
    count: int = 1


@dataclass(frozen=True)
class Mutant:
    """``objectives``: those that the edits change. ``module``: where they are made."""

    name: str
    edits: tuple[Edit, ...]
    objectives: tuple[Objective, ...] = ALL
    module: Literal["objectives", "plugin"] = "objectives"


def _one(name: str, old: str, new: str, objectives: tuple[Objective, ...] = ALL, count: int = 1) -> Mutant:
    return Mutant(name, (Edit(old, new, count),), objectives)


def _swap(name: str, first: str, second: str, objectives: tuple[Objective, ...]) -> Mutant:
    edits = (Edit(first, "<first>"), Edit(second, first), Edit("<first>", second))
    return Mutant(name, edits, objectives)


MUTANTS: tuple[Mutant, ...] = (
    _one("flipped sign of the policy term", "-(keep * advantages * ratio)", "(keep * advantages * ratio)"),
    _one(
        "flipped sign of the KL term", "ratio) + config.kl_tau * kl", "ratio) - config.kl_tau * kl", count=2
    ),
    _one("dropped mask in the policy term", "keep = mask & ~outside", "keep = ~outside", count=3),
    _one("dropped mask in the KL term", "kl = inputs.loss_mask * kl_term", "kl = kl_term"),
    _one("trust region dropped", "keep = mask & ~outside", "keep = mask", count=3),
    _one("missing weights", "per_token if weights is None else per_token * weights", "per_token", WEIGHTED),
    _one("weights squared", "per_token * weights", "per_token * weights * weights", WEIGHTED),
    _one(
        "mean for sum",
        "loss = _weighted(per_token, inputs.loss_weights).sum()",
        "loss = per_token.mean()",
        count=2,
    ),
    _swap("thresholds swapped", "config.dppo_mask_high", "config.dppo_mask_low", ("dppo",)),
    _swap("thresholds swapped", "config.ipo_mask_high", "config.ipo_mask_low", TWO),
    _one(
        "upper bound inclusive",
        "change > config.dppo_mask_high",
        "change >= config.dppo_mask_high",
        ("dppo",),
    ),
    _one(
        "lower bound inclusive",
        "change < -config.dppo_mask_low",
        "change <= -config.dppo_mask_low",
        ("dppo",),
    ),
    _one("bound inclusive", ") > config.ipo_threshold", ") >= config.ipo_threshold", ("ipo",)),
    _one("upper bound inclusive", "change > config.ipo_mask_high", "change >= config.ipo_mask_high", TWO),
    _one("lower bound inclusive", "change < -config.ipo_mask_low", "change <= -config.ipo_mask_low", TWO),
    _one(
        "advantage's sign ignored",
        "torch.where(positive, too_high, too_low)",
        "too_high | too_low",
        ("dppo",),
    ),
    _one(
        "advantage's sign reversed",
        "where(positive, too_high, too_low)",
        "where(positive, too_low, too_high)",
        ("dppo",),
    ),
    _one("zero advantage counts as positive", "inputs.advantages > 0", "inputs.advantages >= 0", ("dppo",)),
    _one(
        "one-sided trust region",
        "torch.abs(_probability_change(inputs))",
        "_probability_change(inputs)",
        ("ipo",),
    ),
    _one("one-sided trust region", "outside = too_high | too_low", "outside = too_high", TWO),
    _one("default threshold ignored", "> config.ipo_threshold", "> 0.2", ("ipo",)),
    _one(
        "trust region on the ratio",
        "torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)",
        "torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs) - 1",
    ),
    _one("k1 for the squared KL", "return log_ratio**2", "return -log_ratio"),
    _one("k3 for the squared KL", "return log_ratio**2", "return ratio - log_ratio - 1"),
    _one("adv_tau ignored", "config.adv_tau * inputs.advantages", "inputs.advantages", count=3),
    _one("kl_tau ignored", "config.kl_tau * kl", "1e-3 * kl", count=2),
    _one("teacher_tau ignored", "config.teacher_tau * teacher_kl", "teacher_kl", TWO),
    _one("teacher term dropped", "advantages + config.teacher_tau * teacher_kl", "advantages", TWO),
    _one("teacher term not detached", "inputs.trainer_logprobs).detach()", "inputs.trainer_logprobs)", TWO),
    _one("ratio detached", "ratio = torch.exp(log_ratio)", "ratio = torch.exp(log_ratio.detach())"),
    _one(
        "ratio inverted",
        "inputs.trainer_logprobs - inputs.inference_logprobs\n",
        "inputs.inference_logprobs - inputs.trainer_logprobs\n",
    ),
    _one(
        "masks of the mismatch means swapped",
        '"unmasked_mismatch_kl": _Masked.mean(mismatch_kl, keep)',
        '"unmasked_mismatch_kl": _Masked.mean(mismatch_kl, mask)',
        count=3,
    ),
    _one(
        "share of all tokens, not of trained ones",
        "(flags & mask).sum() / torch.clamp_min(mask.sum(), 1)",
        "(flags & mask).sum() / mask.numel()",
    ),
    _one("a metric's name changed", '"is_masked":', '"is_clipped":', count=3),
    _one(
        "low and high shares swapped",
        '"is_masked_low": _Masked.share(negative & too_low, mask)',
        '"is_masked_low": _Masked.share(positive & too_high, mask)',
        ("dppo",),
    ),
    Mutant(
        "non-finite values left at masked positions",
        (Edit("clean = _zero_non_finite_masked(inputs)", "clean = inputs"),),
        module="plugin",
    ),
    Mutant(
        "log-probs alone zeroed at masked positions",
        (
            Edit("(inputs.advantages * torch.exp(log_ratio)).abs()", "0"),
            Edit("clean(inputs.advantages)", "inputs.advantages"),
        ),
        module="plugin",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Which families rejected a mutant of an objective; none: it survived."""

    mutant: str
    objective: Objective
    killed_by: tuple[str, ...]


def mutated_loss(mutant: Mutant) -> ComposerLoss:
    """``loss_fn`` with the mutant's edits, in modules of its own."""
    maths = _execute(objectives, mutant.edits if mutant.module == "objectives" else ())
    namespace = _execute(plugin, mutant.edits if mutant.module == "plugin" else ())
    namespace["policy_loss"] = maths["policy_loss"]
    loss: ComposerLoss = namespace["loss_fn"]
    return loss


def _execute(module: Any, edits: Iterable[Edit]) -> dict[str, Any]:
    source = inspect.getsource(module)
    for edit in edits:
        found = source.count(edit.old)
        if found != edit.count:
            raise ConfigError(
                f"a mutant's text must occur {edit.count} times in {module.__name__}; found {found} of "
                f"{edit.old!r}; update parity/mutants.py"
            )
        source = source.replace(edit.old, edit.new)
    # The real name, so that dataclasses find the module that their annotations belong to.
    namespace: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source, f"<mutant of {module.__name__}>", "exec"), namespace)
    return namespace


def newest_with(objective: Objective) -> Release:
    """The newest release that has ``objective``: it has every field that an older one has."""
    return [release for release in RELEASES if objective in release.targets][-1]


def verdicts(folder: Path = golden.FOLDER, chosen: Iterable[Mutant] | None = None) -> list[Verdict]:
    """Every mutant on every objective that it changes, against recorded vectors. The short samples of
    each family must be enough, so the long ones are left out."""
    recorded = {objective: golden.load(newest_with(objective), folder) for objective in ALL}
    samples = {
        name: [(case, build(case)) for case in cases(name, file.release.fields) if case.length <= SHORT]
        for name, file in recorded.items()
    }
    out: list[Verdict] = []
    for mutant in MUTANTS if chosen is None else chosen:
        loss = mutated_loss(mutant)
        for objective in mutant.objectives:
            rows = golden.run_one(recorded[objective], objective, loss, samples[objective])
            out.append(Verdict(mutant.name, objective, tuple(row.family for row in rows if row.differs)))
    return out
