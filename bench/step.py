"""What SDPO adds to a training step: its time over the same step with weight 0.

    python bench/step.py [--model NAME] [--pairs 5] [--only NAME ...] [--json FILE]

One process, in turn, medians of ratios. Each pair gives two: forward and backward of ``compose_loss``
alone, and with AdamW's update behind them (learning rate 0, so that every pair sees the same weights).
Before anything is timed, the shared-prefix loss is checked against the plain one (full logits, full
teacher).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from measuring import OFF, ON, Record, Row, Shape, in_turn, load, make_batch, parser_of, ratios, seconds

from composer_prime_plugin import ComposerConfig
from composer_trl_host import reading
from composer_trl_host.compose import compose_loss

SHAPES = {
    "base": Shape(),
    "sites": Shape(sites=8),
    "short": Shape(rows=2, prompt=128, completion=384),
    "long": Shape(rows=2, prompt=128, completion=896),
}
TARGET = 1.15


def check(model: Any, batch: dict[str, Any]) -> None:
    """The two ways of reading must give the same loss before their times are compared."""
    with torch.no_grad():
        mine = float(compose_loss(model, batch, ON).loss)
        parts, reading._parts = reading._parts, lambda _model: (None, None)
        try:
            plain = float(compose_loss(model, batch, ON).loss)
        finally:
            reading._parts = parts
    if not abs(mine - plain) <= 1e-4 * abs(plain):
        raise SystemExit(f"both readings must give one loss; found {mine} and {plain}")


class Step:
    """A step: seconds of its forward and backward, and of AdamW's update behind them."""

    def __init__(self, model: Any, batch: dict[str, Any]) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def __call__(self, config: ComposerConfig) -> tuple[float, float]:
        took = seconds(self.model, lambda: compose_loss(self.model, self.batch, config).loss)
        start = time.perf_counter()
        self.optimizer.step()
        return took, time.perf_counter() - start


def measure(name: str, model: Any, shape: Shape, pairs: int) -> list[Row]:
    """Both ratios of one shape."""
    batch = make_batch(shape, model.config.vocab_size)
    check(model, batch)
    step = Step(model, batch)
    taken = in_turn({"off": lambda: step(OFF), "on": lambda: step(ON)}, pairs)
    rows = []
    for suffix, what, count in (("", "forward and backward", 1), (" with update", "with AdamW's update", 2)):
        on, off = ([sum(times[:count]) for times in taken[side]] for side in ("on", "off"))
        extra = statistics.median(mine - base for mine, base in zip(on, off, strict=True))
        details = {"seconds_on": on, "seconds_off": off, "extra_seconds": extra}
        target = TARGET if name == "base" else None
        says = f"SDPO over sdpo.weight = 0, {what} ({shape})"
        rows.append(Row(name + suffix, says, ratios(on, off), shape, target=target, details=details))
    return rows


def main() -> None:
    arguments = parser_of(__doc__, list(SHAPES), 5).parse_args()
    model, name = load(arguments.model)
    record = Record("step", name, model.num_parameters())
    for part in arguments.only:
        for row in measure(part, model, SHAPES[part], arguments.pairs):
            record.add(row)
            base = statistics.median(row.details["seconds_off"])
            print(f"  +{row.details['extra_seconds']:.2f} s on {base:.2f} s")
    record.write(arguments.json)


if __name__ == "__main__":
    main()
