"""The trainer on a tiny Llama with TRL's own generation, rewards and optimizer."""

from __future__ import annotations

import math
import os

import pytest
import torch
from datasets import Dataset
from transformers import set_seed
from trl import GRPOTrainer

from composer_prime_plugin import ComposerConfig
from composer_prime_plugin.errors import ConfigError, LossInputError
from composer_trl_host.chat import Chat
from composer_trl_host.rollout import RolloutRunner
from composer_trl_host.trainer import ComposerGRPOTrainer, make_dr_grpo_config, refuse_unbuilt

from .fakes import PasswordEnvironment

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

NAMED = (
    "loss/policy",
    "loss/policy_kl",
    "loss/sdpo_jsd",
    "loss/sdpo_weighted",
    "loss/total",
    "sdpo/weight",
    "sdpo/error_tokens",
    "sdpo/sites",
    "sdpo/clip_fraction",
    "sdpo/jsd/fake/password",
)


def build(
    model,
    tokenizer,
    tmp_path,
    *,
    micro: int = 4,
    steps: int = 2,
    config: ComposerConfig | None = None,
    **args,
):
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    set_seed(0)
    config = config or ComposerConfig(
        policy={"objective": "dr_grpo"}, sdpo={"weight": 0.5}, trl_host={"max_turns": 2}
    )
    environment = PasswordEnvironment()
    runner = RolloutRunner(environment, Chat(tokenizer), environment.hints, config, [tokenizer.eos_token_id])
    rows = [{**row, "prompt": environment.episode(row).prompt} for row in environment.rows("train", 8, 0)]
    settings = {
        "output_dir": str(tmp_path / "run"),
        "max_steps": steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": 4 // micro,
        "num_generations": 2,
        "max_completion_length": 5,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        "max_grad_norm": 0.0,
        "optim": "sgd",
    }
    settings.update(args)
    return ComposerGRPOTrainer(
        model=model,
        args=make_dr_grpo_config(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        composer_config=config,
        runner=runner,
    )


def steps_of(trainer) -> list[dict]:
    return [row for row in trainer.state.log_history if "loss/total" in row]


def test_a_run_logs_every_named_metric_once_per_step_and_moves_the_weights(model, tokenizer, tmp_path):
    before = model.model.embed_tokens.weight.detach().clone()
    trainer = build(model, tokenizer, tmp_path, micro=2)
    trainer.train()
    logged = steps_of(trainer)
    assert [row["step"] for row in logged] == [1, 2]
    for row in logged:
        assert all(math.isfinite(row[name]) for name in NAMED)
        assert row["loss/sdpo_jsd"] > 0
        assert row["sdpo/sites"] == 4  # every untrained first try fails, and each is answered
        assert row["loss/total"] == pytest.approx(row["loss/policy"] + row["loss/sdpo_weighted"], rel=1e-9)
        # TRL logs the summed loss of the window; ours is the same number.
        assert row["loss"] == pytest.approx(row["loss/total"], rel=1e-5)
    assert not torch.equal(before, model.model.embed_tokens.weight)


def test_no_graph_is_kept_until_the_window_ends(model, tokenizer, tmp_path, monkeypatch):
    """It would hold the teacher's hidden states of every micro-batch."""
    trainer = build(model, tokenizer, tmp_path, micro=1, steps=1)
    kept = []
    flush = trainer._flush_metrics

    def spied(*args):
        kept.extend(result.loss.grad_fn for result in trainer._window)
        flush(*args)

    monkeypatch.setattr(trainer, "_flush_metrics", spied)
    trainer.train()
    assert kept == [None] * 4


def gradients(trainer) -> list[torch.Tensor]:
    """The gradients of the first optimizer step."""
    seen: list[torch.Tensor] = []

    def keep(*_):
        if not seen:
            seen.extend(parameter.grad.clone() for parameter in trainer.model.parameters())

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(keep)
    trainer.train()
    return seen


@pytest.mark.parametrize("normalization", ["loss_tokens", "error_tokens"])
def test_the_step_does_not_depend_on_the_micro_batch(model, tokenizer, tmp_path, normalization):
    config = ComposerConfig(
        policy={"objective": "dr_grpo"},
        sdpo={"weight": 0.5, "normalization": normalization},
        trl_host={"max_turns": 2},
    )
    results = []
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for micro in (4, 2, 1):
        model.load_state_dict(state)
        trainer = build(model, tokenizer, tmp_path, micro=micro, steps=1, config=config)
        results.append((gradients(trainer), steps_of(trainer)[0]))
    whole, logged = results[0]
    for parts, part_log in results[1:]:
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        for name in NAMED:
            assert part_log[name] == pytest.approx(logged[name], rel=1e-5, abs=1e-7)


def test_weight_zero_trains_the_same_bytes_as_a_table_without_sdpo(tokenizer, tmp_path, model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    after = []
    for sdpo in ({}, {"weight": 0.0, "jsd_beta": 0.1}):
        model.load_state_dict(state)
        config = ComposerConfig(policy={"objective": "dr_grpo"}, sdpo=sdpo, trl_host={"max_turns": 2})
        build(model, tokenizer, tmp_path, config=config).train()
        after.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*after)


def test_a_resumed_run_ends_like_one_that_was_not_stopped(tokenizer, tmp_path, model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    shared = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    whole = build(model, tokenizer, tmp_path, steps=2, **shared)
    whole.train()
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    again = build(model, tokenizer, tmp_path, steps=2, **shared)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=0)


def test_evaluation_changes_no_state(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, per_device_eval_batch_size=4, num_generations_eval=2)
    trainer.eval_dataset = trainer.train_dataset
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"scale_rewards": True}, "scale_rewards must be 'none'"),
        ({"scale_rewards": "batch"}, "scale_rewards must be 'none'"),
        ({"num_iterations": 2}, "num_iterations must be 1"),
        ({"beta": 0.1}, "beta must be 0.0"),
    ],
)
def test_settings_outside_dr_grpo_are_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        make_dr_grpo_config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **override)


