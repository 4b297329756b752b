"""The server's thread: a free port of 127.0.0.1, a random key, an end that leaves nothing behind."""

from __future__ import annotations

import secrets
import socket
import threading
from types import TracebackType
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.serving.app import TokenApp
from composer_trl_host.serving.batching import BatchQueue
from composer_trl_host.serving.protocol import Limits

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


class TokenServer:
    """Serves a queue from a thread of its own, as a context manager.

    ``base_url`` (ending in ``/v1``) and ``key`` are what a client needs. Requests wait until somebody calls
    ``queue.run_once``. Closing answers what waits with 503, and joins the thread.
    """

    def __init__(self, queue: BatchQueue, limits: Limits, **options: Any) -> None:
        self.queue = queue
        self.limits = limits
        self.key = secrets.token_urlsafe(32)
        self.app = TokenApp(queue, limits, self.key, **options)
        self.port = 0
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    @property
    def base_url(self) -> str:
        """Where an OpenAI-style client is pointed to."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> TokenServer:
        """Bind, serve and wait until the server answers."""
        try:
            import uvicorn
        except ImportError as error:
            raise ConfigError(
                "the token endpoint needs uvicorn; found none; pip install 'composer-rl[verifiers]'"
            ) from error
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="token-endpoint", daemon=True)
        self._thread.start()
        waited = threading.Event()
        for _ in range(int(_START_SECONDS / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            waited.wait(0.01)
        if not self._server.started:
            self.close()
            raise RuntimeError(f"the token endpoint must start within {_START_SECONDS:g} s; it did not")
        return self

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self, reason: str = "the server is shutting down") -> None:
        """Stop serving. Raises ``RuntimeError`` where the thread does not end."""
        self.queue.close(reason)
        if self._server is not None:
            self._server.should_exit = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                raise RuntimeError(f"the token endpoint must stop within {_STOP_SECONDS:g} s; it did not")
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> TokenServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
