"""A run on environments of verifiers, put together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.assembly import DEFAULT_SEQ_LEN, grpo_config, hints_for, lr_factor_of, set_optimizer
from composer_trl_host.embedded import MODEL_NAME, embedded_model
from composer_trl_host.hints import HintGenerator, Message
from composer_trl_host.loading import load_model, lora_config
from composer_trl_host.rollout import Rollout
from composer_trl_host.serving import TokenGenerator
from composer_trl_host.serving.protocol import Limits
from composer_trl_host.settings import HostSettings
from composer_trl_host.trainer import ComposerGRPOTrainer
from composer_trl_host.verifiers_env.conversion import Converter
from composer_trl_host.verifiers_env.heldout import HeldOut, HeldOutStage
from composer_trl_host.verifiers_env.loading import load_environment, load_renderer, without_time_limit
from composer_trl_host.verifiers_env.mixing import mixed_rows
from composer_trl_host.verifiers_env.remote import KEY, RemoteServer, check_server
from composer_trl_host.verifiers_env.runner import Policy, Stage, VerifiersRunner
from composer_trl_host.verifiers_env.source import HeldOutSource, Source, TaskSources


@dataclass(frozen=True)
class VerifiersRun:
    """``heldout`` is None where the TOML evaluates on nothing. ``notes``: lines about the environments. The
    caller closes ``runner``."""

    trainer: ComposerGRPOTrainer
    runner: VerifiersRunner
    heldout: HeldOut | None
    notes: Sequence[str]


@dataclass(frozen=True)
class _Loaded:
    """An environment with the tasks that are played of it."""

    source: Source
    environment: Any
    tasks: Sequence[Any]

    def stage(self, converter: Converter) -> Stage:
        return Stage(self.source.name, self.environment, self.tasks, converter)


def build_verifiers(settings: HostSettings, sources: TaskSources) -> VerifiersRun:
    """The run on ``sources``. Raises ``ConfigError`` for what cannot run here."""
    host = settings.config.trl_host
    _check_processes()
    train = [_loaded(source, host.train_rows) for source in sources.train]
    heldout = [_loaded_heldout(held) for held in sources.heldout]
    renderer = load_renderer(sources.train[0])
    rows = mixed_rows(
        [len(loaded.tasks) for loaded in train],
        [source.ratio for source in sources.train],
        host.train_rows,
    )
    prompts = settings.batch_size // settings.group_size
    if len(rows) < prompts:
        raise ConfigError(
            f"a step needs batch_size / group_size = {prompts} tasks; found {len(rows)} in "
            f"{', '.join(source.name for source in sources.train)} with "
            f"trl_host.train_rows = {host.train_rows}; lower batch_size or raise train_rows"
        )
    remote = _remote(host.vllm_base_url)
    model, tokenizer = load_model(settings)
    seq_len = min(settings.seq_len or DEFAULT_SEQ_LEN, _positions(model))
    if remote is not None:
        seq_len = min(seq_len, remote.max_model_len)
    name = settings.model_name or MODEL_NAME if remote is None else remote.model
    limits = Limits(name, seq_len, _vocabulary(model))
    policy = Policy(
        limits, settings.model_name or str(embedded_model()), renderer, _sampling(settings, seq_len)
    )

    def converter(loaded: _Loaded, hints: HintGenerator | None) -> Converter:
        return Converter(tokenizer, settings.config, hints, loaded.source.name, seq_len)

    hints = hints_for(settings, tokenizer)
    stages = [loaded.stage(converter(loaded, hints)) for loaded in train]
    runner = VerifiersRunner(
        stages, policy, settings.group_size, remote=None if remote is None else remote.root
    )
    args = grpo_config(settings, settings.max_completion_tokens or seq_len)
    if remote is not None:
        sample_remotely(args, remote)
    trainer = ComposerGRPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(
            [{**row, "prompt": _prompt(train[row["source"]].tasks[row["task"]].data)} for row in rows]
        ),
        processing_class=tokenizer,
        peft_config=lora_config(settings),
        composer_config=settings.config,
        runner=runner,
        lr_factor=lr_factor_of(settings),
    )
    set_optimizer(trainer, settings)
    bind(runner, trainer, tokenizer)
    evaluation = None
    if heldout:
        evaluation = HeldOut(
            runner,
            [
                # Hints are for training: nobody is asked for one here.
                HeldOutStage(
                    loaded.stage(converter(loaded, None)), held.group_size, held.interval, held.sampling
                )
                for loaded, held in zip(heldout, sources.heldout, strict=True)
            ],
            seed=settings.seed,
            at_once=settings.batch_size,
            at_start=sources.at_start,
            on_resume=sources.on_resume,
        )
        if remote is not None:
            evaluation.before = lambda: send_weights(trainer)
    notes = [
        *_notes(train, heldout, rows),
        *_heldout_warnings(sources, [len(item.tasks) for item in heldout]),
    ]
    return VerifiersRun(trainer, runner, evaluation, notes)


def _loaded(source: Source, most: int) -> _Loaded:
    environment = load_environment(source)
    tasks = list(islice(environment.taskset, most))
    if not tasks:
        raise ConfigError(
            f"{source.name} must have at least one task; found none in its taskset; correct {source.key}"
        )
    return _Loaded(source, environment, tasks)


def _loaded_heldout(held: HeldOutSource) -> _Loaded:
    environment = load_environment(held.source)
    if held.examples is None and not environment.taskset.bounded:
        raise ConfigError(
            f"{held.source.key}.num_examples must be set where the taskset has no end; found all of {held.source.name}; set for "
            "example num_examples = 64"
        )
    tasks = list(islice(environment.taskset, held.examples))
    if not tasks:
        raise ConfigError(
            f"{held.source.name} must have at least one task; found none in its taskset; correct {held.source.key}"
        )
    return _Loaded(held.source, environment, tasks)


def _notes(
    train: Sequence[_Loaded], heldout: Sequence[_Loaded], rows: Sequence[Mapping[str, int]]
) -> list[str]:
    lines = []
    for number, loaded in enumerate(train):
        count = sum(row["source"] == number for row in rows)
        share = f"; {count} of {len(rows)} prompts" if len(train) > 1 else ""
        lines.append(
            f"environment: {loaded.source.name}, of verifiers, with its own code, tools and rewards{share}"
        )
    lines += [
        f"held-out environment: {loaded.source.name}, of verifiers, {len(loaded.tasks)} tasks"
        for loaded in heldout
    ]
    if not heldout:
        lines.append("no held-out evaluation; the tables [[orchestrator.eval.source]] name what is held out")
    warnings = (without_time_limit(item.source, item.environment, item.tasks) for item in (*train, *heldout))
    return [*lines, *(line for line in warnings if line is not None)]


def _heldout_warnings(sources: TaskSources, tasks: Sequence[int]) -> list[str]:
    """Of held-out environments that have fewer tasks than are asked for, or that are trained on. ``tasks``: how many
    each has."""
    lines = []
    for held, count in zip(sources.heldout, tasks, strict=True):
        name = held.source.name
        if held.examples is not None and held.examples > count:
            lines.append(
                f"warning: num_examples of {name} is {held.examples}, but its taskset has {count} tasks"
            )
        trained = [
            item.name for item in sources.train if item.env.get("taskset") == held.source.env.get("taskset")
        ]
        if trained:
            lines.append(
                f"warning: {name} is held out with the taskset that {trained[0]} trains on, so it does not measure unseen tasks"
            )
    return lines


def bind(runner: VerifiersRunner, trainer: ComposerGRPOTrainer, tokenizer: Any) -> None:
    """Let the runner sample from the trainer's weights, as they are between steps, and log what each environment
    gave."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    runner.generate = TokenGenerator(lambda: trainer.model, trainer.eos_token_ids, pad)
    runner.on_generation_error = trainer.blame_sampling

    def log(name: str, value: float) -> None:
        trainer._metrics["train"][name].append(value)

    runner.on_played = lambda played: log_environments(played, log)


