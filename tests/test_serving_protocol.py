"""What a request may say, and what it is refused for."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from composer_trl_host.serving.protocol import (
    Completion,
    Limits,
    RequestError,
    Sampling,
    check_completions,
    completion_body,
    models_body,
    read_request,
    read_sampling,
)

LIMITS = Limits("policy", max_model_len=32, vocab_size=100)


def body(**changes: Any) -> bytes:
    value: dict[str, Any] = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {}}
    value.update(changes)
    return json.dumps({key: item for key, item in value.items() if item is not None}).encode()


def test_a_request_of_the_train_client_is_read_whole() -> None:
    params = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "max_tokens": 4,
        "stop_token_ids": [7],
        "seed": 3,
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 2,
    }
    request = read_request(body(sampling_params=params, request_id="r", cache_salt="s", priority=1), LIMITS)
    assert request.request_id == "r"
    assert request.token_ids == [1, 2, 3]
    assert request.sampling == Sampling(4, 0.7, 0.9, 5, 0.1, frozenset({7}), False, 3)


def test_what_is_not_set_has_the_defaults_of_vllm_and_fits_the_model() -> None:
    assert read_request(body(sampling_params=None), LIMITS).sampling == Sampling(max_tokens=29)
    assert read_sampling({"max_tokens": 1000, "top_k": -1, "stop_token_ids": None}, 29) == Sampling(29)
    assert read_sampling({"top_k": 0}, 29).top_k is None


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model": "other"}, 404, "`other` does not exist"),
        ({"token_ids": []}, 400, "at least one id"),
        ({"token_ids": "1 2"}, 400, "token_ids must be a list"),
        ({"token_ids": [1, 100]}, 400, r"token_ids\[1\] must be a whole number from 0 to 99; found 100"),
        ({"token_ids": [1, -1]}, 400, "found -1"),
        ({"token_ids": [True]}, 400, "found True"),
        ({"token_ids": [1.0]}, 400, r"found 1\.0"),
        ({"token_ids": [1] * 32}, 400, "maximum context length is 32 tokens; found 32"),
        ({"sampling_params": [1]}, 400, "sampling_params must be an object"),
        ({"stream": True}, 400, "stream must be false"),
        ({"features": {"mm_hashes": {}}}, 400, "text alone"),
        ({"request_id": 3}, 400, "request_id must be a string"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], status: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read_request(body(**changes), LIMITS)
    assert caught.value.status == status


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(RequestError, match="the body must be") as caught:
        read_request(raw, LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"stop": ["x"]},
        {"logit_bias": {"3": 1.0}},
        {"min_tokens": 3},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"top_k": -2},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"seed": 0.5},
        {"stop_token_ids": [1.5]},
        {"ignore_eos": 1},
        {"structured_outputs": {"json": {}}},
    ],
    ids=str,
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))) as caught:
        read_sampling(params, 29)
    assert caught.value.status == 400


def test_a_parameter_that_asks_for_nothing_is_taken() -> None:
    neutral = {"n": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0, "stop": [], "logit_bias": None}
    assert read_sampling(neutral, 29) == Sampling(29)


def test_the_answer_has_the_fields_of_vllm() -> None:
    answer = completion_body("r", Completion((5, 6), (-0.5, -1.0), "stop"))
    choice = answer["choices"][0]
    assert answer["request_id"] == "r"
    assert choice["token_ids"] == [5, 6]
    assert choice["finish_reason"] == "stop"
    assert [(item["token"], item["logprob"]) for item in choice["logprobs"]["content"]] == [
        ("token_id:5", -0.5),
        ("token_id:6", -1.0),
    ]
    card = models_body(LIMITS)["data"][0]
    assert (card["id"], card["max_model_len"]) == ("policy", 32)


def test_a_generator_that_breaks_its_promise_is_found() -> None:
    turn = Completion((5,), (-0.5,), "stop")
    check_completions([turn, None], 2)
    with pytest.raises(RuntimeError, match="one turn per request, 2; found 1"):
        check_completions([turn], 2)
    with pytest.raises(RuntimeError, match="finite"):
        check_completions([Completion((5,), (-math.inf,), "stop")], 1)
