"""A run on the TRL host, from the TOML to the table at the end."""

from __future__ import annotations

import dataclasses
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback, set_seed

from composer_prime_plugin.cli import INTERRUPT_EXIT
from composer_prime_plugin.errors import ConfigError, TaskError
from composer_prime_plugin.runfile import RunFile
from composer_trl_host.assembly import (
    DEFAULT_SEQ_LEN,
    grpo_config,
    hints_for,
    lr_factor_of,
    named_hints,
    set_optimizer,
)
from composer_trl_host.chat import Chat
from composer_trl_host.embedded import embedded_note
from composer_trl_host.environment import Environment, Split
from composer_trl_host.evaluate import Evaluation, Evaluator
from composer_trl_host.guards import GUARD_EXIT, GuardWatch
from composer_trl_host.loading import load_model, load_object, lora_config
from composer_trl_host.offline import TraceRows, TraceTrainer, made_once
from composer_trl_host.report import (
    CURVES_FILE,
    METRICS_FILE,
    ConsoleReport,
    GracefulStop,
    MetricsWriter,
    draw_curves,
    logged_steps,
    print_summary,
    summarize,
)
from composer_trl_host.resolved import RESOLVED_FILE, resolved_json
from composer_trl_host.rollout import Player, RolloutRunner
from composer_trl_host.settings import HostSettings
from composer_trl_host.trainer import ComposerGRPOTrainer
from composer_trl_host.verifiers_env.heldout import HeldOut
from composer_trl_host.verifiers_env.source import find_source


def run_host(run: RunFile, console: Console | None = None) -> int:
    """Train ``run`` in this process. Returns the exit code: 0, 3 where a guard of
    ``trl_host.guards.stop`` ended it, or 130 after a graceful stop.

    Writes into ``output_dir``: the configuration as resolved, ``metrics.jsonl`` (one line per step,
    flushed), checkpoints and the picture of the curves. A folder that already holds a run is moved
    aside, unless the run resumes it. Raises ``ComposerError`` for anything the user has to change.
    """
    console = console or Console(soft_wrap=True)
    settings = HostSettings.from_run(run)
    for item in settings.unhonoured:
        console.print(f"not honoured by the TRL host: {item}", highlight=False, markup=False)
    main = int(os.environ.get("RANK", "0")) == 0
    checkpoint = _checkpoint(settings)
    if main:
        _prepare_folder(settings, resuming=checkpoint is not None, console=console)
    _quiet_libraries()
    console.print(f"model:   {settings.model_name or embedded_note()}", highlight=False, markup=False)
    set_seed(settings.seed)
    built = build_any(settings, run)
    trainer = built.trainer
    for line in built.notes:
        console.print(line, highlight=False, markup=False)
    writer = MetricsWriter(settings.run_dir / METRICS_FILE)
    earlier = (
        [] if checkpoint is None else logged_steps(settings.run_dir / METRICS_FILE, _step_of(checkpoint))
    )
    report = ConsoleReport(console, settings.max_steps, earlier)
    stop = GracefulStop(console)
    start = end = None
    trainer.remove_callback(PrinterCallback)
    heldout = built.evaluation
    if heldout is not None:
        heldout.say = lambda line: console.print(line, highlight=False, markup=False)
        heldout.write = writer.write
    # Signals first, so that they are heeded in the evaluation. The report behind it: it counts the first step's seconds from
    # when it is told that training begins.
    for callback in (stop, heldout, writer, report):
        if callback is not None:
            trainer.add_callback(callback)
    if main:
        trainer.guards.say = lambda line: console.print(line, highlight=False, markup=False)
    try:
        evaluator = None if built.runner is None else Evaluator(built.runner, built.heldout, settings.seed)
        # A resumed run is measured at its start too: the checkpoint is loaded by train(), so these are the
        # first weights again, and the same errors are replayed as in the run that was stopped.
        start = _evaluate(trainer, evaluator, writer, console, "start", write=checkpoint is None)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finished = trainer.state.global_step >= settings.max_steps
        end = _evaluate(trainer, evaluator, writer, console, "end") if finished else None
        if heldout is not None and finished:
            heldout.finish(trainer.state.global_step)
    except KeyboardInterrupt:
        report.stop()
        console.print(f"interrupted; {_how_to_go_on(run, settings)}", highlight=False, markup=False)
        return INTERRUPT_EXIT
    finally:
        report.stop()
        stop.restore()
        writer.close()
        if main and report.history:
            draw_curves(report.history, settings.run_dir / CURVES_FILE)
        built.close()
    if main:
        _close(console, settings, built, report, trainer.guards, start, end)
    ended_by = trainer.guards.stopped_by
    if ended_by is not None:
        message = "the run is complete" if finished else _how_to_go_on(run, settings)
        console.print(
            f"stopped by guard {ended_by.name} after step {trainer.state.global_step}; {message}",
            highlight=False,
            markup=False,
        )
        return GUARD_EXIT
    if not finished:
        message = f"stopped after step {trainer.state.global_step}; {_how_to_go_on(run, settings)}"
        console.print(message, highlight=False, markup=False)
        return INTERRUPT_EXIT
    return 0


