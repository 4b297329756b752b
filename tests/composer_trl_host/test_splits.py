"""The sum of gradients and of figures does not depend on the cut of a step into micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from composer_prime_plugin import ComposerConfig
from composer_trl_host.alignment import ErrorSite, build_site_batch
from composer_trl_host.compose import ComposedLoss, compose_loss

from . import test_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

RTOL = 1e-6
"""In float64; measured differences stay below 1e-9."""
ATOL = 1e-14
"""Far below every gradient that is not zero."""

ROWS = 8
MASKED = 6
"""A row no token of which is trained."""
WITH_SITES = (0, 2, 3, 5)
OBJECTIVES = ("dppo", "ipo", "dr_grpo")
NORMALIZATIONS = ("loss_tokens", "error_tokens")

CUTS = {
    "8 of 1": [[row] for row in range(ROWS)],
    "4 of 2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "a last partial batch": [[0, 1, 2], [3, 4, 5], [6, 7]],
    "other rows together": [[7, 0], [2, 5, 3], [6], [4, 1]],
}


def _row(number: int) -> dict[str, Any]:
    """One row of ragged length; every value is a function of its number."""
    draw = random.Random(number)
    prompt = [draw.randrange(1, 60) for _ in range(2 + number % 4)]
    size = 4 + (number * 5) % 7
    completion = [draw.randrange(1, 60) for _ in range(size)]
    sampled = [number != MASKED and (place == 0 or draw.random() < 0.7) for place in range(size)]
    first = len(prompt)
    sites: list[ErrorSite] = []
    if number in WITH_SITES:
        end = first + size
        hint = tuple(draw.randrange(1, 60) for _ in range(1 + number))
        sites.append(ErrorSite(end - 2, end, end - 3, hint, "ab"[number % 2], "x"))
        if number == 0:
            sites.insert(0, ErrorSite(first + 1, first + 2, first + 1, (50,), "b", "x"))
    return {
        "prompt": prompt,
        "completion": completion,
        "sampled": sampled,
        "inference": [-4.0 + 0.3 * draw.gauss(0, 1) for _ in range(size)],
        "advantage": draw.choice((-0.6, 0.4, 0.9)),
        "sites": sites,
    }


def split_batch(numbers: Sequence[int], with_sites: bool = True) -> dict[str, Any]:
    """Rows ``numbers`` as a batch of ``compose_loss``, padded to their own longest."""
    rows = [_row(number) for number in numbers]
    left = max(len(row["prompt"]) for row in rows)
    width = left + max(len(row["completion"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros_like(ids)
    completion = torch.zeros_like(ids, dtype=torch.bool)
    response = torch.zeros_like(completion)
    inference = torch.zeros(ids.shape, dtype=torch.float64)
    offsets = [left - len(row["prompt"]) for row in rows]
    for place, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        stop = left + len(row["completion"])
        ids[place, offset:stop] = torch.tensor(row["prompt"] + row["completion"])
        attention[place, offset:stop] = 1
        completion[place, left:stop] = True
        response[place, left:stop] = torch.tensor(row["sampled"])
        inference[place, left:stop] = torch.tensor(row["inference"], dtype=torch.float64)
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion,
        "response_mask": response,
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        "inference_logprobs": inference,
        **step_counts(with_sites),
    }
    if with_sites:
        real = [row["prompt"] + row["completion"] for row in rows]
        batch.update(build_site_batch(real, [row["sites"] for row in rows], offsets, 0).as_batch())
    return batch


def step_counts(with_sites: bool) -> dict[str, int]:
    """The whole step's counts, by plain counting."""
    rows = [_row(number) for number in range(ROWS)]
    errors = sum(site.stop - site.start for row in rows for site in row["sites"])
    return {
        "num_loss_tokens": sum(sum(row["sampled"]) for row in rows),
        "num_error_tokens": errors if with_sites else 0,
    }


def split_model(adapter: bool) -> torch.nn.Module:
    """A Llama of 64 entries in float64, where asked with a LoRA adapter that is not zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=61,
        eos_token_id=62,
    )
    model: Any = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # away from uniform, so that the channels' gradients are of one size
    if adapter:
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
        model = get_peft_model(model, lora).double()
    return model.train()


def split_config(objective: str, normalization: str) -> ComposerConfig:
    # A clip that acts on some tokens, so that its count is compared too.
    return ComposerConfig(
        policy={"objective": objective, "kl_tau": 0.05},
        sdpo={"weight": 0.5, "normalization": normalization, "token_clip": 0.02},
    )


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """The gradients that ``backward`` left, as one vector."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([grad.flatten() for grad in grads])


