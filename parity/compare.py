"""What a loss function gave, and how it differs from what it must give.

To the bit: the same dtype, shape and bytes, the sign of zero included, and the same metric names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.cases import Case, Inputs, tensor_bytes
from parity.tolerances import Scales, bound, metric_scale

LossCall = Callable[[Any], Any]
"""A per-sample loss: ``LossInputs`` of some release to ``LossOutputs``."""


@dataclass(frozen=True)
class Outcome:
    """A loss, its metrics and its gradient with respect to ``trainer_logprobs``, detached."""

    loss: Tensor
    metrics: dict[str, Tensor]
    gradient: Tensor


@dataclass
class Differences:
    """One sentence per difference, by quantity; all empty where there is none."""

    loss: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    gradient: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.loss or self.metrics or self.gradient)


def loss_inputs(inputs: Inputs, inputs_class: type[Any], fields: tuple[str, ...]) -> tuple[Any, Tensor]:
    """``inputs`` as the ``LossInputs`` of a release, and the leaf that takes the gradient."""
    leaf = inputs["trainer_logprobs"]
    assert leaf is not None
    leaf = leaf.clone().requires_grad_(True)
    streams: Inputs = {**inputs, "trainer_logprobs": leaf, "ref_logprobs": inputs["teacher_logprobs"]}
    return inputs_class(**{name: streams.get(name) for name in fields}), leaf


def outcome(call: LossCall, inputs: Inputs, inputs_class: type[Any], fields: tuple[str, ...]) -> Outcome:
    """Forward and backward of ``call`` on ``inputs``."""
    sample, leaf = loss_inputs(inputs, inputs_class, fields)
    result = call(sample)
    result.loss.backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return Outcome(
        result.loss.detach(), {name: value.detach() for name, value in result.metrics.items()}, gradient
    )


def differences(expected: Outcome, found: Outcome) -> Differences:
    """To the bit."""
    out = Differences(gradient=_bits("gradient", expected.gradient, found.gradient))
    out.loss = _bits("loss", expected.loss, found.loss)
    out.metrics = _names(expected, found)
    for name in expected.metrics.keys() & found.metrics.keys():
        out.metrics += _bits(name, expected.metrics[name], found.metrics[name])
    return out


def differences_in_ulps(expected: Outcome, found: Outcome, scales: Scales) -> Differences:
    """Within ``tolerances``; dtypes, shapes and names still exactly."""
    out = Differences(
        gradient=_near("gradient", "gradient", expected.gradient, found.gradient, scales.gradient)
    )
    out.loss = _near("loss", "loss", expected.loss, found.loss, scales.loss)
    out.metrics = _names(expected, found)
    for name in expected.metrics.keys() & found.metrics.keys():
        value = expected.metrics[name]
        out.metrics += _near("metric", name, value, found.metrics[name], metric_scale(value))
    return out


def _names(expected: Outcome, found: Outcome) -> list[str]:
    if list(expected.metrics) == list(found.metrics):
        return []
    return [f"metric names: expected {', '.join(expected.metrics)}; found {', '.join(found.metrics)}"]


def _form(name: str, expected: Tensor, found: Tensor) -> list[str]:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return [
            f"{name}: expected {expected.dtype} {tuple(expected.shape)}; "
            f"found {found.dtype} {tuple(found.shape)}"
        ]
    return []


def _bits(name: str, expected: Tensor, found: Tensor) -> list[str]:
    form = _form(name, expected, found)
    if form or tensor_bytes(expected) == tensor_bytes(found):
        return form
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    unequal = expected.contiguous().view(integers) != found.contiguous().view(integers)
    return [_say(name, expected, found, unequal)]


def _near(kind: str, name: str, expected: Tensor, found: Tensor, scale: Tensor) -> list[str]:
    form = _form(name, expected, found)
    if form:
        return form
    too_far = ~((expected.double() - found.double()).abs() <= bound(kind, expected.dtype, scale))
    return [_say(name, expected, found, too_far)] if bool(too_far.any()) else []


def _say(name: str, expected: Tensor, found: Tensor, unequal: Tensor) -> str:
    where = int(unequal.reshape(-1).nonzero()[0])
    at = f" at position {where} ({int(unequal.sum())} of {unequal.numel()} differ)" if expected.dim() else ""
    values = [float(side.reshape(-1)[where]) for side in (expected, found)]
    gap = f"signed difference {values[1] - values[0]:.3g}"
    return f"{name}{at}: expected {values[0]!r}; found {values[1]!r} ({gap})"


def case_note(case: Case, message: str) -> str:
    """``message`` with the case that it is about."""
    return f"{case.id}: {message}"


def to_hex(values: Tensor) -> str:
    """``values``' bytes in hexadecimal."""
    return tensor_bytes(values).hex()


def from_hex(text: str, dtype: torch.dtype) -> Tensor:
    """The 1-D tensor of ``to_hex``; raises ``ValueError`` for text that is not one."""
    raw = bytearray.fromhex(text)
    size = torch.empty((), dtype=dtype).element_size()
    if len(raw) % size:
        raise ValueError(f"{len(raw)} bytes are no whole number of {dtype} values")
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
