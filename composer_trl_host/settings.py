"""One run's settings on the host, read from a PRIME-RL TOML by the tables of ``prime_keys``. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import KWARGS_TABLE, RunFile
from composer_trl_host.prime_keys import (
    DEFAULT_MAX_STEPS,
    DEFAULT_WANDB_PROJECT,
    HONOURED,
    HONOURED_TABLES,
    MODEL_NAME_COPIES,
    NOT_HONOURED,
    ONE_NAME,
    RESUME_TABLES,
    UNKNOWN,
    WANDB_TABLES,
    Honoured,
    NotHonoured,
    Resume,
)
from composer_trl_host.verifiers_env.source import find_source, taken_keys

_OWN_TABLES = ("trainer.loss.type", "trainer.loss.import_path", KWARGS_TABLE)


@dataclass(frozen=True)
class Unhonoured:
    """A dotted ``key`` of the TOML that the host does not do, and the ``reason``."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


@dataclass(frozen=True)
class LoRASettings:
    """``[trainer.model.lora]``. ``target_modules`` None: every linear layer of the decoder."""

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...] | None


@dataclass(frozen=True)
class HostSettings:
    """One run on the host. ``HONOURED`` says where each field comes from and what its default is."""

    model_name: str | None
    """None: the embedded model."""
    model_dtype: Literal["float32", "bfloat16"]
    attn_implementation: str | None
    trust_remote_code: bool
    lora: LoRASettings | None
    gradient_checkpointing: bool
    seq_len: int | None
    max_steps: int
    batch_size: int
    """Rollouts per optimizer step, whatever the number of processes."""
    group_size: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    max_completion_tokens: int | None
    """Per turn of the model."""
    seed: int
    optimizer: Literal["adamw", "sgd"]
    lr: float
    betas: tuple[float, float]
    """Of AdamW."""
    momentum: float
    """Of SGD, as ``nesterov``."""
    nesterov: bool
    weight_decay: float
    max_norm: float | None
    """None: gradients are not clipped."""
    scheduler: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    """Steps in which the learning rate rises from 0. 0 with the constant scheduler."""
    decay_steps: int
    """Last steps, in which it falls to ``min_lr``: as set for linear, all after the warm-up for cosine."""
    min_lr: float
    ckpt_interval: int | None
    """None: one checkpoint at the end."""
    ckpt_keep_last: int | None
    resume: Resume
    """None: from the start. ``"latest"``: the newest checkpoint of the run folder. Else that step."""
    output_dir: Path
    """Folder of the runs, as written: relative to the working directory."""
    run_dir: Path
    """Folder of this run: ``output_dir`` itself unless ``run.name`` or ``run.dir`` is set."""
    run_name: str | None
    wandb_project: str | None
    """None: W&B is off."""
    config: ComposerConfig
    base_dir: Path
    """What paths under ``trl_host`` are relative to."""
    unhonoured: tuple[Unhonoured, ...]

    @classmethod
    def from_run(cls, run: RunFile) -> HostSettings:
        """The settings of ``run``. Raises ``ConfigError`` for a wrong value, for two spellings that
        disagree, and, with ``trl_host.strict``, for anything the host does not do."""
        reader = _Reader(run.document)
        unhonoured = reader.notes
        reader.value("dry_run")  # the command line's; here its value is checked
        model_name = reader.value("model_name")
        max_steps = reader.value("max_steps")
        if max_steps is None:
            max_steps = DEFAULT_MAX_STEPS
            reader.note(
                "max_steps",
                f"not set, where PRIME-RL runs without end; the host stops after {DEFAULT_MAX_STEPS} steps",
            )
        batch_size, group_size = _batch(reader)
        optimizer, betas, momentum, nesterov = _optimizer(reader)
        scheduler, warmup_steps, decay_steps, min_lr = _scheduler(reader, max_steps)
        top_k = reader.value("top_k")
        attention = {"auto": None, "fa4": "flash_attention_4"}
        attn_implementation = reader.value("attn_implementation")
        output_dir = Path(reader.value("output_dir"))
        run_name = reader.value("run_name")
        run_folder = reader.value("run_folder") or run_name
        wandb_name = reader.value("wandb_name")
        if run_name is not None and wandb_name is not None and wandb_name != run_name:
            reader.note(reader.first_key("wandb_name"), ONE_NAME)
        checkpointing = reader.table("trainer.model.ac") is not None or (
            reader.table("trainer.model.ac_offloading") is not None
        )
        settings = cls(
            model_name=model_name,
            model_dtype=reader.value("model_dtype"),
            attn_implementation=attention.get(attn_implementation, attn_implementation),
            trust_remote_code=reader.value("trust_remote_code"),
            lora=_lora(reader),
            gradient_checkpointing=checkpointing,
            seq_len=_seq_len(reader),
            max_steps=max_steps,
            batch_size=batch_size,
            group_size=group_size,
            temperature=reader.value("temperature"),
            top_p=reader.value("top_p"),
            top_k=top_k if top_k is not None and top_k > 0 else None,
            min_p=reader.value("min_p"),
            max_completion_tokens=reader.value("max_completion_tokens"),
            seed=_seed(reader, run.config.trl_host.seed),
            optimizer=optimizer,
            lr=reader.value("lr"),
            betas=betas,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=reader.value("weight_decay"),
            max_norm=reader.value("max_norm"),
            scheduler=scheduler,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            min_lr=min_lr,
            ckpt_interval=reader.value("ckpt_interval"),
            ckpt_keep_last=reader.value("ckpt_keep_last"),
            resume=_resume(reader),
            output_dir=output_dir,
            run_dir=output_dir if run_folder is None else output_dir / run_folder,
            run_name=run_name or wandb_name,
            wandb_project=_wandb_project(reader),
            config=run.config,
            base_dir=run.base_dir,
            unhonoured=(),
        )
        if run.config.trl_host.environment is None and run.config.trl_host.traces is None:
            _take_verifiers(reader, run.document)
        reader.note_the_rest(dict.fromkeys(MODEL_NAME_COPIES, model_name))
        if run.config.trl_host.strict and unhonoured:
            raise ConfigError(
                "with trl_host.strict = true every key must be one that the host honours; found "
                f"{'; '.join(map(str, unhonoured))}; "
                f"remove them or set {KWARGS_TABLE}.trl_host.strict = false"
            )
        return dataclasses.replace(settings, unhonoured=tuple(unhonoured))


