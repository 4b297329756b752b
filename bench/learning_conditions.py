"""The conditions of the learning bench by name: data alone, nothing here trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEEDS = (42, 1, 2)
BASE = "both"
"""The condition that every other one is compared with."""
LEVER_STEPS = 10
"""Where the base still learns fast, so that slower and faster both show."""

KWARGS = "trainer.loss.kwargs"
_SDPO = f"{KWARGS}.sdpo"


@dataclass(frozen=True)
class Condition:
    """One row of the bench.

    ``flags``: keys of the TOML, dotted, and their values. The rest changes what no key can:
    ``wording`` the hint's text (``WORDINGS``), ``wrong`` the share of training hints that name a wrong
    command, ``cut`` trains a recovery up to the first token that the teacher itself would not write,
    ``one_site`` gives the rollouts of a group one first turn, so that they are recoveries from one error.
    """

    lever: str
    says: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    wording: str | None = None
    wrong: float = 0.0
    cut: bool = False
    one_site: bool = False
    steps: int = LEVER_STEPS
    every: int = LEVER_STEPS
    """Steps between evaluations."""


def _sdpo(**values: Any) -> dict[str, Any]:
    return {f"{_SDPO}.{name}": value for name, value in values.items()}


def _group(size: int) -> dict[str, Any]:
    return {"orchestrator.group_size": size}


NO_POLICY = {
    f"{KWARGS}.policy.objective": "dppo",
    f"{KWARGS}.policy.adv_tau": 0.0,
    f"{KWARGS}.policy.kl_tau": 0.0,
}
"""Channel 1 is then exactly 0, and channel 2 is divided by the same count of tokens as before."""

CONDITIONS: dict[str, Condition] = {
    "both": Condition("channels", "both channels, the example as it stands", steps=20, every=5),
    "channel_1": Condition(
        "channels", "channel 1 alone (`sdpo.weight = 0`)", _sdpo(weight=0.0), steps=20, every=5
    ),
    "channel_2": Condition(
        "channels", "channel 2 alone (`dppo`, `adv_tau = kl_tau = 0`)", NO_POLICY, steps=20, every=5
    ),
    "token_0.05": Condition("clip", '`"token"`, 0.05 nats', _sdpo(token_clip=0.05, clip_mode="token")),
    "entry_0.05": Condition("clip", '`"entry"`, 0.05 nats', _sdpo(token_clip=0.05, clip_mode="entry")),
    "rescale_0.05": Condition("clip", '`"rescale"`, 0.05 nats', _sdpo(token_clip=0.05, clip_mode="rescale")),
    "beta_0": Condition("jsd_beta", "0, forward KL", _sdpo(jsd_beta=0.0)),
    "beta_1": Condition("jsd_beta", "1, reverse KL", _sdpo(jsd_beta=1.0)),
    "teacher_ema": Condition("teacher", '`"ema"`, decay 0.9', _sdpo(teacher="ema", ema_decay=0.9)),
    "teacher_initial": Condition("teacher", '`"initial"`', _sdpo(teacher="initial")),
    "wrong_0.5": Condition("wrong hints", "half of the hints name a wrong command", wrong=0.5),
    "lr_3e-5": Condition("learning rate", "3e-5", {"trainer.optim.lr": 3e-5}),
    "lr_3e-6": Condition("learning rate", "3e-6", {"trainer.optim.lr": 3e-6}),
    "cut": Condition("recovery tokens", "up to the first that the teacher would not write", cut=True),
    "lora": Condition(
        "parameters",
        "LoRA, rank 16, alpha 32, all linear layers, learning rate 1e-4",
        {"trainer.model.lora.rank": 16, "trainer.model.lora.alpha": 32.0, "trainer.optim.lr": 1e-4},
    ),
    "raw": Condition("start", "the raw model, without the warm start", {f"{KWARGS}.trl_host.adapter": None}),
    "weight_0.1": Condition("weight", "0.1", _sdpo(weight=0.1)),
    "weight_3": Condition("weight", "3", _sdpo(weight=3.0)),
    "warmup_10": Condition("weight", "1 after 10 steps of warm-up from 0", _sdpo(warmup_steps=10)),
    "role_system": Condition("hint", "role `system`", _sdpo(hint_role="system")),
    "role_tool": Condition("hint", "role `tool_result`", _sdpo(hint_role="tool_result")),
    "word_sentence": Condition("hint", "a sentence around the command", wording="sentence"),
    "word_advice": Condition("hint", "advice that does not say the command", wording="advice"),
    "samples_4": Condition(
        "samples per site", "4: four rollouts from one first turn", _group(4), one_site=True
    ),
    "group_4": Condition("samples per site", "1, in groups of 4 with first turns of their own", _group(4)),
    "samples_2": Condition("samples per site", "2: two rollouts from one first turn", one_site=True),
    "wrong_0.25": Condition("wrong hints", "a quarter", wrong=0.25),
    "token_0.5": Condition("clip", '`"token"`, 0.5 nats', _sdpo(token_clip=0.5, clip_mode="token")),
    "entry_0.5": Condition("clip", '`"entry"`, 0.5 nats', _sdpo(token_clip=0.5, clip_mode="entry")),
    "rescale_0.5": Condition("clip", '`"rescale"`, 0.5 nats', _sdpo(token_clip=0.5, clip_mode="rescale")),
    "lora_1e-5": Condition(
        "parameters",
        "the same LoRA, learning rate 1e-5",
        {"trainer.model.lora.rank": 16, "trainer.model.lora.alpha": 32.0},
    ),
    "lr_1e-4": Condition("learning rate", "1e-4", {"trainer.optim.lr": 1e-4}),
    "word_bare": Condition("hint", "the command and nothing else", wording="bare"),
}
"""Every run of the bench by name, in the order of the queue."""

WORDINGS: dict[str, str] = {
    "sentence": "In this shell the command for that request is {command} and nothing else.",
    "bare": "{command}",
    "advice": "hint: read the error and try another command",
}
