"""The inputs of the parity suite."""

from __future__ import annotations

import pytest
import torch

from parity.cases import DTYPES, FAMILIES, LONGEST, NEAR_THRESHOLD, Case, build, cases, digest
from parity.releases import RELEASES, Objective

EVERY = [(release, objective) for release in RELEASES for objective in release.targets]


@pytest.mark.parametrize(("release", "objective"), EVERY, ids=[f"{r.name}-{o}" for r, o in EVERY])
def test_every_family_has_cases_in_both_dtypes_with_names_of_their_own(release, objective) -> None:
    found = list(cases(objective, release.fields))
    assert {(case.family, case.dtype) for case in found} == {(f, d) for f in FAMILIES for d in DTYPES}
    assert len({case.id for case in found}) == len(found)


@pytest.mark.parametrize("objective", ["dppo", "ipo", "ipo-two"])
def test_the_cases_reach_what_the_issue_asks_for(objective: Objective) -> None:
    fields = RELEASES[-1].fields if objective != "ipo-two" else RELEASES[0].fields
    found = list(cases(objective, fields))
    assert {1, 7, 1023, LONGEST} <= {case.length for case in found}
    assert {case.advantages for case in found} == {"mixed", "positive", "negative", "zero"}
    assert {"empty", "full", "sparse"} <= {case.mask for case in found}
    weights = {case.weights for case in found}
    assert weights == ({None, "ones", "zeros", "mixed"} if "loss_weights" in fields else {None})
    assert {case.teacher for case in found} == {False, True}
    off_default = {knob for case in found for knob in case.knobs}
    own = {
        "dppo": {"dppo_mask_low", "dppo_mask_high"},
        "ipo": {"ipo_threshold"},
        "ipo-two": {"ipo_mask_low", "ipo_mask_high", "teacher_tau"},
    }
    assert off_default == own[objective] | {"adv_tau", "kl_tau"}


def test_inputs_are_the_same_bits_every_time_and_everywhere() -> None:
    """The digest was computed once; it stands for every stream's bytes."""
    case = Case("random", "dppo", "fixed", length=64, weights="mixed", teacher=True)
    assert digest(build(case)) == digest(build(case)) == DIGEST


DIGEST = "9e7240ea7992b1c8"


def test_a_changed_value_changes_the_digest() -> None:
    inputs = build(Case("random", "dppo", "fixed", length=64))
    before = digest(inputs)
    inputs["advantages"][3] = -inputs["advantages"][3]
    assert digest(inputs) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_boundary_sits_exactly_on_the_thresholds(dtype: str) -> None:
    inputs = build(Case("boundary", "dppo", "x", dtype=dtype, ratios="boundary", mask="full"))
    change = torch.exp(inputs["trainer_logprobs"]) - torch.exp(inputs["inference_logprobs"])
    assert set(change.tolist()) == {1.0, -1.0}
    assert torch.isfinite(torch.exp(inputs["trainer_logprobs"] - inputs["inference_logprobs"])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_other_token_is_near_a_threshold(dtype: str) -> None:
    """So a last-bit difference in exp flips no token on another processor."""
    inputs = build(Case("random", "dppo", "x", length=LONGEST, dtype=dtype))
    change = torch.exp(inputs["trainer_logprobs"].double()) - torch.exp(inputs["inference_logprobs"].double())
    assert float((change.abs() - 0.2).abs().min()) >= NEAR_THRESHOLD[dtype]


def test_far_ratios_are_far_and_finite() -> None:
    inputs = build(Case("far ratios", "dppo", "x", length=1023, ratios="far"))
    log_ratio = inputs["trainer_logprobs"] - inputs["inference_logprobs"]
    assert float(log_ratio.max()) > 15
    assert float(log_ratio.min()) < -15
    assert torch.isfinite(torch.exp(log_ratio)).all()


def test_poison_stays_at_masked_positions() -> None:
    found = [case for case in cases("dppo", RELEASES[-1].fields) if case.poison is not None]
    assert found
    for case in found:
        inputs = build(case)
        stream, mask = inputs[case.poison[0]], inputs["loss_mask"]
        assert torch.isfinite(stream[mask]).all()
        assert not torch.isfinite(stream[~mask]).any()
        assert bool((~mask).any())
