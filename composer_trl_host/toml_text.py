"""A document as the text of a TOML that ``load_run`` reads back as it was. Imports no torch."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from composer_prime_plugin.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(document: Mapping[str, Any]) -> str:
    """``document`` with a header per table. None is written as ``"None"``, as PRIME-RL has it.

    Raises ``ConfigError`` where a list holds a null, which no TOML can say.
    """
    return "\n".join(_table(document, ())).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (values or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value, '.'.join((*path, key)))}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON escapes all that a TOML must, but for this one control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, key: str) -> str:
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {_value(item, f'{key}.{name}')}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        if any(item is None for item in value):
            raise ConfigError(
                f"{key} must hold no null to be written as a TOML; found {list(value)!r}; remove it"
            )
        return f"[{', '.join(_value(item, key) for item in value)}]"
    return _string(str(value))
