"""Plays a batch of an environment's tasks against the live weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_prime_plugin.errors import ComposerError, TaskError
from composer_trl_host.rollout import Rollout
from composer_trl_host.serving import BatchQueue, Completion, Ticket, TokenServer
from composer_trl_host.serving.protocol import Limits
from composer_trl_host.verifiers_env.conversion import Converter
from composer_trl_host.verifiers_env.session import EnvSession

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


class VerifiersRunner:
    """The rollouts of a verifiers environment, in the shape of ``RolloutRunner.play``.

    The episodes of a batch run at once, in a thread; their turns are sampled in the thread that calls
    ``play``, by ``generate``, as batches. The servers start with the first batch and end with ``close``.
    """

    def __init__(
        self,
        environment: Any,
        tasks: Sequence[Any],
        converter: Converter,
        policy: Policy,
        group_size: int,
        generate: Callable[[Sequence[Ticket]], Sequence[Completion | None]] | None = None,
    ) -> None:
        self.environment = environment
        self.tasks = tasks
        self.converter = converter
        self.policy = policy
        self.group_size = group_size
        self.generate = generate
        """Set before the first batch: it needs the trainer's model, and the trainer needs the runner."""
        self.on_generation_error: Callable[[list[list[int]]], None] | None = None
        """Called with the contexts of a batch that could not be sampled; it may raise what explains it."""
        self._running = 0
        self.queue = BatchQueue(self._generate, expected=lambda: self._running)
        self.server = TokenServer(self.queue, policy.limits)
        self.session = EnvSession(environment)
        self._started = False

    @property
    def dropped(self) -> Counter[str]:
        """Rollouts, branches and error sites that train nothing, by reason."""
        return self.converter.dropped

    @dropped.setter
    def dropped(self, counts: Counter[str]) -> None:
        self.converter.dropped = counts

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
        self._start()
        self._running = len(rows)
        playing = self.session.play(
            [self.tasks[row["task"]] for row in rows], self._contexts(len(rows)), self._one_less
        )
        playing.add_done_callback(lambda _: self.queue.wake())
        try:
            while not playing.done():
                self.queue.run_once(_POLL_SECONDS)
            episodes = playing.result()
        except BaseExceptionGroup as group:
            raise TaskError(
                f"an episode must not fail outside itself; it failed with {group.exceptions[0]!r}"
            ) from group
        finally:
            playing.cancel()
        return self.converter.rollouts(episodes, rows, self.group_size)

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

    def _contexts(self, count: int) -> list[Any]:
        """One per rollout, each with its own seed, drawn from the random state that checkpoints keep."""
        import verifiers.v1 as vf

        client = vf.TrainClientConfig(
            base_url=self.server.base_url,
            api_key_var=self._key_name,
            renderer=self.policy.renderer,
            renderer_model_name=self.policy.tokenizer,
        )
        seeds = torch.randint(2**53, (count,)).tolist()
        return [
            vf.ModelContext(
                model=self.policy.limits.model,
                client=client,
                sampling=vf.SamplingConfig(**self.policy.sampling, seed=seed),
            )
            for seed in seeds
        ]

    @property
    def _key_name(self) -> str:
        # verifiers keeps variables with API_KEY in their name from the programs that it starts.
        return f"COMPOSER_RL_API_KEY_{self.server.port}"

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self.server.start()
        os.environ[self._key_name] = self.server.key
        self.session.start()

    def close(self) -> None:
        """Stop the environment's servers and the token endpoint. Nothing can be played afterwards."""
        if not self._started:
            return
        os.environ.pop(self._key_name, None)
        try:
            self.session.close()
        finally:
            self.server.close()
