"""Every mutant of the objectives dies, to the bit and in ulps."""

from __future__ import annotations

import pytest

from composer_prime_plugin.errors import ConfigError
from parity import golden, mutants
from parity.mutants import Edit, Mutant

REQUIRED = (
    "flipped sign of the policy term",
    "dropped mask in the policy term",
    "dropped mask in the KL term",
    "missing weights",
    "mean for sum",
    "thresholds swapped",
    "upper bound inclusive",
    "lower bound inclusive",
    "bound inclusive",
    "advantage's sign ignored",
    "adv_tau ignored",
    "k1 for the squared KL",
)


def test_the_required_mutants_exist() -> None:
    assert set(REQUIRED) <= {mutant.name for mutant in mutants.MUTANTS}


def test_every_mutant_dies_even_in_ulps(monkeypatch: pytest.MonkeyPatch) -> None:
    here = golden.Machine.here()
    elsewhere = golden.Machine("0.0.0", here.cpu_capability, here.exp_probe)
    monkeypatch.setattr(golden.Machine, "here", classmethod(lambda cls: elsewhere))
    found = mutants.verdicts()
    assert [verdict for verdict in found if not verdict.killed_by] == []
    by_name = {(verdict.mutant, verdict.objective): verdict.killed_by for verdict in found}
    assert by_name["thresholds swapped", "dppo"] == ("knobs",)
    assert by_name["upper bound inclusive", "dppo"] == ("boundary",)


def test_a_mutant_that_changes_nothing_survives() -> None:
    harmless = Mutant("renamed docstring", (Edit("Channel 1: the policy objectives", "Channel one"),))
    assert [verdict.killed_by for verdict in mutants.verdicts(chosen=[harmless])] == [(), (), ()]


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    stale = Mutant("stale", (Edit("no such text", ""),))
    with pytest.raises(
        ConfigError, match=r"must occur 1 times in composer_prime_plugin\.objectives; found 0"
    ):
        mutants.mutated_loss(stale)
