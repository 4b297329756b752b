"""Success on held-out rows: first tries, and recoveries from one fixed set of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from composer_trl_host.rollout import Generate, Player, Rollout


@dataclass(frozen=True)
class Evaluation:
    """Counts over held-out episodes.

    ``episodes`` rows were played as they come: ``first_try`` were solved without an error,
    ``failed`` met an error that the model could answer, ``recovered`` of those ended solved.

    A better policy fails less often and on harder rows, so recoveries are also counted from a set
    of errors that stays the same over a run: ``replayed`` failed turns of the first evaluation are
    given to the model as its own, and it samples what follows. ``replay_recovered`` ended solved
    without a hint, ``hinted_recovered`` with the hint in the model's own context, which is the
    teacher's success.
    """

    episodes: int
    first_try: int
    failed: int
    recovered: int
    reward: float
    replayed: int
    replay_recovered: int
    hinted_recovered: int

    def as_metrics(self) -> dict[str, float]:
        """The counts under ``heldout/``."""
        return {f"heldout/{name}": value for name, value in asdict(self).items()}


class Evaluator:
    """Plays the same held-out rows again and again; the first time decides which errors are replayed."""

    def __init__(self, runner: Player, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
        self.runner = runner
        self.rows = rows
        self.seed = seed
        self._replay: tuple[list[Mapping[str, Any]], list[list[list[int]]]] | None = None

    def evaluate(self, generate: Generate) -> Evaluation:
        """Play the rows from one seed, leaving the random state and the runner's counts as they were."""
        dropped = self.runner.dropped.copy()
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            plain = self._play(self.rows, generate)
            if self._replay is None:
                failed = [
                    (row, rollout) for row, rollout in zip(self.rows, plain, strict=True) if rollout.errors
                ]
                self._replay = [row for row, _ in failed], [r.up_to_first_error() for _, r in failed]
            rows, given = self._replay
            replayed = self._play(rows, generate, given=given)
            hinted = self._play(rows, generate, given=given, show_hints=True)
        self.runner.dropped = dropped
        return Evaluation(
            episodes=len(plain),
            first_try=sum(rollout.solved and not rollout.errors for rollout in plain),
            failed=sum(rollout.errors > 0 for rollout in plain),
            recovered=sum(rollout.errors > 0 and rollout.solved for rollout in plain),
            reward=sum(rollout.reward for rollout in plain) / max(len(plain), 1),
            replayed=len(rows),
            replay_recovered=sum(rollout.solved for rollout in replayed),
            hinted_recovered=sum(rollout.solved for rollout in hinted),
        )

    def _play(self, rows: Sequence[Mapping[str, Any]], generate: Generate, **how: Any) -> list[Rollout]:
        torch.manual_seed(self.seed)
        return self.runner.play(rows, generate, **how)