_ROWS: Mapping[str, Honoured] = {row.field: row for row in HONOURED}
_KNOWN: Mapping[str, NotHonoured] = {row.key: row for row in NOT_HONOURED}
_KEYS = (
    *(key for row in HONOURED for key in row.keys),
    *_KNOWN,
    *_OWN_TABLES,
    *(table for tables in HONOURED_TABLES for table in tables),
    *(f"{table}.dir" for table in RESUME_TABLES),
)
_TABLES = frozenset(
    ".".join(key.split(".")[:depth]) for key in _KEYS for depth in range(1, key.count(".") + 1)
)
"""Every table that holds a key of either list."""


class _Reader:
    """The leaves of a TOML by dotted key, and which of them have been taken."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.leaves = dict(_flatten(document, ""))
        self.taken: set[str] = set()
        self.notes: list[Unhonoured] = []
        for key, value in self.leaves.items():
            if key in _TABLES and key not in _KNOWN and not (value is None or value == {}):
                raise ConfigError(
                    f"{key} must be a table; found {value!r}; write [{key}] and its keys below it"
                )

    def note(self, key: str, reason: str) -> None:
        """List ``key`` as not honoured, once."""
        self.taken.add(key)
        self.notes.append(Unhonoured(key, reason))

    def value(self, field: str) -> Any:
        """The value of one row of ``HONOURED``; its spellings must agree."""
        row = _ROWS[field]
        found = self.values(row)
        if not found:
            return row.default
        first, value = next(iter(found.items()))
        for other, another in found.items():
            if another != value:
                raise conflict(first, self.leaves[first], other, self.leaves[other])
        return value

    def values(self, row: Honoured) -> dict[str, Any]:
        """Each spelling of ``row`` that is set, converted."""
        found: dict[str, Any] = {}
        for key in row.keys:
            if key in self.leaves:
                self.taken.add(key)
                if self.leaves[key] is not None or row.kind.null:
                    found[key] = row.kind.read(key, self.leaves[key])
        return found

    def first_key(self, field: str) -> str:
        """The spelling of ``field`` that the TOML uses."""
        return next(key for key in _ROWS[field].keys if key in self.leaves)

    def table(self, key: str) -> dict[str, Any] | None:
        """The leaves below the table ``key``; None where it is absent or null."""
        below = {
            leaf[len(key) + 1 :]: value for leaf, value in self.leaves.items() if leaf.startswith(f"{key}.")
        }
        if below or self.leaves.get(key) == {}:
            return below
        if self.leaves.get(key) not in (None, False):
            raise ConfigError(
                f"{key} must be a table; found {self.leaves[key]!r}; write [{key}] and its keys below it"
            )
        return None

    def not_for(self, field: str, owner: str) -> None:
        """List ``field`` where ``owner``, the chosen type, has no such setting."""
        for key in _ROWS[field].keys:
            if key in self.leaves:
                self.note(key, f"{owner} has no such setting")

    def take(self, keys: tuple[str, ...]) -> None:
        """Count ``keys``, and everything under them, as honoured."""
        self.taken.update(leaf for leaf in self.leaves for key in keys if f"{leaf}.".startswith(f"{key}."))

    def note_the_rest(self, same: Mapping[str, Any]) -> None:
        """List every leaf that was not taken. ``same``: values that keys may repeat."""
        for key, value in self.leaves.items():
            if key in self.taken or key in _OWN_TABLES or (key in same and value == same[key]):
                continue
            row = _known_row(key)
            if row is not None:
                off = value is None and not row.null_counts
                if not off and not any(value == item and type(value) is type(item) for item in row.neutral):
                    self.notes.append(Unhonoured(key, row.reason))
            elif not (key in _TABLES or key in _KEYS):
                self.notes.append(Unhonoured(key, UNKNOWN + _suggestion(key)))


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted leaves; an empty table is a leaf, a list of tables too, ``[trainer.loss.kwargs]`` is none."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key == KWARGS_TABLE:
            continue
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _known_row(key: str) -> NotHonoured | None:
    """The row of ``NOT_HONOURED`` for ``key`` or for the nearest table around it."""
    while key:
        if key in _KNOWN:
            return _KNOWN[key]
        key = key.rpartition(".")[0]
    return None


def _suggestion(key: str) -> str:
    near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


def conflict(first: str, value: Any, other: str, another: Any) -> ConfigError:
    """Two spellings of one setting that disagree."""
    return ConfigError(
        f"{first} and {other} must agree; found {value!r} and {another!r}; set one of them alone"
    )


def _batch(reader: _Reader) -> tuple[int, int]:
    batch_size, group_size = reader.value("batch_size"), reader.value("group_size")
    if (
        reader.leaves.get("orchestrator.token_batch_size") is not None
        and "orchestrator.batch_size" in reader.taken
    ):
        raise conflict(
            "orchestrator.batch_size",
            batch_size,
            "orchestrator.token_batch_size",
            reader.leaves["orchestrator.token_batch_size"],
        )
    if batch_size % group_size:
        raise ConfigError(
            f"orchestrator.batch_size must be a multiple of orchestrator.group_size; found {batch_size} and "
            f"{group_size}; set for example orchestrator.batch_size = "
            f"{-(-batch_size // group_size) * group_size}"
        )
    return batch_size, group_size


def _seed(reader: _Reader, own: int | None) -> int:
    """``trl_host.seed``, which every release lets through, or v0.5.0's key."""
    found = reader.values(_ROWS["seed"])
    if own is None:
        return int(reader.value("seed"))
    for key, value in found.items():
        if value != own:
            raise conflict(key, value, f"{KWARGS_TABLE}.trl_host.seed", own)
    return own


