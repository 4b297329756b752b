"""The PRIME-RL side of composer-rl.

A TOML names ``composer_prime_plugin.loss_fn``. Names are loaded on first use, so that importing the
configuration imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_prime_plugin.config import ComposerConfig as ComposerConfig
    from composer_prime_plugin.contract import LossContract as LossContract
    from composer_prime_plugin.contract import LossInputs as LossInputs
    from composer_prime_plugin.contract import LossOutputs as LossOutputs
    from composer_prime_plugin.divergence import generalized_jsd_loss as generalized_jsd_loss
    from composer_prime_plugin.errors import SDPOUnavailableError as SDPOUnavailableError
    from composer_prime_plugin.plugin import loss_fn as loss_fn
    from composer_prime_plugin.routing import choose_backend as choose_backend

__version__ = "0.1.0"

_HOME = {
    "ComposerConfig": "config",
    "LossContract": "contract",
    "LossInputs": "contract",
    "LossOutputs": "contract",
    "generalized_jsd_loss": "divergence",
    "SDPOUnavailableError": "errors",
    "loss_fn": "plugin",
    "choose_backend": "routing",
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
