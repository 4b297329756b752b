"""A vLLM server of its own: what is asked of it before it is trained with. A small server stands in for it."""

from __future__ import annotations

import copy
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.verifiers_env import build
from composer_trl_host.verifiers_env.remote import RemoteServer, check_server

ANSWERS: dict[str, Any] = {
    "/health": "OK",
    "/v1/models": {"data": [{"id": "policy", "max_model_len": 512}]},
    "/server_info": {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": "nccl"},
        }
    },
    "/inference/v1/generate": {
        "choices": [
            {"token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "length"}
        ]
    },
}


class StandIn(ThreadingHTTPServer):
    """Answers ``answers`` by path, 404 elsewhere, and keeps the bodies it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = copy.deepcopy(ANSWERS)
        self.bodies: list[Any] = []

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0])
        if isinstance(answer, bytes):  # the whole answer, as it is
            self.wfile.write(answer)
            self.close_connection = True
            return
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as standing:
        thread = threading.Thread(target=standing.serve_forever, args=(0.01,))
        thread.start()
        yield standing
        standing.shutdown()
        thread.join(5)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_server_that_has_everything_is_taken(server: StandIn, end: str) -> None:
    assert check_server(server.root + end) == RemoteServer(server.root, "policy", 512)
    assert server.bodies == [
        {"model": "policy", "token_ids": [0], "sampling_params": {"max_tokens": 1, "logprobs": 1}}
    ]


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/health", None, "/health must answer; start `vllm serve` there first; found HTTP 404"),
        ("/v1/models", {"data": []}, "must name a model and its max_model_len"),
        ("/server_info", None, "/server_info must tell .* VLLM_SERVER_DEV_MODE=1; found HTTP 404"),
        (
            "/server_info",
            {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}},
            "found logprobs_mode 'raw_logprobs'; start the server with --logprobs-mode processed_logprobs",
        ),
        (
            "/server_info",
            {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
            "no weight transfer; start it with --weight-transfer-config",
        ),
        ("/inference/v1/generate", None, "must take token ids; .* --enable-scale-out; found HTTP 404"),
        (
            "/inference/v1/generate",
            {"choices": [{"token_ids": [5], "logprobs": None}]},
            "one id with its log-prob",
        ),
        ("/health", b"SSH-2.0-OpenSSH_9\r\n", r"/health must answer; .*found BadStatusLine\('SSH-2"),
        ("/v1/models", b"HTTP/1.0 200 OK\r\ncontent-length: 9\r\n\r\n{}", "must list .*IncompleteRead"),
        ("/v1/models", "OK", "/v1/models must list its model; found Expecting value"),
    ],
)
def test_what_a_server_lacks_is_named(server: StandIn, path: str, answer: Any, words: str) -> None:
    server.answers[path] = answer
    with pytest.raises(ConfigError, match=words) as caught:
        check_server(server.root)
    assert str(caught.value).startswith("trl_host.vllm_base_url")


def test_an_address_that_is_none_and_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="must be an address with http"):
        check_server("localhost:8000")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        with pytest.raises(ConfigError, match="/health must answer"):
            check_server(f"http://127.0.0.1:{taken.getsockname()[1]}")


def test_an_address_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/health must answer; .*found InvalidURL"):
        check_server("http://localhost:port")


@pytest.mark.parametrize("address", ["http://u:SECRET@h", "http://u:SECRET@h:1/v1", "u:SECRET@h:1"])
def test_a_password_in_an_address_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ConfigError, match="must hold no user name or password") as caught:
        check_server(address)
    assert "SECRET" not in str(caught.value)


def test_a_trainer_without_vllm_refuses_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build._remote(None) is None
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm_base_url needs the package vllm .* found no vllm"):
        build._remote("http://localhost:8000")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_trl_is_told_to_give_the_server_its_weights() -> None:
    from trl import GRPOConfig

    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none")
    build.sample_remotely(args, RemoteServer("http://h:1", "policy", 512))
    assert (args.use_vllm, args.vllm_mode, args.vllm_server_base_url) == (True, "server", "http://h:1")
    assert args.vllm_importance_sampling_correction is False


def test_weights_are_sent_once_per_step_before_an_evaluation() -> None:
    sent: list[int] = []
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=3),
        _last_loaded_step=-1,
        vllm_generation=SimpleNamespace(sync_weights=lambda: sent.append(3)),
    )
    build.send_weights(trainer)
    build.send_weights(trainer)
    assert (sent, trainer._last_loaded_step) == ([3], 3)


def test_the_names_that_trl_has_for_them_are_there() -> None:
    """What is set and called by name above, in the TRL that is installed."""
    import inspect

    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    fields = GRPOConfig.__dataclass_fields__
    assert {"use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_importance_sampling_correction"} <= set(
        fields
    )
    assert hasattr(VLLMGeneration, "sync_weights")
    assert "self._last_loaded_step" in inspect.getsource(GRPOTrainer)
    # TRL itself sends the weights before it calls a rollout function.
    generate = inspect.getsource(GRPOTrainer._generate)
    assert generate.index("sync_weights()") < generate.index("self.rollout_func(")
