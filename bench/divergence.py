"""Channel 2's divergence of whole logits tensors: peak memory and time over the plain autograd form.

    python bench/divergence.py [--positions 1024] [--vocab 151936] [--pairs 3] [--estimator full]

Forward and backward, float32, each run in a fresh process, alternating; medians. The peak is what the
process takes beyond both logits tensors, so the student's gradient is in it on both sides. The plain
form is softmax, log and KL as they are written on paper. Before a ratio is printed, loss and gradient
of ``full`` are checked against the plain form's. Exit 1 above ``--peak-at-most`` or ``--time-at-most``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEAK_AT_MOST, TIME_AT_MOST = 0.12, 0.9
BETA = 0.5
REPEATS = 2
ESTIMATORS: dict[str, dict[str, Any]] = {
    "full": {},
    "top_k": {"estimator": "top_k", "top_k": 100},
    "top_k_no_tail": {"estimator": "top_k", "top_k": 100, "top_k_tail": False},
    "sampled": {"estimator": "sampled", "jsd_beta": 1.0},
}


def forms(estimator: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Both sides: ``(student, teacher) -> (n,)`` values."""
    import torch

    from composer_prime_plugin.config import SDPOConfig
    from composer_prime_plugin.divergence import configured_divergence

    def plain(student: Any, teacher: Any) -> Any:
        log_p, log_q = torch.log_softmax(student, dim=-1), torch.log_softmax(teacher, dim=-1)
        p, q = log_p.exp(), log_q.exp()
        log_m = ((1 - BETA) * p + BETA * q).log()
        return (BETA * q * (log_q - log_m) + (1 - BETA) * p * (log_p - log_m)).sum(dim=-1)

    sdpo = SDPOConfig(**{"jsd_beta": BETA, **ESTIMATORS[estimator]})

    def ours(student: Any, teacher: Any) -> Any:
        tokens = student.detach()[:, :16].argmax(dim=-1)
        return configured_divergence(student, teacher, sdpo, tokens=tokens).values

    return {"plain": plain, "ours": ours}


def child(form: str, positions: int, vocab: int, estimator: str) -> dict[str, float]:
    """One form: extra peak in bytes, seconds of one forward and backward, loss, gradient norm."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.empty(positions, vocab).normal_(0, 3, generator=generator) for _ in range(2))
    student.requires_grad_()
    run = forms(estimator)[form]
    # Library and thread setup is not the form's.
    run(student.detach()[:1, :64].clone().requires_grad_(), teacher[:1, :64]).sum().backward()
    before = current_bytes()
    seconds = []
    for _ in range(REPEATS):
        student.grad = None
        start = time.perf_counter()
        loss = run(student, teacher).sum()
        loss.backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert student.grad is not None
    # Row by row: a norm of the whole would cost memory, not here but where it is run before a peak is read.
    norm = float(torch.stack([row.double().square().sum() for row in student.grad]).sum().sqrt())
    return {
        "peak": peak - before,
        "seconds": statistics.median(seconds),
        "loss": float(loss.detach()),
        "norm": norm,
    }


def current_bytes() -> int:
    """The process's resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(form: str, arguments: argparse.Namespace) -> dict[str, float]:
    """``child`` in a fresh process on one thread."""
    command = [sys.executable, __file__, "--child", form, "--estimator", arguments.estimator]
    command += ["--positions", str(arguments.positions), "--vocab", str(arguments.vocab)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"the process of the {form} form must end well; found exit code {done.returncode}: {done.stderr}"
        )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> int:
    """Print the two ratios; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--estimator", choices=list(ESTIMATORS), default="full")
    parser.add_argument("--peak-at-most", type=float, default=PEAK_AT_MOST)
    parser.add_argument("--time-at-most", type=float, default=TIME_AT_MOST)
    parser.add_argument("--child", choices=("plain", "ours"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child, arguments.positions, arguments.vocab, arguments.estimator)))
        return 0
    pairs = []
    for number in range(arguments.pairs):
        order = ("plain", "ours") if number % 2 == 0 else ("ours", "plain")
        pairs.append({form: measure(form, arguments) for form in order})
        check(pairs[-1], arguments.estimator)
    peak = statistics.median(pair["ours"]["peak"] / pair["plain"]["peak"] for pair in pairs)
    spent = statistics.median(pair["ours"]["seconds"] / pair["plain"]["seconds"] for pair in pairs)
    medians = {
        (form, key): statistics.median(pair[form][key] for pair in pairs)
        for form in ("ours", "plain")
        for key in ("peak", "seconds")
    }
    print(
        f"{arguments.estimator}, {arguments.positions} positions x {arguments.vocab} entries, {arguments.pairs} pairs: "
        f"peak {peak:.3f} of the plain form's ({medians['ours', 'peak'] / 2**30:.2f} of {medians['plain', 'peak'] / 2**30:.2f} GiB), "
        f"time {spent:.3f} ({medians['ours', 'seconds']:.2f} of {medians['plain', 'seconds']:.2f} s)"
    )
    return 0 if peak <= arguments.peak_at_most and spent <= arguments.time_at_most else 1


def check(pair: dict[str, dict[str, float]], estimator: str) -> None:
    """The full divergence must be the plain form's before its cost is compared."""
    if estimator != "full":
        return
    for key in ("loss", "norm"):
        ours, plain = pair["ours"][key], pair["plain"][key]
        if abs(ours - plain) > 1e-4 * abs(plain):
            raise SystemExit(f"both forms must give one {key}; found {ours} and {plain}")


if __name__ == "__main__":
    sys.exit(main())
