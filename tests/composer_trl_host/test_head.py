"""The chunked head against the plain one: values, gradients, memory-shaped edge cases."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax

from composer_trl_host import head as module
from composer_trl_host.head import OutputHead, chunked_rows
from composer_trl_host.logprobs import token_logprobs

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


@pytest.mark.parametrize(
    ("device", "vocab", "rows"),
    [("cpu", 2**20, 8), ("cpu", 2**25, 1), ("cuda", 2**20, 512), ("cuda", 2**10, 2**13)],
)
def test_blocks_hold_few_logits_on_a_cpu_and_many_rows_elsewhere(device, vocab, rows):
    # 2**23 logits at once: 8 rows of 2**20, 2**13 rows of 2**10.
    assert module.block_rows(vocab, torch.device(device)) == rows


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("summing", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_no_row_is_a_zero_that_backpropagates_to_everything(kind, summing, early):
    hidden, output = build(kind)
    head = output.summing() if summing else output
    empty = chunked_rows(
        hidden[:0], head, lambda logits, block: logits.sum(dim=-1, keepdim=True), gradient_with_forward=early
    )
    assert empty.shape == (0, 1)
    leaves = [leaf for leaf in (hidden, output.weight, output.bias) if leaf is not None]
    for grad in torch.autograd.grad(empty.sum(), leaves, retain_graph=True):
        assert torch.equal(grad, torch.zeros_like(grad))
    # Beside a call with rows it adds nothing.
    both = empty.sum() + chunked_rows(hidden, head, logprobs).sum()
    wanted = torch.autograd.grad(chunked_rows(hidden, output, logprobs).sum(), leaves)
    for grad, want in zip(torch.autograd.grad(both, leaves), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("early", [False, True])
def test_autocast_around_the_call_changes_nothing(early, block_rows):
    """The backward runs outside of it."""

    def rows(logits, block):
        return logprobs(logits, block).unsqueeze(-1)

    def gradients(cast):
        hidden, output = build("bias", torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            result = chunked_rows(hidden, output, rows, gradient_with_forward=early)
        return result, *torch.autograd.grad(result.sum(), [hidden, output.weight, output.bias])

    for mine, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, wanted)


def test_a_frozen_head_gets_no_gradient():
    hidden, output = build("plain")
    frozen = OutputHead(output.weight.detach())
    chunked_rows(hidden, frozen, logprobs).sum().backward()
    assert hidden.grad is not None
    assert frozen.weight.grad is None


def two_calls(hidden, output):
    """Two calls of one head, of which the second takes its gradient with the forward."""
    upper, lower = hidden[:6], hidden[4:]
    first = chunked_rows(upper, output, lambda logits, block: token_logprobs(logits, tokens()[:6][block]))
    second = chunked_rows(
        lower, output, lambda logits, block: logits.square().sum(dim=-1)[:, None], gradient_with_forward=True
    )
    return (first * torch.linspace(-1, 2, 6, dtype=torch.float64)).sum() + 0.7 * second.sum()


def plain_two_calls(hidden, output):
    logits = output.logits(hidden)
    first = log_softmax(logits[:6], -1)[torch.arange(6), tokens()[:6]]
    second = logits[4:].square().sum()
    return (first * torch.linspace(-1, 2, 6, dtype=torch.float64)).sum() + 0.7 * second


@pytest.mark.parametrize("kind", HEADS)
def test_all_calls_of_a_summing_head_add_up_to_the_plain_gradient(kind, block_rows):
    hidden, output = build(kind)
    leaves = [leaf for leaf in (hidden, output.weight, output.bias) if leaf is not None]
    loss = two_calls(hidden, output.summing())
    wanted = torch.autograd.grad(plain_two_calls(hidden, output), leaves)
    for again in (True, False):
        # The second backward of a kept graph starts from nothing, and so does one after a backward that
        # asked for the hidden states' gradient alone.
        for grad, want in zip(torch.autograd.grad(loss, leaves, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)
        if again:
            (alone,) = torch.autograd.grad(loss, [hidden], retain_graph=True)
            torch.testing.assert_close(alone, wanted[0], rtol=1e-10, atol=1e-12)


def test_a_summing_head_holds_one_tensor_of_its_size():
    """However many calls there are: each one's own would be added into by autograd."""
    hidden, output = build("plain")
    head = output.summing()
    seen = []
    add = module._Gradients.add

    def spied(self, *args):
        add(self, *args)
        seen.append(self.head.weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Gradients, "add", spied)
        (
            chunked_rows(hidden, head, logprobs).sum() + 2 * chunked_rows(hidden, head, logprobs).sum()
        ).backward()
    assert len({tensor.data_ptr() for tensor in seen}) == 1


def test_logits_formed_past_a_summing_head_are_refused_in_the_backward():
    hidden, output = build("plain")
    loss = output.summing().logits(hidden).sum()
    with pytest.raises(RuntimeError, match="must be read through chunked_rows alone"):
        loss.backward()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_of_tokens_and_their_gradient(temperature, dtype):
    """Against log_softmax in float64, forbidden entries included."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    logits[2, 5] = -torch.inf
    logits.requires_grad_()
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    mine = token_logprobs(logits, tokens(), temperature)
    assert mine.dtype == torch.promote_types(dtype, torch.float32)
    (grad,) = torch.autograd.grad(mine, [logits], upstream.to(mine.dtype))
    wide = logits.detach().double().requires_grad_()
    wanted = log_softmax(wide / temperature, -1)[torch.arange(ROWS), tokens()]
    (want,) = torch.autograd.grad(wanted, [wide], upstream)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(mine.double(), wanted, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5))
    torch.testing.assert_close(grad.double(), want, rtol=tolerance, atol=tolerance)
    assert grad.dtype == dtype


@pytest.mark.parametrize("factors", ["one for all", "one each", "on both columns"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_gradient_taken_with_the_forward_is_the_plain_one(kind, factors, block_rows):
    """Also where it is held for some of the rows alone: the head is six wide, and there are eleven rows."""
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


def test_held_gradients_fill_no_more_than_a_tensor_of_the_heads_size_and_are_not_formed_twice(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 2 * VOCAB)
    hidden, output = build("plain")
    formed = []

    def rows(logits, block):
        formed.append((block.start, logits.requires_grad))
        return logits.square().sum(dim=-1, keepdim=True)

    loss = chunked_rows(hidden, output, rows, gradient_with_forward=True).sum()
    # Six wide: the first three blocks of two rows are held.
    assert formed == [(0, True), (2, True), (4, True), (6, False), (8, False), (10, False)]
    formed.clear()
    loss.backward()
    assert formed == [(6, True), (8, True), (10, True)]
