"""Golden vectors: complete, small, and a change of any recorded byte is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parity import golden, mutants
from parity.cases import Case, build, cases
from parity.mutants import Edit, Mutant
from parity.releases import RELEASES, Release
from parity.suite import FamilyResult, loss_fn

MOST_BYTES = 2 * 1024 * 1024


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_every_case_of_every_release_is_recorded(release: Release) -> None:
    recorded = golden.load(release)
    wanted = {case.id for objective in release.targets for case in cases(objective, release.fields)}
    assert recorded.entries.keys() == wanted
    assert recorded.machine.torch
    assert recorded.machine.cpu_capability


def test_the_files_stay_under_two_mebibytes_in_all() -> None:
    files = [path for path in golden.FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def one(entry: dict[str, Any] | None, length: int = 1023, ours: Any = loss_fn) -> FamilyResult:
    """The row of one case of v0.8.0 whose recorded vector is ``entry``, compared to the bit."""
    release = RELEASES[3]
    case = Case("random", "dppo", "seed 0", length=length)
    recorded = golden.load(release)
    entries = {} if entry is None else {case.id: recorded.entries[case.id] | entry}
    machine = golden.Machine.here()
    pretended = replace(recorded, machine=machine, entries=entries)
    if recorded.machine != machine and ours is loss_fn and entry == {}:
        pytest.skip(f"recorded on {recorded.machine}; this machine is compared in ulps")
    return golden.run_one(pretended, "dppo", ours, [(case, build(case))])[0]


def test_the_untouched_vector_is_equal() -> None:
    assert not one({}).differs


@pytest.mark.parametrize(
    ("entry", "quantity", "words"),
    [
        ({"loss": "float32:00000000"}, "loss", "expected 0.0"),
        ({"loss": "bfloat16:0000"}, "loss", "expected torch.bfloat16"),
        ({"loss": "float32:0000"}, "loss", "cannot be read"),
        ({"loss": "float99:0000"}, "loss", "cannot be read"),
        ({"loss": "float32:zz"}, "loss", "cannot be read"),
        ({"metrics": {}}, "metrics", "metric names"),
        ({"gradient": "float32:00000000"}, "gradient", "(1,)"),
        ({"gradient_sha256": "0" * 64}, "gradient", "digest of its bytes differs"),
        ({"inputs": "0" * 16}, "loss", "the generation of inputs drifted"),
        (None, "loss", "no vector is recorded for this case"),
    ],
)
def test_a_changed_vector_is_seen_and_named(entry: dict[str, Any] | None, quantity: str, words: str) -> None:
    row = one(entry)
    assert getattr(row, quantity).differing == 1
    assert words in getattr(row, quantity).messages[0]
    assert "dppo/random/seed 0/1023/float32: " in getattr(row, quantity).messages[0]


OFF_BY_AN_ULP = Mutant(
    "exp off by one unit in the last place",
    (
        Edit(
            "    ratio = torch.exp(log_ratio)\n",
            "    ratio = torch.exp(log_ratio)\n"
            "    up = torch.nextafter(ratio.detach().float(), torch.tensor(torch.inf))\n"
            "    ratio = ratio + (up - ratio.detach().float()).to(ratio.dtype)\n",
        ),
    ),
)


def test_another_processors_exp_passes_in_ulps_and_not_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = mutants.mutated_loss(OFF_BY_AN_ULP)
    release = RELEASES[0]
    recorded = golden.load(release)
    here = golden.Machine.here()
    same = golden.run_one(replace(recorded, machine=here), "ipo-two", ours)
    other = golden.run_one(replace(recorded, machine=replace(here, torch="0.0.0")), "ipo-two", ours)
    assert {row.mode for row in same} == {"golden, to the bit"}
    assert sum(row.differs for row in same) > 5
    assert {row.mode for row in other} == {"golden, in ulps"}
    assert not [row.messages for row in other if row.differs]
