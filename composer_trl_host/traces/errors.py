"""Which tool results failed, and how: flags of the file first, the text as the fallback.

A flag decides alone, either way: a result marked as no error is none whatever it quotes, and so is one
with exit status 0. Only where the file says nothing is the text asked, and then it must be the
result's own verdict: a tag at its start, a status the harness wrote, the end of a run. A reading tool
returns what others wrote, so there only a tag at the very start counts.
"""

from __future__ import annotations

import json
import re
from typing import Any

from composer_trl_host.traces import error_kinds as kinds
from composer_trl_host.traces import error_tags as tags
from composer_trl_host.traces.model import REJECTED

WINDOW = 4096
"""Characters looked at from each end of a result. Verdicts stand there, and a result may be megabytes."""

ERROR_KINDS: tuple[str, ...] = (*(kind for kind, _, _ in kinds.KINDS), "nonzero_exit", "unknown")
"""Every kind that ``classify`` gives, in the order in which they are asked."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WRAPPING = re.compile(r"\A(?:<[\w-]*error>|\W{0,3}Error\s*:|\s)+", re.IGNORECASE)
_STATUS_WORDS = re.compile(r"\bexit(?:ed)?(?: with)?(?:[ _-](?:code|status))\W{1,4}(-?\d+)", re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w+)(?::|$)")
_PASSED = re.compile(r"\b\d+ passed\b|^OK\b|\bBUILD SUCCESS|\bsucceeded\b|\b0 failed\b", re.IGNORECASE)
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_FLAG_KEYS = ("isError", "is_error")
_STATUS_KEYS = ("exit_code", "exitCode", "returncode", "return_code", "exit_status")
_ENVELOPE = frozenset(
    {*_FLAG_KEYS, *_STATUS_KEYS}
    | {
        "error",
        "message",
        "code",
        "status",
        "statusCode",
        "success",
        "ok",
        "detail",
        "details",
        "type",
        "content",
    }
)
_NO_ERROR = frozenset({"", "none", "null", "no", "false", "0", "ok", "no error"})


def classify(
    result_text: str,
    *,
    is_error: bool | None,
    exit_code: int | None,
    tool_name: str | None,
    arguments: str = "",
) -> tuple[str, str] | None:
    """The kind of a failed result and the rule that decided it, or None for a result that did not fail.

    ``is_error`` and ``exit_code`` are what the file records apart from the text, ``arguments`` the
    call's JSON text (``cat`` in a shell reads as a reading tool does). Rules: ``"is_error"``,
    ``"exit_code"``, ``"text: <tag>"``.
    """
    if is_error is False or (is_error is None and exit_code == 0):
        return None
    text = _windows(result_text)
    if is_error:
        kind = kind_of(text, exit_code)
        # A shell that says no more than that its command failed means the status.
        shell = kind == "unknown" and _has_word(tool_name, tags.SHELL_TOOLS)
        return "nonzero_exit" if shell else kind, "is_error"
    if exit_code is not None:
        return kind_of(text, exit_code), "exit_code"
    found = _from_text(text, result_text, is_reading(tool_name, arguments))
    if found is None:
        return None
    rule, status = found
    return kind_of(text, status), f"text: {rule}"


def kind_of(text: str, exit_code: int | None = None) -> str:
    """What failed, by the text of a result that is known to have failed."""
    inner = _WRAPPING.sub("", text)
    stated = _STATUS_WORDS.search(inner[:WINDOW])
    if exit_code is None and stated is not None:
        exit_code = int(stated[1][:6])
    last = _last_exception(inner)
    lower = inner.lower()
    for kind, words, pattern in kinds.KINDS:
        if last is not None and kind not in kinds.BEFORE_TRACEBACK:
            continue
        if any(word in lower for word in words) and pattern.search(inner):
            return kind
    if last is not None:
        return kinds.EXCEPTIONS.get(last, "traceback")
    if exit_code:
        return kinds.EXIT_CODES.get(exit_code, "nonzero_exit")
    return "unknown"


def is_reading(tool_name: str | None, arguments: str = "") -> bool:
    """Whether a call shows what others wrote."""
    if _has_word(tool_name, tags.READING_TOOLS):
        return True
    return tags.READING_COMMAND.search(arguments[:WINDOW]) is not None


def _has_word(tool_name: str | None, words: frozenset[str]) -> bool:
    return any(word.lower() in words for word in _CAMEL.findall(tool_name or ""))


def _windows(text: str) -> str:
    if len(text) > 2 * WINDOW:
        text = f"{text[:WINDOW].lstrip()}\n{text[-WINDOW:].rstrip()}"
    text = text.strip().replace("\r\n", "\n")
    return _ANSI.sub("", text) if "\x1b" in text else text


def _from_text(text: str, full: str, reading: bool) -> tuple[str, int | None] | None:
    """The rule by which a result without flags failed, and the exit status it states."""
    if not text:
        return None
    if kinds.KINDS[0][2].match(_WRAPPING.sub("", text)):
        return REJECTED, None
    if text.startswith("{"):
        envelope = _envelope(full)
        if envelope is not None:
            return _from_envelope(envelope, reading)
    status = _stated_status(text, reading)
    if status is not None:
        return ("exit status", status) if status else None
    for name, pattern, everywhere in tags.START_TAGS:
        if (everywhere or not reading) and pattern.match(text):
            return name, None
    if text.startswith(_TRACEBACK) and (not reading or _ends_in_traceback(text)):
        return "Traceback", None
    lines = text.rsplit("\n", 12)
    if len(lines) <= 12 and all(tags.SHELL_LINE.fullmatch(line.strip()) for line in lines):
        return "shell message", None
    if reading:
        return None
    if tags.SHELL_LINE.fullmatch(lines[-1].strip()):
        return "shell message", None
    for line in lines[-8:]:
        for name, pattern in tags.VERDICTS:
            if pattern.fullmatch(line.strip()):
                return name, None
    return ("Traceback", None) if _ends_in_traceback(text) else None


def _stated_status(text: str, reading: bool) -> int | None:
    found = tags.STATUS_START.match(text)
    if found is None and not reading:
        found = tags.STATUS_END.fullmatch(text.rsplit("\n", 1)[-1].strip())
    if found is None:
        return None
    digits = next(group for group in found.groups() if group is not None)
    return int(digits[:6])


def _envelope(full: str) -> dict[str, Any] | None:
    if len(full) > 64 * WINDOW:
        return None
    try:
        value = json.loads(full)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _from_envelope(value: dict[str, Any], reading: bool) -> tuple[str, int | None] | None:
    """A result that is one JSON object and says itself how it ended."""
    if reading and not _ENVELOPE.issuperset(value):
        return None
    for key in _FLAG_KEYS:
        if isinstance(value.get(key), bool):
            return (key, None) if value[key] else None
    metadata = value.get("metadata")
    for holder in (value, metadata if isinstance(metadata, dict) else {}):
        for key in _STATUS_KEYS:
            status = holder.get(key)
            if isinstance(status, int) and not isinstance(status, bool):
                return (key, status) if status else None
    for key in ("success", "ok"):
        if isinstance(value.get(key), bool):
            return None if value[key] else (f"{key}: false", None)
    status = value.get("status")
    if isinstance(status, str) and status.lower() in ("error", "failed", "failure"):
        return "status", None
    error = value.get("error")
    if isinstance(error, str):
        error = error.strip().lower() not in _NO_ERROR
    return ("error", None) if error else None


def _ends_in_traceback(text: str) -> bool:
    """Whether the last thing in ``text`` is a Python traceback: a run that died of it."""
    place = text.rfind(_TRACEBACK)
    if place < 0 or (place > 0 and text[place - 1] != "\n"):
        return False
    lines = text[place:].split("\n")[1:]
    for number, line in enumerate(lines):
        if line and not line[0].isspace():
            after = lines[number + 1 :]
            return (
                _EXCEPTION.match(line) is not None
                and len(after) <= 4
                and not any(_PASSED.search(rest) for rest in after)
            )
    return False


def _last_exception(text: str) -> str | None:
    """The name of the exception that ends the last traceback in ``text``."""
    place = text.rfind(_TRACEBACK)
    if place < 0:
        return None
    for line in text[place:].split("\n")[1:]:
        if line and not line[0].isspace():
            found = _EXCEPTION.match(line)
            return found[1] if found is not None else None
    return None
