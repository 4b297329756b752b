"""Files of records: which ones a path names, their lines, and the JSON on them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from composer_prime_plugin.errors import TaskError
from composer_trl_host.traces.model import ReadReport

SUFFIXES = (".jsonl", ".json")
_HEAD = 65536
_LONGEST = 1 << 28
"""Characters after which an element of a document that has not ended is taken for a broken one."""
_BOM = b"\xef\xbb\xbf"
_BAD = object()


class FileProblem(TaskError):
    """One file cannot be read as traces. In a folder the others are read all the same."""


def list_files(path: Path) -> list[Path]:
    """The file, or the folder's files in sorted order."""
    try:
        if path.is_file():
            return [path]
        files = _in_folder(path) if path.is_dir() else None
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise TaskError(f"the traces at {path} must be readable; found: {_reason(error)}") from error
    if files:
        return files
    if files is not None:
        raise TaskError(
            f"a folder of traces must hold *.jsonl or *.json files; found none in {path}; name another folder"
        )
    if exists:
        raise TaskError(
            f"traces must be a file or a folder; found something else at {path}; save the stream to a file"
        )
    raise TaskError(f"traces must be a file or a folder that exists; found nothing at {path}; set its path")


def _in_folder(path: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    found = [
        Path(folder) / name
        for folder, _, names in os.walk(path, onerror=refuse)
        for name in names
        if name.endswith(SUFFIXES)
    ]
    return sorted(file for file in found if file.is_file())


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The file, past its byte-order mark, known to be neither empty nor binary."""
    try:
        with path.open("rb") as handle:
            head = handle.read(_HEAD)
            if not head.removeprefix(_BOM).strip():
                if not head or not handle.read(1):
                    raise FileProblem(f"{path} must hold traces; found an empty file; name another file")
            elif b"\0" in head:
                raise FileProblem(
                    f"{path} must be UTF-8 text, one JSON record per line; found binary data; name another file"
                )
            handle.seek(len(_BOM) if head.startswith(_BOM) else 0)
            yield handle
    except OSError as error:
        raise TaskError(f"{path} must be readable; found: {_reason(error)}") from error


def parse(line: bytes) -> Any:
    """The JSON value on a line, or ``_BAD``; ``is_bad`` tells."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return _BAD


def is_bad(value: object) -> bool:
    """Whether ``parse`` could not read the line."""
    return value is _BAD


def mark_bad(path: Path, number: int, report: ReadReport) -> None:
    """Note a line that could not be parsed."""
    report.bad_lines.setdefault(str(path), []).append(number)


def records(path: Path, handle: BufferedReader, report: ReadReport) -> Iterator[tuple[int, Any]]:
    """Each line's number (from 1) and value; blank lines are passed over, bad ones noted.

    A file that is one JSON document over several lines (a list of records, or one record) is read
    element by element instead, and the numbers are those of the elements.
    """
    start = handle.tell()
    document = _is_document(path, handle)
    handle.seek(start)
    if document:
        yield from _document(path, handle, report)
        return
    for number, line in enumerate(handle, 1):
        report.lines += 1
        if line.isspace():
            continue
        value = parse(line)
        if value is _BAD:
            mark_bad(path, number, report)
        else:
            yield number, value


def _is_document(path: Path, handle: BufferedReader) -> bool:
    first = next((text for line in handle if (text := line.strip())), b"")
    if first in (b"[", b"{"):
        return True
    # In a .jsonl file an object that does not parse is a bad line, not the start of a long one.
    opening = (b"[", b"{") if path.suffix == ".json" else (b"[",)
    return first[:1] in opening and parse(first) is _BAD


def _document(path: Path, handle: BufferedReader, report: ReadReport) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    number, text, inside, ended = 1, "", False, False
    rest = b""  # The bytes of a character that the end of a chunk cuts.
    while True:
        text = text.lstrip()
        if text and not inside and number == 1 and text[0] == "[":
            inside, text = True, text[1:]
            continue
        if inside and text[:1] == ",":
            text = text[1:]
            continue
        if inside and text[:1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            if ended or len(text) > _LONGEST:
                if text or inside:
                    mark_bad(path, number, report)
                return
        else:
            report.lines += 1
            yield number, value
            number, text = number + 1, text[end:]
            continue
        more = handle.read(max(_HEAD, len(text)))
        ended = not more
        piece, rest = _decode(rest + more, ended)
        text += piece


def _decode(data: bytes, final: bool) -> tuple[str, bytes]:
    for cut in range(0 if final else 4):
        try:
            return data[: len(data) - cut].decode(), data[len(data) - cut :]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
