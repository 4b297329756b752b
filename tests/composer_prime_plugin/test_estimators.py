"""Top-k, sampled token and importance ratio against plain float64 loops and numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.divergence import configured_divergence
from composer_prime_plugin.errors import LossInputError
from composer_prime_plugin.estimators import importance_ratio, sampled_divergence, top_k_divergence
from composer_prime_plugin.jsd import LOG_PROB_FLOOR, token_divergence

BETAS = (0.0, 0.3, 0.5, 1.0)
REL = 1e-9
GRADIENT_REL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the float64 gradient on the same logits, by norm."""
ROUNDING = 1e-6
"""Gradient of equal distributions in float32: ``p - p`` with each ``p`` rounded on its own way."""

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "tail of the student's": {"estimator": "top_k", "top_k": 5},
    "tail of the teacher's": {"estimator": "top_k", "top_k": 5, "top_k_support": "teacher"},
    "student's alone": {"estimator": "top_k", "top_k": 5, "top_k_tail": False},
    "teacher's alone": {"estimator": "top_k", "top_k": 5, "top_k_support": "teacher", "top_k_tail": False},
    "sampled": {"estimator": "sampled", "jsd_beta": 1.0},
}


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=random, dtype=torch.float64)).to(dtype)


def of(*weights: float) -> Tensor:
    """Logits of the distribution with these weights."""
    return torch.log(torch.tensor([weights], dtype=torch.float64))


def number(value: Tensor) -> float:
    return float(value.detach())


