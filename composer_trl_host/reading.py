"""Reading a model: one student forward, and a teacher that reads only what the student has not.

A ``Reading`` answers per-token questions about next-token distributions. Where the output head can
be applied to hidden states (checked against the model's own logits once), no full logits exist.
Where the student's keys and values can be reused, the teacher reads the hint and the recovery turn
behind them; else it reads its whole sequence. Which of these a model gets is logged once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_prime_plugin.errors import ModelError
from composer_trl_host.head import OutputHead, RowsFn, chunked_rows

logger = logging.getLogger(__name__)

HEAD_TOLERANCE = 1e-2
"""Largest difference, relative to the largest logit, between the head applied here and the model's
own logits. On SmolLM2-135M it is 0 in float32 and in bfloat16, and 8e-3 where bfloat16 autocast rounds the
model's product and not this one; a forgotten scale or cap is far above."""

TEACHER_TOKENS = 2**16
"""Prefix and new tokens of the sites that one teacher forward holds at most."""

_SHARED_ATTENTION = ("sdpa", "eager")
"""Attention implementations whose masks may have holes in the middle, as a shared prefix needs."""

FUNCTIONAL_NOISE = ("attention_dropout", "router_jitter_noise")
"""Module attributes that make a forward in training mode random without a dropout module."""


class Reading(Protocol):
    """Next-token distributions of a batch; ``column`` is the position that predicts."""

    def per_token(self, row: Tensor, column: Tensor, rows_fn: RowsFn, first_column: bool = False) -> Tensor:
        """``rows_fn`` of the logits at ``(row, column)``, ``(n, ...)``, with gradient to the model.
        ``first_column``: of ``(n, m)`` results the first column alone is trained."""
        ...

    def block(self, row: Tensor, column: Tensor) -> Tensor:
        """``(n, vocab)`` logits at ``(row, column)``, without gradient."""
        ...


@dataclass(frozen=True)
class LogitsReading:
    """Full logits ``(B, T - first, vocab)`` of the columns from ``first`` on."""

    logits: Tensor
    first: int = 0

    def per_token(self, row: Tensor, column: Tensor, rows_fn: RowsFn, first_column: bool = False) -> Tensor:
        return rows_fn(self.logits[row, column - self.first], slice(0, row.numel()))

    @torch.no_grad()
    def block(self, row: Tensor, column: Tensor) -> Tensor:
        return self.logits[row, column - self.first]


@dataclass(frozen=True)
class HiddenReading:
    """Hidden states ``(B, T, hidden)`` and the head that turns them into logits."""

    hidden: Tensor
    head: OutputHead

    def per_token(self, row: Tensor, column: Tensor, rows_fn: RowsFn, first_column: bool = False) -> Tensor:
        return chunked_rows(self.hidden[row, column], self.head, rows_fn, gradient_with_forward=first_column)

    @torch.no_grad()
    def block(self, row: Tensor, column: Tensor) -> Tensor:
        return self.head.logits(self.hidden[row, column])


@dataclass(frozen=True)
class StudentReading:
    """The student's reading and, where they can be reused, its keys and values (layer by layer)."""

    reading: Reading
    keys_values: tuple[tuple[Tensor, Tensor], ...] | None = None


