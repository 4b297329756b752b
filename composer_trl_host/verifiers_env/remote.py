"""A vLLM server of its own that environments of verifiers sample from, checked before the first batch."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.serving.app import GENERATE_PATH, HEALTH_PATH, MODELS_PATH

KEY = "trl_host.vllm_base_url"
INFO_PATH = "/server_info?config_format=json"
PATIENCE_SECONDS = 60.0
"""For one answer of the server."""


@dataclass(frozen=True)
class RemoteServer:
    """A server that answered every check. ``root``: its address without ``/v1``; ``model``: the name it serves;
    ``max_model_len``: tokens of prompt and turn together."""

    root: str
    model: str
    max_model_len: int


def check_server(base_url: str) -> RemoteServer:
    """Ask the server for all that training on it needs. Raises ``ConfigError`` that names what is missing.

    That it sends the weights it is given is TRL's to ensure; it is not asked here.
    """
    if "@" in base_url:  # not shown: it may hold a password
        raise ConfigError(f"{KEY} must hold no user name or password; found an @ in it; leave that part out")
    root = base_url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise ConfigError(
            f'{KEY} must be an address with http:// or https://; found {base_url!r}; set for example "http://localhost:8000"'
        )
    _ask(root, HEALTH_PATH, "must answer; start `vllm serve` there first")
    card = _first(_ask(root, MODELS_PATH, "must list its model").get("data"))
    model, longest = card.get("id"), card.get("max_model_len")
    if not isinstance(model, str) or not isinstance(longest, int):
        raise ConfigError(
            f"{KEY}: {root}{MODELS_PATH} must name a model and its max_model_len; found {card!r}; is it vLLM's server?"
        )
    info = _ask(root, INFO_PATH, "must tell its configuration; start it with VLLM_SERVER_DEV_MODE=1")
    config = info.get("vllm_config")
    config = config if isinstance(config, Mapping) else {}
    mode = _mapping(config.get("model_config")).get("logprobs_mode")
    if mode != "processed_logprobs":
        raise ConfigError(
            f"{KEY}: log-probs must be of the distribution that tokens are drawn from; found logprobs_mode {mode!r}; start the "
            "server with --logprobs-mode processed_logprobs"
        )
    if config.get("weight_transfer_config") is None:
        raise ConfigError(
            f"{KEY}: the server must take new weights; found no weight transfer; start it with --weight-transfer-config "
            """'{"backend": "nccl"}'"""
        )
    probe = {"model": model, "token_ids": [0], "sampling_params": {"max_tokens": 1, "logprobs": 1}}
    answer = _ask(root, GENERATE_PATH, "must take token ids; start vLLM 0.30 with --enable-scale-out", probe)
    choice = _first(answer.get("choices"))
    content = _mapping(choice.get("logprobs")).get("content")
    if len(choice.get("token_ids") or ()) != 1 or len(content or ()) != 1:
        raise ConfigError(
            f"{KEY}: {root}{GENERATE_PATH} must answer one id with its log-prob for max_tokens = 1; found {choice!r}"
        )
    return RemoteServer(root, model, longest)


def _ask(root: str, path: str, must: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    cause: Exception
    request = urllib.request.Request(root + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            text = response.read()
        # Any body says that the server is well.
        return {} if path == HEALTH_PATH else _mapping(json.loads(text))
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            found, cause = f"HTTP {error.code}", error
    except (OSError, ValueError) as error:
        found, cause = str(error), error
    except http.client.HTTPException as error:
        found, cause = repr(error), error  # a line of the server's, as it came
    raise ConfigError(f"{KEY}: {root}{path.partition('?')[0]} {must}; found {found}") from cause


def _first(value: Any) -> Mapping[str, Any]:
    return _mapping(value[0]) if isinstance(value, list) and value else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
