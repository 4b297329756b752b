"""What the guards' tests share, and one rank of the two-rank cases of ``test_guards``. Each rank writes what it
saw."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composer_prime_plugin.config import ComposerConfig
from composer_trl_host.non_finite import NonFiniteError
from composer_trl_host.trainer import SITES_KEY, ComposerGRPOTrainer

from . import conftest, test_trainer

TRIPS = {"window": 2, "collapsed_below": 10.0}
"""No divergence reaches 10 nats here, so `jsd_collapsed` trips as soon as its window is full: at step 2."""


def config(**guards: Any) -> ComposerConfig:
    return ComposerConfig(
        policy={"objective": "dr_grpo"},
        sdpo={"weight": 0.5},
        trl_host={"max_turns": 2, "guards": guards},
    )


def guard_metrics(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key.startswith("guard/")} for row in rows]


def trainer_of(folder: Path, **changes: Any) -> ComposerGRPOTrainer:
    model, tokenizer = conftest.model.__wrapped__(), conftest.tokenizer.__wrapped__()
    return test_trainer.build(model, tokenizer, folder, micro=2, gradient_accumulation_steps=2, **changes)


def weights(trainer: ComposerGRPOTrainer) -> torch.Tensor:
    parameters = trainer.accelerator.unwrap_model(trainer.model).parameters()
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).clone()


def stop_case(folder: Path) -> dict[str, Any]:
    """A guard of ``stop`` trips at step 2 of 5."""
    trainer = trainer_of(folder, steps=5, config=config(**TRIPS, stop=["jsd_collapsed"]))
    said: list[str] = []
    if trainer.accelerator.is_main_process:
        trainer.guards.say = said.append
    trainer.train()
    dist.barrier()
    return {
        "step": trainer.state.global_step,
        "metrics": guard_metrics(test_trainer.steps_of(trainer)),
        "said": said,
        "checkpoints": sorted(path.name for path in (folder / "run").glob("checkpoint-*")),
    }


def error_case(trainer: ComposerGRPOTrainer, folder: Path) -> dict[str, Any]:
    """Train until ``NonFiniteError``; the weights are compared with those of the last optimizer step."""
    before = [weights(trainer)]
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: before.append(weights(trainer)))
    error = ""
    try:
        trainer.train()
    except NonFiniteError as raised:
        error = str(raised)
    dist.barrier()
    return {
        "error": error,
        "files": sorted(path.name for path in (folder / "run").glob("*.pt")),
        "unchanged": torch.equal(before[-1], weights(trainer)),
    }


def loss_case(folder: Path, rank: int) -> dict[str, Any]:
    """Rank 1's advantages are NaN in the second micro-batch of step 2."""
    trainer = trainer_of(folder, steps=3)
    plain = trainer._prepare_inputs

    def broken(batch: Any) -> dict[str, Any]:
        inputs = plain(batch)
        if rank == 1 and trainer._step == 3:
            inputs["advantages"] = torch.full_like(inputs["advantages"], float("nan"))
        return inputs

    trainer._prepare_inputs = broken  # type: ignore[method-assign]
    return error_case(trainer, folder)


def overflowing_advantages(toml: Path) -> None:
    """Rewards that are finite, with a sum over the group that is not."""
    task = toml.parent / "task.py"
    plain = "return float(self.solved())"
    source = task.read_text()
    assert plain in source
    task.write_text(source.replace(plain, "return 3e38"))


class Overflow(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradients[0], float("nan"))


def break_gradient_of_channel_two(trainer: ComposerGRPOTrainer) -> None:
    """Channel 2's part of the loss backpropagates NaN, though it is finite."""
    plain = trainer._finite.compose

    def broken(model: Any, batch: Any, config: Any) -> Any:
        result = plain(model, batch, config)
        loss = Overflow.apply(result.loss) if config.sdpo.weight else result.loss
        return dataclasses.replace(result, loss=loss)

    trainer._finite.compose = broken


def gradient_case(folder: Path, rank: int) -> dict[str, Any]:
    trainer = trainer_of(folder, steps=2)
    if rank == 1:
        break_gradient_of_channel_two(trainer)
    return error_case(trainer, folder)


def one_sided_case(folder: Path, rank: int) -> dict[str, Any]:
    """Only rank 0 has error sites, and its teacher reads whole sequences through the wrapped model."""
    trainer = trainer_of(folder, steps=2, gradient_checkpointing=True)
    plain = trainer._generate_and_score_completions

    def one_sided(inputs: Any) -> dict[str, Any]:
        output = plain(inputs)
        return output if rank == 0 else {**output, SITES_KEY: [[] for _ in output[SITES_KEY]]}

    trainer._generate_and_score_completions = one_sided  # type: ignore[method-assign]
    trainer.train()
    dist.barrier()
    return {"sites": [row["sdpo/sites"] for row in test_trainer.steps_of(trainer)]}


def main() -> None:
    out = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    result = {
        "one-sided": one_sided_case(out / "one-sided", rank),
        "stop": stop_case(out / "stop"),
        "loss": loss_case(out / "loss", rank),
        "gradient": gradient_case(out / "gradient", rank),
    }
    torch.save(result, out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
