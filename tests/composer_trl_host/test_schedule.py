from __future__ import annotations

import pytest

from composer_trl_host.schedule import lr_factor


def test_constant_is_one():
    factor = lr_factor("constant", max_steps=10, warmup_steps=5)
    assert [factor(step) for step in (0, 5, 9)] == [1.0, 1.0, 1.0]


def test_linear_rises_stays_and_falls_over_the_last_steps():
    factor = lr_factor("linear", max_steps=20, warmup_steps=4, decay_steps=5, min_factor=0.2)
    # By hand: 2/4 in the warm-up; 1 in the middle; with 2 of 5 decay steps left 0.2 + 0.8 * 2 / 5.
    assert factor(2) == 0.5
    assert factor(4) == factor(15) == 1.0
    assert factor(18) == pytest.approx(0.52)
    assert factor(20) == pytest.approx(0.2)


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum():
    factor = lr_factor("cosine", max_steps=14, warmup_steps=4, min_factor=0.1)
    assert factor(1) == 0.25
    assert factor(4) == 1.0
    assert factor(9) == pytest.approx(0.55)  # 0.1 + 0.9 / 2
    assert factor(14) == pytest.approx(0.1)
