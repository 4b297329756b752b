"""``loss_fn``: the checks of its contract, the gate of channel 2, and channel 2 itself."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import composer_prime_plugin
from composer_prime_plugin import plugin
from composer_prime_plugin.contract import LossInputs
from composer_prime_plugin.errors import ConfigError, LossInputError, SDPOUnavailableError
from composer_prime_plugin.plugin import loss_fn

V0_8 = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
VOCABULARY = 13
CHANNEL_2_REL = 1e-5
"""Channel 2 in float32 against a float64 loop."""


def number(value: Tensor) -> float:
    """``float`` of a tensor that may carry gradient, without torch's warning."""
    return float(value.detach())


def sample(n: int = 12, **changes: Any) -> LossInputs:
    random = torch.Generator().manual_seed(3)
    inputs = LossInputs(
        trainer_logprobs=(-2.0 * torch.rand(n, generator=random)).requires_grad_(True),
        inference_logprobs=-2.0 * torch.rand(n, generator=random),
        ref_logprobs=None,
        advantages=torch.rand(n, generator=random) - 0.5,
        loss_mask=torch.arange(n) % 8 != 0,
    )
    return dataclasses.replace(inputs, **changes)


def with_logits(n: int = 12, **changes: Any) -> LossInputs:
    random = torch.Generator().manual_seed(4)
    return sample(
        n,
        trainer_logits=(2 * torch.randn(n, VOCABULARY, generator=random)).requires_grad_(True),
        teacher_logits=2 * torch.randn(n, VOCABULARY, generator=random),
        # Position 8 is an error token that channel 1 does not train.
        sdpo_mask=torch.arange(n) % 3 == 2,
        **changes,
    )


def foreign(fields: tuple[str, ...], *functions: str) -> type[Any]:
    """A ``LossInputs`` of a PRIME-RL with these fields and loss functions."""
    name = f"{__name__}.foreign.{'.'.join((*fields, *functions))}"
    module = ModuleType(name)
    for function in functions:
        setattr(module, function, None)
    sys.modules[name] = module
    made = dataclasses.make_dataclass("LossInputs", fields)
    made.__module__ = name
    return made


def as_foreign(inputs: LossInputs, fields: tuple[str, ...], *functions: str) -> Any:
    return foreign(fields, *functions)(**{name: getattr(inputs, name, None) for name in fields})


def test_the_loss_is_a_sum_and_its_outputs_have_two_fields() -> None:
    result = loss_fn(sample())
    assert {item.name for item in dataclasses.fields(result)} == {"loss", "metrics"}
    assert result.loss.dim() == 0
    halves = [
        sample(
            trainer_logprobs=sample().trainer_logprobs.detach()[half].requires_grad_(True),
            inference_logprobs=sample().inference_logprobs[half],
            advantages=sample().advantages[half],
            loss_mask=sample().loss_mask[half],
        )
        for half in (slice(0, 6), slice(6, 12))
    ]
    assert number(result.loss) == pytest.approx(sum(number(loss_fn(half).loss) for half in halves), rel=1e-6)


def test_the_name_in_a_toml_is_the_function() -> None:
    assert composer_prime_plugin.loss_fn is loss_fn


@pytest.mark.parametrize("objective", ["dppo", "ipo", "dr_grpo"])
def test_an_all_masked_sample_backpropagates_exact_zeros(objective: str) -> None:
    inputs = sample(loss_mask=torch.zeros(12, dtype=torch.bool))
    result = loss_fn(inputs, policy={"objective": objective})
    result.loss.backward()
    assert number(result.loss) == 0.0
    assert inputs.trainer_logprobs.grad.tolist() == [0.0] * 12


