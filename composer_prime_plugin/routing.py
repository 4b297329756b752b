"""Which backend trains a configuration, and why.

PRIME-RL trains what it can; a run that needs full-vocabulary logits, or anything else that only the
TRL host has, goes there. Imports no torch: the contract is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import SDPOUnavailableError

if TYPE_CHECKING:
    from composer_prime_plugin.contract import LossContract

Backend = Literal["prime-rl", "trl-host"]

PRIME_COMMAND = "rl"
HOST_COMMAND = "composer-rl run"


@dataclass(frozen=True)
class Route:
    """``backend``, the ``reasons`` (one sentence each, the deciding one first) and the ``command``."""

    backend: Backend
    reasons: tuple[str, ...]
    command: str


def choose_backend(
    config: ComposerConfig, contract: LossContract | None, arguments: str = "@ rl.toml"
) -> Route:
    """The route of ``config`` where ``contract`` is what the installed PRIME-RL hands a custom loss
    (None: not installed). ``arguments`` is what follows the command (``@ rl.toml --max-steps 5``)."""
    reasons: list[str] = []
    weight = _weight(config)
    if config.sdpo.active:
        if contract is None:
            reasons.append(f"{weight} needs full-vocabulary logits, and PRIME-RL is not installed")
        elif not contract.has_logits:
            reasons.append(
                f"{weight} needs full-vocabulary logits, and LossInputs of the installed "
                f"PRIME-RL {contract.version} has no {' and no '.join(contract.missing_logits)}"
            )
    reasons += host_only_reasons(config, contract)
    if reasons:
        return Route("trl-host", tuple(reasons), f"{HOST_COMMAND} {arguments}")
    if config.sdpo.active and contract is not None:
        reason = f"{weight}, and the installed PRIME-RL {contract.version} hands over full logits"
        return Route("prime-rl", (reason,), f"{PRIME_COMMAND} {arguments}")
    if contract is None:
        reason = (
            "sdpo.weight = 0 needs channel 1 alone, but PRIME-RL is not installed; the TRL host trains the "
            "same loss on one machine, PRIME-RL is the path to scale"
        )
        return Route("trl-host", (reason,), f"{HOST_COMMAND} {arguments}")
    reason = f"sdpo.weight = 0 needs channel 1 alone, and PRIME-RL {contract.version} is installed"
    return Route("prime-rl", (reason,), f"{PRIME_COMMAND} {arguments}")


def _weight(config: ComposerConfig) -> str:
    """The factor that makes channel 2 active, which in a warm-up to 0 is ``weight_start``."""
    sdpo = config.sdpo
    if sdpo.weight == 0 and sdpo.active:
        return f"sdpo.weight_start = {sdpo.weight_start}"
    return f"sdpo.weight = {sdpo.weight}"


def host_only_reasons(config: ComposerConfig, contract: LossContract | None) -> list[str]:
    """Everything in ``config`` that PRIME-RL cannot do whatever logits it hands over."""
    reasons: list[str] = []
    sdpo = config.sdpo
    if config.replay.weight > 0:
        reasons.append(f"replay.weight = {config.replay.weight}: only the TRL host can replay traces")
    if config.trl_host.traces is not None:
        reasons.append("trl_host.traces trains on recorded traces, which only the TRL host can do")
    if not sdpo.active:
        return reasons
    if sdpo.estimator == "sampled" and not (contract is not None and contract.has_tokens):
        reasons.append('sdpo.estimator = "sampled" needs the token ids, which a custom loss is not given')
    if sdpo.normalization == "error_tokens":
        reasons.append(
            'sdpo.normalization = "error_tokens" divides by the error tokens of all ranks; PRIME-RL divides '
            "by rl tokens"
        )
    if sdpo.warmup_steps > 0 and not (contract is not None and contract.has_step):
        reasons.append(
            f"sdpo.warmup_steps = {sdpo.warmup_steps} needs the optimizer step, which a custom loss is not "
            "given"
        )
    host = config.trl_host
    if host.environment is not None or host.hints is not None:
        key = "environment" if host.environment is not None else "hints"
        reasons.append(f"trl_host.{key} generates hints, which only the TRL host can do")
    return reasons


def sdpo_unavailable(config: ComposerConfig, contract: LossContract) -> SDPOUnavailableError | None:
    """The error for a trainer that cannot run channel 2 as configured; None where it can.

    Hints are not looked at here: a trainer that hands over teacher logits has already used them.
    """
    what: list[str] = []
    if not contract.has_logits:
        what.append(
            f"LossInputs has no {' and no '.join(contract.missing_logits)} (per-token log-probs are not "
            "enough for a divergence between full distributions)"
        )
    if config.sdpo.normalization == "error_tokens":
        what.append('sdpo.normalization = "error_tokens" needs counts over all ranks')
    if config.sdpo.warmup_steps > 0 and not contract.has_step:
        what.append(f"sdpo.warmup_steps = {config.sdpo.warmup_steps} needs a step in LossInputs")
    if config.sdpo.estimator == "sampled" and not contract.has_tokens:
        what.append('sdpo.estimator = "sampled" needs token_ids in LossInputs')
    if not what:
        return None
    version = contract.version or "not installed"
    return SDPOUnavailableError(
        f"{_weight(config)} cannot run on this trainer (PRIME-RL {version}): {'; '.join(what)}. "
        f"Run the same TOML on the TRL host: {HOST_COMMAND} @ rl.toml; or set sdpo.weight = 0 to train "
        "channel 1 alone"
    )