def _how_to_go_on(run: RunFile, settings: HostSettings) -> str:
    words = [word for word in run.arguments if word != "--resume"]
    if not _checkpoints(settings):
        return f"no checkpoint was written; start again with: composer-rl run {shlex.join(words)}"
    return f"go on with: composer-rl run {shlex.join(words)} --resume"


@dataclass(frozen=True)
class Built:
    """What a run trains with. ``runner`` and the ``heldout`` rows: of a live task; traces have neither.
    ``evaluation``: of environments of verifiers, which have no such rows. ``notes``: lines about the input. ``close``
    ends what the run started besides."""

    trainer: ComposerGRPOTrainer
    runner: Player | None = None
    heldout: Sequence[dict[str, Any]] = ()
    evaluation: HeldOut | None = None
    notes: Sequence[str] = ()
    close: Callable[[], None] = lambda: None


def build_any(settings: HostSettings, run: RunFile) -> Built:
    """The run that the settings ask for: recorded traces, an environment of verifiers, or a live task."""
    host = settings.config.trl_host
    source = None if host.environment is not None or host.traces else find_source(run.document)
    if source is None and host.vllm_base_url is not None:
        raise ConfigError(
            "trl_host.vllm_base_url must stand with environments of verifiers, which alone are sampled there; found none; remove "
            "it, or set [[orchestrator.train.source]]"
        )
    if host.traces:
        return build_offline(settings)
    if source is None:
        return Built(*build(settings))
    from composer_trl_host.verifiers_env.build import build_verifiers

    made = build_verifiers(settings, source)
    return Built(
        made.trainer, made.runner, evaluation=made.heldout, notes=made.notes, close=made.runner.close
    )


def build_offline(settings: HostSettings) -> Built:
    """The trainer of recorded traces (``trl_host.traces``)."""
    host = settings.config.trl_host
    assert host.traces is not None
    if host.environment is not None:
        raise ConfigError(
            f"trl_host must have either traces or environment; found {host.traces!r} and {host.environment!r}; remove one"
        )
    if settings.batch_size < 2:
        raise ConfigError(
            f"batch_size must be at least 2 on this host; found {settings.batch_size}; raise it"
        )
    model, tokenizer = load_model(settings)
    hints = hints_for(settings, tokenizer)
    # Rows come from a file, not from groups of a prompt; TRL only checks that the number divides the batch.
    args = grpo_config(dataclasses.replace(settings, group_size=settings.batch_size), turn_tokens=1)
    assert args.device is not None  # sets up the processes, which share what one of them read
    path = (settings.base_dir / Path(host.traces).expanduser()).resolve()
    source = made_once(
        lambda: TraceRows(path, tokenizer, settings.config, hints, settings.seq_len or DEFAULT_SEQ_LEN)
    )
    trainer = TraceTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(
            [{"row": number, "prompt": ""} for number in range(len(source.rows))]
        ),
        processing_class=tokenizer,
        peft_config=lora_config(settings),
        composer_config=settings.config,
        rows=source.rows,
        lr_factor=lr_factor_of(settings),
    )
    set_optimizer(trainer, settings)
    return Built(trainer, notes=source.lines())


