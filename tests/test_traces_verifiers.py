"""Traces of verifiers and PRIME-RL. ``verifiers_0_4.jsonl`` was written by verifiers 0.4.0 itself, as
PRIME-RL's file monitor does; the expected file holds what its branches and PRIME-RL's
``iter_trainable_branches`` give for the same episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_trl_host.traces import ReadReport, Trace, read_traces

DATA = Path(__file__).parent / "data" / "traces"
Record = dict[str, Any]


def read(path: Path, *records: Any) -> tuple[list[Trace], ReadReport]:
    file = path / "traces.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    report = ReadReport()
    return list(read_traces(file, "verifiers", report=report)), report


def node(
    parent: int | None, role: str, content: str, ids: list[int], mask: list[int] | None = None, **fields: Any
) -> Record:
    message = {"role": role, "content": content, **fields.pop("message", {})}
    flags = [bool(flag) for flag in mask] if mask is not None else [False] * len(ids)
    sampled = role == "assistant" and mask is not None
    return {
        "parent": parent,
        "message": message,
        "token_ids": ids,
        "mask": flags,
        "sampled": sampled,
        **fields,
    }


ASKS = {"tool_calls": [{"id": "c", "name": "bash", "arguments": "{}"}]}
RESULT = {"tool_call_id": "c"}


def nodes() -> list[Record]:
    return [
        node(None, "user", "go", [1, 2]),
        node(
            0,
            "assistant",
            "",
            [3, 4, 5],
            [0, 1, 1],
            message=ASKS,
            logprobs=[-0.5, -1.0],
            advantages=[0.5, 0.5],
        ),
        node(1, "tool", "Error: file not found", [6], message=RESULT),
        node(2, "assistant", "ok", [3, 7], [0, 1], logprobs=[-0.25], advantages=[0.5]),
    ]


def trace(items: list[Record] | None = None, **fields: Any) -> Record:
    return {"id": "T", "nodes": nodes() if items is None else items, **fields}


def test_a_file_of_verifiers_itself() -> None:
    expected = json.loads((DATA / "verifiers_0_4.expected.json").read_text())
    report = ReadReport()
    traces = list(read_traces(DATA / "verifiers_0_4.jsonl", report=report))
    assert len(traces) == len(expected) == 3
    for found, wanted in zip(traces, expected, strict=True):
        tokens = [turn.tokens for turn in found.turns if turn.tokens is not None]
        assert len(tokens) == len(found.turns)
        assert [token for part in tokens for token in part.ids] == wanted["token_ids"]
        assert [flag for part in tokens for flag in part.sampled] == wanted["mask"]
        assert [value for part in tokens for value in part.logprobs or ()] == wanted["logprobs"]
        assert [value for part in tokens for value in part.advantages or ()] == wanted["advantages"]
        assert [turn.role for turn in found.turns] == wanted["roles"]
        assert found.reward == wanted["reward"]
        assert found.group_id == "11111111-2222-3333-4444-555555555555"
        assert found.tools[0]["function"]["name"] == "bash"
        assert found.sites() == [len(found.turns) - 1]
        assert [f.kind for f in found.turns[-1].failures] == ["command_not_found"]
    assert traces[0].turns[4].thinking == "dir is unknown"
    assert [found.id for found in traces] == ["0" * 32 + "/0", "0" * 32 + "/1", "0" * 31 + "1"]
    assert [found.rollout for found in traces] == ["0" * 32, "0" * 32, "0" * 31 + "1"]
    assert [found.line for found in traces] == [1, 1, 2]
    assert (report.traces, report.unanswered, dict(report.skipped), dict(report.notes)) == (3, 0, {}, {})


def test_a_bare_trace_of_an_older_release(tmp_path: Path) -> None:
    (found,), _ = read(
        tmp_path, trace(rewards={"a": 1.0, "b": 0.25}, info={"group_id": "G", "env_name": "e"})
    )
    assert (found.id, found.reward, found.group_id) == ("T", 1.25, "G")
    tokens = found.turns[1].tokens
    assert tokens is not None
    assert (tokens.ids, tokens.sampled) == ((3, 4, 5), (False, True, True))
    assert (tokens.logprobs, tokens.advantages) == ((-0.5, -1.0), (0.5, 0.5))
    assert found.sites() == [3]


def test_a_sampled_node_is_trained_in_its_first_branch_alone(tmp_path: Path) -> None:
    items = [
        *nodes(),
        node(2, "user", "again", [8]),
        node(4, "assistant", "no", [3, 9], [0, 1], logprobs=[-2.0]),
    ]
    (first, second), report = read(tmp_path, trace(items))
    assert [turn.content for turn in second.turns] == ["go", "", "Error: file not found", "again", "no"]
    shared = second.turns[1]
    assert not shared.sampled
    assert shared.tokens is not None
    assert (shared.tokens.ids, shared.tokens.sampled, shared.tokens.logprobs) == ((3, 4, 5), (False,) * 3, ())
    assert first.turns[1].sampled
    assert (first.sites(), second.sites()) == ([3], [4])
    assert report.unanswered == 0


def test_a_site_on_a_shared_node_is_a_site_once(tmp_path: Path) -> None:
    items = [*nodes(), node(3, "user", "a", [8]), node(4, "assistant", "x", [9], [1]), node(3, "user", "b", [8]), node(6, "assistant", "y", [9], [1])]  # fmt: skip
    (first, second), report = read(tmp_path, trace(items))
    assert (first.sites(), second.sites()) == ([3], [])
    assert report.unanswered == 0


def test_branches_that_train_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    items = [*nodes(), node(3, "user", "and", [8]), node(2, "user", "or", [8])]
    traces, report = read(tmp_path, trace(items))
    assert [len(found.turns) for found in traces] == [5]
    assert report.skipped == {"branch without a turn of the model of its own": 1}


@pytest.mark.parametrize(("taken", "count"), [(False, 1), (True, 2)])
def test_a_compaction_attempt_is_trained_only_where_it_was_taken(
    tmp_path: Path, taken: bool, count: int
) -> None:
    attempt = node(
        1,
        "assistant",
        "summary",
        [3, 9],
        [0, 1],
        semantic_parents=[{"node": 1, "type": "compaction_attempt"}],
    )
    items = [*nodes(), attempt]
    if taken:
        items[3]["semantic_parents"] = [{"node": 4, "type": "compaction"}]
    traces, report = read(tmp_path, trace(items))
    assert len(traces) == count
    assert report.skipped["branch of a compaction that was not taken"] == 2 - count


def test_messages_that_no_model_wrote_are_context(tmp_path: Path) -> None:
    """Few-shot examples: role alone does not tell."""
    items = [node(None, "user", "q", [1]), node(0, "assistant", "example", [2]), node(1, "user", "go", [3]), node(2, "assistant", "x", [4], [1])]  # fmt: skip
    (found,), _ = read(tmp_path, trace(items))
    assert [turn.sampled for turn in found.turns if turn.role == "assistant"] == [False, True]


def test_a_failure_of_an_example_is_no_site(tmp_path: Path) -> None:
    items = nodes()
    items[1]["sampled"] = items[3]["sampled"] = False
    items += [node(3, "user", "go", [8]), node(4, "assistant", "x", [9], [1])]
    (found,), report = read(tmp_path, trace(items))
    assert found.sites() == []
    assert report.unanswered == 1


def test_a_trace_without_ids_has_no_tokens(tmp_path: Path) -> None:
    items = [{key: item[key] for key in ("parent", "message", "sampled")} for item in nodes()]
    (found,), _ = read(tmp_path, trace(items))
    assert all(turn.tokens is None for turn in found.turns)
    assert found.sites() == [3]


def test_numbers_that_the_file_does_not_have_are_none(tmp_path: Path) -> None:
    items = nodes()
    items[1]["logprobs"], items[1]["advantages"] = [], None
    del items[3]["logprobs"], items[3]["advantages"]
    (found,), _ = read(tmp_path, trace(items))
    both = [(turn.tokens.logprobs, turn.tokens.advantages) for turn in found.turns if turn.tokens is not None]
    assert both == [((), ()), (None, None), ((), ()), (None, None)]


@pytest.mark.parametrize(
    ("rewards", "reward"),
    [
        ({}, None),
        (None, None),
        ({"a": None}, None),
        ({"a": {"score": 1, "weight": 0.5}, "b": None, "c": {"score": 0.25}}, 0.75),
        ({"a": {"score": 0.0, "weight": 1.0}}, 0.0),
    ],
)
def test_the_reward_is_the_weighted_sum_or_none(tmp_path: Path, rewards: Any, reward: float | None) -> None:
    (found,), _ = read(tmp_path, trace(rewards=rewards))
    assert found.reward == reward


@pytest.mark.parametrize(
    ("episode", "inner", "group"),
    [
        ({"group": {"id": "G"}, "task": {"key": "K", "hash": "H"}}, {"info": {"group_id": "I"}}, "G"),
        ({"task": {}}, {"info": {"group_id": "I"}}, "I"),
        ({"task": {"key": "K", "hash": "H"}}, {}, "K"),
        ({"task": {"hash": "H"}}, {}, "H"),
        ({"task": {}}, {"task": {"key": "K2"}}, "K2"),
        ({"task": {}, "group": 5}, {}, None),
    ],
)
def test_where_the_group_comes_from(
    tmp_path: Path, episode: Record, inner: Record, group: str | None
) -> None:
    (found,), _ = read(tmp_path, {**episode, "traces": [trace(**inner)]})
    assert found.group_id == group


def test_an_episode_gives_the_traces_of_its_trained_agents(tmp_path: Path) -> None:
    agents = [
        trace(id=str(n), agent={"name": "a", "trainable": flag}) for n, flag in enumerate((True, False, True))
    ]
    traces, report = read(tmp_path, {"task": {}, "traces": agents})
    assert [found.id for found in traces] == ["0", "2"]
    assert report.skipped == {"trace of an agent that is not trained": 1}


def test_a_failed_run_is_kept_and_noted(tmp_path: Path) -> None:
    traces, report = read(tmp_path, trace(ok=False), {"task": {}, "ok": False, "traces": []}, trace(ok=True))
    assert len(traces) == 2
    assert report.notes == {"trace of a run that failed, kept": 1}
    assert report.skipped == {"episode without a trace": 1}


def test_a_rollout_of_prompt_and_completion(tmp_path: Path) -> None:
    """PRIME-RL 0.6's train_rollouts.jsonl."""
    prompt = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "example"},
    ]
    completion = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [json.dumps({"id": "c", "name": "bash", "arguments": "{}"})],
        },
        {"role": "tool", "tool_call_id": "c", "content": "Exit code 1"},
        {"role": "assistant", "content": "x"},
    ]
    record = {
        "prompt": prompt,
        "completion": completion,
        "reward": 0.5,
        "group_id": "G",
        "example_id": 3,
        "rollout_id": "R",
    }
    (found,), _ = read(tmp_path, record)
    assert (found.id, found.reward, found.group_id) == ("R", 0.5, "G")
    assert [turn.sampled for turn in found.turns if turn.role == "assistant"] == [False, True, True]
    assert found.sites() == [5]
    assert [
        t.group_id for t in read(tmp_path, {**record, "group_id": None, "example_id": 0, "prompt": "go"})[0]
    ] == ["0"]


