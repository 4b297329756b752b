"""The environment that a PRIME-RL TOML names, and what of it cannot run on this host. Imports no verifiers
before it is asked to."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_prime_plugin.errors import ConfigError

SOURCE_KEY = "orchestrator.train.source"
RENDERER_KEY = "orchestrator.renderer"
_TAKEN = ("env", "name", "ratio", "group_size")
"""Keys of a source that need nothing of the host, or that the host's own settings already answer."""

RUNTIME = "subprocess"
INSTALL = "pip install 'composer-rl[verifiers]'"


@dataclass(frozen=True)
class Source:
    """``env``: the table ``env`` of the one train source. ``renderer``: ``[orchestrator.renderer]``, None
    where it is absent. ``name``: what the environment is called in messages."""

    env: Mapping[str, Any]
    renderer: Mapping[str, Any] | None
    name: str


def find_source(document: Mapping[str, Any]) -> Source | None:
    """The train source of a TOML; None where it has none. Raises ``ConfigError`` for several."""
    orchestrator = document.get("orchestrator") or {}
    train = orchestrator.get("train") if isinstance(orchestrator, Mapping) else None
    sources = train.get("source") if isinstance(train, Mapping) else None
    if not sources:
        return None
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], Mapping):
        count = len(sources) if isinstance(sources, list) else repr(sources)
        raise ConfigError(
            f"{SOURCE_KEY} must be one table on the TRL host; found {count}; keep one [[{SOURCE_KEY}]]"
        )
    source = sources[0]
    other = sorted(key for key, value in source.items() if key not in _TAKEN and value not in (None, {}))
    if other:
        raise ConfigError(
            f"{SOURCE_KEY} must hold {', '.join(_TAKEN)} alone on the TRL host; found {', '.join(other)}; set sampling and "
            "the algorithm for the whole run, or remove it"
        )
    env = source.get("env")
    taskset = env.get("taskset") if isinstance(env, Mapping) else None
    name = taskset.get("id") if isinstance(taskset, Mapping) else None
    if not isinstance(env, Mapping) or not isinstance(name, str):
        raise ConfigError(
            f"{SOURCE_KEY}.env must name a taskset of verifiers 0.4; found {env!r}; set for example "
            f'env = {{ taskset = {{ id = "my-taskset" }}, agent = {{ runtime = {{ type = "{RUNTIME}" }} }} }}'
        )
    renderer = orchestrator.get("renderer")
    return Source(env, renderer if isinstance(renderer, Mapping) else None, str(source.get("name") or name))


def load_environment(source: Source) -> Any:
    """The environment itself, checked. Its package's code runs here, in this process."""
    _require_verifiers()
    import verifiers.v1 as vf
    from pydantic import ValidationError

    try:
        config = vf.resolve_env_config(_plain(source.env))
        _check_agents(config)
        environment = vf.load_environment(config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "env"
        raise ConfigError(
            f"{SOURCE_KEY}.env must be an environment of verifiers 0.4; {place} is wrong: {first['msg']}; see docs/verifiers.md"
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{SOURCE_KEY}.env must name packages that are installed; it failed with {error!r}; install them beside composer-rl"
        ) from error
    _check_placement(environment)
    _put_uv_on_path()
    return environment


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


def _require_verifiers() -> None:
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None:
        raise ConfigError(f"{SOURCE_KEY} needs verifiers 0.4; found no such package; {INSTALL}")


def _check_agents(config: Any) -> None:
    from verifiers.v1.configs.agent import agent_config_fields

    for name, agent in agent_config_fields(config).items():
        if agent.runtime.type != RUNTIME:
            raise ConfigError(
                f'{SOURCE_KEY}.env.{name}.runtime.type must be "{RUNTIME}" on the TRL host, which starts no containers or '
                f'sandboxes; found "{agent.runtime.type}"; set it, or train on PRIME-RL'
            )


def _check_placement(environment: Any) -> None:
    task = type(environment.taskset).task_type()
    if task.NEEDS_CONTAINER:
        raise ConfigError(
            f"the task {task.__name__} must run without a container on the TRL host; it needs one; train it on PRIME-RL"
        )
    config = environment.taskset.config
    for server in [*type(environment.taskset).toolsets(config), *task.toolsets(config.task)]:
        runtime = server.config.runtime.type
        if not getattr(server.config, "url", None) and runtime != RUNTIME:
            raise ConfigError(
                f'the tool server {type(server).__name__} must have runtime.type "{RUNTIME}" on the TRL host; found "{runtime}"; '
                "set it under env.taskset, or train on PRIME-RL"
            )
    for harness in environment._harnesses.values():
        if harness.NEEDS_CONTAINER:
            raise ConfigError(
                f'the harness "{harness.config.id}" must run without a container on the TRL host; it needs one; set '
                f'{SOURCE_KEY}.env.agent.harness.id = "null", or train on PRIME-RL'
            )


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
