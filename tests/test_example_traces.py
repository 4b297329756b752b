"""The traces under ``examples/traces`` are what their README says and what ``write.py`` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_trl_host.embedded import embedded_model
from composer_trl_host.traces import ERROR_KINDS, REJECTED, ReadReport, Trace, Turn, read_traces

FOLDER = Path(__file__).parents[1] / "examples" / "traces"
SIZE_LIMIT = 400_000
"""Bytes of the three files together."""
LENGTH_LIMIT = 640
"""Tokens of one trace: a CPU run with the embedded model is to be quick."""
RECOVERY_TOKENS = range(10, 81)
TOTAL_SITES = 59

SESSION = "00000000-0000-4000-8000-{:012d}"
TRACE = "{:032x}"

# Turns are counted from 0, the system message included where there is one.
SITES: dict[str, dict[str, list[tuple[int, str]]]] = {
    "claude_code.jsonl": {
        SESSION.format(1): [(4, "failing_test"), (6, "missing_file"), (12, "edit_not_found")],
        SESSION.format(2): [(3, "not_read_before_edit"), (7, "edit_not_unique"), (11, "wrong_argument")],
        SESSION.format(3): [(3, "unknown_tool"), (7, "permission"), (9, "command_not_found")],
        SESSION.format(4): [(4, "missing_file"), (7, "import_error"), (9, "network")],
        SESSION.format(5): [],
        SESSION.format(5) + "/00000005": [(3, "output_too_long"), (5, "timeout")],
        SESSION.format(6): [(8, "rate_limit"), (12, "unknown")],
        SESSION.format(7): [(4, "merge_conflict"), (8, "syntax_error"), (10, "type_error")],
        SESSION.format(8): [(3, "nonzero_exit")],
    },
    "openai.jsonl": {
        "slug-1": [(4, "failing_test"), (8, "edit_not_found")],
        "slug-2": [(4, "missing_file"), (8, "unknown_tool")],
        "slug-3": [(4, "invalid_json"), (8, "import_error")],
        "orders-1": [(4, "traceback"), (8, "command_not_found")],
        "orders-2": [(4, "wrong_argument"), (6, "output_too_long"), (10, "permission")],
        "rates-1": [(4, "network"), (8, "rate_limit")],
        "rates-2": [(4, "timeout"), (8, "type_error")],
        "release-1": [(4, "merge_conflict"), (8, "edit_not_unique")],
        "release-2": [(4, "nonzero_exit"), (8, "not_read_before_edit"), (12, "syntax_error")],
        "question-1": [],
    },
    "verifiers.jsonl": {
        TRACE.format(1): [(4, "missing_file"), (8, "edit_not_found"), (12, "command_not_found")],
        TRACE.format(2): [(4, "invalid_json"), (6, "not_read_before_edit"), (10, "edit_not_unique")],
        TRACE.format(3): [(4, "import_error"), (10, "type_error"), (12, "syntax_error")],
        TRACE.format(4) + "/0": [(4, "failing_test"), (10, "wrong_argument")],
        TRACE.format(4) + "/1": [(10, "traceback")],
        TRACE.format(5): [(9, "permission"), (11, "network")],
        TRACE.format(6): [
            (4, "unknown_tool"),
            (6, "output_too_long"),
            (8, "rate_limit"),
            (10, "wrong_argument"),
            (12, "timeout"),
        ],
    },
}
REFUSALS = {(SESSION.format(3), 15), ("question-1", 8)}
"""Traces in which a person refused a call, with the turn that answers the refusal."""
REWARDS = {
    "slug": [1.0, 0.0, 0.5],
    "orders": [1.0, 0.0],
    "rates": [1.0, 0.0],
    "release": [1.0, 0.0],
    "port": [1.0, 0.0],
    # The second rollout has two branches.
    "mean": [1.0, 0.5, 0.5],
    "sync": [1.0, 0.0],
}
ADVANTAGES = {1: 0.5, 2: -0.5, 3: 0.25, 4: -0.25}
"""By the number of the trace: the reward less the mean of its group's rollouts."""


@pytest.fixture(scope="module")
def reading() -> tuple[list[Trace], ReadReport]:
    report = ReadReport()
    return list(read_traces(FOLDER, report=report)), report


@pytest.fixture
def traces(reading: tuple[list[Trace], ReadReport]) -> list[Trace]:
    return reading[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    return transformers.AutoTokenizer.from_pretrained(embedded_model())


def _recorded(traces: list[Trace]) -> list[Trace]:
    return [trace for trace in traces if trace.path.endswith("verifiers.jsonl")]


def _said(turn: Turn) -> str:
    """What the embedded model would have sampled for a turn."""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in turn.tool_calls
    ]
    return "\n".join(part for part in (turn.content, *calls) if part)


