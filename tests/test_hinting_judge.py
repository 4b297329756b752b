"""The judge against a real HTTP server that answers well, late, wrongly or not at all."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from composer_trl_host.hinting import JudgeHints, build_judge, default_layered
from composer_trl_host.hinting.text import estimated_tokens
from composer_trl_host.hints import ErrorContext

pytest.importorskip("openai")

GOOD = "Look at which folder the file is in before you open it."
CONTEXT = ErrorContext(
    "missing_file", "It is not there.", "open notes", [{"role": "user", "content": "read it"}]
)
SLACK = 6.0
"""Seconds that a loaded machine may add to a time limit."""


def other(number: int) -> ErrorContext:
    return ErrorContext("missing_file", f"It is not there, try {number}.", "open notes")


def completion(text, tokens=70, **choice) -> bytes:
    choices = [
        {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}
    ]
    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
    return json.dumps({"id": "x", "object": "chat.completion", "choices": choices, **usage}).encode()


def reply(body: bytes, status: int = 200, **headers: str):
    """A step that answers at once."""

    def step(handler, stop):
        handler.send_response(status)
        for name, value in {"content_type": "application/json", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return step


def late(handler, stop):
    """Nothing at all for as long as the test runs."""
    stop.wait(10)


def trickle(start: bytes, drop: bytes):
    """A byte every 50 ms: every single read is quick, and the answer never ends."""

    def step(handler, stop):
        handler.wfile.write(start)
        while not stop.wait(0.05):
            handler.wfile.write(drop)
            handler.wfile.flush()

    return step


def hang_up(handler, stop):
    """Half an answer, then the end of the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "500")
    handler.end_headers()
    handler.wfile.write(b'{"choices": ')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


CERTIFICATES = cache(ssl.create_default_context)
"""Read once: it takes longer than all else that a client does here."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
STEPS = {
    "slow headers": trickle(b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "slow body": trickle(HEAD, b"1\r\n \r\n"),
    "no answer": late,
}


class Endpoint:
    """Plays ``steps`` in order, the last one for ever, and keeps what it was sent."""

    def __init__(self, *steps):
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.stop = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                number = len(endpoint.requests)
                endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
                endpoint.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.close_connection = True
                with suppress(OSError):  # the client hung up
                    steps[min(number, len(steps) - 1)](self, endpoint.stop)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def serve(monkeypatch):
    """``serve(*steps) -> Endpoint``."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("JUDGE_KEY", "key-of-the-test")
    monkeypatch.setattr(ssl, "create_default_context", CERTIFICATES)
    running = []

    def start(*steps) -> Endpoint:
        endpoint = Endpoint(*steps)
        thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((endpoint, thread))
        return endpoint

    yield start
    for endpoint, thread in running:
        endpoint.stop.set()
        endpoint.server.shutdown()
        thread.join()
        endpoint.server.server_close()


@contextmanager
def judge(endpoint, **options):
    url = endpoint if isinstance(endpoint, str) else endpoint.url
    made = build_judge({"base_url": url, "model": "small", "api_key_env": "JUDGE_KEY", **options})
    try:
        yield made
    finally:
        made.close()


def test_an_answer_is_a_hint_with_its_source(serve):
    endpoint = serve(reply(completion(f"  {GOOD}\n", 70)))
    with judge(endpoint) as hints:
        hint = hints.generate(CONTEXT)
    assert (hint.text, hint.source) == (GOOD, "judge/missing_file")
    assert (hints.tokens_spent, hints.failures) == (70, Counter())
    assert 0 < hints.seconds_spent < SLACK
    (sent,) = endpoint.requests
    assert (sent["model"], sent["temperature"], sent["seed"], sent["max_tokens"]) == ("small", 0, 0, 256)
    assert endpoint.headers[0]["authorization"] == "Bearer key-of-the-test"


def test_the_details_of_the_task_are_not_sent_and_may_not_come_back(serve):
    endpoint = serve(reply(completion("Use trash report to do it.")), reply(completion(GOOD)))
    told = ErrorContext("unknown", "no", "remove report", details={"steps": [{"command": "trash report"}]})
    with judge(endpoint) as hints:
        assert hints.generate(told) is None
        assert hints.failures == {"answer repeats the task's details": 1}
    assert "trash" not in json.dumps(endpoint.requests)


def test_the_same_context_is_asked_once(serve):
    endpoint = serve(reply(completion(GOOD)), reply(completion("Another one.")))
    with judge(endpoint) as hints:
        assert hints.generate(CONTEXT) == hints.generate(CONTEXT)
        assert hints.generate(other(1)).text == "Another one."
    assert len(endpoint.requests) == 2
    assert hints.events["asked before"] == 1


