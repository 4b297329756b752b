"""The TRL host: trains the same TOML where PRIME-RL cannot hand over full logits.

Names are loaded on first use; importing this package imports neither torch nor TRL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_trl_host.compose import ComposedLoss as ComposedLoss
    from composer_trl_host.compose import compose_loss as compose_loss
    from composer_trl_host.hints import ErrorContext as ErrorContext
    from composer_trl_host.hints import Hint as Hint
    from composer_trl_host.hints import HintGenerator as HintGenerator
    from composer_trl_host.trainer import ComposerGRPOTrainer as ComposerGRPOTrainer
    from composer_trl_host.trainer import make_dr_grpo_config as make_dr_grpo_config

_HOME = {
    "ComposedLoss": "compose",
    "ComposerGRPOTrainer": "trainer",
    "ErrorContext": "hints",
    "Hint": "hints",
    "HintGenerator": "hints",
    "compose_loss": "compose",
    "make_dr_grpo_config": "trainer",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
