"""A step here against one of TRL's ``SDPOTrainer``: the same model, ids, hint and advantages.

    python bench/trl_steps.py [--pairs 3] [--only recovery all masked] [--json FILE]

Forward and backward in one process, in turn, medians of ratios, ours over theirs. Theirs: full logits,
distillation weight 0.5, alpha 0.5, live teacher, no activation checkpointing, float32. Its teacher reads
the hint inside the prompt and then the whole completion, and its divergence covers every completion token;
a mask per token can be laid on afterwards and saves nothing. Hence three parts:

- ``recovery``: ours distils the recovery tokens, behind the student's keys and values;
- ``all``: ours distils every completion token, from the same teacher sequences as theirs. Both then compute
  one loss, which is checked, value and gradient, before anything is timed;
- ``masked`` (not by default): as ``recovery``, theirs masked to the same tokens.

Ours has weight 1: half of (policy + 1 x SDPO) is their (1 - 0.5) x policy + 0.5 x SDPO.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import (
    GENERATION_PROMPT,
    Record,
    Row,
    Shape,
    add_shape_arguments,
    configured,
    in_turn,
    load,
    make_batch,
    parser_of,
    ratios,
    seconds,
    shape_of,
)
from torch import Tensor
from transformers import AutoTokenizer

from composer_trl_host.compose import ComposedLoss, compose_loss
from composer_trl_host.embedded import embedded_model

PARTS = ("recovery", "all", "masked")
TARGET = 0.55
WEIGHT = 0.5
"""Theirs, of the distillation; the policy's is the rest."""
CONFIG = configured(1.0)
TOLERANCE = 1e-4
"""Largest relative difference of losses and gradients between the sides, which sum float32 in another order."""


def everywhere(shape: Shape) -> Shape:
    """The same rows with every completion token distilled, the hint before the completion."""
    return replace(shape, recovery=shape.completion, sites=1)


def trainer_arguments(shape: Shape, folder: Path) -> dict[str, Any]:
    """What both of TRL's trainers are told. Its defaults checkpoint activations and compute in bfloat16."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": shape.rows,
        "num_generations": shape.rows,
        "max_completion_length": shape.completion,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
    }


def build_trainer(kind: str, model: Any, tokenizer: Any, shape: Shape, folder: Path) -> Any:
    """TRL's ``SDPOTrainer`` (``"sdpo"``) or ``GRPOTrainer`` (``"grpo"``) around ``model``."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset

    common = {
        "model": model,
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_list([{"prompt": "x"}] * shape.rows),
        "processing_class": tokenizer,
    }
    arguments = trainer_arguments(shape, folder)
    with warnings.catch_warnings():
        # The trainers warn of what other versions of their libraries will call things.
        warnings.simplefilter("ignore")
        if kind == "grpo":
            from trl import GRPOConfig, GRPOTrainer

            trainer = GRPOTrainer(args=GRPOConfig(**arguments), **common)
        else:
            from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

            distillation = {
                "distillation_mode": "full_logits",
                "distillation_weight": WEIGHT,
                "distillation_alpha": CONFIG.sdpo.jsd_beta,
                "teacher_model_kind": "live",
            }
            trainer = SDPOTrainer(args=SDPOConfig(**arguments, **distillation), **common)
    # Set by the training loop, which is not run here.
    trainer.current_gradient_accumulation_steps = 1
    if trainer.model is not model or getattr(trainer, "teacher_model", model) is not model:
        raise SystemExit("both sides must train, and be taught by, one model; found a copy")
    return trainer


def their_inputs(shape: Shape, vocab: int) -> dict[str, Tensor]:
    """What their loss reads: the student's ids, and the teacher's with the hint in the prompt."""
    batch = make_batch(everywhere(shape), vocab)
    ids, ones = batch["input_ids"], torch.ones_like(batch["input_ids"])
    return {
        "prompt_ids": ids[:, : shape.prompt],
        "prompt_mask": ones[:, : shape.prompt],
        "completion_ids": ids[:, shape.prompt :],
        "completion_mask": ones[:, shape.prompt :],
        "teacher_input_ids": batch["teacher_input_ids"],
        "teacher_attention_mask": batch["teacher_attention_mask"],
        "self_distillation_mask": torch.ones(shape.rows),
        "advantages": batch["advantages"],
        "num_items_in_batch": ones[:, shape.prompt :].sum(),
    }


