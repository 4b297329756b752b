"""What an environment's code may do to the loop that all environments share. No verifiers is needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from composer_prime_plugin.errors import TaskError
from composer_trl_host.serving.protocol import Limits
from composer_trl_host.verifiers_env import runner as runner_module
from composer_trl_host.verifiers_env import session
from composer_trl_host.verifiers_env.runner import Policy, Stage, VerifiersRunner

# Without the fixes that are tested here nothing ever ends.
pytestmark = pytest.mark.timeout(30)

Work = Callable[[], Awaitable[Any]]


class FakeEnvironment:
    """A task is what its episode does."""

    def __init__(self, start: Work | None = None) -> None:
        self.start = start

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if self.start is not None:
            await self.start()
        yield

    def slots(self, task: Work) -> list[Work]:
        return [task]

    async def run_slot(self, slot: Work, context: Any) -> Any:
        return await slot()


def play(work: Sequence[Work], start: Work | None = None) -> list[Any]:
    stage = Stage("shell", FakeEnvironment(start), work, None)  # type: ignore[arg-type]
    runner = VerifiersRunner([stage], Policy(Limits("policy", 8, 8), "", None, {}), 1)
    runner._contexts = lambda count, sampling: [None] * count  # type: ignore[method-assign]
    try:
        return runner.episodes([(stage, task) for task in work])
    finally:
        if session.LOOP.alive:
            stage.session.close()


async def fine() -> str:
    return "fine"


async def leave() -> None:
    raise SystemExit(3)


async def interrupt() -> None:
    raise KeyboardInterrupt


async def leave_in_a_task() -> None:
    await asyncio.create_task(leave())


async def leave_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(leave())
        group.create_task(asyncio.sleep(60))


async def end_cancelled() -> None:
    raise asyncio.CancelledError


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def forever() -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("work", "found"),
    [
        (leave, r"SystemExit\(3\)"),
        (interrupt, r"KeyboardInterrupt\(\)"),
        (leave_in_a_task, r"SystemExit\(3\)"),
        (leave_in_a_group, r"SystemExit\(3\)"),
        (end_cancelled, r"CancelledError\("),
        (cancel_itself, r"CancelledError\("),
    ],
)
def test_an_episode_that_leaves_or_is_cancelled_ends_the_batch_by_its_name(work: Work, found: str) -> None:
    beside = [] if work is cancel_itself else [forever]
    with pytest.raises(TaskError, match=rf"shell: an episode must not fail outside itself; .*{found}"):
        play([fine, work, *beside])
    # The loop goes on for the others.
    assert play([fine, fine]) == ["fine", "fine"]


@pytest.mark.parametrize("start", [leave, interrupt, leave_in_a_task, end_cancelled, cancel_itself])
def test_a_start_that_leaves_or_is_cancelled_is_a_failed_start(start: Work) -> None:
    with pytest.raises(TaskError, match=r"shell: the environment must start; it failed with RuntimeError"):
        play([fine], start)
    assert play([fine]) == ["fine"]


def test_nobody_waits_for_a_loop_whose_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def run(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_until_complete(loop.run_in_executor(None, ended.wait))

    async def end_the_thread() -> None:
        ended.set()
        await asyncio.sleep(3600)

    loop = session._Loop()
    monkeypatch.setattr(session, "_run", run)
    monkeypatch.setattr(session, "LOOP", loop)
    monkeypatch.setattr(runner_module, "LOOP", loop)
    with pytest.raises(TaskError, match="shell: the event loop of the environments must run; its thread"):
        play([end_the_thread])
    assert loop.loop is not None
    left = asyncio.all_tasks(loop.loop)
    for task in left:
        task.cancel()
    loop.loop.run_until_complete(asyncio.wait(left))
    loop.loop.run_until_complete(loop.loop.shutdown_default_executor())
    loop.loop.close()
