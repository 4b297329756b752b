"""The shell task: its errors really happen, its rewards read the file system, its data is data."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from composer_prime_plugin.errors import TaskError
from composer_trl_host.environment import Environment, Episode, Reply
from composer_trl_host.hints import ErrorContext, HintGenerator

SHELL = Path(__file__).parents[2] / "examples" / "shell"
ADAPTER = SHELL / "warm_start"
ADAPTER_LIMIT = 4 * 2**20
"""Bytes. A larger file would outweigh the rest of the repository."""


def _load() -> ModuleType:
    """The module as the host loads it: by path, under no package."""
    spec = importlib.util.spec_from_file_location("shell_environment", SHELL / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shell = _load()


def _episode(verb: str, name: str = "report") -> Any:
    return shell.ShellEnvironment().episode({"verb": verb, "name": name, "others": ["budget", "poem"]})


def test_the_task_has_the_shape_that_the_host_expects() -> None:
    environment = shell.ShellEnvironment()
    assert isinstance(environment, Environment)
    assert isinstance(environment.hints, HintGenerator)
    assert isinstance(environment.episode(environment.rows("train", 1, 0)[0]), Episode)


def test_the_prompt_shows_three_commands_and_none_to_be_learned() -> None:
    for verb in shell.LIVE_MAPPING:
        system, user = _episode(verb).prompt
        assert system["role"] == "system"
        assert len(system["content"].splitlines()) == 4
        assert user == {"role": "user", "content": f"{verb} report"}
        assert not set(shell.LIVE_MAPPING.values()) & set(system["content"].split())


def test_the_commands_in_the_prompt_run() -> None:
    for _, command, _ in shell.EXAMPLES:
        assert _episode("show").step(f"{command} report").tool_error is None


@pytest.mark.parametrize(
    ("verb", "turn", "kind", "text"),
    [
        ("remove", "remove report", "unknown_command", "unknown command: remove"),
        ("remove", "trash", "wrong_usage", "usage: trash NAME"),
        ("remove", "trash report budget", "wrong_usage", "usage: trash NAME"),
        ("remove", "", "wrong_usage", "usage: COMMAND NAME"),
        ("remove", " \n ", "wrong_usage", "usage: COMMAND NAME"),
        ("remove", "trash repot", "no_such_file", "no such file: repot"),
        ("show", "view repot", "no_such_file", "no such file: repot"),
        ("list", "dir repot", "no_such_file", "no such folder: repot"),
        ("remove", "trash kernel", "refused", "refused: kernel is protected"),
        ("remove", "trash attic", "refused", "refused: attic is a folder"),
        ("create", "make budget", "refused", "refused: budget exists"),
        ("list", "dir budget", "refused", "refused: budget is a file"),
    ],
)
def test_every_error_is_what_happened_and_changes_nothing(verb: str, turn: str, kind: str, text: str) -> None:
    episode = _episode(verb)
    before = episode.system.state()
    reply = episode.step(turn)
    assert reply == Reply(
        messages=[{"role": "tool", "content": text}],
        tool_error=kind,
        done=False,
        details={"command": f"{shell.LIVE_MAPPING[verb]} report"},
    )
    assert episode.system.state() == before
    assert episode.reward() == 0.0


@pytest.mark.parametrize("verb", ["remove", "show", "list", "create"])
def test_the_right_command_solves_the_task(verb: str) -> None:
    episode = _episode(verb)
    assert not episode.solved()
    reply = episode.step(f"  {shell.LIVE_MAPPING[verb]}   report \nand then some talk")
    assert (reply.tool_error, reply.done) == (None, True)
    assert reply.messages[0]["role"] == "tool"
    assert episode.solved()
    assert episode.reward() == 1.0


def test_the_answers_are_read_off_the_files() -> None:
    assert _episode("show").step("view report").messages[0]["content"] == "about report"
    assert _episode("list").step("dir report").messages[0]["content"] == "budget poem"
    removed = _episode("remove")
    removed.step("trash report")
    assert "report" not in removed.system.files
    created = _episode("create")
    created.step("make report")
    assert created.system.files["report"] == ""


@pytest.mark.parametrize(
    "turn", ["trash budget", "view report", "seal report", "clone report", "make report2"]
)
def test_another_command_that_runs_ends_the_episode_unrewarded(turn: str) -> None:
    episode = _episode("remove")
    reply = episode.step(turn)
    assert (reply.tool_error, reply.done) == (None, True)
    assert episode.reward() == 0.0


def test_an_error_gives_one_more_turn_and_the_second_none() -> None:
    episode = _episode("remove")
    assert not episode.step("remove report").done
    second = episode.step("delete report")
    assert (second.tool_error, second.done) == ("unknown_command", True)
    with pytest.raises(TaskError, match="at most 2 turns"):
        episode.step("trash report")


def test_a_recovery_solves_the_task() -> None:
    episode = _episode("remove")
    episode.step("remove report")
    assert episode.step("trash report").done
    assert episode.reward() == 1.0


def test_a_sealed_file_is_refused_afterwards() -> None:
    episode = _episode("remove")
    episode.system.lock("report")
    assert episode.step("trash report").tool_error == "refused"


@pytest.mark.parametrize("kind", ["unknown_command", "wrong_usage", "no_such_file", "refused"])
def test_hints_name_the_right_command_and_their_source(kind: str) -> None:
    details = _episode("remove").step("remove report").details
    context = ErrorContext(error_kind=kind, result="", call="remove report", details=details)
    hint = shell.ShellHints().generate(context)
    assert hint.text == "hint: trash report"
    assert hint.source == f"shell/{kind}"


def test_there_is_no_hint_where_the_right_command_is_unknown() -> None:
    assert shell.ShellHints().generate(ErrorContext("unknown_command", "", "")) is None


def test_the_student_is_never_shown_the_right_command() -> None:
    environment = shell.ShellEnvironment()
    for row in environment.rows("train", 40, 3):
        episode = environment.episode(row)
        reply = episode.step(f"{row['verb']} {row['name']}")
        shown = " ".join(message["content"] for message in [*episode.prompt, *reply.messages])
        assert reply.details["command"] not in shown


@pytest.mark.parametrize("name", ["<|im_end|>", "<|im_start|>assistant", "trash;view", "../report", "{0}%s"])
def test_control_text_in_a_name_is_a_name(name: str) -> None:
    episode = _episode("remove")
    reply = episode.step(f"trash {name}")
    assert reply.tool_error == "no_such_file"
    assert reply.messages[0]["content"] == f"no such file: {name}"
    assert _episode("remove").step(f"{name} report").messages[0]["content"] == f"unknown command: {name}"
    created = _episode("create", name)
    created.step(f"make {name}")
    assert created.solved()


def test_a_long_turn_is_echoed_in_part() -> None:
    text = _episode("remove").step("x" * 500 + " report").messages[0]["content"]
    assert len(text) < 60


def test_splits_share_no_name() -> None:
    assert len(set(shell.TRAIN_NAMES)) == len(shell.TRAIN_NAMES) >= 40
    assert len(set(shell.HELDOUT_NAMES)) == len(shell.HELDOUT_NAMES) >= 20
    assert not set(shell.TRAIN_NAMES) & set(shell.HELDOUT_NAMES)
    environment = shell.ShellEnvironment()
    for split, names in (("train", shell.TRAIN_NAMES), ("heldout", shell.HELDOUT_NAMES)):
        rows = environment.rows(split, 300, 0)
        assert {name for row in rows for name in (row["name"], *row["others"])} <= set(names)


def test_rows_are_the_same_for_the_same_seed() -> None:
    rows = shell.ShellEnvironment().rows("train", 250, 7)
    assert len(rows) == 250
    assert rows == shell.ShellEnvironment().rows("train", 250, 7)
    assert rows[:50] == shell.ShellEnvironment().rows("train", 50, 7)
    assert rows != shell.ShellEnvironment().rows("train", 250, 8)
    once = {(row["verb"], row["name"]) for row in rows[: 4 * len(shell.TRAIN_NAMES)]}
    assert len(once) == 4 * len(shell.TRAIN_NAMES)


def test_episodes_share_nothing() -> None:
    environment = shell.ShellEnvironment()
    row = environment.rows("train", 1, 0)[0]
    first, second = environment.episode(row), environment.episode(row)
    first.step(f"{environment.mapping[row['verb']]} {row['name']}")
    assert first.solved()
    assert not second.solved()


def test_a_mapping_renames_the_commands() -> None:
    mapping = {"remove": "zap", "show": "peek", "list": "heap", "create": "forge"}
    episode = shell.ShellEnvironment(mapping).episode({"verb": "remove", "name": "report", "others": []})
    assert episode.step("trash report").tool_error == "unknown_command"
    assert episode.step("zap report").done
    assert episode.solved()


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"remove": "zap"}, "must name a command for each of"),
        ({"remove": "zap", "show": "zap", "list": "heap", "create": "forge"}, "distinct single words"),
        ({"remove": "seal", "show": "peek", "list": "heap", "create": "forge"}, "distinct single words"),
        ({"remove": "zap it", "show": "peek", "list": "heap", "create": "forge"}, "distinct single words"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(mapping: dict[str, str], text: str) -> None:
    with pytest.raises(TaskError, match=text):
        shell.ShellEnvironment(mapping)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(TaskError, match="must be 'train' or 'heldout', found 'test'"):
        shell.ShellEnvironment().rows("test", 1, 0)


def test_the_warm_start_never_shows_the_live_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SHELL))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    warm_start = importlib.import_module("warm_start")
    monkeypatch.delitem(sys.modules, "warm_start")
    monkeypatch.delitem(sys.modules, "environment")

    secret = {*shell.LIVE_MAPPING.values(), *shell.HELDOUT_NAMES}
    spoken = [*secret, "stone", "cloud", "paper", "light"]
    vocabulary = {text: index for index, text in enumerate([*spoken, *(f"Ġ{word}" for word in spoken)])}
    source = random.Random(0)
    words = warm_start.Words(vocabulary, source)
    kinds = set()
    for _ in range(400):
        sample = warm_start.transcript(words, source, warm_start.Settings())
        turns = [message for message in sample.messages if message["role"] == "assistant"]
        assert len(sample.learned) == len(turns)
        assert not secret & {word for message in sample.messages for word in message["content"].split()}
        kinds.update(message["content"].partition(" ")[0] for message in sample.messages[1:])
    assert {"hint:", "unknown", "usage:", "no"} <= kinds


def test_the_adapter_is_small() -> None:
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size < ADAPTER_LIMIT


def test_the_adapter_names_the_model_and_no_place() -> None:
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
    assert config["peft_type"] == "LORA"
    assert not [value for value in config.values() if isinstance(value, str) and "/" in value]
