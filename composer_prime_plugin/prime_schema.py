"""What the installed PRIME-RL's own ``RLConfig`` says about a TOML.

It is asked in a process of its own: importing it loads ``verifiers`` and whatever that loads. Imports no
torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from composer_prime_plugin.errors import ConfigError

SCHEMA_MODULE = "prime_rl.configs.rl"
PATIENCE_SECONDS = 180
"""For the import and the check together."""

_SHOWN_FINDINGS = 3
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class SchemaVerdict:
    """``resolved``: the TOML with all of PRIME-RL's defaults, None where it could not be checked.
    ``unable``: why it could not."""

    resolved: dict[str, Any] | None = None
    unable: str | None = None


def prime_is_importable() -> bool:
    """Whether there is a ``prime_rl``; nothing is imported."""
    try:
        return importlib.util.find_spec("prime_rl") is not None
    except (ImportError, ValueError):
        return True


def check_with_prime(document: Mapping[str, Any]) -> SchemaVerdict:
    """Have ``RLConfig`` validate ``document``. Raises ``ConfigError`` with its findings where it refuses."""
    command = [sys.executable, "-m", __name__]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(document, default=str),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return SchemaVerdict(unable=f"it gave no answer in {PATIENCE_SECONDS} seconds")
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        last = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        return SchemaVerdict(unable=_bounded(last[0]))
    if "refused" in answer:
        raise ConfigError(
            f"PRIME-RL's own RLConfig must accept the TOML; it says: {answer['refused']}; correct it in the spelling "
            "of the installed release"
        )
    return SchemaVerdict(answer.get("resolved"), answer.get("unable"))


def findings_of(error: ValidationError) -> str:
    """The first findings in one line, each with its dotted key."""
    findings = error.errors(include_url=False)
    lines = []
    for item in findings[:_SHOWN_FINDINGS]:
        key = ".".join(map(str, item["loc"]))
        message = _bounded(item["msg"].removeprefix("Value error, "))
        found = f", found {_bounded(repr(item['input']))}" if item["type"] != "value_error" else ""
        lines.append(f"{key + ': ' if key else ''}{message}{found}")
    more = len(findings) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def _bounded(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 3] + "..."


def _answer(document: dict[str, Any]) -> dict[str, Any]:
    try:
        from prime_rl.configs.rl import RLConfig
    except Exception as error:
        return {"unable": _bounded(f"importing {SCHEMA_MODULE} failed with {error!r}")}
    try:
        config = RLConfig.model_validate(document)
    except ValidationError as error:
        return {"refused": findings_of(error)}
    except Exception as error:
        # An environment's package that is not installed, for one: nothing that the host would need.
        return {"unable": _bounded(f"{type(error).__name__}: {error}")}
    return {"resolved": config.model_dump(mode="json")}


def _main() -> None:
    # Libraries that print while they are imported must not get between the lines of the answer.
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    document = json.load(sys.stdin)
    with answer_to:
        json.dump(_answer(document), answer_to)


if __name__ == "__main__":
    _main()
