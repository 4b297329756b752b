"""The server itself, over sockets, with a generator that can be watched."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from composer_trl_host.serving.batching import BatchQueue, Ticket
from composer_trl_host.serving.protocol import Completion, Limits, RequestError, Sampling
from composer_trl_host.serving.server import TokenServer

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.timeout(30)

LIMITS = Limits("policy", max_model_len=64, vocab_size=1000)
PATH = "/inference/v1/generate"


class Echo:
    """Answers with the prompt's ids, each with log-prob -0.25. ``gate``: held until it is set."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.tickets: list[Ticket] = []

    def __call__(self, tickets: Sequence[Ticket]) -> list[Completion | None]:
        self.batches.append([ticket.token_ids for ticket in tickets])
        self.tickets += tickets
        self.entered.set()
        while not self.gate.wait(0.01):
            if not any(ticket.alive for ticket in tickets):
                break
        return [
            Completion(tuple(ticket.token_ids), (-0.25,) * len(ticket.token_ids), "stop")
            if ticket.alive
            else None
            for ticket in tickets
        ]


@contextmanager
def serving(
    generate: Any, generating: bool = True, window: float = 0.2, **options: Any
) -> Iterator[TokenServer]:
    """A server whose queue is worked off by a thread, as the trainer's would."""
    queue = BatchQueue(generate, window=window, patience=2.0)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            queue.run_once(0.05)

    worker = threading.Thread(target=work)
    with TokenServer(queue, LIMITS, **options) as server:
        if generating:
            worker.start()
        try:
            yield server
        finally:
            ended.set()
            if generating:
                worker.join(5)
                assert not worker.is_alive()


