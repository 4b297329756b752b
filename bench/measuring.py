"""What the benches of a training step share: shapes and batches, measuring in turn, the record of a run."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from shapes import GENERATION_PROMPT, Shape
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from composer_prime_plugin import ComposerConfig
from composer_trl_host.alignment import ErrorSite, build_site_batch
from composer_trl_host.compose import ComposedLoss, compose_loss
from composer_trl_host.embedded import MODEL_NAME, embedded_model

T = TypeVar("T")
PACKAGES = ("torch", "transformers", "trl", "accelerate")


def configured(weight: float) -> ComposerConfig:
    """PRIME-RL's default objective and channel 2 with ``weight``."""
    return ComposerConfig(policy={"objective": "dppo"}, sdpo={"weight": weight})


OFF = configured(0.0)
ON = configured(0.5)


def make_batch(shape: Shape, vocab: int) -> dict[str, Any]:
    """Random tokens; the sites are equal parts of the recovery tokens, the last at the row's end."""
    for name, tokens in (("recovery", shape.recovery), ("hint", shape.hint)):
        if tokens % shape.sites:
            raise SystemExit(
                f"{name} must divide between {shape.sites} sites; found {tokens} tokens; the batches would hold "
                "different tokens"
            )
    each = shape.recovery // shape.sites
    period = each + GENERATION_PROMPT + 1
    if shape.completion < each + (shape.sites - 1) * period or shape.prompt <= GENERATION_PROMPT:
        raise SystemExit(f"the sites must fit into the completion, and their hints behind it; found {shape}")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocab - 10, (shape.rows, shape.total), generator=generator)
    completion = torch.zeros(ids.shape, dtype=torch.bool)
    completion[:, shape.prompt :] = True
    hints = torch.randint(10, vocab - 10, (shape.hint,), generator=generator).tolist()
    per_site = shape.hint // shape.sites
    sites = []
    for number in range(shape.sites):
        stop = shape.total - (shape.sites - 1 - number) * period
        hint = tuple(hints[number * per_site : (number + 1) * per_site])
        sites.append(ErrorSite(stop - each, stop, stop - each - GENERATION_PROMPT, hint, "bench", "x"))
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": completion,
        "response_mask": completion,
        "advantages": torch.randn(shape.rows, generator=generator),
        "inference_logprobs": None,
    }
    batch.update(build_site_batch(ids.tolist(), [sites] * shape.rows, [0] * shape.rows, 0).as_batch())
    return batch


def teacher_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens that the teacher reads behind the student's prefix: per site the token before the hint, the
    hint, the generation prompt and the recovery."""
    behind = (batch["teacher_prefix"] - 1).clamp(min=0)
    return int((batch["teacher_attention_mask"].sum(dim=1) - behind).sum())


def load(name: str | None) -> tuple[Any, str]:
    """The model in float32, training, and what it is called. None: the embedded one."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(name or str(embedded_model()), dtype=torch.float32)
    found = {parameter.dtype for parameter in model.parameters()}
    if found != {torch.float32}:
        raise SystemExit(
            f"every parameter must be float32, or the sides are not compared alike; found {found}"
        )
    return model.train(), MODEL_NAME if name is None else Path(name).name


def ours(model: Any, batch: Mapping[str, Any], config: ComposerConfig) -> ComposedLoss:
    """Forward and backward of one micro-batch."""
    result = compose_loss(model, batch, config)
    result.loss.backward()
    return result


def seconds(model: Any, run: Callable[[], Tensor]) -> float:
    """Seconds of ``run``, which gives a loss, and of its backward, from a model without gradients."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = run()
    loss.backward()
    took = time.perf_counter() - start
    if not bool(torch.isfinite(loss.detach())):
        raise SystemExit(f"a measured loss must be finite; found {float(loss.detach())}")
    return took


def in_turn(calls: Mapping[str, Callable[[], T]], rounds: int, warm: bool = True) -> dict[str, list[T]]:
    """What each call gives in every round. Each round runs all of them, every second one backwards."""
    taken: dict[str, list[T]] = {name: [] for name in calls}
    for call in calls.values() if warm else ():
        call()
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else reversed(list(calls)):
            taken[name].append(calls[name]())
    return taken


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round."""
    return [mine / other for mine, other in zip(over, under, strict=True)]


def growth(values: Sequence[float]) -> float:
    """The last over the first, less one."""
    return values[-1] / values[0] - 1.0


@dataclass(frozen=True)
class Row:
    """One figure: the median of ``values``, one per round. ``target``: what it must be at most."""

    name: str
    says: str
    values: Sequence[float]
    shape: Shape | None = None
    unit: str = "ratio"
    target: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_dict(self) -> dict[str, Any]:
        met = None if self.target is None else self.median <= self.target
        return {**asdict(self), "median": self.median, "met": met}

    def __str__(self) -> str:
        text = f"{self.name}: {self.says}: {self.median:.3f} {self.unit}"
        text += f" ({min(self.values):.3f} to {max(self.values):.3f} in {len(self.values)})"
        if self.target is not None:
            met = "met" if self.median <= self.target else "MISSED"
            text += f", at most {self.target:g}: {met}"
        return text


class Record:
    """The rows of one bench, printed as they come and written at the end."""

    def __init__(self, bench: str, model: str, parameters: int) -> None:
        self.rows: list[Row] = []
        self.head = {
            "bench": bench,
            "model": model,
            "parameters": parameters,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load_at_start": _load(),
            "versions": {"python": platform.python_version(), **_versions()},
        }
        versions = ", ".join(f"{name} {version}" for name, version in self.head["versions"].items())
        print(
            f"{model}, {parameters / 1e6:.1f}M parameters, float32, {self.head['threads']} threads, {versions}"
        )
        if self.head["load_at_start"] > 0.5:
            print(
                f"load average {self.head['load_at_start']} at the start: the machine is not quiet, nor the times"
            )

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)

    def write(self, path: Path | None) -> None:
        if path is not None:
            rows = [row.as_dict() for row in self.rows]
            path.write_text(json.dumps({**self.head, "load_at_end": _load(), "rows": rows}, indent=2) + "\n")


def _load() -> float:
    return round(os.getloadavg()[0], 2) if sys.platform != "win32" else 0.0


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per field of a shape."""
    for name in asdict(Shape()):
        parser.add_argument(f"--{name}", type=int, default=None, help="of the shape")


def shape_of(arguments: argparse.Namespace, default: Shape) -> Shape:
    """``default`` with the fields that the command line names."""
    given = {name: getattr(arguments, name) for name in asdict(default)}
    return replace(default, **{name: value for name, value in given.items() if value is not None})


def parser_of(description: str | None, parts: Sequence[str], pairs: int) -> argparse.ArgumentParser:
    """The options that every bench of a step has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None, help="a folder or a name instead of the embedded model")
    parser.add_argument("--pairs", type=int, default=pairs, help=f"rounds (default {pairs})")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every figure there")
    return parser