def _lora(reader: _Reader) -> LoRASettings | None:
    if reader.table("trainer.model.lora") is None:
        return None
    return LoRASettings(
        rank=reader.value("lora.rank"),
        alpha=reader.value("lora.alpha"),
        dropout=reader.value("lora.dropout"),
        target_modules=reader.value("lora.target_modules"),
    )


def _seq_len(reader: _Reader) -> int | None:
    """The orchestrator's limit, to which rollouts are cut; the trainer's may be larger, never smaller."""
    found = reader.values(_ROWS["seq_len"])
    shared, rollout = found.get("seq_len"), found.get("orchestrator.seq_len")
    if shared is not None and rollout is not None and shared != rollout:
        raise conflict("seq_len", shared, "orchestrator.seq_len", rollout)
    trainer = found.get("trainer.model.seq_len")
    limit = rollout or shared or trainer
    if trainer is not None and trainer < limit:
        name = "orchestrator.seq_len" if rollout else "seq_len"
        raise ConfigError(
            f"trainer.model.seq_len must be at least {name}; found {trainer} and {limit}; "
            f"set trainer.model.seq_len = {limit} or remove it"
        )
    return limit


def _optimizer(reader: _Reader) -> tuple[Literal["adamw", "sgd"], tuple[float, float], float, bool]:
    name = reader.value("optimizer")
    if name not in ("adamw", "sgd"):
        reader.note(
            "trainer.optim.type", f"the host has adamw and sgd; it trains with adamw instead of {name}"
        )
        name = "adamw"
    unread = ("momentum", "nesterov") if name == "adamw" else ("beta1", "beta2")
    for field in unread:
        reader.not_for(field, f'the optimizer "{name}"')
    found = {field: reader.value(field) for field in ("beta1", "beta2", "momentum", "nesterov")}
    # What the chosen type has not is checked and listed above, and is as if it were not set.
    for field in unread:
        found[field] = _ROWS[field].default
    return name, (found["beta1"], found["beta2"]), found["momentum"], found["nesterov"]