def probabilities(row: list[float], temperature: float = 1.0) -> list[float]:
    top = max(row)
    weights = [math.exp((value - top) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def kept(
    row: list[float], other: list[float], top_k: int, tail: bool, temperature: float
) -> list[list[float]]:
    """Both sides over the ``top_k`` largest of ``row``: what the estimator compares."""
    support = sorted(range(len(row)), key=lambda i: row[i], reverse=True)[:top_k]
    out = []
    for side in (row, other):
        share = probabilities(side, temperature)
        inside = [share[i] for i in support]
        out.append([*inside, 1.0 - sum(inside)] if tail else [value / sum(inside) for value in inside])
    return out


def divergence(p: list[float], q: list[float], beta: float) -> float:
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if beta == 0.0:
            total += b * math.log(b / a)
        elif beta == 1.0:
            total += a * math.log(a / b)
        else:
            mixed = (1 - beta) * a + beta * b
            total += beta * b * math.log(b / mixed) + (1 - beta) * a * math.log(a / mixed)
    return total


def plain(student: Tensor, teacher: Tensor, beta: float, top_k: int, support: str, tail: bool) -> Tensor:
    """The top-k divergence written down with autograd in float64."""
    student, teacher = student.double(), teacher.double()
    chosen = (student if support == "student" else teacher).detach().argsort(-1, descending=True)[:, :top_k]
    p, q = (side.softmax(-1).gather(-1, chosen) for side in (student, teacher))
    if tail:
        p, q = (torch.cat([side, 1 - side.sum(-1, keepdim=True)], -1) for side in (p, q))
    else:
        p, q = (side / side.sum(-1, keepdim=True) for side in (p, q))
    m = (1 - beta) * p + beta * q
    if beta == 0.0:
        return (q * (q / p).log()).sum(-1)
    if beta == 1.0:
        return (p * (p / q).log()).sum(-1)
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


# Top-k


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("beta", BETAS)
def test_top_k_equals_a_plain_loop(beta: float, support: Any, tail: bool, temperature: float) -> None:
    student, teacher = logits(4, 11, seed=1), logits(4, 11, seed=2)
    found = top_k_divergence(
        student, teacher, top_k=3, support=support, tail=tail, beta=beta, temperature=temperature
    )
    wanted = []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        if support == "student":
            p, q = kept(s, t, 3, tail, temperature)
        else:
            q, p = kept(t, s, 3, tail, temperature)
        wanted.append(divergence(p, q, beta))
    assert found.values.tolist() == pytest.approx(wanted, rel=REL)
    assert not bool(found.clipped.any())


def test_the_tail_by_hand() -> None:
    # student (1/2, 1/4, 1/8, 1/8), teacher uniform, two entries of the student's and the rest:
    # p (1/2, 1/4, 1/4), q (1/4, 1/4, 1/2). KL(q || p) = 1/4 ln(1/2) + 1/2 ln 2 = ln(2) / 4.
    student, teacher = of(4, 2, 1, 1).requires_grad_(), of(1, 1, 1, 1)
    found = top_k_divergence(student, teacher, top_k=2, beta=0.0).values
    assert number(found) == pytest.approx(math.log(2) / 4, rel=REL)
    # Gradient p - q = (1/4, 0, -1/4); the bucket's goes to its entries by their share, half each.
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.tolist()[0] == pytest.approx([0.25, 0.0, -0.125, -0.125], abs=1e-15)


def test_without_a_tail_both_sides_are_renormalized_by_hand() -> None:
    # The same distributions: p (2/3, 1/3), q (1/2, 1/2); KL(q || p) = 1/2 ln(3/4) + 1/2 ln(3/2) = ln(9/8) / 2.
    student = of(4, 2, 1, 1).requires_grad_()
    found = top_k_divergence(student, of(1, 1, 1, 1), top_k=2, tail=False, beta=0.0).values
    assert number(found) == pytest.approx(math.log(9 / 8) / 2, rel=REL)
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.tolist()[0] == pytest.approx([1 / 6, -1 / 6, 0.0, 0.0], abs=1e-15)


def test_the_teachers_support_by_hand() -> None:
    # student (1/2, 1/4, 1/8, 1/8), teacher (1/8, 1/8, 1/4, 1/2): the teacher's two are the last ones.
    # p (1/8, 1/8, 3/4), q (1/2, 1/4, 1/4): KL(q || p) = 1/2 ln 4 + 1/4 ln 2 + 1/4 ln(1/3).
    student, teacher = of(4, 2, 1, 1), of(1, 1, 2, 4)
    expected = math.log(4) / 2 + math.log(2) / 4 - math.log(3) / 4
    found = top_k_divergence(student, teacher, top_k=2, support="teacher", beta=0.0).values
    assert float(found) == pytest.approx(expected, rel=REL)
    # The student's own two: p (1/2, 1/4, 1/4), q (1/8, 1/8, 3/4).
    expected = math.log(1 / 4) / 8 + math.log(1 / 2) / 8 + 3 * math.log(3) / 4
    found = top_k_divergence(student, teacher, top_k=2, support="student", beta=0.0).values
    assert float(found) == pytest.approx(expected, rel=REL)


@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("beta", BETAS)
def test_with_a_tail_it_never_exceeds_the_full_divergence(beta: float, support: Any) -> None:
    """Outcomes that are merged cannot be told apart better."""
    student, teacher = logits(50, 20, seed=3), logits(50, 20, seed=4)
    full = token_divergence(student, teacher, beta=beta).values
    last = torch.zeros_like(full)
    for top_k in (1, 2, 5, 10, 19):
        found = top_k_divergence(student, teacher, top_k=top_k, support=support, beta=beta).values
        assert bool((found <= full * (1 + REL)).all())
        assert bool((found >= last * (1 - REL)).all())
        last = found
    # Nineteen entries and a bucket of one are all twenty.
    torch.testing.assert_close(last, full, rtol=REL, atol=0)


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("top_k", [9, 1000])
@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_vocabulary_is_the_full_divergence_to_the_bit(beta: float, top_k: int, tail: bool) -> None:
    sides = [logits(6, 9, seed=5, dtype=torch.float32).requires_grad_() for _ in range(2)]
    teacher = logits(6, 9, seed=6, dtype=torch.float32)
    found = top_k_divergence(sides[0], teacher, top_k=top_k, tail=tail, beta=beta, temperature=1.3).values
    full = token_divergence(sides[1], teacher, beta=beta, temperature=1.3).values
    assert torch.equal(found, full)
    found.sum().backward()
    full.sum().backward()
    assert sides[0].grad is not None
    assert sides[1].grad is not None
    assert torch.equal(sides[0].grad, sides[1].grad)


@pytest.mark.parametrize("clip", [None, ("entry", 0.05), ("token", 0.3)], ids=str)
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("beta", BETAS)
def test_the_top_k_gradient_passes_gradcheck(beta: float, support: Any, tail: bool, clip: Any) -> None:
    options = {} if clip is None else {"clip_mode": clip[0], "token_clip": clip[1]}
    teacher = logits(4, 7, seed=12)
    # Logits stand far apart against the step of the check, so the support is held.
    assert torch.autograd.gradcheck(
        lambda student: (
            top_k_divergence(
                student, teacher, top_k=3, support=support, tail=tail, beta=beta, temperature=1.3, **options
            ).values
        ),
        (logits(4, 7, seed=11).requires_grad_(True),),
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("full", "sampled")])
def test_rescaling_top_k_keeps_the_direction_and_is_told(kind: str) -> None:
    gradients = []
    for clip in (None, 0.03):
        student = logits(6, 12, seed=11).requires_grad_()
        sdpo = SDPOConfig(**KINDS[kind], token_clip=clip)
        result = configured_divergence(student, logits(6, 12, seed=12), sdpo)
        result.values.sum().backward()
        assert student.grad is not None
        gradients.append(student.grad)
        if clip is not None:
            assert float(result.values.detach().max()) == pytest.approx(clip, rel=REL)
            assert bool(result.clipped.all())
    assert torch.cosine_similarity(*gradients).tolist() == pytest.approx([1.0] * 6)
    assert float(gradients[1].norm()) < float(gradients[0].norm())


def test_the_entry_clip_clamps_the_tail_too() -> None:
    # p (1/2, 1/4, 1/4), q (1/4, 1/4, 1/2): the bucket's entry 1/2 ln 2 = 0.347 is the one above 0.1.
    result = top_k_divergence(of(4, 2, 1, 1), of(1, 1, 1, 1), top_k=2, beta=0.0, token_clip=0.1)
    assert float(result.values) == pytest.approx(0.1 + math.log(1 / 2) / 4, rel=REL)
    assert result.clipped.tolist() == [True]


def test_a_tail_far_below_float32s_rounding_is_seen() -> None:
    """``1 - sum(p)`` is 0 there; the logits know better."""
    student = torch.tensor([[0.0, -30.0, -31.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, -30.0, -35.0]])
    (found,) = top_k_divergence(student, teacher, top_k=1, beta=1.0).values
    p, q = math.exp(-30) + math.exp(-31), math.exp(-30) + math.exp(-35)
    # p ln(p / q) of the bucket; the other outcome's q - p is lost beside its 1, as in the full divergence.
    assert number(found) == pytest.approx(p * math.log(p / q), rel=1e-5)
    found.backward()
    assert student.grad is not None
    # d/d tail logit is p (1 - p) (ln(p / q) + ...), shared by exp(l).
    share = math.exp(-31) / p
    assert float(student.grad[0, 2]) == pytest.approx(p * math.log(p / q) * share, rel=1e-5)


# Every estimator


def run(kind: str, student: Tensor, teacher: Tensor, **options: Any) -> Tensor:
    tokens = torch.arange(student.size(0)) % student.size(1)
    return configured_divergence(
        student, teacher, SDPOConfig(**{**KINDS[kind], **options}), tokens=tokens
    ).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_inputs_give_exactly_zero(kind: str, beta: float, dtype: torch.dtype) -> None:
    if kind == "sampled" and beta != 1.0:
        return
    student = logits(9, 17, dtype=dtype).requires_grad_()
    values = run(kind, student, student.detach().clone(), jsd_beta=beta, temperature=1.5)
    assert values.tolist() == [0.0] * 9
    values.sum().backward()
    assert student.grad is not None
    assert float(student.grad.abs().max()) <= (0.0 if kind == "sampled" else ROUNDING)


@pytest.mark.parametrize("dtype", GRADIENT_REL)
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("beta", BETAS)
def test_top_k_gradients_in_the_shipped_dtypes_stay_near_float64(
    beta: float, support: Any, tail: bool, dtype: torch.dtype
) -> None:
    student, teacher = (logits(8, 1000, seed=seed, dtype=dtype) for seed in (21, 22))
    student.requires_grad_()
    exact = student.detach().double().requires_grad_()
    # Logits of half precision have ties; the support must be the same one.
    chosen = (student if support == "student" else teacher).detach().topk(50).values[:, -1:]
    others = (student if support == "student" else teacher).detach()
    assert bool(((others >= chosen).sum(-1) == 50).all()) or dtype == torch.bfloat16
    values = top_k_divergence(student, teacher, top_k=50, support=support, tail=tail, beta=beta).values
    wanted = plain(exact, teacher, beta, 50, support, tail)
    if dtype == torch.float32:
        torch.testing.assert_close(values.double(), wanted, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    (reference,) = torch.autograd.grad(wanted.sum(), exact)
    assert gradient.dtype == dtype
    assert float((gradient.double() - reference).norm() / reference.norm()) < GRADIENT_REL[dtype]


@pytest.mark.parametrize("dtype", GRADIENT_REL)
@pytest.mark.parametrize("beta", BETAS)
def test_full_gradients_in_the_shipped_dtypes_stay_near_float64(beta: float, dtype: torch.dtype) -> None:
    student, teacher = (logits(8, 1000, seed=seed, dtype=dtype) for seed in (21, 22))
    student.requires_grad_()
    exact = student.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(token_divergence(student, teacher, beta=beta).values.sum(), student)
    (reference,) = torch.autograd.grad(plain(exact, teacher, beta, 1000, "student", False).sum(), exact)
    assert float((gradient.double() - reference).norm() / reference.norm()) < GRADIENT_REL[dtype]


VALUE = st.one_of(st.floats(-20, 20, width=32), st.sampled_from([-math.inf, -1e30, -1e4, 1e4, 1e30]))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(VALUE, VALUE), min_size=6, max_size=6),
    st.sampled_from(list(KINDS)),
    st.sampled_from(BETAS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, "token", "rescale", "entry"]),
)
def test_no_logits_give_a_nan(
    pairs: list[tuple[float, float]], kind: str, beta: float, dtype: torch.dtype, clip_mode: Any
) -> None:
    """Forbidden entries and logits of 1e30 on either side. The one refusal is named."""
    student, teacher = (torch.tensor([side], dtype=dtype) for side in zip(*pairs, strict=True))
    student[0, 0], teacher[0, 1] = 0.5, -0.5  # something is allowed on each side
    student.requires_grad_()
    options: dict[str, Any] = {} if clip_mode is None else {"token_clip": 0.2, "clip_mode": clip_mode}
    if kind == "sampled":
        beta, options = 1.0, {} if clip_mode == "entry" else options
    try:
        values = run(kind, student, teacher, jsd_beta=beta, **options)
    except LossInputError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "set sdpo.top_k_tail = true" in refusal
        assert "alone" in kind
        return
    values.sum().backward()
    assert bool(torch.isfinite(values).all())
    assert student.grad is not None
    assert bool(torch.isfinite(student.grad).all())


