"""One question to an OpenAI-compatible endpoint, with a limit that holds whatever the server does."""

from __future__ import annotations

import email.utils
import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

_LONGEST_BODY = 1 << 20
_MOST_ABANDONED = 4
"""Requests past their limit that may still hang on a server. Beyond it nothing more is asked."""

_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_FATAL = frozenset({401, 403, 404})


@dataclass(frozen=True)
class Answer:
    """What the endpoint said. ``tokens`` is None where it does not report any."""

    text: str
    tokens: int | None


class AskError(Exception):
    """No answer. ``retry``: asking again may help, after ``wait`` seconds where the server says so.
    ``fatal``: no other question will fare better. ``tokens``: what the endpoint reports to have spent;
    None: not known, and ``reached`` says whether the model may have worked at all."""

    def __init__(
        self,
        reason: str,
        *,
        retry: bool = False,
        wait: float | None = None,
        fatal: bool = False,
        reached: bool = True,
        tokens: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry
        self.wait = wait
        self.fatal = fatal
        self.reached = reached
        self.tokens = tokens


class Asker:
    """Asks through an ``openai.OpenAI`` client.

    The client's own time-out is per read: a server that sends a byte now and then never meets it. So each
    request runs in a thread of its own that is waited for no longer than the limit, and left behind then.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._abandoned: list[threading.Thread] = []

    @property
    def hanging(self) -> int:
        """Requests past their limit that have not ended yet."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    def ask(self, request: Mapping[str, Any], seconds: float) -> Answer:
        """The answer, within ``seconds``. Raises ``AskError``."""
        if self.hanging >= _MOST_ABANDONED:
            raise AskError("too many requests still hang", reached=False)
        deadline = time.monotonic() + seconds
        outcome: list[Answer | AskError] = []

        def work() -> None:
            try:
                outcome.append(_read_answer(self._body(request, deadline)))
            except AskError as error:
                outcome.append(error)
            except BaseException as error:
                outcome.append(_as_ask_error(error))

        thread = threading.Thread(target=work, name="composer-judge", daemon=True)
        thread.start()
        thread.join(seconds)
        if not outcome:
            self._abandoned.append(thread)
            raise AskError("timed out")
        if isinstance(outcome[0], AskError):
            raise outcome[0]
        return outcome[0]

    def _body(self, request: Mapping[str, Any], deadline: float) -> bytes:
        client = self._client.with_options(max_retries=0, timeout=max(0.001, deadline - time.monotonic()))
        parts: list[bytes] = []
        size = 0
        with client.chat.completions.with_streaming_response.create(**request) as response:
            for part in response.iter_bytes():
                size += len(part)
                if time.monotonic() >= deadline:
                    raise AskError("timed out")
                if size > _LONGEST_BODY:
                    raise AskError("answer too large")
                parts.append(part)
        return b"".join(parts)


def _read_answer(body: bytes) -> Answer:
    """The text of a chat completion. Read by hand: compatible endpoints differ in all but this much."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise AskError("answer is not JSON") from None
    if not isinstance(data, dict):
        raise AskError("answer is not a chat completion")
    usage = data.get("usage")
    count = usage.get("total_tokens") if isinstance(usage, dict) else None
    tokens = count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise AskError("answer has no choices", tokens=tokens)
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise AskError("answer has no message", tokens=tokens)
    if message.get("refusal"):
        raise AskError("answer refuses", tokens=tokens)
    text = message.get("content")
    if not isinstance(text, str) or not text.strip():
        raise AskError("empty answer", tokens=tokens)
    if choices[0].get("finish_reason") == "length":
        raise AskError("answer was cut off", tokens=tokens)
    return Answer(text, tokens)


def _as_ask_error(error: BaseException) -> AskError:
    """What a failed request means. Known by attributes and names, so that openai need not be imported."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        headers = getattr(getattr(error, "response", None), "headers", {})
        return AskError(
            f"HTTP {status}",
            retry=status in _RETRIED,
            wait=_retry_after(headers.get("retry-after")),
            fatal=status in _FATAL,
            reached=False,
        )
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"APITimeoutError", "TimeoutException"}:
        return AskError("timed out")
    if "APIConnectionError" in names:
        return AskError("no connection", retry=True, reached=False)
    if "TransportError" in names:
        return AskError("connection lost", retry=True)
    return AskError(f"raised {type(error).__name__}")


def _retry_after(value: Any) -> float | None:
    """Seconds of a ``Retry-After`` header: a number or a date."""
    if not isinstance(value, str):
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
