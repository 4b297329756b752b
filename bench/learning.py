"""Does it teach, and when: the shell example under named conditions, measured on held-out names.

    python bench/learning.py list
    python bench/learning.py run [--only NAME ...] [--seeds 42 1 2] [--steps N] [--results FILE]
    python bench/learning.py report [--results FILE] [--page docs/experiments.md]

Every condition starts from the same weights, the shell example's, and changes what its row in
``CONDITIONS`` says. ``run`` goes through the queue (first named first, seed by seed), skips what the results file
holds and what another process of this bench is at work on, and appends one line per run; one that is interrupted is kept
as far as it was measured.
``report`` rewrites the tables of the page, between their markers, and the pictures beside the results.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import load_run
from composer_trl_host.alignment import build_site_batch
from composer_trl_host.chat import Chat
from composer_trl_host.evaluate import Evaluator
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator
from composer_trl_host.reading import position_ids, read_teacher
from composer_trl_host.rollout import Generate, Rollout, RolloutRunner
from composer_trl_host.run import build
from composer_trl_host.settings import HostSettings
from composer_trl_host.trainer import ComposerGRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
TOML = ROOT / "examples" / "shell" / "rl.toml"
RESULTS = ROOT / "docs" / "experiments" / "results.jsonl"
PAGE = ROOT / "docs" / "experiments.md"
SEEDS = (42, 1, 2)
HELDOUT_ROWS = 40
LEVER_STEPS = 10
"""Where the base still learns fast, so that slower and faster both show."""
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")

_KWARGS = "trainer.loss.kwargs"
_SDPO = f"{_KWARGS}.sdpo"


@dataclass(frozen=True)
class Condition:
    """One row of the bench.

    ``flags``: keys of the TOML, dotted, and their values. The rest changes what no key can:
    ``wording`` the hint's text (``WORDINGS``), ``wrong`` the share of training hints that name a wrong
    command, ``cut`` trains a recovery up to the first token that the teacher itself would not write,
    ``one_site`` gives the rollouts of a group one first turn, so that they are recoveries from one error.
    """

    lever: str
    says: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    wording: str | None = None
    wrong: float = 0.0
    cut: bool = False
    one_site: bool = False
    steps: int = LEVER_STEPS
    every: int = LEVER_STEPS
    """Steps between evaluations."""


def _sdpo(**values: Any) -> dict[str, Any]:
    return {f"{_SDPO}.{name}": value for name, value in values.items()}


def _group(size: int) -> dict[str, Any]:
    return {"orchestrator.group_size": size}


NO_POLICY = {
    f"{_KWARGS}.policy.objective": "dppo",
    f"{_KWARGS}.policy.adv_tau": 0.0,
    f"{_KWARGS}.policy.kl_tau": 0.0,
}
"""Channel 1 is then exactly 0, and channel 2 is divided by the same count of tokens as before."""

CONDITIONS: dict[str, Condition] = {
    "both": Condition("channels", "both channels, the example as it stands", steps=20, every=5),
    "channel_1": Condition(
        "channels", "channel 1 alone (`sdpo.weight = 0`)", _sdpo(weight=0.0), steps=20, every=5
    ),
    "channel_2": Condition(
        "channels", "channel 2 alone (`dppo`, `adv_tau = kl_tau = 0`)", NO_POLICY, steps=20, every=5
    ),
    "token_0.05": Condition("clip", '`"token"`, 0.05 nats', _sdpo(token_clip=0.05, clip_mode="token")),
    "entry_0.05": Condition("clip", '`"entry"`, 0.05 nats', _sdpo(token_clip=0.05, clip_mode="entry")),
    "rescale_0.05": Condition("clip", '`"rescale"`, 0.05 nats', _sdpo(token_clip=0.05, clip_mode="rescale")),
    "beta_0": Condition("jsd_beta", "0, forward KL", _sdpo(jsd_beta=0.0)),
    "beta_1": Condition("jsd_beta", "1, reverse KL", _sdpo(jsd_beta=1.0)),
    "teacher_ema": Condition("teacher", '`"ema"`, decay 0.9', _sdpo(teacher="ema", ema_decay=0.9)),
    "teacher_initial": Condition("teacher", '`"initial"`', _sdpo(teacher="initial")),
    "wrong_0.5": Condition("wrong hints", "half of the hints name a wrong command", wrong=0.5),
    "lr_3e-5": Condition("learning rate", "3e-5", {"trainer.optim.lr": 3e-5}),
    "lr_3e-6": Condition("learning rate", "3e-6", {"trainer.optim.lr": 3e-6}),
    "cut": Condition("recovery tokens", "up to the first that the teacher would not write", cut=True),
    "lora": Condition(
        "parameters",
        "LoRA, rank 16, alpha 32, all linear layers, learning rate 1e-4",
        {"trainer.model.lora.rank": 16, "trainer.model.lora.alpha": 32.0, "trainer.optim.lr": 1e-4},
    ),
    "raw": Condition("start", "the raw model, without the warm start", {f"{_KWARGS}.trl_host.adapter": None}),
    "weight_0.1": Condition("weight", "0.1", _sdpo(weight=0.1)),
    "weight_3": Condition("weight", "3", _sdpo(weight=3.0)),
    "warmup_10": Condition("weight", "1 after 10 steps of warm-up from 0", _sdpo(warmup_steps=10)),
    "role_system": Condition("hint", "role `system`", _sdpo(hint_role="system")),
    "role_tool": Condition("hint", "role `tool_result`", _sdpo(hint_role="tool_result")),
    "word_sentence": Condition("hint", "a sentence around the command", wording="sentence"),
    "word_advice": Condition("hint", "advice that does not say the command", wording="advice"),
    "samples_4": Condition(
        "samples per site", "4: four rollouts from one first turn", _group(4), one_site=True
    ),
    "group_4": Condition("samples per site", "1, in groups of 4 with first turns of their own", _group(4)),
    "samples_2": Condition("samples per site", "2: two rollouts from one first turn", one_site=True),
    "wrong_0.25": Condition("wrong hints", "a quarter", wrong=0.25),
    "token_0.5": Condition("clip", '`"token"`, 0.5 nats', _sdpo(token_clip=0.5, clip_mode="token")),
    "entry_0.5": Condition("clip", '`"entry"`, 0.5 nats', _sdpo(token_clip=0.5, clip_mode="entry")),
    "rescale_0.5": Condition("clip", '`"rescale"`, 0.5 nats', _sdpo(token_clip=0.5, clip_mode="rescale")),
    "lora_1e-5": Condition(
        "parameters",
        "the same LoRA, learning rate 1e-5",
        {"trainer.model.lora.rank": 16, "trainer.model.lora.alpha": 32.0},
    ),
    "lr_1e-4": Condition("learning rate", "1e-4", {"trainer.optim.lr": 1e-4}),
    "word_bare": Condition("hint", "the command and nothing else", wording="bare"),
}
"""Every run of the bench by name, in the order of the queue."""

WORDINGS: dict[str, str] = {
    "sentence": "In this shell the command for that request is {command} and nothing else.",
    "bare": "{command}",
    "advice": "hint: read the error and try another command",
}

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


# Levers


class FalseHints:
    """A generator whose hints name a wrong command of ``words`` in about ``share`` of the contexts."""

    def __init__(self, hints: HintGenerator, words: Sequence[str], share: float, seed: int) -> None:
        self.hints = hints
        self.words = tuple(words)
        self.share = share
        self.seed = seed

    def generate(self, context: ErrorContext) -> Hint | None:
        """The wrapped generator's hint, falsified or not: the same context always gets the same one."""
        hint = self.hints.generate(context)
        if hint is None:
            return None
        draw = random.Random(f"{self.seed}/{context.call}/{list(context.messages)!r}")
        if draw.random() >= self.share:
            return hint
        right = str(context.details["command"]).split()[0]
        wrong = draw.choice([word for word in self.words if word != right])
        return replace(hint, text=re.sub(rf"\b{re.escape(right)}\b", wrong, hint.text, count=1))


