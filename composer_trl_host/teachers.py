"""Whose weights read the hinted context: ``sdpo.teacher = "live" | "initial" | "ema"``.

With an adapter no second copy of the model exists: the initial teacher is the model with its adapters
off, the average is one more adapter. Without one, both are a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.errors import ModelError

TEACHER_FILE = "teacher.safetensors"
AVERAGE_ADAPTER = "composer_teacher"


class Teacher(Protocol):
    """A reader of hinted contexts with weights of its own."""

    def reader(self, model: nn.Module) -> Any:
        """A context manager that yields the module to read with."""
        ...

    def after_step(self, model: nn.Module) -> None:
        """Called after every optimizer step."""
        ...

    def state(self) -> dict[str, Tensor] | None:
        """What a checkpoint must hold; None where the weights follow from the run's start."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a checkpoint's state."""
        ...


def build_teacher(model: nn.Module, sdpo: SDPOConfig) -> Teacher | None:
    """The teacher of a run that is about to start; None for the live one."""
    if sdpo.teacher == "live" or not sdpo.active:
        return None
    if any("DTensor" in type(parameter).__name__ for parameter in model.parameters()):
        raise ModelError(
            f'sdpo.teacher must be "live" for sharded parameters; found {sdpo.teacher!r}; set it or do not shard'
        )
    adapted = hasattr(model, "peft_config")
    if sdpo.teacher == "initial":
        return AdaptersOff() if adapted else FrozenCopy(model)
    return AverageAdapter(model, sdpo.ema_decay) if adapted else AverageCopy(model, sdpo.ema_decay)


class FrozenCopy:
    """The run's first weights, copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        for module in self.model.modules():
            # TRL puts a forward on the instance whose closure holds the live model: the copy would read
            # live weights through it.
            module.__dict__.pop("forward", None)

    @contextmanager
    def reader(self, model: nn.Module) -> Iterator[nn.Module]:
        yield self.model

    def after_step(self, model: nn.Module) -> None:
        """The first weights do not move."""

    def state(self) -> dict[str, Tensor] | None:
        return None

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing to load: a resumed run starts from the same model."""


class AverageCopy(FrozenCopy):
    """``average = decay * average + (1 - decay) * weights`` after every optimizer step, from the first weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        for average, live in zip(self.model.parameters(), model.parameters(), strict=True):
            average.lerp_(live.to(average.dtype), 1.0 - self.decay)

    def state(self) -> dict[str, Tensor] | None:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def load(self, state: dict[str, Tensor]) -> None:
        _copy_into(dict(self.model.named_parameters()), state)


class AdaptersOff:
    """The model without its adapters: the run's first weights, at no memory."""

    @contextmanager
    def reader(self, model: nn.Module) -> Iterator[nn.Module]:
        with _peft(model).disable_adapter():
            yield model

    def after_step(self, model: nn.Module) -> None:
        """The base weights do not move."""

    def state(self) -> dict[str, Tensor] | None:
        return None

    def load(self, state: dict[str, Tensor]) -> None:
        """Nothing to load."""


class AverageAdapter:
    """A second, frozen adapter that holds the average of the trained one."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        peft = _peft(model)
        self._trained = peft.active_adapter
        peft.add_adapter(AVERAGE_ADAPTER, copy.deepcopy(peft.peft_config[self._trained]))
        peft.set_adapter(self._trained)
        self._model = peft
        with torch.no_grad():
            for average, live in self._pairs():
                average.copy_(live)
                average.requires_grad_(False)

    @contextmanager
    def reader(self, model: nn.Module) -> Iterator[nn.Module]:
        peft = _peft(model)
        trained = {name for name, parameter in peft.named_parameters() if parameter.requires_grad}
        peft.set_adapter(AVERAGE_ADAPTER)
        try:
            yield model
        finally:
            peft.set_adapter(self._trained)
            # Switching adapters sets requires_grad; only what was trained may be trained.
            for name, parameter in peft.named_parameters():
                parameter.requires_grad_(name in trained)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        for average, live in self._pairs():
            average.lerp_(live.to(average.dtype), 1.0 - self.decay)

    def state(self) -> dict[str, Tensor] | None:
        return {
            name: p.detach() for name, p in self._model.named_parameters() if f".{AVERAGE_ADAPTER}." in name
        }

    def load(self, state: dict[str, Tensor]) -> None:
        _copy_into(dict(self._model.named_parameters()), state)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        named = dict(self._model.named_parameters())
        for name, parameter in named.items():
            if f".{AVERAGE_ADAPTER}." in name:
                yield parameter, named[name.replace(f".{AVERAGE_ADAPTER}.", f".{self._trained}.")]


def save_teacher(teacher: Teacher | None, folder: Path) -> None:
    """Write the teacher's state into a checkpoint folder, where it has one."""
    state = None if teacher is None else teacher.state()
    if state is not None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous().cpu() for name, tensor in state.items()}, folder / TEACHER_FILE)


def load_teacher(teacher: Teacher | None, folder: Path) -> None:
    """Read it back. Raises ``ModelError`` where the checkpoint lacks it."""
    if teacher is None or teacher.state() is None:
        return
    from safetensors.torch import load_file

    path = folder / TEACHER_FILE
    if not path.is_file():
        raise ModelError(
            f'a checkpoint of a run with sdpo.teacher = "ema" must hold {TEACHER_FILE}; {folder} does not; '
            "resume from another one or start anew"
        )
    teacher.load(load_file(path))


@torch.no_grad()
def _copy_into(parameters: dict[str, Any], state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        parameters[name].copy_(tensor)


def _peft(model: nn.Module) -> Any:
    inner: Any = model
    while not hasattr(inner, "peft_config") and hasattr(inner, "module"):
        inner = inner.module
    return inner
