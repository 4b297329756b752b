"""What a user typed after ``composer-rl run``: PRIME-RL TOMLs and overrides, read as PRIME-RL reads them.

``@ a.toml @ b.toml`` are layered in order, ``--trainer @ trainer.toml`` fills one section, and
``--max-steps 50 --trainer.optim.lr=1e-5 --no-wandb`` win over every file. PRIME-RL's own
command-line library needs one release's schema to read an override, and the releases differ; so its rules
are followed here, and the tests hold both against each other. Imports no torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError

IMPORT_PATHS = ("composer_prime_plugin.loss_fn", "composer_prime_plugin.plugin.loss_fn")
KWARGS_TABLE = "trainer.loss.kwargs"
EXAMPLE = "@ rl.toml"

# Without the release's schema a bare flag is told apart by the last part of its key.
_TABLE_NAMES = """
ckpt resume wandb monitors file prime prime_monitor file_monitor inference teacher_inference model tokenizer
slurm weight_broadcast ac ac_offloading compile lora vlm index_cache quantization full_offload fake gc
heartbeat metrics_server weights eval val advantage
"""
_TEXT_NAMES = """
name dir output_dir project entity group path type import_path chat_template environment hints adapter
"""
_NUMBER_NAMES = """
max_steps seq_len batch_size token_batch_size group_size rollouts_per_example max_off_policy_steps
max_async_level temperature max_tokens max_completion_tokens top_p top_k min_p seed lr weight_decay max_norm
betas1 betas2 momentum warmup_steps decay_steps min_lr rank alpha dropout interval keep_last keep_interval
resume_step step weight weight_start jsd_beta token_clip kl_tau adv_tau
"""
OPTIONAL_TABLES = frozenset(_TABLE_NAMES.split())
"""Tables that a run may have or not: ``--wandb`` switches one on, ``--no-wandb`` sets it to null."""
TEXT_KEYS = frozenset(_TEXT_NAMES.split())
"""Keys whose value stays text: ``--run.name 1e3`` is a name."""
NUMBER_KEYS = frozenset(_NUMBER_NAMES.split())
"""Keys that take a number: without a value they are a mistake, never a switch."""

DISPLAY_FLAGS = ("--plain", "--no-wide")
"""Flags of PRIME-RL's command line about its own output; they set no key."""


@dataclass(frozen=True)
class RunFile:
    """One run as the user asked for it.

    ``document`` is the merged TOML with the overrides in it and ``"None"`` read as None;
    ``config`` what stands under ``[trainer.loss.kwargs]``; ``arguments`` the user's own, unchanged;
    ``base_dir`` the folder of the last TOML given, from which ``trl_host`` paths are read.
    """

    document: dict[str, Any]
    config: ComposerConfig
    arguments: tuple[str, ...]
    base_dir: Path
    toml_paths: tuple[Path, ...]


@dataclass(frozen=True)
class _File:
    """One ``@ path``; ``section`` is the dotted table it fills, empty for the root."""

    section: str
    path: Path


def load_run(arguments: Sequence[str]) -> RunFile:
    """Read ``arguments`` (what follows ``composer-rl run``). Raises ``ConfigError`` with one sentence."""
    files, rest = _files(list(arguments))
    if not files:
        found = f"found {' '.join(arguments)!r}" if arguments else "found no arguments"
        raise ConfigError(f"a run needs a TOML, given as `@ file`; {found}; write for example {EXAMPLE}")
    document = _none_strings(_layered(files))
    if "trainer" not in document and all(file.section for file in files):
        section = files[0].section
        raise ConfigError(
            f"a run needs a TOML for the root; found one for the section {section} alone, since "
            f"`--flag @ file` fills a section; write `@ {files[0].path}` before the flags"
        )
    for override in _overrides(rest):
        _assign(document, override)
    return RunFile(
        document=document,
        config=_composer_config(document),
        arguments=tuple(arguments),
        base_dir=files[-1].path.resolve().parent,
        toml_paths=tuple(file.path for file in files),
    )


def snake(flag: str) -> str:
    """``trainer.max-steps`` as PRIME-RL spells the key: ``trainer.max_steps``."""
    return flag.replace("-", "_")


