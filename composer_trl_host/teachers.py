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


class _Average:
    """``average = decay * average + (1 - decay) * weights``, kept in float32: in half precision a
    step of one percent would round away and the average would never move."""

    def __init__(self, parameters: dict[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = parameters
        self._wide = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def move(self, live: dict[str, Tensor]) -> None:
        for name, average in self._wide.items():
            average.lerp_(live[name].detach().float(), 1.0 - self.decay)
            self._parameters[name].copy_(average)

    def state(self) -> dict[str, Tensor]:
        return self._wide

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        for name, average in self._wide.items():
            average.copy_(state[name])
            self._parameters[name].copy_(average)


class AverageCopy(FrozenCopy):
    """The average of the weights over the optimizer steps, from the first ones on, as a frozen copy."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self._average = _Average(dict(self.model.named_parameters()), decay)

    def after_step(self, model: nn.Module) -> None:
        self._average.move(dict(model.named_parameters()))

    def state(self) -> dict[str, Tensor] | None:
        return self._average.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._average.load(state)


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
        peft = _peft(model)
        self._trained = peft.active_adapter
        peft.add_adapter(AVERAGE_ADAPTER, copy.deepcopy(peft.peft_config[self._trained]))
        peft.set_adapter(self._trained)
        self._peft = peft
        own = {name: p for name, p in peft.named_parameters() if f".{AVERAGE_ADAPTER}." in name}
        with torch.no_grad():
            for name, live in self._live().items():
                own[name].copy_(live)
                own[name].requires_grad_(False)
        self._average = _Average(own, decay)

    @contextmanager
    def reader(self, model: nn.Module) -> Iterator[nn.Module]:
        trained = {name for name, parameter in self._peft.named_parameters() if parameter.requires_grad}
        self._peft.set_adapter(AVERAGE_ADAPTER)
        try:
            yield model
        finally:
            self._peft.set_adapter(self._trained)
            # Switching adapters sets requires_grad; only what was trained may be trained.
            for name, parameter in self._peft.named_parameters():
                parameter.requires_grad_(name in trained)

    def after_step(self, model: nn.Module) -> None:
        self._average.move(self._live())

    def state(self) -> dict[str, Tensor] | None:
        return self._average.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._average.load(state)

    def _live(self) -> dict[str, Tensor]:
        """The trained adapter's tensors under the average's names."""
        return {
            name.replace(f".{self._trained}.", f".{AVERAGE_ADAPTER}."): parameter
            for name, parameter in self._peft.named_parameters()
            if f".{self._trained}." in name
        }


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


def _peft(model: nn.Module) -> Any:
    inner: Any = model
    while not hasattr(inner, "peft_config") and hasattr(inner, "module"):
        inner = inner.module
    return inner
