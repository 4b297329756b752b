"""Held-out environments: when they are played, what is counted, and that nothing of training changes."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from rich.console import Console
from transformers import TrainerControl, TrainerState

from composer_trl_host.report import MetricsWriter
from composer_trl_host.rollout import Rollout
from composer_trl_host.verifiers_env.build import _heldout_warnings, log_environments
from composer_trl_host.verifiers_env.heldout import HeldOut, HeldOutResult, HeldOutStage
from composer_trl_host.verifiers_env.runner import Stage
from composer_trl_host.verifiers_env.source import HeldOutSource, Source, TaskSources

FAILED = Rollout([1], failed_turns=[0])
RECOVERED = Rollout([1], failed_turns=[0], reward=1.0, solved=True)
AT_ONCE = Rollout([1], reward=0.5, solved=True)


class FakeConverter:
    """A task is its own episode, and its own rollout."""

    def rollout(self, episode: Any, row: Mapping[str, Any]) -> Rollout | None:
        return None if isinstance(episode, SimpleNamespace) else episode


class FakeRunner:
    """Records the batches, and draws from every random state as an environment may."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], dict[str, Any]]] = []
        self.draws: list[float] = []

    def episodes(self, jobs: Sequence[tuple[Stage, Any]], sampling: Mapping[str, Any]) -> list[Any]:
        self.batches.append(([stage.name for stage, _ in jobs], dict(sampling)))
        self.draws.append(float(torch.rand(())))
        random.random()
        numpy.random.rand()
        return [task for _, task in jobs]


def held(name: str, tasks: Sequence[Any], group: int = 1, interval: int = 2, **sampling: Any) -> HeldOutStage:
    stage = Stage(name, None, tasks, FakeConverter())  # type: ignore[arg-type]
    return HeldOutStage(stage, group, interval, sampling)


def make(
    *stages: HeldOutStage, **options: Any
) -> tuple[HeldOut, FakeRunner, list[dict[str, Any]], list[str]]:
    runner = FakeRunner()
    made = HeldOut(runner, stages, seed=3, at_once=4, **options)  # type: ignore[arg-type]
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    made.write, made.say = records.append, lines.append
    return made, runner, records, lines


def run(made: HeldOut, first: int, last: int) -> None:
    """What transformers calls from step ``first`` on."""
    state, control = TrainerState(), TrainerControl()
    state.global_step = first
    made.on_train_begin(None, state, control)  # type: ignore[arg-type]
    for step in range(first, last):
        state.global_step = step
        made.on_step_begin(None, state, control)  # type: ignore[arg-type]
    made.finish(last)


def moments(records: Sequence[dict[str, Any]]) -> list[tuple[str, int, set[str]]]:
    return [
        (
            record["evaluation"],
            record["step"],
            {key.split("/")[1] for key in record if key.endswith("/reward") and key.count("/") == 2},
        )
        for record in records
    ]


def test_everything_before_the_first_step_and_at_the_end_and_each_at_its_interval() -> None:
    made, _, records, _ = make(held("a", [AT_ONCE], interval=2), held("b", [AT_ONCE], interval=3))
    run(made, 0, 6)
    assert moments(records) == [
        ("start", 0, {"a", "b"}),
        ("interval", 2, {"a"}),
        ("interval", 3, {"b"}),
        ("interval", 4, {"a"}),
        ("end", 6, {"a", "b"}),
    ]


def test_the_start_can_be_left_out() -> None:
    made, _, records, _ = make(held("a", [AT_ONCE], interval=9), at_start=False)
    run(made, 0, 2)
    assert moments(records) == [("end", 2, {"a"})]


def test_a_resumed_run_is_evaluated_at_once_only_where_that_is_asked_for() -> None:
    for on_resume, expected in ((False, ["end"]), (True, ["resumed", "end"])):
        made, _, records, _ = make(held("a", [AT_ONCE], interval=2), on_resume=on_resume)
        run(made, 4, 5)
        assert [record["evaluation"] for record in records] == expected


