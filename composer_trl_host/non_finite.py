"""A loss or gradient that is not finite: which channel it comes from, the batch as a file, a stop of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import LossInputError, NonFiniteInputError
from composer_trl_host.compose import ComposedLoss
from composer_trl_host.guards import GUARD_EXIT, gradient_norms

Batch = Mapping[str, Any]
Compose = Callable[[nn.Module, Batch, ComposerConfig], ComposedLoss]
"""``compose_loss`` with the run's teacher and precision."""
Probe = Callable[[nn.Module, Batch, ComposerConfig], bool]
"""Whether what is asked about is finite."""

UNKNOWN_SHARDED = "which channel it comes from was not found out, since parameters are sharded"

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class NonFiniteError(NonFiniteInputError):
    """A loss or gradient that is not finite, before the weights were changed."""

    exit_code = GUARD_EXIT


@dataclass(frozen=True)
class SavedBatch:
    """A batch that stopped a run. ``batch`` and ``config`` are what ``compose_loss`` takes; ``step`` counts
    from 1, as in the log. ``error``: what was found. ``channel``: where it comes from."""

    batch: dict[str, Any]
    config: ComposerConfig
    step: int
    rank: int
    error: str
    channel: str


def save_batch(saved: SavedBatch, folder: Path) -> Path:
    """Write ``bad_batch-<step>-rank<rank>.pt``: tensors on the CPU and plain values."""
    path = folder / f"bad_batch-{saved.step}-rank{saved.rank}.pt"
    batch = {
        key: value.detach().cpu() if isinstance(value, Tensor) else value
        for key, value in saved.batch.items()
    }
    fields = {**vars(saved), "batch": batch, "config": saved.config.model_dump(mode="json")}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(fields, path)
    return path


def load_batch(path: Path | str) -> SavedBatch:
    """Read it back, without running any code that the file may hold."""
    fields = torch.load(path, weights_only=True)
    return SavedBatch(**{**fields, "config": ComposerConfig(**fields["config"])})


