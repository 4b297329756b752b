"""Values of a parsed record, checked: what any file may hold in place of what it should."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
IMAGE = "[image]"
"""What stands for an image, which no reader keeps."""


class Refused(Exception):
    """One trace breaks its format. The readers count it under ``reason`` and go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def shape(value: object) -> str:
    """How a message names the type of a parsed value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def clean(text: str) -> str:
    """``text`` without lone surrogates: JSON may hold them, no tokenizer takes them."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def string(value: object) -> str | None:
    """``value`` where it is a string that is not empty."""
    return clean(value) if isinstance(value, str) and value else None


def identifier(value: object) -> str | None:
    """A name given as a string or as a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return string(value)


def number(value: object, name: str) -> float:
    """A finite number, or ``Refused``."""
    if isinstance(value, (int, float)):
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if math.isfinite(result):
            return result
        raise Refused(f"{name} that is not finite")
    raise Refused(f"{name} that is no number")


def json_text(value: object) -> str:
    """Arguments as JSON text; a string is kept as it is, since the model may have written broken JSON."""
    if isinstance(value, str):
        return clean(value)
    return clean(json.dumps({} if value is None else value, ensure_ascii=False))


def content_text(content: object, skipped: Counter[str], what: str) -> str:
    """The text of a message's content: a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return clean(content)
    if content is None:
        return ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Refused(f"{what} whose content is {shape(content)}")
    return "\n".join(part for part in (part_text(item, skipped) for item in content) if part is not None)


def part_text(part: object, skipped: Counter[str]) -> str | None:
    """The text of one part of a content list, ``IMAGE`` for an image, None (counted) for anything else."""
    if isinstance(part, str):
        return clean(part)
    if not isinstance(part, dict):
        skipped[f"content part that is {shape(part)}"] += 1
        return None
    kind = part.get("type")
    if kind in ("tool_use", "tool_result"):
        raise Refused(f"{kind} block where only text belongs")
    text = part.get("text")
    if isinstance(text, str) and (kind in (None, "") or (isinstance(kind, str) and kind in _TEXT_PARTS)):
        return clean(text)
    if isinstance(kind, str) and kind in _IMAGE_PARTS:
        return IMAGE
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return clean(part["refusal"])
    if kind == "tool_reference" and isinstance(part.get("tool_name"), str):
        return clean(part["tool_name"])
    skipped[f"content part of type {label(kind)}"] += 1
    return None


def label(value: object) -> str:
    """A value of a record inside a reason: short, since a file can make up any number of them."""
    return repr(clean(value)[:40]) if isinstance(value, str) else shape(value)


def tool_definitions(value: object) -> tuple[dict[str, Any], ...]:
    """Tools in the form chat templates take (``{"type": "function", "function": ...}``), or ``Refused``.

    Also read: JSON text, the bare function of verifiers, and ``input_schema`` for the parameters.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Refused("tools that are no JSON") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused("tools that are no list of objects")
    text = json.dumps(value, ensure_ascii=False)
    items = value if clean(text) == text else json.loads(clean(text))
    return tuple(_definition(item) for item in items)


def _definition(item: dict[str, Any]) -> dict[str, Any]:
    if "function" in item or not isinstance(item.get("name"), str):
        return item
    function = {
        key: item[key] for key in ("name", "description", "parameters", "strict") if item.get(key) is not None
    }
    if "parameters" not in function and isinstance(item.get("input_schema"), dict):
        function["parameters"] = item["input_schema"]
    return {"type": "function", "function": function}
