"""The inputs that parity is shown on, by family.

Inputs are made from a seed with integer bytes and IEEE additions, multiplications and comparisons
alone (no ``log``, no normal variates), so that they are the same bits on every machine. Tokens whose
probability change comes near a threshold are put on policy, except in the ``boundary`` family, which
sits exactly on one: a last-bit difference in ``exp`` between processors then flips no token.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from composer_prime_plugin.config import PolicyConfig
from parity.releases import Objective

Inputs = dict[str, Tensor | None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHORT, LONG, LONGEST = 29, 1023, 32768
NEAR_THRESHOLD = {"float32": 1e-4, "bfloat16": 0.02}
"""How near to a threshold a probability change may come: many times ``exp``'s last bit in that dtype."""

MASKED_NON_FINITE = "masked non-finite"
"""The one family in which PRIME-RL and this product differ on purpose."""

FAMILIES = (
    "random",
    "on-policy",
    "far ratios",
    "advantages",
    "masks",
    "lengths",
    "loss weights",
    "teacher or ref",
    "knobs",
    "boundary",
    MASKED_NON_FINITE,
)

Ratios = Literal["random", "on-policy", "far", "boundary"]
Advantages = Literal["mixed", "positive", "negative", "zero"]
Mask = Literal["random", "empty", "full", "sparse"]
Weights = Literal["ones", "zeros", "mixed"]


@dataclass(frozen=True)
class Case:
    """One sample and one configuration. ``knobs`` are keys of ``[trainer.loss.kwargs.policy]``;
    ``poison`` is a stream and the non-finite value that it holds at masked positions."""

    family: str
    objective: Objective
    name: str
    length: int = SHORT
    dtype: str = "float32"
    ratios: Ratios = "random"
    advantages: Advantages = "mixed"
    mask: Mask = "random"
    weights: Weights | None = None
    teacher: bool = False
    knobs: dict[str, float] = field(default_factory=dict)
    poison: tuple[str, float] | None = None

    @property
    def id(self) -> str:
        """The case's name in golden files and messages; also the seed of its inputs."""
        return f"{self.objective}/{self.family}/{self.name}/{self.length}/{self.dtype}"

    @property
    def kwargs(self) -> dict[str, Any]:
        """``[trainer.loss.kwargs]`` of the case."""
        return {"policy": {"objective": self.objective.removesuffix("-two"), **self.knobs}}

    @property
    def policy(self) -> PolicyConfig:
        """The knobs with their defaults, as the objective sees them."""
        return PolicyConfig(**self.kwargs["policy"])


_KNOBS: dict[Objective, tuple[dict[str, float], ...]] = {
    "dppo": (
        {"dppo_mask_low": 0.05},
        {"dppo_mask_high": 0.05},
        {"adv_tau": 0.5},
        {"kl_tau": 0.25},
        {"dppo_mask_low": 0.03, "dppo_mask_high": 0.4, "adv_tau": 1.7, "kl_tau": 0.0},
        {"adv_tau": 0.0, "kl_tau": 0.3},
    ),
    "ipo": (
        {"ipo_threshold": 0.03},
        {"adv_tau": 0.5},
        {"kl_tau": 0.25},
        {"ipo_threshold": 0.4, "adv_tau": 1.7, "kl_tau": 0.0},
        {"adv_tau": 0.0, "kl_tau": 0.3},
    ),
    "ipo-two": (
        {"ipo_mask_low": 0.05},
        {"ipo_mask_high": 0.05},
        {"teacher_tau": 0.7},
        {"adv_tau": 0.5},
        {"kl_tau": 0.25},
        {"ipo_mask_low": 0.03, "ipo_mask_high": 0.4, "teacher_tau": 0.3, "adv_tau": 1.7, "kl_tau": 0.0},
        {"adv_tau": 0.0, "teacher_tau": 0.9, "kl_tau": 0.3},
    ),
}