def _write(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "write.py"), *arguments], capture_output=True, text=True, timeout=560
    )


def test_every_site_is_where_it_was_put_and_of_its_kind(traces: list[Trace]) -> None:
    found: dict[str, dict[str, list[tuple[int, str | None]]]] = defaultdict(dict)
    for trace in traces:
        sites = [(number, trace.turns[number].tool_error) for number in trace.sites()]
        found[Path(trace.path).name][trace.id] = sites
    assert found == SITES


def test_all_kinds_of_error_are_there_and_each_file_has_fifteen_sites() -> None:
    sites = {name: [site for each in traces.values() for site in each] for name, traces in SITES.items()}
    assert sum(map(len, sites.values())) == TOTAL_SITES
    assert min(map(len, sites.values())) >= 15
    assert {kind for each in sites.values() for _, kind in each} == set(ERROR_KINDS) - {REJECTED}


def test_nothing_is_lost_but_what_is_meant_to_be(reading: tuple[list[Trace], ReadReport]) -> None:
    report = reading[1]
    assert (report.files, report.bad_lines, report.skipped_files) == (3, {}, {})
    assert report.skipped == {
        "record of type 'summary'": 2,
        "record of type 'queue-operation'": 2,
        "abandoned branch": 1,
        "episode without a trace": 1,
    }
    # The ends of session 8 and of question-1, and the failure inside the prompt of sync-1.
    assert report.unanswered == 3


def test_a_refusal_is_no_error_of_the_model(traces: list[Trace]) -> None:
    refused = {
        (trace.id, number)
        for trace in traces
        for number in set(trace.sites(include_rejected=True)) - set(trace.sites())
    }
    assert refused == REFUSALS


def test_rewards_differ_within_every_group(traces: list[Trace]) -> None:
    found: dict[str, list[float | None]] = defaultdict(list)
    for trace in traces:
        if trace.group_id is not None:
            found[trace.group_id].append(trace.reward)
    assert found == REWARDS
    assert all(trace.reward is None for trace in traces if trace.group_id is None)


def test_special_turns_are_kept(traces: list[Trace]) -> None:
    by_id = {trace.id: trace for trace in traces}
    parallel = by_id[SESSION.format(4)].turns
    assert [turn.tool_name for turn in parallel[2:4]] == ["Read", "Read"]
    assert [turn.is_error for turn in parallel[2:4]] == [True, None]
    chart = by_id[SESSION.format(6)].turns
    assert "[image]" in chart[2].content
    assert "Traceback" in chart[4].content
    assert "eu region" in chart[5].content
    assert chart[1].thinking
    assert by_id["question-1"].turns[1].content.count("Traceback") == 1


def test_traces_are_short(traces: list[Trace], tokenizer: Any) -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.jsonl")) < SIZE_LIMIT
    for trace in traces:
        lengths = [len(tokenizer.encode(_said(turn))) for turn in trace.turns]
        # Role tags and line ends take five tokens a message.
        assert sum(lengths) + 5 * len(lengths) <= LENGTH_LIMIT, trace.id
        for number in trace.sites():
            assert lengths[number] in RECOVERY_TOKENS, (trace.id, number, lengths[number])


def test_token_ids_are_the_conversation(traces: list[Trace], tokenizer: Any) -> None:
    """By the template's own text, which neither ``write.py`` nor the reader makes."""
    for trace in _recorded(traces):
        texts = [tokenizer.decode(turn.tokens.ids) for turn in trace.turns if turn.tokens]
        assert len(texts) == len(trace.turns)
        messages = [{"role": turn.role, "content": _said(turn)} for turn in trace.turns]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert "".join(texts) == whole.removesuffix("\n"), trace.id
        ids = [token for turn in trace.turns if turn.tokens for token in turn.tokens.ids]
        assert ids == tokenizer.encode(whole.removesuffix("\n"), add_special_tokens=False), trace.id


def test_exactly_the_models_turns_are_sampled(traces: list[Trace], tokenizer: Any) -> None:
    given = {TRACE.format(4) + "/1": {2, 4, 6}, TRACE.format(5): {2, 4}}
    for trace in _recorded(traces):
        for number, turn in enumerate(trace.turns):
            assert turn.tokens is not None
            ids, sampled = turn.tokens.ids, turn.tokens.sampled
            assert len(ids) == len(sampled)
            if turn.role != "assistant" or number in given.get(trace.id, ()):
                assert not any(sampled), (trace.id, number)
                continue
            own = [token for token, mark in zip(ids, sampled, strict=True) if mark]
            assert tokenizer.decode(own) == _said(turn) + "<|im_end|>", (trace.id, number)
            assert tokenizer.decode(ids[: len(ids) - len(own)]) == "<|im_start|>assistant\n"


