"""Requests and answers of ``POST /inference/v1/generate`` and ``GET /v1/models``, as vLLM has them.

Of the request this reads ``model``, ``token_ids``, ``sampling_params`` and ``request_id``. A sampling
parameter that would change what is sampled, and that this server does not have, is refused by name.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]

_NO_EFFECT = frozenset(
    {
        *(
            "logprobs",
            "prompt_logprobs",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ),
        *("include_stop_str_in_output", "output_kind", "routed_experts_prompt_start", "flat_logprobs"),
    }
)
"""Parameters that leave the sampled ids as they are."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop": ("", []),
    "bad_words": ([],),
    "logit_bias": ({},),
    "extra_args": ({},),
}
"""Parameters that this server does not have, with the values that ask for nothing."""


class RequestError(Exception):
    """A request that is answered with an error: the HTTP status and the sentence that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. ``temperature`` 0 takes the likeliest token; ``top_k`` None: all tokens.

    A token of ``stop_token_ids`` ends the turn and is part of it. ``seed`` None: the process's random state.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled turn. ``logprobs`` (nats): of each token under the distribution that it was drawn from,
    temperature and truncation included, as vLLM's ``processed_logprobs``."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Limits:
    """``max_model_len``: tokens of prompt and turn together; ``vocab_size``: ids are below it."""

    model: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class GenerateRequest:
    """A request that was read and fits the limits."""

    request_id: str
    token_ids: list[int]
    sampling: Sampling


def read_request(body: bytes, limits: Limits) -> GenerateRequest:
    """The request in ``body``. Raises ``RequestError`` (400, or 404 for another model)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body must be JSON; it is not: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object; found {type(value).__name__}")
    model = value.get("model")
    if model is not None and model != limits.model:
        raise RequestError(404, f"the model `{model}` does not exist; this server has `{limits.model}`")
    if value.get("stream"):
        raise RequestError(400, "stream must be false: turns are answered whole")
    if value.get("features") or value.get("content_parts"):
        raise RequestError(400, "features and content_parts must be absent: the model reads text alone")
    ids = _token_ids(value.get("token_ids"), limits)
    params = value.get("sampling_params")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        raise RequestError(400, f"sampling_params must be an object; found {type(params).__name__}")
    name = value.get("request_id")
    if name is not None and not isinstance(name, str):
        raise RequestError(400, f"request_id must be a string; found {type(name).__name__}")
    return GenerateRequest(
        name or f"generate-{uuid.uuid4().hex}", ids, read_sampling(params, limits.max_model_len - len(ids))
    )


def _token_ids(value: Any, limits: Limits) -> list[int]:
    if not isinstance(value, list) or not value:
        raise RequestError(400, "token_ids must be a list of at least one id")
    for place, item in enumerate(value):
        if type(item) is not int or not 0 <= item < limits.vocab_size:
            raise RequestError(
                400,
                f"token_ids[{place}] must be a whole number from 0 to {limits.vocab_size - 1}; found {item!r}",
            )
    if len(value) >= limits.max_model_len:
        raise RequestError(
            400,
            f"the prompt must leave room for a token: this model's maximum context length is {limits.max_model_len} "
            f"tokens; found {len(value)}",
        )
    return value


def read_sampling(params: Mapping[str, Any], room: int) -> Sampling:
    """``params`` with vLLM's names. A turn never takes more than ``room`` tokens."""
    left = {name: value for name, value in params.items() if value is not None and name not in _NO_EFFECT}
    for name, neutral in _NEUTRAL.items():
        if name in left:
            value = left.pop(name)
            if not any(value == item and not isinstance(value, bool) for item in neutral):
                raise RequestError(
                    400, f"sampling_params.{name} must be absent or {neutral[0]!r}; found {value!r}"
                )
    top_k = _whole(left.pop("top_k", -1), "top_k", least=-1)
    stop = left.pop("stop_token_ids", [])
    if not isinstance(stop, list) or not all(type(item) is int for item in stop):
        raise RequestError(400, f"sampling_params.stop_token_ids must be a list of ids; found {stop!r}")
    ignore_eos = left.pop("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise RequestError(400, f"sampling_params.ignore_eos must be true or false; found {ignore_eos!r}")
    seed = left.pop("seed", None)
    sampling = Sampling(
        max_tokens=min(_whole(left.pop("max_tokens", room), "max_tokens", least=1), room),
        temperature=_number(left.pop("temperature", 1.0), "temperature", 0.0, 1e6),
        top_p=_number(left.pop("top_p", 1.0), "top_p", 0.0, 1.0, above=True),
        top_k=top_k if top_k > 0 else None,
        min_p=_number(left.pop("min_p", 0.0), "min_p", 0.0, 1.0),
        stop_token_ids=frozenset(stop),
        ignore_eos=ignore_eos,
        seed=None if seed is None else _whole(seed, "seed", least=-(2**63)) % 2**63,
    )
    if left:
        raise RequestError(
            400, f"sampling_params must hold parameters of this server; it has no {', '.join(sorted(left))}"
        )
    return sampling


def _whole(value: Any, name: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise RequestError(
            400, f"sampling_params.{name} must be a whole number of at least {least}; found {value!r}"
        )
    return value


def _number(value: Any, name: str, least: float, most: float, above: bool = False) -> float:
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (least < value if above else least <= value)
        and value <= most
    )
    if not fits:
        word = "above" if above else "at least"
        raise RequestError(
            400, f"sampling_params.{name} must be a number {word} {least} and at most {most}; found {value!r}"
        )
    return float(value)


def completion_body(request_id: str, completion: Completion) -> dict[str, Any]:
    """vLLM's ``GenerateResponse``."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": 0,
                "logprobs": {"content": content},
                "finish_reason": completion.finish_reason,
                "token_ids": list(completion.token_ids),
            }
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


def models_body(limits: Limits) -> dict[str, Any]:
    """vLLM's ``ModelList`` with the one model."""
    card = {
        "id": limits.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "composer-rl",
        "root": limits.model,
        "parent": None,
        "max_model_len": limits.max_model_len,
        "permission": [],
    }
    return {"object": "list", "data": [card]}


def error_body(status: int, message: str) -> dict[str, Any]:
    """vLLM's ``ErrorResponse``."""
    kinds: Mapping[int, str] = {
        400: "BadRequestError",
        401: "Unauthorized",
        404: "NotFoundError",
        405: "MethodNotAllowed",
        408: "TimeoutError",
        413: "RequestEntityTooLarge",
        503: "ServiceUnavailableError",
    }
    return {
        "error": {
            "message": message,
            "type": kinds.get(status, "InternalServerError"),
            "param": None,
            "code": status,
        }
    }


def check_completions(completions: Sequence[Completion | None], count: int) -> None:
    """Raise ``RuntimeError`` where a generator broke its promise."""
    if len(completions) != count:
        raise RuntimeError(f"the generator must give one turn per request, {count}; found {len(completions)}")
    for turn in completions:
        if turn is not None and not all(map(math.isfinite, turn.logprobs)):
            raise RuntimeError("the generator must give finite log-probs; found one that is not")
