"""The judge as a table of the TOML describes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_prime_plugin.config import JudgeConfig
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import validation_sentence
from composer_trl_host.hinting.judge import JudgeHints

_TABLE = "trl_host.judge"


JudgeOptions = JudgeConfig
"""``[trainer.loss.kwargs.trl_host.judge]``; the schema is the plugin's."""


def build_judge(
    options: Mapping[str, Any] | JudgeOptions,
    *,
    base_dir: Path | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> JudgeHints:
    """A judge from a table. A relative ``cache_dir`` lies in ``base_dir``. Raises ``ConfigError``."""
    if not isinstance(options, JudgeOptions):
        try:
            options = JudgeOptions(**options)
        except ValidationError as error:
            raise ConfigError(validation_sentence(error, _TABLE)) from None
    cache_dir = Path(options.cache_dir).expanduser() if options.cache_dir is not None else None
    return JudgeHints(
        _client(options),
        options.model,
        timeout_seconds=options.timeout_seconds,
        budget_seconds=options.budget_seconds,
        budget_tokens=options.budget_tokens,
        max_retries=options.max_retries,
        max_hint_tokens=options.max_hint_tokens,
        max_answer_tokens=options.max_answer_tokens,
        max_context_characters=options.max_context_characters,
        cache_dir=base_dir / cache_dir if base_dir and cache_dir else cache_dir,
        count_tokens=count_tokens,
    )


def _client(options: JudgeOptions) -> Any:
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            f"the judge needs the openai client; it does not import ({error}); pip install 'composer-rl[judge]'"
        ) from error
    key = "none" if options.api_key_env is None else os.environ.get(options.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"judge.api_key_env must name a variable that holds the key; {options.api_key_env} is not set; set it, "
            'or api_key_env = "None" where the endpoint wants no key'
        )
    # No connection outlives its request: a process that forks would share it. A redirect is an error,
    # not followed: the transcripts go to the named endpoint and nowhere else.
    return openai.OpenAI(
        base_url=options.base_url,
        api_key=key,
        max_retries=0,
        default_headers={"Connection": "close"},
        http_client=openai.DefaultHttpxClient(follow_redirects=False),
    )
