"""Channel 1 against plain loops in float64, numbers worked by hand, and the contract's clauses.

Byte parity with PRIME-RL is in tests/parity; ``dr_grpo`` has no counterpart there, so these loops
are its only reference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime_plugin.config import PolicyConfig
from composer_prime_plugin.contract import IpoForm
from composer_prime_plugin.objectives import PolicyInputs, PolicyLoss, kl_term, policy_loss

REL = 1e-12
"""float64 against a float64 loop: sums of at most 64 terms."""

CONFIGS: dict[str, dict[str, Any]] = {
    "dppo": {"objective": "dppo"},
    "dppo knobs": {
        "objective": "dppo",
        "dppo_mask_low": 0.05,
        "dppo_mask_high": 0.3,
        "adv_tau": 0.7,
        "kl_tau": 0.4,
    },
    "dppo k1": {"objective": "dppo", "kl_estimator": "k1", "kl_tau": 0.4},
    "ipo": {"objective": "ipo"},
    "ipo knobs": {"objective": "ipo", "ipo_threshold": 0.3, "adv_tau": 0.7, "kl_tau": 0.4},
    "ipo two": {"objective": "ipo", "ipo_mask_low": 0.05, "ipo_mask_high": 0.3, "teacher_tau": 0.6},
    "ipo two k3": {"objective": "ipo", "ipo_mask_high": 0.3, "kl_estimator": "k3", "kl_tau": 0.4},
    "dr_grpo": {"objective": "dr_grpo"},
    "dr_grpo knobs": {"objective": "dr_grpo", "kl_tau": 0.4},
    "dr_grpo squared": {"objective": "dr_grpo", "kl_tau": 0.4, "kl_estimator": "squared"},
    "dr_grpo k3": {"objective": "dr_grpo", "kl_tau": 0.4, "kl_estimator": "k3"},
}


def number(value: Tensor) -> float:
    """``float`` of a tensor that may carry gradient, without torch's warning."""
    return float(value.detach())


def sample(n: int = 48, seed: int = 0, dtype: torch.dtype = torch.float64) -> PolicyInputs:
    random = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(n, generator=random, dtype=torch.float64)

    inference = -3.0 * draw()
    return PolicyInputs(
        trainer_logprobs=(inference + 1.6 * (draw() - 0.5)).clamp(max=0).to(dtype).requires_grad_(True),
        inference_logprobs=inference.to(dtype),
        advantages=(2.0 * draw() - 1.0).masked_fill(draw() < 0.1, 0.0).to(dtype),
        loss_mask=draw() < 0.8,
        loss_weights=(2.0 * draw()).to(dtype),
        teacher_logprobs=(-2.0 * draw()).to(dtype),
    )


def run(
    inputs: PolicyInputs, form: IpoForm = "one_threshold", with_kl: bool = False, **knobs: Any
) -> PolicyLoss:
    return policy_loss(inputs, PolicyConfig(**knobs), form, with_kl)


def grad(inputs: PolicyInputs, **knobs: Any) -> Tensor:
    leaf = inputs.trainer_logprobs.detach().clone().requires_grad_(True)
    run(replace(inputs, trainer_logprobs=leaf), **knobs).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def loop(inputs: PolicyInputs, config: PolicyConfig) -> tuple[float, list[float], float]:
    """Loss, gradient and KL sum, token by token, from the table of docs and docstrings."""
    loss, kl_sum, gradient = 0.0, 0.0, []
    estimator = config.kl_estimator or ("k1" if config.objective == "dr_grpo" else "squared")
    for t in range(inputs.trainer_logprobs.numel()):
        trainer, sampling = number(inputs.trainer_logprobs[t]), number(inputs.inference_logprobs[t])
        advantage = number(inputs.advantages[t])
        weight = 1.0 if inputs.loss_weights is None else number(inputs.loss_weights[t])
        if not bool(inputs.loss_mask[t]):
            gradient.append(0.0)
            continue
        log_r = trainer - sampling
        r = math.exp(log_r)
        change = math.exp(trainer) - math.exp(sampling)
        keep = 1.0
        if config.objective == "dppo":
            dropped = change > config.dppo_mask_high if advantage > 0 else change < -config.dppo_mask_low
            keep = 0.0 if dropped else 1.0
        elif config.objective == "ipo" and config.ipo_form == "two_thresholds":
            keep = 1.0 if -config.ipo_mask_low <= change <= config.ipo_mask_high else 0.0
        elif config.objective == "ipo":
            keep = 1.0 if abs(change) <= config.ipo_threshold else 0.0
        a = advantage if config.objective == "dr_grpo" else config.adv_tau * advantage
        if config.ipo_form == "two_thresholds" and inputs.teacher_logprobs is not None:
            a += config.teacher_tau * (number(inputs.teacher_logprobs[t]) - trainer)
        kl, slope = {
            "k1": (-log_r, -1.0),
            "squared": (log_r**2, 2.0 * log_r),
            "k3": (r - 1.0 - log_r, r - 1.0),
        }[estimator]
        loss += weight * (-keep * a * r + config.kl_tau * kl)
        kl_sum += weight * kl
        gradient.append(weight * (-keep * a * r + config.kl_tau * slope))
    return loss, gradient, kl_sum


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_gradient_and_kl_equal_a_plain_loop(name: str, weighted: bool) -> None:
    for seed in range(3):
        inputs = sample(seed=seed)
        inputs = inputs if weighted else replace(inputs, loss_weights=None)
        loss, gradient, kl = loop(inputs, PolicyConfig(**CONFIGS[name]))
        result = run(inputs, with_kl=True, **CONFIGS[name])
        assert number(result.loss) == pytest.approx(loss, rel=REL)
        assert result.kl is not None
        assert number(result.kl) == pytest.approx(kl, rel=REL)
        assert grad(inputs, **CONFIGS[name]).tolist() == pytest.approx(gradient, rel=REL, abs=1e-15)


