"""The judge as a table of the TOML describes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, ValidationError, field_validator
from pydantic_config import BaseConfig

from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import validation_sentence
from composer_trl_host.hinting.judge import JudgeHints

_TABLE = "trl_host.judge"


class JudgeOptions(BaseConfig):
    """Where the judge is and what it may take. Every process of a run has the budget for itself."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    base_url: str
    """Address of the endpoint, up to and including ``/v1``. The transcripts are sent there."""

    model: str = Field(min_length=1)
    """The model's name at the endpoint."""

    api_key_env: str | None = Field("OPENAI_API_KEY", min_length=1)
    """Environment variable that holds the key. None: the endpoint wants none."""

    timeout_seconds: float = Field(20.0, gt=0)
    """Longest wait for one hint in seconds, retries included."""

    budget_seconds: float = Field(600.0, ge=0)
    """Longest wait for all hints of a run in seconds. 0: only stored answers are used."""

    budget_tokens: int = Field(1_000_000, ge=0)
    """Tokens that all hints of a run may take, prompts included. 0: only stored answers are used."""

    max_retries: int = Field(2, ge=0, le=10)
    """Further tries after a lost connection, HTTP 408, 409, 429 or 5xx."""

    cache_dir: str | None = None
    """Folder in which answers are kept between runs. None: they are not kept."""

    max_hint_tokens: int = Field(60, ge=1)
    """Longest hint in tokens. A longer one is refused, never cut."""

    max_answer_tokens: int = Field(256, ge=1)
    """The endpoint's limit for one answer in tokens. A judge that thinks first needs more."""

    max_context_characters: int = Field(12_000, ge=400)
    """Characters of a context that are sent. The beginning of a longer conversation is left out."""

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if "@" in value:
            raise ValueError(
                "must hold no user name or password; put the key into the variable of api_key_env"
            )
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must start with http:// or https:// and name a host; found {value!r}")
        return value


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
            keys = ", ".join(JudgeOptions.model_fields)
            raise ConfigError(f"{validation_sentence(error, _TABLE)}; valid keys are {keys}") from None
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
