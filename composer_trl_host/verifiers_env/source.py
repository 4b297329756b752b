"""What a PRIME-RL TOML says about environments of verifiers, in the spelling of every release, and what of it
cannot be had on this host. Imports no verifiers and no torch.

| release | trained on | evaluated on | an environment's table |
|---|---|---|---|
| v0.5.0 | ``orchestrator.env`` | ``orchestrator.eval.env`` | ``id``, ``args``: a v0 environment |
| v0.6.0 | ``orchestrator.train.env`` | the same | the same |
| v0.7.0 | the same | the same | the same, or ``taskset``, ``harness`` and limits side by side |
| v0.8.0, main | ``orchestrator.train.source`` | ``orchestrator.eval.source`` | ``env`` as verifiers has it |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.prime_keys import COUNT, NUCLEUS, RATE, SHARE, TOP_K

SOURCE_KEY = "orchestrator.train.source"
TRAIN_KEYS = (SOURCE_KEY, "orchestrator.train.env", "orchestrator.env")
"""Where the tables of environments to train on stand, the current spelling first."""
EVAL_KEYS = ("orchestrator.eval.source", "orchestrator.eval.env")
RENDERER_KEY = "orchestrator.renderer"
RUNTIME = "subprocess"

_IDENTITY = ("env", "name", "ratio", "group_size", "rollouts_per_example")
_FLAT_AGENT = (
    *("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens"),
    *("timeout", "retries"),
)
"""Limits that v0.7.0 has beside ``taskset`` and verifiers 0.4 under ``agent``."""
_OLD = ("id", "args", "extra_env_kwargs", "legacy", "state_columns", "max_total_completion_tokens")
"""Keys of a v0 environment, which verifiers 0.4 has no longer."""
_SERVER = ("serve", "pool", "num_workers", "max_retries", "address")
"""Keys about a server of its own for the environment."""
_NO_SERVER = "the environment runs in the trainer's process, and has no server of its own"
_EVAL_SIZES = ("num_examples", "interval", "sampling")
_EVAL_TABLE = (
    *("num_examples", "group_size", "rollouts_per_example", "interval", "sampling", "source", "env"),
    *("skip_first_step", "eval_base_model", "retrigger_on_resume", "skip_eval_on_resume"),
    *("skip_eval_on_restart",),
)
"""Keys of ``orchestrator.eval`` that are honoured."""
_SAMPLING = {
    "temperature": replace(RATE, example="1.0"),
    "top_p": NUCLEUS,
    "top_k": TOP_K,
    "min_p": SHARE,
    "max_completion_tokens": COUNT,
    "max_tokens": COUNT,
}
_MOST_RATIO = 1e6
_DEFAULT_INTERVAL = 100


@dataclass(frozen=True)
class Source:
    """One environment. ``env``: its table as verifiers 0.4 has it. ``renderer``: ``[orchestrator.renderer]``, None
    where it is absent. ``name``: what it is called in messages and metrics. ``ratio``: its share of the prompts,
    relative to the other sources'. ``key``: where its table stands in the TOML. ``flat``: whether the
    agent's limits stand there themselves (v0.7.0), not under ``env.agent``."""

    env: Mapping[str, Any]
    renderer: Mapping[str, Any] | None
    name: str
    ratio: float = 1.0
    key: str = SOURCE_KEY
    flat: bool = False

    def agent_key(self, agent: str, leaf: str) -> str:
        """The dotted name of an agent's key, as this TOML spells it."""
        return f"{self.key}.{leaf}" if self.flat else f"{self.key}.env.{agent}.{leaf}"


@dataclass(frozen=True)
class HeldOutSource:
    """One environment that is evaluated and not trained on.

    ``examples``: how many tasks from the taskset's beginning, None: all. ``group_size``: rollouts of each.
    ``interval``: in optimizer steps. ``sampling``: ``temperature``, ``top_p``, ``top_k``, ``min_p`` and
    ``max_tokens`` where they are not those of training.
    """

    source: Source
    examples: int | None
    group_size: int
    interval: int
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class TaskSources:
    """All environments of a TOML. ``at_start``: held-out ones are played before the first step; ``on_resume``:
    also before the first step of a resumed run. ``notes``: keys that are not honoured, and why."""

    train: tuple[Source, ...]
    heldout: tuple[HeldOutSource, ...] = ()
    at_start: bool = True
    on_resume: bool = False
    notes: tuple[tuple[str, str], ...] = ()