def by_hand() -> PolicyInputs:
    """Two tokens: p = 1/2 from q = 1/4 (r = 2), and p = 1/4 from q = 1/2 (r = 1/2)."""
    return PolicyInputs(
        trainer_logprobs=torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64)).requires_grad_(True),
        inference_logprobs=torch.log(torch.tensor([0.25, 0.5], dtype=torch.float64)),
        advantages=torch.tensor([1.0, -2.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True]),
    )


def test_dppo_by_hand() -> None:
    # Probability changes +1/4 (A > 0) and -1/4 (A < 0).
    # Bounds 0.3: both train. -(1)(2) - (-2)(1/2) = -2 + 1 = -1.
    inside = {"objective": "dppo", "dppo_mask_low": 0.3, "dppo_mask_high": 0.3, "kl_tau": 0.0}
    assert number(run(by_hand(), **inside).loss) == pytest.approx(-1.0, rel=REL)
    # Bound 0.2 above: the first token, which rises with A > 0, is dropped: 0 + 1 = 1.
    high = {**inside, "dppo_mask_high": 0.2}
    assert number(run(by_hand(), **high).loss) == pytest.approx(1.0, rel=REL)
    # Bound 0.2 below: the second token, which falls with A < 0, is dropped: -2.
    low = {**inside, "dppo_mask_low": 0.2}
    assert number(run(by_hand(), **low).loss) == pytest.approx(-2.0, rel=REL)
    # Bounds 0.2 and signs reversed: a rise with A < 0 and a fall with A > 0 both train: 2 - 1 = 1.
    other_signs = replace(by_hand(), advantages=torch.tensor([-1.0, 2.0], dtype=torch.float64))
    outside = {**inside, "dppo_mask_low": 0.2, "dppo_mask_high": 0.2}
    assert number(run(other_signs, **outside).loss) == pytest.approx(1.0, rel=REL)
    # The KL term is not under the trust region: 2 tokens, each (ln 2)**2, times 0.5: (ln 2)**2.
    kl_alone = {**outside, "kl_tau": 0.5}
    assert number(run(by_hand(), **kl_alone).loss) == pytest.approx(math.log(2) ** 2, rel=REL)


def test_dppo_metrics_by_hand() -> None:
    # Bound 0.2 above, 0.3 below: the first of two tokens is dropped.
    metrics = run(by_hand(), objective="dppo", dppo_mask_high=0.2, dppo_mask_low=0.3).metrics
    # k3 of the dropped token: 2 - ln 2 - 1; of the kept one: 1/2 + ln 2 - 1.
    expected = {
        "masked_mismatch_kl": 1 - math.log(2),
        "unmasked_mismatch_kl": math.log(2) - 0.5,
        "is_masked": 0.5,
        "is_masked_low": 0.0,
        "is_masked_high": 0.5,
        "masked_advantage_positive": 1.0,
        "masked_advantage_negative": 0.0,
    }
    assert {name: number(value) for name, value in metrics.items()} == pytest.approx(expected, rel=1e-6)


