"""The walk over blocks of positions against the same in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composer_prime_plugin import blocks
from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.divergence import configured_divergence, generalized_jsd_loss

ROWS, VOCAB = 11, 13
ULP = 1.0
"""Units in the last place of the largest entry that a gradient may differ by in its own dtype."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "reverse": {"jsd_beta": 1.0},
    "forward": {"jsd_beta": 0.0},
    "entry": {"token_clip": 0.05, "clip_mode": "entry"},
    "token": {"token_clip": 0.6, "clip_mode": "token"},
    "rescale": {"token_clip": 0.3},
    "tail": {"estimator": "top_k", "top_k": 4},
    "no tail": {"estimator": "top_k", "top_k": 4, "top_k_support": "teacher", "top_k_tail": False},
    "sampled": {"estimator": "sampled", "jsd_beta": 1.0},
    "ratio": {"importance_cap": 1.5},
}
SOME = torch.tensor([0, 2, 3, 7, 8, 10])
Call = Callable[[Tensor, Tensor], Tensor]


def logits(dtype: torch.dtype = torch.float32, seed: int = 0, rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, vocab, generator=random, dtype=torch.float64)).to(dtype)


def call(kind: str, rows: Tensor | None) -> Call:
    count = ROWS if rows is None else rows.numel()
    random = torch.Generator().manual_seed(9)
    tokens = torch.randint(VOCAB, (count,), generator=random)
    log_ratio = torch.randn(count, generator=random)

    def values(student: Tensor, teacher: Tensor) -> Tensor:
        sdpo = SDPOConfig(**KINDS[kind])
        return configured_divergence(
            student, teacher, sdpo, rows=rows, tokens=tokens, log_ratio=log_ratio
        ).values

    return values


@pytest.fixture(params=[2, 3, 4], ids="{} rows a block".format)
def small_blocks(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setitem(blocks.BLOCK_ENTRIES, "cpu", request.param * VOCAB)


def outcome(values: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    student, teacher = logits(dtype, 1).requires_grad_(), logits(dtype, 2)
    found = values(student, teacher)
    factors = torch.linspace(-1, 2, found.numel())
    (gradient,) = torch.autograd.grad((found * factors).sum(), student)
    return found.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, SOME], ids=["all rows", "some rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_change_no_bit_of_a_value_and_at_most_the_last_of_a_gradient(
    kind: str, rows: Tensor | None, dtype: torch.dtype, small_blocks: Callable[[], None]
) -> None:
    whole, whole_gradient = outcome(call(kind, rows), dtype)
    small_blocks()
    found, gradient = outcome(call(kind, rows), dtype)
    assert torch.equal(found, whole)
    assert gradient.dtype == dtype
    bound = ULP * torch.finfo(dtype).eps * whole_gradient.abs().amax(dim=-1, keepdim=True)
    assert bool(((gradient - whole_gradient).abs() <= bound).all())
    if rows is not None:
        left_out = torch.ones(ROWS, dtype=torch.bool).index_fill(0, rows, value=False)
        assert float(gradient[left_out].abs().max()) == 0.0
        assert float(gradient[rows].abs().max()) > 0.0


@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("entries", [1, 2 * VOCAB, 3 * VOCAB, 100 * VOCAB])
def test_the_blocks_hold_every_position_once_and_never_one_alone(
    count: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks.BLOCK_ENTRIES, "cpu", entries)
    found = list(blocks._blocks(count, logits()))
    assert [position for block in found for position in range(block.start, block.stop)] == list(range(count))
    sizes = [block.stop - block.start for block in found]
    assert min(sizes) >= min(count, 2)
    assert max(sizes) <= max(entries // VOCAB, 2) + 1


def test_a_sums_gradient_keeps_its_bits(small_blocks: Callable[[], None]) -> None:
    """One factor of 1 on every position, as in the loss of the plugin with weight 1."""

    def gradient() -> Tensor:
        student = logits(seed=1).requires_grad_()
        (found,) = torch.autograd.grad(call("full", None)(student, logits(seed=2)).sum(), student)
        return found

    whole = gradient()
    small_blocks()
    assert torch.equal(gradient(), whole)


@pytest.mark.parametrize("rows", [None, SOME], ids=["all rows", "some rows"])
@pytest.mark.parametrize("kind", ["full", "tail", "entry"])
def test_gradcheck_through_blocks(kind: str, rows: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.BLOCK_ENTRIES, "cpu", 4 * VOCAB)
    student = logits(torch.float64, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: call(kind, rows)(s, logits(torch.float64, 2)), (student,))


def test_a_kept_graph_gives_the_same_gradient_every_time(small_blocks: Callable[[], None]) -> None:
    small_blocks()
    student = logits(seed=1).requires_grad_()
    total = 3 * call("full", SOME)(student, logits(seed=2)).sum()
    first, second, third = (torch.autograd.grad(total, student, retain_graph=True)[0] for _ in range(3))
    assert torch.equal(second, first)
    assert torch.equal(third, first)


def test_no_gradient_is_taken_where_none_is_asked_for(small_blocks: Callable[[], None]) -> None:
    small_blocks()
    student = logits(seed=1)
    assert not call("full", None)(student, logits(seed=2)).requires_grad
    with torch.no_grad():
        assert not call("full", None)(student.requires_grad_(), logits(seed=2)).requires_grad


def test_no_position_is_a_zero_that_backpropagates() -> None:
    student = logits(seed=1).requires_grad_()
    total = call("full", torch.zeros(0, dtype=torch.long))(student, logits(seed=2)).sum()
    total.backward()
    assert float(total.detach()) == 0.0
    assert student.grad is not None
    assert float(student.grad.abs().max()) == 0.0


def test_the_loss_by_labels_goes_through_blocks(small_blocks: Callable[[], None]) -> None:
    labels = torch.full((ROWS,), -100).index_fill(0, SOME, 1)

    def loss() -> tuple[float, Tensor]:
        student = logits(seed=1).requires_grad_()
        total = generalized_jsd_loss(student, logits(seed=2), labels)
        (gradient,) = torch.autograd.grad(total, student)
        return float(total.detach()), gradient

    whole, whole_gradient = loss()
    small_blocks()
    found, gradient = loss()
    assert found == whole
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-8)


def test_a_position_that_is_not_finite_is_named_by_its_place_among_those_read(
    small_blocks: Callable[[], None],
) -> None:
    small_blocks()
    teacher = logits(seed=2)
    teacher[7, 0] = float("nan")
    with pytest.raises(ValueError, match=r"counted position 3 .teacher holds NaN"):
        call("full", SOME)(logits(seed=1), teacher)


class _Allocations(TorchDispatchMode):
    """New storages of at least ``entries`` elements."""

    def __init__(self, entries: int, known: list[Tensor]) -> None:
        super().__init__()
        self.entries, self.found = entries, 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.numel() >= self.entries:
                pointer = leaf.untyped_storage().data_ptr()
                self.found += pointer not in self.seen
                self.seen.add(pointer)
        return out


@pytest.mark.parametrize("rows", [None, SOME], ids=["all rows", "some rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_one_large_tensor_that_is_made_is_the_students_gradient(
    kind: str, rows: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks.BLOCK_ENTRIES, "cpu", 2 * VOCAB)
    student, teacher = logits(seed=1).requires_grad_(), logits(seed=2)
    with _Allocations(4 * VOCAB, [student, teacher]) as made:
        values = call(kind, rows)(student, teacher)
        (gradient,) = torch.autograd.grad(values.sum(), student)
    assert gradient.shape == (ROWS, VOCAB)
    assert made.found == 1
