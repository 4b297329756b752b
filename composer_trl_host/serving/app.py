"""The ASGI application: who may ask, what is read, and what becomes of a request whose client leaves."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from composer_trl_host.serving.batching import BatchQueue, Ticket
from composer_trl_host.serving.protocol import (
    Completion,
    Limits,
    RequestError,
    completion_body,
    error_body,
    models_body,
    read_request,
)

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

GENERATE_PATH = "/inference/v1/generate"
MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
_METHODS = {GENERATE_PATH: "POST", MODELS_PATH: "GET", HEALTH_PATH: "GET"}

CLIENT_LEFT = 499
"""The status in the log of a request whose client left; nobody receives it."""


class TokenApp:
    """``POST /inference/v1/generate``, ``GET /v1/models`` and ``GET /health`` (without a key).

    ``body_bytes``: the largest body (413 above it). ``body_seconds``: how long one may take to arrive,
    ``request_seconds``: how long its turn may take after that (408 each).
    """

    def __init__(
        self,
        queue: BatchQueue,
        limits: Limits,
        key: str,
        *,
        body_bytes: int = 2**24,
        body_seconds: float = 30.0,
        request_seconds: float | None = 600.0,
    ) -> None:
        self.queue = queue
        self.limits = limits
        self.body_bytes = body_bytes
        self.body_seconds = body_seconds
        self.request_seconds = request_seconds
        self._authorization = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the token endpoint speaks http; found {scope['type']}")
        try:
            body = await self._answer(scope, receive)
            status = 200
        except RequestError as error:
            status, body = error.status, error_body(error.status, error.message)
        except Exception:
            logger.exception("the token endpoint failed")
            status, body = 500, error_body(500, "the server failed; its log says why")
        if status == CLIENT_LEFT:
            logger.debug("%s: the client left", scope["path"])
            return
        await _send_json(send, status, body)

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        path = scope["path"]
        method = _METHODS.get(path)
        if method is None:
            raise RequestError(404, f"the path must be one of {', '.join(_METHODS)}; found {path}")
        if path == HEALTH_PATH and scope["method"] == "GET":
            return {}
        self._check_key(scope)
        if scope["method"] != method:
            raise RequestError(405, f"{path} takes {method}; found {scope['method']}")
        if path == MODELS_PATH:
            return models_body(self.limits)
        try:
            async with asyncio.timeout(self.body_seconds):
                body = await self._body(scope, receive)
        except TimeoutError as error:
            raise RequestError(
                408, f"the body must arrive within {self.body_seconds:g} s; it did not"
            ) from error
        return await self._generate(body, receive)

    def _check_key(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._authorization):
            raise RequestError(
                401, "the header Authorization must be Bearer and this server's key; it is not"
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(said) > self.body_bytes:
            raise self._too_large()
        parts = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(CLIENT_LEFT, "the client left")
            parts += message.get("body", b"")
            if len(parts) > self.body_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(parts)

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the body must be at most {self.body_bytes} bytes; it is larger")

    async def _generate(self, body: bytes, receive: Receive) -> dict[str, Any]:
        request = read_request(body, self.limits)
        seconds = self.request_seconds
        ticket = Ticket(
            request.token_ids, request.sampling, None if seconds is None else time.monotonic() + seconds
        )
        self.queue.submit(ticket)
        answer = asyncio.wrap_future(ticket.future)
        answer.add_done_callback(_retrieve)
        left = asyncio.ensure_future(_disconnected(receive))
        either: set[asyncio.Future[Any]] = {answer, left}
        try:
            done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer in done:
                return completion_body(request.request_id, answer.result())
            if left in done:
                raise RequestError(CLIENT_LEFT, "the client left")
            raise RequestError(408, f"the turn must be sampled within {seconds:g} s; it was not")
        finally:
            # The generator looks at this before it takes the request and between tokens.
            ticket.drop()
            left.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _retrieve(answer: asyncio.Future[Completion]) -> None:
    """Mark an answer's error as seen: where the client left, nobody else looks at it."""
    if not answer.cancelled():
        answer.exception()


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status in (408, 413):
        # What the client still sends of this body is no new request.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
