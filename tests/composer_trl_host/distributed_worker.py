"""One rank of ``test_distributed``. Rank 0 writes the result."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_trl_host import reading
from composer_trl_host.compose import compose_loss

from . import conftest, test_splits

CASE_SECONDS = 60
"""A case takes well under a second; one in which a rank waits for another ends here."""


@dataclass(frozen=True)
class Split:
    """One optimizer step on two ranks. ``cut``: each rank's micro-batches."""

    cut: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    objective: str = "dr_grpo"
    normalization: str = "error_tokens"
    adapter: bool = False
    with_sites: bool = True
    checkpointing: bool = False
    """The teacher reads whole sequences."""
    one_site_a_forward: bool = False
    """The teacher reads one forward per site, so that ranks run different numbers of them."""
    one_shard_group: bool = False
    """FSDP2 shards the model as one group, whose parameters stay whole between forward and backward."""


HALVES = (((0, 1, 2, 3),), ((4, 5, 6, 7),))
# All sites on rank 0; row 6, all masked, alone in a micro-batch of rank 1.
ONE_RANK = (((0, 2), (3, 5)), ((1, 4, 7), (6,)))
SPLITS = {
    **{
        f"{objective}, {normalization}, {'lora' if adapter else 'all parameters'}, {'sites' if sites else 'no site'}": Split(
            HALVES, objective, normalization, adapter, sites
        )
        for objective, normalization, adapter, sites in product(
            test_splits.OBJECTIVES, test_splits.NORMALIZATIONS, (False, True), (True, False)
        )
    },
    "micro-batches of 1": Split(
        (((0,), (1,), (2,), (3,)), ((4,), (5,), (6,), (7,))), normalization="loss_tokens"
    ),
    "a last partial batch": Split((((0, 1, 2), (3,)), ((4,), (5, 6, 7)))),
    "sites on rank 0 alone": Split(ONE_RANK),
    "sites on rank 1 alone, lora": Split((ONE_RANK[1], ONE_RANK[0]), adapter=True),
    "sites on rank 0 alone, whole teacher": Split(ONE_RANK, checkpointing=True),
    "sites on rank 1 alone, whole teacher, lora": Split(
        (ONE_RANK[1], ONE_RANK[0]), checkpointing=True, adapter=True
    ),
    "sites on rank 0 alone, one group of shards": Split(ONE_RANK, one_shard_group=True),
    "a masked rank": Split((((0, 1, 2, 3, 4, 5, 7),), ((6,),))),
    "uneven teacher forwards": Split((((0, 2, 3),), ((1, 4, 5, 6, 7),)), one_site_a_forward=True),
}


def split_case(split: Split, backend: str, rank: int) -> dict[str, Any]:
    """The whole gradient and the figures summed over ranks."""
    model = test_splits.split_model(split.adapter)
    if split.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if split.adapter:
            model.enable_input_require_grads()
    wrapped: Any = model
    if backend == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        inner = model.get_base_model() if split.adapter else model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [] if split.one_shard_group else inner.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    settings = test_splits.split_config(split.objective, split.normalization)
    teacher_tokens, reading.TEACHER_TOKENS = reading.TEACHER_TOKENS, 1 if split.one_site_a_forward else 2**16
    parts = []
    try:
        for number, rows in enumerate(split.cut[rank]):
            last = number == len(split.cut[rank]) - 1
            quiet = wrapped.no_sync() if backend == "ddp" and not last else contextlib.nullcontext()
            if backend == "fsdp":
                wrapped.set_requires_gradient_sync(last)
            with quiet:
                part = compose_loss(wrapped, test_splits.split_batch(rows, split.with_sites), settings)
                # Both backends average over ranks; the counts are those of all ranks.
                (part.loss * dist.get_world_size()).backward()
            parts.append(part)
    finally:
        reading.TEACHER_TOKENS = teacher_tokens
    if backend == "fsdp":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.full_tensor()
    sums = test_splits.figures(parts)
    total = torch.tensor(list(sums.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "gradient": test_splits.gradient_of(model),
        "figures": dict(zip(sums, total.tolist(), strict=True)),
    }


def split_cases(backend: str, rank: int, out: Path) -> dict[str, Any]:
    """Every case in turn. What is done is written as it goes, so that a case that hangs is known by name."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, split in SPLITS.items():
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        results[name] = split_case(split, backend, rank)
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            torch.save(results, out)
    return results


def trainer_case(rank: int) -> dict:
    """Two optimizer steps of the trainer."""
    from . import test_trainer

    model, tokenizer = conftest.model.__wrapped__(), conftest.tokenizer.__wrapped__()
    folder = Path(tempfile.mkdtemp())
    trainer = test_trainer.build(model, tokenizer, folder, micro=2, gradient_accumulation_steps=2)
    trainer.train()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    log = json.dumps(test_trainer.steps_of(trainer), default=float)
    return {"log": log, "equal_weights": bool(torch.equal(*both))}


def main() -> None:
    case, out = sys.argv[1:]
    rank = int(os.environ["RANK"])
    result = trainer_case(rank) if case == "trainer" else split_cases(case, rank, Path(out))
    if rank == 0:
        torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