def test_dr_grpo_advantages_are_rewards_minus_the_group_mean(model, tokenizer, tmp_path):
    """By meaning, not by flag: rewards 1 and 0 in a group give +0.5 and -0.5, not plus and minus 1."""
    trainer = build(model, tokenizer, tmp_path)
    rewards = iter([[1.0, 0.0, 3.0, 3.0]])
    trainer.reward_funcs = [lambda **_: next(rewards)]
    batch = trainer._generate_and_score_completions(
        [dict(row) for row in trainer.train_dataset.select([0, 0, 1, 1])]
    )
    assert batch["advantages"].tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sdpo": {"student_context": "placeholder"}}, "'placeholder' must come with trl_host.traces"),
        ({"replay": {"weight": 0.1}}, "replay.weight must be 0.0"),
    ],
)
def test_what_the_host_does_not_have_is_refused(model, tokenizer, tmp_path, table, message):
    with pytest.raises(ConfigError, match=message):
        build(model, tokenizer, tmp_path, config=ComposerConfig(**table))


@pytest.mark.parametrize(
    "sdpo",
    [
        {"estimator": "sampled", "jsd_beta": 1.0, "importance_cap": 2.0},
        {"estimator": "top_k", "top_k": 100, "top_k_support": "teacher", "top_k_tail": False},
    ],
)
def test_every_estimator_of_the_schema_is_built(sdpo):
    refuse_unbuilt(ComposerConfig(sdpo=sdpo))


def test_what_is_touched_of_trl_is_there():
    """The private names of TRL that the trainer overrides, calls or reads."""
    for name in (
        "_compute_loss",
        "_generate_and_score_completions",
        "_generate_single_turn",
        "_prepare_inputs",
        "create_scheduler",
    ):
        assert callable(getattr(GRPOTrainer, name)), f"TRL no longer has GRPOTrainer.{name}"
    # TRL scales the loss for accumulation itself; transformers must not divide it again.
    assert GRPOTrainer.loss_is_scaled_for_ga is True


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, max_grad_norm=1.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(LossInputError, match=r"found nan in .*at step 1.*weights were not changed"):
        trainer.train()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_the_environments_tokens_are_read_and_not_trained(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path)
    output = trainer._generate_and_score_completions(
        [dict(row) for row in trainer.train_dataset.select([0, 0, 1, 1])]
    )
    output["composer_counts"] = (1, 1)
    batch = trainer._batch(output)
    sampled = [sum(rollout.sampled) for rollout in trainer._rollouts]
    assert batch["response_mask"].sum(dim=1).tolist() == sampled
    assert batch["completion_mask"].sum(dim=1).tolist() == [len(r.completion_ids) for r in trainer._rollouts]
    assert all(count < len(r.completion_ids) for count, r in zip(sampled, trainer._rollouts, strict=True))
    assert trainer._global_counts([output])[0] == sum(sampled)


def test_the_weight_warms_up_with_the_optimizer_steps(model, tokenizer, tmp_path):
    config = ComposerConfig(
        policy={"objective": "dr_grpo"},
        sdpo={"weight": 0.8, "weight_start": 0.2, "warmup_steps": 3},
        trl_host={"max_turns": 2},
    )
    trainer = build(model, tokenizer, tmp_path, steps=4, config=config)
    trainer.train()
    # By hand: 0.2 + 0.6 * step / 3, then 0.8.
    assert [row["sdpo/weight"] for row in steps_of(trainer)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
