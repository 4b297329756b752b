"""Running environments: verifiers' own servers and rollouts, in one event loop of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from composer_prime_plugin.errors import TaskError

_START_SECONDS = 300.0
_STOP_SECONDS = 30.0


class _Loop:
    """The one loop of a process. verifiers and renderers keep clients and locks per process, and those serve the
    loop that first waited for them: an environment in a loop of its own would fail now and then."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run ``work`` in the loop, which starts with the first call."""
        with self._starting:
            if self.loop is None or not self.alive:
                self.loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self.loop,), name="verifiers", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    @property
    def alive(self) -> bool:
        """Whether anything runs in the loop: once its thread has ended, no future of it is ever done."""
        return self._thread is not None and self._thread.is_alive()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` for ever. asyncio lets these two end it, whichever task they are raised in; whoever waits for that
    task has them too."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue


LOOP = _Loop()


@contextmanager
def _as_errors() -> Iterator[None]:
    """Make an ordinary error of what an environment's code raises past verifiers, which catches ``Exception``."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(repr(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(repr(error)) from error


class EnvSession:
    """Keeps one environment serving (its shared tool servers, its interception) between batches."""

    def __init__(self, environment: Any, name: str) -> None:
        self.environment = environment
        self.name = name
        self._end: asyncio.Event | None = None
        self._serving: Future[None] | None = None

    def start(self) -> None:
        """Start the environment's servers and wait for them. Raises ``TaskError`` where they fail."""
        ready: Future[None] = Future()
        self._serving = LOOP.submit(self._serve(ready))
        try:
            ready.result(_START_SECONDS)
        except TimeoutError as error:
            self._serving.cancel()
            raise TaskError(
                f"{self.name}: the environment must start within {_START_SECONDS:g} s; it did not; mend its start() or its tool servers"
            ) from error
        except Exception as error:
            raise TaskError(
                f"{self.name}: the environment must start; it failed with {error!r}; mend it"
            ) from error

    async def _serve(self, ready: Future[None]) -> None:
        self._end = asyncio.Event()
        try:
            with _as_errors():
                async with self.environment.serving():
                    ready.set_result(None)
                    await self._end.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def play(
        self, tasks: Sequence[Any], contexts: Sequence[Any], finished: Callable[[], None]
    ) -> Future[list[Any]]:
        """Play one episode per task, all at once. ``finished`` is called as each ends, in the loop's thread.

        An episode that fails is an episode with errors; cancelling the future stops all of them.
        """
        return LOOP.submit(self._play(tasks, contexts, finished))

    async def _play(
        self, tasks: Sequence[Any], contexts: Sequence[Any], finished: Callable[[], None]
    ) -> list[Any]:
        async def one(task: Any, context: Any) -> Any:
            try:
                with _as_errors():
                    return await self.environment.run_slot(self.environment.slots(task)[0], context)
            finally:
                finished()

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(*pair)) for pair in zip(tasks, contexts, strict=True)]
        return [task.result() for task in running]

    def close(self) -> None:
        """Stop the servers and wait until they have stopped."""
        serving, self._serving = self._serving, None
        if serving is None or self._end is None or LOOP.loop is None or serving.cancelled():
            return
        LOOP.loop.call_soon_threadsafe(self._end.set)
        try:
            serving.result(_STOP_SECONDS)
        except TimeoutError as error:
            serving.cancel()
            raise TaskError(
                f"{self.name}: the environment must stop within {_STOP_SECONDS:g} s; it did not; mend its stop()"
            ) from error
        except Exception as error:
            raise TaskError(
                f"{self.name}: the environment must stop; it failed with {error!r}; mend it"
            ) from error
