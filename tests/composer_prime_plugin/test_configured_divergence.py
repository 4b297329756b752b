"""What ``configured_divergence`` makes of the table, by hand on two positions and three entries."""

from __future__ import annotations

import math

import pytest
import torch

from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.divergence import configured_divergence

STUDENT = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -1.0]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 0.0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([0.2, 1.5], dtype=torch.float64)


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(x / temperature) for x in row]
    return [power / sum(powers) for power in powers]


def reverse_kl(position: int) -> float:
    p, q = softmax(STUDENT[position].tolist()), softmax(TEACHER[position].tolist())
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_every_position_is_scaled_by_its_own_ratio_up_to_the_cap():
    sdpo = SDPOConfig(weight=1.0, jsd_beta=1.0, importance_cap=2.0)
    found = configured_divergence(STUDENT, TEACHER, sdpo, log_ratio=LOG_RATIO).values.tolist()
    # exp(0.2) is 1.22; exp(1.5) is 4.48, above the cap of 2.
    assert found == pytest.approx([math.exp(0.2) * reverse_kl(0), 2.0 * reverse_kl(1)], rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_sampled_estimator_reads_both_sides_at_the_temperature(temperature):
    sdpo = SDPOConfig(weight=1.0, jsd_beta=1.0, estimator="sampled", temperature=temperature)
    tokens = torch.tensor([2, 0])
    found = configured_divergence(STUDENT, TEACHER, sdpo, tokens=tokens).values.tolist()
    wanted = [
        math.log(
            softmax(STUDENT[n].tolist(), temperature)[token]
            / softmax(TEACHER[n].tolist(), temperature)[token]
        )
        for n, token in enumerate(tokens.tolist())
    ]
    assert found == pytest.approx(wanted, rel=1e-12)
