"""To the bit means to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parity.compare import Outcome, differences, differences_in_ulps, from_hex, to_hex
from parity.tolerances import ULPS, Scales

EPS = 2.0**-23


def outcome(loss: float = 1.0, gradient: Tensor | None = None, **metrics: float) -> Outcome:
    named = {name: torch.tensor(value) for name, value in (metrics or {"a": 0.5, "b": 0.25}).items()}
    return Outcome(torch.tensor(loss), named, torch.tensor([0.0, 2.0]) if gradient is None else gradient)


def test_equal_outcomes_have_no_difference() -> None:
    assert not differences(outcome(), outcome())


@pytest.mark.parametrize("nan", [float("nan")])
def test_equal_bytes_are_equal_even_for_nan(nan: float) -> None:
    assert not differences(outcome(loss=nan), outcome(loss=nan))


def test_the_sign_of_zero_counts() -> None:
    found = differences(outcome(), outcome(gradient=torch.tensor([-0.0, 2.0])))
    assert "gradient at position 0 (1 of 2 differ): expected 0.0; found -0.0" in found.gradient[0]
    assert not found.loss


def test_one_unit_in_the_last_place_counts() -> None:
    assert differences(outcome(), outcome(loss=1.0 + EPS)).loss


def test_a_dtype_counts() -> None:
    found = differences(outcome(), outcome(gradient=torch.tensor([0.0, 2.0], dtype=torch.float64)))
    assert found.gradient == ["gradient: expected torch.float32 (2,); found torch.float64 (2,)"]


def test_a_shape_counts() -> None:
    assert differences(outcome(), outcome(gradient=torch.tensor([[0.0, 2.0]]))).gradient


@pytest.mark.parametrize("metrics", [{"a": 0.5}, {"a": 0.5, "b": 0.25, "c": 0.0}, {"b": 0.25, "a": 0.5}])
def test_metric_names_and_their_order_count(metrics: dict[str, float]) -> None:
    assert "metric names: expected a, b" in differences(outcome(), outcome(**metrics)).metrics[0]


def test_a_metric_value_counts() -> None:
    assert differences(outcome(), outcome(a=0.5, b=0.25 + EPS)).metrics


def test_ulps_allow_what_the_table_states_and_no_more() -> None:
    bound = ULPS["loss"][torch.float32] * EPS
    scales = Scales(torch.tensor(1.0).double(), torch.ones(2).double())
    assert not differences_in_ulps(outcome(), outcome(loss=1.0 + bound), scales)
    assert differences_in_ulps(outcome(), outcome(loss=1.0 + 2 * bound), scales).loss
    assert differences_in_ulps(outcome(), outcome(loss=float("nan")), scales).loss
    assert differences_in_ulps(outcome(), outcome(a=0.5), scales).metrics


def test_every_bound_is_a_few_ulps() -> None:
    assert all(0 < value <= 4 for row in ULPS.values() for value in row.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_hexadecimal_keeps_every_bit(dtype: torch.dtype) -> None:
    values = torch.tensor([-0.0, 1.5, -3.0]).to(dtype)
    assert to_hex(from_hex(to_hex(values), dtype)) == to_hex(values)


def test_half_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        from_hex("000000", torch.float32)
