"""PRIME-RL's keys: what the host takes of them, in the spelling of every release, and what it cannot take.

``HONOURED`` has one row per setting: the dotted keys that set it in v0.5.0 to main of 2026-08-21, the
values it takes, PRIME-RL's default and what it becomes here. ``NOT_HONOURED`` has the keys, and the
tables with everything under them, that PRIME-RL knows and the host has no use for, each with its
reason. A key in neither is unknown to PRIME-RL. Whatever a TOML sets and the host does not do ends
up in ``HostSettings.unhonoured``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import KWARGS_TABLE

DEFAULT_MAX_STEPS = 1000
"""Steps of a run whose TOML sets none: PRIME-RL would run without end. Such a run is listed."""

DEFAULT_WANDB_PROJECT = "prime-rl"

Resume = Literal["latest"] | int | None


@dataclass(frozen=True)
class Kind:
    """The values a key takes: ``wants`` completes "must be", ``example`` is shown in the error."""

    wants: str
    annotation: Any
    example: str
    null: bool = False
    """Whether ``"None"`` is a value of its own; elsewhere it means that the key is not set."""

    def read(self, key: str, value: Any) -> Any:
        """``value`` converted, or a ``ConfigError`` that names ``key``."""
        if value is None and self.null:
            return None
        # Pydantic would take true for 1.
        if self.annotation is bool or not isinstance(value, bool):
            try:
                return TypeAdapter(self.annotation).validate_python(value)
            except ValidationError:
                pass
        raise ConfigError(
            f"{key} must be {self.wants}; found {value!r}; set for example {key} = {self.example}"
        )


def _choice(*values: str) -> Kind:
    return Kind("one of " + ", ".join(values), Literal[values], f'"{values[0]}"')


FLAG = Kind("true or false", bool, "true")
TEXT = Kind("a text that is not empty", Annotated[str, Field(min_length=1)], '"name"')
FOLDER = Kind("the path of a folder", Annotated[str, Field(min_length=1)], '"outputs"')
COUNT = Kind("a whole number of at least 1", Annotated[int, Field(ge=1)], "16")
STEPS = Kind("a whole number of at least 0", Annotated[int, Field(ge=0)], "10")
SEED = Kind("a whole number from 0 to 4294967295", Annotated[int, Field(ge=0, lt=2**32)], "42")
RATE = Kind("a finite number of at least 0", Annotated[float, Field(ge=0, allow_inf_nan=False)], "1e-6")
POSITIVE = Kind("a finite number above 0", Annotated[float, Field(gt=0, allow_inf_nan=False)], "1.0")
CLIP_NORM = Kind('a finite number above 0, or "None"', POSITIVE.annotation, "1.0", null=True)
BETA = Kind("a number from 0 to below 1", Annotated[float, Field(ge=0, lt=1)], "0.9")
SHARE = Kind("a number from 0 to 1", Annotated[float, Field(ge=0, le=1)], "0.0")
NUCLEUS = Kind("a number above 0 and at most 1", Annotated[float, Field(gt=0, le=1)], "1.0")
TOP_K = Kind("a whole number of at least -1 (-1 or 0: all tokens)", Annotated[int, Field(ge=-1)], "-1")
RESUME_STEP = Kind("a whole number of at least -1 (-1: the latest)", Annotated[int, Field(ge=-1)], "-1")
NAMES = Kind(
    "a list of module names", Annotated[tuple[str, ...], Field(min_length=1)], '["q_proj", "v_proj"]'
)
DTYPE = _choice("float32", "bfloat16")
ATTENTION = _choice(
    "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "fa4"
)
OPTIMIZER = _choice("adamw", "sgd", "muon", "sign_sgd")
SCHEDULER = _choice("constant", "linear", "cosine")


@dataclass(frozen=True)
class Honoured:
    """One setting: ``keys`` are its dotted spellings, the current one first."""

    field: str
    keys: tuple[str, ...]
    kind: Kind
    default: Any
    """Where no key is set. PRIME-RL's own unless ``becomes`` says otherwise."""
    becomes: str


def _row(field: str, keys: str, kind: Kind, default: Any, becomes: str) -> Honoured:
    return Honoured(field, tuple(keys.split()), kind, default, becomes)


