"""compose_loss on a tiny Llama: against plain loops, against the plugin, and against itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from composer_prime_plugin import ComposerConfig, LossInputs, blocks, loss_fn
from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.errors import AlignmentError, LossInputError
from composer_trl_host import head
from composer_trl_host.alignment import ErrorSite, build_site_batch
from composer_trl_host.compose import compose_loss

RTOL64 = 1e-9
"""Double precision, a few thousand additions: measured differences stay below 1e-12."""

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]
COMPLETIONS = [[20, 21, 22, 23, 24, 25, 26], [30, 31, 32, 33], [40, 41, 42, 43, 44]]
SAMPLED = [[1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 1, 1]]
ADVANTAGES = [0.7, -0.4, 0.0]
# Row 0 has two sites, row 1 none, row 2 one. Positions count prompt and completion.
SITES = [
    [ErrorSite(5, 6, 5, (50,), "a", "x"), ErrorSite(8, 11, 7, (51, 52, 53), "b", "x")],
    [],
    [ErrorSite(5, 8, 4, (54, 55), "a", "x")],
]


def make_batch(
    rows: list[int] | None = None, with_sites: bool = True, with_inference: bool = True, extra_pad: int = 0
) -> dict[str, Any]:
    rows = list(range(3)) if rows is None else rows
    left = max(len(PROMPTS[r]) for r in rows) + extra_pad
    right = max(len(COMPLETIONS[r]) for r in rows)
    ids = torch.zeros(len(rows), left + right, dtype=torch.long)
    attention = torch.zeros_like(ids)
    completion = torch.zeros_like(ids, dtype=torch.bool)
    response = torch.zeros_like(completion)
    inference = torch.zeros(ids.shape, dtype=torch.float64)
    offsets = []
    for i, r in enumerate(rows):
        start, size = left - len(PROMPTS[r]), len(COMPLETIONS[r])
        offsets.append(start)
        ids[i, start:left] = torch.tensor(PROMPTS[r])
        ids[i, left : left + size] = torch.tensor(COMPLETIONS[r])
        attention[i, start : left + size] = 1
        completion[i, left : left + size] = True
        response[i, left : left + size] = torch.tensor(SAMPLED[r]).bool()
        generator = torch.Generator().manual_seed(r)
        inference[i, left : left + size] = -5.5 + 0.4 * torch.randn(
            size, generator=generator, dtype=torch.float64
        )
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion,
        "response_mask": response,
        "advantages": torch.tensor([ADVANTAGES[r] for r in rows], dtype=torch.float64),
        "inference_logprobs": inference if with_inference else None,
    }
    if with_sites:
        real = [[*PROMPTS[r], *COMPLETIONS[r]] for r in rows]
        batch.update(build_site_batch(real, [SITES[r] for r in rows], offsets, pad_token_id=0).as_batch())
    return batch


def config(**sdpo: Any) -> ComposerConfig:
    return ComposerConfig(policy={"objective": "dr_grpo", "kl_tau": 0.05}, sdpo={"weight": 0.5, **sdpo})


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def reference(model: torch.nn.Module, sdpo_weight: float) -> tuple[torch.Tensor, float, int]:
    """Both channels by plain loops over single, unpadded sequences; the divergence by its definition."""
    policy = torch.zeros((), dtype=torch.float64)
    divergence = torch.zeros((), dtype=torch.float64)
    tokens = errors = 0
    for r in range(3):
        ids = PROMPTS[r] + COMPLETIONS[r]
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
        inference = make_batch()["inference_logprobs"][r][make_batch()["completion_mask"][r]]
        for j, sampled in enumerate(SAMPLED[r]):
            if not sampled:
                continue
            position = len(PROMPTS[r]) + j
            logprob = log_softmax(logits[position - 1], -1)[ids[position]]
            log_r = logprob - inference[j]
            policy = policy + (-ADVANTAGES[r] * log_r.exp() + 0.05 * -log_r)
            tokens += 1
        for s in SITES[r]:
            teacher_ids = ids[: s.splice_at] + list(s.hint_ids) + ids[s.splice_at : s.stop]
            with torch.no_grad():
                teacher = model(input_ids=torch.tensor([teacher_ids])).logits[0].double()
            for position in range(s.start, s.stop):
                p = logits[position - 1].softmax(-1)
                q = teacher[position + len(s.hint_ids) - 1].softmax(-1)
                m = 0.5 * p + 0.5 * q
                divergence = divergence + 0.5 * (q * (q / m).log()).sum() + 0.5 * (p * (p / m).log()).sum()
                errors += 1
    return policy / tokens + sdpo_weight * divergence / tokens, float(divergence.detach()) / errors, errors


def test_both_channels_equal_plain_loops_over_unpadded_sequences(model):
    model = model.double()
    result = compose_loss(model, make_batch(), config())
    wanted, jsd, errors = reference(model, 0.5)
    torch.testing.assert_close(result.loss, wanted, rtol=RTOL64, atol=0)
    assert (result.sdpo_tokens, result.sdpo_sites, result.loss_tokens) == (errors, 3, 12)
    assert math.isclose(float(result.sdpo_sum) / errors, jsd, rel_tol=1e-6)
    torch.testing.assert_close(gradient(model, result.loss), gradient(model, wanted), rtol=1e-7, atol=1e-12)


def test_there_is_one_student_forward(model):
    calls: list[bool] = []
    model.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    compose_loss(model, make_batch(), config())
    assert calls == [True, False]  # the student with gradient, the teacher without


def test_weight_zero_reproduces_channel_one_bit_for_bit(model):
    off = compose_loss(model, make_batch(), config(weight=0.0)).loss
    no_sites = compose_loss(model, make_batch(with_sites=False), config()).loss
    warm = compose_loss(model, {**make_batch(), "step": 0}, config(warmup_steps=10)).loss
    assert torch.equal(off, no_sites)
    assert torch.equal(off, warm)
    assert torch.equal(gradient(model, off), gradient(model, no_sites))


def test_an_empty_hint_makes_the_divergence_exactly_zero_on_one_sequence(model):
    batch = make_batch(rows=[2])
    ids = PROMPTS[2] + COMPLETIONS[2]
    site = ErrorSite(5, len(ids), 4, (), "a", "x")
    batch.update(build_site_batch([ids], [[site]], [0], pad_token_id=0).as_batch())
    result = compose_loss(model, batch, config())
    assert result.sdpo_tokens == 3
    assert float(result.sdpo_sum) == 0.0


def test_padding_moves_nothing(model):
    model = model.double()
    plain = compose_loss(model, make_batch(), config())
    padded = compose_loss(model, make_batch(extra_pad=5), config())
    torch.testing.assert_close(plain.loss, padded.loss, rtol=RTOL64, atol=1e-14)


@pytest.mark.parametrize("normalization", ["loss_tokens", "error_tokens"])
@pytest.mark.parametrize("objective", ["dppo", "ipo", "dr_grpo"])
@pytest.mark.parametrize("cut", [[[0], [1], [2]], [[2, 0], [1]], [[1], [0, 2]]])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(model, cut, objective, normalization):
    model = model.double()
    settings = ComposerConfig(
        policy={"objective": objective}, sdpo={"weight": 0.5, "normalization": normalization}
    )
    counts = {"num_loss_tokens": 12, "num_error_tokens": 7}
    whole = gradient(model, compose_loss(model, {**make_batch(), **counts}, settings).loss)
    parts = sum(
        gradient(model, compose_loss(model, {**make_batch(rows), **counts}, settings).loss) for rows in cut
    )
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("objective", ["dppo", "ipo", "dr_grpo"])
def test_the_policy_loss_equals_the_plugins_to_the_bit(model, objective):
    """The same log-probs through PRIME-RL's loop over samples and its one division."""
    settings = ComposerConfig(policy={"objective": objective, "kl_tau": 0.02})
    batch = make_batch(with_sites=False)
    result = compose_loss(model, batch, settings)
    rows = [row.clone().requires_grad_() for row in result.trainer_logprobs]
    total = rows[0].sum() * 0.0
    for r, trainer in enumerate(rows):
        mask = batch["completion_mask"][r]
        inputs = LossInputs(
            trainer_logprobs=trainer,
            inference_logprobs=batch["inference_logprobs"][r][mask].float(),
            ref_logprobs=None,
            advantages=torch.full_like(trainer, ADVANTAGES[r]).detach(),
            loss_mask=batch["response_mask"][r][mask],
        )
        total = total + loss_fn(inputs, policy={"objective": objective, "kl_tau": 0.02}).loss
    assert (total / 12).detach().numpy().tobytes() == result.loss.detach().numpy().tobytes()