_THRESHOLDS: dict[Objective, tuple[str, ...]] = {
    "dppo": ("dppo_mask_low", "dppo_mask_high"),
    "ipo": ("ipo_threshold",),
    "ipo-two": ("ipo_mask_low", "ipo_mask_high"),
}

_NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def cases(objective: Objective, fields: tuple[str, ...]) -> Iterator[Case]:
    """Every case of ``objective`` for a release whose ``LossInputs`` has ``fields``."""
    for dtype in DTYPES:
        for case in _float32_cases(objective, "loss_weights" in fields):
            yield replace(case, dtype=dtype)


def _float32_cases(objective: Objective, weighted: bool) -> Iterator[Case]:
    def case(family: str, name: str, **options: Any) -> Case:
        return Case(family=family, objective=objective, name=name, **options)

    for length in (SHORT, LONG):
        for seed in range(3):
            yield case("random", f"seed {seed}", length=length)
        yield case("on-policy", "equal", length=length, ratios="on-policy")
        yield case("far ratios", "mixed", length=length, ratios="far")
        for sign in ("mixed", "positive", "negative", "zero"):
            yield case("advantages", sign, length=length, advantages=sign)
        for mask in ("empty", "full", "sparse"):
            yield case("masks", mask, length=length, mask=mask)
        yield case("loss weights", "absent", length=length)
        for weights in ("ones", "zeros", "mixed") if weighted else ():
            yield case("loss weights", weights, length=length, weights=weights)
        for present in (False, True):
            yield case("teacher or ref", "present" if present else "absent", length=length, teacher=present)
        for number, knobs in enumerate(_KNOBS[objective]):
            name = next(iter(knobs)) if len(knobs) == 1 else f"several {number}"
            yield case("knobs", name, length=length, knobs=knobs, teacher="teacher_tau" in knobs)
    for length in (1, 7, LONG, LONGEST):
        yield case(
            "lengths", "masked at random" if length > 1 else "one token", length=length, mask=_mask(length)
        )
    # A probability change of exactly +-1 in either dtype (exp(-20) is below half of 1's last bit), and
    # of exactly 0.
    thresholds = _THRESHOLDS[objective]
    yield case(
        "boundary", "change of one", ratios="boundary", mask="full", knobs=dict.fromkeys(thresholds, 1.0)
    )
    yield case("boundary", "no change", ratios="on-policy", mask="full", knobs=dict.fromkeys(thresholds, 0.0))
    streams = ["trainer_logprobs", "inference_logprobs", "advantages"]
    streams += ["teacher_logprobs"] if objective == "ipo-two" else []
    for stream in streams + (["loss_weights"] if weighted else []):
        for value_name, value in _NON_FINITE.items():
            yield case(
                MASKED_NON_FINITE,
                f"{stream} {value_name}",
                teacher=stream == "teacher_logprobs",
                weights="mixed" if weighted else None,
                knobs={"teacher_tau": 0.7} if stream == "teacher_logprobs" else {},
                poison=(stream, value),
            )


def _mask(length: int) -> Mask:
    return "full" if length == 1 else "random"


