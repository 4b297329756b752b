"""The results file of the learning bench: one line a run, and who is at work on which."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "experiments" / "results.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of the results file, none where there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def finished(path: Path, name: str, seed: int, steps: int) -> bool:
    """Whether the results file holds such a run, or a longer one: its first steps are the same."""
    return any(
        (line["condition"], line["seed"]) == (name, seed) and line["steps"] >= steps for line in read(path)
    )


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line, whole, also where two processes write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        out.write(json.dumps(line) + "\n")


@contextmanager
def claim(path: Path, key: tuple[str, int, int]) -> Iterator[bool]:
    """Whether this process may do ``key``. The claim falls with the process, however it ends."""
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"composer-rl-learning-{os.getuid()}-{mark}"
    folder.mkdir(exist_ok=True)
    with (folder / "-".join(map(str, key))).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