def test_ipo_ignores_the_advantages_sign() -> None:
    # One bound: both change by 1/4. At 0.3 both train: -2 + 1; at 0.2 none does.
    knobs = {"objective": "ipo", "kl_tau": 0.0}
    assert number(run(by_hand(), ipo_threshold=0.3, **knobs).loss) == pytest.approx(-1.0, rel=REL)
    assert number(run(by_hand(), ipo_threshold=0.2, **knobs).loss) == 0.0
    # Two bounds: only the fall is outside, then only the rise.
    assert number(run(by_hand(), ipo_mask_low=0.2, ipo_mask_high=0.3, **knobs).loss) == pytest.approx(-2.0)
    assert number(run(by_hand(), ipo_mask_low=0.3, ipo_mask_high=0.2, **knobs).loss) == pytest.approx(1.0)


def test_the_teacher_term_is_added_to_the_advantage_and_carries_no_gradient() -> None:
    # teacher - trainer = ln(1/4) - ln(1/2) = -ln 2 on the first token: A = 1 - ln 2, loss and slope -A * 2.
    inputs = replace(by_hand(), teacher_logprobs=torch.log(torch.tensor([0.25, 0.25], dtype=torch.float64)))
    knobs = {"objective": "ipo", "ipo_mask_high": 1.0, "ipo_mask_low": 1.0, "teacher_tau": 1.0, "kl_tau": 0.0}
    first = -(1 - math.log(2)) * 2
    assert number(run(inputs, **knobs).loss) == pytest.approx(first + 1.0, rel=REL)
    assert grad(inputs, **knobs).tolist() == pytest.approx([first, 1.0], rel=REL)


def test_dr_grpo_by_hand() -> None:
    # No bound: -2 + 1; k1 is -ln 2 and +ln 2, so the KL terms cancel in value, not in gradient.
    assert number(run(by_hand(), objective="dr_grpo", kl_tau=0.1).loss) == pytest.approx(-1.0, rel=REL)
    assert grad(by_hand(), objective="dr_grpo", kl_tau=0.1).tolist() == pytest.approx([-2.1, 0.9], rel=REL)
    # No factor on the advantage, and no 1/length: the same tokens twice give twice the loss.
    twice = PolicyInputs(
        *(torch.cat([x, x]) for x in (by_hand().trainer_logprobs, by_hand().inference_logprobs)),
        advantages=by_hand().advantages.repeat(2),
        loss_mask=by_hand().loss_mask.repeat(2),
    )
    assert number(run(twice, objective="dr_grpo", kl_tau=0.0, adv_tau=9.0).loss) == pytest.approx(
        -2.0, rel=REL
    )


def test_kl_estimators_by_hand() -> None:
    # r = 2: -ln 2, (ln 2)**2, 2 - 1 - ln 2.
    log_r = torch.tensor([math.log(2)], dtype=torch.float64)
    found = [number(kl_term(log_r, log_r.exp(), name)) for name in ("k1", "squared", "k3")]
    assert found == pytest.approx([-math.log(2), math.log(2) ** 2, 1 - math.log(2)], rel=REL)


def test_the_defaults_of_the_estimators() -> None:
    found = {name: PolicyConfig(objective=name).resolved_kl_estimator for name in ("dppo", "ipo", "dr_grpo")}
    assert found == {"dppo": "squared", "ipo": "squared", "dr_grpo": "k1"}


