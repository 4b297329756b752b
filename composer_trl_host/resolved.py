"""A run's settings as files: the JSON beside its metrics, and a TOML that reads back as the same settings.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import IMPORT_PATHS
from composer_trl_host.prime_keys import HONOURED
from composer_trl_host.settings import HostSettings, LoRASettings

RESOLVED_FILE = "config.json"
"""In the run folder."""


def resolved_json(settings: HostSettings) -> str:
    """The settings as JSON, the composer table with every default spelt out."""
    fields = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    fields["config"] = settings.config.model_dump()
    fields["lora"] = None if settings.lora is None else dataclasses.asdict(settings.lora)
    fields["unhonoured"] = [str(item) for item in settings.unhonoured]
    return json.dumps(fields, indent=2, default=str) + "\n"


def read_resolved(path: Path) -> HostSettings:
    """The settings that ``resolved_json`` wrote, without ``unhonoured``."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        # Which form of ipo was chosen lies in the keys that were set, and a dump sets all of them.
        untouched = ComposerConfig().policy.model_dump()
        policy = {key: value for key, value in fields["config"]["policy"].items() if value != untouched[key]}
        lora = fields["lora"]
        if lora is not None:
            targets = lora["target_modules"]
            lora = LoRASettings(**{**lora, "target_modules": None if targets is None else tuple(targets)})
        folders = {name: Path(fields[name]) for name in ("output_dir", "run_dir", "base_dir")}
        config = ComposerConfig(**{**fields["config"], "policy": policy})
        changed = {**folders, "betas": tuple(fields["betas"]), "lora": lora, "config": config}
        return HostSettings(**{**fields, **changed, "unhonoured": ()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} must be the {RESOLVED_FILE} that a run wrote with this version; reading it failed with "
            f"{type(error).__name__}: {error}; name a run folder of this version"
        ) from error


def with_absolute_paths(kwargs: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
    """``[trainer.loss.kwargs]`` with the paths of ``trl_host`` absolute, so that it can be read from any folder."""
    host = dict(kwargs.get("trl_host") or {})
    for key in ("environment", "hints"):
        path, colon, name = str(host.get(key)).partition(":")
        if colon and path.endswith(".py"):
            host[key] = f"{(base_dir / path).resolve()}:{name}"
    for key in ("traces", "adapter"):
        if host.get(key) is not None:
            host[key] = _absolute(host[key], base_dir)
    judge = host.get("judge")
    if judge and judge.get("cache_dir") is not None:
        host["judge"] = {**judge, "cache_dir": _absolute(judge["cache_dir"], base_dir)}
    return {**kwargs, "trl_host": host} if host else dict(kwargs)


def _absolute(path: str, base_dir: Path) -> str:
    return str((base_dir / Path(path).expanduser()).resolve())


def resolved_document(settings: HostSettings) -> dict[str, Any]:
    """A document in the newest spelling that reads back as ``settings``, every default spelt out, but for
    ``[trainer.loss.kwargs]``, which holds what was set. Paths of ``trl_host`` are absolute."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    if settings.lora is not None:
        values |= {f"lora.{name}": value for name, value in dataclasses.asdict(settings.lora).items()}
    values["output_dir"] = str(settings.output_dir)
    values["resume"] = -1 if settings.resume == "latest" else settings.resume
    if settings.output_dir / (settings.run_name or ".") != settings.run_dir:
        inside = settings.run_dir.is_relative_to(settings.output_dir)
        folder = settings.run_dir.relative_to(settings.output_dir) if inside else settings.run_dir
        values["run_folder"] = str(folder)
    if settings.optimizer == "adamw":
        values["beta1"], values["beta2"] = settings.betas
    unread = {
        *(("momentum", "nesterov") if settings.optimizer == "adamw" else ()),
        *({"constant": ("warmup_steps", "decay_steps", "min_lr"), "cosine": ("decay_steps",)}).get(
            settings.scheduler, ()
        ),
    }
    document: dict[str, Any] = {}
    for row in HONOURED:
        value = values.get(row.field)
        if row.field == "seed" and (value == row.default or settings.config.trl_host.seed is not None):
            continue  # newer releases of PRIME-RL refuse the key; trl_host.seed is written below
        if row.field not in unread and (value is not None or row.kind.null):
            put(document, row.keys[0], value)
    if settings.gradient_checkpointing:
        put(document, "trainer.model.ac", {})
    kwargs = with_absolute_paths(settings.config.model_dump(exclude_unset=True), settings.base_dir)
    loss = {"type": "custom", "import_path": IMPORT_PATHS[0], "kwargs": kwargs}
    put(document, "trainer.loss", loss)
    return document


def put(document: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted ``key``, with the tables on its way."""
    *tables, last = key.split(".")
    for table in tables:
        document = document.setdefault(table, {})
    document[last] = value