def _files(arguments: list[str]) -> tuple[list[_File], list[str]]:
    """The ``@`` references, and everything else in its order."""
    files: list[_File] = []
    rest: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        following = arguments[position + 1 : position + 3]
        if word == "@":
            if not following:
                raise ConfigError(f"`@` must be followed by the path of a TOML; write for example {EXAMPLE}")
            files.append(_File("", Path(following[0])))
            position += 2
        elif word.startswith("@"):
            # PRIME-RL knows `--section @file`, but a root file needs the space.
            raise ConfigError(
                f"`@` and the path of a TOML are two words, found {word!r}; write `@ {word[1:]}`"
            )
        elif not word.startswith("--") or word.startswith("--no-") or "=" in word:
            # Complete by itself, so a file behind it is not its section.
            rest.append(word)
            position += 1
        elif following[:1] == ["@"]:
            if len(following) < 2:
                raise ConfigError(
                    f"`{word} @` must be followed by the path of a TOML; write for example {word} @ part.toml"
                )
            files.append(_File(snake(word[2:]), Path(following[1])))
            position += 3
        elif following and following[0].startswith("@"):
            files.append(_File(snake(word[2:]), Path(following[0][1:])))
            position += 2
        else:
            rest.append(word)
            position += 1
    return files, rest


def _read_toml(path: Path) -> dict[str, Any]:
    """The tables of ``path``; what cannot be read as a TOML is refused in one sentence."""
    if path.suffix != ".toml":
        raise ConfigError(
            f"`@` takes a file that ends in .toml; found {str(path)!r}; give the path of a TOML"
        )
    if path.is_dir():
        raise ConfigError(f"`@` takes a file; {str(path)!r} is a folder; give the path of the TOML inside it")
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"`@` takes an existing file; there is no {str(path)!r} in {str(Path.cwd())!r}; correct the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"a TOML is UTF-8 text; {str(path)!r} has another byte at offset {error.start}; save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read ({error.strerror}); give the path of a readable TOML"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{str(path)!r} must be a TOML, and is not: {error}; correct that place") from None


def _layered(files: list[_File]) -> dict[str, Any]:
    """The files in PRIME-RL's order of precedence: later over earlier, sections over the root."""
    merged: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for file in files:
        tables = _read_toml(file.path)
        if file.section:
            sections[file.section] = tables
        else:
            merged = _merged(merged, tables)
    for section, tables in sections.items():
        for part in reversed(section.split(".")):
            tables = {part: tables}
        merged = _merged(merged, tables)
    return merged


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, table by table; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _none_strings(value: Any) -> Any:
    """``"None"`` as None in every table: a TOML has no null."""
    if isinstance(value, dict):
        return {key: _none_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_none_strings(item) if isinstance(item, dict) else item for item in value]
    return None if value == "None" else value


@dataclass(frozen=True)
class _Override:
    """``flag`` as typed; ``key`` the dotted key it sets to ``value``."""

    flag: str
    key: str
    value: Any


def _overrides(words: list[str]) -> Iterator[_Override]:
    """The flags, in order."""
    words = [word for word in words if word not in DISPLAY_FLAGS]
    position = 0
    while position < len(words):
        flag, equals, text = words[position].partition("=")
        key = snake(flag[2:])
        if not flag.startswith("--"):
            raise ConfigError(
                f"an override starts with `--`; found {words[position]!r}; write for example --max-steps 50, "
                "or `@` before the path of a TOML"
            )
        if not all(key.split(".")):
            raise ConfigError(
                f"an override names a dotted key; found {words[position]!r}; write for example "
                "--trainer.optim.lr 1e-5"
            )
        position += 1
        values: list[str] = [text] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        last = key.rpartition(".")[2]
        if values == [""] or (
            not values and last in TEXT_KEYS | NUMBER_KEYS and not flag.startswith("--no-")
        ):
            raise ConfigError(f"{flag} takes a value, and none was given; write {flag} VALUE")
        if values:
            yield _Override(flag, key, _value(flag, last, values))
        elif flag.startswith("--no-"):
            yield _Override(
                flag, key.removeprefix("no_"), None if last.removeprefix("no_") in OPTIONAL_TABLES else False
            )
        else:
            yield _Override(flag, key, {} if last in OPTIONAL_TABLES else True)


