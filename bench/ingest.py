"""Recorded traces, read: megabytes per second of one core, and peak memory, at two file sizes.

    python bench/ingest.py [--megabytes 20 200] [--only PART ...]

The files are made here from a seed: Claude Code sessions of about 1 MB each, with split messages,
parallel calls, failures, side chains, abandoned branches, progress records and a cut-off last line. Each
figure is taken in a fresh process; speed is by processor time, so that a busy machine does not count.
Memory is how far the peak rose above the process after its imports. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEED = 20.0
"""Megabytes per second of one core that reading must reach."""
GROWTH = 5.0
"""Megabytes of memory that the largest file may take over the smallest."""
WORDS = [
    "the",
    "file",
    "def",
    "return",
    "test",
    "path",
    "error",
    "import",
    "value",
    "line",
    "of",
    "self",
    "when",
    "config",
    "loss",
    "model",
    "run",
    "step",
    "and",
    "x",
    "=",
    "0",
]
SYSTEM = ("progress", "file-history-snapshot", "system", "queue-operation")


@dataclass(frozen=True)
class Result:
    """One part on one file."""

    seconds: float
    items: dict[str, int]
    memory: float


def reading(path: Path) -> dict[str, int]:
    """Reads every trace and keeps none."""
    from composer_trl_host.traces import ReadReport, read_traces

    report = ReadReport()
    sites = sum(len(trace.sites()) for trace in read_traces(path, report=report))
    return {"traces": report.traces, "sites": sites, "lines": report.lines}


PARTS: dict[str, Callable[[Path], dict[str, int]]] = {"reading": reading}


class Sessions:
    """Endless sessions, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._texts = [self._text(size) for size in (60, 200, 800, 2500, 6000) for _ in range(40)]
        self._number = 0

    def _text(self, size: int) -> str:
        words = self._random.choices(WORDS, k=size // 5)
        return "".join(word + ("\n    " if self._random.random() < 0.1 else " ") for word in words)

    def _id(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def session(self, size: int) -> Iterator[str]:
        """Lines of one session of about ``size`` characters."""
        self._number += 1
        base = {
            "sessionId": self._id(),
            "cwd": "/repo",
            "version": "2.1.0",
            "gitBranch": "main",
            "userType": "external",
        }
        pick, written, parent, turn = self._random, 0, None, 0
        lines: list[str] = []

        def record(kind: str, parent: str | None, **fields: Any) -> str:
            uuid = self._id()
            lines.append(
                json.dumps(
                    {"parentUuid": parent, "isSidechain": False, **base, "type": kind, "uuid": uuid, **fields}
                )
            )
            return uuid

        while written < size:
            turn += 1
            if turn % 20 == 1:
                parent = record("user", parent, message={"role": "user", "content": pick.choice(self._texts)})
            if turn % 25 == 0:
                record("assistant", parent, message=self._message([{"type": "text", "text": "left"}]))
            if turn % 15 == 10:
                side = {"isSidechain": True, "agentId": self._id()[:8]}
                task = record(
                    "user", None, message={"role": "user", "content": pick.choice(self._texts)}, **side
                )
                answer = [{"type": "text", "text": pick.choice(self._texts)}]
                record("assistant", task, message=self._message(answer), **side)
            message = self._id()
            blocks: list[dict[str, Any]] = [
                {"type": "thinking", "thinking": pick.choice(self._texts[:120]), "signature": self._id() * 8},
                {"type": "text", "text": pick.choice(self._texts[:80])},
            ]
            calls = [f"toolu_{self._id()}" for _ in range(1 + (turn % 5 == 0))]
            blocks += [
                {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": "pytest -q"}}
                for call in calls
            ]
            sources = []
            for block in blocks:
                parent = record("assistant", parent, message=self._message([block], message))
                sources.append(parent)
            for call, source in zip(calls, sources[2:], strict=True):
                text, failed = pick.choice(self._texts), pick.random() < 0.15
                result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call, "content": text}
                if failed or turn % 2:
                    # Later versions write the flag on errors alone: then the text is asked.
                    result["is_error"] = failed
                extra = {"stdout": text, "stderr": "", "interrupted": False}
                parent = record(
                    "user", source, message={"role": "user", "content": [result]}, toolUseResult=extra
                )
            record(
                SYSTEM[turn % 4],
                parent,
                data={"type": "hook_progress", "output": pick.choice(self._texts[:80])},
            )
            written += sum(map(len, lines))
            yield from lines
            lines.clear()

    def _message(self, content: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
        usage = {"input_tokens": 3, "cache_read_input_tokens": 20417, "output_tokens": 211}
        return {
            "id": name or self._id(),
            "type": "message",
            "role": "assistant",
            "content": content,
            "usage": usage,
        }


def generate(path: Path, megabytes: float, seed: int = 0, session: int = 1_000_000) -> None:
    """A file of sessions of ``session`` characters each, its last line cut off."""
    sessions, written = Sessions(seed), 0
    with path.open("w", encoding="utf-8", newline="\n") as handle:
        while written < megabytes * 1e6:
            for line in sessions.session(session):
                handle.write(line + "\n")
                written += len(line) + 1
        handle.write(line[: len(line) // 2])


def peak() -> float:
    """Peak memory of this process in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: what it gives after an exec may be the parent's peak.
        return next(
            int(line.split()[1]) / 1000
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def child(part: str, path: Path) -> None:
    """One measurement, printed as JSON."""
    # One small pass first: imports and lazy set-up belong to neither figure.
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small.jsonl")
        generate(small, 0.05, session=20_000)
        PARTS[part](small)
    before, start = peak(), time.process_time()
    items = PARTS[part](path)
    print(json.dumps({"seconds": time.process_time() - start, "items": items, "memory": peak() - before}))


def measure(part: str, path: Path) -> Result:
    """``part`` on ``path`` in a fresh process."""
    command = [sys.executable, __file__, "--child", part, str(path)]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Result(**json.loads(done.stdout))


def main() -> int:
    """Print one line per part and size; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=[20, 200])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--child", nargs=2, metavar=("PART", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]))
        return 0
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        files = {size: Path(folder, f"{size:g}.jsonl") for size in sorted(arguments.megabytes)}
        for size, path in files.items():
            generate(path, size)
        print(f"{'part':10} {'MB':>6} {'s':>7} {'MB/s':>7} {'target':>7} {'peak MB':>8}  found")
        for part in arguments.only:
            results = {size: measure(part, path) for size, path in files.items()}
            for size, result in results.items():
                speed = files[size].stat().st_size / 1e6 / result.seconds
                found = ", ".join(f"{count} {name}" for name, count in result.items.items())
                print(
                    f"{part:10} {size:6g} {result.seconds:7.2f} {speed:7.1f} {SPEED:7g} {result.memory:8.1f}  {found}"
                )
                missed |= speed < SPEED
            memory = [result.memory for result in results.values()]
            growth = memory[-1] - memory[0]
            print(
                f"{part:10} memory of the largest file over the smallest: {growth:+.1f} MB (target {GROWTH:g})"
            )
            missed |= growth > GROWTH
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
