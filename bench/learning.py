"""Does it teach, and when: the shell example under named conditions, measured on held-out names.

    python bench/learning.py list
    python bench/learning.py run [--only NAME ...] [--seeds 42 1 2] [--steps N] [--every N] [--results FILE]
    python bench/learning.py report [--results FILE] [--page docs/experiments.md]

Every condition starts from the same weights, the shell example's, and changes what its row in
``learning_conditions.CONDITIONS`` says. ``run`` goes through the queue (first named first, seed by seed), skips what
the results file holds and what another process of this bench is at work on, and appends one line per run; one that
is interrupted is kept as far as it was measured.
``report`` rewrites the tables of the page, between their markers, and the pictures beside the results.
"""

from __future__ import annotations

import argparse
import os
import signal
import warnings
from pathlib import Path

from learning_conditions import CONDITIONS, SEEDS
from learning_report import PAGE, report
from learning_results import RESULTS


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
        # Imported here, since a report needs neither torch nor TRL; behind quiet(), which sets what TRL reads then.
        quiet()
        from learning_run import run_queue

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            run_queue(arguments.only, arguments.seeds, arguments.steps, arguments.results, arguments.every)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    else:
        report(arguments.results, arguments.page)


if __name__ == "__main__":
    main()
