"""A PRIME-RL that hands logits to its custom loss, simulated: its own ``LossInputs`` with the fields that
docs/upstream.md asks for, through its own ``compute_loss``."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.test_through_prime_rl import SCALE, builder, custom, modules, pytestmark

pytestmark = pytestmark  # skipped without prime_rl, as there

VOCABULARY = 13
LENGTHS = (9, 4, 16)
WEIGHT = 0.7


@dataclasses.dataclass
class Sample:
    student: Tensor
    teacher: Tensor
    tokens: Tensor
    inference: Tensor
    advantages: Tensor
    mask: Tensor
    errors: Tensor

    @property
    def logprobs(self) -> Tensor:
        return torch.log_softmax(self.student, dim=-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        student = normal(length, VOCABULARY).requires_grad_()
        # Close to on-policy, so that no token is masked by the trust region.
        with torch.no_grad():
            own = torch.log_softmax(student, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        mask = torch.rand(length, generator=generator) < 0.8
        errors = (
            mask & (torch.rand(length, generator=generator) < 0.5) if number != 1 else torch.zeros_like(mask)
        )
        made.append(
            Sample(
                student,
                normal(length, VOCABULARY),
                tokens,
                own + 0.01 * normal(length),
                normal(length),
                mask,
                errors,
            )
        )
    return made


def through_compute_loss(loss: Any, loss_fn: Any, batch: list[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    streams = {
        "trainer_logprobs": [sample.logprobs for sample in batch],
        "inference_logprobs": [sample.inference for sample in batch],
        "advantages": [sample.advantages for sample in batch],
        "loss_mask": [sample.mask for sample in batch],
        "loss_scale": SCALE,
        "rl_scale": SCALE,
        "ce_scale": 1,
        "ref_kl_scale": 1,
        **dict.fromkeys(("loss_fn", "loss_fns", "rl_loss_fn"), loss_fn),
    }
    parameters = inspect.signature(loss.compute_loss).parameters
    return loss.compute_loss(
        **{
            name: streams.get(name)
            for name, parameter in parameters.items()
            if name in streams or parameter.default is inspect.Parameter.empty
        }
    )


def plain_divergence(sample: Sample) -> tuple[float, Tensor]:
    """The Jensen-Shannon divergence (beta 0.5) of the error tokens in float64, entry by entry, and its gradient."""
    student = sample.student.detach().double().requires_grad_()
    p, q = torch.softmax(student, dim=-1), torch.softmax(sample.teacher.double(), dim=-1)
    total = student.sum() * 0.0
    for position in sample.errors.nonzero().flatten().tolist():
        for entry in range(VOCABULARY):
            a, b = p[position, entry], q[position, entry]
            middle = (a + b) / 2
            total = total + 0.5 * b * torch.log(b / middle) + 0.5 * a * torch.log(a / middle)
    total.backward()
    return float(total.detach()), student.grad


def test_channel_two_runs_through_prime_rl_s_own_compute_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, configs = modules()
    batch = samples()
    waiting = list(batch)

    @dataclasses.dataclass
    class Extended(loss.LossInputs):
        trainer_logits: Tensor | None = None
        teacher_logits: Tensor | None = None
        sdpo_mask: Tensor | None = None
        step: int = 0

        def __post_init__(self) -> None:
            sample = waiting.pop(0)
            self.trainer_logits, self.teacher_logits = sample.student, sample.teacher
            self.sdpo_mask = sample.errors

    config = custom(configs, objective="dr_grpo")
    reference = samples()
    alone, _ = through_compute_loss(loss, builder(loss)(config), reference)
    config.kwargs["sdpo"] = {"weight": WEIGHT}
    monkeypatch.setattr(loss, "LossInputs", Extended)
    total, metrics = through_compute_loss(loss, builder(loss)(config), batch)
    total.backward()
    assert waiting == []

    wanted = [plain_divergence(sample) for sample in batch]
    expected = float(alone.detach()) + WEIGHT * sum(value for value, _ in wanted) / SCALE
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
    assert sum(sample.errors.sum() for sample in batch) == metrics["sdpo/error_tokens"].sum() > 0
    alone.backward()
    for sample, other, (_, gradient) in zip(batch, reference, wanted, strict=True):
        both = other.student.grad.double() + WEIGHT * gradient / SCALE
        torch.testing.assert_close(sample.student.grad.double(), both, rtol=1e-4, atol=1e-7)