def _value(flag: str, last: str, values: list[str]) -> Any:
    """What the words after ``flag`` mean: several are a list, JSON is JSON, the rest is a scalar."""
    if len(values) > 1:
        return [word if last in TEXT_KEYS else scalar(word) for word in values]
    (text,) = values
    if text[:1] in ("{", "["):
        try:
            return _none_strings(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{flag} takes a value that starts with {text[0]!r} as JSON; found {text!r} ({error}); "
                "quote it for the shell and correct it"
            ) from None
    return None if text == "None" else text if last in TEXT_KEYS else scalar(text)


def scalar(text: str) -> bool | int | float | str | None:
    """``text`` as a bool, int or float where it is written as one, by pydantic_config's rules."""
    if text == "None":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if str(int(text)) == text:
            return int(text)
        number = float(text)
    except ValueError:
        pass
    else:
        return number if text[:1] not in "0123456789" or any(mark in text for mark in "eE.") else text
    try:
        number = float(text)
    except ValueError:
        return text
    return text if number != number or text.lstrip("+-") == "inf" else number


def _assign(document: dict[str, Any], override: _Override) -> None:
    """Put one override into ``document``; a table is merged into the one that is there."""
    table = document
    parts = override.key.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        inner = table.get(part)
        if inner is None:
            inner = table[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{override.flag} sets a key of the table {'.'.join(parts[:depth])}; the TOML has {inner!r} "
                "there; make it a table or drop the override"
            )
        table = inner
    existing = table.get(parts[-1])
    if isinstance(existing, dict):
        if isinstance(override.value, dict):
            table[parts[-1]] = _merged(existing, override.value)
        elif override.value is None or override.value is False:
            table[parts[-1]] = None
        elif override.value is not True:
            raise ConfigError(
                f"{override.flag} names a table, and its keys are set one by one; found {override.value!r}; "
                f"write for example {override.flag}.{next(iter(existing), 'key')} VALUE"
            )
    else:
        table[parts[-1]] = override.value


def _composer_config(document: dict[str, Any]) -> ComposerConfig:
    """``[trainer.loss]``, which must be ours, as ``ComposerConfig``."""
    use = f'set type = "custom" and import_path = "{IMPORT_PATHS[0]}" under [trainer.loss]'
    trainer = document.get("trainer")
    loss = trainer.get("loss") if isinstance(trainer, dict) else None
    if not isinstance(loss, dict):
        found = "none" if loss is None else repr(loss)
        raise ConfigError(f"a run needs a table [trainer.loss] that names composer-rl; found {found}; {use}")
    if loss.get("type") != "custom":
        found = repr(loss["type"]) if "type" in loss else "none"
        raise ConfigError(f'trainer.loss.type must be "custom"; found {found}; {use}')
    if loss.get("import_path") not in IMPORT_PATHS:
        found = repr(loss["import_path"]) if "import_path" in loss else "none"
        raise ConfigError(f'trainer.loss.import_path must be "{IMPORT_PATHS[0]}"; found {found}; {use}')
    kwargs = loss.get("kwargs")
    if kwargs is None:
        return ComposerConfig()
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f"{KWARGS_TABLE} must be a table; found {kwargs!r}; write [{KWARGS_TABLE}.sdpo] and its keys"
        )
    try:
        return ComposerConfig(**kwargs)
    except ValidationError as error:
        raise ConfigError(validation_sentence(error, KWARGS_TABLE)) from None


def validation_sentence(error: ValidationError, prefix: str) -> str:
    """Pydantic's findings as one sentence, each with its dotted name below ``prefix``."""
    findings: list[str] = []
    for item in error.errors(include_url=False):
        name = ".".join([prefix, *map(str, item["loc"])])
        if item["type"] == "value_error":
            findings.append(f"{name}: {item['msg'].removeprefix('Value error, ')}")
        else:
            message = item["msg"].replace("Input should be", "must be", 1)
            findings.append(f"{name} {message}; found {item['input']!r}")
    return " ".join("; and ".join(findings).split())
