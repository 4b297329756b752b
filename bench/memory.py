"""Peak memory of an SDPO step over a step of TRL's ``GRPOTrainer`` without SDPO.

    python bench/memory.py [--pairs 3] [--only grpo trl_sdpo off] [--checkpointing] [--json FILE]

Every figure comes from a fresh process that loads the model, builds TRL's trainer where it is theirs, reads
every weight once, and then runs forward and backward twice: the peak of its resident memory less what it held
before. Both sides thus count activations, logits and gradients, and neither the weights nor an optimizer;
float32. Without ``--checkpointing`` activations are kept; with it they are formed again on both sides, as TRL's
own default has it, and our teacher reads its whole sequence. ``grpo``: over TRL's GRPO step. ``trl_sdpo``: over TRL's SDPO step
(full logits, weight 0.5, live teacher). ``off``: over ours with ``sdpo.weight = 0``. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measuring import (
    OFF,
    ON,
    Record,
    Row,
    Shape,
    add_shape_arguments,
    in_turn,
    load,
    make_batch,
    ours,
    parser_of,
    ratios,
    shape_of,
)

PARTS = {
    "grpo": "the SDPO step over TRL's GRPOTrainer step without SDPO",
    "trl_sdpo": "the SDPO step over TRL's SDPOTrainer step",
    "off": "the SDPO step over the same with sdpo.weight = 0",
}
SIDES = ("on", *PARTS)
TARGET = 0.6
STATUS = Path("/proc/self/status")
MIB = 2**20


@dataclass(frozen=True)
class Found:
    """What one process measured: resident bytes before and at the peak, the policy's loss, and a digest of
    weights and ids."""

    before: int
    peak: int
    policy: float
    digest: str

    @property
    def added(self) -> int:
        return self.peak - self.before


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the peak) of this process in bytes."""
    if not STATUS.exists():
        raise SystemExit(f"memory is read from {STATUS}; found no such file; run this on Linux")
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Give freed memory back and let the peak begin here."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    if resident("VmHWM") > resident("VmRSS") + 16 * MIB:
        raise SystemExit(
            "the peak must begin at the step; found an earlier one, which the kernel did not forget"
        )


def digest(model: Any, batch: dict[str, Any]) -> str:
    """Of every weight and the ids. It also brings a file's mapped weights into memory."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in (*model.parameters(), batch["input_ids"]):
        state.update(tensor.detach().contiguous().numpy().data)
    return state.hexdigest()


def step_of(side: str, model: Any, name: str | None, shape: Shape, folder: Path) -> Callable[[], float]:
    """Forward and backward of a side; gives the policy's part of the loss."""
    vocab = model.config.vocab_size
    if side in ("on", "off"):
        batch, config = make_batch(shape, vocab), ON if side == "on" else OFF

        def run() -> float:
            found = ours(model, batch, config)
            return float(found.policy_sum) / found.loss_tokens

        return run
    from transformers import AutoTokenizer
    from trl_steps import build_trainer, check_inputs, embedded_model, their_inputs

    tokenizer = AutoTokenizer.from_pretrained(name or str(embedded_model()))
    trainer = build_trainer(side.removeprefix("trl_"), model, tokenizer, shape, folder)
    inputs = their_inputs(shape, vocab)
    check_inputs(make_batch(shape, vocab), inputs)

    def run_theirs() -> float:
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        if side == "grpo":
            return float(loss.detach())
        return float(trainer._metrics["train"]["self_distillation/policy_loss"][-1])

    return run_theirs


def child(side: str, name: str | None, shape: Shape, checkpointing: bool = False, steps: int = 2) -> Found:
    """The measurement itself, to be made in a process of its own."""
    model, _ = load(name)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with tempfile.TemporaryDirectory() as folder:
        run = step_of(side, model, name, shape, Path(folder))
        mark = digest(model, make_batch(shape, model.config.vocab_size))
        reset_peak()
        before = resident("VmRSS")
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            policy = run()
        return Found(before, resident("VmHWM"), policy, mark)


def fresh(side: str, name: str | None, shape: Shape, checkpointing: bool = False) -> Found:
    """``child`` in a fresh process."""
    asked = {"model": name, "shape": asdict(shape), "checkpointing": checkpointing}
    command = [sys.executable, __file__, "--child", side, json.dumps(asked)]
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        # With arenas per thread the peak would hang on how threads are scheduled.
        "MALLOC_ARENA_MAX": "1",
        # glibc's own threshold, held where it starts: above it a tensor is a mapping of its own and leaves with
        # the tensor. Left to itself it moves up to 32 MiB, and the peak counts the holes in the heap.
        "MALLOC_MMAP_THRESHOLD_": str(128 * 1024),
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the process of {side} failed:\n{done.stderr[-2000:]}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


class Processes:
    """Fresh processes of one shape, whose weights, ids and policy loss must all be the same."""

    def __init__(self, name: str | None, shape: Shape, start: Callable[..., Found]) -> None:
        self.name, self.shape, self.start = name, shape, start
        self.first: Found | None = None
        self.peaks: dict[str, list[int]] = {}

    def added(self, side: str) -> float:
        """Bytes that the side's steps took."""
        found = self.start(side, self.name, self.shape)
        self.first = self.first or found
        if found.digest != self.first.digest:
            raise SystemExit(f"every process must hold the same weights and ids; {side} holds others")
        if not abs(found.policy - self.first.policy) <= 1e-4 * max(abs(self.first.policy), 1e-3):
            raise SystemExit(
                f"every side must compute one policy loss; {side} found {found.policy}, not {self.first.policy}"
            )
        self.peaks.setdefault(side, []).append(found.peak)
        return float(found.added)


def measure(name: str | None, shape: Shape, pairs: int, parts: list[str], start: Any = fresh) -> list[Row]:
    """The ratios asked for, from one set of rounds."""
    processes = Processes(name, shape, start)
    calls = {side: (lambda side=side: processes.added(side)) for side in SIDES if side in ("on", *parts)}
    taken = in_turn(calls, pairs, warm=False)
    rows = []
    for part in parts:
        details = {
            "added_mib_ours": [value / MIB for value in taken["on"]],
            "added_mib_other": [value / MIB for value in taken[part]],
            "whole_process": [
                a / b for a, b in zip(processes.peaks["on"], processes.peaks[part], strict=True)
            ],
        }
        target = TARGET if part == "grpo" else None
        rows.append(
            Row(part, PARTS[part], ratios(taken["on"], taken[part]), shape, target=target, details=details)
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__, list(PARTS), 3)
    add_shape_arguments(parser)
    parser.add_argument("--checkpointing", action="store_true", help="form activations again in the backward")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "JSON"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        side, described = arguments.child
        asked = json.loads(described)
        found = child(side, asked["model"], Shape(**asked["shape"]), asked["checkpointing"])
        print(json.dumps(asdict(found)))
        return
    shape = shape_of(arguments, Shape(rows=2))
    model, name = load(arguments.model)
    record = Record("memory", name, model.num_parameters())
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters()) / MIB
    del model
    print(f"{shape}; each side's figure holds the gradients, {gradients:.0f} MiB, and not the weights")
    start = partial(fresh, checkpointing=arguments.checkpointing)
    for row in measure(arguments.model, shape, arguments.pairs, arguments.only, start):
        record.add(row)
        mine, other = (statistics.median(row.details[f"added_mib_{side}"]) for side in ("ours", "other"))
        print(f"  ours {mine:.0f} MiB, other {other:.0f} MiB (medians)")
    record.write(arguments.json)


if __name__ == "__main__":
    main()
