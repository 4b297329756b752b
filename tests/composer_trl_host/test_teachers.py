"""The three teachers, by what they read, with all parameters and with an adapter."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from composer_prime_plugin import ComposerConfig
from composer_trl_host.compose import compose_loss
from composer_trl_host.teachers import AverageAdapter, AverageCopy, FrozenCopy, build_teacher

from .test_compose import make_batch
from .test_trainer import build, steps_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def config(teacher: str, decay: float = 0.75) -> ComposerConfig:
    return ComposerConfig(
        policy={"objective": "dr_grpo"},
        sdpo={"weight": 0.5, "teacher": teacher, "ema_decay": decay},
        trl_host={"max_turns": 2},
    )


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LORA)


def trained(model) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def move(model, by: float) -> None:
    for parameter in trained(model):
        parameter.add_(by)


def jsd(model, teacher) -> float:
    return float(compose_loss(model, make_batch(), config("live"), teacher=teacher).sdpo_sum)


def test_live_is_no_teacher_at_all(model):
    assert build_teacher(model, config("live").sdpo) is None
    assert build_teacher(model, ComposerConfig(sdpo={"teacher": "ema"}).sdpo) is None  # channel 2 is off


@pytest.mark.parametrize("with_adapter", [False, True], ids=["all parameters", "adapter"])
def test_the_initial_teacher_reads_the_first_weights_whatever_the_student_does(model, with_adapter):
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))  # starts at zero
    teacher = build_teacher(model, config("initial").sdpo)
    at_start = jsd(model, None)
    assert jsd(model, teacher) == pytest.approx(at_start, rel=1e-5)
    move(model, 0.05)
    moved_live = jsd(model, None)
    moved_initial = jsd(model, teacher)
    assert moved_initial != pytest.approx(moved_live, rel=1e-3)
    move(model, -0.05)
    assert jsd(model, teacher) == pytest.approx(at_start, rel=1e-4)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["all parameters", "adapter"])
def test_the_average_follows_its_formula(model, with_adapter):
    model = adapted(model) if with_adapter else model
    teacher = build_teacher(model, config("ema").sdpo)
    start = [parameter.detach().clone() for parameter in trained(model)]
    move(model, 1.0)
    teacher.after_step(model)
    move(model, 1.0)
    teacher.after_step(model)
    # By hand: 0.75 * (0.75 * 0 + 0.25 * 1) + 0.25 * 2 = 0.6875 above the start.
    average = list(teacher._average._parameters.values())
    assert len(average) == len(start)
    for mean, first in zip(average, start, strict=True):
        torch.testing.assert_close(mean, first + 0.6875, rtol=0, atol=1e-5)
        assert not mean.requires_grad


def test_an_average_of_half_precision_weights_moves(model):
    model = model.to(torch.bfloat16)
    teacher = build_teacher(model, config("ema", decay=0.99).sdpo)
    start = model.model.norm.weight.detach().float().clone()
    move(model, 0.5)
    for _ in range(300):
        teacher.after_step(model)
    # By hand: 1 - 0.99**300 = 0.951 of the way; bfloat16 holds three digits of it.
    torch.testing.assert_close(teacher.model.model.norm.weight.float(), start + 0.4755, rtol=0, atol=0.01)


def test_an_adapter_needs_no_second_copy_and_stays_trainable(model):
    model = adapted(model)
    base = sum(parameter.numel() for parameter in model.parameters())
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    teacher = build_teacher(model, config("ema").sdpo)
    assert isinstance(teacher, AverageAdapter)
    extra = sum(parameter.numel() for parameter in model.parameters()) - base
    assert extra == sum(parameter.numel() for parameter in trained(model))
    compose_loss(model, make_batch(), config("ema"), teacher=teacher).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before
    assert all(parameter.grad is not None for parameter in trained(model))


@pytest.mark.parametrize("teacher", ["initial", "ema"])
def test_the_trainers_teacher_holds_weights_of_its_own(model, tokenizer, tmp_path, teacher):
    trainer = build(model, tokenizer, tmp_path, config=config(teacher), steps=3, learning_rate=0.5)
    assert type(trainer.teacher) is (FrozenCopy if teacher == "initial" else AverageCopy)
    first = {name: value.clone() for name, value in trainer.teacher.model.state_dict().items()}
    trainer.train()
    assert len(steps_of(trainer)) == 3
    moved = any(
        not torch.equal(value, first[name]) for name, value in trainer.teacher.model.state_dict().items()
    )
    assert moved == (teacher == "ema")
    # The copy's own forward, not one that leads back to the live model.
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        live, copied = model(input_ids=ids).logits, trainer.teacher.model(input_ids=ids).logits
    assert not torch.allclose(live, copied, atol=1e-4)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["all parameters", "adapter"])
def test_a_resumed_run_goes_on_with_the_average_it_had(model, tokenizer, tmp_path, with_adapter):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    shared = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    ends = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-1")):
        fresh = type(model)(model.config).eval()
        fresh.load_state_dict(state)
        fresh = adapted(fresh) if with_adapter else fresh
        trainer = build(fresh, tokenizer, tmp_path, config=config("ema"), **shared)
        trainer.train(resume_from_checkpoint=resume)
        ends.append((steps_of(trainer)[-1]["loss/sdpo_jsd"], trainer.teacher.state()))
    assert ends[0][0] == ends[1][0]
    for name, value in ends[0][1].items():
        assert torch.equal(value, ends[1][1][name])