def check_inputs(mine: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    """The student's ids, the advantages and the hint must be the same, and the taught tokens the student's."""
    prompt, completion = theirs["prompt_ids"].size(1), theirs["completion_ids"].size(1)
    teacher = theirs["teacher_input_ids"]
    added = teacher.size(1) - prompt - completion
    at = prompt - GENERATION_PROMPT
    columns = mine["teacher_prefix"][:, None] + torch.arange(added)
    shift = (mine["teacher_response_idx"] - mine["student_response_idx"])[:, 0]
    agree = {
        "input_ids": torch.equal(
            mine["input_ids"], torch.cat([theirs["prompt_ids"], theirs["completion_ids"]], dim=1)
        ),
        "advantages": torch.equal(mine["advantages"], theirs["advantages"]),
        "hint": bool((shift == added).all())
        and torch.equal(mine["teacher_input_ids"].gather(1, columns), teacher[:, at : at + added]),
        "taught completion": torch.equal(teacher[:, -completion:], theirs["completion_ids"]),
    }
    differing = [name for name, same in agree.items() if not same]
    if differing:
        raise SystemExit(
            f"both sides must read the same tokens; found a difference in {', '.join(differing)}"
        )


Terms = dict[str, float]


def our_terms(found: ComposedLoss) -> tuple[Tensor, Terms]:
    return found.loss * WEIGHT, {
        "policy": float(found.policy_sum) / found.loss_tokens,
        "divergence": float(found.sdpo_sum) / found.sdpo_tokens,
    }


def their_terms(trainer: Any, loss: Tensor) -> tuple[Tensor, Terms]:
    logged = trainer._metrics["train"]
    return loss, {
        "policy": logged["self_distillation/policy_loss"][-1],
        "divergence": logged["self_distillation/distillation_loss"][-1],
    }


def check_losses(
    model: Any, mine: Callable[[], tuple[Tensor, Terms]], theirs: Callable[[], tuple[Tensor, Terms]]
) -> None:
    """Both terms, the loss that they make and its gradient must be the same on both sides."""
    found = []
    for call in (mine, theirs):
        model.zero_grad(set_to_none=True)
        loss, terms = call()
        loss.backward()
        gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append(({**terms, "loss": float(loss.detach())}, gradient))
    model.zero_grad(set_to_none=True)
    (terms, gradient), (their_terms, their_gradient) = found
    for name, value in their_terms.items():
        if not abs(terms[name] - value) <= TOLERANCE * abs(value):
            raise SystemExit(
                f"both sides must compute one {name}; found {terms[name]} here and {value} in TRL"
            )
    size = max(float(value.abs().max()) for value in their_gradient.values())
    apart = max(float((gradient[name] - value).abs().max()) for name, value in their_gradient.items())
    if gradient.keys() != their_gradient.keys() or not apart <= TOLERANCE * size:
        raise SystemExit(
            f"both sides must have one gradient; found entries {apart:.2g} apart, the largest {size:.2g}"
        )


def masked(trainer: Any, inputs: dict[str, Tensor], mask: Tensor) -> Callable[[], Tensor]:
    """Their loss with the divergence's mean over ``mask`` ``(B, completion)`` alone."""
    plain = trainer._compute_teacher_student_logits

    def call() -> Tensor:
        trainer._compute_teacher_student_logits = lambda *each: replace(plain(*each), loss_mask=mask)
        try:
            return trainer.compute_loss(trainer.model, inputs)
        finally:
            trainer._compute_teacher_student_logits = plain

    return call


def measure(model: Any, tokenizer: Any, shape: Shape, pairs: int, parts: list[str]) -> list[Row]:
    """The ratios asked for, from one set of rounds."""
    vocab = model.config.vocab_size
    mine, mine_all = make_batch(shape, vocab), make_batch(everywhere(shape), vocab)
    inputs = their_inputs(shape, vocab)
    for batch in (mine, mine_all):
        check_inputs(batch, inputs)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer("sdpo", model, tokenizer, shape, Path(folder))
        recovery = inputs["completion_mask"].clone()
        recovery[:, : -shape.recovery] = 0
        runs: dict[str, Callable[[], Tensor]] = {
            "recovery": lambda: compose_loss(model, mine, CONFIG).loss,
            "all": lambda: compose_loss(model, mine_all, CONFIG).loss,
            "theirs": lambda: trainer.compute_loss(model, inputs),
            "theirs_masked": masked(trainer, inputs, recovery),
        }
        check_losses(
            model,
            lambda: our_terms(compose_loss(model, mine_all, CONFIG)),
            lambda: their_terms(trainer, trainer.compute_loss(model, inputs)),
        )
        wanted = [name for name in runs if _needed(name, parts)]
        calls = {name: (lambda run=runs[name]: seconds(model, run)) for name in wanted}
        taken = in_turn(calls, pairs)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    rows = {
        "recovery": ("recovery", "theirs", "ours on the recovery tokens over TRL's SDPOTrainer", TARGET),
        "all": ("all", "theirs", "ours on every completion token over TRL's SDPOTrainer", None),
        "masked": (
            "recovery",
            "theirs_masked",
            "ours on the recovery tokens over TRL's, masked to them",
            None,
        ),
    }
    result = []
    for part in parts:
        over, under, says, target = rows[part]
        details = {"seconds_ours": medians[over], "seconds_theirs": medians[under], **taken}
        values = ratios(taken[over], taken[under])
        result.append(Row(part, says, values, shape, target=target, details=details))
    return result


def _needed(name: str, parts: list[str]) -> bool:
    needs = {
        "recovery": {"recovery", "masked"},
        "all": {"all"},
        "theirs": {"recovery", "all"},
        "theirs_masked": {"masked"},
    }
    return bool(needs[name] & set(parts))


def main() -> None:
    parser = parser_of(__doc__, PARTS, 3)
    parser.set_defaults(only=["recovery", "all"])
    add_shape_arguments(parser)
    arguments = parser.parse_args()
    shape = shape_of(arguments, Shape())
    model, name = load(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model or str(embedded_model()))
    record = Record("trl_steps", name, model.num_parameters())
    print(f"{shape}; loss and gradient of the part `all` are TRL's within {TOLERANCE:g}")
    for row in measure(model, tokenizer, shape, arguments.pairs, arguments.only):
        record.add(row)
        print(
            f"  ours {row.details['seconds_ours']:.2f} s, theirs {row.details['seconds_theirs']:.2f} s (medians)"
        )
    record.write(arguments.json)


if __name__ == "__main__":
    main()