def test_stored_answers_outlive_the_run_and_cost_nothing(serve, tmp_path):
    endpoint = serve(reply(completion(GOOD)), reply(completion("Another one.")))
    with judge(endpoint, cache_dir=str(tmp_path)) as first:
        hint = first.generate(CONTEXT)
    with judge(endpoint, cache_dir=str(tmp_path), budget_seconds=0, budget_tokens=0) as second:
        assert second.generate(CONTEXT) == hint
        assert (second.tokens_spent, second.seconds_spent, second.events["from cache"]) == (0, 0.0, 1)
        assert second.generate(other(1)) is None
        assert second.failures == {"seconds budget spent": 1}
    with judge(endpoint, cache_dir=str(tmp_path), model="other") as third:
        assert third.generate(CONTEXT).text == "Another one."
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b'{"key": "', b"[]", b'{"answer": "Do."}', b'{"key": "KEY", "answer": 3}']
)
def test_a_damaged_stored_answer_is_counted_and_written_anew(serve, tmp_path, content):
    endpoint = serve(reply(completion(GOOD)))
    with judge(endpoint, cache_dir=str(tmp_path)) as hints:
        hints.generate(CONTEXT)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(content.replace(b"KEY", path.stem.encode()))
    with judge(endpoint, cache_dir=str(tmp_path)) as hints:
        assert hints.generate(CONTEXT).text == GOOD
        assert hints.events["cache file unreadable"] == 1
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]
    assert len(endpoint.requests) == 2


def test_a_cache_that_cannot_be_written_costs_no_hint(serve, tmp_path):
    folder = tmp_path / "answers"
    with judge(serve(reply(completion(GOOD))), cache_dir=str(folder)) as hints:
        folder.rmdir()
        assert hints.generate(CONTEXT).text == GOOD
    assert hints.events["cache file not written"] == 1


