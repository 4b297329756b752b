"""One rank of ``test_distributed``. Rank 0 writes the result."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from composer_trl_host.compose import compose_loss

from . import conftest
from .test_compose import config, make_batch

# Row 0 and 2 have sites, row 1 has none: rank 1 gets [1] where it must have no site.
ROWS = {
    "sites on both": ([0, 1], [2]),
    "sites on one": ([0, 2], [1]),
    "no site": ([0, 1], [2]),
    "a masked rank": ([0, 1], [2]),
}


def gradient_case(case: str, normalization: str, rank: int) -> torch.Tensor:
    """The gradient that DDP leaves on this rank for this rank's rows."""
    model = conftest.model.__wrapped__().double()
    wrapped = DistributedDataParallel(model)
    batch = make_batch(ROWS[case][rank], with_sites=case != "no site")
    if case == "a masked rank" and rank == 1:
        batch["response_mask"][:] = False
    batch.update(num_loss_tokens=12, num_error_tokens=7)
    result = compose_loss(wrapped, batch, config(normalization=normalization))
    # DDP averages over ranks; the counts are those of all ranks.
    (result.loss * dist.get_world_size()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def gradient_cases(rank: int) -> dict:
    """Every case and normalization, one after the other."""
    dist.init_process_group("gloo")
    return {
        f"{normalization}:{case}": gradient_case(case, normalization, rank)
        for normalization in ("loss_tokens", "error_tokens")
        for case in ROWS
    }


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
    result = trainer_case(rank) if case == "trainer" else gradient_cases(rank)
    if rank == 0:
        torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