def test_of_all_and_effective_rollouts_the_effective_are_read(tmp_path: Path) -> None:
    for kind, name in (("all", "early"), ("effective", "trained")):
        folder = tmp_path / "step_3" / "train" / kind
        folder.mkdir(parents=True)
        (folder / "traces.jsonl").write_text(json.dumps(trace(id=name)) + "\n")
    only_all = tmp_path / "step_4" / "train" / "all"
    only_all.mkdir(parents=True)
    (only_all / "traces.jsonl").write_text(json.dumps(trace(id="alone")) + "\n")
    report = ReadReport()
    assert [found.id for found in read_traces(tmp_path, report=report)] == ["trained", "alone"]
    assert list(report.skipped_files) == [str(tmp_path / "step_3" / "train" / "all" / "traces.jsonl")]
    assert [found.id for found in read_traces(tmp_path / "step_3" / "train" / "all")] == ["early"]


def test_branches_share_what_they_hold_in_common(tmp_path: Path) -> None:
    """Memory must not grow with branches times their length."""
    items = nodes()
    for _ in range(30):
        items.append(node(3, "user", "again", [8]))
        items.append(node(len(items) - 1, "assistant", "x", [9], [1]))
    traces, _ = read(tmp_path, trace(items))
    assert len(traces) == 30
    assert len({id(found.turns[0].tokens) for found in traces}) == 1


