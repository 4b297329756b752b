"""Which environments a TOML may name on this host, in each release's spelling."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.verifiers_env.loading import load_environment, load_renderer, without_time_limit
from composer_trl_host.verifiers_env.source import HeldOutSource, Source, find_source, taken_keys

EXAMPLE = Path(__file__).parents[1] / "examples" / "verifiers_tool"


def document(source: Any, **orchestrator: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"source": source}, **orchestrator}}


ENV = {
    "taskset": {"id": "verifiers-tool"},
    "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
}


def train_of(found: Any) -> tuple[Source, ...]:
    assert found is not None
    return found.train


def test_the_one_source_is_found_with_its_renderer() -> None:
    found = find_source(document([{"env": ENV, "name": "x", "ratio": 2.0}], renderer={"name": "qwen3"}))
    assert train_of(found) == (Source(ENV, {"name": "qwen3"}, "x", 2.0),)
    assert train_of(find_source(document([{"env": ENV}]))) == (Source(ENV, None, "verifiers-tool"),)


def test_several_sources_have_their_ratios_and_places() -> None:
    found = train_of(
        find_source(document([{"env": ENV, "name": "a"}, {"env": ENV, "name": "b", "ratio": 3}]))
    )
    assert [(source.name, source.ratio, source.key) for source in found] == [
        ("a", 1.0, "orchestrator.train.source[0]"),
        ("b", 3.0, "orchestrator.train.source[1]"),
    ]


@pytest.mark.parametrize("empty", [{}, {"orchestrator": {}}, {"orchestrator": {"train": {}}}, document([])])
def test_a_toml_without_a_source_has_none(empty: dict[str, Any]) -> None:
    assert find_source(empty) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([{"env": ENV}, {"env": ENV}], "name of its own; found verifiers-tool more than once"),
        ([{"env": ENV, "algo": {"type": "opd"}}], "found algo"),
        ([{"env": ENV, "sampling": {"temperature": 0.5}}], "found sampling"),
        ([{"env": ENV, "num_examples": 3}], "found num_examples"),
        ([{"env": ENV, "ratio": 0}], r"source\.ratio must be a finite number above 0 .*; found 0;"),
        ([{"env": ENV, "ratio": True}], "ratio must be a finite number"),
        ([{"env": ENV, "ratio": float("nan")}], "ratio must be a finite number"),
        ([{"env": ENV, "ratio": 1.1e6}], r"above 0 and at most 1e6; found 1100000\.0"),
        ([{"env": ENV, "ratio": 10**400}], "above 0 and at most 1e6; found 1000"),
        ([{"env": ENV, "serve": {"address": "tcp://h:1"}}], "no address on the TRL host"),
        ([{"env": ENV, "group_size": 4}], r"group_size must be orchestrator\.group_size.*found 4 and 2"),
        ([{"id": "gsm8k"}], "found id = 'gsm8k', a v0 environment"),
        ([{"legacy": {"id": "gsm8k"}}], r'a v0 environment.*taskset = \{ id = "gsm8k" \}'),
        ([{"env": ENV, "id": "gsm8k"}], "one environment; found a taskset and id"),
        ([{"env": {}}], "must name a taskset"),
        ([{}], "must name a taskset"),
        ("shell", "must be a list of tables; found 'shell'"),
    ],
)
def test_a_source_that_cannot_be_honoured_is_refused(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_source(document(source, group_size=2))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([{"env": {"taskset": {"api_key": "SECRET"}}}], "found a table with taskset; set"),
        ({"env": {"key": "SECRET"}, "name": "x"}, "must be a list of tables; found a table with env, name;"),
        ([{"env": {"key": "SECRET"}}, 3], r"must be a list of tables; found \[a table with env, 3\];"),
        ([{"args": {"api_key": "SECRET"}}], "found args = a table with api_key, a v0 environment"),
        ([{"env": ENV, "ratio": {"key": "SECRET"}}], "ratio must be a .*; found a table with key;"),
    ],
)
def test_of_tables_messages_have_the_keys_alone(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        find_source(document(source))
    assert "SECRET" not in str(caught.value)


def test_a_server_of_its_own_is_listed_not_refused() -> None:
    found = find_source(document([{"env": ENV, "serve": {"num_workers": 4}}, {"env": ENV, "name": "b"}]))
    assert found is not None
    assert [key for key, _ in found.notes] == ["orchestrator.train.source[0].serve"]


class TestOlderSpellings:
    """v0.5.0 to v0.7.0."""

    @pytest.mark.parametrize("key", ["orchestrator.env", "orchestrator.train.env"])
    def test_a_v0_environment_is_refused_with_what_to_set(self, key: str) -> None:
        table = [{"id": "math-env", "args": {"min_avg_reward": 0.1}, "name": "math"}]
        above = {"train": {"env": table}} if "train" in key else {"env": table}
        with pytest.raises(ConfigError) as caught:
            find_source({"orchestrator": above})
        said = str(caught.value)
        assert said.startswith(f"{key} must name a taskset of verifiers 0.4; found id = 'math-env'")
        assert '[[orchestrator.train.source]] with env = { taskset = { id = "math-env" } }' in said

    def test_v0_7_0_has_the_agent_s_limits_beside_the_taskset(self) -> None:
        table = {
            "name": "math",
            "ratio": 0.3,
            "taskset": {"id": "math-v1"},
            "harness": {"id": "null", "runtime": {"type": "subprocess"}},
            "max_turns": 3,
            "timeout": {"rollout": 60.0},
            "pool": {"type": "static", "num_workers": 2},
        }
        found = find_source({"orchestrator": {"train": {"env": [table]}}})
        (source,) = train_of(found)
        assert source.env == {
            "taskset": {"id": "math-v1"},
            "agent": {
                "max_turns": 3,
                "timeout": {"rollout": 60.0},
                "harness": {"id": "null"},
                "runtime": {"type": "subprocess"},
            },
        }
        assert (source.name, source.ratio) == ("math", 0.3)
        assert source.agent_key("agent", "timeout.rollout") == "orchestrator.train.env.timeout.rollout"
        assert found is not None
        assert [key for key, _ in found.notes] == ["orchestrator.train.env.pool"]
        assert taken_keys(found)[0] == "orchestrator.train.env"

    def test_two_spellings_at_once_are_refused(self) -> None:
        both = {"orchestrator": {"train": {"source": [{"env": ENV}], "env": [{"taskset": {"id": "x"}}]}}}
        with pytest.raises(
            ConfigError, match=r"found orchestrator\.train\.source and orchestrator\.train\.env"
        ):
            find_source(both)


class TestHeldOut:
    def test_a_source_s_own_values_stand_over_the_shared_ones(self) -> None:
        found = find_source(
            document(
                [{"env": ENV}],
                eval={
                    "interval": 25,
                    "num_examples": 8,
                    "group_size": 2,
                    "sampling": {"temperature": 0.5, "extra_body": {"top_k": 3}},
                    "source": [
                        {"env": ENV, "name": "a"},
                        {
                            "env": ENV,
                            "name": "b",
                            "interval": 5,
                            "num_examples": -1,
                            "group_size": 1,
                            "sampling": {"temperature": 0.0, "max_completion_tokens": 9},
                        },
                    ],
                },
            )
        )
        assert found is not None
        first, second = found.heldout
        key = "orchestrator.eval.source"
        assert first == HeldOutSource(
            Source(ENV, None, "a", 1.0, f"{key}[0]"), 8, 2, 25, {"temperature": 0.5, "top_k": 3}
        )
        assert second == HeldOutSource(
            Source(ENV, None, "b", 1.0, f"{key}[1]"),
            None,
            1,
            5,
            {"temperature": 0.0, "top_k": 3, "max_tokens": 9},
        )
        assert (found.at_start, found.on_resume, found.notes) == (True, False, ())

    def test_prime_rls_defaults(self) -> None:
        found = find_source(document([{"env": ENV}], eval={"env": [{"taskset": {"id": "x"}}]}))
        assert found is not None
        (held,) = found.heldout
        assert (held.examples, held.group_size, held.interval, held.sampling) == (None, 1, 100, {})

    @pytest.mark.parametrize(
        ("keys", "at_start", "on_resume"),
        [
            ({"skip_first_step": True}, False, False),
            ({"eval_base_model": False}, False, False),
            ({"retrigger_on_resume": True}, True, True),
            ({"skip_eval_on_resume": False}, True, True),
        ],
    )
    def test_when_it_begins(self, keys: dict[str, bool], at_start: bool, on_resume: bool) -> None:
        found = find_source(document([{"env": ENV}], eval={"source": [{"env": ENV}], **keys}))
        assert found is not None
        assert (found.at_start, found.on_resume) == (at_start, on_resume)

    def test_what_is_not_sampled_with_is_listed(self) -> None:
        sampling = {"reasoning_effort": "low", "extra_body": {"best_of": 2}}
        found = find_source(document([{"env": ENV}], eval={"source": [{"env": ENV, "sampling": sampling}]}))
        assert found is not None
        assert sorted(key for key, _ in found.notes) == [
            "orchestrator.eval.source.sampling.extra_body.best_of",
            "orchestrator.eval.source.sampling.reasoning_effort",
        ]

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ({"num_examples": 0}, "at least 1, or -1 for all; found 0"),
            ({"num_examples": -2}, "at least -1; found -2"),
            ({"interval": 0}, r"eval\.source\.interval must be a whole number of at least 1; found 0"),
            ({"sampling": {"temperature": "hot"}}, "temperature must be a finite number .*; found 'hot'"),
            (
                {"sampling": {"temperature": float("nan")}},
                r"source\.sampling\.temperature must be .*found nan",
            ),
            ({"sampling": {"temperature": -0.1}}, r"temperature must be .* of at least 0; found -0\.1"),
            ({"sampling": {"extra_body": {"top_p": 0.0}}}, r"extra_body\.top_p must be a number above 0"),
            ({"sampling": {"top_p": 1.1}}, r"top_p must be a number above 0 and at most 1; found 1\.1"),
            ({"sampling": {"top_p": float("nan")}}, "top_p must be a number above 0"),
            ({"sampling": {"top_k": 2.5}}, r"top_k must be a whole number .*; found 2\.5"),
            ({"sampling": {"min_p": float("nan")}}, "min_p must be a number from 0 to 1"),
            (
                {"sampling": {"max_completion_tokens": 0}},
                "max_completion_tokens must be a whole number of at",
            ),
            (
                {"sampling": {"max_tokens": True}},
                "max_tokens must be a whole number of at least 1; found True",
            ),
            ({"skip_first": 3}, "found skip_first"),
        ],
    )
    def test_wrong_values_are_refused_by_name(self, table: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            find_source(document([{"env": ENV}], eval={"source": [{"env": ENV, **table}]}))


def source(**changes: Any) -> Source:
    return Source({**ENV, **changes}, None, "x")


class TestWithVerifiers:
    """Against verifiers' own schema."""

    @pytest.fixture(autouse=True)
    def _verifiers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("verifiers.v1")
        monkeypatch.syspath_prepend(str(EXAMPLE))

    def test_the_example_loads(self) -> None:
        assert type(load_environment(source()).taskset).__name__ == "ShellTaskset"

    def test_the_example_s_parts_share_no_task(self) -> None:
        prompts = {
            part: [
                task.data.prompt
                for task in load_environment(source(taskset={"id": "verifiers-tool", "part": part})).taskset
            ]
            for part in ("all", "train", "heldout")
        }
        # 4 verbs with 51 names, of which every fourth, 13, is held out.
        assert {part: len(found) for part, found in prompts.items()} == {
            "all": 204,
            "train": 152,
            "heldout": 52,
        }
        assert sorted([*prompts["train"], *prompts["heldout"]]) == sorted(prompts["all"])

    def test_programs_in_other_folders_see_the_same_python_path(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(EXAMPLE.parent)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["verifiers_tool", "", "/else"]))
        load_environment(source())
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(EXAMPLE), "/else"])

    @pytest.mark.parametrize("runtime", ["prime", "docker", "modal"])
    def test_a_sandbox_is_refused_by_name(self, runtime: str) -> None:
        with pytest.raises(
            ConfigError,
            match=rf'source\.env\.agent\.runtime\.type must be "subprocess".*found "{runtime}"',
        ):
            load_environment(source(agent={"runtime": {"type": runtime}}))

    def test_a_tool_server_in_a_sandbox_is_refused_by_name(self) -> None:
        taskset = {"id": "verifiers-tool", "tools": {"runtime": {"type": "docker"}}}
        with pytest.raises(
            ConfigError,
            match=r'x: the tool server ShellTools must have runtime\.type "subprocess".*found "docker"',
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

    def test_a_table_of_v0_7_0_loads(self) -> None:
        table = {
            "taskset": {"id": "verifiers-tool"},
            "harness": {"id": "null", "runtime": {"type": "subprocess"}},
            "max_turns": 3,
        }
        (found,) = train_of(find_source({"orchestrator": {"train": {"env": [table]}}}))
        agent = load_environment(found).config.agent
        assert (agent.max_turns, agent.runtime.type, agent.harness.id) == (3, "subprocess", "null")

    def test_a_missing_limit_of_time_is_named(self) -> None:
        environment = load_environment(source())
        tasks = [SimpleNamespace(data=SimpleNamespace(timeout=SimpleNamespace(agent=None)))]
        line = without_time_limit(source(), environment, tasks)
        assert line is not None
        assert "orchestrator.train.source.env.agent.timeout.rollout is not set" in line
        tasks[0].data.timeout.agent = 60.0
        assert without_time_limit(source(), environment, tasks) is None
        limited = source(agent={**ENV["agent"], "timeout": {"rollout": 60.0}})
        tasks[0].data.timeout.agent = None
        assert without_time_limit(limited, load_environment(limited), tasks) is None

    def test_a_renderer_is_read_by_its_own_schema(self) -> None:
        assert load_renderer(Source(ENV, None, "x")) is None
        assert load_renderer(Source(ENV, {"name": "auto"}, "x")) is None
        custom = {"name": "custom", "import_path": "verifiers_tool.renderer.LineRenderer"}
        assert load_renderer(Source(ENV, custom, "x")).import_path == custom["import_path"]
        with pytest.raises(ConfigError, match=r"orchestrator\.renderer must be a renderer"):
            load_renderer(Source(ENV, {"name": "qwen99"}, "x"))
