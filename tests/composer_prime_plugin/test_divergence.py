"""The generalized Jensen-Shannon divergence against plain loops in float64 and numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime_plugin.divergence import generalized_jsd_loss, token_divergence
from composer_prime_plugin.errors import LossInputError

BETAS = (0.0, 0.3, 0.5, 1.0)
REL = 1e-9


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=random, dtype=torch.float64)).to(dtype)


def number(value: Tensor) -> float:
    """``float`` of a tensor that may carry gradient, without torch's warning."""
    return float(value.detach())


def probabilities(row: list[float], temperature: float) -> list[float]:
    top = max(row)
    weights = [math.exp((value - top) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def entries(student: list[float], teacher: list[float], beta: float, temperature: float = 1.0) -> list[float]:
    """Each vocabulary entry's contribution to one position, by the definition."""
    p, q = probabilities(student, temperature), probabilities(teacher, temperature)
    out = []
    for a, b in zip(p, q, strict=True):
        if beta == 0.0:
            out.append(b * math.log(b / a))
        elif beta == 1.0:
            out.append(a * math.log(a / b))
        else:
            mixed = (1 - beta) * a + beta * b
            out.append(beta * b * math.log(b / mixed) + (1 - beta) * a * math.log(a / mixed))
    return out


def of(*weights: float) -> Tensor:
    """Logits of the distribution with these weights."""
    return torch.log(torch.tensor([weights], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_equal_inputs_give_exactly_zero(beta: float, dtype: torch.dtype) -> None:
    student = logits(5, 17, dtype=dtype).requires_grad_(True)
    loss = generalized_jsd_loss(student, student.detach().clone(), beta=beta, reduction="none")
    assert loss.tolist() == [0.0] * 5
    loss.sum().backward()
    assert student.grad is not None
    assert float(student.grad.abs().max()) <= 1e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_every_beta_equals_a_plain_loop(beta: float, temperature: float) -> None:
    student, teacher = logits(4, 11, seed=1), logits(4, 11, seed=2)
    found = generalized_jsd_loss(student, teacher, beta=beta, temperature=temperature, reduction="none")
    rows = zip(student.tolist(), teacher.tolist(), strict=True)
    assert found.tolist() == pytest.approx([sum(entries(s, t, beta, temperature)) for s, t in rows], rel=REL)
    assert float(found.min()) > 0


def test_the_end_points_by_hand() -> None:
    # student (1/2, 1/2), teacher (3/4, 1/4):
    # KL(teacher || student) = 3/4 ln(3/2) + 1/4 ln(1/2); KL(student || teacher) = 1/2 ln(2/3) + 1/2 ln 2.
    student, teacher = of(0.5, 0.5), of(0.75, 0.25)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert float(generalized_jsd_loss(student, teacher, beta=0.0)) == pytest.approx(forward, rel=REL)
    assert float(generalized_jsd_loss(student, teacher, beta=1.0)) == pytest.approx(reverse, rel=REL)


def test_the_interior_by_hand() -> None:
    # beta 1/4: mixture 3/4 (1/2, 1/2) + 1/4 (3/4, 1/4) = (9/16, 7/16).
    # 1/4 [3/4 ln(4/3) + 1/4 ln(4/7)] + 3/4 [1/2 ln(8/9) + 1/2 ln(8/7)].
    expected = 0.25 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7))
    expected += 0.75 * (0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7))
    found = generalized_jsd_loss(of(0.5, 0.5), of(0.75, 0.25), beta=0.25)
    assert float(found) == pytest.approx(expected, rel=REL)


def test_one_half_is_symmetric_and_nothing_else_is() -> None:
    student, teacher = logits(6, 9, seed=3), logits(6, 9, seed=4)

    def both(beta: float) -> tuple[float, float]:
        return (
            float(generalized_jsd_loss(student, teacher, beta=beta)),
            float(generalized_jsd_loss(teacher, student, beta=beta)),
        )

    assert both(0.5)[0] == pytest.approx(both(0.5)[1], rel=REL)
    assert abs(both(0.3)[0] - both(0.3)[1]) > 1e-3
    # Swapping the sides swaps beta with 1 - beta.
    assert both(0.3)[0] == pytest.approx(float(generalized_jsd_loss(teacher, student, beta=0.7)), rel=REL)


def test_the_entry_clip_by_hand() -> None:
    # student (1/2, 1/2), teacher (3/4, 1/4), forward: entries 3/4 ln(3/2) = 0.304, 1/4 ln(1/2) = -0.173.
    # Clipped at 0.1 the first becomes 0.1 and the negative one stays: the loss is below zero.
    student, teacher = of(0.5, 0.5).requires_grad_(True), of(0.75, 0.25)
    loss = generalized_jsd_loss(student, teacher, beta=0.0, token_clip=0.1, clip_mode="entry")
    assert number(loss) == pytest.approx(0.1 + 0.25 * math.log(0.5), rel=REL)
    # The clamped entry has no gradient. d/d student of -(1/4) log p_2 is (1/4) (p - e_2) = (1/8, -1/8):
    # descending lowers p_1, away from the teacher, who puts 3/4 there.
    loss.backward()
    assert student.grad is not None
    assert student.grad.tolist()[0] == pytest.approx([0.125, -0.125], rel=REL)


def test_the_token_clip_by_hand() -> None:
    # Position 0: 3/4 ln(3/2) + 1/4 ln(1/2) = 0.1308, clamped to 0.1, no gradient. Position 1: equal, 0.
    student = torch.cat([of(0.5, 0.5), of(0.75, 0.25)]).requires_grad_(True)
    teacher = torch.cat([of(0.75, 0.25), of(0.75, 0.25)])
    loss = generalized_jsd_loss(
        student, teacher, beta=0.0, token_clip=0.1, clip_mode="token", reduction="none"
    )
    assert loss.tolist() == pytest.approx([0.1, 0.0], abs=1e-15)
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad[0].tolist() == [0.0, 0.0]


def test_the_rescale_clip_by_hand() -> None:
    # 0.1308 scaled down to 0.1; the gradient p - q = (-1/4, 1/4) scaled by the same factor.
    student, teacher = of(0.5, 0.5).requires_grad_(True), of(0.75, 0.25)
    loss = generalized_jsd_loss(student, teacher, beta=0.0, token_clip=0.1, clip_mode="rescale")
    loss.backward()
    factor = 0.1 / (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert number(loss) == pytest.approx(0.1, rel=REL)
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([-0.25 * factor, 0.25 * factor], rel=REL)


@pytest.mark.parametrize("clip_mode", ["entry", "token", "rescale"])
def test_a_clip_that_is_not_reached_changes_nothing(clip_mode: Any) -> None:
    student, teacher = logits(4, 7, seed=5), logits(4, 7, seed=6)
    plain = generalized_jsd_loss(student, teacher)
    assert float(generalized_jsd_loss(student, teacher, token_clip=50.0, clip_mode=clip_mode)) == float(plain)
    result = token_divergence(student, teacher, token_clip=50.0, clip_mode=clip_mode)
    assert not bool(result.clipped.any())


@pytest.mark.parametrize(("clip_mode", "expected"), [("entry", True), ("token", True), ("rescale", True)])
def test_clipped_positions_are_told(clip_mode: Any, expected: bool) -> None:
    student = torch.cat([of(0.5, 0.5), of(0.75, 0.25)])
    teacher = torch.cat([of(0.75, 0.25), of(0.75, 0.25)])
    result = token_divergence(student, teacher, beta=0.0, token_clip=0.1, clip_mode=clip_mode)
    assert result.clipped.tolist() == [expected, False]


def test_the_default_clip_mode_is_entry() -> None:
    student, teacher = of(0.5, 0.5), of(0.75, 0.25)
    default = generalized_jsd_loss(student, teacher, beta=0.0, token_clip=0.1)
    assert float(default) == float(
        generalized_jsd_loss(student, teacher, beta=0.0, token_clip=0.1, clip_mode="entry")
    )
    assert float(default) < 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("beta", BETAS)
def test_ignored_labels_add_neither_value_nor_gradient_even_with_nan_logits(beta: float, bad: float) -> None:
    student, teacher = logits(2, 3, 8, seed=7), logits(2, 3, 8, seed=8)
    labels = torch.tensor([[5, -100, 2], [-100, -100, 0]])
    counted = labels != -100
    clean = generalized_jsd_loss(student[counted], teacher[counted], beta=beta)
    dirty = student.masked_fill(~counted[..., None], bad).requires_grad_(True)
    loss = generalized_jsd_loss(dirty, teacher.masked_fill(~counted[..., None], bad), labels, beta=beta)
    assert number(loss) == float(clean)
    loss.backward()
    assert dirty.grad is not None
    assert torch.isfinite(dirty.grad).all()
    assert float(dirty.grad[~counted].abs().max()) == 0.0
    assert float(dirty.grad[counted].abs().min(dim=-1).values.max()) > 0.0


def test_the_reductions() -> None:
    student, teacher = logits(2, 3, 8, seed=7), logits(2, 3, 8, seed=8)
    labels = torch.tensor([[5, -100, 2], [-100, -100, 0]])
    none = generalized_jsd_loss(student, teacher, labels, reduction="none")
    total = generalized_jsd_loss(student, teacher, labels, reduction="sum")
    mean = generalized_jsd_loss(student, teacher, labels, reduction="batchmean")
    assert none.shape == labels.shape
    assert none[labels == -100].tolist() == [0.0] * 3
    assert float(total) == pytest.approx(float(none.sum()), rel=REL)
    # Three counted positions.
    assert float(mean) == pytest.approx(float(total) / 3, rel=REL)
    # Without labels all six count.
    everything = generalized_jsd_loss(student, teacher, reduction="sum")
    assert float(generalized_jsd_loss(student, teacher)) == pytest.approx(float(everything) / 6, rel=REL)


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
def test_no_valid_label_is_a_zero_that_backpropagates(reduction: Any) -> None:
    student = torch.full((3, 5), float("nan"), requires_grad=True)
    labels = torch.full((3,), -100)
    loss = generalized_jsd_loss(student, student.detach(), labels, reduction=reduction)
    assert float(loss.detach().sum()) == 0.0
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0] * 5] * 3


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("side", ["student", "teacher", "both"])
def test_forbidden_entries_give_no_nan(side: str, beta: float) -> None:
    student, teacher = logits(4, 6, seed=9), logits(4, 6, seed=10)
    forbidden = torch.tensor([True, False, False, True, False, False])
    if side in ("student", "both"):
        student = student.masked_fill(forbidden, -torch.inf)
    if side in ("teacher", "both"):
        teacher = teacher.masked_fill(forbidden, -torch.inf)
    student.requires_grad_(True)
    loss = generalized_jsd_loss(student, teacher, beta=beta)
    loss.backward()
    assert math.isfinite(number(loss))
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    if side == "both":
        # As if the vocabulary had only the other entries.
        kept = generalized_jsd_loss(student.detach()[:, ~forbidden], teacher[:, ~forbidden], beta=beta)
        assert number(loss) == pytest.approx(float(kept), rel=REL)