def find_source(document: Mapping[str, Any]) -> TaskSources | None:
    """The environments of a TOML; None where it has none to train on. Raises ``ConfigError`` for what cannot be
    read or had."""
    orchestrator = _table(document, "orchestrator")
    key, tables = _one_list(document, TRAIN_KEYS)
    if not tables:
        return None
    notes: list[tuple[str, str]] = []
    train = []
    for place, table in _places(key, tables):
        train.append(_source(document, place, table, notes))
        _refuse_others(place, table, ())
        _check_group_size(place, table, orchestrator)
    _check_names(key, [source.name for source in train])
    heldout = tuple(_heldout(document, notes))
    evaluation = _table(document, "orchestrator.eval")
    skip = _flag(evaluation, "skip_first_step", False) or not _flag(evaluation, "eval_base_model", True)
    again = _flag(evaluation, "retrigger_on_resume", False) or not (
        _flag(evaluation, "skip_eval_on_resume", True) and _flag(evaluation, "skip_eval_on_restart", True)
    )
    return TaskSources(tuple(train), heldout, not skip, again, tuple(notes))


def taken_keys(sources: TaskSources) -> tuple[str, ...]:
    """The dotted keys, with everything under them, that ``sources`` were read from."""
    tables = {source.key.partition("[")[0] for source in sources.train}
    evaluation = [f"orchestrator.eval.{leaf}" for leaf in _EVAL_TABLE] if sources.heldout else []
    return (*sorted(tables), RENDERER_KEY, *evaluation)


def _heldout(document: Mapping[str, Any], notes: list[tuple[str, str]]) -> list[HeldOutSource]:
    key, tables = _one_list(document, EVAL_KEYS)
    evaluation = _table(document, "orchestrator.eval")
    shared = _sampling(evaluation.get("sampling"), "orchestrator.eval.sampling", notes) if tables else {}
    found = []
    for place, table in _places(key, tables):
        source = _source(document, place, table, notes)
        _refuse_others(place, table, _EVAL_SIZES)
        own = _sampling(table.get("sampling"), f"{place}.sampling", notes)
        examples = _whole(table, evaluation, ("num_examples",), place, -1, least=-1)
        if examples == 0:
            raise ConfigError(
                f"{place}.num_examples must be at least 1, or -1 for all; found 0; set it or remove the table"
            )
        found.append(
            HeldOutSource(
                source,
                None if examples == -1 else examples,
                _whole(table, evaluation, ("group_size", "rollouts_per_example"), place, 1),
                _whole(table, evaluation, ("interval",), place, _DEFAULT_INTERVAL),
                {**shared, **own},
            )
        )
    _check_names(key, [item.source.name for item in found])
    return found


def _source(
    document: Mapping[str, Any], place: str, table: Mapping[str, Any], notes: list[tuple[str, str]]
) -> Source:
    old = [key for key in _OLD if table.get(key) not in (None, {}, [])]
    if old and not (table.get("env") or table.get("taskset")):
        named = table.get("id") or _mapping(table.get("legacy")).get("id")
        raise ConfigError(
            f"{place} must name a taskset of verifiers 0.4; found {old[0]} = {_shown(table[old[0]])}, a v0 environment, which "
            f'verifiers 0.4 cannot load; set [[{SOURCE_KEY}]] with env = {{ taskset = {{ id = "{named or "my-taskset"}" }} }} '
            "where its package has such a taskset, or train on PRIME-RL"
        )
    if old:
        raise ConfigError(
            f"{place} must name one environment; found a taskset and {', '.join(old)}; remove {old[0]}"
        )
    flat = table.get("env") is None and table.get("taskset") is not None
    env = _from_flat(table) if flat else table.get("env")
    taskset = env.get("taskset") if isinstance(env, Mapping) else None
    name = taskset.get("id") if isinstance(taskset, Mapping) else None
    if not isinstance(env, Mapping) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"{place}.env must name a taskset of verifiers 0.4; found {_shown(env)}; set for example "
            f'env = {{ taskset = {{ id = "my-taskset" }}, agent = {{ runtime = {{ type = "{RUNTIME}" }} }} }}'
        )
    address = table.get("address") or _mapping(table.get("serve")).get("address")
    if address is not None:
        raise ConfigError(
            f"{place} must have no address on the TRL host, where the environment runs in the trainer's process; found "
            f"{address!r}; remove it, or train on PRIME-RL"
        )
    notes.extend((f"{place}.{key}", _NO_SERVER) for key in _SERVER if table.get(key) not in (None, {}))
    renderer = _table(document, "orchestrator").get("renderer")
    return Source(
        env,
        renderer if isinstance(renderer, Mapping) else None,
        str(table.get("name") or name),
        _ratio(table, place),
        place,
        flat,
    )


