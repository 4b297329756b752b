"""The judge's answers on disk, one file per key. Any number of processes may share a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from composer_prime_plugin.errors import ConfigError


def cache_key(request: Any) -> str:
    """SHA-256 of the canonical JSON of all that an answer depends on."""
    canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class AnswerCache:
    """A folder of answers. What goes wrong with a file is counted in ``events`` and never raised."""

    def __init__(self, folder: Path, events: Counter[str]) -> None:
        self.folder = folder
        self.events = events
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"judge.cache_dir must be a folder that can be made; {folder} failed with {error!r}; set another"
            ) from error

    def get(self, key: str) -> str | None:
        """The stored answer; None where there is none or its file cannot be read."""
        try:
            stored = json.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            self.events["cache file unreadable"] += 1
            return None
        if (
            not isinstance(stored, dict)
            or stored.get("key") != key
            or not isinstance(stored.get("answer"), str)
        ):
            self.events["cache file unreadable"] += 1
            return None
        return str(stored["answer"])

    def put(self, key: str, answer: str, model: str) -> None:
        """Store an answer. A reader sees the old file or the whole new one."""
        content = json.dumps({"key": key, "model": model, "answer": answer})
        name = ""
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=self.folder, prefix=f".{key}.", delete=False, encoding="utf-8"
            ) as file:
                name = file.name
                file.write(content)
            os.replace(name, self._path(key))
        except OSError:
            self.events["cache file not written"] += 1
            if name:
                with contextlib.suppress(OSError):
                    os.unlink(name)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