def read_student(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, first: int, keep_keys_values: bool
) -> StudentReading:
    """One forward of ``model`` in the mode it is in. ``first``: the first column that will be asked for."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(
            "the model's adapter must not be prompt or prefix tuning, which shift positions; found "
            f"{type(model.active_peft_config).__name__}; use LoRA"
        )
    decoder, head = _parts(model)
    share = keep_keys_values and decoder is not None and _can_share(model, decoder)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask),
        "use_cache": share,
    }
    if head is None or decoder is None:
        keep = input_ids.size(1) - first
        logits = model(**inputs, logits_to_keep=keep).logits
        return StudentReading(LogitsReading(logits[:, -keep:], first))
    seen: list[Any] = []
    hook = decoder.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        # The model's own call keeps every wrapper (DDP, autocast, PEFT) in play; one column of logits
        # is formed by it, the rest by the head here.
        logits = model(**inputs, logits_to_keep=1).logits
    finally:
        hook.remove()
    hidden = seen[0].last_hidden_state
    if hidden.size(1) != input_ids.size(1):
        raise ModelError(
            f"the model must read its input's {input_ids.size(1)} tokens and no more; found {hidden.size(1)} hidden states; "
            "prompt and prefix tuning are not supported: use LoRA"
        )
    if not _head_fits(model, head, hidden[:, -1], logits[:, -1]):
        return read_student(model, input_ids, attention_mask, first, keep_keys_values)
    cache = getattr(seen[0], _cache_name(decoder)) if share else None
    return StudentReading(HiddenReading(hidden, head.summing()), _detached_layers(cache))


@torch.no_grad()
def read_teacher(
    model: nn.Module, batch: Mapping[str, Any], student: StudentReading | None
) -> tuple[Reading, Tensor]:
    """The teacher's reading of every site, in eval mode, and the ``(S,)`` columns that its first token
    stands for: 0 for a whole sequence, the length of the shared prefix otherwise."""
    model = _without_ddp(model)
    sites = batch["teacher_input_ids"].size(0)
    with eval_mode(model):
        if student is not None and student.keys_values is not None and "teacher_prefix" in batch:
            return _read_behind_prefix(model, batch, student)
        mask = batch["teacher_attention_mask"]
        start = torch.zeros(sites, dtype=torch.long, device=mask.device)
        reading = read_student(model, batch["teacher_input_ids"], mask, 0, keep_keys_values=False).reading
        return reading, start


def forwards_are_collective(model: nn.Module) -> bool:
    """Whether a forward of ``model`` waits for the other ranks, so that all must run as many of them."""
    return _is_sharded(model) and torch.distributed.is_available() and torch.distributed.is_initialized()


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is set on some rank. A collective."""
    found = torch.tensor([float(flag)], device=device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return bool(found)


@torch.no_grad()
def join_teacher(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """The forward of ``read_teacher`` on a rank that has no site: the shards that other ranks wait for."""
    with eval_mode(model):
        read_student(model, batch["input_ids"][:1], batch["attention_mask"][:1], 0, keep_keys_values=False)


def position_ids(attention_mask: Tensor) -> Tensor:
    """``(B, T)`` positions counted over real tokens, so that padding moves nothing."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def _read_behind_prefix(
    model: nn.Module, batch: Mapping[str, Any], student: StudentReading
) -> tuple[Reading, Tensor]:
    """Each site's tokens from the last one before its hint on, behind the student's keys and values."""
    assert student.keys_values is not None
    decoder, head = _parts(model)
    assert decoder is not None
    assert head is not None
    # One token before the hint is read again: with an empty hint it predicts the first recovery token.
    prefix = (batch["teacher_prefix"] - 1).clamp(min=0)
    student_prefix = (batch["student_prefix"] - 1).clamp(min=0)
    lengths = batch["teacher_attention_mask"].sum(dim=1) - prefix
    width, new = int(student_prefix.max()), int(lengths.max())
    device = batch["teacher_input_ids"].device
    column = torch.arange(new, device=device)
    is_new = column[None, :] < lengths[:, None]
    gather = (prefix[:, None] + column[None, :]).clamp(max=batch["teacher_input_ids"].size(1) - 1)
    ids = batch["teacher_input_ids"].gather(1, gather)
    past = torch.arange(width, device=device)[None, :] < student_prefix[:, None]
    past = past & batch["attention_mask"][batch["site_row"], :width].bool()
    mask = torch.cat([past, is_new], dim=1).long()
    hidden: list[Tensor] = []
    for sites in torch.arange(ids.size(0), device=device).split(max(1, TEACHER_TOKENS // (width + new))):
        output = decoder(
            input_ids=ids[sites],
            attention_mask=mask[sites],
            position_ids=prefix[sites, None] + column[None, :],
            use_cache=True,
            **{_cache_name(decoder): _cache(student.keys_values, batch["site_row"][sites], width)},
        )
        hidden.append(output.last_hidden_state)
    return HiddenReading(torch.cat(hidden), head), prefix


def _cache_name(decoder: nn.Module) -> str:
    """transformers renamed ``past_key_values`` to ``cache`` and warns at the old name."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _cache(layers: tuple[tuple[Tensor, Tensor], ...], rows: Tensor, width: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys[rows, :, :width], values[rows, :, :width], index)
    return cache


def _detached_layers(cache: Any) -> tuple[tuple[Tensor, Tensor], ...] | None:
    from transformers.cache_utils import DynamicLayer

    # Sliding windows, quantized and recurrent states are other layer classes: they hold no full prefix.
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    return tuple((layer.keys.detach(), layer.values.detach()) for layer in layers)


_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models whose head was checked: True where only their own full logits may be used."""


def _parts(model: nn.Module) -> tuple[nn.Module | None, OutputHead | None]:
    """The decoder under every wrapper and its head; None for a model that must be read plainly."""
    inner = _unwrap(model)
    if _plain.get(inner, False) or not hasattr(inner, "get_decoder") or _is_sharded(model):
        return None, None
    if inner.get_output_embeddings() is None or type(inner.get_output_embeddings()) is not nn.Linear:
        return None, None
    return inner.get_decoder(), OutputHead.of(inner)


def _unwrap(model: nn.Module) -> Any:
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        else:
            return inner


def _without_ddp(model: nn.Module) -> Any:
    """DDP broadcasts buffers in every forward, without gradient too: only what all ranks run may go through it."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    # FSDP's parameters are whole, and no DTensors, between a forward of the root and its backward.
    return any(
        isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()
    ) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _can_share(model: nn.Module, decoder: nn.Module) -> bool:
    """Whether the student's keys and values are what the teacher would compute for the same tokens."""
    inner = _unwrap(model)
    why = None
    if model.training and _is_checkpointing(inner):
        why = "activation checkpointing keeps no keys and values"
    elif getattr(inner.config, "_attn_implementation", None) not in _SHARED_ATTENTION:
        why = f"attention {inner.config._attn_implementation!r} takes no mask with holes"
    elif model.training and any(_is_noisy(module) for module in decoder.modules()):
        why = "dropout is on"
    if why is not None:
        _once(inner, f"the teacher reads its whole sequence: {why}")
    return why is None


def _is_noisy(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    values = [getattr(module, name, None) for name in FUNCTIONAL_NOISE]
    return any(isinstance(value, float) and value > 0 for value in values)


def _is_checkpointing(model: Any) -> bool:
    """transformers renamed ``is_gradient_checkpointing`` and warns at the old name."""
    name = "is_activation_checkpointing"
    return bool(getattr(model, name if hasattr(model, name) else "is_gradient_checkpointing", False))


def _head_fits(model: nn.Module, head: OutputHead, hidden: Tensor, logits: Tensor) -> bool:
    inner = _unwrap(model)
    if inner in _plain:
        return not _plain[inner]
    with torch.no_grad():
        mine = head.logits(hidden).float()
        worst = float((mine - logits.float()).abs().max() / logits.float().abs().max().clamp(min=1e-6))
    _plain[inner] = not worst <= HEAD_TOLERANCE
    if _plain[inner]:
        _once(
            inner,
            f"the model's own full logits are used: its output head is not W h + b with a known scale and cap "
            f"(relative difference {worst:.2g})",
        )
    return not _plain[inner]


_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _once(model: nn.Module, message: str) -> None:
    said = _said.setdefault(model, set())
    if message not in said:
        said.add(message)
        logger.warning(message)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """``model`` in eval mode, every module back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
