"""Evaluation on environments that are not trained on: before training, every so many steps, and at its end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from composer_trl_host.verifiers_env.conversion import first_error
from composer_trl_host.verifiers_env.runner import Stage, VerifiersRunner


@dataclass(frozen=True)
class HeldOutStage:
    """One environment to evaluate on: ``group_size`` rollouts of each of the stage's tasks, every ``interval``
    optimizer steps, sampled as in training but for ``sampling``."""

    stage: Stage
    group_size: int
    interval: int
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class HeldOutResult:
    """Counts over the ``episodes`` of one environment that could be read.

    ``first_try`` were solved without a failed call, ``failed`` had one that the model could answer,
    ``recovered`` of those ended solved. ``reward``: their mean, 0 where there are none. ``left_out``: episodes that
    ended with an error or without a turn, which no other number counts.
    """

    episodes: int
    first_try: int
    failed: int
    recovered: int
    reward: float
    left_out: int


class HeldOut(TrainerCallback):
    """Plays the held-out environments between optimizer steps, with the weights as they then are.

    Nothing of training changes: random states are put back, and no rollout is trained on. ``at_once``: the most
    episodes that run together. ``say`` shows a line, ``write`` takes one record for ``metrics.jsonl``.
    """

    def __init__(
        self,
        runner: VerifiersRunner,
        stages: Sequence[HeldOutStage],
        *,
        seed: int,
        at_once: int,
        at_start: bool = True,
        on_resume: bool = False,
    ) -> None:
        self.runner = runner
        self.stages = stages
        self.seed = seed
        self.at_once = at_once
        self.at_start = at_start
        self.on_resume = on_resume
        self.say: Callable[[str], None] = print
        self.write: Callable[[dict[str, Any]], None] = lambda record: None
        self.before: Callable[[], None] = lambda: None
        """Called before environments are played: a server of its own needs the newest weights."""
        self.first: dict[str, HeldOutResult] = {}
        """By name, what the evaluation before the first step found."""
        self.last: dict[str, HeldOutResult] = {}
        """By name, what the last evaluation found."""
        self._began = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # The checkpoint of a resumed run has been loaded by now.
        self._began = state.global_step
        if state.global_step == 0:
            if self.at_start:
                self.first = self.evaluate(self.stages, 0, "start")
        elif self.on_resume:
            self.evaluate(self._due(state.global_step), state.global_step, "resumed")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # Behind the step's own log and checkpoint; the batch of the next step is sampled after this.
        if state.global_step > self._began:
            self.evaluate(self._due(state.global_step), state.global_step, "interval")

    def finish(self, step: int) -> None:
        """The evaluation of everything at the end of training."""
        self.evaluate(self.stages, step, "end")

    def _due(self, step: int) -> list[HeldOutStage]:
        return [held for held in self.stages if step % held.interval == 0]

    def evaluate(self, stages: Sequence[HeldOutStage], step: int, when: str) -> dict[str, HeldOutResult]:
        """Play ``stages`` from one seed, show and write what was found. By the environment's name."""
        found: dict[str, HeldOutResult] = {}
        if not stages:
            return found
        self.before()
        with _random_states_kept():
            for held in stages:
                torch.manual_seed(self.seed)
                name = held.stage.name
                count = len(held.stage.tasks) * held.group_size
                self.say(f"held-out evaluation ({_moment(when, step)}): {name}, {count} episodes")
                begin = time.monotonic()
                found[name], why = self._play(held)
                self.say(f"  {_line(found[name])}  {time.monotonic() - begin:.1f} s{why}")
        self.last |= found
        metrics = {
            f"heldout/{name}/{key}": value
            for name, result in found.items()
            for key, value in asdict(result).items()
        }
        if len(stages) == len(self.stages):
            metrics |= {f"heldout/{key}": value for key, value in asdict(_total(found.values())).items()}
        self.write({"step": step, "evaluation": when, **metrics})
        return found

    def _play(self, held: HeldOutStage) -> tuple[HeldOutResult, str]:
        """What was found, and for an environment all of whose episodes failed, why."""
        stage = held.stage
        jobs = [(stage, task) for task in stage.tasks for _ in range(held.group_size)]
        kept = []
        failed = []
        for begin in range(0, len(jobs), self.at_once):
            for episode in self.runner.episodes(jobs[begin : begin + self.at_once], held.sampling):
                rollout = stage.converter.rollout(episode, {})
                if rollout is None:
                    failed.append(episode)
                else:
                    kept.append(rollout)
        result = HeldOutResult(
            episodes=len(kept),
            first_try=sum(rollout.solved and not rollout.errors for rollout in kept),
            failed=sum(rollout.errors > 0 for rollout in kept),
            recovered=sum(rollout.errors > 0 and rollout.solved for rollout in kept),
            reward=sum(rollout.reward for rollout in kept) / max(len(kept), 1),
            left_out=len(failed),
        )
        return result, f"; the first left out: {first_error(failed[0])}" if failed else ""

    def print_table(self, console: Console) -> None:
        """The first and the last evaluation side by side."""
        table = Table(show_edge=False, pad_edge=False, box=None)
        for column in ("", "start", "end"):
            table.add_column(column, justify="left" if not column else "right")
        for held in self.stages:
            name = held.stage.name
            before, after = self.first.get(name), self.last.get(name)
            for label, cell in _CELLS:
                cells = ["none" if result is None else cell(result) for result in (before, after)]
                table.add_row(f"held-out {name}: {label}", *cells)
        console.print(table)


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({100 * part / whole:.0f}%)" if whole else "0/0"


_CELLS: tuple[tuple[str, Callable[[HeldOutResult], str]], ...] = (
    ("first try solved", lambda result: _share(result.first_try, result.episodes)),
    ("recovered after a failed call", lambda result: _share(result.recovered, result.failed)),
    ("mean reward", lambda result: f"{result.reward:.2f}" if result.episodes else "none"),
)


def _line(result: HeldOutResult) -> str:
    parts = [f"{label} {cell(result)}" for label, cell in _CELLS]
    return "  ".join([*parts, *([f"left out {result.left_out}"] if result.left_out else [])])


def _moment(when: str, step: int) -> str:
    return f"step {step}" if when == "interval" else when


def _total(results: Iterable[HeldOutResult]) -> HeldOutResult:
    """All environments together; the reward is the mean over episodes."""
    found = list(results)
    episodes = sum(result.episodes for result in found)
    return HeldOutResult(
        episodes=episodes,
        first_try=sum(result.first_try for result in found),
        failed=sum(result.failed for result in found),
        recovered=sum(result.recovered for result in found),
        reward=sum(result.reward * result.episodes for result in found) / max(episodes, 1),
        left_out=sum(result.left_out for result in found),
    )


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """The environments' code runs in this process, and may draw from any of them."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