def figures(parts: Sequence[ComposedLoss]) -> dict[str, float]:
    """What the metrics are made of, summed over micro-batches."""
    sums = {
        name: float(sum(float(getattr(part, name)) for part in parts))
        for name in (
            "policy_sum",
            "policy_kl_sum",
            "loss_tokens",
            "sdpo_sum",
            "sdpo_tokens",
            "sdpo_sites",
            "sites_left_out",
            "sdpo_clipped",
        )
    }
    for source in ("a", "b"):
        found = [part.sources.get(source, (0.0, 0)) for part in parts]
        sums[f"{source} nats"] = sum(float(total) for total, _ in found)
        sums[f"{source} tokens"] = float(sum(count for _, count in found))
    rows = [row for part in parts for row in part.policy_metrics]
    for name in sorted(rows[0]):
        sums[f"policy {name}"] = sum(float(row[name]) for row in rows)
    return sums


def one_process(
    objective: str, normalization: str, adapter: bool, with_sites: bool, cut: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The summed gradient and figures of one step in this process."""
    model = split_model(adapter)
    settings = split_config(objective, normalization)
    parts = []
    for numbers in cut:
        part = compose_loss(model, split_batch(numbers, with_sites), settings)
        part.loss.backward()
        parts.append(part)
    return gradient_of(model), figures(parts)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("with_sites", [True, False], ids=["sites in some rows", "no site"])
@pytest.mark.parametrize("adapter", [False, True], ids=["all parameters", "lora"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_cut_gives_the_gradient_and_the_figures_of_one_batch(
    objective, normalization, adapter, with_sites
):
    case = (objective, normalization, adapter, with_sites)
    wanted, sums = one_process(*case, [range(ROWS)])
    assert float(wanted.abs().max()) > 1e-3
    for name, cut in CUTS.items():
        found, parts = one_process(*case, cut)
        torch.testing.assert_close(
            found, wanted, rtol=RTOL, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert parts == pytest.approx(sums, rel=RTOL, abs=ATOL), name


def test_the_cuts_cover_what_they_are_for():
    """Without this a change of the rows could leave the cases above without their point."""
    rows = [_row(number) for number in range(ROWS)]
    lengths = {len(row["prompt"]) + len(row["completion"]) for row in rows}
    assert len(lengths) > 4
    assert not any(rows[MASKED]["sampled"])
    assert not rows[MASKED]["sites"]
    _, sums = one_process("dr_grpo", "loss_tokens", False, True, [range(ROWS)])
    assert sums["sdpo_sites"] == 5
    assert sums["sdpo_tokens"] == step_counts(True)["num_error_tokens"] == 9
    assert sums["loss_tokens"] == step_counts(True)["num_loss_tokens"]
    assert 0 < sums["sdpo_clipped"] < 9
    assert all(sorted(row for part in cut for row in part) == list(range(ROWS)) for cut in CUTS.values())


def test_an_evaluation_between_two_steps_changes_neither_weights_nor_figures(model, tokenizer, tmp_path):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    ends = []
    for between in (False, True):
        model.load_state_dict(state)
        # A step is two micro-batches; both steps are logged.
        trainer = test_trainer.build(
            model, tokenizer, tmp_path, micro=2, per_device_eval_batch_size=4, num_generations_eval=2
        )
        trainer.eval_dataset = trainer.train_dataset.select(range(4))
        if between:
            trainer.add_callback(_EvaluateOnce(trainer))
        trainer.train()
        ends.append((test_trainer.steps_of(trainer), [p.detach().clone() for p in model.parameters()]))
        assert any("eval_loss" in row for row in trainer.state.log_history) == between
    (plain, weights), (evaluated, others) = ends
    for name in (*test_trainer.NAMED, "loss"):
        assert [row[name] for row in plain] == [row[name] for row in evaluated], name
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


class _EvaluateOnce(TrainerCallback):
    """Evaluates before the second step. Sampling draws from torch's generator, which is put back."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            drawn = torch.get_rng_state()
            metrics = self.trainer.evaluate()
            torch.set_rng_state(drawn)
            assert metrics["eval_loss"] == pytest.approx(metrics["eval_loss/total"], rel=1e-4)


def test_a_step_in_micro_batches_after_a_checkpoint_is_the_step_without_it(model, tokenizer, tmp_path):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    shared = {"micro": 2, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    whole = test_trainer.build(model, tokenizer, tmp_path, **shared)
    whole.train()
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    again = test_trainer.build(model, tokenizer, tmp_path, **shared)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key
    for name in (*test_trainer.NAMED, "loss"):
        assert test_trainer.steps_of(again)[-1][name] == test_trainer.steps_of(whole)[-1][name], name