def test_the_teachers_are_read_in_eval_mode_and_the_student_keeps_its_own(model):
    model.train()
    seen: list[bool] = []
    model.model.register_forward_hook(lambda module, *_: seen.append(module.training))
    compose_loss(model, make_batch(), config())
    assert seen == [True, False]
    assert model.training


def test_sources_split_the_divergence(model):
    result = compose_loss(model, make_batch(), config())
    assert {name: count for name, (_, count) in result.sources.items()} == {"a": 4, "b": 3}
    assert math.isclose(
        sum(total for total, _ in result.sources.values()), float(result.sdpo_sum), rel_tol=1e-5
    )


def test_all_masked_rows_backpropagate_exact_zeros(model):
    batch = make_batch(with_sites=False)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    grads = gradient(model, compose_loss(model, batch, config()).loss)
    assert torch.equal(grads, torch.zeros_like(grads))


def test_a_misaligned_site_is_an_error_before_any_teacher_forward(model):
    batch = make_batch()
    batch["teacher_input_ids"][0, 6] = 5
    with pytest.raises(AlignmentError, match="paired tokens must be equal"):
        compose_loss(model, batch, config())


def test_nan_in_inference_logprobs_is_named(model):
    batch = make_batch()
    row, column = batch["response_mask"].nonzero()[1].tolist()
    batch["inference_logprobs"][row, column] = float("nan")
    with pytest.raises(
        LossInputError,
        match="inference_logprobs must be finite at unmasked positions; found nan at position 1",
    ):
        compose_loss(model, batch, config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion_mask": torch.ones(3, 11)}, "completion_mask must be bool"),
        ({"response_mask": torch.ones(3, 5, dtype=torch.bool)}, "response_mask must have input_ids' shape"),
        (
            {"response_mask": torch.ones(3, 11, dtype=torch.bool)},
            "response_mask must lie inside completion_mask",
        ),
    ],
)
def test_bad_masks_are_named(model, change, message):
    with pytest.raises(LossInputError, match=message):
        compose_loss(model, {**make_batch(), **change}, config())