def test_a_sample_without_tokens_is_zero() -> None:
    assert number(loss_fn(sample(0)).loss) == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inference_logprobs": torch.zeros(11)}, r"inference_logprobs must have .* \(12,\); found \(11,\)"),
        ({"advantages": torch.zeros(13)}, r"advantages must have .* \(12,\); found \(13,\)"),
        ({"advantages": torch.zeros(())}, r"advantages must have .* \(12,\); found \(\)"),
        ({"loss_weights": torch.ones(1)}, r"loss_weights must have .* \(12,\); found \(1,\)"),
        ({"teacher_logprobs": torch.ones(2)}, r"teacher_logprobs must have .* \(12,\); found \(2,\)"),
        ({"loss_mask": torch.ones(12)}, r"loss_mask must be bool.*; found torch.float32; use mask.bool\(\)"),
        ({"sdpo_mask": torch.ones(12)}, r"sdpo_mask must be bool.*; found torch.float32"),
        ({"loss_mask": None}, "loss_mask must be a tensor"),
        (
            {"trainer_logprobs": torch.zeros(1, 12)},
            r"must be a 1-D floating tensor \(seq,\).*found \(1, 12\)",
        ),
        ({"trainer_logprobs": torch.zeros(12, dtype=torch.int64)}, "must be a 1-D floating tensor"),
        ({"trainer_logprobs": None}, "found NoneType"),
    ],
)
def test_tensors_that_break_the_contract_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        loss_fn(sample(**changes))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stream", ["trainer_logprobs", "inference_logprobs", "advantages", "loss_weights"])
@pytest.mark.parametrize("objective", ["dppo", "ipo", "dr_grpo"])
def test_a_non_finite_value_at_an_unmasked_position_is_named(stream: str, bad: float, objective: str) -> None:
    mask = torch.ones(12, dtype=torch.bool)
    values = getattr(sample(loss_weights=torch.ones(12)), stream).detach().clone()
    values[7] = bad
    inputs = sample(**{"loss_weights": torch.ones(12), "loss_mask": mask, stream: values})
    with pytest.raises(LossInputError, match=rf"{stream} must be finite .* found -?(nan|inf) at position 7 "):
        loss_fn(inputs, policy={"objective": objective})