_MAX_TOKENS = (
    "orchestrator.train.sampling.max_completion_tokens orchestrator.train.sampling.max_tokens "
    "orchestrator.sampling.max_completion_tokens orchestrator.sampling.max_tokens"
)
_WANDB = (
    "monitors.wandb wandb trainer.monitors.wandb orchestrator.monitors.wandb trainer.wandb orchestrator.wandb"
)
WANDB_TABLES = tuple(_WANDB.split())
_SAMPLING = ("orchestrator.train.sampling", "orchestrator.sampling")


def _sampling(leaf: str) -> str:
    return " ".join(f"{table}.{leaf}" for table in _SAMPLING)


HONOURED: tuple[Honoured, ...] = (
    _row(
        "model_name",
        "model.name trainer.model.name",
        TEXT,
        None,
        "the model that is trained; absent: the embedded SmolLM2-135M-Instruct, where PRIME-RL has "
        "Qwen/Qwen3-0.6B",
    ),
    _row("model_dtype", "trainer.model.optimization_dtype", DTYPE, "float32", "dtype of the weights"),
    _row(
        "attn_implementation",
        "trainer.model.attn",
        ATTENTION,
        None,
        "`attn_implementation` of transformers; absent or auto: transformers' own choice",
    ),
    _row(
        "trust_remote_code",
        "trainer.model.trust_remote_code",
        FLAG,
        False,
        "`trust_remote_code` of transformers",
    ),
    _row("lora.rank", "trainer.model.lora.rank", COUNT, 16, "`LoraConfig.r`"),
    _row("lora.alpha", "trainer.model.lora.alpha", RATE, 32.0, "`LoraConfig.lora_alpha`"),
    _row("lora.dropout", "trainer.model.lora.dropout", SHARE, 0.0, "`LoraConfig.lora_dropout`"),
    _row(
        "lora.target_modules",
        "trainer.model.lora.target_modules",
        NAMES,
        None,
        "`LoraConfig.target_modules`; absent: every linear layer of the decoder, as PRIME-RL's default list",
    ),
    _row(
        "seq_len",
        "orchestrator.seq_len seq_len trainer.model.seq_len",
        COUNT,
        None,
        "longest prompt and completion together; absent: the model's own limit, where PRIME-RL has 2048",
    ),
    _row(
        "max_steps",
        "max_steps trainer.max_steps orchestrator.max_steps",
        COUNT,
        None,
        f"`max_steps`; absent: {DEFAULT_MAX_STEPS}, where PRIME-RL runs without end",
    ),
    _row(
        "batch_size",
        "orchestrator.batch_size",
        COUNT,
        128,
        "rollouts per optimizer step, whatever the number of processes: "
        "`per_device_train_batch_size` times processes times `gradient_accumulation_steps`",
    ),
    _row(
        "group_size",
        "orchestrator.group_size orchestrator.rollouts_per_example",
        COUNT,
        1,
        "`num_generations`: rollouts per prompt",
    ),
    _row(
        "temperature", _sampling("temperature"), POSITIVE, 1.0, "`temperature`, of sampling and of log-probs"
    ),
    _row("top_p", _sampling("extra_body.top_p"), NUCLEUS, 1.0, "`top_p`"),
    _row("top_k", _sampling("extra_body.top_k"), TOP_K, None, "`top_k`"),
    _row("min_p", _sampling("extra_body.min_p"), SHARE, None, "`min_p`"),
    _row(
        "max_completion_tokens",
        _MAX_TOKENS,
        COUNT,
        None,
        "longest completion of one turn in tokens; absent: what fits into `seq_len`",
    ),
    _row(
        "seed",
        "orchestrator.seed",
        SEED,
        42,
        "`seed` of data, sampling and training; v0.5.0 has the key, later releases refuse it: set `trl_host.seed`",
    ),
    _row("optimizer", "trainer.optim.type", OPTIMIZER, "adamw", "`torch.optim.AdamW` or `torch.optim.SGD`"),
    _row("lr", "trainer.optim.lr", RATE, 1e-6, "`learning_rate`"),
    _row("beta1", "trainer.optim.betas1", BETA, 0.9, "`adam_beta1`"),
    _row("beta2", "trainer.optim.betas2", BETA, 0.999, "`adam_beta2`"),
    _row("momentum", "trainer.optim.momentum", BETA, 0.9, "momentum of `torch.optim.SGD`"),
    _row("nesterov", "trainer.optim.nesterov", FLAG, True, "`nesterov` of `torch.optim.SGD`"),
    _row("weight_decay", "trainer.optim.weight_decay", RATE, 0.01, "`weight_decay`"),
    _row("max_norm", "trainer.optim.max_norm", CLIP_NORM, 1.0, "`max_grad_norm`"),
    _row("scheduler", "trainer.scheduler.type", SCHEDULER, "constant", "shape of the learning rate"),
    _row(
        "warmup_steps", "trainer.scheduler.warmup_steps", STEPS, 10, "steps from 0 to `lr` (linear, cosine)"
    ),
    _row(
        "decay_steps",
        "trainer.scheduler.decay_steps",
        STEPS,
        10,
        "last steps, from `lr` to `min_lr` (linear)",
    ),
    _row("min_lr", "trainer.scheduler.min_lr", RATE, 0.0, "learning rate at the end (linear, cosine)"),
    _row(
        "ckpt_interval",
        "ckpt.interval trainer.ckpt.interval orchestrator.ckpt.interval",
        COUNT,
        None,
        "`save_steps`; absent: one checkpoint, at the end",
    ),
    _row(
        "ckpt_keep_last",
        "ckpt.keep_last trainer.ckpt.keep_last orchestrator.ckpt.keep_last",
        COUNT,
        None,
        "`save_total_limit`; absent: every checkpoint is kept",
    ),
    _row(
        "resume",
        "resume.step trainer.resume.step orchestrator.resume.step "
        "ckpt.resume_step trainer.ckpt.resume_step orchestrator.ckpt.resume_step",
        RESUME_STEP,
        None,
        "`resume_from_checkpoint`; -1 or an empty table [resume]: the latest checkpoint of the run folder",
    ),
    _row(
        "output_dir", "output_dir", FOLDER, "outputs", "folder of the runs, relative to the working directory"
    ),
    _row("run_name", "run.name", TEXT, None, "`run_name`; the run folder is `output_dir` / `run.name`"),
    _row("run_folder", "run.dir", TEXT, None, "name of the run folder where it is not `run.name`"),
    _row(
        "wandb_name",
        "monitors.wandb.name wandb.name",
        TEXT,
        None,
        "`run_name` where `run.name` is not set",
    ),
    _row(
        "wandb_project",
        " ".join(f"{table}.project" for table in WANDB_TABLES),
        TEXT,
        None,
        f"`WANDB_PROJECT`; a W&B table without it: {DEFAULT_WANDB_PROJECT}; no W&B table: no W&B",
    ),
    _row(
        "dry_run",
        "dry_run",
        FLAG,
        False,
        "`composer-rl run` writes the resolved configurations of both backends and starts nothing",
    ),
)
"""Every setting the host takes with a value."""

