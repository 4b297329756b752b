"""Time of ``loss_fn``, forward and backward, over PRIME-RL's own default loss.

    python bench/loss_fn.py --prime-rl PATH

Both run in this process on the same sample, alternating which goes first; the figure is the median of
the ratios of adjacent pairs. Loss and gradient are compared to the bit before anything is timed.
Exit 1 above ``--at-most``.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from composer_prime_plugin.errors import ComposerError
from composer_prime_plugin.plugin import loss_fn
from parity.cases import DTYPES, Case, build
from parity.compare import differences, loss_inputs, outcome
from parity.live import LOSS_MODULE, Target, targets
from parity.releases import check_checkout, identify, python_path

TARGET_RATIO = 1.05


def main() -> int:
    """Print one line per dtype; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prime-rl", type=Path, required=True, metavar="PATH", help="root of a PRIME-RL checkout"
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-most", type=float, default=TARGET_RATIO)
    arguments = parser.parse_args()
    root = arguments.prime_rl.expanduser().resolve()
    try:
        check_checkout(root)
        identity = identify(root)
    except ComposerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sys.path[:0] = python_path(root)
    try:
        module = importlib.import_module(LOSS_MODULE)
    except ModuleNotFoundError as error:
        missing = f"found no module named {error.name!r}; pip install 'composer-rl[parity-live]'"
        print(f"error: the checkout at {root} must be importable; {missing}", file=sys.stderr)
        return 2
    found = [item for item in targets(module, identity.release) if isinstance(item, Target)]
    target = next((item for item in found if item.name == "default_loss_fn"), None)
    if target is None:
        print("error: this PRIME-RL must have default_loss_fn; found none", file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.threads)
    print(f"{identity.label} {target.name}, {arguments.tokens} tokens, torch {torch.__version__}, CPU")
    worst = 0.0
    for dtype in DTYPES:
        case = Case("random", target.objective, "bench", arguments.tokens, dtype)
        ratio, ours, theirs = measure(case, target, module.LossInputs, arguments.pairs)
        print(f"{dtype}: ratio {ratio:.3f} (ours {ours * 1e3:.3f} ms, theirs {theirs * 1e3:.3f} ms, medians)")
        worst = max(worst, ratio)
    return 0 if worst <= arguments.at_most else 1


def measure(case: Case, target: Target, inputs_class: type[Any], pairs: int) -> tuple[float, float, float]:
    """The median ratio and both median times in seconds."""
    names = tuple(item.name for item in fields(inputs_class))
    inputs = build(case)
    kwargs = case.kwargs

    def ours(sample: Any) -> Any:
        return loss_fn(sample, **kwargs)

    theirs = target.call(case)
    differing = differences(
        outcome(theirs, inputs, inputs_class, names), outcome(ours, inputs, inputs_class, names)
    )
    if differing:
        raise SystemExit(f"both must compute the same loss; found {differing}")

    def timed(call: Callable[[Any], Any]) -> float:
        sample, _ = loss_inputs(inputs, inputs_class, names)
        start = time.perf_counter()
        call(sample).loss.backward()
        return time.perf_counter() - start

    for _ in range(20):
        timed(ours)
        timed(theirs)
    times: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            mine = timed(ours)
            times.append((mine, timed(theirs)))
        else:
            other = timed(theirs)
            times.append((timed(ours), other))
    ratio = statistics.median(mine / other for mine, other in times)
    return ratio, statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


if __name__ == "__main__":
    sys.exit(main())
