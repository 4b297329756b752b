"""Seconds for eight rollouts in a row and for eight at once, on the token endpoint of the live model.

    python examples/verifiers_tool/measure.py [--tokens 64] [--harness null]

Every turn is sampled to its last token, so that both ways sample the same number; control tokens, which would end it,
are forbidden.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_prime_plugin.config import ComposerConfig
from composer_trl_host.embedded import MODEL_NAME, embedded_model
from composer_trl_host.serving import TokenGenerator
from composer_trl_host.serving.protocol import Limits
from composer_trl_host.verifiers_env.conversion import Converter
from composer_trl_host.verifiers_env.loading import load_environment, load_renderer
from composer_trl_host.verifiers_env.runner import Policy, Stage, VerifiersRunner
from composer_trl_host.verifiers_env.source import Source

ROLLOUTS = 8
ADAPTER = Path(__file__).parents[1] / "shell" / "warm_start"
RENDERER = {"name": "custom", "import_path": "verifiers_tool.renderer.LineRenderer"}


def make_runner(tokens: int, harness: str | None) -> VerifiersRunner:
    """The example's environment on the embedded model."""
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, "max_turns": 2}
    if harness is not None:
        agent["harness"] = {"id": harness}
    source = Source({"taskset": {"id": "verifiers-tool"}, "agent": agent}, RENDERER, "shell")
    name = str(embedded_model())
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(name), str(ADAPTER)
    ).merge_and_unload()
    model.register_forward_hook(partial(_forbid, tokenizer.all_special_ids))
    environment = load_environment(source)
    policy = Policy(
        Limits(MODEL_NAME, 2048, len(tokenizer)),
        name,
        load_renderer(source),
        {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True},
    )
    converter = Converter(tokenizer, ComposerConfig(), None, source.name)
    tasks = list(islice(environment.taskset, ROLLOUTS))
    generate = TokenGenerator(lambda: model, [], tokenizer.eos_token_id)
    stage = Stage(source.name, environment, tasks, converter)
    return VerifiersRunner([stage], policy, 1, _to_the_end(generate))


def _forbid(ids: Sequence[int], module: Any, inputs: Any, output: Any) -> None:
    # A turn with a control token in its middle is not extended by the next one: the client refuses it.
    output.logits[..., ids] = -torch.inf


def _to_the_end(generate: TokenGenerator) -> Any:
    """No stop token ends a turn: the renderer's end token is an ordinary one here."""
    from dataclasses import replace

    def call(tickets: Any) -> Any:
        for ticket in tickets:
            ticket.sampling = replace(ticket.sampling, stop_token_ids=frozenset())
        return generate(tickets)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each turn")
    parser.add_argument("--harness", help="the harness's id; absent: the one of the taskset")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    runner = make_runner(arguments.tokens, arguments.harness)
    rows = [{"task": number} for number in range(ROLLOUTS)]
    alone, together = [], []
    try:
        runner.play(rows[:1])
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            for row in rows:
                runner.play([row])
            middle = time.perf_counter()
            runner.play(rows)
            alone.append(middle - start)
            together.append(time.perf_counter() - middle)
            print(f"in a row {alone[-1]:.1f} s, at once {together[-1]:.1f} s", flush=True)
    finally:
        runner.close()
    one, other = statistics.median(alone), statistics.median(together)
    print(
        f"{ROLLOUTS} rollouts of turns of {arguments.tokens} tokens: in a row {one:.1f} s, at once {other:.1f} s, {other / one:.2f}"
    )


if __name__ == "__main__":
    main()