RESUME_TABLES = ("resume", "trainer.resume", "orchestrator.resume")
CKPT_TABLES = ("ckpt", "trainer.ckpt", "orchestrator.ckpt")

HONOURED_TABLES: Mapping[tuple[str, ...], str] = {
    (
        "trainer.model.ac",
    ): "`gradient_checkpointing` of every layer; absent: off, although PRIME-RL has it on from v0.7.0",
    ("trainer.model.lora",): "an adapter is trained; absent: the whole model",
    RESUME_TABLES: "the latest checkpoint, where `step` is not set",
    CKPT_TABLES: "nothing by itself: the host writes a checkpoint at the end anyway",
    WANDB_TABLES: f"`report_to` W&B, with the project {DEFAULT_WANDB_PROJECT} where `project` is not set",
}
"""Tables that mean something by being there."""


@dataclass(frozen=True)
class NotHonoured:
    """A key, or a table with everything under it, that PRIME-RL knows and the host does not do."""

    key: str
    reason: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing the host does not do anyway. None is one, but for ``null_counts``."""
    null_counts: bool = False


_SERVER = "the host generates in its own process and starts no inference server"
_CLUSTER = "the host runs where it is started, on one process or under accelerate"
_SHARDING = "the host shards with accelerate, not with PRIME-RL's trainer"
_TRANSPORT = "the host trains and generates in one process, so nothing is sent"
_ON_POLICY = "the host generates each batch with the weights that it then trains"
_TASK = "the host takes its one task from trl_host.environment, or recorded traces from trl_host.traces"
_SOURCE = (
    f"{_TASK}, where either is set; else from tables that name tasksets of verifiers 0.4 (docs/verifiers.md)"
)
_EVAL = (
    "the host evaluates trl_host.heldout_rows at the start and the end; a run on environments of verifiers plays the "
    "tables of [[orchestrator.eval.source]] (docs/verifiers.md)"
)
_EVAL_SERVER = "held-out episodes are played in the trainer's process, between steps"
_NOT_POLICY = "tokens would be sampled from another distribution than the one that is trained"
_ONE_MODEL = "the host generates with the weights that it trains"
_TEACHER = "the host's teacher is the model itself with a hint in its context"
_ADVANTAGE = "an advantage on the host is the reward minus the mean of its group"
_KEEPS_ALL = "the host trains on every rollout of the batch"
_MOE = "transformers' own implementation of the model is trained"
_DEBUG = "a switch of PRIME-RL's trainer for debugging or profiling"
_LOG = "the host writes metrics.jsonl and the console"
_PLATFORM = "the host reports to files and W&B alone"
_ENV_VARS = "set environment variables where the command is started"
_TOKENIZER = "the host uses the tokenizer and chat template of the model"
_RUN_FOLDER = "the run folder follows from output_dir and run.name"
_CKPT = "the host's checkpoints are transformers' own, whole and in the run folder"
_MONITOR_FILE = "the host always writes metrics.jsonl into the run folder"
_VLM = "the host trains text models"
ONE_NAME = "a run on the host has one name: run.name, else the shared W&B name"
_BENCH = "bench/ measures the host"


_POLICY_KNOBS = (
    *("adv_tau", "kl_tau", "teacher_tau", "dppo_mask_low", "dppo_mask_high"),
    *("ipo_mask_low", "ipo_mask_high", "ipo_threshold", "eps"),
)


def _policy_knob(name: str) -> NotHonoured:
    return NotHonoured(
        f"trainer.loss.{name}", f"PRIME-RL's own losses read it; set {KWARGS_TABLE}.policy.{name} instead"
    )


def _each(keys: str, reason: str, neutral: tuple[Any, ...] = ()) -> tuple[NotHonoured, ...]:
    return tuple(NotHonoured(key, reason, neutral) for key in keys.split())


def _wandb_rows(table: str) -> Iterator[NotHonoured]:
    for leaf, variable in {
        "entity": "WANDB_ENTITY",
        "group": "WANDB_RUN_GROUP",
        "tags": "WANDB_TAGS",
        "offline": "WANDB_MODE",
    }.items():
        neutral = (False,) if leaf == "offline" else ()
        yield NotHonoured(f"{table}.{leaf}", f"set the environment variable {variable} instead", neutral)
    if "." in table.removeprefix("monitors."):
        yield NotHonoured(f"{table}.name", ONE_NAME)


NOT_HONOURED: tuple[NotHonoured, ...] = (
    *_each("inference teacher_inference orchestrator.client orchestrator.model.client", _SERVER),
    *_each("orchestrator.student.client orchestrator.collect_inference_metrics", _SERVER, (False,)),
    *_each("orchestrator.inference_metrics_roles orchestrator.use_token_client max_model_len", _SERVER),
    *_each("deployment slurm orchestrator.num_train_workers trainer.dist_timeout_seconds", _CLUSTER),
    *_each("trainer.max_concurrent_runs orchestrator.optim orchestrator.env_server_base_port", _CLUSTER),
    *_each("weight_broadcast trainer.weight_broadcast orchestrator.weight_broadcast", _TRANSPORT),
    *_each("rollout_transport trainer.rollout_transport orchestrator.rollout_transport", _TRANSPORT),
    *_each("max_async_level trainer.max_async_level orchestrator.max_async_level", _ON_POLICY, (0,)),
    *_each("orchestrator.max_off_policy_steps", _ON_POLICY, (0,)),
    *_each("orchestrator.strict_async_level", _ON_POLICY, (True, False)),
    *_each("orchestrator.oversampling_factor", _ON_POLICY, (1, 1.0)),
    *_each("orchestrator.max_inflight_rollouts orchestrator.max_inflight_episodes", _ON_POLICY),
    *_each("orchestrator.concurrency orchestrator.max_concurrent orchestrator.pool_size", _ON_POLICY),
    *_each("orchestrator.tasks_per_minute", _ON_POLICY),
    *_each("orchestrator.train.source orchestrator.train.env orchestrator.env", _SOURCE),
    *_each("orchestrator.train.num_workers orchestrator.train.max_retries", _TASK),
    *_each("orchestrator.buffer orchestrator.env_install_prerelease", _TASK),
    *_each("orchestrator.eval orchestrator.val", _EVAL),
    *_each("orchestrator.eval.num_workers orchestrator.eval.max_retries", _EVAL_SERVER),
    *_each("orchestrator.eval.cancel_inflight_rollouts_on_eval", _EVAL_SERVER, (True, False)),
    *_each("orchestrator.model.name orchestrator.model.model orchestrator.student.model", _ONE_MODEL),
    *_each("orchestrator.model.trust_remote_code", "trainer.model.trust_remote_code is read", (False,)),
    *_each("orchestrator.model.lora", "trainer.model.lora is the one adapter"),
    *_each("orchestrator.teacher orchestrator.teacher_model orchestrator.teacher_rollout_model", _TEACHER),
    *_each("orchestrator.algo.type", _ADVANTAGE, ("grpo",)),
    *_each("orchestrator.advantage.type", _ADVANTAGE, ("default",)),
    *_each("orchestrator.advantage.length_weighted_baseline", _ADVANTAGE, (False,)),
    *_each("orchestrator.algo orchestrator.advantage", _ADVANTAGE),
    *_each("orchestrator.training_mode", "the host trains with reinforcement learning", ("rl",)),
    *_each("orchestrator.verification.enabled", "the environment's reward is always read", (True,)),
    *_each("orchestrator.verification", "the environment's reward is always read"),
    *_each("orchestrator.train.filter_zero_advantages", _KEEPS_ALL, (False,)),
    *_each(
        "orchestrator.filters orchestrator.pre_batch_filters orchestrator.post_batch_filters",
        _KEEPS_ALL,
        ([],),
    ),
    *_each("orchestrator.token_batch_size", "a batch is counted in rollouts: orchestrator.batch_size"),
    *_each("orchestrator.pad_to_multiple_of", "rollouts are padded to the longest of their batch", (1,)),
    *_each("orchestrator.sampling.temp_scheduler", "the temperature is constant"),
    *_each("orchestrator.sampling.repetition_penalty", _NOT_POLICY, (1, 1.0)),
    *_each("orchestrator.sampling.min_tokens", _NOT_POLICY, (0,)),
    *_each("orchestrator.sampling.seed", "one seed rules the run: trl_host.seed"),
    *_each(_sampling("extra_body"), "it is sent to an inference server, and the host starts none", ({},)),
    *_each("orchestrator.renderer", "the model's chat template renders the messages"),
    *_each("tokenizer trainer.tokenizer orchestrator.tokenizer", _TOKENIZER),
    *_each("model.vlm trainer.model.vlm orchestrator.model.vlm", _VLM),
    *_each("trainer.model.reduce_dtype", "gradients have the dtype of the weights"),
    *_each("trainer.model.ac.mode", "whole layers are checkpointed", ("full",)),
    *_each("trainer.model.ac.freq", "every layer is checkpointed", (1,)),
    *_each("trainer.model.ac.targets", "whole layers are checkpointed"),
    *_each(
        "trainer.model.ac_offloading", "activations stay where they are; checkpointing itself is switched on"
    ),
    *_each("trainer.model.compile", "the model is not compiled"),
    *_each("trainer.model.lora.modules_to_save", "the adapter alone is trained", ([],)),
    *_each("trainer.model.fsdp_cpu_offload trainer.model.optim_cpu_offload", _SHARDING, (False,)),
    *_each("trainer.model.full_offload", _SHARDING, (False,)),
    *_each("trainer.model.reshard_after_forward", _SHARDING),
    *_each("trainer.model.dp_replicate trainer.model.ep trainer.model.cp", _SHARDING, (1,)),
    *_each("trainer.model.cp_style trainer.model.ep_comm_backend trainer.model.deepep_num_sms", _SHARDING),
    *_each("trainer.model.deepep_token_chunk_size", _SHARDING),
    *_each("trainer.model.impl", _MOE, ("hf", "auto")),
    *_each("trainer.model.moe_router_dtype trainer.model.moe_use_grouped_mm", _MOE),
    *_each("trainer.model.moe_fused_kernel trainer.model.freeze_moe_router", _MOE, (False,)),
    *_each("trainer.model.fp8", "the host trains in float32 or bfloat16", (False,)),
    *_each("trainer.model.quantization", "the host trains in float32 or bfloat16"),
    *_each("trainer.model.index_cache trainer.model.conversion_dir", _MOE),
    *_each("trainer.model.fused_lm_head_token_chunk_size", "the host forms the logits its losses need"),
    *_each("trainer.model.debug.num_layers", _DEBUG),
    *_each("trainer.model.debug", _DEBUG, (False,)),
    *_each("trainer.optim.mu", "the optimizer muon is not available on the host"),
    *map(_policy_knob, _POLICY_KNOBS),
    *_each("ckpt.keep_interval trainer.ckpt.keep_interval orchestrator.ckpt.keep_interval", _CKPT),
    *_each("ckpt.output_dir trainer.ckpt.output_dir trainer.ckpt.weights", _CKPT),
    *_each("trainer.ckpt.weights_only trainer.ckpt.skip_gather_master_weights", _CKPT, (False,)),
    *_each(
        "trainer.ckpt.skip_progress trainer.ckpt.skip_scheduler trainer.ckpt.skip_dataloader", _CKPT, (False,)
    ),
    *_each("trainer.ckpt.skip_optimizer orchestrator.ckpt.skip_progress", _CKPT, (False,)),
    *_each("orchestrator.ckpt.skip_buffer", _CKPT, (False,)),
    *_each("orchestrator.ckpt.wait_for_weights_timeout", _TRANSPORT),
    *_each("trainer.output_dir orchestrator.output_dir", _RUN_FOLDER),
    *_each("clean clean_output_dir", "the host deletes no folder", (False,)),
    *_each("bench trainer.bench orchestrator.bench", _BENCH, (False,)),
    *(row for table in WANDB_TABLES for row in _wandb_rows(table)),
    *_each("wandb.shared", "one process logs, so there is nothing to share", (True, False)),
    *_each("orchestrator.wandb.log_extras", "samples and distributions are not logged"),
    *(
        NotHonoured(f"{table}file", _MONITOR_FILE, null_counts=True)
        for table in ("monitors.", "trainer.monitors.", "orchestrator.monitors.")
    ),
    *_each("file_monitor trainer.file_monitor orchestrator.file_monitor", _MONITOR_FILE),
    *_each("monitors.prime orchestrator.monitors.prime orchestrator.prime_monitor", _PLATFORM),
    *_each("trainer.heartbeat orchestrator.heartbeat trainer.metrics_server", _PLATFORM),
    *_each("log trainer.log orchestrator.log", _LOG),
    *_each("trainer.enable_token_export", _LOG, (False,)),
    *_each("env_vars trainer.env_vars orchestrator.env_vars", _ENV_VARS, ({},)),
    *_each("trainer.data trainer.memory_profiler_path trainer.trace_path trainer.gc", _DEBUG),
    *_each("trainer.matmul_precision", "float32 products are made in full precision", ("highest",)),
    *_each("trainer.enable_router_replay", _MOE, (False,)),
    *_each("experimental orchestrator.experimental", "experiments of PRIME-RL v0.6.0"),
)

MODEL_NAME_COPIES = (
    "orchestrator.model.name",
    "orchestrator.student.model.name",
    "inference.model.name",
    "inference.vllm.model",
    "tokenizer.name",
    "trainer.tokenizer.name",
    "orchestrator.tokenizer.name",
)
"""Keys that ask for nothing where they repeat the name of the model."""

UNKNOWN = "unknown to PRIME-RL"
