"""Plays a batch of tasks of one or several environments against the live weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from composer_prime_plugin.errors import ComposerError, TaskError
from composer_trl_host.rollout import Rollout
from composer_trl_host.serving import BatchQueue, Completion, Ticket, TokenServer
from composer_trl_host.serving.protocol import Limits
from composer_trl_host.verifiers_env.conversion import Converter, first_error, with_stand_ins
from composer_trl_host.verifiers_env.session import LOOP, EnvSession

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Policy:
    """What the environment's client is told about the policy.

    ``tokenizer``: the folder or hub name that the renderer loads. ``renderer``: its configuration, None for
    the one that belongs to that name. ``sampling``: ``temperature``, ``top_p``, ``max_tokens`` and so on.
    """

    limits: Limits
    tokenizer: str
    renderer: Any
    sampling: Mapping[str, Any]


@dataclass
class Stage:
    """One environment: its ``tasks``, which rows name by number, and what makes rollouts of its episodes. Its
    servers start with the first of them that is played."""

    name: str
    environment: Any
    tasks: Sequence[Any]
    converter: Converter
    session: EnvSession = field(init=False)
    started: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.session = EnvSession(self.environment, self.name)


Job = tuple[Stage, Any]
"""An environment and the task of it that is played."""


class VerifiersRunner:
    """The rollouts of environments of verifiers, in the shape of ``RolloutRunner.play``.

    A row is ``{"source": number of a stage, absent: 0, "task": number of its task}``. The episodes of a batch
    run at once, in an event loop of their own thread; their turns are sampled in the thread that calls
    ``play``, by ``generate``, as batches over all environments. Servers end with ``close``.

    ``remote``: the root address of a server that samples instead. Nothing here gives it weights: whoever calls
    ``play`` sees to that before.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        policy: Policy,
        group_size: int,
        generate: Callable[[Sequence[Ticket]], Sequence[Completion | None]] | None = None,
        remote: str | None = None,
    ) -> None:
        self.stages = stages
        self.policy = policy
        self.group_size = group_size
        self.remote = remote
        self.generate = generate
        """Set before the first batch: it needs the trainer's model, and the trainer needs the runner."""
        self.on_generation_error: Callable[[list[list[int]]], None] | None = None
        """Called with the contexts of a batch that could not be sampled; it may raise what explains it."""
        self.on_played: Callable[[Sequence[tuple[str, Rollout | None]]], None] | None = None
        """Called with each rollout of a batch and its environment's name; None for an episode that failed."""
        self.dropped: Counter[str] = Counter()
        """Rollouts, branches and error sites that train nothing, by reason."""
        self._running = 0
        self.queue = BatchQueue(self._generate, expected=lambda: self._running)
        self.server = TokenServer(self.queue, policy.limits)
        self._serving = False
        self._open: list[Stage] = []

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        generate: Any = None,
        show_hints: bool = False,
        given: Any = None,
    ) -> list[Rollout]:
        """Play each row's task once. ``generate`` is not called: turns come from the token endpoint."""
        if show_hints or given is not None:
            raise TaskError(
                "episodes of verifiers must be sampled whole; found show_hints or given turns; leave both out"
            )
        stages = [self.stages[row.get("source", 0)] for row in rows]
        episodes = self.episodes(
            [(stage, stage.tasks[row["task"]]) for stage, row in zip(stages, rows, strict=True)]
        )
        found = [
            stage.converter.rollout(episode, row)
            for stage, episode, row in zip(stages, episodes, rows, strict=True)
        ]
        self.dropped = self._dropped()
        rollouts = with_stand_ins(
            found, rows, self.group_size, lambda: f"{stages[0].name}: {first_error(episodes[0])}"
        )
        if self.on_played is not None:
            self.on_played([(stage.name, rollout) for stage, rollout in zip(stages, found, strict=True)])
        return rollouts

    def episodes(self, jobs: Sequence[Job], sampling: Mapping[str, Any] | None = None) -> list[Any]:
        """One finished episode per job, in order. ``sampling`` is laid over the policy's.

        An episode that fails is an episode with errors. Raises ``TaskError`` that names the environment for
        one that cannot start or fails outside its episodes.
        """
        contexts = self._contexts(len(jobs), sampling or {})
        places: dict[int, list[int]] = {}
        for place, (stage, _) in enumerate(jobs):
            places.setdefault(id(stage), []).append(place)
        for numbers in places.values():
            self._start(jobs[numbers[0]][0])
        self._running = len(jobs)
        playing: list[tuple[Stage, list[int], Future[list[Any]]]] = []
        try:
            for numbers in places.values():
                stage = jobs[numbers[0]][0]
                future = stage.session.play(
                    [jobs[n][1] for n in numbers], [contexts[n] for n in numbers], self._one_less
                )
                future.add_done_callback(lambda _: self.queue.wake())
                playing.append((stage, numbers, future))
            futures = [future for _, _, future in playing]
            while not _over(futures):
                if not LOOP.alive:
                    raise TaskError(
                        f"{playing[0][0].name}: the event loop of the environments must run; its thread has ended; mend what stopped it"
                    )
                if self.remote is None:
                    self.queue.run_once(_POLL_SECONDS)
                else:
                    wait(futures, _POLL_SECONDS, FIRST_EXCEPTION)
            found: list[Any] = [None] * len(jobs)
            for stage, numbers, future in sorted(playing, key=lambda item: not _failed(item[2])):
                for place, episode in zip(numbers, _result(stage, future), strict=True):
                    found[place] = episode
        finally:
            for _, _, future in playing:
                future.cancel()
        return found

    def _dropped(self) -> Counter[str]:
        several = len(self.stages) > 1
        return Counter(
            {
                f"{stage.name}: {reason}" if several else reason: count
                for stage in self.stages
                for reason, count in stage.converter.dropped.items()
            }
        )

    def _one_less(self) -> None:
        self._running -= 1
        self.queue.wake()

    def _generate(self, tickets: Sequence[Ticket]) -> Sequence[Completion | None]:
        if self.generate is None:
            raise TaskError("the runner must be given generate before it plays; found none")
        try:
            return self.generate(tickets)
        except ComposerError:
            raise
        except RuntimeError:
            if self.on_generation_error is not None:
                self.on_generation_error([ticket.token_ids for ticket in tickets])
            raise

    def _contexts(self, count: int, sampling: Mapping[str, Any]) -> list[Any]:
        """One per rollout, each with its own seed, drawn from the random state that checkpoints keep."""
        import verifiers.v1 as vf

        self._serve()
        client = vf.TrainClientConfig(
            base_url=self.server.base_url if self.remote is None else f"{self.remote}/v1",
            api_key_var=self._key_name,
            renderer=self.policy.renderer,
            renderer_model_name=self.policy.tokenizer,
        )
        merged = {**self.policy.sampling, **sampling}
        seeds = torch.randint(2**53, (count,)).tolist()
        return [
            vf.ModelContext(
                model=self.policy.limits.model,
                client=client,
                sampling=vf.SamplingConfig(**merged, seed=seed),
            )
            for seed in seeds
        ]

    @property
    def _key_name(self) -> str:
        # verifiers keeps variables with API_KEY in their name from the programs that it starts.
        return f"COMPOSER_RL_API_KEY_{self.server.port}"

    def _serve(self) -> None:
        if self._serving:
            return
        self._serving = True
        if self.remote is not None:
            return
        self.server.start()
        os.environ[self._key_name] = self.server.key

    def _start(self, stage: Stage) -> None:
        if stage.started:
            return
        stage.started = True
        self._open.append(stage)
        stage.session.start()

    def close(self) -> None:
        """Stop the environments' servers and the token endpoint. Nothing can be played afterwards."""
        if not self._serving:
            return
        self._serving = False
        os.environ.pop(self._key_name, None)
        try:
            _close_all(self._open)
        finally:
            self.server.close()


def _close_all(stages: list[Stage]) -> None:
    """Close every environment, also behind one that fails; the first failure is raised."""
    if not stages:
        return
    stage = stages.pop()
    try:
        stage.session.close()
    finally:
        _close_all(stages)


def _failed(future: Future[list[Any]]) -> bool:
    """Also by a cancellation: nobody else cancels it while it is waited for."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def _over(futures: Sequence[Future[list[Any]]]) -> bool:
    """Whether all are done, or one has failed, for whose error nobody should wait."""
    return all(future.done() for future in futures) or any(map(_failed, futures))


def _result(stage: Stage, future: Future[list[Any]]) -> list[Any]:
    try:
        return future.result()
    except (Exception, BaseExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        raise TaskError(
            f"{stage.name}: an episode must not fail outside itself; it failed with {first!r}; mend the environment"
        ) from error