def test_k1_on_policy_adds_a_constant_slope_and_no_value() -> None:
    """Its expected gradient at r = 1 is zero; on a sample it is -kl_tau * w on every trained token."""
    inputs = sample()
    equal = replace(
        inputs,
        trainer_logprobs=inputs.inference_logprobs,
        advantages=torch.zeros_like(inputs.advantages),
        loss_weights=None,
    )
    gradient = grad(equal, objective="dr_grpo", kl_tau=0.25)
    assert number(run(equal, objective="dr_grpo", kl_tau=0.25).loss) == 0.0
    assert set(gradient[equal.loss_mask].tolist()) == {-0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_masked_tokens_have_exactly_zero_gradient(name: str, dtype: torch.dtype) -> None:
    inputs = sample(dtype=dtype)
    gradient = grad(inputs, **CONFIGS[name])
    assert gradient.dtype == dtype
    assert bool((gradient[~inputs.loss_mask] == 0).all())
    assert bool((gradient[inputs.loss_mask] != 0).any())


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_tokens_do_not_matter(name: str) -> None:
    inputs = sample()
    other = sample(seed=9)
    mask = inputs.loss_mask

    def mix(mine: Tensor, theirs: Tensor) -> Tensor:
        return torch.where(mask, mine.detach(), theirs.detach())

    mixed = PolicyInputs(
        trainer_logprobs=mix(inputs.trainer_logprobs, other.trainer_logprobs),
        inference_logprobs=mix(inputs.inference_logprobs, other.inference_logprobs),
        advantages=mix(inputs.advantages, other.advantages),
        loss_mask=mask,
        loss_weights=mix(inputs.loss_weights, other.loss_weights),
        teacher_logprobs=mix(inputs.teacher_logprobs, other.teacher_logprobs),
    )
    first, second = run(inputs, **CONFIGS[name]), run(mixed, **CONFIGS[name])
    assert number(first.loss) == number(second.loss)
    assert {k: number(v) for k, v in first.metrics.items()} == {
        k: number(v) for k, v in second.metrics.items()
    }
    assert torch.equal(grad(inputs, **CONFIGS[name])[mask], grad(mixed, **CONFIGS[name])[mask])


@pytest.mark.parametrize("name", CONFIGS)
def test_an_all_masked_sample_backpropagates_exact_zeros(name: str) -> None:
    inputs = replace(sample(), loss_mask=torch.zeros(48, dtype=torch.bool))
    result = run(inputs, with_kl=True, **CONFIGS[name])
    assert number(result.loss) == 0.0
    assert result.loss.requires_grad
    assert grad(inputs, **CONFIGS[name]).tolist() == [0.0] * 48
    assert all(number(value) == 0.0 for value in result.metrics.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_scale_the_loss_linearly_and_leave_the_metrics(name: str) -> None:
    inputs = sample()
    doubled = replace(inputs, loss_weights=2.0 * inputs.loss_weights)
    first, second = run(inputs, **CONFIGS[name]), run(doubled, **CONFIGS[name])
    assert number(second.loss) == 2.0 * number(first.loss)
    assert torch.equal(grad(doubled, **CONFIGS[name]), 2.0 * grad(inputs, **CONFIGS[name]))
    assert {k: number(v) for k, v in first.metrics.items()} == {
        k: number(v) for k, v in second.metrics.items()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_sample_is_the_sum_of_its_parts(name: str) -> None:
    one, two = sample(n=20, seed=1), sample(n=31, seed=2)
    packed = PolicyInputs(
        **{
            key: torch.cat([getattr(one, key), getattr(two, key)])
            for key in PolicyInputs.__dataclass_fields__
        }
    )
    parts = number(run(one, **CONFIGS[name]).loss) + number(run(two, **CONFIGS[name]).loss)
    assert number(run(packed, **CONFIGS[name]).loss) == pytest.approx(parts, rel=REL)


@pytest.mark.parametrize("name", CONFIGS)
def test_metrics_are_detached_scalars_with_the_same_keys_on_every_call(name: str) -> None:
    full, empty = sample(), replace(sample(), loss_mask=torch.zeros(48, dtype=torch.bool))
    first, second = run(full, **CONFIGS[name]), run(empty, **CONFIGS[name])
    assert first.loss.dim() == 0
    assert list(first.metrics) == list(second.metrics)
    for value in (*first.metrics.values(), *second.metrics.values()):
        assert value.dim() == 0
        assert not value.requires_grad


def test_knobs_of_an_ipo_form_decide_before_the_contract_does() -> None:
    inputs = replace(by_hand(), teacher_logprobs=torch.zeros(2, dtype=torch.float64))
    two = run(inputs, form="two_thresholds", objective="ipo")
    assert "teacher_kl" in two.metrics
    assert "teacher_kl" not in run(inputs, form="two_thresholds", objective="ipo", ipo_threshold=0.1).metrics
    assert "teacher_kl" in run(inputs, form="one_threshold", objective="ipo", teacher_tau=0.0).metrics
    assert "teacher_kl" not in run(inputs, form="one_threshold", objective="ipo").metrics


def test_the_loss_gradient_passes_gradcheck() -> None:
    """Inside one side of every threshold, where the loss is smooth."""
    inputs = by_hand()
    for knobs in (
        {"objective": "dppo"},
        {"objective": "ipo", "ipo_threshold": 0.3},
        {"objective": "dr_grpo"},
    ):
        assert torch.autograd.gradcheck(
            lambda leaf, knobs=knobs: run(replace(inputs, trainer_logprobs=leaf), **knobs).loss,
            (inputs.trainer_logprobs,),
        )
