"""Training on recorded traces: the same trainer and the same step, with rows read instead of rollouts played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils.data import Sampler

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ComposerError, TaskError
from composer_trl_host.collation import CollationReport, TraceRow
from composer_trl_host.collator import ComposerDataCollator, group_advantages
from composer_trl_host.hinting import LayeredHints
from composer_trl_host.hints import HintGenerator
from composer_trl_host.traces import ReadReport, Trace, read_traces
from composer_trl_host.trainer import KNOWN_KEY, SITES_KEY, ComposerGRPOTrainer

Made = TypeVar("Made")
USELESS = "neither an error site nor an advantage"


class TraceRows:
    """The rows of a folder of traces, and what was met on the way.

    ``rows`` hold something to train: an error site, or a token with an advantage. ``left_out`` counts
    the others. Raises ``TaskError`` where there is nothing to train at all.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        config: ComposerConfig,
        hints: HintGenerator | None,
        seq_len: int | None,
    ) -> None:
        self.reading = ReadReport()
        self.path = path
        self.hints: list[str] = []
        collator = ComposerDataCollator(tokenizer, config, hints=hints, seq_len=seq_len)
        self.collation: CollationReport = collator.report
        traces: list[Trace] = list(read_traces(path, config.trl_host.trace_format, report=self.reading))
        advantages = group_advantages(traces)
        self.scored = sum(value is not None for value in advantages)
        self.rows: list[TraceRow] = []
        self.left_out = 0
        for collated in collator.collate(traces, advantages):
            for row in collated.rows:
                if row.sites or any(row.advantages):
                    self.rows.append(row)
                else:
                    self.left_out += 1
        if isinstance(hints, LayeredHints):
            self.hints = _hint_lines(hints)
        self.recorded_credit = sum(any(row.advantages) for row in self.rows)
        self.recorded_logprobs = sum(row.logprobs is not None for row in self.rows)
        if not traces:
            raise TaskError(
                f"trl_host.traces must hold at least one trace; found none in {path}; {self._why()}"
            )
        if not self.rows or (config.sdpo.active and not self.collation.sites_kept):
            raise TaskError(
                f"training on traces needs an error site: a turn of the model that answers a failed tool call; found "
                f"{self.collation.sites_in} in {len(traces)} traces of {path} and kept {self.collation.sites_kept}; {self._why()}"
            )

    def _why(self) -> str:
        return "; ".join(self.lines()) or "see composer-rl inspect"

    def lines(self) -> list[str]:
        """What a user should know about the input, one line each."""
        read, made = self.reading, self.collation
        lines = [
            f"traces: {read.traces} from {read.files} files; error sites: {made.sites_in} found, {made.sites_kept} kept",
            f"rows: {len(self.rows)}; with an advantage {self.recorded_credit}, with recorded log-probs {self.recorded_logprobs}",
        ]
        lines += self.hints
        for name, numbers in sorted(read.bad_lines.items()):
            shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
            lines.append(f"lines that are no JSON: {len(numbers)} in {name} ({shown})")
        lines += [f"file left out: {name}: {why}" for name, why in sorted(read.skipped_files.items())]
        if read.unanswered:
            lines.append(f"failed calls without an answer, no sites: {read.unanswered}")
        for count, what in (
            *((count, f"skipped: {reason}") for reason, count in sorted(read.skipped.items())),
            *((count, note) for note, count in sorted(read.notes.items())),
            *((count, f"error sites left out: {reason}") for reason, count in sorted(made.dropped.items())),
            *((count, note) for note, count in sorted(made.notes.items())),
        ):
            lines.append(f"{what}: {count}")
        if made.cut_rows:
            lines.append(
                f"rows whose beginning was cut to fit seq_len: {made.cut_rows} ({made.cut_tokens} tokens)"
            )
        if self.left_out:
            lines.append(f"rows left out, with {USELESS}: {self.left_out}")
        if not self.recorded_credit:
            lines.append(
                "no advantages: no rewards in groups of two or more were recorded, so channel 1 trains nothing"
            )
        return lines


