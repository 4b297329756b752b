"""Measuring and running the conditions of the learning bench."""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from learning_conditions import CONDITIONS, KWARGS, WORDINGS, Condition
from learning_levers import CutSites, FalseHints, OneSite, Worded
from learning_results import append, claim, finished
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_prime_plugin.runfile import load_run
from composer_trl_host.chat import Chat
from composer_trl_host.evaluate import Evaluator
from composer_trl_host.hints import HintGenerator
from composer_trl_host.reading import position_ids
from composer_trl_host.rollout import RolloutRunner
from composer_trl_host.run import build
from composer_trl_host.settings import HostSettings
from composer_trl_host.trainer import ComposerGRPOTrainer

TOML = Path(__file__).resolve().parents[1] / "examples" / "shell" / "rl.toml"
HELDOUT_ROWS = 40
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")

# Requests that have nothing to do with the shell, and answers to be read, not sampled.
UNRELATED: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", "The capital of France is Paris, a city on the river Seine."),
    ("How many days are there in a week?", "There are seven days in a week, from Monday to Sunday."),
    ("Why is the sky blue?", "Air scatters short blue waves of sunlight more than long red ones."),
    ("Write a line about the sea.", "The sea breathes slowly under a pale and patient moon."),
    ("What do bees make?", "Bees make honey from the nectar that they gather from flowers."),
    ("Say something kind to a tired friend.", "You did a lot today, and it is fine to rest now."),
    ("What is 12 plus 30?", "12 plus 30 is 42."),
    ("Translate 'good morning' into Spanish.", "Good morning is 'buenos días' in Spanish."),
    ("Name three colours.", "Three colours are green, yellow and violet."),
    ("How do I boil an egg?", "Put it into boiling water for about eight minutes, then cool it."),
    ("What is a prime number?", "A number above one that only one and itself divide."),
    ("Who wrote Hamlet?", "Hamlet is a play by William Shakespeare."),
    ("What is photosynthesis?", "Plants turn light, water and carbon dioxide into sugar and oxygen."),
    ("Give me a name for a small dog.", "Biscuit would be a good name for a small dog."),
    ("Why do we sleep?", "Sleep lets the body recover and the brain sort what it has learned."),
    ("Write one line of Python that prints hello.", 'print("hello")'),
)


# Measuring


def mean_kl_and_changed(start: Tensor, now: Tensor) -> tuple[float, float]:
    """Of ``(n, vocab)`` log-probs: the mean KL(start || now) in nats per token, and the share of
    positions whose most likely token is another one."""
    kl = (start.exp() * (start - now)).sum(dim=-1).mean()
    changed = (start.argmax(dim=-1) != now.argmax(dim=-1)).float().mean()
    return float(kl), float(changed)


class Drift:
    """How far a model has moved, since this was made, on sequences that it is not trained on.

    ``sequences``: pairs of context ids and answer ids; the answers' tokens are the positions.
    """

    def __init__(self, model: Any, sequences: Sequence[tuple[list[int], list[int]]]) -> None:
        self.sequences = list(sequences)
        self.start = self._logprobs(model)

    def __call__(self, model: Any) -> tuple[float, float]:
        """KL(start || now) in nats per token, and the share of greedily changed tokens."""
        return mean_kl_and_changed(self.start, self._logprobs(model))

    @torch.no_grad()
    def _logprobs(self, model: Any) -> Tensor:
        width = max(len(context) + len(answer) for context, answer in self.sequences)
        ids = torch.zeros(len(self.sequences), width, dtype=torch.long)
        mask, asked = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, (context, answer) in enumerate(self.sequences):
            both = [*context, *answer]
            ids[row, : len(both)] = torch.tensor(both)
            mask[row, : len(both)] = 1
            asked[row, len(context) - 1 : len(both) - 1] = True
        was_training = model.training
        model.eval()
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask)).logits
        model.train(was_training)
        return torch.log_softmax(logits[asked].float(), dim=-1)


def unrelated_sequences(chat: Chat) -> list[tuple[list[int], list[int]]]:
    """``UNRELATED`` as ids."""
    return [
        (
            chat.prompt_ids([{"role": "user", "content": asked}]),
            chat.tokenizer.encode(answer, add_special_tokens=False),
        )
        for asked, answer in UNRELATED
    ]


