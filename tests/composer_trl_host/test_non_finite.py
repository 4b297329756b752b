"""A loss or gradient that is not finite: the channel is named, the weights stay, the saved batch gives it again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from composer_prime_plugin import ComposerConfig
from composer_prime_plugin.cli import main
from composer_prime_plugin.errors import LossInputError
from composer_trl_host.compose import compose_loss
from composer_trl_host.guards import GUARD_EXIT
from composer_trl_host.non_finite import FiniteStop, NonFiniteError, SavedBatch, load_batch, save_batch

from .guards_worker import break_gradient_of_channel_two, overflowing_advantages
from .test_compose import config, make_batch
from .test_run import toml  # noqa: F401
from .test_trainer import build

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

NAN = float("nan")
CHANNEL_1 = "it comes from channel 1: with sdpo.weight = 0 it stays, without advantages"
CHANNEL_2 = "it comes from channel 2: with sdpo.weight = 0 the same batch is finite"
MODEL = (
    "it comes from the model: with sdpo.weight = 0 it stays, without advantages and sampling log-probs too"
)


def nan_advantages(trainer, inputs: dict[str, Any]) -> None:
    inputs["advantages"] = inputs["advantages"].clone()
    inputs["advantages"][0] = NAN


def infinite_logprobs(trainer, inputs: dict[str, Any]) -> None:
    inputs["sampling_per_token_logps"] = torch.full(inputs["completion_ids"].shape, -torch.inf)


def nan_teacher(trainer, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        trainer.teacher.model.model.norm.weight[0] = NAN


def nan_weights(trainer, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = NAN


def broken_at(trainer, micro_step: int, harm) -> dict[str, torch.Tensor]:
    """``harm`` the inputs of a micro-batch, after they were sampled. Returns what the weights were then."""
    plain = trainer._prepare_inputs
    before: dict[str, torch.Tensor] = {}

    def prepare(batch: Any) -> dict[str, Any]:
        inputs = plain(batch)
        if trainer._step == micro_step:
            harm(trainer, inputs)
            before.update({key: value.clone() for key, value in trainer.model.state_dict().items()})
        return inputs

    trainer._prepare_inputs = prepare
    return before


CASES = {
    "advantages": (nan_advantages, CHANNEL_1, "advantages must be finite at unmasked positions; found nan"),
    "sampling log-probs": (infinite_logprobs, CHANNEL_1, "inference_logprobs must be finite"),
    "teacher": (nan_teacher, CHANNEL_2, "(teacher holds NaN or +inf)"),
    "weights": (nan_weights, MODEL, "trainer_logprobs must be finite"),
}


@pytest.mark.parametrize(("harm", "channel", "error"), CASES.values(), ids=CASES)
def test_the_channel_is_named_the_weights_stay_and_the_saved_batch_gives_it_again(
    model, tokenizer, tmp_path, harm, channel, error
):
    table = ComposerConfig(
        policy={"objective": "dr_grpo"},
        sdpo={"weight": 0.5, "teacher": "initial"},
        trl_host={"max_turns": 2},
    )
    trainer = build(model, tokenizer, tmp_path, micro=2, steps=3, config=table)
    # Step 2, second of its two micro-batches.
    before = broken_at(trainer, 3, harm)
    with pytest.raises(NonFiniteError) as raised:
        trainer.train()
    message = str(raised.value)
    path = tmp_path / "run" / "bad_batch-2-rank0.pt"
    assert message.startswith("step 2: ")
    for part in (error, channel, f"the batch is in {path}", "the weights were not changed"):
        assert part in message
    assert trainer.state.global_step == 1
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)

    saved = load_batch(path)
    assert (saved.step, saved.rank, saved.config) == (2, 0, table)
    assert saved.channel.startswith(channel)
    assert error in saved.error
    with pytest.raises(LossInputError) as again:
        compose_loss(trainer.model, saved.batch, saved.config, teacher=trainer.teacher)
    assert str(again.value) == saved.error


def test_a_saved_batch_is_the_batch_without_code_in_it(tmp_path):
    batch = {**make_batch(), "step": 4, "temperature": 1.0, "num_loss_tokens": 9, "logprobs_known": None}
    saved = SavedBatch(batch, config(warmup_steps=3), 5, 1, "error", "channel")
    path = save_batch(saved, tmp_path / "run")
    assert path.name == "bad_batch-5-rank1.pt"
    read = load_batch(path)
    assert dataclasses.replace(read, batch={}) == dataclasses.replace(saved, batch={})
    assert list(read.batch) == list(batch)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(read.batch[key], value, rtol=0, atol=0)
        else:
            assert read.batch[key] == value


def test_the_saved_batch_of_the_docs_is_read_as_they_say(model, tmp_path, monkeypatch):
    batch = make_batch()
    batch["advantages"][0] = NAN
    save_batch(SavedBatch(batch, config(), 7, 0, "error", "channel"), tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "guards.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    assert "bad_batch-7-rank0.pt" in code
    with pytest.raises(LossInputError, match="advantages must be finite"):
        exec(code, {"model": model.double()})


def stop_of(model, tmp_path, **sdpo: Any) -> FiniteStop:
    return FiniteStop(Accelerator(cpu=True), tmp_path, config(**sdpo), lambda m, b, c: compose_loss(m, b, c))


def test_a_sum_of_finite_terms_that_overflows_is_not_finite_either(model, tmp_path):
    batch = {**make_batch(with_inference=False), "step": 0}
    # float32: each row's sum is finite, the sum over rows is not.
    batch["advantages"] = torch.tensor([-4e37, -6e37, -6e37])
    compose_loss(model, {**batch, "advantages": torch.tensor([-4e37, 0.0, 0.0])}, config())
    with pytest.raises(
        NonFiniteError, match=r"found inf, a sum of finite terms that overflowed; it comes from channel 1"
    ):
        stop_of(model, tmp_path).loss(model, batch)


def test_another_broken_contract_is_raised_as_it_is(model, tmp_path):
    batch = {**make_batch(), "step": 0}
    batch["response_mask"] = batch["response_mask"].long()
    with pytest.raises(LossInputError, match="response_mask must be bool") as raised:
        stop_of(model, tmp_path).loss(model, batch)
    assert type(raised.value) is LossInputError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_hides_no_error(model, tmp_path):
    (tmp_path / "file").write_text("")
    batch = {**make_batch(), "step": 0}
    batch["advantages"][0] = NAN
    with pytest.raises(NonFiniteError, match=r"advantages must be finite.*channel 1.*could not be saved in"):
        stop_of(model, tmp_path / "file").loss(model.double(), batch)


def test_a_finite_loss_is_the_one_of_compose_loss(model, tmp_path):
    batch = {**make_batch(), "step": 0}
    model = model.double()
    assert torch.equal(
        stop_of(model, tmp_path).loss(model, batch).loss, compose_loss(model, batch, config()).loss
    )
    assert list(tmp_path.iterdir()) == []


def gradient_error(trainer, model) -> str:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(NonFiniteError) as raised:
        trainer.train()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert trainer.state.global_step == 0
    message = str(raised.value)
    assert message.startswith("every gradient must be finite before the optimizer step; found ")
    return message


def test_a_gradient_of_channel_two_is_named_and_its_batch_saved(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, micro=2)
    break_gradient_of_channel_two(trainer)
    message = gradient_error(trainer, model)
    assert CHANNEL_2 in message
    saved = load_batch(tmp_path / "run" / "bad_batch-1-rank0.pt")
    assert saved.error in message
    assert saved.batch["input_ids"].size(0) == 2


def test_a_gradient_of_channel_one_is_named_and_the_micro_batch_that_makes_it_saved(
    model, tokenizer, tmp_path
):
    trainer = build(model, tokenizer, tmp_path, micro=1)

    def huge(trainer, inputs: dict[str, Any]) -> None:
        # The loss stays finite; the norm of the gradient, a root of squares, does not.
        inputs["advantages"] = torch.full_like(inputs["advantages"], 1e30)

    broken_at(trainer, 2, huge)
    message = gradient_error(trainer, model)
    assert CHANNEL_1 in message
    saved = load_batch(tmp_path / "run" / "bad_batch-1-rank0.pt")
    assert saved.batch["advantages"].tolist() == [torch.tensor(1e30).item()]


def test_a_gradient_that_the_model_makes_is_named(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, micro=2)
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * NAN)
    assert MODEL in gradient_error(trainer, model)


def test_a_gradient_that_only_the_sum_of_batches_makes_leaves_the_last_one(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, micro=1)
    trainer.add_callback(_Poison(model))
    trainer.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, _Poison))
    message = gradient_error(trainer, model)
    assert "no batch of the step makes it alone; the last of 4 is kept" in message
    assert load_batch(tmp_path / "run" / "bad_batch-1-rank0.pt").batch["input_ids"].size(0) == 1


class _Poison(TrainerCallback):
    """Puts NaN into a gradient after the backward."""

    def __init__(self, model) -> None:
        self.model = model

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.model.model.norm.weight.grad[0] = NAN


def test_a_run_that_is_not_finite_is_one_line_and_exit_code_three(toml, capsys):  # noqa: F811
    overflowing_advantages(toml)
    assert main(["run", "@", str(toml), "--trainer.loss.kwargs.trl_host.heldout_rows", "0"]) == GUARD_EXIT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("composer-rl: ")]
    path = toml.parent / "out" / "bad_batch-1-rank0.pt"
    assert line.startswith("composer-rl: step 1: the summed policy loss must be finite")
    assert CHANNEL_1 in line
    assert f"the batch is in {path}" in line
    assert path.is_file()