def build(settings: HostSettings) -> tuple[ComposerGRPOTrainer, RolloutRunner, list[dict[str, Any]]]:
    """The trainer, its rollout runner and the held-out rows of a live task."""
    host = settings.config.trl_host
    if host.environment is None:
        raise ConfigError(
            "trl_host must name what to train on; found neither environment nor traces; set environment to file.py:Class "
            "or package.module.Class, or traces to a file or folder, under [trainer.loss.kwargs.trl_host], or "
            "[[orchestrator.train.source]] to environments of verifiers 0.4"
        )
    environment = load_object(host.environment, settings.base_dir, "trl_host.environment")
    if isinstance(environment, type) or not isinstance(environment, Environment):
        environment = environment(**host.environment_kwargs)
    missing = [name for name in ("name", "hints", "rows", "episode") if not hasattr(environment, name)]
    if missing:
        raise TaskError(
            f"trl_host.environment must have name, hints, rows() and episode(); {host.environment} lacks "
            f"{' and '.join(missing)}; see docs/environments.md"
        )
    hints = named_hints(settings) or environment.hints
    model, tokenizer = load_model(settings)
    chat = Chat(tokenizer)
    if hints is None and settings.config.sdpo.active:
        raise ConfigError(
            f"sdpo.weight = {settings.config.sdpo.weight} needs hints; {host.environment} has none (hints = None); give the "
            "environment a hint generator, set trl_host.hints, or set sdpo.weight = 0"
        )
    rows = _rows(environment, "train", host.train_rows, settings.seed)
    prompts = settings.batch_size // settings.group_size
    if len(rows) < prompts:
        raise ConfigError(
            f"a step needs batch_size / group_size = {prompts} prompts; found trl_host.train_rows = {len(rows)}; raise it"
        )
    turn_tokens = _turn_tokens(
        settings, [len(chat.prompt_ids(environment.episode(row).prompt)) for row in rows]
    )
    heldout = _rows(environment, "heldout", host.heldout_rows, settings.seed) if host.heldout_rows else []
    dataset = Dataset.from_list([{**row, "prompt": environment.episode(row).prompt} for row in rows])
    longest_context = None if settings.seq_len is None else settings.seq_len - turn_tokens
    runner = RolloutRunner(environment, chat, hints, settings.config, (), longest_context)
    trainer = ComposerGRPOTrainer(
        model=model,
        args=grpo_config(settings, turn_tokens),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora_config(settings),
        composer_config=settings.config,
        runner=runner,
        lr_factor=lr_factor_of(settings),
    )
    runner.eos_token_ids = tuple(trainer.eos_token_ids)
    set_optimizer(trainer, settings)
    return trainer, runner, heldout