def build(case: Case) -> Inputs:
    """The sample of ``case``, on the CPU. ``teacher_logprobs`` stands for a release's teacher or
    reference stream. Poisoned positions are in; see ``zeroed``."""
    draw = _Draw(case.id)
    n = case.length
    inference = -8.0 * draw.uniform(n) * draw.uniform(n)
    shift = draw.uniform(n) + draw.uniform(n) + draw.uniform(n) - 1.5
    if case.ratios == "far":
        # Log-ratios of up to +-20 nats, far outside every trust region, with exp still finite.
        trainer = torch.where(draw.uniform(n) < 0.5, inference - 20.0 * draw.uniform(n), -draw.uniform(n))
        inference = torch.where(trainer > -1.0, -20.0 * draw.uniform(n), inference)
    elif case.ratios == "boundary":
        up = draw.uniform(n) < 0.5
        trainer = torch.where(up, 0.0, -20.0)
        inference = torch.where(up, -20.0, 0.0)
    else:
        trainer = torch.clamp(inference + (0.0 if case.ratios == "on-policy" else 0.8) * shift, max=0.0)
    signs = {"mixed": 4.0, "positive": 2.0, "negative": -2.0, "zero": 0.0}
    offset = 0.5 if case.advantages == "mixed" else 0.0
    advantages = signs[case.advantages] * (draw.uniform(n) - offset)
    if case.advantages == "mixed":
        advantages = torch.where(draw.uniform(n) < 0.1, 0.0, advantages)
    share = {"random": 0.7, "empty": 0.0, "full": 1.0, "sparse": 0.05}[case.mask]
    loss_mask = draw.uniform(n) < share
    mixed_weights = torch.where(draw.uniform(n) < 0.2, 0.0, 3.0 * draw.uniform(n))
    weights = {None: None, "ones": torch.ones(n), "zeros": torch.zeros(n), "mixed": mixed_weights}[
        case.weights
    ]
    teacher = -6.0 * draw.uniform(n)
    dtype = DTYPES[case.dtype]
    inputs: Inputs = {
        "trainer_logprobs": trainer.to(dtype),
        "inference_logprobs": inference.to(dtype),
        "advantages": advantages.to(dtype),
        "loss_mask": loss_mask,
        "loss_weights": None if weights is None else weights.to(dtype),
        "teacher_logprobs": teacher.to(dtype) if case.teacher else None,
    }
    if case.ratios in ("random", "far"):
        _keep_off_thresholds(inputs, case)
    if case.poison is not None:
        stream = inputs[case.poison[0]]
        assert stream is not None
        inputs[case.poison[0]] = torch.where(loss_mask, stream, torch.tensor(case.poison[1], dtype=dtype))
    return inputs


def zeroed(case: Case, inputs: Inputs) -> Inputs:
    """``inputs`` with zeros in every stream at the poisoned (masked) positions of ``case``."""
    if case.poison is None:
        return inputs
    mask = inputs["loss_mask"]
    assert mask is not None
    return {
        name: stream
        if stream is None or name == "loss_mask"
        else torch.where(mask, stream, torch.zeros((), dtype=stream.dtype))
        for name, stream in inputs.items()
    }


def digest(inputs: Inputs) -> str:
    """16 hex digits over every stream's name, dtype and bytes: input generation must not drift."""
    hashed = hashlib.sha256()
    for name, stream in sorted(inputs.items()):
        hashed.update(f"{name}:{None if stream is None else stream.dtype}".encode())
        if stream is not None:
            hashed.update(tensor_bytes(stream))
    return hashed.hexdigest()[:16]


def tensor_bytes(values: Tensor) -> bytes:
    """The bytes of ``values`` on the CPU (without numpy, which torch does not require)."""
    flat = values.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def _keep_off_thresholds(inputs: Inputs, case: Case) -> None:
    """Put tokens on policy whose probability change is near a threshold of ``case``."""
    trainer, inference = inputs["trainer_logprobs"], inputs["inference_logprobs"]
    assert trainer is not None
    assert inference is not None
    change = (torch.exp(trainer.double()) - torch.exp(inference.double())).abs()
    near = torch.zeros_like(change, dtype=torch.bool)
    for name in _THRESHOLDS[case.objective]:
        near |= (change - getattr(case.policy, name)).abs() < NEAR_THRESHOLD[case.dtype]
    inputs["trainer_logprobs"] = torch.where(near, inference, trainer)


class _Draw:
    """Uniform variates in [0, 1), 24 bits each, exact in float32."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def uniform(self, count: int) -> Tensor:
        words = torch.frombuffer(bytearray(self._random.randbytes(4 * count)), dtype=torch.int32)
        return (words & 0xFFFFFF).to(torch.float32) / float(1 << 24)