def _from_flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """v0.7.0's table as verifiers 0.4 has it: what the one agent needs goes under ``agent``."""
    agent = {key: table[key] for key in _FLAT_AGENT if table.get(key) is not None}
    harness = dict(_mapping(table.get("harness")))
    runtime = harness.pop("runtime", None)
    if harness:
        agent["harness"] = harness
    if runtime is not None:
        agent["runtime"] = runtime
    return {"taskset": table["taskset"], "agent": agent}


def _refuse_others(place: str, table: Mapping[str, Any], more: Sequence[str]) -> None:
    flat = ("taskset", "harness", *_FLAT_AGENT) if table.get("env") is None else ()
    taken = (*_IDENTITY, *more, *_SERVER, *flat)
    other = sorted(key for key, value in table.items() if key not in taken and value not in (None, {}))
    if other:
        raise ConfigError(
            f"{place} must hold {', '.join((*_IDENTITY[:4], *more))} alone on the TRL host; found {', '.join(other)}; set sampling "
            "and the algorithm for the whole run, or remove it"
        )


def _check_group_size(place: str, table: Mapping[str, Any], orchestrator: Mapping[str, Any]) -> None:
    sizes = ("group_size", "rollouts_per_example")
    whole = next((orchestrator[key] for key in sizes if orchestrator.get(key) is not None), 1)
    for key in sizes:
        if table.get(key) not in (None, whole):
            raise ConfigError(
                f"{place}.{key} must be orchestrator.group_size on the TRL host, whose batch has groups of one size; found "
                f"{table[key]!r} and {whole!r}; set orchestrator.group_size = {table[key]!r} for all sources"
            )


def _check_names(key: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"every table of [[{key}]] must have a name of its own; found {', '.join(twice)} more than once; set name"
        )


def _ratio(table: Mapping[str, Any], place: str) -> float:
    value = table.get("ratio")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_RATIO:
        raise ConfigError(
            f"{place}.ratio must be a finite number above 0 and at most 1e6; found {_shown(value)}; set for example ratio = 1.0"
        )
    return float(value)


def _whole(
    table: Mapping[str, Any],
    shared: Mapping[str, Any],
    names: Sequence[str],
    place: str,
    default: int,
    least: int = 1,
) -> int:
    """The first of ``names`` that ``table`` sets, else ``shared``, else ``default``."""
    for where, values in ((place, table), ("orchestrator.eval", shared)):
        for name in names:
            value = values.get(name)
            if value is None:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{where}.{name} must be a whole number of at least {least}; found {value!r}; set for example {name} = 1"
                )
            return value
    return default


def _sampling(value: Any, place: str, notes: list[tuple[str, str]]) -> dict[str, Any]:
    """What is sampled otherwise than in training, with the names of the token endpoint."""
    table = _mapping(value)
    body = _mapping(table.get("extra_body"))
    found: dict[str, Any] = {}
    for where, values in ((f"{place}.extra_body", body), (place, table)):
        for key, item in values.items():
            if item is None or key == "extra_body":
                continue
            if key in _SAMPLING:
                name = "max_tokens" if key == "max_completion_tokens" else key
                found[name] = _SAMPLING[key].read(f"{where}.{key}", item)
            else:
                notes.append((f"{where}.{key}", "the host samples with temperature, top_p, top_k and min_p"))
    return found


def _flag(table: Mapping[str, Any], name: str, default: bool) -> bool:
    value = table.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"orchestrator.eval.{name} must be true or false; found {value!r}; set one of them")
    return value


def _one_list(document: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """The one spelling that is there, and its tables. Raises ``ConfigError`` for two of them."""
    found = []
    for key in keys:
        above, _, last = key.rpartition(".")
        tables = _table(document, above).get(last)
        if not tables:
            continue
        if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
            raise ConfigError(f"{key} must be a list of tables; found {_shown(tables)}; write [[{key}]]")
        found.append((key, tables))
    if len(found) > 1:
        raise ConfigError(
            f"environments must stand in one spelling; found {found[0][0]} and {found[1][0]}; move them to [[{found[0][0]}]]"
        )
    return found[0] if found else (keys[0], [])


def _places(key: str, tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Each table with its dotted place, numbered from 0 where there are several."""
    if len(tables) == 1:
        return [(key, tables[0])]
    return [(f"{key}[{number}]", table) for number, table in enumerate(tables)]


def _shown(value: Any) -> str:
    """A value in a message. Of tables the keys alone: they may hold somebody's secrets."""
    if isinstance(value, Mapping):
        return f"a table with {', '.join(map(str, value)) or 'nothing in it'}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table at a dotted key; empty where there is none."""
    found: Any = document
    for part in key.split("."):
        found = _mapping(found).get(part)
    return _mapping(found)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
