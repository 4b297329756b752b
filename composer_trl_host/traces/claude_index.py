"""Where each session of a Claude Code file lies, found without parsing its lines.

Sessions may be interleaved and a record's place in the conversation depends on later ones, so nothing
can be given out before a session's last line. The index holds three whole numbers for each run of
lines of one session; the lines are read again one session at a time, and only one session's content
is ever held.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader

from composer_trl_host.traces.files import is_bad, parse

# Inside a JSON string the quotes would be escaped, so these match keys only (of nested objects too).
_SESSION = re.compile(rb'"session(?:Id|_id)"\s*:\s*"([^"\\]*)"')
_PARENT = re.compile(rb'"parentUuid"\s*:\s*"([^"\\]*)"')
_UUID = re.compile(rb'"uuid"\s*:\s*"([^"\\]*)"')


@dataclass
class Session:
    """The lines of one session: runs of (first byte, byte after the last, number of the first line)."""

    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, start: int, stop: int, number: int) -> None:
        """The next line, which often goes on where the last one ended."""
        if self.runs and self.runs[-1][1] == start:
            first, _, at = self.runs[-1]
            self.runs[-1] = (first, stop, at)
        else:
            self.runs.append((start, stop, number))

    def lines(self, handle: BufferedReader) -> Iterator[tuple[int, bytes]]:
        """Each line with its number (from 1)."""
        for start, stop, number in self.runs:
            handle.seek(start)
            while start < stop:
                line = handle.readline(stop - start)
                if not line:
                    return
                yield number, line
                start, number = start + len(line), number + 1


def index(handle: BufferedReader) -> tuple[list[Session], int]:
    """The sessions in order of their first lines, and the number of lines in the file.

    A line that names no session belongs to the one before it. A session that continues another one of
    the same file, by the ``parentUuid`` of its first record, is one session with it.
    """
    start = handle.tell()
    sessions: dict[bytes, Session] = {}
    wanted: dict[bytes, bytes] = {}
    current = early = Session()
    offset, number = start, 0
    for number, line in enumerate(handle, 1):
        name = _session(line)
        if name is not None:
            known = sessions.get(name)
            if known is None:
                known = sessions[name] = Session() if sessions else early
                parent = _PARENT.search(line)
                if parent is not None and len(sessions) > 1:
                    wanted[parent[1]] = name
            current = known
        current.add(offset, offset + len(line), number)
        offset += len(line)
    if wanted:
        handle.seek(start)
        sessions = _joined(handle, sessions, wanted)
    return list(sessions.values()) or [early], number


def _session(line: bytes) -> bytes | None:
    found = set(_SESSION.findall(line))
    if not found:
        return None
    if len(found) == 1:
        return found.pop()
    # Some nested object names another session: only parsing tells which key is the record's own.
    value = parse(line)
    if is_bad(value) or not isinstance(value, dict):
        return None
    own = value.get("sessionId", value.get("session_id"))
    return own.encode("utf-8", "replace") if isinstance(own, str) else None


def _joined(
    handle: BufferedReader, sessions: dict[bytes, Session], wanted: dict[bytes, bytes]
) -> dict[bytes, Session]:
    home = {name: name for name in sessions}

    def root(name: bytes) -> bytes:
        while home[name] != name:
            name = home[name]
        return name

    current: bytes | None = None
    for line in handle:
        current = _session(line) or current
        for uuid in _UUID.findall(line):
            name = wanted.get(uuid)
            if name is not None and current is not None and root(name) != root(current):
                home[root(name)] = root(current)
    merged: dict[bytes, list[tuple[int, int, int]]] = {}
    for name, session in sessions.items():
        merged.setdefault(root(name), []).extend(session.runs)
    runs = {name: sorted(found) for name, found in merged.items()}
    return {name: Session(found) for name, found in sorted(runs.items(), key=lambda item: item[1][0])}