class Worded:
    """A generator whose hints say the right command in other words."""

    def __init__(self, hints: HintGenerator, template: str) -> None:
        self.hints = hints
        self.template = template

    def generate(self, context: ErrorContext) -> Hint | None:
        """The wrapped generator's hint with its text replaced."""
        hint = self.hints.generate(context)
        if hint is None:
            return None
        return replace(hint, text=self.template.format(command=context.details["command"]))


def agreed_length(written: Sequence[int], would: Sequence[int]) -> int:
    """How many tokens of ``written`` stand up to the first that differs from ``would``, that one
    included: there the teacher says what it wants instead; behind it, it reads what it would not
    have written."""
    pairs = enumerate(zip(written, would, strict=True), start=1)
    return next((count for count, (is_, wanted) in pairs if is_ != wanted), len(written))


class CutSites:
    """A runner whose sites end with the first token that the hinted model would not write (greedily)."""

    def __init__(self, runner: RolloutRunner, model: Any, pad_token_id: int) -> None:
        self.runner = runner
        self.model = model
        self.pad_token_id = pad_token_id

    def play(self, rows: Sequence[Mapping[str, Any]], generate: Generate, **how: Any) -> list[Rollout]:
        """Play, then shorten the sites by the weights that sampled."""
        rollouts = self.runner.play(rows, generate, **how)
        if any(rollout.sites for rollout in rollouts):
            kept = iter(self._kept(rollouts))
            for rollout in rollouts:
                rollout.sites = [replace(site, stop=site.start + next(kept)) for site in rollout.sites]
        return rollouts

    def _kept(self, rollouts: list[Rollout]) -> list[int]:
        ids = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
        sites = [rollout.sites for rollout in rollouts]
        batch = build_site_batch(ids, sites, [0] * len(ids), self.pad_token_id)
        reading, _ = read_teacher(self.model, batch.as_batch(), None)
        site, k = batch.teacher_response_valid.nonzero(as_tuple=True)
        column = batch.teacher_response_idx[site, k]
        would = reading.block(site, column - 1).argmax(dim=-1)
        written = batch.teacher_input_ids[site, column]
        counts = batch.teacher_response_valid.sum(dim=1).tolist()
        return [
            agreed_length(a.tolist(), b.tolist())
            for a, b in zip(written.split(counts), would.split(counts), strict=True)
        ]