def test_forbidden_by_one_side_inside_the_interval_is_by_the_definition() -> None:
    # student (1, 0), teacher (1/2, 1/2), beta 1/2: mixture (3/4, 1/4).
    # 1/2 [1/2 ln(2/3) + 1/2 ln 2] + 1/2 ln(4/3).
    expected = 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) + 0.5 * math.log(4 / 3)
    student = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    assert float(generalized_jsd_loss(student, of(0.5, 0.5))) == pytest.approx(expected, rel=REL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_logits_of_ten_thousand_stay_finite(beta: float, dtype: torch.dtype) -> None:
    student = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-1e4, 1e4, 0.0], [-1e4, 1e4, 1e4]], dtype=dtype)
    loss = generalized_jsd_loss(student, teacher, beta=beta, reduction="none")
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert float(loss.detach().min()) >= 0.0
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    if beta == 0.5:
        # Disjoint distributions: ln 2, the maximum.
        assert number(loss[0]) == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("clip", [None, ("entry", 0.05), ("rescale", 0.05)], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_passes_gradcheck(beta: float, clip: Any) -> None:
    if clip is not None and clip[0] == "rescale":
        # The factor is detached: check the direction against the unclipped gradient instead.
        plain, scaled = (logits(3, 5, seed=11).requires_grad_(True) for _ in range(2))
        teacher = logits(3, 5, seed=12)
        token_divergence(plain, teacher, beta=beta).values.sum().backward()
        token_divergence(
            scaled, teacher, beta=beta, token_clip=0.05, clip_mode="rescale"
        ).values.sum().backward()
        assert plain.grad is not None
        assert scaled.grad is not None
        assert torch.cosine_similarity(plain.grad, scaled.grad).tolist() == pytest.approx([1.0] * 3)
        return
    options = {} if clip is None else {"clip_mode": clip[0], "token_clip": clip[1]}
    assert torch.autograd.gradcheck(
        lambda student: generalized_jsd_loss(
            student, logits(3, 5, seed=12), beta=beta, temperature=1.3, **options
        ),
        (logits(3, 5, seed=11).requires_grad_(True),),
    )


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = logits(2, 4).requires_grad_(True), logits(2, 4, seed=1).requires_grad_(True)
    generalized_jsd_loss(student, teacher).backward()
    assert teacher.grad is None
    assert student.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    student, teacher = logits(3, 50, seed=1, dtype=dtype), logits(3, 50, seed=2, dtype=dtype)
    found = generalized_jsd_loss(student, teacher)
    assert found.dtype == torch.float32
    exact = generalized_jsd_loss(student.double(), teacher.double())
    assert exact.dtype == torch.float64
    assert float(found) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 1.5}, r"beta must lie in \[0, 1\]; found 1.5"),
        ({"beta": float("nan")}, r"beta must lie in \[0, 1\]"),
        ({"temperature": 0.0}, "temperature must be above 0; found 0.0"),
        ({"token_clip": 0.0}, "token_clip must be above 0, or None for no clip; found 0.0"),
        ({"clip_mode": "both"}, "clip_mode must be one of entry, token, rescale; found 'both'"),
        ({"reduction": "mean"}, "reduction must be one of batchmean, sum, none; found 'mean'"),
        ({"labels": torch.zeros(3)}, r"labels must have the logits' shape .* \(2,\); found \(3,\)"),
        ({"teacher_logits": torch.zeros(2, 5)}, r"share one vocabulary .* found \(2, 4\) and \(2, 5\)"),
        (
            {"teacher_logits": torch.zeros(3, 4)},
            r"same shape, position by position; found \(2, 4\) and \(3, 4\)",
        ),
        ({"teacher_logits": torch.tensor([[0.0] * 4, [float("nan")] * 4])}, r"counted position 1 \(teacher"),
        ({"student_logits": torch.full((2, 4), -torch.inf)}, r"counted position 0 \(student"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], words: str) -> None:
    arguments = {"student_logits": torch.zeros(2, 4), "teacher_logits": torch.zeros(2, 4), **change}
    with pytest.raises(LossInputError, match=words):
        generalized_jsd_loss(**arguments)


def test_an_entry_that_the_student_forbids_has_no_gradient_and_the_rest_balances() -> None:
    """Forward KL wants mass where the student's logit is -inf; no finite gradient can give it any."""
    student = torch.tensor([[0.3, -torch.inf, -0.2]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.1, 0.4, 0.0]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(token_divergence(student, teacher, beta=0.0).values.sum(), student)
    q = teacher.softmax(-1)
    p = student.detach().softmax(-1)
    # By hand: -q + p * (q_0 + q_2) where the student may go, 0 where it may not.
    wanted = torch.tensor(
        [[p[0, 0] * (q[0, 0] + q[0, 2]) - q[0, 0], 0.0, p[0, 2] * (q[0, 0] + q[0, 2]) - q[0, 2]]]
    )
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