def log_environments(played: Sequence[tuple[str, Rollout | None]], log: Callable[[str, float], None]) -> None:
    """``env/<name>/reward``, the mean over the batch's episodes of one environment that can be trained on;
    ``env/<name>/first_try``, their share that was solved without a failed call; ``env/<name>/rollouts`` and
    ``env/<name>/left_out``, their number and that of the others."""
    for name in dict.fromkeys(name for name, _ in played):
        rollouts = [rollout for other, rollout in played if other == name]
        kept = [rollout for rollout in rollouts if rollout is not None]
        log(f"env/{name}/rollouts", float(len(kept)))
        log(f"env/{name}/left_out", float(len(rollouts) - len(kept)))
        if kept:
            log(f"env/{name}/reward", sum(rollout.reward for rollout in kept) / len(kept))
            first = sum(rollout.solved and not rollout.errors for rollout in kept)
            log(f"env/{name}/first_try", first / len(kept))


def _remote(base_url: str | None) -> RemoteServer | None:
    """The server of ``trl_host.vllm_base_url``, checked. TRL gives it the weights over NCCL."""
    if base_url is None:
        return None
    installed = importlib.util.find_spec("vllm") is not None
    if not installed or not torch.cuda.is_available():
        raise ConfigError(
            f"{KEY} needs the package vllm in the trainer's environment and a CUDA device, over which TRL sends the weights; found "
            f"{'no CUDA device' if installed else 'no vllm'}; remove it, and the host samples itself"
        )
    return check_server(base_url)


def sample_remotely(args: Any, remote: RemoteServer) -> None:
    """Have TRL connect to ``remote`` and give it the weights before each batch."""
    args.use_vllm = True
    args.vllm_mode = "server"
    args.vllm_server_base_url = remote.root
    # The composed loss reads the server's log-probs itself; TRL's correction would cost a forward and is not read.
    args.vllm_importance_sampling_correction = False


def send_weights(trainer: Any) -> None:
    """What TRL does before a training batch: once per optimizer step at most."""
    if trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def _check_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "environments of verifiers must train in one process on the TRL host; found several (WORLD_SIZE); start without "
            "accelerate launch, or train on PRIME-RL"
        )


def _positions(model: Any) -> int:
    found = getattr(model.config, "max_position_embeddings", None)
    return found if isinstance(found, int) else 2**31


def _vocabulary(model: Any) -> int:
    """Ids that the model reads and may sample: often more than its tokenizer has tokens."""
    return int(model.get_input_embeddings().weight.shape[0])


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
