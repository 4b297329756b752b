"""The tokenizer that counts, and the model that measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError, ModelError
from composer_prime_plugin.runfile import RunFile
from composer_trl_host.embedded import MODEL_NAME, embedded_model
from composer_trl_host.loading import load_model
from composer_trl_host.settings import HostSettings

EMBEDDED = "embedded"


def quiet_libraries() -> None:
    """Keep transformers' bars and warnings out of the report."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def embedded_tokenizer() -> tuple[Any, str]:
    """The embedded model's tokenizer and the model's name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(embedded_model()), padding_side="left"), MODEL_NAME


def measuring_model(name: str, device: str) -> tuple[Any, Any, str]:
    """``(model, tokenizer, its name in words)`` of ``--model name``, loaded as a run loads ``[model] name``."""
    document: dict[str, Any] = {} if name == EMBEDDED else {"model": {"name": name}}
    settings = HostSettings.from_run(
        RunFile(document, ComposerConfig(), arguments=(), base_dir=Path.cwd(), toml_paths=())
    )
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--device must be one that torch can use here; {device!r} is not ({reason}); set --device cpu"
        ) from error
    try:
        model, tokenizer = load_model(settings)
    except ModelError as error:
        raise ModelError(str(error).replace("model.name", "--model")) from error
    return model.to(place).eval(), tokenizer, MODEL_NAME if name == EMBEDDED else name


def longest_context(model: Any) -> int | None:
    """The positions that the model knows, None where its configuration does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
