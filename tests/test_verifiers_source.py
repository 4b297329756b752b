"""Which environments a TOML may name on this host."""

from __future__ import annotations

from typing import Any

import pytest

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.verifiers_env.source import Source, find_source, load_environment, load_renderer


def document(source: Any, **orchestrator: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"source": source}, **orchestrator}}


ENV = {
    "taskset": {"id": "verifiers-tool"},
    "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
}


def test_the_one_source_is_found_with_its_renderer() -> None:
    found = find_source(document([{"env": ENV, "name": "x", "ratio": 2.0}], renderer={"name": "qwen3"}))
    assert found == Source(ENV, {"name": "qwen3"}, "x")
    assert find_source(document([{"env": ENV}])) == Source(ENV, None, "verifiers-tool")


@pytest.mark.parametrize("empty", [{}, {"orchestrator": {}}, {"orchestrator": {"train": {}}}, document([])])
def test_a_toml_without_a_source_has_none(empty: dict[str, Any]) -> None:
    assert find_source(empty) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([{"env": ENV}, {"env": ENV}], "must be one table on the TRL host; found 2"),
        ([{"env": ENV, "algo": {"type": "opd"}}], "found algo"),
        ([{"env": ENV, "sampling": {"temperature": 0.5}}], "found sampling"),
        ([{"id": "gsm8k"}], "alone on the TRL host; found id"),
        ([{"env": {}}], "must name a taskset"),
        ([{}], "must name a taskset"),
    ],
)
def test_a_source_that_cannot_be_honoured_is_refused(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_source(document(source))


def source(**changes: Any) -> Source:
    return Source({**ENV, **changes}, None, "x")


class TestWithVerifiers:
    """Against verifiers' own schema."""

    @pytest.fixture(autouse=True)
    def _verifiers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("verifiers.v1")
        from pathlib import Path

        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "verifiers_tool"))

    def test_the_example_loads(self) -> None:
        assert type(load_environment(source()).taskset).__name__ == "ShellTaskset"

    @pytest.mark.parametrize("runtime", ["prime", "docker", "modal"])
    def test_a_sandbox_is_refused_by_name(self, runtime: str) -> None:
        with pytest.raises(ConfigError, match=rf'runtime\.type must be "subprocess".*found "{runtime}"'):
            load_environment(source(agent={"runtime": {"type": runtime}}))

    def test_a_tool_server_in_a_sandbox_is_refused_by_name(self) -> None:
        taskset = {"id": "verifiers-tool", "tools": {"runtime": {"type": "docker"}}}
        with pytest.raises(
            ConfigError,
            match=r'the tool server ShellTools must have runtime\.type "subprocess".*found "docker"',
        ):
            load_environment(source(taskset=taskset))

    def test_the_default_runtime_is_a_sandbox_and_refused(self) -> None:
        with pytest.raises(ConfigError, match='found "prime"'):
            load_environment(source(agent={}))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"taskset": {"id": "no-such-taskset"}}, "no-such-taskset"),
            ({"taskset": {"id": "verifiers-tool", "sed": 1}}, "taskset.sed is wrong"),
            ({"agent": {"runtime": {"type": "subprocess"}, "max_turn": 2}}, "max_turn is wrong"),
        ],
    )
    def test_a_wrong_key_or_package_is_named(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            load_environment(source(**changes))

    def test_a_renderer_is_read_by_its_own_schema(self) -> None:
        assert load_renderer(Source(ENV, None, "x")) is None
        assert load_renderer(Source(ENV, {"name": "auto"}, "x")) is None
        custom = {"name": "custom", "import_path": "verifiers_tool.renderer.LineRenderer"}
        assert load_renderer(Source(ENV, custom, "x")).import_path == custom["import_path"]
        with pytest.raises(ConfigError, match=r"orchestrator\.renderer must be a renderer"):
            load_renderer(Source(ENV, {"name": "qwen99"}, "x"))