def test_a_side_that_forbids_the_whole_support_is_named_and_a_tail_takes_it() -> None:
    student = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    teacher = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0]])
    sdpo = {"estimator": "top_k", "top_k": 2}
    with pytest.raises(
        LossInputError, match=r"counted position 0 .neither side.*set sdpo\.top_k_tail = true"
    ):
        configured_divergence(student, teacher, SDPOConfig(**sdpo, top_k_tail=False))
    assert bool(torch.isfinite(configured_divergence(student, teacher, SDPOConfig(**sdpo)).values).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_gets_no_gradient(kind: str) -> None:
    student, teacher = logits(3, 8).requires_grad_(), logits(3, 8, seed=1).requires_grad_()
    run(kind, student, teacher).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None


# The sampled token


def test_the_sampled_token_by_hand() -> None:
    # student (1/2, 1/2), teacher (3/4, 1/4). Token 0: d = ln(2/3), gradient d (e_0 - p) = d (1/2, -1/2).
    # Token 1: d = ln 2, gradient d (-1/2, 1/2).
    student = of(1, 1).repeat(2, 1).requires_grad_()
    result = sampled_divergence(student, of(3, 1).repeat(2, 1), torch.tensor([0, 1]))
    assert result.values.tolist() == pytest.approx([math.log(2 / 3), math.log(2)], rel=REL)
    assert result.clipped.tolist() == [False, False]
    result.values.sum().backward()
    assert student.grad is not None
    assert student.grad.flatten().tolist() == pytest.approx(
        [math.log(2 / 3) / 2, -math.log(2 / 3) / 2, -math.log(2) / 2, math.log(2) / 2], rel=REL
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_over_all_tokens_it_is_reverse_kl_and_its_gradient(temperature: float) -> None:
    """The expectation taken exactly: every token once, weighted by its probability."""
    vocab = 7
    student, teacher = logits(1, vocab, seed=31).requires_grad_(), logits(1, vocab, seed=32)
    p = torch.tensor(probabilities(student.tolist()[0], temperature), dtype=torch.float64)
    values = sampled_divergence(
        student.expand(vocab, vocab),
        teacher.expand(vocab, vocab),
        torch.arange(vocab),
        temperature=temperature,
    ).values
    wanted = divergence(
        probabilities(student.tolist()[0], temperature), probabilities(teacher.tolist()[0], temperature), 1.0
    )
    assert number((p * values).sum()) == pytest.approx(wanted, rel=REL)
    (mean,) = torch.autograd.grad((p * values).sum(), student)
    again = student.detach().clone().requires_grad_()
    share, other = (again / temperature).softmax(-1), (teacher / temperature).softmax(-1)
    (exact,) = torch.autograd.grad((share * (share / other).log()).sum(), again)
    torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "rel"), GRADIENT_REL.items())
