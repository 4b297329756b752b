"""The parts that every kind of run is put together from: hints, TRL's arguments, schedule, optimizer."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.hinting import build_judge, default_layered
from composer_trl_host.hints import HintGenerator
from composer_trl_host.loading import load_object
from composer_trl_host.schedule import lr_factor
from composer_trl_host.settings import HostSettings
from composer_trl_host.trainer import ComposerGRPOTrainer, make_dr_grpo_config

_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
DEFAULT_SEQ_LEN = 2048
"""PRIME-RL's, where ``seq_len`` is not set: the longest trace, and what turns without a limit share."""


def named_hints(settings: HostSettings) -> HintGenerator | None:
    """The generator that ``trl_host.hints`` names, or None."""
    spec = settings.config.trl_host.hints
    if spec is None:
        return None
    hints = load_object(spec, settings.base_dir, "trl_host.hints")
    return hints() if isinstance(hints, type) else hints


def hints_for(settings: HostSettings, tokenizer: Any) -> HintGenerator:
    """The generator that ``trl_host.hints`` names, else the shipped layers with the judge of ``trl_host.judge``."""
    host = settings.config.trl_host
    return named_hints(settings) or default_layered(
        None if host.judge is None else build_judge(host.judge, base_dir=settings.base_dir),
        max_hint_tokens=host.max_hint_tokens,
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        without=host.skip_hints,
    )


def lr_factor_of(settings: HostSettings) -> Callable[[int], float]:
    """The learning rate's factor by step."""
    return lr_factor(
        settings.scheduler,
        max_steps=settings.max_steps,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.decay_steps,
        min_factor=settings.min_lr / settings.lr if settings.lr else 0.0,
    )


def set_optimizer(trainer: ComposerGRPOTrainer, settings: HostSettings) -> None:
    """Give ``trainer`` the optimizer that ``GRPOConfig`` cannot name."""
    if settings.optimizer == "sgd":
        # transformers' own "sgd" has no momentum.
        sgd = {"lr": settings.lr, "momentum": settings.momentum, "nesterov": settings.nesterov}
        trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, sgd)


def grpo_config(settings: HostSettings, turn_tokens: int) -> Any:
    """TRL's arguments; a turn of the model takes ``turn_tokens`` at most. Raises ``ConfigError`` for a batch that
    cannot be cut and for a monitor that is not installed."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    micro = min(settings.config.trl_host.micro_batch_size, settings.batch_size // processes)
    if settings.wandb_project is not None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "wandb must be installed where the TOML has a W&B table; found none; pip install wandb, or add --no-wandb"
            )
        os.environ["WANDB_PROJECT"] = settings.wandb_project
    if settings.group_size < 2:
        raise ConfigError(
            "orchestrator.group_size must be at least 2, since advantages are taken against the group's mean; found "
            f"{settings.group_size}; set orchestrator.group_size = 2 or more"
        )
    if micro == 0 or settings.batch_size % (micro * processes):
        raise ConfigError(
            f"batch_size must be a multiple of micro_batch_size x processes; found batch_size {settings.batch_size}, "
            f"micro_batch_size {micro}, {processes} processes; set trl_host.micro_batch_size"
        )
    if settings.batch_size % settings.group_size:
        raise ConfigError(
            f"batch_size must be a multiple of group_size; found {settings.batch_size} and {settings.group_size}"
        )
    gpu = torch.cuda.is_available()
    return make_dr_grpo_config(
        output_dir=str(settings.run_dir),
        run_name=settings.run_name,
        report_to="wandb" if settings.wandb_project else "none",
        max_steps=settings.max_steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=settings.batch_size // (micro * processes),
        num_generations=settings.group_size,
        max_completion_length=turn_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k or 0,
        min_p=settings.min_p,
        optim=_OPTIMIZERS[settings.optimizer],
        learning_rate=settings.lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_norm or 0.0,
        save_strategy="steps",
        save_steps=settings.ckpt_interval or settings.max_steps,
        save_total_limit=settings.ckpt_keep_last,
        logging_steps=1,
        logging_first_step=True,
        seed=settings.seed,
        gradient_checkpointing=settings.gradient_checkpointing,
        bf16=gpu,
        use_cpu=not gpu,
        disable_tqdm=True,
        dataloader_pin_memory=gpu,
    )