def test_channel_one_is_taken_at_the_sampling_temperature_and_channel_two_is_not(model):
    model = model.double()
    hot = compose_loss(model, {**make_batch(), "temperature": 0.5}, config())
    cold = compose_loss(model, make_batch(), config())
    ids = torch.tensor([PROMPTS[1] + COMPLETIONS[1]])
    logits = model(input_ids=ids).logits[0, 1:-1].detach()
    wanted = log_softmax(logits / 0.5, -1).gather(-1, ids[0, 2:, None])[:, 0]
    torch.testing.assert_close(hot.trainer_logprobs[1], wanted, rtol=RTOL64, atol=0)
    assert torch.equal(hot.sdpo_sum, cold.sdpo_sum)


def test_loss_weights_scale_channel_one_token_by_token(model):
    model = model.double()
    batch = make_batch(with_sites=False)
    weights = torch.zeros_like(batch["inference_logprobs"])
    assert float(compose_loss(model, {**batch, "loss_weights": weights}, config()).loss.detach()) == 0.0
    doubled = compose_loss(model, {**batch, "loss_weights": weights + 2}, config()).loss
    torch.testing.assert_close(doubled, 2 * compose_loss(model, batch, config()).loss)


def test_a_non_finite_value_at_a_masked_token_changes_nothing(model):
    batch = make_batch()
    masked = batch["completion_mask"] & ~batch["response_mask"]
    zeroed = {**batch, "inference_logprobs": batch["inference_logprobs"].masked_fill(masked, 0.0)}
    broken = {**batch, "inference_logprobs": batch["inference_logprobs"].masked_fill(masked, float("nan"))}
    wanted, result = (compose_loss(model, b, config()).loss for b in (zeroed, broken))
    assert bool(torch.isfinite(result.detach()))
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=0)


