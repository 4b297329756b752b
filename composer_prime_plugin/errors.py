"""Every error this product raises on purpose.

Each message says what must hold, what was found, and what to set. The command line prints the
message on one line and exits with ``ComposerError.exit_code``; a library caller can catch the base class or the
standard-library class that each one also is.
"""

from __future__ import annotations


class ComposerError(Exception):
    """Base of the errors below."""

    exit_code = 2


class ConfigError(ComposerError, ValueError):
    """The TOML or the command line asks for something that cannot be."""


class LossInputError(ComposerError, ValueError):
    """The tensors handed to a loss break its contract."""


class NonFiniteInputError(LossInputError):
    """A number that a loss is made of, or the loss itself, is NaN or infinite."""


class AlignmentError(ComposerError, ValueError):
    """Student and teacher positions do not hold the same tokens."""


class ModelError(ComposerError, ValueError):
    """The model, its tokenizer or its chat template cannot be used as asked."""


class TaskError(ComposerError, ValueError):
    """The environment or the trace source breaks its contract."""


class SDPOUnavailableError(ComposerError, RuntimeError):
    """Channel 2 was asked for where the trainer hands over no full-vocabulary logits."""
