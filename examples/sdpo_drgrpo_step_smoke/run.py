"""Four Dr. GRPO steps with SDPO on a real model, from two recorded episodes, and five gates.

    python examples/sdpo_drgrpo_step_smoke/run.py [--model NAME]

Exit code 0: every gate holds. 1: a gate failed. 2: it cannot run, with the reason.
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import pairwise
from typing import Any

STEPS = 4
WATCHED = "model.norm.weight"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a local folder or hub name; default: the embedded SmolLM2-135M-Instruct"
    )
    arguments = parser.parse_args(argv)
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from composer_prime_plugin import ComposerConfig
        from composer_prime_plugin.errors import ComposerError
        from composer_trl_host.chat import Chat
        from composer_trl_host.compose import compose_loss
        from composer_trl_host.embedded import embedded_model
    except ImportError as error:
        print(f"cannot run: {error}; install composer-rl[trl]")
        return 2
    torch.manual_seed(0)
    try:
        name = arguments.model or str(embedded_model())
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        batch = recorded_batch(Chat(tokenizer), tokenizer)
    except (ComposerError, OSError, ValueError) as error:
        print(f"cannot run: {error}")
        return 2

    config = ComposerConfig(
        policy={"objective": "dr_grpo"}, sdpo={"weight": 0.1, "weight_start": 0.01, "warmup_steps": STEPS - 1}
    )
    off = ComposerConfig(policy={"objective": "dr_grpo"})
    without_sites = {key: value for key, value in batch.items() if "response_idx" not in key}
    channel_one = compose_loss(model, without_sites, config).loss.detach()
    weight_zero = compose_loss(model, batch, off).loss.detach()
    watched = dict(model.named_parameters())[WATCHED]
    before = watched.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    finite, jsds, weights = True, [], []
    for step in range(STEPS):
        result = compose_loss(model, {**batch, "step": step}, config)
        jsd = float(result.sdpo_sum) / result.sdpo_tokens
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        finite &= all(map(math.isfinite, (float(result.loss.detach()), float(result.policy_sum), jsd)))
        jsds.append(jsd)
        weights.append(result.weight)
        print(
            f"step {step}: loss {float(result.loss.detach()):+.5f}  jsd {jsd:.5f}  weight {result.weight:.3f}"
        )
    gates = {
        "every loss is finite": finite,
        "the divergence is above zero on a step": max(jsds) > 0,
        f"{WATCHED} moved": not torch.equal(before, watched.detach()),
        "the weight's warm-up increases": all(a < b for a, b in pairwise(weights)),
        "weight 0 equals channel 1 bit for bit": torch.equal(channel_one, weight_zero),
    }
    for gate, holds in gates.items():
        print(f"{'ok  ' if holds else 'FAIL'} {gate}")
    return 0 if all(gates.values()) else 1


def recorded_batch(chat: Any, tokenizer: Any) -> dict[str, Any]:
    """Two episodes of one group: request, wrong command, error, second command; rewards 1 and 0."""
    import torch

    from composer_trl_host.alignment import ErrorSite, build_site_batch

    rewards = (1.0, 0.0)
    prompts, completions, sampled, sites = [], [], [], []
    for second in ("trash report", "delete report"):
        answer = [{"role": "tool", "content": "unknown command: remove"}]
        prompt = chat.prompt_ids([{"role": "user", "content": "remove report"}])
        bridge = chat.bridge(answer)
        first = [*chat.text_ids("remove report"), tokenizer.eos_token_id]
        middle = chat.after_turn(first, bridge, [tokenizer.eos_token_id])
        last = [*chat.text_ids(second), tokenizer.eos_token_id]
        completion = [*first, *middle, *bridge.generation_prompt, *last]
        stop = len(prompt) + len(completion)
        start = stop - len(last)
        hint = tuple(chat.hint_ids(answer, "hint: trash report", "user"))
        site = ErrorSite(start, stop, start - len(bridge.generation_prompt), hint, "smoke", "unknown_command")
        prompts.append(prompt)
        completions.append(completion)
        sampled.append([1] * len(first) + [0] * (len(completion) - len(first) - len(last)) + [1] * len(last))
        sites.append([site])
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    shape = (len(prompts), width)
    ids = torch.full(shape, tokenizer.pad_token_id, dtype=torch.long)
    attention, completion_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        attention[row, :end] = 1
        completion_mask[row, len(prompt) : end] = True
        response_mask[row, len(prompt) : end] = torch.tensor(sampled[row]).bool()
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    mean = sum(rewards) / len(rewards)
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion_mask,
        "response_mask": response_mask,
        "advantages": torch.tensor([reward - mean for reward in rewards]),
        "inference_logprobs": None,
    }
    batch.update(build_site_batch(rows, sites, [0, 0], tokenizer.pad_token_id).as_batch())
    return batch


if __name__ == "__main__":
    sys.exit(main())
