"""What the README and the pages say is there: links, TOMLs, commands, keys."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from composer_prime_plugin.cli import main
from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.runfile import load_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
TOMLS = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.name != "pyproject.toml")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_toml_block_is_a_run_that_loads(page, tmp_path):
    for number, text in enumerate(blocks(page, "toml")):
        assert tomllib.loads(text)
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        load_run(["@", str(path)])


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_toml_loads_and_routes(path, capsys):
    assert main(["route", "@", str(path)]) == 0
    assert "trl-host" in capsys.readouterr().out


def test_every_make_target_and_file_that_is_named_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z]+)\b", page.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
        for name in re.findall(r"`((?:bench|examples|composer_\w+|parity|docs)/[\w./]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_key_of_the_schema_has_a_description():
    def walk(model, prefix=""):
        for name, field in model.model_fields.items():
            assert field.description, f"{prefix}{name}"
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation, f"{prefix}{name}.")

    walk(ComposerConfig)


def test_the_environment_of_the_docs_is_one():
    from composer_trl_host.environment import Environment, Episode, Reply
    from composer_trl_host.hints import ErrorContext

    (code,) = blocks(ROOT / "docs" / "environments.md", "python")
    names: dict = {}
    exec(code, names)
    environment = names["Echo"]()
    assert isinstance(environment, Environment)
    (row,) = environment.rows("heldout", 1, 0)
    episode = environment.episode(row)
    assert isinstance(episode, Episode)
    reply = episode.step("black")
    assert isinstance(reply, Reply)
    assert (reply.tool_error, episode.reward()) == ("wrong", 0.0)
    context = ErrorContext("wrong", "wrong: black", "black", details=reply.details)
    assert environment.hints.generate(context).text == "hint: say kcalb"
    assert episode.step("kcalb").done
    assert episode.solved()
