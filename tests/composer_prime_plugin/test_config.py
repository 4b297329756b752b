"""The table under ``[trainer.loss.kwargs]``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from composer_prime_plugin.config import ComposerConfig, PolicyConfig, SDPOConfig, TRLHostConfig, _Table


def test_the_defaults_are_prime_rls_own_and_channel_2_is_off() -> None:
    config = ComposerConfig()
    policy = config.policy
    assert policy.objective == "dppo"
    assert (policy.dppo_mask_low, policy.dppo_mask_high, policy.adv_tau, policy.kl_tau) == (
        0.2,
        0.2,
        1.0,
        1e-3,
    )
    assert (policy.ipo_mask_low, policy.ipo_mask_high, policy.ipo_threshold, policy.teacher_tau) == (
        0.2,
        0.2,
        0.1,
        0,
    )
    assert config.sdpo.weight == 0
    assert not config.sdpo.active
    assert config.sdpo.token_clip is None


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"polcy": {}}, "unknown key 'polcy'; valid keys are policy, replay, sdpo, trl_host"),
        (
            {"policy": {"dppo_mask_hihg": 1}},
            "unknown key 'dppo_mask_hihg'; valid keys are adv_tau, dppo_mask_high",
        ),
        ({"policy": {"threshold": 1}}, "eps, "),
        ({"sdpo": {"wieght": 1, "beta": 2}}, "unknown key 'beta', 'wieght'; valid keys are clip_mode"),
        ({"replay": {"beta": 1}}, "valid keys are dpo_beta, weight"),
        ({"trl_host": {"env": "x"}}, "valid keys are adapter, environment"),
    ],
)
def test_a_misspelt_key_lists_the_valid_ones(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        ComposerConfig(**kwargs)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"policy": {"objective": "ppo"}}, "policy.objective"),
        ({"policy": {"dppo_mask_low": -0.1}}, "policy.dppo_mask_low"),
        ({"policy": {"kl_tau": -1}}, "policy.kl_tau"),
        ({"policy": {"adv_tau": float("nan")}}, "policy.adv_tau"),
        ({"policy": {"eps": -1}}, "policy.eps"),
        ({"policy": {"kl_estimator": "k2"}}, "policy.kl_estimator"),
        ({"sdpo": {"weight": -1}}, "sdpo.weight"),
        ({"sdpo": {"jsd_beta": 1.5}}, "sdpo.jsd_beta"),
        ({"sdpo": {"temperature": 0}}, "sdpo.temperature"),
        ({"sdpo": {"token_clip": 0}}, "sdpo.token_clip"),
        ({"sdpo": {"warmup_steps": -1}}, "sdpo.warmup_steps"),
        ({"sdpo": {"estimator": "top_k", "top_k": 0}}, "sdpo.top_k"),
        ({"replay": {"dpo_beta": 0}}, "replay.dpo_beta"),
        ({"trl_host": {"max_turns": 0}}, "trl_host.max_turns"),
    ],
)
def test_a_value_out_of_range_is_named(kwargs: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as error:
        ComposerConfig(**kwargs)
    assert where in {".".join(map(str, item["loc"])) for item in error.value.errors()}


def test_eps_is_another_spelling_of_ipo_threshold() -> None:
    assert PolicyConfig(objective="ipo", eps=0.3).ipo_threshold == 0.3
    assert PolicyConfig(objective="ipo", ipo_threshold=0.3).ipo_threshold == 0.3
    assert PolicyConfig(objective="ipo", eps=0.3).ipo_form == "one_threshold"


@pytest.mark.parametrize("knob", ["ipo_mask_low", "ipo_mask_high", "teacher_tau"])
def test_two_forms_of_ipo_at_once_are_refused(knob: str) -> None:
    assert PolicyConfig(objective="ipo", **{knob: 0.3}).ipo_form == "two_thresholds"
    with pytest.raises(ValidationError, match=f"found ipo_threshold together with {knob}; remove one side"):
        PolicyConfig(objective="ipo", eps=0.3, **{knob: 0.3})
    assert PolicyConfig(objective="ipo").ipo_form is None


def test_the_string_none_is_null_as_in_prime_rls_tomls() -> None:
    assert SDPOConfig(token_clip="None").token_clip is None  # type: ignore[arg-type]
    assert TRLHostConfig(environment="None").environment is None


def test_top_k_must_be_given_where_it_is_used() -> None:
    with pytest.raises(ValidationError, match=r"needs top_k; found none; set sdpo\.top_k"):
        SDPOConfig(estimator="top_k")


@pytest.mark.parametrize(
    ("sdpo", "words"),
    [
        (
            {"top_k": 3},
            r"top_k is read by estimator = .top_k. alone; found top_k = 3 with .full.; remove one",
        ),
        (
            {"top_k_support": "teacher"},
            r"top_k_support is read by .* alone; found top_k_support = .teacher. with .full.",
        ),
        (
            {"top_k_tail": False, "estimator": "sampled", "jsd_beta": 1.0},
            r"top_k_tail is read by .* alone; found top_k_tail = False with .sampled.; remove one",
        ),
        (
            {"estimator": "top_k", "top_k": 1, "top_k_tail": False},
            r"needs a top_k of at least 2: .* set sdpo\.top_k_tail = true or a larger sdpo\.top_k",
        ),
        (
            {"estimator": "sampled"},
            r"estimates reverse KL, which is jsd_beta = 1; found jsd_beta = 0\.5; set sdpo\.jsd_beta = 1",
        ),
        (
            {"estimator": "sampled", "jsd_beta": 1, "token_clip": 0.5, "clip_mode": "entry"},
            r"no vocabulary entries to clamp; .* set sdpo\.clip_mode = .token. or .rescale.",
        ),
        ({"importance_cap": 0}, "importance_cap"),
    ],
)
def test_a_knob_without_its_estimator_says_what_to_set(sdpo: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SDPOConfig(**sdpo)


def test_a_table_with_every_default_written_out_is_valid() -> None:
    for sdpo in (SDPOConfig(), SDPOConfig(estimator="sampled", jsd_beta=1.0)):
        assert SDPOConfig(**sdpo.model_dump()) == sdpo


def test_warm_up_is_linear_and_ends_at_the_weight() -> None:
    # 0.1 to 0.5 over 4 steps: 0.1, 0.2, 0.3, 0.4, then 0.5.
    sdpo = SDPOConfig(weight=0.5, weight_start=0.1, warmup_steps=4)
    assert [sdpo.weight_at(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert SDPOConfig(weight=0.5, weight_start=0.1).weight_at(0) == 0.5


def test_channel_2_is_active_if_any_step_has_a_factor() -> None:
    assert SDPOConfig(weight=0.1).active
    assert SDPOConfig(weight_start=0.1, warmup_steps=3).active
    assert not SDPOConfig(weight_start=0.1).active


def tables(model: type[_Table]) -> list[type[_Table]]:
    children = [field.annotation for field in model.model_fields.values()]
    nested = [child for child in children if isinstance(child, type) and issubclass(child, _Table)]
    return [model, *(found for child in nested for found in tables(child))]


@pytest.mark.parametrize("table", tables(ComposerConfig), ids=lambda table: table.__name__)
def test_every_field_is_documented(table: type[_Table]) -> None:
    assert [name for name, field in table.model_fields.items() if not field.description] == []


def test_the_configuration_imports_no_torch() -> None:
    code = (
        "import sys, composer_prime_plugin, composer_prime_plugin.config, composer_prime_plugin.routing\n"
        "composer_prime_plugin.ComposerConfig()\n"
        "heavy = {'torch', 'trl', 'transformers', 'vllm', 'prime_rl', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
