"""Every row of the route table, the reasons and the commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.contract import LossContract
from composer_prime_plugin.errors import ComposerError, SDPOUnavailableError
from composer_prime_plugin.routing import choose_backend, sdpo_unavailable

PLAIN_FIELDS = frozenset({"trainer_logprobs", "inference_logprobs", "advantages", "loss_mask"})
PLAIN = LossContract(fields=PLAIN_FIELDS, version="0.8.0")
TEACHER_LOGITS_ALONE = LossContract(fields=PLAIN_FIELDS | {"teacher_logits"}, version="0.9.0")
LOGITS = LossContract(fields=PLAIN_FIELDS | {"teacher_logits", "trainer_logits"}, version="1.0.0")
LOGITS_AND_TOKENS = LossContract(fields=LOGITS.fields | {"token_ids"}, version="1.2.0")
SAMPLED = {"sdpo": {"weight": 0.1, "estimator": "sampled", "jsd_beta": 1.0}}
LOGITS_AND_STEP = LossContract(fields=LOGITS.fields | {"step"}, version="1.1.0")

OFF: dict[str, object] = {}
ON = {"sdpo": {"weight": 0.1}}
WARMUP = {"sdpo": {"weight": 0.1, "warmup_steps": 5}}
ERROR_TOKENS = {"sdpo": {"weight": 0.1, "normalization": "error_tokens"}}
HINTED = {"sdpo": {"weight": 0.1}, "trl_host": {"environment": "task.py:Task"}}
OWN_HINTS = {"sdpo": {"weight": 0.1}, "trl_host": {"hints": "task.py:Hints"}}
REPLAY = {"replay": {"weight": 0.5}}


@pytest.mark.parametrize(
    ("kwargs", "contract", "backend", "reason"),
    [
        pytest.param(OFF, PLAIN, "prime-rl", "PRIME-RL 0.8.0 is installed", id="off-installed"),
        pytest.param(OFF, LOGITS, "prime-rl", "channel 1 alone", id="off-logits"),
        pytest.param(OFF, None, "trl-host", "PRIME-RL is the path to scale", id="off-not-installed"),
        pytest.param(ON, None, "trl-host", "PRIME-RL is not installed", id="on-not-installed"),
        pytest.param(ON, PLAIN, "trl-host", "no teacher_logits and no trainer_logits", id="on-no-logits"),
        pytest.param(ON, TEACHER_LOGITS_ALONE, "trl-host", "has no trainer_logits", id="on-half-the-logits"),
        pytest.param(ON, LOGITS, "prime-rl", "hands over full logits", id="on-logits"),
        pytest.param(WARMUP, LOGITS, "trl-host", "sdpo.warmup_steps = 5", id="warmup-no-step"),
        pytest.param(
            SAMPLED, LOGITS, "trl-host", 'estimator = "sampled" needs the token ids', id="sampled-no-tokens"
        ),
        pytest.param(SAMPLED, LOGITS_AND_TOKENS, "prime-rl", "hands over full logits", id="sampled-tokens"),
        pytest.param(
            {"trl_host": {"traces": "t.jsonl"}},
            PLAIN,
            "trl-host",
            "trl_host.traces trains on recorded",
            id="traces",
        ),
        pytest.param(WARMUP, LOGITS_AND_STEP, "prime-rl", "hands over full logits", id="warmup-step"),
        pytest.param(ERROR_TOKENS, LOGITS_AND_STEP, "trl-host", "error_tokens", id="error-tokens"),
        pytest.param(HINTED, LOGITS_AND_STEP, "trl-host", "trl_host.environment generates hints", id="hints"),
        pytest.param(
            OWN_HINTS, LOGITS_AND_STEP, "trl-host", "trl_host.hints generates hints", id="own-hints"
        ),
        pytest.param(REPLAY, LOGITS_AND_STEP, "trl-host", "replay.weight = 0.5", id="replay"),
        pytest.param(REPLAY, PLAIN, "trl-host", "replay.weight = 0.5", id="replay-plain"),
        pytest.param(REPLAY, None, "trl-host", "replay.weight = 0.5", id="replay-not-installed"),
        pytest.param(
            {**OFF, "trl_host": {"environment": "task.py:Task"}},
            PLAIN,
            "prime-rl",
            "channel 1 alone",
            id="off-environment-needs-no-hint",
        ),
        pytest.param(
            {"sdpo": {"warmup_steps": 5, "weight_start": 0.3}},
            PLAIN,
            "trl-host",
            "sdpo.weight_start = 0.3 needs full-vocabulary logits",
            id="warmup-down-to-zero",
        ),
    ],
)
def test_the_route_table(kwargs, contract, backend, reason):
    route = choose_backend(ComposerConfig(**kwargs), contract, "@ rl.toml --max-steps 5")
    assert route.backend == backend
    assert reason in " | ".join(route.reasons)
    assert (
        route.command
        == {"prime-rl": "rl", "trl-host": "composer-rl run"}[backend] + " @ rl.toml --max-steps 5"
    )


def test_each_host_only_key_gives_a_reason_of_its_own():
    config = ComposerConfig(
        sdpo={"weight": 1, "warmup_steps": 3, "normalization": "error_tokens"},
        replay={"weight": 1},
        trl_host={"environment": "a.py:A"},
    )
    reasons = choose_backend(config, PLAIN).reasons
    assert len(reasons) == 5
    for word in ("teacher_logits", "replay.weight", "error_tokens", "warmup_steps", "trl_host.environment"):
        assert sum(word in reason for reason in reasons) == 1


def test_a_trainer_with_all_it_needs_gets_no_error():
    assert sdpo_unavailable(ComposerConfig(**WARMUP), LOGITS_AND_STEP) is None
    # A trainer that hands over teacher logits has used the hints already.
    assert sdpo_unavailable(ComposerConfig(**HINTED), LOGITS) is None


def test_the_error_of_a_trainer_without_logits_names_field_version_and_command():
    error = sdpo_unavailable(ComposerConfig(**ON), TEACHER_LOGITS_ALONE)
    assert isinstance(error, SDPOUnavailableError)
    assert isinstance(error, ComposerError)
    for part in ("no trainer_logits", "PRIME-RL 0.9.0", "composer-rl run @ rl.toml", "sdpo.weight = 0"):
        assert part in str(error)


def test_routing_and_the_command_line_import_no_torch():
    code = (
        "import sys, composer_prime_plugin.cli, composer_prime_plugin.routing\n"
        "heavy = {'torch', 'trl', 'transformers', 'prime_rl', 'composer_trl_host'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
