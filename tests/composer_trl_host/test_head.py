"""The chunked head against the plain one: values, gradients, memory-shaped edge cases."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax

from composer_trl_host import head as module
from composer_trl_host.compose import token_logprobs
from composer_trl_host.head import OutputHead, chunked_rows

ROWS, HIDDEN, VOCAB = 11, 6, 17
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "soft cap": {"soft_cap": 2.0},
    "all": {"bias": True, "scale": 1.7, "soft_cap": 3.0},
}


def build(kind: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, OutputHead]:
    generator = torch.Generator().manual_seed(0)
    settings = dict(HEADS[kind])
    bias = (
        torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype)
        if settings.pop("bias", False)
        else None
    )
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, OutputHead(weight, None if bias is None else bias.requires_grad_(), **settings)


def tokens() -> torch.Tensor:
    return torch.arange(ROWS) % VOCAB


def logprobs(logits: torch.Tensor, block: slice) -> torch.Tensor:
    return token_logprobs(logits, tokens()[block])


@pytest.fixture(params=[1, 3, 4, 64], ids="{} rows a block".format)
def block_rows(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", request.param * VOCAB)


@pytest.mark.parametrize("kind", HEADS)
def test_values_and_gradients_equal_a_plain_loop(kind, block_rows):
    hidden, output = build(kind)
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    mine = chunked_rows(hidden, output, logprobs)
    leaves = [leaf for leaf in (hidden, output.weight, output.bias) if leaf is not None]
    mine_grads = torch.autograd.grad(mine, leaves, upstream)
    rows = []
    for i in range(ROWS):
        logits = output.weight @ hidden[i]
        logits = logits if output.bias is None else logits + output.bias
        logits = logits * output.scale
        logits = logits if output.soft_cap is None else output.soft_cap * torch.tanh(logits / output.soft_cap)
        rows.append(log_softmax(logits, -1)[tokens()[i]])
    wanted = torch.stack(rows)
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    for grad, want in zip(mine_grads, torch.autograd.grad(wanted, leaves, upstream), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_gradcheck(kind, block_rows):
    hidden, output = build(kind)

    def fn(h, w, *b):
        return chunked_rows(h, OutputHead(w, b[0] if b else None, output.scale, output.soft_cap), logprobs)

    leaves = [leaf for leaf in (hidden, output.weight, output.bias) if leaf is not None]
    assert torch.autograd.gradcheck(fn, leaves)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_in_the_shipped_dtypes_stay_near_float64(dtype, rtol, block_rows):
    wanted_hidden, wanted_head = build("bias")
    hidden, output = build("bias", dtype)
    with torch.no_grad():
        wanted_hidden.copy_(hidden.double())
        wanted_head.weight.copy_(output.weight.double())
        wanted_head.bias.copy_(output.bias.double())
    grads = torch.autograd.grad(
        chunked_rows(hidden, output, logprobs).sum(), [hidden, output.weight, output.bias]
    )
    wanted = torch.autograd.grad(
        token_logprobs(wanted_head.logits(wanted_hidden), tokens()).sum(),
        [wanted_hidden, wanted_head.weight, wanted_head.bias],
    )
    for grad, want in zip(grads, wanted, strict=True):
        assert float((grad.double() - want).norm() / want.norm()) < rtol


def test_no_row_is_a_zero_that_backpropagates():
    hidden, output = build("plain")
    empty = chunked_rows(hidden[:0], output, lambda logits, block: logits.sum(dim=-1)).sum()
    (grad,) = torch.autograd.grad(empty, [hidden])
    assert float(empty.detach()) == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))


def test_a_frozen_head_gets_no_gradient():
    hidden, output = build("plain")
    frozen = OutputHead(output.weight.detach())
    chunked_rows(hidden, frozen, logprobs).sum().backward()
    assert hidden.grad is not None
    assert frozen.weight.grad is None


@pytest.mark.parametrize("factors", ["one for all", "one each", "on both columns"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_gradient_taken_with_the_forward_is_the_plain_one(kind, factors, block_rows):
    """With one factor it is used as it is; otherwise the logits are formed again."""
    hidden, output = build(kind)

    def rows(logits, block):
        return torch.stack([logprobs(logits, block), logits.square().sum(dim=-1)], dim=-1)

    upstream = torch.zeros(ROWS, 2, dtype=torch.float64)
    upstream[:, 0] = 0.7 if factors == "one for all" else torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    if factors == "on both columns":
        upstream[:, 0], upstream[:, 1] = 0.7, 0.3
    leaves = [leaf for leaf in (hidden, output.weight, output.bias) if leaf is not None]
    early = chunked_rows(hidden, output, rows, gradient_with_forward=True)
    wanted = rows(output.logits(hidden), slice(0, ROWS))
    torch.testing.assert_close(early, wanted, rtol=1e-12, atol=1e-12)
    for grad, want in zip(
        torch.autograd.grad(early, leaves, upstream),
        torch.autograd.grad(wanted, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)