class OneSite:
    """A runner that gives the rollouts of a group the first turn of the group's first."""

    def __init__(self, runner: RolloutRunner, group: int) -> None:
        self.runner = runner
        self.group = group

    def play(self, rows: Sequence[Mapping[str, Any]], generate: Generate, **how: Any) -> list[Rollout]:
        """Play rows that come in groups of equals."""
        first = True

        def shared(contexts: list[list[int]]) -> Any:
            nonlocal first
            turns, logprobs = generate(contexts)
            if first:
                first = False
                leaders = [i - i % self.group for i in range(len(contexts))]
                if any(contexts[i] != contexts[leader] for i, leader in enumerate(leaders)):
                    raise ConfigError(
                        f"rows must come in groups of {self.group} with one prompt; found different ones; "
                        "keep a step's rollouts in one generation batch"
                    )
                turns = [list(turns[leader]) for leader in leaders]
                logprobs = None if logprobs is None else [list(logprobs[leader]) for leader in leaders]
            return turns, logprobs

        return self.runner.play(rows, shared, **how)


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
        f"{_KWARGS}.trl_host.heldout_rows": HELDOUT_ROWS,
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


def finished(path: Path, name: str, seed: int, steps: int) -> bool:
    """Whether the results file holds such a run, or a longer one: its first steps are the same."""
    return any(
        (line["condition"], line["seed"]) == (name, seed) and line["steps"] >= steps for line in read(path)
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of the results file, none where there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line, whole, also where two processes write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        out.write(json.dumps(line) + "\n")


@contextmanager
def claim(path: Path, key: tuple[str, int, int]) -> Iterator[bool]:
    """Whether this process may do ``key``. The claim falls with the process, however it ends."""
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"composer-rl-learning-{os.getuid()}-{mark}"
    folder.mkdir(exist_ok=True)
    with (folder / "-".join(map(str, key))).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


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


# Reporting


@dataclass(frozen=True)
class Measure:
    """One column: how to read it off a point, and how to print it."""

    title: str
    of: Callable[[Mapping[str, Any]], float]
    show: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _nats(value: float) -> str:
    return f"{value:.3f}"


def _over(count: str, total: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda point: point[count] / point[total] if point[total] else math.nan


MEASURES: dict[str, Measure] = {
    "first": Measure("first turn", _over("first_try", "episodes"), _percent),
    "recovery": Measure("recovery, no hint", _over("replay_recovered", "replayed"), _percent),
    "hinted": Measure("recovery, hinted (the teacher)", _over("hinted_recovered", "replayed"), _percent),
    "drift": Measure("drift, nats a token", lambda point: point["drift"], _nats),
    "changed": Measure("changed tokens", lambda point: point["changed"], _percent),
}
CHANNELS = ("both", "channel_1", "channel_2")
BASE = "both"
SHOWN_STEPS = (0, 10, 20, 30, 40)

Runs = Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]
"""Condition to seed to points."""


def longest_runs(lines: Sequence[Mapping[str, Any]]) -> Runs:
    """The longest run of every condition and seed; of equals the last."""
    kept: dict[tuple[str, int], Mapping[str, Any]] = {}
    for line in lines:
        key = (line["condition"], line["seed"])
        if line["condition"] in CONDITIONS and line["steps"] >= kept.get(key, line)["steps"]:
            kept[key] = line
    runs: dict[str, dict[int, Sequence[Mapping[str, Any]]]] = {}
    for name in CONDITIONS:
        for seed in sorted({seed for key, seed in kept if key == name}, key=_seed_order):
            runs.setdefault(name, {})[seed] = kept[name, seed]["trail"]
    return runs


def _seed_order(seed: int) -> tuple[int, int]:
    return (SEEDS.index(seed) if seed in SEEDS else len(SEEDS), seed)


def at(points: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """The point of a run at ``step``, if there is one."""
    return next((point for point in points if point["step"] == step), None)


def points_at(runs: Runs, name: str, step: int) -> dict[int, Mapping[str, Any]]:
    """The points of a condition at ``step`` by seed, of the seeds that have one."""
    found = {seed: at(trail, step) for seed, trail in runs.get(name, {}).items()}
    return {seed: point for seed, point in found.items() if point is not None}


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """``median (least to most)``, or the one value there is."""
    median = show(statistics.median(values))
    if len(values) == 1:
        return median
    low, high = show(min(values)), show(max(values))
    return f"{median} ({low} to {high})"


def cells(points: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The named measures over the seeds."""
    measures = [MEASURES[name] for name in names]
    return [spread([m.of(point) for point in points.values()], m.show) for m in measures]


def against_base(runs: Runs, name: str, step: int, measure: str) -> str:
    """Differences to the base in percentage points, seed by seed."""
    of, base = MEASURES[measure].of, points_at(runs, BASE, step)
    return ", ".join(
        f"{100 * (of(point) - of(base[seed])):+.0f}"
        for seed, point in points_at(runs, name, step).items()
        if seed in base
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def channels_table(runs: Runs) -> str:
    """The three main conditions along the run."""
    rows = [
        [f"`{name}`", str(step), str(len(points)), *cells(points, list(MEASURES))]
        for name in CHANNELS
        for step in SHOWN_STEPS
        if (points := points_at(runs, name, step))
    ]
    return table(["condition", "step", "seeds", *(m.title for m in MEASURES.values())], rows)


def best_table(runs: Runs) -> str:
    """Seed by seed, where a main condition was best and where it ended."""
    rows = []
    for name in CHANNELS:
        for seed, trail in runs.get(name, {}).items():
            row = [f"`{name}`", str(seed)]
            for measure in ("first", "recovery"):
                of = MEASURES[measure].of
                best = max(trail, key=of)
                row.append(f"{_percent(of(best))} at {best['step']}")
                row.append(f"{_percent(of(trail[-1]))} at {trail[-1]['step']}")
            rows.append(row)
    head = ["first turn: best, at step", "end", "recovery: best, at step", "end"]
    return table(["condition", "seed", *head], rows)


def lever_table(runs: Runs, lever: str) -> str:
    """The conditions of one lever beside the base, after as many steps."""
    names = [name for name, condition in CONDITIONS.items() if condition.lever == lever and name in runs]
    if not names:
        return "Not run."
    shown = [name for name in MEASURES if name != "changed"]
    rows = []
    for name in [BASE, *names]:
        if points := points_at(runs, name, LEVER_STEPS):
            differences = [against_base(runs, name, LEVER_STEPS, m) for m in ("first", "recovery")]
            seeds = ", ".join(map(str, points))
            row = [f"`{name}`", CONDITIONS[name].says, seeds, *cells(points, shown)]
            rows.append(row + (differences if name != BASE else ["", ""]))
    head = ["condition", "what", "seeds", *(MEASURES[m].title for m in shown)]
    head += ["first turn against `both`, points, by seed", "recovery, likewise"]
    return f"After {LEVER_STEPS} steps:\n\n{table(head, rows)}"


def commands(runs: Runs, names: Sequence[str]) -> list[str]:
    """The command lines that repeat the runs of ``names``, conditions of equal seeds and lengths together."""
    alike: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name in names:
        lengths = {seed: trail[-1]["step"] for seed, trail in runs[name].items()}
        for steps in dict.fromkeys(lengths.values()):
            seeds = tuple(seed for seed, length in lengths.items() if length == steps)
            alike.setdefault((steps, seeds), []).append(name)
    return [
        f"python bench/learning.py run --only {' '.join(only)} --seeds {' '.join(map(str, seeds))}"
        + ("" if CONDITIONS[only[0]].steps == steps else f" --steps {steps}")
        for (steps, seeds), only in alike.items()
    ]


def tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every table of the page by its marker's name, each with the command that repeats it."""
    runs = longest_runs(lines)
    made = {"channels": channels_table(runs), "best": best_table(runs)}
    levers = dict.fromkeys(c.lever for c in CONDITIONS.values() if c.lever != "channels")
    made.update({lever: lever_table(runs, lever) for lever in levers})
    for name, text in made.items():
        lever = "channels" if name == "best" else name
        only = [key for key, c in CONDITIONS.items() if c.lever == lever and key in runs]
        if only:
            made[name] = "\n".join(f"    {line}" for line in commands(runs, only)) + f"\n\n{text}"
    return made


def rewrite(page: str, made: Mapping[str, str]) -> str:
    """``page`` with the text between each pair of markers replaced."""
    found = re.findall(r"<!-- table: (.+?) -->", page)
    if sorted(found) != sorted(made):
        raise ConfigError(
            f"the page must have one marker per table, {sorted(made)}; found {sorted(found)}; "
            "write <!-- table: NAME --> and <!-- end --> where each belongs"
        )
    return re.sub(
        r"<!-- table: (.+?) -->\n.*?<!-- end -->",
        lambda match: f"<!-- table: {match[1]} -->\n{made[match[1]]}\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


def draw_channels(runs: Runs, path: Path) -> None:
    """The measures of the main conditions along the run, one line a seed."""
    plt = _pyplot()
    names = ("first", "recovery", "hinted", "drift")
    figure, axes = plt.subplots(1, len(names), figsize=(15, 3.6), constrained_layout=True)
    for axis, measure in zip(axes, names, strict=True):
        of = MEASURES[measure].of
        for color, name in enumerate(name for name in CHANNELS if name in runs):
            for number, trail in enumerate(runs[name].values()):
                axis.plot(
                    [point["step"] for point in trail],
                    [of(point) for point in trail],
                    color=f"C{color}",
                    linestyle=("-", "--", ":")[number % 3],
                    marker="o",
                    markersize=3,
                    label=name if number == 0 else None,
                )
        axis.set(title=MEASURES[measure].title, xlabel="optimizer step")
        if measure != "drift":
            axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_levers(runs: Runs, path: Path) -> None:
    """Every lever at its last step, one dot a seed, over the base's range at that step."""
    plt = _pyplot()
    names = [name for name, c in CONDITIONS.items() if c.lever != "channels" and name in runs]
    shown = ("first", "recovery", "hinted", "drift")
    height = 0.28 * max(len(names), 1) + 1.2
    figure, axes = plt.subplots(1, len(shown), figsize=(15, height), sharey=True, constrained_layout=True)
    for axis, measure in zip(axes, shown, strict=True):
        of = MEASURES[measure].of
        for row, name in enumerate(names):
            values = [of(point) for point in points_at(runs, name, LEVER_STEPS).values()]
            axis.scatter(values, [row] * len(values), s=18, color=f"C{_lever_number(name) % 10}")
        base = [of(point) for point in points_at(runs, BASE, LEVER_STEPS).values()]
        if base:
            axis.axvspan(min(base), max(base), color="0.85", zorder=0)
        axis.set(title=MEASURES[measure].title, yticks=range(len(names)))
        axis.set_yticklabels(names, fontsize=8)
        if measure == "drift":
            axis.set_xscale("log")
        else:
            axis.set_xlim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    if names:
        axes[0].invert_yaxis()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _lever_number(name: str) -> int:
    return list(dict.fromkeys(c.lever for c in CONDITIONS.values())).index(CONDITIONS[name].lever)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def report(results: Path, page: Path) -> None:
    """Rewrite the page's tables and draw the pictures beside the results."""
    lines = read(results)
    if not lines:
        raise ConfigError(f"a report needs finished runs; found none in {results}; run some first")
    page.write_text(rewrite(page.read_text(encoding="utf-8"), tables(lines)), encoding="utf-8")
    runs = longest_runs(lines)
    draw_channels(runs, results.parent / "channels.png")
    draw_levers(runs, results.parent / "levers.png")


def quiet() -> None:
    """Keep the libraries' own notes off the terminal."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated.*")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the conditions by name")
    training = commands.add_parser("run", help="train and measure what is not finished")
    training.add_argument("--only", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    training.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    training.add_argument("--steps", type=int, default=None, help="instead of the condition's own")
    training.add_argument("--every", type=int, default=None, help="steps between evaluations, likewise")
    reporting = commands.add_parser("report", help="rewrite the tables and the pictures")
    reporting.add_argument("--page", type=Path, default=PAGE)
    for command in (training, reporting):
        command.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "list":
        for name, condition in CONDITIONS.items():
            print(f"{name:16} {condition.lever:16} {condition.steps:3d} steps  {condition.says}")
    elif arguments.command == "run":
        quiet()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            run_queue(arguments.only, arguments.seeds, arguments.steps, arguments.results, arguments.every)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    else:
        report(arguments.results, arguments.page)


if __name__ == "__main__":
    main()