def _rows(environment: Environment, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    rows = environment.rows(split, count, seed)
    if len(rows) != count:
        raise TaskError(
            f"rows({split!r}, {count}, seed) must give {count} rows; {environment.name} gave {len(rows)}; repeat rows "
            f"where there are fewer, or set trl_host.{'train' if split == 'train' else 'heldout'}_rows"
        )
    return rows


def _turn_tokens(settings: HostSettings, prompt_lengths: list[int]) -> int:
    """Tokens that one turn of the model may take. Unset, the room behind the longest prompt is shared
    between the turns."""
    if settings.max_completion_tokens is not None:
        return settings.max_completion_tokens
    seq_len = settings.seq_len or DEFAULT_SEQ_LEN
    room = (seq_len - max(prompt_lengths)) // settings.config.trl_host.max_turns
    if room < 1:
        raise ConfigError(
            f"seq_len must leave room for {settings.config.trl_host.max_turns} turns behind the longest prompt of "
            f"{max(prompt_lengths)} tokens; found {seq_len}; raise seq_len or set max_completion_tokens"
        )
    return room


def _evaluate(
    trainer: ComposerGRPOTrainer,
    evaluator: Evaluator | None,
    writer: MetricsWriter,
    console: Console,
    when: str,
    write: bool = True,
) -> Evaluation | None:
    if evaluator is None or not evaluator.rows:
        return None
    console.print(f"held-out evaluation ({when}): {len(evaluator.rows)} prompts", highlight=False)
    result = evaluator.evaluate(trainer.sample_turns)
    if write and trainer.accelerator.is_main_process:
        writer.write({"step": trainer.state.global_step, "evaluation": when, **result.as_metrics()})
    return result


def _checkpoint(settings: HostSettings) -> Path | None:
    """The checkpoint folder that ``resume`` names, or None."""
    if settings.resume is None:
        return None
    found = _checkpoints(settings)
    step = max(found, default=None) if settings.resume == "latest" else settings.resume
    if step not in found:
        have = ", ".join(map(str, sorted(found))) or "none"
        raise ConfigError(
            f"resume must name a checkpoint in {settings.run_dir}; found steps: {have}; asked for {settings.resume}; "
            "name one of them, or leave resume out to start"
        )
    if step is not None and step >= settings.max_steps:
        raise ConfigError(
            f"max_steps must be above the step to resume from; found step {step} of max_steps = {settings.max_steps}: that run "
            "is complete; raise max_steps"
        )
    return found[step]


def _checkpoints(settings: HostSettings) -> dict[int, Path]:
    """The complete checkpoints of the run folder by step."""
    return {
        _step_of(path): path
        for path in settings.run_dir.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit() and (path / "trainer_state.json").is_file()
    }


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _prepare_folder(settings: HostSettings, resuming: bool, console: Console) -> None:
    folder = settings.run_dir
    try:
        _make_folder(folder, resuming, console)
        (folder / RESOLVED_FILE).write_text(resolved_json(settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"output_dir must be a folder that can be written; {folder} fails with {error.strerror or error}; set output_dir"
        ) from error


def _make_folder(folder: Path, resuming: bool, console: Console) -> None:
    if not resuming and (folder / METRICS_FILE).exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        console.print(f"an earlier run was moved to {aside}", highlight=False)
    folder.mkdir(parents=True, exist_ok=True)


def _close(
    console: Console,
    settings: HostSettings,
    built: Built,
    report: ConsoleReport,
    guards: GuardWatch,
    start: Evaluation | None,
    end: Evaluation | None,
) -> None:
    summary = summarize(report.history, start, end)
    print_summary(console, summary)
    if built.evaluation is not None:
        built.evaluation.print_table(console)
    for reason, count in sorted(built.runner.dropped.items()) if built.runner is not None else ():
        console.print(f"error sites left out: {count} ({reason})", highlight=False)
    if guards.findings:
        found = ", ".join(f"{finding.name} (step {finding.step})" for finding in guards.findings)
        console.print(f"guards that spoke: {found}", highlight=False, markup=False)
    names = [
        RESOLVED_FILE,
        METRICS_FILE,
        CURVES_FILE,
        *sorted(p.name for p in settings.run_dir.glob("checkpoint-*")),
    ]
    console.print(f"run folder: {settings.run_dir}  ({', '.join(names)})", highlight=False)


def _quiet_libraries() -> None:
    """Keep warnings that a user of this program can do nothing about off the terminal."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for message in (
        ".*gradient_checkpointing.* is deprecated.*",
        ".*lr_scheduler.step.*",
        ".*broadcast_buffers.* is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
