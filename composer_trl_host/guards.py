"""What watches a run while it trains, warns once, and ends it where it is asked to."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from composer_prime_plugin.config import ComposerConfig
from composer_trl_host.guard_rules import GUARDS, Guard, Look, StepFigures

GUARD_EXIT = 3
"""Exit code of a run that a guard rail ended."""

STATE_FILE = "guards.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """The first time that a guard tripped. ``since``, ``step``: the steps it was taken over."""

    name: str
    since: int
    step: int
    found: str

    def __str__(self) -> str:
        return f"guard {self.name}, steps {self.since} to {self.step}: {self.found}"


class GuardWatch:
    """The guards of a run. ``say`` gets one line for each guard's first finding.

    Every figure was reduced over ranks before it comes here, so that every rank holds the same state and
    ends its run at the same step. ``findings``: one per guard that has tripped. ``stopped_by``: the finding that
    ends the run.
    """

    def __init__(self, config: ComposerConfig, say: Callable[[str], None] = logger.warning) -> None:
        self.config = config
        self.say = say
        self.findings: list[Finding] = []
        self.stopped_by: Finding | None = None
        on = config.trl_host.guards.on if config.sdpo.active else ()
        self._guards = [guard for guard in GUARDS if guard.name in on]
        self._steps: deque[StepFigures] = deque(maxlen=max(config.trl_host.guards.window, 1))
        self._quiet = 0

    def update(self, figures: StepFigures) -> dict[str, float]:
        """Take in one optimizer step and return the guards' metrics: for each guard that has something to
        measure, its figure and ``guard/<name>``, 1 where it is out of bounds."""
        self._steps.append(figures)
        self._quiet = 0 if figures.sites else self._quiet + 1
        look = Look(tuple(self._steps), self._quiet, self.config)
        metrics: dict[str, float] = {}
        for guard in self._guards:
            value = guard.measure(look)
            if value is None:
                continue
            tripped = guard.trips(value, look.guards)
            metrics[guard.metric] = value
            metrics[f"guard/{guard.name}"] = float(tripped)
            if tripped:
                self._take(guard, value, look)
        return metrics

    def _take(self, guard: Guard, value: float, look: Look) -> None:
        finding = Finding(guard.name, guard.since(look), look.steps[-1].step, guard.found(value, look))
        if all(earlier.name != guard.name for earlier in self.findings):
            self.findings.append(finding)
            self.say(str(finding))
        if guard.name in look.guards.stop and self.stopped_by is None:
            self.stopped_by = finding

    def forget(self) -> None:
        """Empty the windows: a run that goes on after a stop is judged by its own steps."""
        self._steps.clear()
        self._quiet = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON. A guard that ended the run may speak again."""
        ended = None if self.stopped_by is None else self.stopped_by.name
        return {
            "steps": [asdict(figures) for figures in self._steps],
            "quiet": self._quiet,
            "findings": [asdict(finding) for finding in self.findings if finding.name != ended],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's state. A shorter window keeps the newest steps."""
        self._steps.clear()
        for row in state["steps"]:
            sources = {name: (nats, tokens) for name, (nats, tokens) in row["sources"].items()}
            self._steps.append(StepFigures(**{**row, "sources": sources}))
        self._quiet = state["quiet"]
        self.findings = [Finding(**row) for row in state["findings"]]


def save_guards(watch: GuardWatch, folder: Path) -> None:
    """Write the watch's state into a checkpoint folder."""
    (folder / STATE_FILE).write_text(json.dumps(watch.state(), allow_nan=False) + "\n", encoding="utf-8")


def load_guards(watch: GuardWatch, folder: Path) -> None:
    """Read it back. A checkpoint without it leaves the windows empty, which is said."""
    path = folder / STATE_FILE
    if not path.is_file():
        logger.warning("%s holds no %s: the guards' windows start empty", folder, STATE_FILE)
        return
    watch.load(json.loads(path.read_text(encoding="utf-8")))


class StopOnGuard(TrainerCallback):
    """Ends the run after the step at which a guard of ``guards.stop`` trips, with a checkpoint."""

    def __init__(self, watch: GuardWatch) -> None:
        self.watch = watch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.watch.stopped_by = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.watch.stopped_by is not None:
            # Before the checkpoint is written, which follows this event.
            self.watch.forget()
            control.should_save = True
            control.should_training_stop = True


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """One float32 norm per gradient."""
    return torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32))


class FiniteGradients(TrainerCallback):
    """Stops before the optimizer step when a gradient is not finite: ``stop`` gets the sentence and raises.

    The loss is checked where it is made; a backward can still overflow. Stepping with such a
    gradient would make every weight NaN, and clipping by the norm would not help.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self.stop = stop

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        if not named:
            return
        norms = gradient_norms([gradient for _, gradient in named])
        finite = torch.isfinite(norms)
        if bool(finite.all()):
            return
        where = int((~finite).nonzero()[0])
        self.stop(
            f"every gradient must be finite before the optimizer step; found {float(norms[where])} in "
            f"{named[where][0]} at step {state.global_step + 1} ({int((~finite).sum())} of {len(named)} tensors)"
        )
