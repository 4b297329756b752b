"""A run on an environment of verifiers, put together."""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from datasets import Dataset

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.assembly import DEFAULT_SEQ_LEN, grpo_config, hints_for, lr_factor_of, set_optimizer
from composer_trl_host.embedded import MODEL_NAME, embedded_model
from composer_trl_host.hints import Message
from composer_trl_host.loading import load_model, lora_config
from composer_trl_host.serving import TokenGenerator
from composer_trl_host.serving.protocol import Limits
from composer_trl_host.settings import HostSettings
from composer_trl_host.trainer import ComposerGRPOTrainer
from composer_trl_host.verifiers_env.conversion import Converter
from composer_trl_host.verifiers_env.runner import Policy, VerifiersRunner
from composer_trl_host.verifiers_env.source import Source, load_environment, load_renderer


def build_verifiers(settings: HostSettings, source: Source) -> tuple[ComposerGRPOTrainer, VerifiersRunner]:
    """The trainer and its runner, which the caller closes."""
    host = settings.config.trl_host
    _check_processes()
    environment = load_environment(source)
    renderer = load_renderer(source)
    tasks = list(islice(environment.taskset, host.train_rows))
    prompts = settings.batch_size // settings.group_size
    if len(tasks) < prompts:
        raise ConfigError(
            f"a step needs batch_size / group_size = {prompts} tasks; found {len(tasks)} in {source.name} with trl_host.train_rows = "
            f"{host.train_rows}; lower batch_size or raise train_rows"
        )
    model, tokenizer = load_model(settings)
    hints = hints_for(settings, tokenizer)
    seq_len = min(settings.seq_len or DEFAULT_SEQ_LEN, _positions(model))
    limits = Limits(settings.model_name or MODEL_NAME, seq_len, len(tokenizer))
    policy = Policy(
        limits, settings.model_name or str(embedded_model()), renderer, _sampling(settings, seq_len)
    )
    converter = Converter(tokenizer, settings.config, hints, source.name, seq_len)
    runner = VerifiersRunner(environment, tasks, converter, policy, settings.group_size)
    trainer = ComposerGRPOTrainer(
        model=model,
        args=grpo_config(settings, settings.max_completion_tokens or seq_len),
        train_dataset=Dataset.from_list(
            [{"task": number, "prompt": _prompt(task.data)} for number, task in enumerate(tasks)]
        ),
        processing_class=tokenizer,
        peft_config=lora_config(settings),
        composer_config=settings.config,
        runner=runner,
        lr_factor=lr_factor_of(settings),
    )
    set_optimizer(trainer, settings)
    bind(runner, trainer, tokenizer)
    return trainer, runner


def bind(runner: VerifiersRunner, trainer: ComposerGRPOTrainer, tokenizer: Any) -> None:
    """Let the runner sample from the trainer's weights, as they are between steps."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    runner.generate = TokenGenerator(lambda: trainer.model, trainer.eos_token_ids, pad)
    runner.on_generation_error = trainer.blame_sampling


def _check_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "environments of verifiers must train in one process on the TRL host; found several (WORLD_SIZE); start without "
            "accelerate launch, or train on PRIME-RL"
        )


def _positions(model: Any) -> int:
    found = getattr(model.config, "max_position_embeddings", None)
    return found if isinstance(found, int) else 2**31


def _sampling(settings: HostSettings, seq_len: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_completion_tokens or seq_len,
    }
    if settings.top_k is not None:
        sampling["top_k"] = settings.top_k
    if settings.min_p is not None:
        sampling["min_p"] = settings.min_p
    return sampling


def _prompt(data: Any) -> list[Message]:
    """What TRL shows as the prompt in its logs; the renderer makes the real one."""
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    messages.append({"role": "user", "content": data.prompt_text})
    return messages
