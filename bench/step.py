"""What SDPO adds to a training step: time and peak memory, as ratios to the same step with weight 0.

    python bench/step.py [--model NAME] [--pairs 5] [--only NAME ...]

One process, alternating, medians of ratios; forward and backward of ``compose_loss`` (no optimizer,
which costs both sides the same). Before a ratio is printed, the shared-prefix loss is checked against
the plain one (full logits, full teacher). Rows: the shapes of docs/performance.md.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from composer_prime_plugin import ComposerConfig
from composer_trl_host import reading
from composer_trl_host.alignment import ErrorSite, build_site_batch
from composer_trl_host.compose import compose_loss
from composer_trl_host.embedded import embedded_model

OFF = ComposerConfig(policy={"objective": "dppo"})
ON = ComposerConfig(policy={"objective": "dppo"}, sdpo={"weight": 0.5})


@dataclass(frozen=True)
class Shape:
    """A batch: rows, prompt and completion tokens, sites per row sharing the recovery tokens, hint tokens."""

    rows: int = 4
    prompt: int = 256
    completion: int = 512
    recovery: int = 128
    hint: int = 48
    sites: int = 1

    def __str__(self) -> str:
        return (
            f"B {self.rows}, prompt {self.prompt}, completion {self.completion}, recovery {self.recovery}, "
            f"hint {self.hint}, {self.sites} sites a row"
        )


SHAPES = {
    "base": Shape(),
    "sites": Shape(sites=8),
    "short": Shape(rows=2, prompt=128, completion=384),
    "long": Shape(rows=2, prompt=128, completion=896),
}


def make_batch(shape: Shape, vocab: int) -> dict[str, Any]:
    """Random tokens; the sites are equal parts of the recovery tokens, spread over the completion's end."""
    generator = torch.Generator().manual_seed(0)
    total = shape.prompt + shape.completion
    ids = torch.randint(10, vocab - 10, (shape.rows, total), generator=generator)
    completion = torch.zeros(ids.shape, dtype=torch.bool)
    completion[:, shape.prompt :] = True
    each = shape.recovery // shape.sites
    hint = tuple(torch.randint(10, vocab - 10, (shape.hint // shape.sites,), generator=generator).tolist())
    sites = [
        [ErrorSite(stop - each, stop, stop - each - 3, hint, "bench", "x")]
        for stop in range(total - (shape.sites - 1) * (each + 4), total + 1, each + 4)
    ]
    row_sites = [site for (site,) in sites]
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": completion,
        "response_mask": completion,
        "advantages": torch.randn(shape.rows, generator=generator),
        "inference_logprobs": None,
    }
    batch.update(build_site_batch(ids.tolist(), [row_sites] * shape.rows, [0] * shape.rows, 0).as_batch())
    return batch


def step(model: Any, batch: dict[str, Any], config: ComposerConfig) -> tuple[float, float]:
    """Seconds of one forward and backward, and the loss."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = compose_loss(model, batch, config).loss
    loss.backward()
    return time.perf_counter() - start, float(loss.detach())


def check(model: Any, batch: dict[str, Any]) -> None:
    """The two ways of reading must give the same loss before their times are compared."""
    with torch.no_grad():
        mine = float(compose_loss(model, batch, ON).loss)
        parts, reading._parts = reading._parts, lambda _model: (None, None)
        try:
            plain = float(compose_loss(model, batch, ON).loss)
        finally:
            reading._parts = parts
    if abs(mine - plain) > 1e-4 * abs(plain):
        raise SystemExit(f"both readings must give one loss; found {mine} and {plain}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), default=[])
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model or str(embedded_model()), dtype=torch.float32
    )
    model.train()
    vocab = model.config.vocab_size
    shapes = {name: shape for name, shape in SHAPES.items() if not arguments.only or name in arguments.only}
    print(f"{model.config.model_type}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, shape in shapes.items():
        batch = make_batch(shape, vocab)
        check(model, batch)
        step(model, batch, OFF)
        pairs = []
        for _ in range(arguments.pairs):
            off, on = step(model, batch, OFF)[0], step(model, batch, ON)[0]
            pairs.append((on / off, on - off, off))
        ratio, extra, base = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name} ({shape}): ratio {ratio:.3f}  (+{extra:.2f} s on {base:.2f} s)", flush=True)
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
