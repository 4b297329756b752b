"""An environment of verifiers, loaded and checked. Imports no verifiers before it is asked to."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.verifiers_env.source import RENDERER_KEY, RUNTIME, Source

INSTALL = "pip install 'composer-rl[verifiers]'"


def load_environment(source: Source) -> Any:
    """The environment itself, checked. Its package's code runs here, in this process."""
    _require_verifiers(source)
    import verifiers.v1 as vf
    from pydantic import ValidationError

    _make_python_path_absolute()
    try:
        config = vf.resolve_env_config(_plain(source.env))
        _check_agents(config, source)
        environment = vf.load_environment(config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "env"
        raise ConfigError(
            f"{source.key} must be an environment of verifiers 0.4; {place} is wrong: {first['msg']}; see docs/verifiers.md"
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{source.key} must name packages that are installed; it failed with {error!r}; install them beside composer-rl"
        ) from error
    _check_placement(environment, source)
    _put_uv_on_path()
    return environment


def without_time_limit(source: Source, environment: Any, tasks: Iterable[Any]) -> str | None:
    """One line where a rollout of ``tasks`` may hang for ever, else None: neither an agent's own limit of time nor
    the task's is set."""
    from verifiers.v1.configs.agent import agent_config_fields

    unlimited = [
        name
        for name, agent in agent_config_fields(environment.config).items()
        if agent.timeout.rollout is None
    ]
    if not unlimited or environment.config.timeout.episode is not None:
        return None
    if all(task.data.timeout.agent is not None for task in tasks):
        return None
    key = source.agent_key(unlimited[0], "timeout.rollout")
    return f"warning: {key} is not set, so a rollout of {source.name} that hangs holds its step for ever; set it in seconds"


def load_renderer(source: Source) -> Any:
    """The configuration of the renderer, or None for the one that belongs to the model's name."""
    if source.renderer is None or source.renderer.get("name") == "auto":
        return None
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    try:
        return TypeAdapter(RendererConfig).validate_python(_plain(source.renderer))
    except (ValidationError, ImportError, ValueError, TypeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"{RENDERER_KEY} must be a renderer's configuration; {first}; see docs/verifiers.md"
        ) from error


def _plain(value: Any) -> Any:
    """A copy that a validator may change."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _require_verifiers(source: Source) -> None:
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None:
        raise ConfigError(f"{source.key} needs verifiers 0.4; found no such package; {INSTALL}")


def _check_agents(config: Any, source: Source) -> None:
    from verifiers.v1.configs.agent import agent_config_fields

    for name, agent in agent_config_fields(config).items():
        if agent.runtime.type != RUNTIME:
            raise ConfigError(
                f'{source.agent_key(name, "runtime.type")} must be "{RUNTIME}" on the TRL host, which starts no containers or '
                f'sandboxes; found "{agent.runtime.type}"; set it, or train on PRIME-RL'
            )


def _check_placement(environment: Any, source: Source) -> None:
    task = type(environment.taskset).task_type()
    if task.NEEDS_CONTAINER:
        raise ConfigError(
            f"{source.name}: the task {task.__name__} must run without a container on the TRL host; it needs one; train it on PRIME-RL"
        )
    config = environment.taskset.config
    for server in [*type(environment.taskset).toolsets(config), *task.toolsets(config.task)]:
        runtime = server.config.runtime.type
        if not getattr(server.config, "url", None) and runtime != RUNTIME:
            raise ConfigError(
                f'{source.name}: the tool server {type(server).__name__} must have runtime.type "{RUNTIME}" on the TRL host; found "{runtime}"; '
                "set it under env.taskset, or train on PRIME-RL"
            )
    for harness in environment._harnesses.values():
        if harness.NEEDS_CONTAINER:
            raise ConfigError(
                f'{source.name}: the harness "{harness.config.id}" must run without a container on the TRL host; it needs one; set '
                f'{source.agent_key("agent", "harness.id")} = "null", or train on PRIME-RL'
            )


def _make_python_path_absolute() -> None:
    """Tool servers and harness programs are started in folders of their own, where a relative entry names
    nothing; verifiers would wait for them until its limit of time."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(entries):
        os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)


def _put_uv_on_path() -> None:
    """Harness programs are prepared with ``uv``. Without one, verifiers would download an installer."""
    scripts = sysconfig.get_path("scripts")
    path = os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, path])
    if shutil.which("uv") is None:
        raise ConfigError(
            f"uv must be on the PATH, since verifiers prepares harness programs with it; found none; {INSTALL}"
        )
