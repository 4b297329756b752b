"""The words after ``composer-rl inspect``, checked. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from composer_prime_plugin.config import HintRole
from composer_prime_plugin.errors import ConfigError
from composer_trl_host.traces import FORMATS

EXAMPLE = "composer-rl inspect examples/traces --html sites.html"


@dataclass(frozen=True)
class Options:
    """What to inspect and how. ``model`` None: nothing is measured."""

    path: str
    html: Path | None = None
    model: str | None = None
    format: str = "auto"
    hint_role: HintRole = "user"
    seq_len: int | None = None
    include_rejected: bool = False
    limit: int | None = None
    device: str = "cpu"


def parse(arguments: Sequence[str]) -> Options:
    """The options. Raises ``ConfigError`` for words that cannot be meant."""
    path: str | None = None
    options = Options(path="")
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            word = words.pop(0) if word == "--" and words else word
            if path is not None or not word:
                raise ConfigError(
                    f"inspect takes one path; found {path!r} and {word!r}; write for example {EXAMPLE}"
                )
            path = word
            continue
        flag, equals, value = word.partition("=")
        if flag == "--include-rejected":
            if equals:
                raise ConfigError(f"--include-rejected takes no value; found {word!r}; write it alone")
            options = replace(options, include_rejected=True)
            continue
        if flag not in _VALUED:
            raise ConfigError(
                f"{flag} is no option of inspect; the options are {', '.join([*_VALUED, '--include-rejected'])}"
            )
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{flag} takes a value, and none was given; write {flag} VALUE")
            value = words.pop(0)
        if not value:
            raise ConfigError(f"{flag} takes a value, and an empty one was given; write {flag} VALUE")
        options = _VALUED[flag](options, value)
    if path is None:
        raise ConfigError(
            f"inspect needs the path of a trace file or a folder of them; found none; write for example {EXAMPLE}"
        )
    return replace(options, path=path)


def _choice(flag: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}; found {value!r}")
    return value


def _positive(flag: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{flag} must be a whole number of at least 1; found {value!r}")
    return int(value)


def _html(options: Options, value: str) -> Options:
    return replace(options, html=Path(value))


def _model(options: Options, value: str) -> Options:
    return replace(options, model=value)


def _format(options: Options, value: str) -> Options:
    return replace(options, format=_choice("--format", value, ("auto", *FORMATS)))


def _hint_role(options: Options, value: str) -> Options:
    return replace(options, hint_role=_choice("--hint-role", value, get_args(HintRole)))  # type: ignore[arg-type]


def _seq_len(options: Options, value: str) -> Options:
    return replace(options, seq_len=_positive("--seq-len", value))


def _limit(options: Options, value: str) -> Options:
    return replace(options, limit=_positive("--limit", value))


def _device(options: Options, value: str) -> Options:
    return replace(options, device=value)


_VALUED = {
    "--html": _html,
    "--model": _model,
    "--format": _format,
    "--hint-role": _hint_role,
    "--seq-len": _seq_len,
    "--limit": _limit,
    "--device": _device,
}