def test_a_micro_batch_whose_sites_are_all_left_out_trains_channel_one_alone(model):
    batch = make_batch()
    batch["teacher_input_ids"] = batch["teacher_input_ids"] + 1
    result = compose_loss(model, batch, config(strict=False))
    assert (result.sdpo_sites, result.sites_left_out) == (0, batch["teacher_input_ids"].size(0))
    plain = compose_loss(model, make_batch(with_sites=False), config())
    parameters = list(model.parameters())
    torch.testing.assert_close(result.loss, plain.loss, rtol=1e-12, atol=0)
    for mine, wanted in zip(
        torch.autograd.grad(result.loss, parameters),
        torch.autograd.grad(plain.loss, parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


def test_a_micro_batch_without_a_completion_token_backpropagates_a_zero(model):
    batch = make_batch(with_sites=False)
    for name in ("completion_mask", "response_mask"):
        batch[name] = torch.zeros_like(batch[name])
    loss = compose_loss(model, batch, config()).loss
    assert float(loss.detach()) == 0.0
    for gradient in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True):
        assert gradient is None or not gradient.any()


def test_a_kept_graph_gives_the_same_gradient_every_time(model):
    loss = compose_loss(model, make_batch(), config()).loss
    first, *more = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
        )
        for _ in range(3)
    ]
    for again in more:
        torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-7)


def test_both_sides_are_read_in_one_precision_under_autocast(model):
    """accelerate wraps the forward of the whole model; with an empty hint the divergence must stay 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from uniform, so that a precision shows
    batch = make_batch(rows=[2])
    ids = PROMPTS[2] + COMPLETIONS[2]
    batch.update(build_site_batch([ids], [[ErrorSite(5, len(ids), 4, (), "a", "x")]], [0], 0).as_batch())

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    plain = model.forward
    model.forward = lambda *args, **kwargs: _under(autocast(), plain, *args, **kwargs)
    try:
        same = compose_loss(model, batch, config(), autocast=autocast)
        other = compose_loss(model, batch, config())
    finally:
        del model.forward
    assert float(same.sdpo_sum) < 1e-6
    assert float(other.sdpo_sum) > 1e-3  # what it would be with the teacher in float32


def _under(context, function, *args, **kwargs):
    with context:
        return function(*args, **kwargs)


def test_recovery_tokens_before_the_first_completion_token_are_read_where_they_stand(model, monkeypatch):
    from composer_trl_host import reading

    model = model.double()
    batch = make_batch()
    real = [[*PROMPTS[r], *COMPLETIONS[r]] for r in range(3)]
    early = [[ErrorSite(2, 3, 1, (50,), "a", "x")], [], []]
    batch.update(build_site_batch(real, early, [0, 2, 1], pad_token_id=0).as_batch())
    wanted = compose_loss(model, batch, config()).sdpo_sum
    monkeypatch.setattr(reading, "_parts", lambda _model: (None, None))
    torch.testing.assert_close(compose_loss(model, batch, config()).sdpo_sum, wanted, rtol=1e-9, atol=0)


def test_padding_before_a_completion_token_is_refused(model):
    batch = make_batch(with_sites=False)
    batch["attention_mask"][1, 3] = 0
    with pytest.raises(LossInputError, match="every completion token and the token before it must be real"):
        compose_loss(model, batch, config())


ESTIMATORS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, capped": {"importance_cap": 1.2},
    "tail": {"estimator": "top_k", "top_k": 5, "jsd_beta": 0.3},
    "no tail": {"estimator": "top_k", "top_k": 5, "top_k_tail": False, "jsd_beta": 0.0},
    "teacher's": {"estimator": "top_k", "top_k": 5, "top_k_support": "teacher", "jsd_beta": 1.0},
    "sampled": {"estimator": "sampled", "jsd_beta": 1.0},
    "sampled, capped": {"estimator": "sampled", "jsd_beta": 1.0, "importance_cap": 1.2},
}


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """In float64 and not nearly uniform, so that supports and ratios differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.double()