def test_an_overflowing_ratio_is_named() -> None:
    inference = sample().inference_logprobs.clone()
    inference[4] = -200.0
    inputs = sample(inference_logprobs=inference, loss_mask=torch.ones(12, dtype=torch.bool))
    with pytest.raises(LossInputError, match=r"importance ratio .* found inf at position 4 "):
        loss_fn(inputs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stream", ["trainer_logprobs", "inference_logprobs", "advantages", "loss_weights"])
@pytest.mark.parametrize("objective", ["dppo", "ipo", "dr_grpo"])
def test_non_finite_values_at_masked_positions_do_not_matter(stream: str, bad: float, objective: str) -> None:
    base = sample(loss_weights=torch.linspace(0.5, 2.0, 12))
    values = getattr(base, stream).detach().masked_fill(~base.loss_mask, bad)
    zeros = {
        name: getattr(base, name).detach().masked_fill(~base.loss_mask, 0.0)
        for name in ("trainer_logprobs", "inference_logprobs", "advantages", "loss_weights")
    }
    zeros["trainer_logprobs"].requires_grad_(True)
    clean = dataclasses.replace(base, **zeros)
    dirty = dataclasses.replace(base, **{stream: values})
    dirty.trainer_logprobs = dirty.trainer_logprobs.detach().clone().requires_grad_(True)
    results = []
    for inputs in (clean, dirty):
        result = loss_fn(inputs, policy={"objective": objective})
        result.loss.backward()
        metrics = {name: float(value) for name, value in result.metrics.items()}
        results.append((number(result.loss), inputs.trainer_logprobs.grad.tolist(), metrics))
    assert results[0] == results[1]
    assert results[0][0] != 0.0


def test_kwargs_are_validated_once_per_content(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Counting(plugin.ComposerConfig):
        def __init__(self, **kwargs: Any) -> None:
            made.append(kwargs)
            super().__init__(**kwargs)

    monkeypatch.setattr(plugin, "ComposerConfig", Counting)
    plugin._parse.cache_clear()
    for _ in range(5):
        loss_fn(sample(), policy={"objective": "dppo", "kl_tau": 0.125})
    assert made == [{"policy": {"objective": "dppo", "kl_tau": 0.125}}]
    loss_fn(sample(), policy={"objective": "dppo", "kl_tau": 0.25})
    assert len(made) == 2
    plugin._parse.cache_clear()


def test_equal_numbers_of_other_types_are_not_mixed_up() -> None:
    assert plugin.parse_kwargs({"trl_host": {"environment_kwargs": {"n": 1}}}) != plugin.parse_kwargs(
        {"trl_host": {"environment_kwargs": {"n": [1]}}}
    )
    kinds = [
        plugin.parse_kwargs({"trl_host": {"environment_kwargs": {"n": value}}}).trl_host.environment_kwargs[
            "n"
        ]
        for value in (1, 1.0, True)
    ]
    assert [type(value) for value in kinds] == [int, float, bool]


def test_a_misspelt_key_is_a_validation_error_that_lists_the_valid_ones() -> None:
    with pytest.raises(
        ValidationError, match="unknown key 'polciy'; valid keys are policy, replay, sdpo, trl_host"
    ):
        loss_fn(sample(), polciy={})


def test_a_replay_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replay\.weight must be 0.*found 0\.5"):
        loss_fn(sample(), replay={"weight": 0.5})


def test_the_two_threshold_form_follows_the_trainers_own_functions() -> None:
    fields = ("trainer_logprobs", "inference_logprobs", "teacher_logprobs", "advantages", "loss_mask")
    policy = {"objective": "ipo"}
    older = loss_fn(as_foreign(sample(), fields, "default_loss_fn"), policy=policy)
    newer = loss_fn(as_foreign(sample(), fields, "default_loss_fn", "ipo_loss_fn"), policy=policy)
    assert "is_masked_low" in older.metrics
    assert "is_masked_low" not in newer.metrics


def test_asking_for_channel_2_without_logits_stops_and_names_field_version_and_command() -> None:
    inputs = as_foreign(sample(), V0_8, "default_loss_fn", "ipo_loss_fn")
    with pytest.raises(SDPOUnavailableError) as error:
        loss_fn(inputs, sdpo={"weight": 0.1})
    message = str(error.value)
    assert "LossInputs has no teacher_logits and no trainer_logits" in message
    assert "PRIME-RL of unknown version" in message
    assert "composer-rl run @ rl.toml" in message
    # Warm-up from zero asks for it as well: the first step must not train channel 1 in silence.
    with pytest.raises(SDPOUnavailableError):
        loss_fn(inputs, sdpo={"weight": 0.1, "warmup_steps": 5})
    assert loss_fn(inputs, sdpo={"weight": 0.0}).metrics.keys() == loss_fn(inputs).metrics.keys()


def test_teacher_logits_alone_are_not_enough() -> None:
    inputs = as_foreign(with_logits(), (*V0_8, "teacher_logits"), "ipo_loss_fn")
    with pytest.raises(SDPOUnavailableError, match="LossInputs has no trainer_logits"):
        loss_fn(inputs, sdpo={"weight": 0.1})


@pytest.mark.parametrize(
    ("sdpo", "words"),
    [
        ({"weight": 0.1, "warmup_steps": 5}, "warmup_steps = 5 needs a step"),
        ({"weight": 0.1, "normalization": "error_tokens"}, "needs counts over all ranks"),
    ],
)
def test_what_the_trainer_cannot_do_for_channel_2_is_named(sdpo: dict[str, Any], words: str) -> None:
    inputs = as_foreign(with_logits(), (*V0_8, "teacher_logits", "trainer_logits"), "ipo_loss_fn")
    with pytest.raises(SDPOUnavailableError, match=words):
        loss_fn(inputs, sdpo=sdpo)


def jsd_loop(inputs: LossInputs, mask: list[bool], beta: float) -> tuple[float, list[list[float]]]:
    """Sum over ``mask`` and gradient with respect to the student's logits, in float64 loops."""
    total, gradient = 0.0, []
    for t, counted in enumerate(mask):
        if not counted:
            gradient.append([0.0] * VOCABULARY)
            continue
        p, q = (
            [math.exp(x) / sum(math.exp(y) for y in row) for x in row]
            for row in (inputs.trainer_logits[t].detach().tolist(), inputs.teacher_logits[t].tolist())
        )
        mixed = [(1 - beta) * a + beta * b for a, b in zip(p, q, strict=True)]
        # d D / d p_i = (1 - beta) log(p_i / m_i): the mixture's own derivatives add up to zero.
        slopes = [(1 - beta) * math.log(a / m) for a, m in zip(p, mixed, strict=True)]
        mean = sum(a * s for a, s in zip(p, slopes, strict=True))
        gradient.append([a * (s - mean) for a, s in zip(p, slopes, strict=True)])
        total += sum(
            beta * b * math.log(b / m) + (1 - beta) * a * math.log(a / m)
            for a, b, m in zip(p, q, mixed, strict=True)
        )
    return total, gradient


@pytest.mark.parametrize("fields", ["ours", "a future PRIME-RL's"])
@pytest.mark.parametrize("beta", [0.3, 0.5])
def test_channel_2_equals_a_plain_loop_and_channel_1_keeps_its_bits(beta: float, fields: str) -> None:
    inputs: Any = with_logits()
    logits = inputs.trainer_logits
    channel_1 = loss_fn(sample())
    expected, gradient = jsd_loop(inputs, inputs.sdpo_mask.tolist(), beta)
    if fields != "ours":
        inputs = as_foreign(inputs, (*V0_8, "teacher_logits", "trainer_logits", "sdpo_mask"), "ipo_loss_fn")
    result = loss_fn(inputs, sdpo={"weight": 0.25, "jsd_beta": beta})
    result.loss.backward()
    assert number(result.loss) == pytest.approx(number(channel_1.loss) + 0.25 * expected, rel=CHANNEL_2_REL)
    assert float(result.metrics["loss/sdpo_weighted"]) == pytest.approx(0.25 * expected, rel=CHANNEL_2_REL)
    assert float(result.metrics["loss/sdpo_jsd"]) == pytest.approx(expected / 4, rel=CHANNEL_2_REL)
    assert float(result.metrics["sdpo/error_tokens"]) == 4.0
    assert float(result.metrics["sdpo/weight"]) == 0.25
    assert float(result.metrics["sdpo/clip_fraction"]) == 0.0
    wanted = 0.25 * torch.tensor(gradient)
    assert float((logits.grad - wanted).abs().max()) <= CHANNEL_2_REL * float(wanted.abs().max())
    assert logits.grad[~torch.tensor(with_logits().sdpo_mask.tolist())].abs().max() == 0.0
    channel_1.loss.backward()
    for name, value in channel_1.metrics.items():
        assert float(result.metrics[name]) == float(value)


def test_without_an_sdpo_mask_the_loss_mask_is_used() -> None:
    inputs = with_logits()
    inputs.sdpo_mask = None
    expected, _ = jsd_loop(inputs, inputs.loss_mask.tolist(), 0.5)
    result = loss_fn(inputs, sdpo={"weight": 1.0})
    assert float(result.metrics["loss/sdpo_weighted"]) == pytest.approx(expected, rel=CHANNEL_2_REL)


def test_the_step_drives_the_warm_up() -> None:
    weights = []
    for step in (0, 1, 2, 3, 9):
        result = loss_fn(with_logits(step=step), sdpo={"weight": 0.4, "warmup_steps": 4})
        weights.append(float(result.metrics["sdpo/weight"]))
    assert weights == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_weight_zero_is_channel_1_bit_for_bit() -> None:
    results = []
    for inputs, kwargs in ((sample(), {}), (with_logits(), {"sdpo": {"weight": 0.0}})):
        result = loss_fn(inputs, **kwargs)
        result.loss.backward()
        results.append((number(result.loss), inputs.trainer_logprobs.grad.tolist(), list(result.metrics)))
    assert results[0] == results[1]


def test_no_error_token_gives_zero_with_the_same_metrics() -> None:
    some = loss_fn(with_logits(), sdpo={"weight": 0.5})
    for changes in ({}, {"trainer_logits": None, "teacher_logits": None}):
        inputs = dataclasses.replace(with_logits(), sdpo_mask=torch.zeros(12, dtype=torch.bool), **changes)
        none = loss_fn(inputs, sdpo={"weight": 0.5})
        none.loss.backward()
        assert number(none.loss) == number(loss_fn(sample()).loss)
        assert list(none.metrics) == list(some.metrics)
        assert float(none.metrics["sdpo/error_tokens"]) == 0.0
        assert all(value.dim() == 0 and not value.requires_grad for value in none.metrics.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer_logits": torch.zeros(12, VOCABULARY)}, "must carry gradient .* found a detached tensor"),
        ({"teacher_logits": torch.zeros(12, 7)}, r"one vocabulary .* found \(12, 13\) and \(12, 7\)"),
        ({"teacher_logits": torch.zeros(11, VOCABULARY)}, r"same shape.* found \(12, 13\) and \(11, 13\)"),
        (
            {
                "trainer_logits": torch.zeros(11, 13, requires_grad=True),
                "teacher_logits": torch.zeros(11, 13),
            },
            r"\(seq, vocab\) with seq = 12 .* found \(11, 13\)",
        ),
        ({"teacher_logits": None}, "found teacher_logits = None with 4 error tokens"),
        (
            {"teacher_logits": torch.full((12, VOCABULARY), float("nan"))},
            "counted position 0 .teacher holds NaN",
        ),
    ],
)
def test_logits_that_do_not_fit_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        loss_fn(dataclasses.replace(with_logits(), **changes), sdpo={"weight": 0.5})


def test_nothing_needs_gradient_under_no_grad() -> None:
    with torch.no_grad():
        inputs = dataclasses.replace(with_logits(), trainer_logits=torch.zeros(12, VOCABULARY))
        assert math.isfinite(float(loss_fn(inputs, sdpo={"weight": 0.5}).loss))


class _Synchronizations(TorchDispatchMode):
    """Counts the operations that make the host wait for a device: gathers by a bool mask and scalar reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        by_mask = name == "aten::index" and any(index.dtype == torch.bool for index in args[1])
        self.count += by_mask or name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("objective", "gathers"), [("dppo", 2), ("ipo", 2), ("dr_grpo", 1)])
def test_the_finiteness_check_is_the_one_synchronization_beside_the_float_means(
    objective: str, gathers: int
) -> None:
    with _Synchronizations() as found:
        loss_fn(sample(), policy={"objective": objective})
    assert found.count == gathers + 1


CARRIED = (*V0_8, "teacher_logits", "trainer_logits", "sdpo_mask", "token_ids")


def with_token_ids(**changes: Any) -> Any:
    inputs = as_foreign(with_logits(), CARRIED, "ipo_loss_fn")
    inputs.token_ids = torch.arange(12) % VOCABULARY
    for name, value in changes.items():
        setattr(inputs, name, value)
    return inputs


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


@pytest.mark.parametrize("cap", [None, 1.1])
def test_the_sampled_estimator_and_the_cap_equal_a_plain_loop(cap: float | None) -> None:
    inputs = with_token_ids()
    sdpo = {"weight": 0.25, "estimator": "sampled", "jsd_beta": 1.0, "importance_cap": cap}
    result = loss_fn(inputs, sdpo=sdpo)
    result.loss.backward()
    total, gradient = 0.0, torch.zeros(12, VOCABULARY)
    for t in range(2, 12, 3):
        token = int(inputs.token_ids[t])
        log_p = log_softmax(inputs.trainer_logits[t].tolist())
        gap = log_p[token] - log_softmax(inputs.teacher_logits[t].tolist())[token]
        ratio = math.exp(number(inputs.trainer_logprobs[t]) - float(inputs.inference_logprobs[t]))
        weight = 1.0 if cap is None else min(ratio, cap)
        total += weight * gap
        for i in range(VOCABULARY):
            gradient[t, i] = 0.25 * weight * gap * ((i == token) - math.exp(log_p[i]))
    assert float(result.metrics["loss/sdpo_weighted"]) == pytest.approx(0.25 * total, rel=CHANNEL_2_REL)
    found = inputs.trainer_logits.grad
    assert float((found - gradient).abs().max()) <= CHANNEL_2_REL * float(gradient.abs().max())


@pytest.mark.parametrize("change", [{}, {"top_k": VOCABULARY, "estimator": "top_k"}])
def test_the_cap_weighs_the_divergence_and_leaves_channel_1_alone(change: dict[str, Any]) -> None:
    # Ratios 2 and 1/2 on the first two error tokens, 1 elsewhere; the cap of 1.5 acts on the first.
    inputs = with_logits()
    assert inputs.sdpo_mask is not None
    inputs.sdpo_mask = inputs.sdpo_mask & (torch.arange(12) < 6)
    shift = torch.zeros(12).index_put((torch.tensor([2, 5]),), torch.tensor([2.0, 0.5]).log())
    inputs.inference_logprobs = inputs.trainer_logprobs.detach() - shift
    first, second = (jsd_loop(inputs, [position == t for position in range(12)], 0.5)[0] for t in (2, 5))
    result = loss_fn(inputs, sdpo={"weight": 1.0, "importance_cap": 1.5, **change})
    expected = 1.5 * first + 0.5 * second
    assert float(result.metrics["loss/sdpo_weighted"]) == pytest.approx(expected, rel=CHANNEL_2_REL)
    channel_1 = loss_fn(dataclasses.replace(inputs, trainer_logits=None, teacher_logits=None))
    assert number(result.loss) == pytest.approx(number(channel_1.loss) + expected, rel=CHANNEL_2_REL)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, "needs token_ids, the integer id of each of the 12 tokens; found None"),
        (torch.zeros(12), r"found torch.float32 \(12,\)"),
        (torch.zeros(11, dtype=torch.long), r"found torch.int64 \(11,\)"),
        (torch.full((12,), VOCABULARY), r"must lie in \[0, 13\); found 13 to 13"),
    ],
)
def test_token_ids_that_do_not_fit_are_named(ids: Any, words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        loss_fn(with_token_ids(token_ids=ids), sdpo={"weight": 1.0, "estimator": "sampled", "jsd_beta": 1.0})


def test_the_logits_are_read_in_place_and_not_gathered_by_the_mask() -> None:
    """A gather would copy every error token's row of both sides."""
    inputs = with_logits()
    with _Synchronizations() as found:
        plugin._channel_two(inputs, plugin.parse_kwargs({"sdpo": {"weight": 1.0}}).sdpo, 1.0)
    # The positions of the mask, and whether the sum is finite.
    assert found.count == 2


@pytest.mark.parametrize("key", ["weight", "temperature"])
def test_infinite_settings_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        plugin.parse_kwargs({"sdpo": {key: float("inf")}})
