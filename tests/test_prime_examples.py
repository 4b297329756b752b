"""PRIME-RL's own example TOMLs, with our loss added, through `composer-rl run --dry-run` on the host.

They are read from checkouts; none of them is kept here. COMPOSER_RL_PRIME_CHECKOUTS names the folders, separated
as PATH is.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_prime_plugin import cli
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import load_run
from composer_trl_host.prime_keys import UNKNOWN
from composer_trl_host.settings import HostSettings
from composer_trl_host.verifiers_env.source import EVAL_KEYS, TRAIN_KEYS, find_source

VARIABLE = "COMPOSER_RL_PRIME_CHECKOUTS"
CHECKOUTS = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
FOLDERS = ("examples", "configs")
LOSS = '[trainer.loss]\ntype = "custom"\nimport_path = "composer_prime_plugin.loss_fn"\n'

pytestmark = pytest.mark.skipif(not CHECKOUTS, reason=f"set {VARIABLE} to checkouts of PRIME-RL")


def words_of(checkout: Path) -> Iterator[tuple[str, ...]]:
    """What one would type after `run` for every reinforcement-learning TOML of ``checkout``: the file, an
    overlay on the file it lies beside, and files of one section each."""
    for path in sorted(path for name in FOLDERS for path in (checkout / name).rglob("*.toml")):
        tables = tomllib.loads(path.read_text())
        beside = path.with_name(path.name.removeprefix("slurm_"))
        sections = {"trainer": "trainer.toml", "orchestrator": "orchestrator.toml"}
        if {"trainer", "orchestrator"} & tables.keys():
            yield ("@", str(path))
        elif path.name == "slurm_rl.toml" and beside.is_file():
            yield ("@", str(beside), "@", str(path))
        elif path.name == "trainer.toml" and path.with_name(sections["orchestrator"]).is_file():
            yield tuple(
                word
                for section, name in sections.items()
                for word in (f"--{section}", "@", str(path.with_name(name)))
            )


def every_run() -> list:
    return [
        pytest.param(
            words, id=f"{checkout.name}-{'+'.join(_short(word, checkout) for word in words if '/' in word)}"
        )
        for checkout in CHECKOUTS
        for words in words_of(checkout)
    ]


def _short(word: str, checkout: Path) -> str:
    return str(Path(word).relative_to(checkout).with_suffix("")).replace("/", ".")


def _names_environments(document: dict) -> bool:
    orchestrator = document.get("orchestrator") or {}
    places = (orchestrator, orchestrator.get("train") or {}, orchestrator.get("eval") or {})
    return any(place.get(name) for place in places for name in ("env", "source"))


@pytest.mark.parametrize("words", every_run() if CHECKOUTS else [()])
def test_it_resolves_for_the_host_with_nothing_unknown(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_installed_contract", lambda: None)
    monkeypatch.setattr(cli, "prime_is_importable", lambda: False)
    (tmp_path / "loss.toml").write_text(LOSS)
    arguments = [*words, "@", str(tmp_path / "loss.toml"), "--output-dir", str(tmp_path / "out")]
    assert cli.main(["run", *arguments, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert UNKNOWN not in printed
    run = load_run(arguments)
    host = HostSettings.from_run(run)
    refused, task = None, None
    try:
        task = find_source(run.document)
    except ConfigError as error:
        refused = str(error)
    # Where the environments cannot be had, one sentence says what was found and what to set.
    assert refused is None or refused in printed
    assert ("missing for a run on the TRL host: a task" in printed) == (task is None)
    listed = {item.key for item in host.unhonoured}
    tables = {key for key in (*TRAIN_KEYS, *EVAL_KEYS) if key in listed}
    assert bool(tables) == (task is None and _names_environments(run.document))
    (written,) = (tmp_path / "out").rglob("configs")
    assert load_run(["@", str(written / "prime-rl.toml")]).document == run.document
    again = HostSettings.from_run(load_run(["@", str(written / "trl-host.toml")]))
    assert again.unhonoured == ()
    for field in ("model_name", "lora", "seq_len", "max_steps", "batch_size", "group_size", "lr", "run_dir"):
        assert getattr(again, field) == getattr(host, field), field


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_a_checkout_has_examples(checkout):
    assert len(list(words_of(checkout))) > 40