def _scheduler(
    reader: _Reader, max_steps: int
) -> tuple[Literal["constant", "linear", "cosine"], int, int, float]:
    name = reader.value("scheduler")
    fields = {
        "constant": (),
        "linear": ("warmup_steps", "decay_steps", "min_lr"),
        "cosine": ("warmup_steps", "min_lr"),
    }
    for field in ("warmup_steps", "decay_steps", "min_lr"):
        if field not in fields[name]:
            reader.not_for(field, f'the scheduler "{name}"')
    if name == "constant":
        return name, 0, 0, 0.0
    warmup, min_lr = reader.value("warmup_steps"), reader.value("min_lr")
    decay = reader.value("decay_steps") if name == "linear" else max(max_steps - warmup, 0)
    if warmup + decay > max_steps or (name == "cosine" and decay == 0):
        at_most = (
            f"warmup_steps + decay_steps ({warmup} + {decay})"
            if name == "linear"
            else f"warmup_steps ({warmup})"
        )
        raise ConfigError(
            f'trainer.scheduler of type "{name}" must fit into max_steps; found {at_most} and '
            f"max_steps = {max_steps}; lower them under [trainer.scheduler] or raise max_steps"
        )
    return name, warmup, decay, min_lr


def _resume(reader: _Reader) -> Resume:
    """PRIME-RL's two forms: a step (-1: the latest), or a table (empty: the latest)."""
    for table in RESUME_TABLES:
        if (reader.table(table) or {}).get("dir") is not None:
            raise ConfigError(
                f"{table}.dir must not be set on the TRL host, which resumes from its own run folder; found "
                f"{reader.leaves[f'{table}.dir']!r}; set resume.step, or output_dir to the folder of that run"
            )
    found: dict[str, Resume] = {
        key: "latest" if step == -1 else step or None for key, step in reader.values(_ROWS["resume"]).items()
    }
    for table in RESUME_TABLES:
        if reader.table(table) is not None and f"{table}.step" not in found:
            found[table] = "latest"
    if len(set(found.values())) > 1:
        first, other = (
            next(iter(found)),
            next(key for key in found if found[key] != next(iter(found.values()))),
        )
        raise conflict(first, found[first], other, found[other])
    return next(iter(found.values()), None)


def _take_verifiers(reader: _Reader, document: Mapping[str, Any]) -> None:
    """Count the tables of environments as honoured where they are the task. What a run would refuse is listed."""
    try:
        sources = find_source(document)
    except ConfigError:
        return
    if sources is not None:
        reader.take(taken_keys(sources))
        for key, reason in sources.notes:
            reader.note(key, reason)


def _wandb_project(reader: _Reader) -> str | None:
    project = reader.value("wandb_project")
    if project is None and any(reader.table(table) is not None for table in WANDB_TABLES):
        return DEFAULT_WANDB_PROJECT
    return project
