"""Writes docs/configuration.md from the tables and the schema that the program reads.

python docs/make_configuration.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.runfile import KWARGS_TABLE
from composer_trl_host.prime_keys import HONOURED, HONOURED_TABLES, NOT_HONOURED, Honoured, NotHonoured

PAGE = Path(__file__).with_name("configuration.md")

HEAD = f"""\
# Every key

Written by `docs/make_configuration.py` from the tables that the program reads; a test holds both together.

A run is one PRIME-RL TOML. What stands under `[{KWARGS_TABLE}]` is ours and the same on both backends (last section);
everything else is PRIME-RL's, in the spelling of any release from v0.5.0 to main of 2026-08-21. Two spellings of one
setting in one TOML must agree.

| written | means |
|---|---|
| `@ base.toml @ overlay.toml` | a later file is laid over an earlier one, table by table |
| `--trainer @ trainer.toml` | a file that fills one section, over every root file |
| `--trainer.optim.lr 1e-5`, `--trainer.optim.lr=1e-5` | one key, over every file |
| `--wandb`, `--no-wandb` | an optional table, on or off; for another key true or false |
| `"None"` | null, in a TOML and on the command line |
| `--dry-run`, or `dry_run = true` | the resolved configurations are written and nothing is started |

`composer-rl run @ rl.toml --dry-run` writes into `configs/` of the run folder: `prime-rl.toml`, the layers and overrides
merged; `trl-host.toml`, what the host takes of them with every default spelt out, in the newest spelling;
`trl-host.json`, the same as a run writes it into `config.json`; and where PRIME-RL is importable `prime-rl.json`, its
own resolved configuration. Either TOML can be run in place of what it was made of: it reads back as the same settings
(tested with random settings), with the paths of `trl_host` made absolute.

Where PRIME-RL is importable, its own `RLConfig` validates the TOML before the host does, and what it refuses ends the
command with its message and exit code 2. An environment's package that is not installed only gives a note: the host
needs none.
"""

HONOURED_HEAD = """
## What the host takes of PRIME-RL's keys

One row per setting. The first spelling is the newest. "takes" is checked; anything else is an error that names the key.
"""

NOT_HEAD = """
## What the host knows and does not do

By reason; a key stands for everything under it. Each one that a TOML sets is listed by its dotted name before the run
starts, and is an error with `trl_host.strict = true`. A value in brackets asks for nothing that the host does not do anyway
and is not listed; null is one of them unless the row says otherwise. A key in neither table is listed as unknown to
PRIME-RL, with the nearest known one.
"""

OWN_HEAD = f"""
## Our keys: `[{KWARGS_TABLE}]`

Unknown keys are refused. PRIME-RL passes the table through untouched.
"""


def page() -> str:
    """The text of the page."""
    return "".join((HEAD, HONOURED_HEAD, _honoured(), NOT_HEAD, _not_honoured(), OWN_HEAD, _own()))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(list(head)), *cells]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _honoured() -> str:
    rows = [_setting(row) for row in HONOURED]
    rows += [
        (_codes(keys), "a table, also an empty one", "absent", meaning)
        for keys, meaning in HONOURED_TABLES.items()
    ]
    return table(("PRIME-RL's key", "takes", "default", "on the host"), rows)


def _setting(row: Honoured) -> tuple[str, ...]:
    default = "absent" if row.default is None else f"`{_toml(row.default)}`"
    return _codes(row.keys), row.kind.wants, default, row.becomes


def _not_honoured() -> str:
    reasons: dict[str, list[NotHonoured]] = {}
    for row in NOT_HONOURED:
        # A key of our own is named in the reason of each knob of PRIME-RL's losses.
        reasons.setdefault(row.reason, []).append(row)
    return table(
        ("keys", "reason"), ((", ".join(map(_known, rows)), reason) for reason, rows in reasons.items())
    )


def _known(row: NotHonoured) -> str:
    text = f"`{row.key}`"
    if row.neutral:
        text += f" ({', '.join(f'`{_toml(value)}`' for value in row.neutral)})"
    return text + (" (null is listed too)" if row.null_counts else "")


def _own() -> str:
    parts = []
    for name, model in _models(ComposerConfig, ""):
        rows = [
            (f"`{key}`", _type(field), _default(field), field.description or "")
            for key, field in model.model_fields.items()
            if _model_of(field) is None
        ]
        parts.append(f"\n### `{name}`\n")
        if model.__doc__:
            parts.append("\n" + " ".join(model.__doc__.split()).replace("``", "`") + "\n")
        parts.append(
            table(
                ("key", "takes", "default", "meaning"),
                ((*row[:3], row[3].replace("``", "`")) for row in rows),
            )
        )
    return "".join(parts)


def _models(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in model.model_fields.items():
        below = _model_of(field)
        if below is not None:
            yield f"{prefix}{key}", below
            yield from _models(below, f"{prefix}{key}.")


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _type(field: FieldInfo) -> str:
    bounds = {
        annotated_types.Ge: "at least {ge}",
        annotated_types.Gt: "above {gt}",
        annotated_types.Le: "at most {le}",
        annotated_types.Lt: "below {lt}",
        annotated_types.MinLen: "not empty",
    }
    limits = [bounds[type(item)].format(**vars_of(item)) for item in field.metadata if type(item) in bounds]
    return ", ".join([_annotation(field.annotation), *limits])


def vars_of(item: Any) -> dict[str, Any]:
    """The fields of one bound, which has slots."""
    return {name: getattr(item, name) for name in type(item).__slots__}


def _annotation(kind: Any) -> str:
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): '`"None"`'}
    if kind in names:
        return names[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in inside)
    if origin in (Union, types.UnionType):
        return ", ".join(map(_annotation, inside))
    if origin in (tuple, list):
        return f"list of {_annotation(inside[0])}"
    if origin is dict:
        return "table"
    raise TypeError(f"no word for {kind!r}")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{_toml('None' if value is None else value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return f"{value:.1f}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _codes(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where the page is old"
    )
    if parser.parse_args().check:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
