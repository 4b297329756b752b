"""The queue between connections and the one thread that generates.

Requests that wait when the generator becomes free are one batch. A batch also waits a little for more,
since a batch of eight costs far less than eight turns: rollouts that step together ask together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from composer_trl_host.serving.protocol import Completion, RequestError, Sampling, check_completions

Generate = Callable[[Sequence["Ticket"]], Sequence[Completion | None]]
"""One turn per ticket, in order; None for a ticket that is no longer ``alive``."""


@dataclass(eq=False)
class Ticket:
    """One request on its way. ``deadline``: on ``time.monotonic``'s clock, None without a limit of time."""

    token_ids: list[int]
    sampling: Sampling
    deadline: float | None = None
    future: Future[Completion] = field(default_factory=Future)
    _dropped: threading.Event = field(default_factory=threading.Event)

    def drop(self) -> None:
        """Nobody waits for the answer any more."""
        self._dropped.set()

    @property
    def alive(self) -> bool:
        """Whether somebody still waits and there is time."""
        return not self._dropped.is_set() and not self.late

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline


class BatchQueue:
    """Tickets in, batches out.

    ``window``: seconds without a new request after which a batch is closed, ``patience``: the most seconds
    it waits, ``max_batch``: its most requests, ``max_padded_tokens``: its most tokens once every row is as
    long as the longest can get. ``expected`` may say how many requests can be on their way at most: a batch
    that holds as many does not wait, and until then it waits for ``patience``, or for as long as the last
    batch took where that is longer.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        max_batch: int = 64,
        max_padded_tokens: int = 2**17,
        window: float = 0.02,
        patience: float = 0.5,
        expected: Callable[[], int] | None = None,
    ) -> None:
        self.generate = generate
        self.max_batch = max_batch
        self.max_padded_tokens = max_padded_tokens
        self.window = window
        self.patience = patience
        self.expected = expected
        self.batches = 0
        self.requests = 0
        self._waiting: list[Ticket] = []
        self._changed = threading.Condition()
        self._newest = 0.0
        self._last_seconds = 0.0
        self._closed: str | None = None

    def submit(self, ticket: Ticket) -> None:
        """Put a ticket in. Raises ``RequestError`` (503) once the queue is closed."""
        with self._changed:
            if self._closed is not None:
                raise RequestError(503, self._closed)
            self._waiting.append(ticket)
            self._newest = time.monotonic()
            self._changed.notify_all()

    def wake(self) -> None:
        """Let ``run_once`` return early: whoever called it has something else to do."""
        with self._changed:
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Answer what waits with 503 and take nothing more."""
        with self._changed:
            self._closed = reason
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for ticket in waiting:
            ticket.future.set_exception(RequestError(503, reason))

    def run_once(self, timeout: float) -> bool:
        """Generate one batch in the calling thread; False where nothing came within ``timeout`` seconds.

        What the generator raises goes to every request of the batch and to the caller.
        """
        batch = self._next_batch(timeout)
        if not batch:
            return False
        self.batches += 1
        self.requests += len(batch)
        begin = time.monotonic()
        try:
            completions = self.generate(batch)
            check_completions(completions, len(batch))
        except BaseException as error:
            for ticket in batch:
                ticket.future.set_exception(RequestError(500, f"generation failed: {type(error).__name__}"))
            raise
        self._last_seconds = time.monotonic() - begin
        for ticket, completion in zip(batch, completions, strict=True):
            if completion is None:
                ticket.future.set_exception(_given_up(ticket))
            else:
                ticket.future.set_result(completion)
        return True

    def _next_batch(self, timeout: float) -> list[Ticket]:
        with self._changed:
            if not self._waiting and self._closed is None:
                self._changed.wait(timeout)
            if not self._waiting:
                return []
            first = time.monotonic()
            while self._closed is None and len(self._waiting) < self._enough():
                now = time.monotonic()
                left = self._closing(first) - now
                if left <= 0:
                    break
                self._changed.wait(left)
            self._forget_dead()
            batch = self._fitting(self._waiting)
            self._waiting = self._waiting[len(batch) :]
            return batch

    def _closing(self, first: float) -> float:
        """When a batch that began to form at ``first`` is closed, full or not."""
        if self.expected is not None:
            return first + max(self.patience, self._last_seconds)
        return min(self._newest + self.window, first + self.patience)

    def _enough(self) -> int:
        expected = self.max_batch if self.expected is None else self.expected()
        return max(1, min(self.max_batch, expected))

    def _forget_dead(self) -> None:
        alive = []
        for ticket in self._waiting:
            if ticket.alive:
                alive.append(ticket)
            else:
                ticket.future.set_exception(_given_up(ticket))
        self._waiting = alive

    def _fitting(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """The longest beginning of ``tickets`` that fits the limits, at least one."""
        longest = 0
        for count, ticket in enumerate(tickets[: self.max_batch]):
            longest = max(longest, len(ticket.token_ids) + ticket.sampling.max_tokens)
            if count and longest * (count + 1) > self.max_padded_tokens:
                return list(tickets[:count])
        return list(tickets[: self.max_batch])


def _given_up(ticket: Ticket) -> RequestError:
    if ticket.late:
        return RequestError(
            408, "the turn took longer than this server's limit of time; raise request_seconds"
        )
    return RequestError(499, "the client went away")
