"""`composer-rl run --dry-run`: what it writes, that it reads back equal, what it says is missing."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from composer_prime_plugin import cli
from composer_prime_plugin.contract import LossContract
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import load_run
from composer_trl_host import dry_run, prime_keys
from composer_trl_host.prime_keys import HONOURED
from composer_trl_host.resolved import read_resolved, resolved_document, resolved_json, with_absolute_paths
from composer_trl_host.settings import HostSettings
from composer_trl_host.toml_text import toml_text
from composer_trl_host.verifiers_env.source import find_source

LOSS = """
[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"
"""
TASK = LOSS + '\n[trainer.loss.kwargs.trl_host]\nenvironment = "task.py:Echo"\n'
PRIME = LossContract(fields=frozenset({"trainer_logprobs", "advantages"}), version="0.8.0")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_installed_contract", lambda: None)
    monkeypatch.setattr(cli, "prime_is_importable", lambda: False)
    (tmp_path / "tomls").mkdir()
    (tmp_path / "tomls" / "task.py").write_text("")
    return tmp_path


def write(folder: Path, text: str, name: str = "rl.toml") -> str:
    (folder / "tomls" / name).write_text(text)
    return f"tomls/{name}"


def run(folder: Path, text: str, *words: str) -> int:
    return cli.main(["run", "@", write(folder, text), "--dry-run", *words])


def read(path: Path) -> tuple[dict[str, Any], HostSettings]:
    loaded = load_run(["@", str(path)])
    return loaded.document, HostSettings.from_run(loaded)


def comparable(host: HostSettings) -> HostSettings:
    """Without what says where the file lies: paths are absolute, and the folder of the TOML is left out."""
    kwargs = with_absolute_paths(host.config.model_dump(exclude_unset=True), host.base_dir)
    config = type(host.config)(**kwargs)
    return dataclasses.replace(host, config=config, base_dir=Path("/"), unhonoured=())


def test_both_configurations_are_written_and_read_back_equal(folder, capsys):
    text = (
        'max_steps = 20\noutput_dir = "out"\norchestrator.group_size = 4\ntrainer.optim.max_norm = "None"\n'
        + TASK
    )
    assert run(folder, text, "--run.name", "first", "--trainer.optim.lr=1e-5") == 0
    configs = folder / "out" / "first" / "configs"
    assert sorted(path.name for path in configs.iterdir()) == [
        "prime-rl.toml",
        "trl-host.json",
        "trl-host.toml",
    ]
    original = load_run(
        ["@", "tomls/rl.toml", "--run.name", "first", "--trainer.optim.lr=1e-5", "--max-steps", "20"]
    )
    merged, settings_of_merged = read(configs / "prime-rl.toml")
    assert merged["trainer"]["loss"].pop("kwargs") == {
        "trl_host": {"environment": f"{folder}/tomls/task.py:Echo"}
    }
    assert {**merged, "trainer": None} == {**original.document, "trainer": None}
    assert (
        merged["trainer"]["optim"] == original.document["trainer"]["optim"] == {"max_norm": None, "lr": 1e-5}
    )
    resolved, settings_of_host = read(configs / "trl-host.toml")
    assert resolved["trainer"]["optim"]["max_norm"] is None
    assert (
        comparable(settings_of_host)
        == comparable(settings_of_merged)
        == comparable(HostSettings.from_run(original))
    )
    as_json = json.loads((configs / "trl-host.json").read_text())
    assert (as_json["lr"], as_json["run_dir"], as_json["config"]["sdpo"]["jsd_beta"]) == (
        1e-5,
        "out/first",
        0.5,
    )
    printed = capsys.readouterr().out
    assert "backend: trl-host" in printed
    assert "wrote:   out/first/configs/prime-rl.toml" in printed
    assert "missing" not in printed
    assert printed.endswith("dry run: nothing was started\n")


def test_environments_of_verifiers_are_in_the_hosts_toml_as_they_stand(folder):
    text = """
max_steps = 2
output_dir = "out"
orchestrator.eval.interval = 3
orchestrator.renderer.name = "custom"
orchestrator.renderer.import_path = "task.Renderer"
[[orchestrator.train.source]]
ratio = 2.0
env.taskset = { id = "one", names = ["a", "b"] }
[[orchestrator.train.source]]
env.taskset = { id = "two" }
[[orchestrator.eval.source]]
num_examples = 4
env.taskset = { id = "one", part = "heldout" }
[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"
[trainer.loss.kwargs.sdpo]
weight = 0.5
"""
    assert run(folder, text) == 0
    configs = folder / "out" / "configs"
    merged, settings_of_merged = read(configs / "prime-rl.toml")
    resolved, settings_of_host = read(configs / "trl-host.toml")
    assert comparable(settings_of_host) == comparable(settings_of_merged)
    for table in ("train", "eval", "renderer"):
        asked = {key: resolved["orchestrator"][table][key] for key in merged["orchestrator"][table]}
        assert asked == merged["orchestrator"][table]
    assert find_source(resolved) == find_source(merged)


def test_the_key_in_the_toml_means_the_same_and_does_not_stay_in_it(folder, capsys):
    assert cli.main(["run", "@", write(folder, "dry_run = true\nmax_steps = 2\n" + TASK)]) == 0
    assert "dry_run" not in (folder / "outputs" / "configs" / "prime-rl.toml").read_text()
    assert "dry_run" not in (folder / "outputs" / "configs" / "trl-host.toml").read_text()
    assert "nothing was started" in capsys.readouterr().out


def test_layers_sections_and_overrides_are_all_in_it(folder):
    base, over = write(folder, "max_steps = 5\nseq_len = 256\n" + TASK), "max_steps = 6\n"
    layers = ["@", base, "@", write(folder, over, "over.toml")]
    section = ["--trainer", "@", write(folder, "[optim]\nlr = 2e-5\nweight_decay = 0.5\n", "trainer.toml")]
    words = ["run", *layers, *section, "--trainer.optim.weight-decay", "0.25", "--dry-run"]
    assert cli.main(words) == 0
    document, host = read(folder / "outputs" / "configs" / "prime-rl.toml")
    assert (host.max_steps, host.seq_len, host.lr, host.weight_decay) == (6, 256, 2e-5, 0.25)
    assert document["trainer"]["optim"] == {"lr": 2e-5, "weight_decay": 0.25}


def test_what_is_not_honoured_and_what_is_missing_is_said(folder, capsys):
    text = """
    max_steps = 3
    model.name = "./gone"
    inference.parallel.tp = 2
    [trainer.loss]
    type = "custom"
    import_path = "composer_prime_plugin.loss_fn"
    """
    assert run(folder, text) == 0
    printed = capsys.readouterr().out
    assert "not honoured by the TRL host: inference.parallel.tp: the host generates in its own" in printed
    lines = [line for line in printed.splitlines() if line.startswith("missing for a run on the TRL host: ")]
    for part in ("a task", "group_size of at least 2", "the folder ./gone"):
        assert sum(part in line for line in lines) == 1
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("environment", "gone.py:Echo", "gone.py, which trl_host.environment names"),
        ("hints", "gone.py:Hints", "gone.py, which trl_host.hints names"),
        ("adapter", "nowhere", "nowhere, which trl_host.adapter names"),
        ("traces", "nowhere", "one task"),
    ],
)
def test_files_that_are_not_there_are_named(folder, capsys, key, value, part):
    assert run(folder, "max_steps = 3\n" + TASK, f"--trainer.loss.kwargs.trl_host.{key}", value) == 0
    assert part in capsys.readouterr().out


def test_where_prime_rl_trains_the_hosts_refusal_is_only_said(folder, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_installed_contract", lambda: PRIME)
    text = "[orchestrator]\nbatch_size = 7\ngroup_size = 2\n" + LOSS
    assert run(folder, text) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("backend: prime-rl\n")
    assert "the TRL host would refuse this TOML: orchestrator.batch_size must be a multiple" in printed
    assert [path.name for path in (folder / "outputs" / "configs").iterdir()] == ["prime-rl.toml"]
    monkeypatch.setattr(cli, "_installed_contract", lambda: None)
    assert run(folder, text) == 2
    assert "batch_size must be a multiple" in capsys.readouterr().err


def test_a_strict_run_is_refused_before_anything_is_written(folder, capsys):
    assert (
        run(folder, "max_steps = 3\nmax_model_len = 5\n" + TASK, "--trainer.loss.kwargs.trl_host.strict") == 2
    )
    assert "max_model_len" in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(folder, capsys):
    (folder / "file").write_text("")
    assert run(folder, "max_steps = 3\n" + TASK, "--output-dir", "file") == 2
    assert "output_dir must be a folder that can be written" in capsys.readouterr().err


def test_a_null_in_a_list_is_refused(folder, capsys):
    assert run(folder, TASK, "--trainer.loss.kwargs.trl_host.environment_kwargs", '{"a": [1, null]}') == 2
    assert "environment_kwargs.a must hold no null" in capsys.readouterr().err


def test_prime_rls_own_resolution_is_written_where_there_is_one(folder):
    path = write(folder, "max_steps = 3\n" + TASK)
    assert dry_run.dry_run(load_run(["@", path]), "trl-host", {"seq_len": 2048}) == 0
    assert json.loads((folder / "outputs" / "configs" / "prime-rl.json").read_text()) == {"seq_len": 2048}


# Values that each kind takes. A name must not be "None", which is null.
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda text: text != "None")
VALUES = {
    prime_keys.FLAG: st.booleans(),
    prime_keys.TEXT: NAMES,
    prime_keys.FOLDER: st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5})?", fullmatch=True),
    prime_keys.COUNT: st.integers(1, 10**6),
    prime_keys.STEPS: st.integers(0, 5),
    prime_keys.SEED: st.integers(0, 2**32 - 1),
    prime_keys.RATE: st.floats(0, 1e6),
    prime_keys.POSITIVE: st.floats(1e-9, 1e6),
    prime_keys.CLIP_NORM: st.none() | st.floats(1e-9, 1e6),
    prime_keys.BETA: st.floats(0, 1, exclude_max=True),
    prime_keys.SHARE: st.floats(0, 1),
    prime_keys.NUCLEUS: st.floats(1e-9, 1),
    prime_keys.TOP_K: st.integers(-1, 10**5),
    prime_keys.RESUME_STEP: st.integers(-1, 10**5),
    prime_keys.NAMES: st.lists(NAMES, min_size=1, max_size=3),
    prime_keys.DTYPE: st.sampled_from(["float32", "bfloat16"]),
    prime_keys.ATTENTION: st.sampled_from(["auto", "sdpa", "fa4"]),
    prime_keys.OPTIMIZER: st.sampled_from(["adamw", "sgd", "muon"]),
    prime_keys.SCHEDULER: st.sampled_from(["constant", "linear", "cosine"]),
}


# A busy machine is slow, and the folder is written anew for each example.
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@st.composite
def documents(draw) -> dict[str, Any]:
    """Any part of what the host takes, each setting in one of its spellings."""
    document: dict[str, Any] = {}
    for row in draw(st.lists(st.sampled_from(HONOURED), unique=True)):
        if row.field == "dry_run":
            continue
        *tables, last = draw(st.sampled_from(row.keys)).split(".")
        table = document
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = draw(VALUES[row.kind])
    for tables in draw(st.lists(st.sampled_from([("model", "ac"), ("model", "lora")]), unique=True)):
        document.setdefault("trainer", {}).setdefault(tables[0], {}).setdefault(tables[1], {})
    document.setdefault("trainer", {})["loss"] = {
        "type": "custom",
        "import_path": "composer_prime_plugin.loss_fn",
        "kwargs": {
            "sdpo": {"weight": draw(st.floats(0, 10)), "token_clip": draw(st.none() | st.floats(0.1, 9))},
            "trl_host": {"adapter": "here", "environment_kwargs": draw(st.dictionaries(NAMES, NAMES))},
        },
    }
    return document


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(document=documents())
def test_any_settings_read_back_equal_from_the_toml_and_the_json(tmp_path, document):
    path = tmp_path / "rl.toml"
    path.write_text(toml_text(document), encoding="utf-8")
    loaded = load_run(["@", str(path)])
    assert loaded.document == document
    try:
        host = HostSettings.from_run(loaded)
    except ConfigError as error:
        # Settings that do not go together, as a batch that its groups do not fill.
        assume(
            not any(part in str(error) for part in ("multiple", "fit into", "at least", "must not be set"))
        )
        raise
    below = tmp_path / "elsewhere"
    below.mkdir(exist_ok=True)
    (below / "host.toml").write_text(toml_text(resolved_document(host)), encoding="utf-8")
    _, again = read(below / "host.toml")
    assert again.unhonoured == ()
    assert comparable(again) == comparable(host)
    (below / "host.json").write_text(resolved_json(host), encoding="utf-8")
    assert read_resolved(below / "host.json") == dataclasses.replace(host, unhonoured=())


SCALARS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")).filter(lambda text: text != "None")
    | st.dates()
    | st.times().map(lambda time: time.replace(fold=0))
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
)
TABLES = st.recursive(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5), SCALARS | st.lists(SCALARS, max_size=3)
    ),
    lambda inner: st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5), inner | st.lists(inner, max_size=2), max_size=3
    ),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=SLOW)
@given(TABLES)
def test_any_table_comes_back_from_its_toml(document):
    assert tomllib.loads(toml_text(document)) == document


def test_a_config_that_no_run_wrote_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 1}')
    with pytest.raises(ConfigError, match=r"must be the config\.json that a run wrote"):
        read_resolved(tmp_path / "config.json")