def test_the_sampled_gradient_in_the_shipped_dtypes_stays_near_float64(
    dtype: torch.dtype, rel: float
) -> None:
    student, teacher = (logits(8, 1000, seed=seed, dtype=dtype) for seed in (21, 22))
    student.requires_grad_()
    tokens = torch.arange(8) * 100
    (gradient,) = torch.autograd.grad(sampled_divergence(student, teacher, tokens).values.sum(), student)
    exact = student.detach().double().requires_grad_()
    log_p, log_q = (
        side.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] for side in (exact, teacher.double())
    )
    # The loss of the SDPO reference and of TRL: the same gradient.
    (reference,) = torch.autograd.grad(((log_p - log_q).detach() * log_p).sum(), exact)
    assert float((gradient.double() - reference).norm() / reference.norm()) < rel


@pytest.mark.parametrize("clip_mode", ["token", "rescale"])
def test_the_clip_bounds_the_sampled_log_ratio_on_both_sides(clip_mode: Any) -> None:
    # d is ln(2/3) = -0.405 and ln 2 = 0.693; the bound 0.5 acts on the second, 0.3 on both.
    def of_bound(bound: float) -> tuple[list[float], list[bool], list[float]]:
        student = of(1, 1).repeat(2, 1).requires_grad_()
        result = sampled_divergence(
            student, of(3, 1).repeat(2, 1), torch.tensor([0, 1]), token_clip=bound, clip_mode=clip_mode
        )
        result.values.sum().backward()
        assert student.grad is not None
        return result.values.tolist(), result.clipped.tolist(), student.grad[:, 0].tolist()

    low = math.log(2 / 3)
    acted = {"token": 0.0, "rescale": 1.0}[clip_mode]
    values, clipped, gradient = of_bound(0.5)
    assert values == pytest.approx([low, 0.5], rel=REL)
    assert clipped == [False, True]
    assert gradient == pytest.approx([low / 2, -0.5 / 2 * acted], rel=REL)
    values, clipped, gradient = of_bound(0.3)
    assert values == pytest.approx([-0.3, 0.3], rel=REL)
    assert clipped == [True, True]
    assert gradient == pytest.approx([-0.3 / 2 * acted, -0.3 / 2 * acted], rel=REL)