def test_counts_and_the_mean_reward() -> None:
    error = SimpleNamespace(type="HarnessError", message="exit 1")
    broken = SimpleNamespace(errors=[error], traces=[])
    made, runner, records, lines = make(
        held("a", [FAILED, RECOVERED, AT_ONCE, broken], group=2, temperature=0.0), held("b", [AT_ONCE])
    )
    made.evaluate(made.stages, 0, "start")
    # 4 tasks with 2 rollouts each, 4 at once; then the other environment.
    assert runner.batches == [(["a"] * 4, {"temperature": 0.0})] * 2 + [(["b"], {})]
    assert made.last["a"] == HeldOutResult(
        episodes=6, first_try=2, failed=4, recovered=2, reward=0.5, left_out=2
    )
    (record,) = records
    assert record["heldout/a/recovered"] == 2
    # Over episodes: (6 * 0.5 + 0.5) / 7.
    assert record["heldout/reward"] == 0.5
    assert (record["heldout/episodes"], record["heldout/first_try"]) == (7, 3)
    assert any("HarnessError: exit 1" in line for line in lines)
    assert any("first try solved 2/6 (33%)" in line for line in lines)


def test_a_reward_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    made, _, _, _ = make(held("a", [Rollout([1], reward=math.nan), AT_ONCE]))
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    made.write = writer.write
    made.evaluate(made.stages, 0, "start")
    # Numbers of other libraries too.
    writer.write({"step": 1, "a": numpy.float32("inf"), "b": torch.tensor(-math.inf), "c": numpy.float32(2)})
    writer.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["heldout/a/reward"], first["heldout/reward"], first["heldout/a/episodes"]) == (
        None,
        None,
        2,
    )
    assert second == {"step": 1, "a": None, "b": None, "c": 2.0}


def test_held_out_environments_that_are_short_or_trained_on_are_named() -> None:
    def source(name: str, **taskset: Any) -> Source:
        return Source({"taskset": taskset, "agent": {"max_turns": 2}}, None, name)

    def held_out(examples: int | None, *given: Any, **taskset: Any) -> HeldOutSource:
        return HeldOutSource(source(*given, **taskset), examples, 1, 1, {})

    sources = TaskSources(
        (source("shell", id="s"), source("other", id="o")),
        (
            held_out(64, "short", id="s", part="heldout"),
            held_out(13, "enough", id="s", part="heldout"),
            held_out(None, "same", id="o"),
        ),
    )
    assert _heldout_warnings(sources, [13, 13, 13]) == [
        "warning: num_examples of short is 64, but its taskset has 13 tasks",
        "warning: same is held out with the taskset that other trains on, so it does not measure unseen tasks",
    ]


def test_random_states_are_put_back_and_every_evaluation_draws_the_same() -> None:
    made, runner, _, _ = make(held("a", [AT_ONCE]))
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    made.evaluate(made.stages, 0, "start")
    torch.rand(5)
    torch.manual_seed(1)
    made.evaluate(made.stages, 2, "interval")
    after = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    assert after == before
    assert len(set(runner.draws)) == 1


def test_the_table_has_the_first_and_the_last_evaluation() -> None:
    made, _, _, _ = make(held("a", [FAILED, AT_ONCE]))
    run(made, 0, 1)
    made.last["a"] = HeldOutResult(2, 2, 0, 0, 1.0, 0)
    text = io.StringIO()
    made.print_table(Console(file=text, width=100))
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert ["held-out", "a:", "first", "try", "solved", "1/2", "(50%)", "2/2", "(100%)"] in rows
    assert ["held-out", "a:", "recovered", "after", "a", "failed", "call", "0/1", "(0%)", "0/0"] in rows
    assert ["held-out", "a:", "mean", "reward", "0.25", "1.00"] in rows


def test_training_logs_each_environment_by_its_name() -> None:
    logged: dict[str, float] = {}
    played = [("a", RECOVERED), ("b", None), ("a", AT_ONCE), ("b", None)]
    log_environments(played, logged.__setitem__)
    assert logged == {
        "env/a/rollouts": 2.0,
        "env/a/left_out": 0.0,
        "env/a/reward": 0.75,
        "env/a/first_try": 0.5,
        "env/b/rollouts": 0.0,
        "env/b/left_out": 2.0,
    }
