"""Write the traces of this folder from ``scenarios/``: the same bytes each time.

    python examples/traces/write.py [--check] [claude_code] [openai] [verifiers]

``--check`` writes nothing and exits with 1 where a file differs. verifiers.jsonl holds token ids and
log-probs of the embedded model, which is loaded for that file alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats import claude_code, openai, verifiers

FOLDER = Path(__file__).resolve().parent

LOGPROB_TOLERANCE = 1e-3
"""Two machines add in different orders; the rounding to four decimals alone may move a number by 1e-4."""

RECORDS = {
    "claude_code": claude_code.records,
    "openai": openai.records,
    "verifiers": lambda: verifiers.records(*verifiers.embedded()),
}


def lines(name: str) -> list[str]:
    return [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in RECORDS[name]()]


def same(left: Any, right: Any) -> bool:
    """Whether two records are equal, log-probs within the tolerance."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            _close(value, right[key]) if key == "logprobs" else same(value, right[key])
            for key, value in left.items()
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def _close(left: list[float], right: list[float]) -> bool:
    return len(left) == len(right) and all(
        math.isclose(a, b, rel_tol=0.0, abs_tol=LOGPROB_TOLERANCE) for a, b in zip(left, right, strict=True)
    )


def differs(path: Path, expected: list[str]) -> str | None:
    """Where a file differs from what would be written, or None."""
    if not path.is_file():
        return "no such file"
    found = path.read_text(encoding="utf-8").splitlines()
    if len(found) != len(expected):
        return f"{len(found)} lines instead of {len(expected)}"
    for number, (line, wanted) in enumerate(zip(found, expected, strict=True), start=1):
        if line != wanted and not ('"logprobs"' in wanted and same(json.loads(line), json.loads(wanted))):
            return f"line {number}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the traces of this folder.")
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 where a file differs")
    parser.add_argument("names", nargs="*", metavar="FILE", help=f"of {', '.join(RECORDS)}; all without one")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(RECORDS):
        parser.error(f"FILE must be of {', '.join(RECORDS)}; found {', '.join(sorted(unknown))}")
    code = 0
    for name in chosen.names or RECORDS:
        path = FOLDER / f"{name}.jsonl"
        expected = lines(name)
        if not chosen.check:
            path.write_text("".join(f"{line}\n" for line in expected), encoding="utf-8")
        elif difference := differs(path, expected):
            print(
                f"{path.name} differs from its scenarios: {difference}; run {Path(__file__).name}",
                file=sys.stderr,
            )
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