def test_a_forbidden_sampled_token_is_finite() -> None:
    forbidden = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    token = torch.tensor([1])
    student = forbidden.clone().requires_grad_()
    (value,) = sampled_divergence(student, of(1, 1), token).values
    assert number(value) == pytest.approx(LOG_PROB_FLOOR - math.log(1 / 2), rel=REL)
    value.backward()
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0, 0.0]]
    (value,) = sampled_divergence(of(1, 1), forbidden, token).values
    assert float(value) == pytest.approx(math.log(1 / 2) - LOG_PROB_FLOOR, rel=REL)
    # Nothing but the token is allowed: log p = 0 on both sides.
    only = torch.tensor([[-math.inf, 3.0]], dtype=torch.float64)
    assert sampled_divergence(only, only, token).values.tolist() == [0.0]


def test_a_token_of_probability_nearly_one_keeps_its_log_prob() -> None:
    """log p = -exp(-40), which one minus the rest loses even in float64."""
    student, teacher = torch.tensor([[40.0, 0.0]]), torch.tensor([[30.0, 0.0]])
    (value,) = sampled_divergence(student, teacher, torch.tensor([0])).values
    assert float(value) == pytest.approx(math.exp(-30) - math.exp(-40), rel=1e-6)


# The ratio


def test_the_importance_ratio_by_hand() -> None:
    # exp(ln 3) = 3 is capped at 2, exp(-ln 4) = 1/4 is not, on-policy is exactly 1, infinity is the cap.
    log_ratio = torch.tensor([math.log(3), -math.log(4), 0.0, math.inf, -math.inf], dtype=torch.float64)
    assert importance_ratio(log_ratio, 2.0).tolist() == pytest.approx([2.0, 0.25, 1.0, 2.0, 0.0], rel=REL)
    assert float(importance_ratio(log_ratio, 2.0)[2]) == 1.0
    assert not importance_ratio(log_ratio.clone().requires_grad_(), 2.0).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_multiplies_every_estimator_and_its_gradient(kind: str) -> None:
    teacher, tokens = logits(3, 9, seed=41), torch.tensor([0, 4, 8])
    log_ratio = torch.tensor([math.log(5), 0.0, math.log(0.25)], dtype=torch.float64)
    results = []
    for cap in (None, 2.0):
        student = logits(3, 9, seed=40).requires_grad_()
        sdpo = SDPOConfig(**KINDS[kind], importance_cap=cap)
        values = configured_divergence(student, teacher, sdpo, tokens=tokens, log_ratio=log_ratio).values
        (gradient,) = torch.autograd.grad(values.sum(), student)
        results.append((values.detach(), gradient))
    factor = torch.tensor([2.0, 1.0, 0.25], dtype=torch.float64)
    torch.testing.assert_close(results[1][0], results[0][0] * factor, rtol=REL, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1] * factor[:, None], rtol=REL, atol=1e-15)