def plain_divergence(student: Tensor, teacher: Tensor, token: int, ratio: Tensor, sdpo: SDPOConfig) -> Tensor:
    """One position, written down with autograd."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    weight = 1.0 if sdpo.importance_cap is None else ratio.detach().clamp(max=sdpo.importance_cap)
    if sdpo.estimator == "sampled":
        gap = (p[token] / q[token]).log().detach()
        # The value is the gap, the gradient that of the gap times the log-prob.
        return weight * (gap + gap * (p[token].log() - p[token].log().detach()))
    if sdpo.estimator == "top_k":
        chosen = (q if sdpo.top_k_support == "teacher" else p).argsort(descending=True)[: sdpo.top_k]
        p, q = p[chosen], q[chosen]
        if sdpo.top_k_tail:
            p, q = (torch.cat([side, 1 - side.sum(0, keepdim=True)]) for side in (p, q))
        else:
            p, q = p / p.sum(), q / q.sum()
    beta = sdpo.jsd_beta
    if beta == 0.0:
        return weight * (q * (q / p).log()).sum()
    if beta == 1.0:
        return weight * (p * (p / q).log()).sum()
    m = (1 - beta) * p + beta * q
    return weight * (beta * (q * (q / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum())


def unpadded(model: torch.nn.Module, temperature: float = 1.0) -> list[dict[str, Any]]:
    """Per row: the student's ``logits`` of its completion tokens, their ``ids``, ``logprobs`` at the sampling
    temperature and ``inference`` log-probs; the ``teacher``'s logits and the ``mask`` of its error tokens."""
    rows = []
    for r in range(3):
        prompt, ids = len(PROMPTS[r]), torch.tensor(PROMPTS[r] + COMPLETIONS[r])
        logits = model(input_ids=ids[None]).logits[0, prompt - 1 : -1]
        logprobs = log_softmax(logits / temperature, -1).gather(-1, ids[prompt:, None])[:, 0]
        batch = make_batch()
        teacher = torch.zeros_like(logits)
        mask = torch.zeros(ids.numel() - prompt, dtype=torch.bool)
        for s in SITES[r]:
            hinted = torch.cat([ids[: s.splice_at], torch.tensor(s.hint_ids), ids[s.splice_at : s.stop]])
            shift = len(s.hint_ids)
            with torch.no_grad():
                read = model(input_ids=hinted[None]).logits[0]
            teacher[s.start - prompt : s.stop - prompt] = read[s.start + shift - 1 : s.stop + shift - 1]
            mask[s.start - prompt : s.stop - prompt] = True
        rows.append(
            {
                "logits": logits,
                "ids": ids[prompt:],
                "logprobs": logprobs,
                "inference": batch["inference_logprobs"][r][batch["completion_mask"][r]],
                "teacher": teacher,
                "mask": mask,
            }
        )
    return rows


