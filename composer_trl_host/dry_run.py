"""``composer-rl run --dry-run``: both backends' configurations as files, and what would keep the host from running.

Loads no model and imports no torch.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.routing import Backend
from composer_prime_plugin.runfile import RunFile
from composer_trl_host.resolved import put, resolved_document, resolved_json, with_absolute_paths
from composer_trl_host.settings import HostSettings
from composer_trl_host.toml_text import toml_text
from composer_trl_host.verifiers_env.source import find_source, taken_keys

CONFIGS_FOLDER = "configs"
"""Inside the run folder."""
PRIME_TOML = "prime-rl.toml"
PRIME_JSON = "prime-rl.json"
HOST_TOML = "trl-host.toml"
HOST_JSON = "trl-host.json"


def dry_run(run: RunFile, backend: Backend, prime_resolved: dict[str, Any] | None = None) -> int:
    """Write the configurations of ``run`` and say what they mean. Returns the exit code 0.

    ``prime_resolved``: what PRIME-RL's own schema made of the TOML. Raises ``ConfigError`` for settings that
    the host refuses, unless PRIME-RL would train them.
    """
    settings = None
    files: dict[str, str] = {PRIME_TOML: toml_text(merged_document(run))}
    says = {PRIME_TOML: "the layers and overrides merged, as PRIME-RL gets them"}
    if prime_resolved is not None:
        files[PRIME_JSON] = json.dumps(prime_resolved, indent=2) + "\n"
        says[PRIME_JSON] = "the same with PRIME-RL's own defaults"
    try:
        settings = HostSettings.from_run(run)
    except ConfigError as error:
        if backend == "trl-host":
            raise
        print(f"the TRL host would refuse this TOML: {error}")
    if settings is not None:
        files[HOST_TOML] = toml_text(with_environments(resolved_document(settings), settings, run.document))
        says[HOST_TOML] = "what the TRL host takes of it, every default spelt out"
        files[HOST_JSON] = resolved_json(settings)
        says[HOST_JSON] = "the same as a run writes it, with what is not honoured"
        if backend == "trl-host":
            for item in settings.unhonoured:
                print(f"not honoured by the TRL host: {item}")
            for line in missing(settings, run.document):
                print(f"missing for a run on the TRL host: {line}")
    folder = _run_folder(run, settings) / CONFIGS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output_dir must be a folder that can be written; {folder} fails with {error.strerror or error}; set output_dir"
        ) from error
    for name in files:
        print(f"wrote:   {folder / name}  ({says[name]})")
    print("dry run: nothing was started")
    return 0


def with_environments(
    resolved: dict[str, Any], settings: HostSettings, document: Mapping[str, Any]
) -> dict[str, Any]:
    """``resolved`` with the environments of verifiers that ``document`` trains on, as they stand there."""
    host = settings.config.trl_host
    if host.environment is not None or host.traces is not None or _source_problem(document) is not None:
        return resolved
    sources = find_source(document)
    for key in taken_keys(sources) if sources is not None else ():
        *tables, last = key.split(".")
        there: Any = document
        for table in tables:
            there = there.get(table, {})
        if last in there:
            put(resolved, key, copy.deepcopy(there[last]))
    return resolved


def merged_document(run: RunFile) -> dict[str, Any]:
    """The merged TOML without ``dry_run``. Paths of ``trl_host`` are absolute: the file lies elsewhere."""
    document = copy.deepcopy(run.document)
    document.pop("dry_run", None)
    loss = document["trainer"]["loss"]
    if loss.get("kwargs"):
        loss["kwargs"] = with_absolute_paths(loss["kwargs"], run.base_dir)
    return document


def missing(settings: HostSettings, document: Mapping[str, Any]) -> list[str]:
    """What the settings lack for a run, as far as it shows without loading anything."""
    host = settings.config.trl_host
    lines = []
    if host.environment is None and host.traces is None and _source_problem(document) is not None:
        lines.append(
            'a task; set trl_host.environment = "file.py:Class" or trl_host.traces = "folder" under '
            "[trainer.loss.kwargs.trl_host]; " + str(_source_problem(document))
        )
    if host.environment is not None and host.traces is not None:
        lines.append("one task; trl_host.environment and trl_host.traces are both set, remove one")
    if host.traces is None and settings.group_size < 2:
        lines.append(
            f"orchestrator.group_size of at least 2, since advantages are taken against the group's mean; found "
            f"{settings.group_size}"
        )
    files = with_absolute_paths({"trl_host": host.model_dump(exclude_unset=True)}, settings.base_dir)
    for key, value in files.get("trl_host", {}).items():
        if key in ("environment", "hints", "traces", "adapter") and value is not None:
            path = Path(value.rpartition(":")[0] if key in ("environment", "hints") else value)
            if path.is_absolute() and not path.exists():
                lines.append(f"{path}, which trl_host.{key} names")
    name = settings.model_name
    if name is not None and name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        lines.append(f"the folder {name}, which model.name names")
    if settings.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        lines.append(
            "the package wandb, since the TOML has a W&B table; pip install wandb, or add --no-wandb"
        )
    return lines


def _source_problem(document: Mapping[str, Any]) -> str | None:
    """Why the TOML's own environment of verifiers is no task for the host; None where it is one."""
    try:
        source = find_source(document)
    except ConfigError as error:
        return str(error)
    return "the TOML has no [[orchestrator.train.source]] either" if source is None else None


def _run_folder(run: RunFile, settings: HostSettings | None) -> Path:
    if settings is not None:
        return settings.run_dir
    return Path(str(run.document.get("output_dir") or "outputs"))