def ask(
    server: TokenServer,
    ids: Any = (1, 2),
    path: str = PATH,
    method: str = "POST",
    key: str | None = None,
    raw: bytes | None = None,
    params: dict[str, Any] | None = None,
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    data = json.dumps({"model": "policy", "token_ids": list(ids), "sampling_params": params or {}}).encode()
    headers = {
        "Authorization": f"Bearer {server.key if key is None else key}",
        "Content-Type": "application/json",
    }
    try:
        connection.request(
            method, path, (data if raw is None else raw) if method == "POST" else None, headers
        )
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None
    finally:
        connection.close()


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """``call(0)`` to ``call(count - 1)`` at once."""
    results: list[Any] = [None] * count

    def one(number: int) -> None:
        results[number] = call(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def test_ids_go_in_and_ids_with_log_probs_come_out() -> None:
    with serving(Echo(), window=0.0) as server:
        status, answer = ask(server, [3, 4])
    assert status == 200
    assert answer["choices"][0]["token_ids"] == [3, 4]
    assert answer["choices"][0]["logprobs"]["content"][1]["logprob"] == -0.25


def test_eight_requests_that_arrive_together_are_one_batch() -> None:
    echo = Echo()
    with serving(echo, window=0.5) as server:
        answers = together(8, lambda number: ask(server, [number + 1]))
    assert [answer["choices"][0]["token_ids"] for _, answer in answers] == [
        [number + 1] for number in range(8)
    ]
    assert [len(batch) for batch in echo.batches] == [8]


def test_requests_that_wait_for_a_busy_generator_are_the_next_batch() -> None:
    echo = Echo()
    echo.gate.clear()
    with serving(echo, window=0.0) as server:
        threads = [threading.Thread(target=ask, args=(server, [1]))]
        threads[0].start()
        assert echo.entered.wait(10)
        threads += [threading.Thread(target=ask, args=(server, [number])) for number in (2, 3)]
        for thread in threads[1:]:
            thread.start()
        assert eventually(lambda: len(server.queue._waiting) == 2)
        echo.gate.set()
        for thread in threads:
            thread.join(10)
    assert [sorted(batch) for batch in echo.batches] == [[[1]], [[2], [3]]]


def test_a_batch_that_is_complete_does_not_wait() -> None:
    queue = BatchQueue(Echo(), patience=5.0, expected=lambda: 2)
    tickets = [Ticket([1], Sampling(1)), Ticket([2], Sampling(1))]
    for ticket in tickets:
        queue.submit(ticket)
    begin = time.monotonic()
    assert queue.run_once(1.0)
    assert time.monotonic() - begin < 2.0
    assert [ticket.future.result(0).token_ids for ticket in tickets] == [(1,), (2,)]


def test_a_batch_waits_for_those_that_are_expected_but_not_for_ever() -> None:
    echo = Echo()
    queue = BatchQueue(echo, window=0.0, patience=0.3, expected=lambda: 3)
    queue.submit(Ticket([1], Sampling(1)))
    late = threading.Timer(0.1, lambda: queue.submit(Ticket([2], Sampling(1))))
    late.start()
    begin = time.monotonic()
    assert queue.run_once(1.0)
    late.join()
    assert echo.batches == [[[1], [2]]]
    assert time.monotonic() - begin >= 0.3


def test_a_batch_keeps_to_its_limits() -> None:
    echo = Echo()
    queue = BatchQueue(echo, max_batch=3, max_padded_tokens=40, window=0.0)
    for length in (8, 8, 8, 8, 18):
        queue.submit(Ticket([1] * length, Sampling(max_tokens=2)))
    while queue.run_once(0.01):
        pass
    # Three rows of 10 tokens; then a row of 10 alone, since with the one of 20 it would be 2 x 20 = 40, which fits.
    assert [[len(ids) for ids in batch] for batch in echo.batches] == [[8, 8, 8], [8, 18]]
    echo.batches.clear()
    queue.max_padded_tokens = 39
    for length in (8, 18):
        queue.submit(Ticket([1] * length, Sampling(max_tokens=2)))
    while queue.run_once(0.01):
        pass
    assert [[len(ids) for ids in batch] for batch in echo.batches] == [[8], [18]]


@pytest.mark.parametrize("key", ["", "wrong", "Bearer"])
def test_without_the_key_nothing_is_answered(key: str) -> None:
    echo = Echo()
    with serving(echo) as server:
        assert ask(server, key=key)[0] == 401
        assert ask(server, key=key, method="GET", path="/v1/models")[0] == 401
    assert echo.batches == []


def test_every_server_has_its_own_key_and_port() -> None:
    with serving(Echo(), generating=False) as one, serving(Echo(), generating=False) as other:
        assert one.key != other.key
        assert len(one.key) >= 32
        assert one.port != other.port
        assert ask(one, method="GET", path="/v1/models", key=other.key)[0] == 401


def test_models_and_health_and_what_is_not_there() -> None:
    with serving(Echo(), generating=False) as server:
        status, answer = ask(server, method="GET", path="/v1/models")
        assert (status, answer["data"][0]["max_model_len"]) == (200, 64)
        assert ask(server, method="GET", path="/health", key="")[0] == 200
        status, answer = ask(server, method="GET", path="/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (404, 404)
        assert ask(server, method="GET")[0] == 405


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"[]", b'{"token_ids": [1'])
def test_a_malformed_body_is_a_bad_request_and_the_server_lives_on(raw: bytes) -> None:
    with serving(Echo(), window=0.0) as server:
        status, answer = ask(server, raw=raw)
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
        assert ask(server)[0] == 200


def test_a_body_above_the_limit_is_refused_by_its_header_and_by_its_size() -> None:
    with serving(Echo(), generating=False, body_bytes=100) as server:
        assert ask(server, raw=b"x" * 101)[0] == 413
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
            raw.sendall(
                f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"c8\r\n" + b"x" * 200 + b"\r\n"
            )
            assert raw.recv(200).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with (
        serving(Echo(), generating=False, body_seconds=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw,
    ):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nContent-Length: 50\r\n\r\n"
        raw.sendall(head.encode() + b"{")
        assert raw.recv(200).startswith(b"HTTP/1.1 408")


def test_a_turn_that_takes_too_long_is_given_up() -> None:
    echo = Echo()
    echo.gate.clear()
    with serving(echo, window=0.0, request_seconds=0.3) as server:
        status, answer = ask(server)
        assert (status, answer["error"]["type"]) == (408, "TimeoutError")
        assert eventually(lambda: not echo.tickets[0].alive)


def test_a_request_whose_client_left_is_dropped_before_and_while_it_is_sampled() -> None:
    echo = Echo()
    echo.gate.clear()
    with serving(echo, window=0.0) as server:
        busy = _leave_open(server, [1])
        assert echo.entered.wait(10)
        waiting = _leave_open(server, [2])
        assert eventually(lambda: len(server.queue._waiting) == 1)
        waiting.close()
        assert eventually(lambda: not server.queue._waiting[0].alive)
        busy.close()
        # The generator sees that nobody waits, without the gate.
        assert eventually(lambda: not echo.tickets[0].alive)
        echo.gate.set()
        assert ask(server, [3])[0] == 200
    assert [1] in echo.batches[0]
    assert all([2] not in batch for batch in echo.batches)


def _leave_open(server: TokenServer, ids: list[int]) -> socket.socket:
    data = json.dumps({"token_ids": ids}).encode()
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return raw


def test_what_the_generator_raises_reaches_its_caller_and_the_clients() -> None:
    def broken(tickets: Sequence[Ticket]) -> list[Completion | None]:
        raise RuntimeError("no weights")

    queue = BatchQueue(broken, window=0.0)
    ticket = Ticket([1], Sampling(1))
    queue.submit(ticket)
    with pytest.raises(RuntimeError, match="no weights"):
        queue.run_once(1.0)
    with pytest.raises(RequestError, match="generation failed: RuntimeError") as caught:
        ticket.future.result(0)
    assert caught.value.status == 500


def test_closing_answers_what_waits_and_ends_the_thread() -> None:
    before = threading.active_count()
    queue = BatchQueue(Echo())
    server = TokenServer(queue, LIMITS).start()
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(ask(server)))
    client.start()
    assert eventually(lambda: len(queue._waiting) == 1)
    server.close()
    client.join(10)
    assert answers[0][0] == 503
    with pytest.raises(RequestError, match="shutting down"):
        queue.submit(Ticket([1], Sampling(1)))
    assert threading.active_count() == before
    with pytest.raises(OSError, match=r"refused|reset"):
        ask(server)