@pytest.fixture(params=["whole", "in blocks"])
def blocks_of_four_and_two(request, monkeypatch):
    if request.param == "in blocks":
        monkeypatch.setattr(head, "CHUNK_ENTRIES", 4 * 264)
        monkeypatch.setitem(blocks.BLOCK_ENTRIES, "cpu", 2 * 264)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_estimator_equals_plain_autograd_over_unpadded_sequences(
    model, kind, temperature, blocks_of_four_and_two
):
    """The ratio is taken at the sampling temperature, the divergence at its own."""
    model = spread(model)
    settings = ComposerConfig(
        policy={"adv_tau": 0.0, "kl_tau": 0.0}, sdpo={"weight": 1.0, **ESTIMATORS[kind]}
    )
    result = compose_loss(model, {**make_batch(), "temperature": temperature}, settings)
    wanted = torch.zeros((), dtype=torch.float64)
    ratios = []
    for row in unpadded(model, temperature):
        for t in row["mask"].nonzero().flatten().tolist():
            ratios.append((row["logprobs"][t] - row["inference"][t]).exp())
            wanted = wanted + plain_divergence(
                row["logits"][t], row["teacher"][t], int(row["ids"][t]), ratios[-1], settings.sdpo
            )
    # The cap acts on some and not on others.
    assert min(ratios) < 1.2 < max(ratios)
    torch.testing.assert_close(result.sdpo_sum, wanted.detach(), rtol=RTOL64, atol=0)
    torch.testing.assert_close(
        gradient(model, result.loss), gradient(model, wanted / 12), rtol=1e-7, atol=1e-12
    )


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_both_hosts_agree_on_every_estimator(model, kind, blocks_of_four_and_two):
    model = spread(model)
    kwargs = {"policy": {"objective": "dr_grpo"}, "sdpo": {"weight": 0.5, **ESTIMATORS[kind]}}
    host = compose_loss(model, make_batch(), ComposerConfig(**kwargs))
    total = torch.zeros((), dtype=torch.float64)
    divergence = 0.0
    for r, row in enumerate(unpadded(model)):
        sample = _SampleWithIds(
            trainer_logprobs=row["logprobs"],
            inference_logprobs=row["inference"],
            ref_logprobs=None,
            advantages=torch.full_like(row["inference"], ADVANTAGES[r]),
            loss_mask=torch.tensor(SAMPLED[r]).bool(),
            trainer_logits=row["logits"],
            teacher_logits=row["teacher"],
            sdpo_mask=row["mask"],
            token_ids=row["ids"],
        )
        out = loss_fn(sample, **kwargs)
        total = total + out.loss
        divergence += float(out.metrics["loss/sdpo_weighted"]) / 0.5
    assert math.isclose(divergence, float(host.sdpo_sum), rel_tol=1e-6)
    torch.testing.assert_close(host.loss, total / 12, rtol=RTOL64, atol=0)
    torch.testing.assert_close(gradient(model, host.loss), gradient(model, total / 12), rtol=1e-7, atol=1e-12)


@dataclass
class _SampleWithIds(LossInputs):
    """What a trainer must hand over for the sampled-token estimator."""

    token_ids: Tensor | None = None


def test_a_row_of_unknown_log_probs_has_a_ratio_of_one(model):
    model = spread(model)
    plain = compose_loss(model, make_batch(), config())
    known = compose_loss(model, make_batch(), config(importance_cap=1.2))
    capped = compose_loss(model, make_batch(with_inference=False), config(importance_cap=1.2))
    torch.testing.assert_close(capped.sdpo_sum, plain.sdpo_sum, rtol=RTOL64, atol=0)
    assert abs(float(known.sdpo_sum / plain.sdpo_sum) - 1) > 1e-2
    # Row 0, the only one with a site of source b, is known; row 2 is not.
    some = {**make_batch(), "logprobs_known": torch.tensor([True, True, False])}
    mixed = compose_loss(model, some, config(importance_cap=1.2))
    assert math.isclose(mixed.sources["b"][0], known.sources["b"][0], rel_tol=1e-6)
    assert not math.isclose(mixed.sources["a"][0], known.sources["a"][0], rel_tol=1e-3)