def changed(place: int, **fields: Any) -> list[Record]:
    items = nodes()
    items[place].update(fields)
    return items


REFUSED = [
    ("node whose mask is not as long as its token_ids", trace(changed(1, mask=[True, True]))),
    ("node whose mask is not as long as its token_ids", trace(changed(0, mask=[]))),
    ("node whose mask is no list of booleans", trace(changed(1, mask=[0, 1, 1]))),
    ("node whose mask is no list of booleans", trace(changed(1, mask="TTT"))),
    ("node whose logprobs are not one per sampled token", trace(changed(1, logprobs=[-0.5]))),
    ("node whose logprobs are not one per sampled token", trace(changed(0, logprobs=[-0.5]))),
    ("node whose advantages are not one per sampled token", trace(changed(1, advantages=[1.0] * 3))),
    ("node with a number among its logprobs that is not finite", trace(changed(1, logprobs=[-0.5, float("-inf")]))),
    ("node with a number among its logprobs that is no number", trace(changed(1, logprobs=[-0.5, None]))),
    ("node with a number among its advantages that is not finite", trace(changed(1, advantages=[float("nan"), 1]))),
    ("node whose logprobs are a string", trace(changed(1, logprobs="x"))),
    ("node whose token_ids are no list of whole numbers", trace(changed(1, token_ids=[3, 4, -1]))),
    ("node whose token_ids are no list of whole numbers", trace(changed(1, token_ids=[3, 4, 5.0]))),
    ("node whose token_ids are no list of whole numbers", trace(changed(1, token_ids=[True, 4, 5]))),
    ("node whose token_ids are no list of whole numbers", trace(changed(1, token_ids={"a": 1}))),
    ("node whose parent is no other node", trace(changed(1, parent=9))),
    ("node whose parent is no other node", trace(changed(1, parent=-1))),
    ("node whose parent is no other node", trace(changed(1, parent=1))),
    ("node whose parent is no other node", trace(changed(1, parent="0"))),
    ("nodes whose parents form a circle", trace(changed(0, parent=1))),
    ("nodes whose parents form a circle", trace(changed(1, parent=3))),
    ("message that is null", trace(changed(1, message=None))),
    ("trace whose nodes are no list of objects", trace([1])),  # type: ignore[list-item]
    ("trace without a message", trace([])),
    ("trace whose rewards are a list", trace(rewards=[1])),
    ("reward that is not finite", trace(rewards={"a": {"score": float("inf")}})),
    ("reward that is not finite", trace(rewards={"a": 1e308, "b": 1e308})),
    ("reward that is no number", trace(rewards={"a": {"weight": 1}})),
    ("reward weight that is no number", trace(rewards={"a": {"score": 1, "weight": None}})),
    ("tools that are no list of objects", trace(tools=5)),
    ("branch without a turn of the model of its own", trace(nodes()[:1])),
    ("record that is no verifiers trace", {"nodes": 5}),
    ("record that is no verifiers trace", {"traces": 5}),
    ("trace that is a number", {"task": {}, "traces": [5]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "record"), REFUSED, ids=[f"{n}-{reason[:40]}" for n, (reason, _) in enumerate(REFUSED)]
)
def test_a_trace_that_breaks_the_format_is_left_out_and_counted(
    tmp_path: Path, reason: str, record: Any
) -> None:
    traces, report = read(tmp_path, trace(id="good"), record)
    assert [found.id for found in traces] == ["good"]
    assert report.skipped == {reason: 1}
