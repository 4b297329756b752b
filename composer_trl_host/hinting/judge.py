"""The judge: another model, behind an OpenAI-compatible endpoint, that reads the failed call.

It sees the conversation, the call and the result, so all of these leave this machine. It does not see
``ErrorContext.details``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.hinting.judge_cache import AnswerCache, cache_key
from composer_trl_host.hinting.judge_http import Asker, AskError
from composer_trl_host.hinting.judge_prompt import PROMPT_VERSION, checked_answer, request_messages
from composer_trl_host.hinting.templates import known_kind
from composer_trl_host.hinting.text import CHARACTERS_PER_TOKEN, MAX_HINT_CHARACTERS, estimated_tokens
from composer_trl_host.hints import ErrorContext, Hint

_FIRST_PAUSE = 0.25
"""Seconds before the first retry where the server names none. Each further pause is twice as long."""

_SEED = 0


class JudgeHints:
    """Answers with what a model says, or not at all. The source is ``judge/<kind>``.

    client: an ``openai.OpenAI``. model: its name at the endpoint.
    timeout_seconds: longest wait for one hint, retries and pauses included.
    budget_seconds, budget_tokens: what all hints together may take; then nothing more is asked. Tokens are
        the endpoint's own count, an estimate where it reports none. Stored answers take nothing.
    max_retries: further tries after a lost connection, HTTP 408, 409, 429 and 5xx.
    max_hint_tokens: a longer hint is refused, never cut; ``count_tokens`` counts, else an estimate.
    max_answer_tokens: the endpoint's limit, thinking included.
    max_context_characters: how much of a context is sent; what is further back is left out.
    cache_dir: where answers are kept between runs. None: nowhere.

    A context whose question failed is not asked again, so within a run the same context has the same
    hint. Failures are not written to disk: the next run may have more luck. ``failures`` holds a reason
    for every hint not given, ``events`` counts the questions, stored answers and cut contexts. Not for
    use by two threads at once.
    """

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        timeout_seconds: float = 20.0,
        budget_seconds: float = 600.0,
        budget_tokens: int = 1_000_000,
        max_retries: int = 2,
        max_hint_tokens: int = MAX_HINT_CHARACTERS // CHARACTERS_PER_TOKEN,
        max_answer_tokens: int = 256,
        max_context_characters: int = 12_000,
        cache_dir: str | Path | None = None,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        if not hasattr(client, "with_options"):
            raise ConfigError(
                f"the judge's client must be an openai.OpenAI; found {type(client).__name__}; build one, or use build_judge"
            )
        self.model = model
        self.timeout_seconds = timeout_seconds
        self.budget_seconds = budget_seconds
        self.budget_tokens = budget_tokens
        self.max_retries = max_retries
        self.max_hint_tokens = max_hint_tokens
        self.max_answer_tokens = max_answer_tokens
        self.max_context_characters = max_context_characters
        self.count_tokens = count_tokens or estimated_tokens
        self.seconds_spent = 0.0
        self.tokens_spent = 0
        self.failures: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._client = client
        self._asker = Asker(client)
        self._cache = AnswerCache(Path(cache_dir), self.events) if cache_dir is not None else None
        self._given: dict[str, str | None] = {}
        self._off = ""

    def generate(self, context: ErrorContext) -> Hint | None:
        """The judge's hint. None where it has none, fails, or may not be asked any more."""
        request = self._request(context)
        key = cache_key([PROMPT_VERSION, request])
        fresh = False
        if key in self._given:
            self.events["asked before"] += 1
            answer = self._given[key]
            if answer is None:
                self.failures["failed before"] += 1
        else:
            answer = self._cache.get(key) if self._cache is not None else None
            fresh = answer is None
            if fresh:
                answer = self._ask(request, key)
            else:
                self.events["from cache"] += 1
        if answer is None:
            return None
        hint, reason = self._checked(answer, context)
        if reason:
            self.failures[reason] += 1
            return None
        if fresh and self._cache is not None:
            self._cache.put(key, answer, self.model)
        return Hint(text=hint, source=f"judge/{known_kind(context.error_kind)}")

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    def _request(self, context: ErrorContext) -> dict[str, Any]:
        # Three words are about four tokens; the rest is room for a judge that counts badly.
        words = max(1, self.max_hint_tokens * 2 // 3)
        messages, cut = request_messages(context, self.max_context_characters, words)
        self.events["context cut"] += cut
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_answer_tokens,
            "temperature": 0,
            "seed": _SEED,
        }

    def _checked(self, answer: str, context: ErrorContext) -> tuple[str, str]:
        hint, reason = checked_answer(answer, context)
        if not reason and self.count_tokens(hint) > self.max_hint_tokens:
            return "", "answer too long"
        return hint, reason

    def _ask(self, request: dict[str, Any], key: str) -> str | None:
        """A new answer. None: there is none, and why is counted."""
        prompt = sum(estimated_tokens(message["content"]) for message in request["messages"])
        left = self.budget_seconds - self.seconds_spent
        skipped = self._off
        if not skipped and left <= 0:
            skipped = "seconds budget spent"
        if not skipped and self.tokens_spent + prompt + self.max_answer_tokens > self.budget_tokens:
            skipped = "token budget spent"
        if skipped:
            self.failures[skipped] += 1
            return None
        start = time.monotonic()
        self._given[key] = None
        try:
            answer = self._tries(request, start + min(left, self.timeout_seconds), prompt)
        except AskError as error:
            self.failures[error.reason] += 1
            if error.fatal:
                self._off = f"off after {error.reason}"
            return None
        finally:
            self.seconds_spent += time.monotonic() - start
        self._given[key] = answer
        return answer

    def _tries(self, request: dict[str, Any], deadline: float, prompt: int) -> str:
        pause = _FIRST_PAUSE
        for number in range(self.max_retries + 1):
            self.events["asked"] += 1
            try:
                answer = self._asker.ask(request, max(0.0, deadline - time.monotonic()))
            except AskError as error:
                guess = prompt if error.reached else 0
                self.tokens_spent += guess if error.tokens is None else error.tokens
                wait = pause if error.wait is None else error.wait
                hopeless = not error.retry or number == self.max_retries
                if hopeless or time.monotonic() + wait >= deadline or self.tokens_spent >= self.budget_tokens:
                    raise
                time.sleep(wait)
                pause *= 2
            else:
                spent = prompt + estimated_tokens(answer.text)
                self.tokens_spent += spent if answer.tokens is None else answer.tokens
                return answer.text
        raise AssertionError("the last try returns or raises")
