"""Success on held-out rows, without hints and with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from composer_trl_host.rollout import Generate, Rollout, RolloutRunner


@dataclass(frozen=True)
class Evaluation:
    """Counts over held-out episodes. ``failed``: episodes with an error that the model could answer;
    ``recovered``: those of them that ended solved. ``hinted_*``: the same with the hint in the
    model's own context, which is the teacher's success."""

    episodes: int
    first_try: int
    failed: int
    recovered: int
    reward: float
    hinted_failed: int
    hinted_recovered: int

    @property
    def recovery_rate(self) -> float | None:
        """Recovered over failed; None where nothing failed."""
        return self.recovered / self.failed if self.failed else None

    def as_metrics(self) -> dict[str, float]:
        """The counts under ``heldout/``."""
        return {f"heldout/{name}": value for name, value in asdict(self).items()}


def evaluate(
    runner: RolloutRunner, rows: Sequence[Mapping[str, Any]], generate: Generate, seed: int
) -> Evaluation:
    """Play ``rows`` without hints and again with them, from one seed, leaving the random state as it was."""
    dropped = runner.dropped.copy()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(seed)
        plain = runner.play(rows, generate)
        torch.manual_seed(seed)
        hinted = runner.play(rows, generate, show_hints=True)
    runner.dropped = dropped
    return Evaluation(
        episodes=len(plain),
        first_try=sum(rollout.solved and not rollout.errors for rollout in plain),
        failed=_failed(plain),
        recovered=_recovered(plain),
        reward=sum(rollout.reward for rollout in plain) / max(len(plain), 1),
        hinted_failed=_failed(hinted),
        hinted_recovered=_recovered(hinted),
    )


def _failed(rollouts: list[Rollout]) -> int:
    return sum(rollout.errors > 0 for rollout in rollouts)


def _recovered(rollouts: list[Rollout]) -> int:
    return sum(rollout.errors > 0 and rollout.solved for rollout in rollouts)
