"""Reading TOMLs and overrides by PRIME-RL's habits, and one sentence for each mistake."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field
from pydantic_config import BaseConfig, cli

from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import load_run, scalar

BASE = """
max_steps = 20

[orchestrator]
batch_size = 16

[trainer.optim]
lr = 1e-6

[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"

[trainer.loss.kwargs.sdpo]
weight = 0.5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with a run's TOML and parts to lay over it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(BASE)
    (tmp_path / "overlay.toml").write_text(
        'max_steps = 7\n[ckpt]\n[wandb]\nproject = "p"\n[trainer.model]\nseq_len = 64\n'
    )
    (tmp_path / "optim.toml").write_text('lr = 3e-6\nbetas1 = 0.8\nmax_norm = "None"\n')
    (tmp_path / "trainer.toml").write_text("[optim]\nlr = 4e-6\n")
    return tmp_path


def test_a_toml_becomes_a_run(folder):
    run = load_run(["@", "rl.toml"])
    assert run.document == tomllib.loads(BASE)
    assert run.config.sdpo.weight == 0.5
    assert run.arguments == ("@", "rl.toml")
    assert run.base_dir == folder
    assert run.toml_paths == (Path("rl.toml"),)


def test_later_tomls_are_laid_over_earlier_ones_and_give_the_base_folder(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "b.toml").write_text("[trainer.loss.kwargs.sdpo]\njsd_beta = 1.0\n")
    run = load_run(["@", "rl.toml", "@", "overlay.toml", "@", "sub/b.toml"])
    assert run.document["max_steps"] == 7
    assert run.document["trainer"]["optim"] == {"lr": 1e-6}
    assert (run.config.sdpo.weight, run.config.sdpo.jsd_beta) == (0.5, 1.0)
    assert run.base_dir == folder / "sub"
    assert [path.name for path in run.toml_paths] == ["rl.toml", "overlay.toml", "b.toml"]


@pytest.mark.parametrize(
    "words", [["--trainer.optim", "@", "optim.toml"], ["--trainer.optim", "@optim.toml"]]
)
def test_a_section_file_wins_over_the_root_whatever_the_order(folder, words):
    run = load_run([*words, "@", "rl.toml"])
    assert run.document["trainer"]["optim"] == {"lr": 3e-6, "betas1": 0.8, "max_norm": None}


@pytest.mark.parametrize(
    ("words", "dotted", "value"),
    [
        (["--max-steps", "50"], "max_steps", 50),
        (["--max_steps", "50"], "max_steps", 50),
        (["--max-steps=50"], "max_steps", 50),
        (["--trainer.optim.lr", "1e-5"], "trainer.optim.lr", 1e-5),
        (["--trainer.optim.lr=1e-5", "--trainer.optim.lr", "2e-5"], "trainer.optim.lr", 2e-5),
        (["--ckpt.resume-step", "-1"], "ckpt.resume_step", -1),
        (["--clean-output-dir"], "clean_output_dir", True),
        (["--no-clean-output-dir"], "clean_output_dir", False),
        (["--trainer.model.trust-remote-code", "true"], "trainer.model.trust_remote_code", True),
        (["--run.name", "1e3"], "run.name", "1e3"),
        (["--model.name", "Qwen/Qwen3-0.6B"], "model.name", "Qwen/Qwen3-0.6B"),
        (["--trainer.optim.max-norm", "None"], "trainer.optim.max_norm", None),
        (["--wandb"], "wandb", {}),
        (["--no-wandb"], "wandb", None),
        (["--wandb", "None"], "wandb", None),
        (["--resume"], "resume", {}),
        (["--trainer.loss.kwargs.sdpo.weight", "2"], "trainer.loss.kwargs.sdpo.weight", 2),
        (["--trainer.loss.kwargs.sdpo", '{"weight": 3}'], "trainer.loss.kwargs.sdpo", {"weight": 3}),
        (
            ["--trainer.model.lora.target-modules", "q_proj", "v_proj"],
            "trainer.model.lora.target_modules",
            ["q_proj", "v_proj"],
        ),
        (
            ["--trainer.model.lora.target-modules", '["q_proj"]'],
            "trainer.model.lora.target_modules",
            ["q_proj"],
        ),
        (["--plain", "--max-steps", "3"], "max_steps", 3),
    ],
)
def test_overrides_win_over_every_file(folder, words, dotted, value):
    for arguments in ([*words, "@", "rl.toml"], ["@", "rl.toml", *words]):
        if (
            arguments[-1] == "rl.toml"
            and len(words) == 1
            and not ("=" in words[0] or words[0].startswith("--no-"))
        ):
            continue  # `--flag @ file` is the section form, as on PRIME-RL's command line
        found: Any = load_run(arguments).document
        for part in dotted.split("."):
            found = found[part]
        assert found == value
        assert type(found) is type(value)


def test_a_bare_table_flag_keeps_what_the_toml_says(folder):
    document = load_run(["@", "rl.toml", "@", "overlay.toml", "--wandb"]).document
    assert document["wandb"] == {"project": "p"}


def test_none_strings_are_null_in_every_table(folder):
    (folder / "none.toml").write_text(
        'wandb = "None"\n[trainer.model]\nac = "None"\n[[orchestrator.env]]\nname = "None"\n'
    )
    document = load_run(["@", "rl.toml", "@", "none.toml"]).document
    assert document["wandb"] is None
    assert document["trainer"]["model"]["ac"] is None
    assert document["orchestrator"]["env"] == [{"name": None}]


class _Optim(BaseConfig):
    type: Literal["adamw"] = "adamw"
    lr: float = 1e-6
    betas1: float = 0.9
    max_norm: float | None = 1.0


class _LoRA(BaseConfig):
    rank: int = 16
    target_modules: list[str] = Field(default_factory=list)


class _Model(BaseConfig):
    seq_len: int = 2048
    lora: _LoRA | None = None


class _Loss(BaseConfig):
    type: str
    import_path: str
    kwargs: dict[str, Any]


class _Trainer(BaseConfig):
    optim: _Optim = _Optim()
    model: _Model = _Model()
    loss: _Loss


class _Orchestrator(BaseConfig):
    batch_size: int = 128


class _Named(BaseConfig):
    project: str = "prime-rl"
    name: str | None = None


class _Ckpt(BaseConfig):
    interval: int | None = None
    resume_step: int | None = None


class _Config(BaseConfig):
    """A small schema of PRIME-RL's kind, for its own command-line library."""

    trainer: _Trainer
    orchestrator: _Orchestrator = _Orchestrator()
    wandb: _Named | None = None
    ckpt: _Ckpt | None = None
    run: _Named | None = None
    max_steps: int | None = None
    clean: bool = False


@pytest.mark.parametrize(
    "words",
    [
        ["@", "rl.toml"],
        ["@", "rl.toml", "@", "overlay.toml"],
        ["@", "overlay.toml", "@", "rl.toml"],
        ["@", "rl.toml", "--trainer", "@", "trainer.toml"],
        ["--trainer.optim", "@optim.toml", "@", "rl.toml", "--trainer.optim.lr", "1e-5"],
        ["--max-steps", "50", "@", "rl.toml", "--clean"],
        ["@", "rl.toml", "--max-steps=50", "--no-clean"],
        ["@", "rl.toml", "--clean", "false", "--trainer.optim.max-norm", "None"],
        ["@", "rl.toml", "--wandb"],
        ["@", "rl.toml", "@", "overlay.toml", "--wandb"],
        ["@", "rl.toml", "@", "overlay.toml", "--no-wandb"],
        ["@", "rl.toml", "@", "overlay.toml", "--wandb", "None"],
        ["@", "rl.toml", "--wandb.name", "007", "--run.name", "1e3"],
        ["@", "rl.toml", "--ckpt.resume-step", "-1"],
        ["@", "rl.toml", "--trainer.model.lora.rank", "4"],
        ["@", "rl.toml", "--trainer.model.lora"],
        ["@", "rl.toml", "--trainer.model.seq-len", "64", "--orchestrator.batch-size", "8"],
        ["@", "rl.toml", "--trainer.loss.kwargs", '{"sdpo": {"weight": 2}}'],
    ],
    ids=" ".join,
)
def test_the_rules_are_those_of_prime_rls_own_command_line_library(folder, monkeypatch, words):
    # The library reads TOMLs with tomli, of which the standard library's is a copy.
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    assert _Config.model_validate(load_run(words).document) == cli(_Config, args=list(words))


SCALARS = """
50 -1 0 007 +5 1_000 1e-5 1E5 1.50 .5 -.5 nan NaN inf +inf -inf Infinity 1e400 true False TRUE abc 1.2.3 12abc
"""


@pytest.mark.parametrize("text", SCALARS.split())
def test_scalars_are_read_as_prime_rls_library_reads_them(text):
    from pydantic_config.cli import _coerce_str_value

    ours, theirs = scalar(text), _coerce_str_value(text)
    assert (ours, type(ours)) == (theirs, type(theirs))


def _write(name: str, content: str | bytes):
    def prepare(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


LOSS = '[trainer.loss]\ntype = "custom"\nimport_path = "composer_prime_plugin.loss_fn"\n'


@pytest.mark.parametrize(
    ("prepare", "words", "parts"),
    [
        (None, [], ["given as `@ file`", "@ rl.toml"]),
        (None, ["rl.toml"], ["given as `@ file`", "'rl.toml'"]),
        (None, ["@"], ["`@` must be followed"]),
        (None, ["@rl.toml"], ["two words", "`@ rl.toml`"]),
        (None, ["@", "rl.toml", "--trainer", "@"], ["--trainer @"]),
        (None, ["--clean", "@", "rl.toml"], ["for the section clean alone", "`@ rl.toml` before the flags"]),
        (None, ["@", "gone.toml"], ["existing file", "'gone.toml'"]),
        (None, ["@", "."], ["ends in .toml"]),
        (lambda folder: (folder / "dir.toml").mkdir(), ["@", "dir.toml"], ["'dir.toml' is a folder"]),
        (_write("a.yaml", "x: 1"), ["@", "a.yaml"], ["ends in .toml", "'a.yaml'"]),
        (_write("bad.toml", "max_steps = = 3"), ["@", "bad.toml"], ["'bad.toml' must be a TOML", "line 1"]),
        (_write("latin.toml", b"a = '\xe9'"), ["@", "latin.toml"], ["UTF-8", "offset 5"]),
        (None, ["@", "rl.toml", "--max-steps"], ["--max-steps takes a value"]),
        (None, ["@", "rl.toml", "--max-steps="], ["--max-steps takes a value"]),
        (None, ["@", "rl.toml", "--run.name", "--wandb"], ["--run.name takes a value"]),
        (None, ["@", "rl.toml", "-n", "3"], ["starts with `--`", "'-n'"]),
        (None, ["@", "rl.toml", "more.toml"], ["starts with `--`", "'more.toml'"]),
        (None, ["@", "rl.toml", "--", "x"], ["names a dotted key", "'--'"]),
        (None, ["@", "rl.toml", "--trainer..lr", "x"], ["names a dotted key"]),
        (None, ["@", "rl.toml", "--trainer", "5"], ["--trainer names a table", "found 5"]),
        (None, ["@", "rl.toml", "--max-steps.x", "5"], ["table max_steps", "has 20"]),
        (None, ["@", "rl.toml", "--trainer.loss.kwargs", "{bad"], ["as JSON", "'{bad'"]),
        (_write("n.toml", "max_steps = 1"), ["@", "n.toml"], ["a table [trainer.loss]", "found none"]),
        (_write("n.toml", "trainer = 3"), ["@", "n.toml"], ["a table [trainer.loss]"]),
        (_write("n.toml", "[trainer]\nloss = 3"), ["@", "n.toml"], ["a table [trainer.loss]", "found 3"]),
        (None, ["@", "rl.toml", "--trainer.loss.type", "default"], ['must be "custom"', "found 'default'"]),
        (
            _write("n.toml", "[trainer.loss]\nkl_tau = 1"),
            ["@", "n.toml"],
            ['trainer.loss.type must be "custom"', "found none"],
        ),
        (
            None,
            ["@", "rl.toml", "--trainer.loss.import-path", "my.loss"],
            ["trainer.loss.import_path", "'my.loss'", "composer_prime_plugin.loss_fn"],
        ),
        (
            _write("n.toml", '[trainer.loss]\ntype = "custom"'),
            ["@", "n.toml"],
            ["trainer.loss.import_path", "found none"],
        ),
        (_write("n.toml", LOSS + "kwargs = 3"), ["@", "n.toml"], ["trainer.loss.kwargs must be a table"]),
        (
            None,
            ["@", "rl.toml", "--trainer.loss.kwargs.sdpo.wieght", "1"],
            ["trainer.loss.kwargs.sdpo: unknown key 'wieght'", "valid keys are", "weight_start"],
        ),
        (
            None,
            ["@", "rl.toml", "--trainer.loss.kwargs.spdo.weight", "1"],
            ["trainer.loss.kwargs: unknown key 'spdo'", "valid keys are policy, replay, sdpo, trl_host"],
        ),
        (
            None,
            ["@", "rl.toml", "--trainer.loss.kwargs.sdpo.weight", "-1"],
            ["trainer.loss.kwargs.sdpo.weight must be greater than or equal to 0", "found -1"],
        ),
        (
            None,
            ["@", "rl.toml", "--trainer.loss.kwargs.policy.objective", "ppo"],
            ["trainer.loss.kwargs.policy.objective must be 'dppo', 'ipo' or 'dr_grpo'", "found 'ppo'"],
        ),
    ],
)
def test_a_mistake_is_one_sentence_that_says_what_to_set(folder, prepare, words, parts):
    if prepare is not None:
        prepare(folder)
    with pytest.raises(ConfigError) as caught:
        load_run(words)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_unreadable_toml_is_named(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"'rl.toml' cannot be read \(Permission denied\)"):
        load_run(["@", "rl.toml"])


def test_several_findings_under_kwargs_are_all_named(folder):
    with pytest.raises(ConfigError, match=r"policy.kl_tau .*; and .*sdpo.weight "):
        load_run(
            ["@", "rl.toml", "--trainer.loss.kwargs", '{"sdpo": {"weight": -1}, "policy": {"kl_tau": -1}}']
        )


def test_both_spellings_of_our_import_path_are_ours(folder):
    run = load_run(["@", "rl.toml", "--trainer.loss.import-path", "composer_prime_plugin.plugin.loss_fn"])
    assert run.config.sdpo.weight == 0.5