def test_log_probs_and_advantages_stand_on_the_sampled_tokens(traces: list[Trace]) -> None:
    for trace in _recorded(traces):
        advantage = ADVANTAGES.get(int(trace.id.partition("/")[0], 16))
        for turn in trace.turns:
            assert turn.tokens is not None
            count = sum(turn.tokens.sampled)
            if count:
                assert turn.tokens.logprobs is not None
                assert len(turn.tokens.logprobs) == count
                assert all(-30 < value <= 0 for value in turn.tokens.logprobs)
                assert turn.tokens.advantages == (None if advantage is None else (advantage,) * count)


def test_verifiers_records_have_the_fields_of_its_schema() -> None:
    """Their classes took every record and gave it back unchanged when the files were made; this keeps the shape."""
    lines = (FOLDER / "verifiers.jsonl").read_text().splitlines()
    for episode in map(json.loads, lines):
        assert episode.keys() >= {"id", "env", "task", "group", "run", "ok", "errors", "traces"}
        assert episode["ok"] is bool(episode["traces"])
        for trace in episode["traces"]:
            assert trace["version"] == 1
            assert trace["verifiers"]["version"].startswith("0.4.")
            assert trace["nodes"][0].keys() >= {"tools"}
            for number, node in enumerate(trace["nodes"]):
                assert (number == 0) is ("parent" not in node)
                assert len(node["token_ids"]) == len(node["mask"])
                assert len(node["logprobs"]) == sum(node["mask"])
            sampled = [number for number, node in enumerate(trace["nodes"]) if node["sampled"]]
            assert [call["node"] for call in trace["calls"]] == sampled


def test_the_readme_names_every_trace_with_its_kinds() -> None:
    rows = list(_table((FOLDER / "README.md").read_text()))
    groups = {group: list(rewards) for group, rewards in REWARDS.items()}
    for name, traces in SITES.items():
        for trace, sites in traces.items():
            file, short, group, reward, kinds = rows.pop(0)
            assert (file, trace.endswith(short)) == (name, True), trace
            assert kinds == [kind for _, kind in sites], trace
            assert reward == (str(groups[group].pop(0)) if group else ""), trace
    assert not rows
    assert not any(groups.values())


def _table(text: str) -> Iterator[tuple[str, str, str, str, list[str]]]:
    for line in text.splitlines():
        if line.startswith("| `"):
            file, trace, group, reward, kinds = (cell.strip() for cell in line.strip("|").split("|"))
            yield file.strip("`"), trace.strip("`…"), group, reward, re.findall(r"`(\w+)`", kinds)


# Measuring the log-probs takes ten seconds of one core, and minutes of a crowded one.
@pytest.mark.timeout(600)
def test_the_files_are_what_the_scenarios_give(tokenizer: Any) -> None:
    run = _write("--check")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"is_error":true', '"is_error":false', "line 6"),
        ("\n{", "\n\n{", "154 lines instead of 153"),
    ],
    ids=["a changed flag", "an added line"],
)
def test_the_check_sees_a_file_that_differs(tmp_path: Path, old: str, new: str, said: str) -> None:
    folder = tmp_path / "traces"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "claude_code.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    run = _write("--check", "claude_code", "openai", folder=folder)
    assert run.returncode == 1
    assert f"claude_code.jsonl differs from its scenarios: {said}" in run.stderr
    assert "openai" not in run.stderr


def test_writing_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("claude_code", "openai"):
        (folder / f"{name}.jsonl").unlink()
    run = _write("claude_code", "openai", folder=folder)
    assert run.returncode == 0, run.stderr
    for name in ("claude_code", "openai"):
        assert (folder / f"{name}.jsonl").read_bytes() == (FOLDER / f"{name}.jsonl").read_bytes()


def test_log_probs_may_differ_by_rounding_and_no_more() -> None:
    code = "import write; a = {'logprobs': [-1.0, -2.0]}; "
    for moved, same in (("-2.0009", True), ("-2.0011", False)):
        run = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{code}print(write.same(a, {{'logprobs': [-1.0, {moved}]}}), write.same({{'ids': [1]}}, {{'ids': [2]}}))",
            ],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.stdout == f"{same} False\n", run.stderr