class FiniteStop:
    """Computes losses that are finite, or stops every rank and leaves the offending batch in ``folder``."""

    def __init__(
        self, accelerator: Accelerator, folder: Path, config: ComposerConfig, compose: Compose
    ) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.config = config
        self.compose = compose
        # Parameters in shards: a rank can neither compute alone nor ask the others between two forwards.
        self._alone = accelerator.num_processes == 1
        self._sharded = not self._alone and accelerator.distributed_type in _SHARDED

    def loss(self, model: nn.Module, batch: Batch) -> ComposedLoss:
        """The batch's loss. Raises ``NonFiniteError`` on every rank when it is not finite on one."""
        error: LossInputError | None = None
        result: ComposedLoss | None = None
        try:
            result = self._finite(model, batch)
        except LossInputError as raised:
            error = raised
        step = int(batch["step"]) + 1
        bad = self._ranks_with(error is not None)
        if error is not None:
            if not isinstance(error, NonFiniteInputError):
                # Another broken contract: no channel is to blame.
                self._meet()
                raise error
            left = self._leave(batch, str(error), self._channel(model, batch, self._loss_is_finite), step)
            self._meet()
            raise NonFiniteError(f"step {step}: {error}; {left}") from error
        if bad:
            self._meet()
            raise NonFiniteError(
                f"the loss must be finite on every rank; found none at step {step} on rank {bad[0]}, which says more and "
                f"saves its batch in {self.folder}; the weights were not changed"
            )
        assert result is not None
        return result

    def gradient(self, model: nn.Module, batches: Sequence[Batch], found: str, step: int) -> None:
        """Stop for a gradient that is not finite, made by ``batches``. Raises ``NonFiniteError``."""
        model.zero_grad(set_to_none=True)
        culprit, channel = self._culprit(model, batches)
        ranks = self._ranks_with(culprit is not None)
        if culprit is None and ranks:
            message = f"{found}; a batch of rank {ranks[0]} makes it; the weights were not changed"
        else:
            batch = batches[-1] if culprit is None else culprit
            message = f"{found}; {self._leave(batch, found, channel, step)}"
        self._meet()
        raise NonFiniteError(message)

    @torch.no_grad()
    def sampling(self, model: nn.Module, contexts: Sequence[Sequence[int]], step: int) -> None:
        """Called when sampling failed. Raises ``NonFiniteError`` where the model's logits are not finite."""
        inner = self.accelerator.unwrap_model(model)
        try:
            ids = (torch.tensor([context], device=self.accelerator.device) for context in contexts)
            finite = self._sharded or all(
                bool(torch.isfinite(inner(input_ids=row).logits).all()) for row in ids
            )
        except RuntimeError:
            return
        if not finite:
            raise NonFiniteError(
                f"step {step}: the model's logits must be finite to sample from; found NaN or infinity; go on from an earlier "
                "checkpoint, lower trainer.optim.lr, train in float32, or see whether the model is whole"
            )

    def _culprit(self, model: nn.Module, batches: Sequence[Batch]) -> tuple[Batch | None, str]:
        """The first batch whose own gradient is not finite and where it comes from; else None and why."""
        if self._sharded:
            return None, UNKNOWN_SHARDED
        try:
            for batch in batches:
                if not self._gradient_is_finite(model, batch, self.config):
                    return batch, self._channel(model, batch, self._gradient_is_finite)
        except RuntimeError as failure:
            return None, f"the step's gradients could not be computed again: {failure}"
        return None, f"no batch of the step makes it alone; the last of {len(batches)} is kept"

    def _finite(self, model: nn.Module, batch: Batch) -> ComposedLoss:
        result = self.compose(model, batch, self.config)
        if not bool(torch.isfinite(result.loss.detach())):
            raise NonFiniteInputError(
                f"the loss must be finite; found {float(result.loss.detach())}, a sum of finite terms that overflowed"
            )
        return result

    def _leave(self, batch: Batch, error: str, channel: str, step: int) -> str:
        """Save the batch and say where it is and where the error comes from."""
        rank = self.accelerator.process_index
        try:
            path = save_batch(SavedBatch(dict(batch), self.config, step, rank, error, channel), self.folder)
            where = f"the batch is in {path} (docs/guards.md)"
        except (OSError, RuntimeError) as failure:
            where = f"the batch could not be saved in {self.folder}: {failure}"
        return f"{channel}; {where}; the weights were not changed"

    def _channel(self, model: nn.Module, batch: Batch, is_finite: Probe) -> str:
        if self._sharded:
            return UNKNOWN_SHARDED
        try:
            return _blame(lambda other, config: is_finite(model, other, config), batch, self.config)
        except RuntimeError as failure:
            return f"which channel it comes from was not found out: {failure}"

    @torch.no_grad()
    def _loss_is_finite(self, model: nn.Module, batch: Batch, config: ComposerConfig) -> bool:
        try:
            # Without DDP's wrapper, whose forward talks to the other ranks.
            result = self.compose(self.accelerator.unwrap_model(model), batch, config)
        except LossInputError:
            return False
        return bool(torch.isfinite(result.loss))

    def _gradient_is_finite(self, model: nn.Module, batch: Batch, config: ComposerConfig) -> bool:
        inner = self.accelerator.unwrap_model(model)
        trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
        loss = self.compose(inner, batch, config).loss * self.accelerator.num_processes
        # Not backward(): DDP's hooks hang on accumulation.
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        norms = gradient_norms([item for item in gradients if item is not None])
        return bool(torch.isfinite(norms).all())

    def _ranks_with(self, flag: bool) -> list[int]:
        """The ranks on which ``flag`` is set."""
        if self._alone or self._sharded:
            return []
        flags = self.accelerator.gather(torch.tensor([float(flag)], device=self.accelerator.device))
        return [rank for rank, value in enumerate(flags.tolist()) if value]

    def _meet(self) -> None:
        """Wait for the other ranks: the first one to end takes all of them down, saved or not."""
        if not (self._alone or self._sharded):
            self.accelerator.wait_for_everyone()


def _blame(is_finite: Callable[[Batch, ComposerConfig], bool], batch: Batch, config: ComposerConfig) -> str:
    """Which part of the loss is not finite, by leaving parts out."""
    off = {"weight": 0.0, "weight_start": 0.0}
    alone = config.model_copy(update={"sdpo": config.sdpo.model_copy(update=off)})
    if is_finite(batch, alone):
        return (
            "it comes from channel 2: with sdpo.weight = 0 the same batch is finite; look at the hints and the teacher, or set "
            "sdpo.weight = 0"
        )
    plain = {
        **batch,
        "advantages": torch.zeros_like(batch["advantages"]),
        "inference_logprobs": None,
        "logprobs_known": None,
        "loss_weights": None,
    }
    if is_finite(plain, alone):
        return (
            "it comes from channel 1: with sdpo.weight = 0 it stays, without advantages and sampling log-probs it is gone; look "
            "at the rewards and at the log-probs of the sampler or the record"
        )
    return (
        "it comes from the model: with sdpo.weight = 0 it stays, without advantages and sampling log-probs too; look for NaN in "
        "the weights, go on from an earlier checkpoint, lower trainer.optim.lr, or train in float32"
    )