MALFORMED = {
    "nothing": (b"", "answer is not JSON"),
    "HTML": (b"<!doctype html><p>Bad gateway", "answer is not JSON"),
    "cut JSON": (completion(GOOD)[:-5], "answer is not JSON"),
    "deep JSON": (b"[" * 100_000, "answer is not JSON"),
    "a list": (b"[]", "answer is not a chat completion"),
    "no choices": (b'{"object": "chat.completion"}', "answer has no choices"),
    "empty choices": (b'{"choices": []}', "answer has no choices"),
    "odd choices": (b'{"choices": [3]}', "answer has no choices"),
    "no message": (b'{"choices": [{"text": "Look."}]}', "answer has no message"),
    "null content": (completion(None), "empty answer"),
    "list content": (completion([{"type": "text", "text": "Look."}]), "empty answer"),
    "blank content": (completion(" \n"), "empty answer"),
    "only control characters": (completion("\u200b\x00"), "empty answer"),
    "refusal field": (completion(GOOD, message={"content": GOOD, "refusal": "No."}), "answer refuses"),
    "refusal": (completion("I’m sorry, I can't help with that."), "answer refuses"),
    "cut off": (completion(GOOD, finish_reason="length"), "answer was cut off"),
    "HTML content": (completion("<html><body>Look.</body></html>"), "answer is markup"),
    "endless thinking": (completion("<think>Well, the file"), "answer is markup"),
    "fenced code": (completion("Try this:\n```\ncat notes.txt\n```"), "answer has a code block"),
    "a call": (completion('Send {"name": "open", "arguments": {"path": "a"}}.'), "answer gives a call"),
    "a tagged call": (completion("<tool_call>open a</tool_call>"), "answer gives a call"),
    "a command": (completion("Run `cat docs/notes.txt` now."), "answer gives a call"),
    "a prompt line": (completion("Like this:\n$ cat docs/notes.txt"), "answer gives a call"),
    "too long": (completion("Look at the file. " * 20), "answer too long"),
    "endless": (completion("a" * (1 << 20)), "answer too large"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_is_counted_by_reason_and_never_used_again(serve, tmp_path, name):
    body, reason = MALFORMED[name]
    endpoint = serve(reply(body), reply(completion(GOOD)))
    with judge(endpoint, cache_dir=str(tmp_path)) as hints:
        assert hints.generate(CONTEXT) is None
        assert hints.failures == {reason: 1}
        assert hints.generate(CONTEXT) is None
        assert sum(hints.failures.values()) == 2
        assert len(endpoint.requests) == 1
        assert hints.tokens_spent > 0
        assert list(tmp_path.iterdir()) == []
        assert hints.generate(other(1)).text == GOOD


def test_an_answer_may_quote_what_failed_and_think_before(serve):
    text = "<think>Hm.\n```x```</think>\nAsk why `open notes` finds\nnothing.\u202e\x00"
    with judge(serve(reply(completion(text)))) as hints:
        assert hints.generate(CONTEXT).text == "Ask why `open notes` finds nothing."


def test_a_hint_is_measured_by_the_tokenizer_where_there_is_one(serve):
    options = {"base_url": serve(reply(completion("One two three."))).url, "model": "m", "max_hint_tokens": 3}
    for count, text in ((len, None), (lambda text: len(text.split()), "One two three.")):
        hints = build_judge({**options, "api_key_env": "JUDGE_KEY"}, count_tokens=count)
        hint = hints.generate(CONTEXT)
        hints.close()
        assert (hint and hint.text) == text


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_endpoint_that_will_never_answer_is_asked_once(serve, status):
    endpoint = serve(reply(b'{"error": {"message": "no"}}', status))
    with judge(endpoint) as hints:
        assert [hints.generate(other(number)) for number in range(3)] == [None] * 3
    assert hints.failures == {f"HTTP {status}": 1, f"off after HTTP {status}": 2}
    assert len(endpoint.requests) == 1
    assert hints.tokens_spent == 0


@pytest.mark.parametrize("status", [400, 422, 307])
def test_a_status_that_no_retry_mends_is_not_retried_and_no_redirect_is_followed(serve, status):
    elsewhere = serve(reply(completion(GOOD)))
    endpoint = serve(reply(b"{}", status, Location=f"{elsewhere.url}/chat/completions"))
    with judge(endpoint) as hints:
        assert hints.generate(CONTEXT) is None
        assert hints.failures == {f"HTTP {status}": 1}
    assert (len(endpoint.requests), len(elsewhere.requests)) == (1, 0)


@pytest.mark.parametrize(("max_retries", "asked"), [(0, 1), (2, 3)])
def test_a_server_error_is_retried_so_often_and_no_more(serve, max_retries, asked):
    endpoint = serve(reply(b"oops", 500))
    with judge(endpoint, max_retries=max_retries) as hints:
        assert hints.generate(CONTEXT) is None
    assert len(endpoint.requests) == hints.events["asked"] == asked
    assert hints.failures == {"HTTP 500": 1}


def test_a_server_that_recovers_gives_its_hint(serve):
    endpoint = serve(reply(b"oops", 503), hang_up, reply(completion(GOOD)))
    with judge(endpoint) as hints:
        assert hints.generate(CONTEXT).text == GOOD
    assert len(endpoint.requests) == 3
    assert hints.failures == {}


def test_a_rate_limit_is_waited_out_as_long_as_it_says(serve):
    endpoint = serve(reply(b"{}", 429, Retry_After="0.6"), reply(completion(GOOD)))
    with judge(endpoint) as hints:
        start = time.monotonic()
        assert hints.generate(CONTEXT).text == GOOD
        assert time.monotonic() - start >= 0.6
        assert hints.seconds_spent >= 0.6


@pytest.mark.parametrize(
    "wait", ["3600", formatdate(time.time() + 3600, usegmt=True)], ids=["seconds", "date"]
)
def test_a_rate_limit_beyond_the_time_out_is_not_waited_for(serve, wait):
    endpoint = serve(reply(b"{}", 429, Retry_After=wait), reply(completion(GOOD)))
    with judge(endpoint) as hints:
        start = time.monotonic()
        assert hints.generate(CONTEXT) is None
        assert time.monotonic() - start < SLACK
    assert hints.failures == {"HTTP 429": 1}
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("wait", ["soon", "nan", "inf", "-5", formatdate(0)])
def test_an_odd_retry_after_does_no_harm(serve, wait):
    with judge(serve(reply(b"{}", 429, Retry_After=wait), reply(completion(GOOD)))) as hints:
        assert hints.generate(CONTEXT).text == GOOD


def test_a_refused_connection_is_counted(serve):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with judge(f"http://127.0.0.1:{port}/v1", max_retries=1) as hints:
        assert hints.generate(CONTEXT) is None
    assert hints.failures == {"no connection": 1}
    assert hints.events["asked"] == 2
    assert hints.tokens_spent == 0


@pytest.mark.parametrize("name", STEPS)
def test_the_time_out_holds_whatever_the_server_does(serve, name):
    with judge(serve(STEPS[name]), timeout_seconds=0.4) as hints:
        start = time.monotonic()
        assert hints.generate(CONTEXT) is None
        assert 0.4 <= time.monotonic() - start < 0.4 + SLACK
        assert hints.failures == {"timed out": 1}
        # The model may have worked all the same.
        assert hints.tokens_spent > 0


def test_the_seconds_of_all_hints_together_are_bounded(serve):
    endpoint = serve(late)
    with judge(endpoint, timeout_seconds=0.3, budget_seconds=0.5) as hints:
        start = time.monotonic()
        assert [hints.generate(other(number)) for number in range(6)] == [None] * 6
        assert time.monotonic() - start < 0.5 + SLACK
    assert hints.failures["timed out"] == len(endpoint.requests) == 2
    assert hints.failures["seconds budget spent"] == 4


def test_the_last_wait_is_cut_to_what_is_left(serve):
    with judge(serve(late), timeout_seconds=9, budget_seconds=0.3) as hints:
        start = time.monotonic()
        assert hints.generate(CONTEXT) is None
        assert time.monotonic() - start < 0.3 + SLACK


def test_an_answer_refused_for_one_task_may_serve_another_with_the_same_record(serve, tmp_path):
    endpoint = serve(reply(completion("Look into trash report.")))
    told = ErrorContext("unknown", "no", "remove report", details={"command": "trash report"})
    untold = ErrorContext("unknown", "no", "remove report")
    with judge(endpoint, cache_dir=str(tmp_path)) as hints:
        given = [hints.generate(context) is not None for context in (told, untold, told)]
    assert given == [False, True, False]
    assert len(endpoint.requests) == 1


def test_the_tokens_of_all_hints_together_are_bounded(serve):
    endpoint = serve(reply(completion(GOOD, 300)))
    with judge(endpoint, budget_tokens=1000, max_answer_tokens=100) as hints:
        given = [hints.generate(other(number)) is not None for number in range(5)]
    # A question is asked only while its prompt and the longest answer, some 350, still fit.
    assert given == [True, True, True, False, False]
    assert hints.tokens_spent == 900
    assert hints.failures == {"token budget spent": 2}
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("tokens", [None, -1, True, "9"])
def test_tokens_are_estimated_where_none_are_reported(serve, tokens):
    body = completion(GOOD, tokens)
    endpoint = serve(reply(body))
    with judge(endpoint) as hints:
        hints.generate(CONTEXT)
    prompt = sum(estimated_tokens(message["content"]) for message in endpoint.requests[0]["messages"])
    assert hints.tokens_spent == prompt + estimated_tokens(GOOD)


def test_a_server_that_never_lets_go_is_not_given_more_and_more_requests(serve):
    endpoint = serve(STEPS["slow headers"])
    with judge(endpoint, timeout_seconds=0.1) as hints:
        for number in range(6):
            assert hints.generate(other(number)) is None
        assert len(endpoint.requests) == 4
        assert hints.failures == {"timed out": 4, "too many requests still hang": 2}
        endpoint.stop.set()
        until = time.monotonic() + 5
        while hints._asker.hanging and time.monotonic() < until:
            time.sleep(0.02)
        assert hints._asker.hanging == 0


def test_a_long_context_is_cut_and_counted(serve):
    endpoint = serve(reply(completion(GOOD)))
    messages = [{"role": "user", "content": f"message {number} " + "x" * 90} for number in range(100)]
    long = ErrorContext("unknown", "It failed.", "do it", messages)
    with judge(endpoint, max_context_characters=1000) as hints:
        assert hints.generate(long) is not None
        assert hints.events["context cut"] == 1
        assert hints.generate(CONTEXT) is not None
        assert hints.events["context cut"] == 1
    record = json.loads(endpoint.requests[0]["messages"][1]["content"])
    assert len(record["conversation"]) == 1000 - len("It failed.do it")
    assert "message 99" in record["conversation"]
    assert "message 0 " not in record["conversation"]
    assert (record["failed_call"], record["result"]) == ("do it", "It failed.")


def test_in_layers_the_judge_is_asked_where_no_rule_answers_and_templates_stand_behind_it(serve):
    endpoint = serve(reply(completion(GOOD)), reply(b"oops", 400))
    named = ErrorContext("missing_file", "cat: a.py: No such file or directory", "")
    with judge(endpoint) as asked:
        layered = default_layered(asked)
        hook = layered.as_collator_hook()
        sources = [hook(context).source for context in (named, CONTEXT, other(1))]
    assert sources == ["rule/missing_path", "judge/missing_file", "template/missing_file"]
    assert layered.answered == dict.fromkeys(sources, 1)
    assert layered.failures == {("judge", "HTTP 400"): 1}


def test_a_plain_client_and_a_model_make_a_judge_too(serve):
    import openai

    endpoint = serve(reply(completion(GOOD)))
    with openai.OpenAI(base_url=endpoint.url, api_key="x") as client:
        hints = default_layered(client, model="small", timeout_seconds=5)
        assert hints.generate(CONTEXT).source == "judge/missing_file"
    (layer,) = [layer for name, layer in hints.layers if name == "judge"]
    assert isinstance(layer, JudgeHints)
    assert layer.timeout_seconds == 5