class Trail(TrainerCallback):
    """Evaluates before the first step and then every so many steps."""

    def __init__(self, trainer: ComposerGRPOTrainer, evaluator: Evaluator, drift: Drift, every: int) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.drift = drift
        self.every = every
        self.points: list[dict[str, Any]] = []
        self._logged = 0

    def measure(self) -> None:
        """Append one point: counts on held-out rows, drift, and the training metrics since the last one."""
        kl, changed = self.drift(self.trainer.model)
        counts = asdict(self.evaluator.evaluate(self.trainer.sample_turns))
        point = {"step": self.trainer.state.global_step, **counts, "drift": kl, "changed": changed}
        logs = [entry for entry in self.trainer.state.log_history if "loss/total" in entry]
        since, self._logged = logs[self._logged :], len(logs)
        if since:
            point["train"] = {
                name: statistics.fmean(entry.get(name, 0.0) for entry in since)
                for name in ("reward", "rollout/first_try", "loss/sdpo_jsd", "sdpo/clip_fraction")
            }
            for name in ("sdpo/sites", "sdpo/error_tokens"):
                point["train"][name] = sum(entry.get(name, 0.0) for entry in since)
        self.points.append({name: _short(value) for name, value in point.items()})
        print(f"{time.strftime('%H:%M:%S')}   {summary(self.points[-1])}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Not at the step's end: its metrics are logged behind that event.
        step = state.global_step
        due = step % self.every == 0 or step == state.max_steps
        if due and self.points[-1]["step"] != step:
            self.measure()


def summary(point: Mapping[str, Any]) -> str:
    """One point on one line."""
    return (
        f"step {point['step']:3d}  first {point['first_try']}/{point['episodes']}  recovery "
        f"{point['replay_recovered']}/{point['replayed']}  hinted {point['hinted_recovered']}/{point['replayed']}  "
        f"drift {point['drift']:.4f}"
    )


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Running


def settings_of(condition: Condition, seed: int, steps: int, out: str) -> HostSettings:
    """The example's TOML with the condition's keys laid over it."""
    flags: dict[str, Any] = {
        "max_steps": steps,
        "output_dir": out,
        "orchestrator.seed": seed,
        f"{KWARGS}.trl_host.heldout_rows": HELDOUT_ROWS,
        **condition.flags,
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    return HostSettings.from_run(load_run(["@", str(TOML), *words]))


def train(name: str, seed: int, steps: int, every: int) -> dict[str, Any]:
    """One run; the line of the results file."""
    condition = CONDITIONS[name]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        settings = settings_of(condition, seed, steps, out)
        set_seed(seed)
        trainer, runner, rows = build(settings)
        trainer.args.save_strategy = "no"
        trainer.remove_callback(PrinterCallback)
        if condition.wording is not None:
            runner.hints = Worded(_hints(runner), WORDINGS[condition.wording])
        judge = copy.copy(runner)  # evaluation reads true hints and whole turns
        if condition.wrong:
            words = list(getattr(runner.environment, "mapping").values())  # noqa: B009
            runner.hints = FalseHints(_hints(runner), words, condition.wrong, seed)
        player: Any = runner
        if condition.cut:
            player = CutSites(player, trainer.model, trainer.processing_class.pad_token_id)
        if condition.one_site:
            player = OneSite(player, settings.group_size)
        trainer.runner = player
        drift = Drift(trainer.model, unrelated_sequences(runner.chat))
        trail = Trail(trainer, Evaluator(judge, rows, seed), drift, every)
        trail.measure()
        trainer.add_callback(trail)
        try:
            trainer.train()
        except KeyboardInterrupt:
            # What was measured is as good as that of a shorter run, and is written as one.
            steps = trail.points[-1]["step"]
            if steps == 0:
                raise
    return {
        "condition": name,
        "seed": seed,
        "steps": steps,
        "trail": trail.points,
        "seconds": round(time.perf_counter() - began),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
    }


def _hints(runner: RolloutRunner) -> HintGenerator:
    assert runner.hints is not None
    return runner.hints


def run_queue(
    names: Sequence[str], seeds: Sequence[int], steps: int | None, path: Path, every: int | None = None
) -> None:
    """Seed by seed, every condition that is neither finished nor claimed."""
    for name, seed in queue(names, seeds):
        key = (name, seed, steps or CONDITIONS[name].steps)
        with claim(path, key) as mine:
            if not mine or finished(path, *key):
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}, seed {seed}, {key[2]} steps", flush=True)
            line = train(*key, every or CONDITIONS[name].every)
            append(path, line)
            if line["steps"] < key[2]:
                raise KeyboardInterrupt


def queue(names: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """The three main conditions at every seed, then the levers seed by seed."""
    main = [name for name in names if CONDITIONS[name].lever == "channels"]
    levers = [name for name in names if name not in main]
    return [(n, s) for s in seeds for n in main] + [(n, s) for s in seeds for n in levers]
