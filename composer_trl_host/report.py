"""What a run shows and leaves behind: lines, a table, ``metrics.jsonl``, the picture of the curves."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from composer_trl_host.evaluate import Evaluation

METRICS_FILE = "metrics.jsonl"
CURVES_FILE = "loss.png"

_LINE = (
    ("total", "loss/total", "{:+.4f}"),
    ("policy", "loss/policy", "{:+.4f}"),
    ("sdpo_jsd", "loss/sdpo_jsd", "{:.4f}"),
    ("weighted", "loss/sdpo_weighted", "{:.4f}"),
    ("sites", "sdpo/sites", "{:.0f}"),
    ("reward", "reward", "{:.2f}"),
    ("first try", "rollout/first_try", "{:.2f}"),
)


class MetricsWriter(TrainerCallback):
    """Appends one JSON object per logged step to ``metrics.jsonl`` and flushes it: what is logged
    outlives a crash in the next step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, with null for numbers that are not finite."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        plain = json.loads(json.dumps(record, default=float), parse_constant=lambda _: None)
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            self.write({"step": state.global_step, **logs})

    def close(self) -> None:
        """Close the file; a later ``write`` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def logged_steps(path: Path, last: int) -> list[dict[str, Any]]:
    """The training steps up to ``last`` that an earlier part of the run logged, each once."""
    if not path.is_file():
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a crash cut off
        if "loss/total" in row and row["step"] <= last:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


class ConsoleReport(TrainerCallback):
    """A progress bar and one line of losses per logged step."""

    def __init__(self, console: Console, max_steps: int, earlier: Sequence[dict[str, Any]] = ()) -> None:
        self.console = console
        self.max_steps = max_steps
        self.history: list[dict[str, Any]] = list(earlier)
        self._progress: Progress | None = None
        self._task: Any = None
        self._since = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=self.max_steps, completed=state.global_step)
        self._progress.start()
        self._since = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "loss/total" not in logs:
            return
        self.history.append({"step": state.global_step, **logs})
        now = time.monotonic()
        parts = [f"{name} {form.format(logs[key])}" for name, key, form in _LINE if logs.get(key) is not None]
        self.console.print(
            f"step {state.global_step:>4}/{self.max_steps}  "
            + "  ".join(parts)
            + f"  {now - self._since:.1f} s",
            highlight=False,
        )
        self._since = now
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the progress bar off the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class GracefulStop(TrainerCallback):
    """The first SIGINT or SIGTERM lets the running step finish, saves a checkpoint and stops; the
    second one interrupts at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.asked = False
        self._before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.console.print("stopping after this step, with a checkpoint; once more to stop at once")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.asked:
            control.should_save = True
            control.should_training_stop = True

    def restore(self) -> None:
        """Put the earlier signal handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


@dataclass(frozen=True)
class Summary:
    """The table at the end of a run."""

    steps: int
    sites: float
    mean_jsd: float | None
    reward_first: float | None
    reward_last: float | None
    start: Evaluation | None
    end: Evaluation | None


def summarize(history: list[dict[str, Any]], start: Evaluation | None, end: Evaluation | None) -> Summary:
    """Totals over the logged steps. The mean JSD is per error token."""
    tokens = sum(row["sdpo/error_tokens"] for row in history)
    jsd = sum(row["loss/sdpo_jsd"] * row["sdpo/error_tokens"] for row in history)
    rewards = [row["reward"] for row in history if row.get("reward") is not None]
    return Summary(
        steps=len(history),
        sites=sum(row["sdpo/sites"] for row in history),
        mean_jsd=jsd / tokens if tokens else None,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        start=start,
        end=end,
    )


def print_summary(console: Console, summary: Summary) -> None:
    """Print the summary as a short table."""
    table = Table(show_edge=False, pad_edge=False, box=None)
    for column in ("", "start", "end"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("steps", "", str(summary.steps))
    table.add_row("error sites seen", "", f"{summary.sites:.0f}")
    table.add_row("mean JSD (nats per error token)", "", _number(summary.mean_jsd, "{:.4f}"))
    table.add_row("reward (training prompts)", _number(summary.reward_first), _number(summary.reward_last))
    if summary.start is not None and summary.end is not None:
        rows: list[tuple[str, Callable[[Evaluation], str]]] = [
            ("held-out: first try solved", lambda e: _share(e.first_try, e.episodes)),
            ("held-out: recovery without a hint", lambda e: _share(e.replay_recovered, e.replayed)),
            (
                "held-out: recovery with the hint (the teacher's)",
                lambda e: _share(e.hinted_recovered, e.replayed),
            ),
        ]
        for name, cell in rows:
            table.add_row(name, cell(summary.start), cell(summary.end))
    console.print(table)


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "none" if value is None else form.format(value)


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({100 * part / whole:.0f}%)" if whole else "0/0"


def draw_curves(history: list[dict[str, Any]], path: Path) -> None:
    """The loss curves as a PNG: both channels, the divergence, the rates on training prompts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for row in history]
    panels = (
        ("loss (nats per trained token)", ("loss/total", "loss/policy", "loss/sdpo_weighted")),
        ("divergence (nats per error token)", ("loss/sdpo_jsd",)),
        ("training rollouts", ("reward", "rollout/first_try", "rollout/recovery")),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.6), constrained_layout=True)
    for axis, (title, keys) in zip(axes, panels, strict=True):
        for key in keys:
            values = [row.get(key) if row.get(key) is not None else math.nan for row in history]
            axis.plot(steps, values, marker="o", markersize=3, label=key)
        axis.set(title=title, xlabel="optimizer step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(
            fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=len(keys), frameon=False
        )
        axis.grid(alpha=0.3)
    # No date in the file: the same run gives the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