# What cannot be


SAMPLED = {"estimator": "sampled", "jsd_beta": 1.0}


@pytest.mark.parametrize(
    ("sdpo", "given_", "words"),
    [
        (SAMPLED, {}, r"needs the sampled token id of each of the 2 positions; found None"),
        (
            SAMPLED,
            {"tokens": torch.zeros(3, dtype=torch.long)},
            r"of each of the 2 .* found torch.int64 \(3,\)",
        ),
        (SAMPLED, {"tokens": torch.zeros(2)}, r"found torch.float32 \(2,\)"),
        (SAMPLED, {"tokens": torch.tensor([0, 4])}, r"must lie in \[0, 4\); found 0 to 4"),
        (SAMPLED, {"tokens": torch.tensor([-100, 3])}, r"must lie in \[0, 4\); found -100 to 3"),
        ({"importance_cap": 2.0}, {}, "importance_cap needs trainer minus inference log-prob .* found None"),
        ({"importance_cap": 2.0}, {"log_ratio": torch.zeros(1)}, r"of the 2 positions; found \(1,\)"),
        (
            {"importance_cap": 2.0},
            {"log_ratio": torch.tensor([0.0, math.nan])},
            "must not be NaN where sdpo.importance_cap reads it; found NaN at counted position 1",
        ),
    ],
)
def test_what_is_missing_is_named(sdpo: dict[str, Any], given_: dict[str, Tensor], words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        configured_divergence(torch.zeros(2, 4), torch.zeros(2, 4), SDPOConfig(**sdpo), **given_)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: sampled_divergence(x, x, torch.zeros(2).long(), token_clip=1.0, clip_mode="entry"),
            "clip_mode must be 'token' or 'rescale' with the sampled-token estimator",
        ),
        (lambda x: sampled_divergence(x, x, torch.zeros(2)), "tokens must be integers of shape"),
        (lambda x: top_k_divergence(x, x, top_k=2, beta=2.0), r"beta must lie in \[0, 1\]"),
        (lambda x: configured_divergence(x[0], x[0], SDPOConfig()), r"must be \(positions, vocab\)"),
    ],
)
def test_a_call_that_cannot_be_is_named(call: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        call(torch.zeros(2, 4))