def _hint_lines(hints: LayeredHints) -> list[str]:
    layers: Counter[str] = Counter()
    for source, count in hints.answered.items():
        layers[source.partition("/")[0]] += count
    lines = (
        [f"hints: {', '.join(f'{name} {count}' for name, count in sorted(layers.items()))}"] if layers else []
    )
    return [
        *lines,
        *(
            f"hint layer {name} failed: {reason}: {count}"
            for (name, reason), count in sorted(hints.failures.items())
        ),
    ]


def made_once(make: Callable[[], Made]) -> Made:
    """What ``make`` gives on the first process, on every process: hints that come from elsewhere need not be
    the same twice, and ranks with different rows would wait for each other for ever. Its error is raised on
    all of them."""
    state = PartialState()
    if state.num_processes == 1:
        return make()
    box: list[Any] = [None, None]
    if state.is_main_process:
        try:
            box[0] = make()
        except ComposerError as error:
            box[1] = error
    broadcast_object_list(box, from_process=0)
    if box[1] is not None:
        raise box[1]
    made: Made = box[0]
    return made


class TraceTrainer(ComposerGRPOTrainer):
    """``ComposerGRPOTrainer`` on ``rows``. Nothing is generated and no reward function is asked."""

    plays_live = False

    def __init__(self, *args: Any, rows: Sequence[TraceRow], **kwargs: Any) -> None:
        self.trace_rows = list(rows)
        super().__init__(*args, reward_funcs=[_no_reward], **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        return _EveryRow(
            len(self.trace_rows),
            self.args.generation_batch_size,
            self.args.steps_per_generation,
            max(self.args.max_steps, 1) * self.args.gradient_accumulation_steps,
            self.args.seed,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [self.trace_rows[item["row"]] for item in inputs]
        pad = self._tokenizer.pad_token_id
        device = self.accelerator.device
        prompts = [row.ids[: row.prompt_length] for row in rows]
        completions = [row.ids[row.prompt_length :] for row in rows]

        def behind(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
            parts = [list(value[row.prompt_length :]) for value, row in zip(values, rows, strict=True)]
            return _padded(parts, 0, False, dtype).to(device)

        known = [row.logprobs is not None for row in rows]
        output: dict[str, Any] = {
            "prompt_ids": _padded(prompts, pad, True, torch.long).to(device),
            "prompt_mask": _padded([[1] * len(ids) for ids in prompts], 0, True, torch.long).to(device),
            "completion_ids": _padded(completions, pad, False, torch.long).to(device),
            "completion_mask": _padded([[1] * len(ids) for ids in completions], 0, False, torch.long).to(
                device
            ),
            "tool_mask": behind([row.trained for row in rows], torch.long),
            "advantages": behind([row.advantages for row in rows], torch.float32),
            KNOWN_KEY: torch.tensor(known, device=device),
            SITES_KEY: [list(row.sites) for row in rows],
        }
        output["sampling_per_token_logps"] = behind(
            [row.logprobs or (0.0,) * len(row.ids) for row in rows], torch.float32
        )
        return output


class _EveryRow(Sampler[int]):
    """Rows in shuffled order, epoch behind epoch without a gap, so that none is left out at an epoch's end.

    Each generation batch is repeated as often as TRL asks for it.
    """

    def __init__(self, rows: int, batch: int, repeats: int, micro_steps: int, seed: int) -> None:
        self.rows, self.batch, self.repeats, self.seed = rows, batch, repeats, seed
        self.batches = -(-micro_steps // repeats)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        waiting: list[int] = []
        for _ in range(self.batches):
            while len(waiting) < self.batch:
                waiting += torch.randperm(self.rows, generator=generator).tolist()
            chunk, waiting = waiting[: self.batch], waiting[self.batch :]
            for _ in range(self.repeats):
                yield from chunk

    def __len__(self) -> int:
        return self.batches * self.batch * self.repeats


def _no_reward(**_: Any) -> list[float]:
    raise RuntimeError("a reward was asked for where traces are trained")


def _padded(rows: Sequence[Sequence[Any]], fill: Any, left: bool, dtype: torch.dtype) -> Tensor:
    width = max(len(row) for row in rows)
    padding = [[fill] * (width - len(row)) for row in rows]
    return torch.tensor(
        [[*pad, *row] if left else [*row, *pad] for pad, row in zip(padding, rows, strict=True)], dtype=dtype
    )
