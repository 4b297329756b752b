"""A running environment: verifiers' own servers and rollouts, in an event loop of their own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from composer_prime_plugin.errors import TaskError

_START_SECONDS = 300.0
_STOP_SECONDS = 30.0


class EnvSession:
    """Keeps one environment serving (its shared tool servers, its interception) between batches."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Event | None = None
        self._ready: Future[None] = Future()

    def start(self) -> None:
        """Start the environment's servers and wait for them. Raises ``TaskError`` where they fail."""
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()
        try:
            self._ready.result(_START_SECONDS)
        except TimeoutError as error:
            raise TaskError(f"the environment must start within {_START_SECONDS:g} s; it did not") from error
        except Exception as error:
            raise TaskError(f"the environment must start; it failed with {error!r}; mend it") from error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self.environment.serving():
            self._ready.set_result(None)
            await self._end.wait()

    def play(
        self, tasks: Sequence[Any], contexts: Sequence[Any], finished: Callable[[], None]
    ) -> Future[list[Any]]:
        """Play one episode per task, all at once. ``finished`` is called as each ends, in the loop's thread.

        An episode that fails is an episode with errors; cancelling the future stops all of them.
        """
        return self._submit(self._play(tasks, contexts, finished))

    async def _play(
        self, tasks: Sequence[Any], contexts: Sequence[Any], finished: Callable[[], None]
    ) -> list[Any]:
        async def one(task: Any, context: Any) -> Any:
            try:
                return await self.environment.run_slot(self.environment.slots(task)[0], context)
            finally:
                finished()

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(*pair)) for pair in zip(tasks, contexts, strict=True)]
        return [task.result() for task in running]

    def _submit(self, work: Coroutine[Any, Any, list[Any]]) -> Future[list[Any]]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the servers and join the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._end is not None and thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            raise TaskError(
                f"the environment must stop within {_STOP_SECONDS:g} s; it did not; mend its stop()"
            )
