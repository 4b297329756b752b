"""Recorded traces to batches: error sites per second of wall time, with one rendering per trace.

    python bench/collate.py [--sites 2000] [--tokens 2000] [--batch 16]

Traces of about ``--tokens`` tokens with one failed call each, made here from a seed, through
``ComposerDataCollator`` with the embedded model's tokenizer and the shipped hints, until the padded
tensors are there. The tokenizer may use every core. Exit 1 where the target is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from transformers import AutoTokenizer

from composer_prime_plugin.config import ComposerConfig
from composer_trl_host.collator import ComposerDataCollator
from composer_trl_host.embedded import embedded_model
from composer_trl_host.hinting import default_layered
from composer_trl_host.traces import ToolCall, ToolFailure, Trace, Turn

TARGET = 200.0
"""Sites per second that two cores must reach."""
WORDS = (Path(__file__).read_text(encoding="utf-8") * 3).split()


def make_trace(number: int, tokens: int) -> Trace:
    """A conversation of about ``tokens`` tokens: rounds of call and result, the second last of which fails."""
    source = random.Random(number)

    def text(count: int) -> str:
        return " ".join(source.choices(WORDS, k=count))

    rounds = max(tokens // 250, 2)
    turns = [Turn("system", text(40)), Turn("user", text(60))]
    failure: tuple[ToolFailure, ...] = ()
    for index in range(rounds):
        call = ToolCall(f"call_{number}_{index}", "read_file", f'{{"path": "src/{source.choice(WORDS)}.py"}}')
        turns.append(Turn("assistant", text(12), tool_calls=(call,), failures=failure))
        failed = index == rounds - 2
        result = f"Error: no such file: src/{number}.py" if failed else text(45)
        turns.append(Turn("tool", result, tool_call_id=call.id, tool_name=call.name, is_error=failed))
        failure = (ToolFailure(len(turns) - 1, "missing_file", "is_error", result, call),) if failed else ()
    turns.append(Turn("assistant", text(20)))
    return Trace(f"bench-{number}", tuple(turns))


def main() -> int:
    """Print one line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(str(embedded_model()))
    collator = ComposerDataCollator(
        tokenizer, ComposerConfig(sdpo={"weight": 1.0}), hints=default_layered(), seq_len=8192
    )
    traces = [make_trace(number, arguments.tokens) for number in range(arguments.sites)]
    collator(traces[: arguments.batch])  # the template's probes and first imports
    before = collator.renderer.renderings
    kept, lengths = collator.report.sites_kept, []
    start, processor = time.perf_counter(), time.process_time()
    for begin in range(0, len(traces), arguments.batch):
        batch = collator(traces[begin : begin + arguments.batch])
        lengths += batch["attention_mask"].sum(dim=1).tolist()
    wall, used = time.perf_counter() - start, time.process_time() - processor
    sites = collator.report.sites_kept - kept
    renderings = collator.renderer.renderings - before
    rate = sites / wall
    print(
        f"{sites} sites of {len(traces)} traces, {statistics.median(lengths):.0f} tokens each (median): {rate:.0f} sites/s "
        f"(target {TARGET:g}), {sites / used:.0f} per processor second, {renderings / len(traces):.2f} renderings per trace"
    )
    return int(rate < TARGET or sites != len(traces) or renderings != len(traces))


if __name__ == "__main__":
    sys.exit(main())
