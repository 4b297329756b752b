"""``python -m parity``: the table and the exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import parity.__main__
from parity import golden, mutants
from parity.__main__ import main, parse
from parity.cases import FAMILIES
from parity.mutants import Edit, Mutant
from parity.releases import RELEASES, by_name, identify
from tests.parity.conftest import LOSS, MakeCheckout


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One recorded release and no mutants: the first test runs them all."""
    monkeypatch.setattr(parity.__main__, "RELEASES", (by_name("v0.7.0"),))
    monkeypatch.setattr(mutants, "MUTANTS", ())


def test_golden_mode_passes_and_prints_every_release_and_family(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parity"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    head = lines[0].split()
    assert head[-7:] == ["objective", "family", "cases", "loss", "metrics", "gradient", "mode"]
    for release in RELEASES:
        rows = [line for line in lines if line.startswith(f"{release.name} ")]
        assert len(rows) == len(FAMILIES) * len(release.targets)
        assert all(row.count("equal") == 3 for row in rows)
    assert "Deliberate difference (masked non-finite)" in done.stdout
    assert lines[-1] == "passed: no row differs, no mutant survives"


@pytest.mark.usefixtures("quick")
def test_a_corrupted_vector_exits_1_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(golden.FOLDER, folder)
    path = folder / "v0.7.0.json"
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    entry = data["cases"]["ipo/masks/full/29/float32"]
    digit = entry["loss"][-3]
    path.write_text(
        text.replace(entry["loss"], entry["loss"][:-3] + f"{int(digit, 16) ^ 1:x}" + entry["loss"][-2:])
    )
    assert main(["--golden", str(folder), "--summary"]) == 1
    out = capsys.readouterr().out
    assert "differs: v0.7.0: ipo/masks/full/29/float32: loss: expected" in out
    assert "FAILED: 1 rows differ, 0 mutants survive" in out
    assert "1 differ" in out


@pytest.mark.usefixtures("quick")
def test_a_surviving_mutant_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = Mutant("harmless", (Edit("Channel 1: the policy objectives", "Channel one"),), ("ipo",))
    monkeypatch.setattr(mutants, "MUTANTS", (harmless,))
    assert main(["--summary"]) == 1
    assert "NONE, it survives" in capsys.readouterr().out


def sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err


def test_bad_arguments_exit_2_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "found none under" in sentence(["--prime-rl", str(tmp_path)], capsys)
    assert "root of a PRIME-RL checkout" in sentence(["--prime-rl", str(tmp_path / "absent")], capsys)
    assert "unrecognized arguments: --nonsense" in sentence(["--nonsense"], capsys)
    assert "expected one argument" in sentence(["--prime-rl"], capsys)
    assert "invalid choice: 'compaer'" in sentence(["compaer"], capsys)
    assert "--release names the checkout of one --prime-rl" in sentence(["--release", "v0.8.0"], capsys)
    assert "found no such file" in sentence(["--golden", str(tmp_path)], capsys)


def test_a_golden_file_that_is_not_json_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "v0.5.0.json").write_text('{"release": ', encoding="utf-8")
    assert "must be a file of python -m parity record; found JSONDecodeError" in sentence(
        ["--golden", str(tmp_path)], capsys
    )


def test_a_golden_file_of_another_commit_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (golden.FOLDER / "v0.6.0.json").read_text(encoding="utf-8")
    (tmp_path / "v0.5.0.json").write_text(text, encoding="utf-8")
    assert "must be of commit 63331ad8b170" in sentence(["--golden", str(tmp_path)], capsys)


def test_an_unknown_release_name_exits_2(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prime-rl", str(make_checkout()), "--release", "v9.9.9"]
    assert "--release must be one of v0.5.0, " in sentence(arguments, capsys)


def test_a_missing_module_is_named_with_what_to_install(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_checkout(loss="import a_module_that_is_nowhere\n")
    error = sentence(["--prime-rl", str(root)], capsys)
    assert "no module named 'a_module_that_is_nowhere'" in error
    assert "pip install 'composer-rl[parity-live]'" in error


def test_a_checkout_that_does_not_import_exits_2(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    error = sentence(["--prime-rl", str(make_checkout(loss="1 / 0\n"))], capsys)
    assert "must be importable; found ZeroDivisionError" in error


def test_a_release_outside_the_table_is_not_recorded(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "add it there" in sentence(["record", "--prime-rl", str(make_checkout())], capsys)


@pytest.mark.usefixtures("quick")
def test_a_newer_release_gets_a_not_verified_row(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    """As PRIME-RL's main is after its pull request 3418: no default loss, ``ipo_threshold`` spelt ``eps``."""
    assert main(["--prime-rl", str(make_checkout())]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("newer ")]
    assert rows[0].endswith("not verified: no default_loss_fn")
    compared = [row for row in rows if " ipo_loss_fn " in row]
    assert len(compared) == len(FAMILIES)
    assert all(row.startswith("newer (not verified)") for row in compared)
    assert all(row.count("equal") == 3 for row in compared if "masked non-finite" not in row)


@pytest.mark.usefixtures("quick")
def test_a_differing_function_exits_1(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_checkout(loss=LOSS.replace("(result.loss, result", "(result.loss * 1.0000001, result"))
    assert main(["--prime-rl", str(root), "--summary"]) == 1
    assert "loss: expected" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_function_that_raises_in_a_newer_release_is_a_row(
    make_checkout: MakeCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_checkout(loss=LOSS.replace("inputs.advantages", "inputs.no_such_field"))
    assert main(["--prime-rl", str(root)]) == 0
    assert "not verified: ipo_loss_fn raised AttributeError" in capsys.readouterr().out


def test_a_checkout_is_named_by_its_files_and_an_edit_makes_it_unverified(
    make_checkout: MakeCheckout,
) -> None:
    root = make_checkout()
    assert identify(root).release is None
    assert identify(root, "v0.8.0").label == "v0.8.0, edited"
    assert identify(root, "v0.8.0").release is None
    assert by_name("v0.8.0").commit.startswith("60bc2954")


def test_every_command_of_the_page_is_one_that_parses() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
    commands = re.findall(
        r"^python -m parity(.*?)(?:#.*)?$", page.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(commands) == 4
    for command in commands:
        parse(command.split())


def test_the_page_lists_every_release_family_and_golden_file() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    for release in RELEASES:
        assert release.commit[:8] in text
    for family in FAMILIES:
        assert f"| {family} | " in text
