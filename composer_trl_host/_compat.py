"""What older transformers do otherwise. Delete each part with the bound that makes it unreachable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def load_root_adapter(model: Any, checkpoint: Path) -> None:
    """Load the adapter at a checkpoint's root. Before 5.23 transformers leave it out where another one lies
    in a subfolder, as the average of ``sdpo.teacher = "ema"`` does, and go on with untrained weights."""
    if Version(transformers.__version__).release >= (5, 23) or len(getattr(model, "peft_config", ())) < 2:
        return
    if any((checkpoint / name).is_file() for name in _WEIGHTS):
        active = model.active_adapter
        model.load_adapter(str(checkpoint), "default", is_trainable=active == "default")
        model.set_adapter(active)
