"""What the host takes from TOMLs in each release's spelling, and that nothing is ignored silently."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.runfile import RunFile, load_run
from composer_trl_host.prime_keys import DEFAULT_MAX_STEPS, HONOURED, NOT_HONOURED, Honoured
from composer_trl_host.resolved import resolved_document
from composer_trl_host.settings import HostSettings, LoRASettings

LOSS = """
[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"
"""

COMMON = """
max_steps = 20
seq_len = 512
output_dir = "out"

[model]
name = "Qwen/Qwen2.5-0.5B-Instruct"

[trainer.model]
optimization_dtype = "bfloat16"
attn = "flash_attention_2"
trust_remote_code = true

[trainer.model.ac]
freq = 1

[trainer.model.lora]
rank = 8
alpha = 16
dropout = 0.1
target_modules = ["q_proj", "v_proj"]

[trainer.optim]
type = "adamw"
lr = 3e-6
betas1 = 0.85
betas2 = 0.99
weight_decay = 0.0
max_norm = 0.5

[trainer.scheduler]
type = "linear"
warmup_steps = 2
decay_steps = 4
min_lr = 1e-7
"""

V050 = (
    COMMON
    + """
[orchestrator]
batch_size = 32
rollouts_per_example = 8
seed = 7

[orchestrator.sampling]
temperature = 0.7
max_tokens = 128
extra_body = { top_p = 0.9, top_k = 50, min_p = 0.05 }

[ckpt]
interval = 5
keep_last = 2
resume_step = 10

[wandb]
project = "p"
name = "n"
"""
)
# v0.6.0 and v0.7.0 take both names of the group size.
V060 = V050.replace("[orchestrator.sampling]", "[orchestrator.train.sampling]").replace(
    "max_tokens", "max_completion_tokens"
)
V070 = V060.replace("rollouts_per_example", "group_size")
V080 = V070
MAIN = (
    V080.replace("resume_step = 10", "")
    .replace('[wandb]\nproject = "p"\nname = "n"', '[monitors.wandb]\nproject = "p"\nname = "n"')
    .replace("[ckpt]", "[resume]\nstep = 10\n[ckpt]")
)
RELEASES = {"v0.5.0": V050, "v0.6.0": V060, "v0.7.0": V070, "v0.8.0": V080, "main": MAIN}


def run_of(text: str, **kwargs: Any) -> RunFile:
    """A run of ``text`` and of ``[trainer.loss.kwargs]``, as ``load_run`` would give it."""
    document = _with_none(tomllib.loads(text))
    return RunFile(document, ComposerConfig(**kwargs), ("@", "rl.toml"), Path("/base"), (Path("rl.toml"),))


def _with_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_none(item) for key, item in value.items()}
    return None if value == "None" else value


def settings_of(text: str, **kwargs: Any) -> HostSettings:
    return HostSettings.from_run(run_of(text, **kwargs))


def listed(text: str, **kwargs: Any) -> dict[str, str]:
    """Dotted key to reason, without the line about an absent max_steps."""
    return {item.key: item.reason for item in settings_of("max_steps = 9\n" + text, **kwargs).unhonoured}


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_s_spelling_gives_the_same_settings(release):
    assert settings_of(RELEASES[release]) == HostSettings(
        model_name="Qwen/Qwen2.5-0.5B-Instruct",
        model_dtype="bfloat16",
        attn_implementation="flash_attention_2",
        trust_remote_code=True,
        lora=LoRASettings(rank=8, alpha=16.0, dropout=0.1, target_modules=("q_proj", "v_proj")),
        gradient_checkpointing=True,
        seq_len=512,
        max_steps=20,
        batch_size=32,
        group_size=8,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.05,
        max_completion_tokens=128,
        seed=7,
        optimizer="adamw",
        lr=3e-6,
        betas=(0.85, 0.99),
        momentum=0.9,
        nesterov=True,
        weight_decay=0.0,
        max_norm=0.5,
        scheduler="linear",
        warmup_steps=2,
        decay_steps=4,
        min_lr=1e-7,
        ckpt_interval=5,
        ckpt_keep_last=2,
        resume=10,
        output_dir=Path("out"),
        run_dir=Path("out"),
        run_name="n",
        wandb_project="p",
        config=ComposerConfig(),
        base_dir=Path("/base"),
        unhonoured=(),
    )


def test_an_empty_toml_gives_prime_rls_defaults_but_for_the_stated_ones():
    settings = settings_of("")
    assert settings.model_name is None
    assert (settings.batch_size, settings.group_size, settings.temperature) == (128, 1, 1.0)
    assert (settings.optimizer, settings.lr, settings.betas) == ("adamw", 1e-6, (0.9, 0.999))
    assert (settings.weight_decay, settings.max_norm, settings.scheduler) == (0.01, 1.0, "constant")
    assert (settings.warmup_steps, settings.decay_steps, settings.min_lr) == (0, 0, 0.0)
    assert (settings.seed, settings.output_dir, settings.run_dir) == (42, Path("outputs"), Path("outputs"))
    assert (settings.lora, settings.gradient_checkpointing, settings.model_dtype) == (None, False, "float32")
    assert (settings.resume, settings.wandb_project, settings.run_name) == (None, None, None)
    assert settings.max_steps == DEFAULT_MAX_STEPS
    (item,) = settings.unhonoured
    assert item.key == "max_steps"
    assert f"stops after {DEFAULT_MAX_STEPS} steps" in item.reason


def test_a_toml_and_its_overrides_reach_the_settings(tmp_path):
    (tmp_path / "rl.toml").write_text(COMMON + LOSS)
    words = ["--trainer.optim.max-norm", "None", "--no-trainer.model.lora", "--resume", "--run.name", "007"]
    settings = HostSettings.from_run(load_run(["@", str(tmp_path / "rl.toml"), "--max-steps", "50", *words]))
    assert (settings.max_steps, settings.max_norm, settings.lora) == (50, None, None)
    assert (settings.resume, settings.run_name, settings.run_dir) == ("latest", "007", Path("out/007"))
    assert settings.unhonoured == ()


def test_numbers_written_as_text_are_numbers_as_for_prime_rl():
    assert settings_of('max_steps = "20"\ntrainer.optim.lr = "1e-5"').lr == 1e-5


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("trainer.max_steps = 5", "max_steps", 5),
        ("orchestrator.max_steps = 5", "max_steps", 5),
        ('trainer.model.name = "m"', "model_name", "m"),
        ('trainer.model.attn = "auto"', "attn_implementation", None),
        ('trainer.model.attn = "fa4"', "attn_implementation", "flash_attention_4"),
        ('trainer.model.ac = "None"', "gradient_checkpointing", False),
        ("[trainer.model.ac]", "gradient_checkpointing", True),
        ("[trainer.model.ac_offloading]", "gradient_checkpointing", True),
        ("[trainer.model.lora]", "lora", LoRASettings(16, 32.0, 0.0, None)),
        ('trainer.model.lora.target_modules = ["a"]', "lora", LoRASettings(16, 32.0, 0.0, ("a",))),
        ("trainer.model.seq_len = 64", "seq_len", 64),
        ("orchestrator.seq_len = 64", "seq_len", 64),
        ("seq_len = 64\ntrainer.model.seq_len = 128", "seq_len", 64),
        ("orchestrator.seq_len = 64\ntrainer.model.seq_len = 128", "seq_len", 64),
        ("orchestrator.train.sampling.max_tokens = 9", "max_completion_tokens", 9),
        ("orchestrator.sampling.max_completion_tokens = 9", "max_completion_tokens", 9),
        ("orchestrator.train.sampling.extra_body.top_k = -1", "top_k", None),
        ("orchestrator.train.sampling.extra_body.top_k = 0", "top_k", None),
        ('trainer.optim.max_norm = "None"', "max_norm", None),
        ('trainer.optim = {type = "sgd", momentum = 0.5, nesterov = false}', "optimizer", "sgd"),
        ('trainer.optim = {type = "sgd", momentum = 0.5, nesterov = false}', "momentum", 0.5),
        ('trainer.scheduler = {type = "cosine", warmup_steps = 3}', "decay_steps", 6),
        ('trainer.scheduler = {type = "cosine", warmup_steps = 3}', "warmup_steps", 3),
        ("trainer.ckpt.interval = 3\norchestrator.ckpt.interval = 3", "ckpt_interval", 3),
        ("ckpt.resume_step = -1", "resume", "latest"),
        ("ckpt.resume_step = 0", "resume", None),
        ('ckpt.resume_step = "None"', "resume", None),
        ("trainer.ckpt.resume_step = 4\norchestrator.ckpt.resume_step = 4", "resume", 4),
        ("[resume]", "resume", "latest"),
        ("resume.step = 4", "resume", 4),
        ('resume = "None"', "resume", None),
        ('run.name = "a"', "run_dir", Path("outputs/a")),
        ('run = {name = "a", dir = "b"}', "run_dir", Path("outputs/b")),
        ('run = {name = "a", dir = "b"}', "run_name", "a"),
        ('wandb.name = "a"', "run_name", "a"),
        ('wandb.name = "a"', "run_dir", Path("outputs")),
        ("[wandb]", "wandb_project", "prime-rl"),
        ("[monitors.wandb]", "wandb_project", "prime-rl"),
        ('wandb = "None"', "wandb_project", None),
        ('trainer.wandb.project = "p"\norchestrator.wandb.project = "p"', "wandb_project", "p"),
    ],
)
def test_one_key_one_setting(text, field, value):
    settings = settings_of(text if "max_steps" in text else "max_steps = 9\n" + text)
    assert getattr(settings, field) == value
    assert [item.key for item in settings.unhonoured if item.key != "trainer.model.ac_offloading"] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_steps = 0", ["max_steps must be a whole number of at least 1", "found 0", "set for example"]),
        ("max_steps = 1.5", ["max_steps must be a whole number"]),
        ("max_steps = true", ["max_steps must be a whole number", "found True"]),
        ("max_steps = [1, 2]", ["max_steps must be a whole number", "found [1, 2]"]),
        ("orchestrator.batch_size = -1", ["orchestrator.batch_size must be"]),
        ("orchestrator.rollouts_per_example = 0", ["orchestrator.rollouts_per_example must be"]),
        (
            "orchestrator = {batch_size = 6, group_size = 4}",
            ["a multiple of", "found 6 and 4", "batch_size = 8"],
        ),
        (
            "orchestrator = {batch_size = 6, token_batch_size = 4}",
            ["batch_size and orchestrator.token_batch_size"],
        ),
        ("orchestrator.train.sampling.temperature = 0", ["temperature must be a finite number above 0"]),
        ("orchestrator.sampling.temperature = nan", ["orchestrator.sampling.temperature must be"]),
        ("orchestrator.train.sampling.extra_body.top_p = 0", ["top_p must be a number above 0"]),
        ("orchestrator.train.sampling.max_completion_tokens = 0", ["max_completion_tokens must be"]),
        ("orchestrator.seed = -1", ["orchestrator.seed must be a whole number from 0"]),
        ('trainer.optim.type = "adam"', ["trainer.optim.type must be one of adamw, sgd", "found 'adam'"]),
        ("trainer.optim.lr = -1", ["trainer.optim.lr must be a finite number of at least 0"]),
        ("trainer.optim.lr = inf", ["trainer.optim.lr must be a finite number"]),
        ("trainer.optim.betas2 = 1.0", ["trainer.optim.betas2 must be a number from 0 to below 1"]),
        ("trainer.optim.max_norm = 0", ['trainer.optim.max_norm must be a finite number above 0, or "None"']),
        (
            'trainer.scheduler.type = "step"',
            ["trainer.scheduler.type must be one of constant, linear, cosine"],
        ),
        (
            'trainer.scheduler.type = "linear"\nmax_steps = 9',
            ["must fit into max_steps", "(10 + 10)", "max_steps = 9"],
        ),
        (
            'trainer.scheduler = {type = "cosine", warmup_steps = 9}\nmax_steps = 9',
            ["must fit into max_steps"],
        ),
        ('trainer.model.optimization_dtype = "float16"', ["one of float32, bfloat16", "found 'float16'"]),
        ('trainer.model.attn = "flash"', ["trainer.model.attn must be one of auto, sdpa"]),
        ("trainer.model.trust_remote_code = 3", ["trainer.model.trust_remote_code must be true or false"]),
        ("trainer.model.lora = 3", ["trainer.model.lora must be a table", "found 3"]),
        ("trainer.model.lora.rank = 0", ["trainer.model.lora.rank must be"]),
        ("trainer.model.lora.target_modules = []", ["target_modules must be a list of module names"]),
        ("trainer.model.ac = true", ["trainer.model.ac must be a table"]),
        ("trainer.optim = 5", ["trainer.optim must be a table", "write [trainer.optim]"]),
        ("ckpt = true", ["ckpt must be a table"]),
        ("resume = 5", ["resume must be a table"]),
        ("wandb = true", ["wandb must be a table"]),
        ("model.name = 5", ["model.name must be a text"]),
        ('model.name = ""', ["model.name must be a text that is not empty"]),
        ("output_dir = 5", ["output_dir must be the path of a folder"]),
        ("ckpt.interval = 0", ["ckpt.interval must be"]),
        ("ckpt.resume_step = -2", ["ckpt.resume_step must be a whole number of at least -1"]),
        ('resume.dir = "x/step_5"', ["resume.dir must not be set on the TRL host", "set resume.step"]),
        ('dry_run = "maybe"', ["dry_run must be true or false", "'maybe'"]),
        (
            "seq_len = 64\ntrainer.model.seq_len = 32",
            ["trainer.model.seq_len must be at least seq_len", "32 and 64"],
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_key(text, parts):
    with pytest.raises(ConfigError) as caught:
        settings_of(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("max_steps = 5\ntrainer.max_steps = 6", "max_steps", "trainer.max_steps"),
        ("trainer.max_steps = 5\norchestrator.max_steps = 6", "trainer.max_steps", "orchestrator.max_steps"),
        ('model.name = "a"\ntrainer.model.name = "b"', "model.name", "trainer.model.name"),
        (
            "orchestrator = {group_size = 2, rollouts_per_example = 4}",
            "orchestrator.group_size",
            "orchestrator.rollouts_per_example",
        ),
        (
            "orchestrator.train.sampling.temperature = 1\norchestrator.sampling.temperature = 0.5",
            "orchestrator.train.sampling.temperature",
            "orchestrator.sampling.temperature",
        ),
        ("seq_len = 64\norchestrator.seq_len = 32", "seq_len", "orchestrator.seq_len"),
        ("ckpt.interval = 5\ntrainer.ckpt.interval = 6", "ckpt.interval", "trainer.ckpt.interval"),
        ("ckpt.resume_step = 5\nresume.step = 6", "resume.step", "ckpt.resume_step"),
        ("ckpt.resume_step = 5\n[resume]", "ckpt.resume_step", "resume"),
        ('wandb.project = "a"\ntrainer.wandb.project = "b"', "wandb.project", "trainer.wandb.project"),
    ],
)
def test_two_spellings_that_disagree_are_both_named(text, one, other):
    with pytest.raises(ConfigError, match="must agree") as caught:
        settings_of(text)
    assert str(caught.value).startswith(f"{one} and {other} must agree")


def test_two_spellings_that_agree_are_fine():
    settings = settings_of(
        "max_steps = 5\ntrainer.max_steps = 5\n"
        "orchestrator = {batch_size = 4, group_size = 2, rollouts_per_example = 2}"
    )
    assert (settings.max_steps, settings.group_size, settings.unhonoured) == (5, 2, ())


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("[inference]", "inference", "starts no inference server"),
        ("inference.parallel.tp = 2", "inference.parallel.tp", "starts no inference server"),
        ('deployment.type = "multi_node"', "deployment.type", "runs where it is started"),
        ('weight_broadcast.type = "nccl"', "weight_broadcast.type", "one process"),
        ('[[orchestrator.env]]\nid = "math"', "orchestrator.env", "trl_host.environment"),
        ('[[orchestrator.train.env]]\nid = "x"', "orchestrator.train.env", "trl_host.environment"),
        ("orchestrator.eval.interval = 5", "orchestrator.eval.interval", "heldout_rows"),
        ('orchestrator.algo.type = "opsd"', "orchestrator.algo.type", "minus the mean of its group"),
        ("orchestrator.token_batch_size = 5", "orchestrator.token_batch_size", "orchestrator.batch_size"),
        (
            "orchestrator.sampling.repetition_penalty = 1.1",
            "orchestrator.sampling.repetition_penalty",
            "another",
        ),
        (
            "orchestrator.train.sampling.extra_body.x.y = 1",
            "orchestrator.train.sampling.extra_body.x.y",
            "inference server",
        ),
        ("[trainer.model.compile]", "trainer.model.compile", "not compiled"),
        ("trainer.model.ac.freq = 2", "trainer.model.ac.freq", "every layer"),
        ("trainer.model.cp = 4", "trainer.model.cp", "accelerate"),
        ("trainer.loss.kl_tau = 1", "trainer.loss.kl_tau", "trainer.loss.kwargs.policy.kl_tau"),
        ('trainer.optim.type = "muon"', "trainer.optim.type", "with adamw instead of muon"),
        ("trainer.optim.momentum = 0.5", "trainer.optim.momentum", 'optimizer "adamw" has no such setting'),
        (
            'trainer.optim = {type = "sgd", betas1 = 0.5}',
            "trainer.optim.betas1",
            'optimizer "sgd" has no such',
        ),
        ("trainer.scheduler.warmup_steps = 5", "trainer.scheduler.warmup_steps", '"constant" has no such'),
        (
            'trainer.scheduler = {type = "cosine", warmup_steps = 1, decay_steps = 5}',
            "trainer.scheduler.decay_steps",
            '"cosine" has no such',
        ),
        ('wandb.entity = "e"', "wandb.entity", "WANDB_ENTITY"),
        ('monitors.wandb.tags = ["e"]', "monitors.wandb.tags", "WANDB_TAGS"),
        ('trainer.wandb.name = "t"', "trainer.wandb.name", "run.name"),
        ('run.name = "a"\nwandb.name = "b"', "wandb.name", "run.name"),
        ('monitors.file = "None"', "monitors.file", "always writes metrics.jsonl"),
        ("clean_output_dir = true", "clean_output_dir", "deletes no folder"),
        (
            'model.name = "m"\norchestrator.model.name = "m-FP8"',
            "orchestrator.model.name",
            "weights that it trains",
        ),
        (
            "orchestrator.train.sampling.temprature = 1",
            "orchestrator.train.sampling.temprature",
            "unknown to PRIME-RL",
        ),
        ("trainer.optim.learning_rate = 1", "trainer.optim.learning_rate", "unknown to PRIME-RL"),
        ("colour = 1", "colour", "unknown to PRIME-RL"),
        ("[my.table]", "my.table", "unknown to PRIME-RL"),
    ],
)
def test_what_the_host_does_not_do_is_listed_by_its_dotted_name(text, key, reason):
    found = listed(text)
    assert list(found) == [key]
    assert reason in found[key]


def test_the_host_s_own_seed_is_read_for_every_release():
    assert settings_of("", trl_host={"seed": 7}).seed == 7
    assert settings_of("", trl_host={"seed": 0}).seed == 0
    assert settings_of("orchestrator.seed = 7").seed == 7
    assert settings_of("orchestrator.seed = 7", trl_host={"seed": 7}).seed == 7
    with pytest.raises(
        ConfigError,
        match=r"orchestrator\.seed and trainer\.loss\.kwargs\.trl_host\.seed must agree; found 42 and 7",
    ):
        settings_of("orchestrator.seed = 42", trl_host={"seed": 7})


def test_the_host_s_own_seed_reads_back_from_the_resolved_toml():
    settings = settings_of("", trl_host={"seed": 7})
    document = resolved_document(settings)
    assert "seed" not in document["orchestrator"]
    kwargs = document["trainer"]["loss"]["kwargs"]
    assert HostSettings.from_run(RunFile(document, ComposerConfig(**kwargs), (), Path("/base"), ())).seed == 7


VERIFIERS = """
orchestrator.renderer.name = "qwen3"
[[orchestrator.train.source]]
env = { taskset = { id = "x" } }
[orchestrator.eval]
interval = 5
skip_first_step = true
num_workers = 2
sampling = { temperature = 0.5, reasoning_effort = "low" }
[[orchestrator.eval.source]]
env = { taskset = { id = "x" } }
serve = { num_workers = 2 }
"""


def test_environments_of_verifiers_are_honoured_where_nothing_else_names_the_task():
    found = listed(VERIFIERS)
    assert set(found) == {
        "orchestrator.eval.source.serve",
        "orchestrator.eval.sampling.reasoning_effort",
        "orchestrator.eval.num_workers",
    }
    assert "no server of its own" in found["orchestrator.eval.source.serve"]


@pytest.mark.parametrize("task", [{"environment": "my.Task"}, {"traces": "traces.jsonl"}])
def test_environments_of_verifiers_are_listed_where_something_else_is_the_task(task):
    found = listed(VERIFIERS, trl_host=task)
    assert {"orchestrator.train.source", "orchestrator.renderer.name", "orchestrator.eval.source"} <= set(
        found
    )
    assert "orchestrator.eval.interval" in found


def test_held_out_environments_are_listed_where_there_is_nothing_to_train_on():
    text = '[[orchestrator.eval.source]]\nenv = { taskset = { id = "x" } }'
    assert list(listed(text)) == ["orchestrator.eval.source"]


def test_v0_7_0_s_spelling_of_a_taskset_is_honoured_and_a_v0_environment_is_listed():
    table = 'taskset = { id = "x" }\nharness = { id = "null", runtime = { type = "subprocess" } }'
    assert listed(f"[[orchestrator.train.env]]\n{table}\n[[orchestrator.eval.env]]\n{table}") == {}
    both = f'[[orchestrator.train.env]]\nid = "x"\n[[orchestrator.eval.env]]\n{table}'
    assert list(listed(both)) == ["orchestrator.train.env", "orchestrator.eval.env"]


def test_an_unknown_key_gets_a_suggestion_where_one_is_near():
    assert listed("orchestrator.train.sampling.temprature = 1") == {
        "orchestrator.train.sampling.temprature": (
            "unknown to PRIME-RL; did you mean orchestrator.train.sampling.temperature?"
        )
    }
    assert listed("colour = 1") == {"colour": "unknown to PRIME-RL"}


@pytest.mark.parametrize(
    "text",
    [
        "[trainer]\n[orchestrator]\n[orchestrator.train]\n[ckpt]\n[monitors]",
        'inference = "None"',
        'trainer.model.compile = "None"',
        "trainer.model.cp = 1",
        'trainer.model.ac = {freq = 1, mode = "full"}',
        'trainer.model.impl = "auto"',
        "clean_output_dir = false",
        "dry_run = false",
        "wandb.offline = false",
        'orchestrator.algo.type = "grpo"',
        "orchestrator.train.filter_zero_advantages = false",
        'model.name = "m"\norchestrator.model.name = "m"\ntokenizer.name = "m"',
    ],
)
def test_keys_that_ask_for_nothing_else_are_not_listed(text):
    assert listed(text) == {}


def test_false_is_not_taken_for_zero_nor_true_for_one():
    assert list(listed("trainer.model.cp = true")) == ["trainer.model.cp"]
    assert list(listed("max_async_level = false")) == ["max_async_level"]


def test_kwargs_are_never_listed():
    assert listed(LOSS + "[trainer.loss.kwargs.sdpo]\nweight = 1\nanything = 2") == {}


def test_strict_turns_the_list_into_an_error():
    text = "max_steps = 5\n[inference]\n[orchestrator]\nseed = 1\ncolour = 2"
    strict = {"trl_host": {"strict": True}}
    with pytest.raises(ConfigError) as caught:
        settings_of(text, **strict)
    message = str(caught.value)
    assert "inference: the host generates in its own process" in message
    assert "orchestrator.colour: unknown to PRIME-RL" in message
    assert "trainer.loss.kwargs.trl_host.strict = false" in message
    assert "seed" not in message
    assert settings_of("max_steps = 5", **strict).unhonoured == ()


def test_the_tables_fit_each_other_and_the_settings():
    keys = [key for row in HONOURED for key in row.keys]
    known = [row.key for row in NOT_HONOURED]
    assert len(keys) == len(set(keys))
    assert len(known) == len(set(known))
    assert not set(keys) & set(known)
    rows = {row.field for row in HONOURED}
    fields = {item.name for item in dataclasses.fields(HostSettings)}
    parts = {"beta1", "beta2", "run_folder", "wandb_name", "dry_run"}
    assert {name for name in rows if "." not in name} - parts <= fields
    derived = {"betas", "lora", "gradient_checkpointing", "run_dir", "config", "base_dir", "unhonoured"}
    assert fields - rows == derived
    for row in (*HONOURED, *NOT_HONOURED):
        text = row.becomes if isinstance(row, Honoured) else row.reason
        assert text
        assert not text.endswith(".")


def test_every_default_is_a_value_that_its_row_takes():
    for row in HONOURED:
        if row.default is not None:
            assert row.kind.read("key", row.default) == row.default
        assert row.kind.read("key", tomllib.loads(f"x = {row.kind.example}")["x"]) is not None


def test_what_the_chosen_optimizer_has_not_is_as_if_it_were_not_set():
    adamw, plain = (settings_of(f"max_steps = 9\n{text}") for text in ("trainer.optim.momentum = 0.5", ""))
    assert (adamw.momentum, adamw.betas) == (plain.momentum, plain.betas) == (0.9, (0.9, 0.999))
    assert [item.key for item in adamw.unhonoured] == ["trainer.optim.momentum"]


def test_a_dry_run_asks_for_nothing_the_host_does_not_do():
    assert listed("dry_run = true") == {}


def test_settings_import_no_torch():
    code = (
        "import sys, composer_trl_host.settings, composer_trl_host.dry_run\n"
        "heavy = {'torch', 'trl', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
