"""Claude Code sessions: which records become which turns of which trace."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from composer_trl_host.traces import ReadReport, Trace, read_traces

Record = dict[str, Any]
Read = Callable[..., tuple[list[Trace], ReadReport]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reads(
        *records: Record | str, format: str = "claude-code", name: str = "file.jsonl"
    ) -> tuple[list[Trace], ReadReport]:
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        report = ReadReport()
        return list(read_traces(path, format, report=report)), report

    return reads


def record(kind: str, uuid: str, parent: str | None, content: Any, **fields: Any) -> Record:
    message = {"role": kind, "content": content}
    if "id" in fields:
        message["id"] = fields.pop("id")
    if "model" in fields:
        message["model"] = fields.pop("model")
    base = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "S", "isSidechain": False}
    return {**base, "message": message, **fields}


def user(uuid: str, parent: str | None, content: Any = "go on", **fields: Any) -> Record:
    return record("user", uuid, parent, content, **fields)


def says(uuid: str, parent: str | None, text: str, **fields: Any) -> Record:
    return record(
        "assistant", uuid, parent, [{"type": "text", "text": text}], **{"id": f"m-{uuid}", **fields}
    )


def calls(uuid: str, parent: str | None, *ids: str, name: str = "Bash", **fields: Any) -> Record:
    blocks = [{"type": "tool_use", "id": call, "name": name, "input": {"command": call}} for call in ids]
    return record("assistant", uuid, parent, blocks, **{"id": f"m-{uuid}", **fields})


def result(
    uuid: str, parent: str | None, call: str, content: Any = "fine", error: bool | None = None, **fields: Any
) -> Record:
    block = {"type": "tool_result", "tool_use_id": call, "content": content}
    if error is not None:
        block["is_error"] = error
    return user(uuid, parent, [block], **fields)


def outline(trace: Trace) -> list[str]:
    """Roles and contents, short."""
    return [f"{turn.role}: {turn.content}" for turn in trace.turns]


def kinds(trace: Trace) -> dict[int, list[str]]:
    return {
        at: [failure.kind for failure in turn.failures]
        for at, turn in enumerate(trace.turns)
        if turn.failures
    }


def test_a_message_spread_over_records_is_one_turn(read: Read) -> None:
    (trace,), report = read(
        user("u", None, "hello"),
        record("assistant", "a1", "u", [{"type": "thinking", "thinking": "hm", "signature": "x"}], id="m"),
        record("assistant", "a2", "a1", [{"type": "text", "text": "I look"}], id="m"),
        record(
            "assistant",
            "a3",
            "a2",
            [{"type": "tool_use", "id": "t1", "name": "Read", "input": {"p": "é"}}],
            id="m",
        ),
        record(
            "assistant", "a4", "a3", [{"type": "tool_use", "id": "t2", "name": "Bash", "input": {}}], id="m"
        ),
        result("r1", "a4", "t1"),
        result("r2", "r1", "t2"),
        says("b", "r2", "done"),
    )
    assert outline(trace) == [
        "user: hello",
        "assistant: I look",
        "tool: fine",
        "tool: fine",
        "assistant: done",
    ]
    turn = trace.turns[1]
    assert turn.thinking == "hm"
    assert [(call.id, call.name, call.arguments) for call in turn.tool_calls] == [
        ("t1", "Read", '{"p": "é"}'),
        ("t2", "Bash", "{}"),
    ]
    assert [(turn.tool_call_id, turn.tool_name) for turn in trace.turns[2:4]] == [
        ("t1", "Read"),
        ("t2", "Bash"),
    ]
    assert (trace.id, trace.format, trace.line) == ("S", "claude-code", 1)
    assert (report.files, report.lines, report.traces) == (1, 8, 1)
    assert not report.skipped


def test_records_that_repeat_a_message_add_nothing_twice(read: Read) -> None:
    (trace,), _ = read(
        user("u", None),
        record("assistant", "a1", "u", [{"type": "text", "text": "one"}], id="m"),
        record(
            "assistant",
            "a2",
            "a1",
            [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            id="m",
        ),
    )
    assert trace.turns[1].content == "one\n\ntwo"


def test_a_message_id_used_again_after_a_prompt_is_another_turn(read: Read) -> None:
    (trace,), _ = read(
        user("u", None), says("a", "u", "one", id="m"), user("v", "a"), says("b", "v", "two", id="m")
    )
    assert outline(trace) == ["user: go on", "assistant: one", "user: go on", "assistant: two"]


def test_a_result_written_between_the_parts_of_a_message_follows_the_whole_turn(read: Read) -> None:
    (trace,), _ = read(
        user("u", None),
        calls("a1", "u", "t1", id="m"),
        result("r1", "a1", "t1", "first"),
        user("k", "r1", "skill text", isMeta=True),
        calls("a2", "k", "t2", id="m"),
        result("r2", "a2", "t2", "second"),
        says("b", "r2", "done"),
    )
    assert [call.id for call in trace.turns[1].tool_calls] == ["t1", "t2"]
    assert outline(trace)[2:] == ["tool: first", "user: skill text", "tool: second", "assistant: done"]


def test_one_failure_among_parallel_calls_makes_the_next_turn_a_site(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        calls("a", "u", "t1", "t2", "t3"),
        user("r", "a", [
            {"type": "tool_result", "tool_use_id": "t1", "content": "File does not exist.", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2", "content": "fine", "is_error": False},
            {"type": "tool_result", "tool_use_id": "t3", "content": "Exit code 127\nx: command not found", "is_error": True},
        ]),
        says("b", "r", "sorry"),
        says("c", "b", "and on"),
    )  # fmt: skip
    assert kinds(trace) == {5: ["missing_file", "command_not_found"]}
    assert trace.sites() == [5]
    assert trace.turns[5].tool_error == "missing_file"
    first = trace.turns[5].failures[0]
    assert (first.turn, first.rule, first.result) == (2, "is_error", "File does not exist.")
    assert first.call is not None
    assert first.call.id == "t1"
    assert report.unanswered == 0


def test_consecutive_errors_are_a_site_each(read: Read) -> None:
    (trace,), _ = read(
        user("u", None),
        calls("a", "u", "t1"),
        result("r", "a", "t1", "Exit code 1", True),
        calls("b", "r", "t2"),
        result("s", "b", "t2", "Exit code 2", True),
        says("c", "s", "ok"),
    )
    assert trace.sites() == [3, 5]


def test_an_error_without_an_answer_is_no_site_and_is_counted(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        calls("a", "u", "t1"),
        result("r", "a", "t1", "Exit code 1", True),
        user("v", "r", "stop"),
    )
    assert trace.sites() == []
    assert report.unanswered == 1


def test_a_refusal_is_no_site_unless_asked_for(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        calls("a", "u", "t1"),
        result("r", "a", "t1", "No.", True, toolUseResult="User rejected tool use"),
        user("v", "r", "[Request interrupted by user for tool use]"),
        says("b", "v", "I stop"),
        calls("c", "b", "t2"),
        result(
            "s",
            "c",
            "t2",
            "The user doesn't want to proceed with this tool use. The tool use was rejected",
            True,
        ),
        user("w", "s", "no"),
    )
    assert trace.sites() == []
    assert trace.sites(include_rejected=True) == [4]
    assert [(f.kind, f.rule) for f in trace.turns[4].failures] == [("rejected", "toolUseResult")]
    assert trace.turns[4].tool_error is None
    assert report.unanswered == 0


@pytest.mark.parametrize(
    ("extra", "flag", "text", "kind", "rule"),
    [
        ("Error: File not found", None, "File not found", "missing_file", "is_error"),
        ({"stdout": "", "interrupted": True}, None, "partial", "rejected", "toolUseResult"),
        ({"stdout": "", "interrupted": True}, True, "Command timed out after 2m", "timeout", "is_error"),
        ({"stdout": "", "exitCode": 3}, None, "partial", "nonzero_exit", "exit_code"),
        ({"stdout": "Error:", "exitCode": 0}, None, "Error: quoted", None, None),
        ({"code": 200, "codeText": "OK"}, None, "a page", None, None),
        ({"interrupted": False}, None, "<tool_use_error>File does not exist.</tool_use_error>", "missing_file", "text: <tool_use_error>"),
        ({"interrupted": True}, False, "partial", None, None),
        ({"exitCode": 1}, False, "no matches", None, None),
        ([1, 2], None, "partial", None, None),
        (None, None, "partial", None, None),
    ],
)  # fmt: skip
def test_what_the_record_says_of_its_result(
    read: Read, extra: Any, flag: bool | None, text: str, kind: str | None, rule: str | None
) -> None:
    (trace,), _ = read(
        user("u", None),
        calls("a", "u", "t"),
        result("r", "a", "t", text, flag, toolUseResult=extra),
        says("b", "r", "x"),
    )
    found = trace.turns[3].failures
    assert [(failure.kind, failure.rule) for failure in found] == ([] if kind is None else [(kind, rule)])


def test_what_the_record_says_is_no_ones_with_several_results(read: Read) -> None:
    blocks = [{"type": "tool_result", "tool_use_id": call, "content": "x"} for call in ("t1", "t2")]
    (trace,), _ = read(
        user("u", None),
        calls("a", "u", "t1", "t2"),
        user("r", "a", blocks, toolUseResult={"exitCode": 1}),
        says("b", "r", "x"),
    )
    assert trace.sites() == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([{"type": "image", "source": {"type": "base64", "data": "AAAA"}}], "[image]"),
        ([{"type": "text", "text": "see"}, {"type": "image", "source": {}}], "see\n[image]"),
        ([{"type": "tool_reference", "tool_name": "Glob"}], "Glob"),
        ([], ""),
        (None, ""),
    ],
)
def test_a_result_may_be_text_blocks_or_an_image(read: Read, content: Any, text: str) -> None:
    (trace,), report = read(
        user("u", None), calls("a", "u", "t"), result("r", "a", "t", content), says("b", "r", "x")
    )
    assert trace.turns[2].content == text
    assert not report.skipped


@pytest.mark.parametrize(
    ("extra", "text", "kind"),
    [("Error: No such tool available: x", "Error: No such tool available: x", "unknown_tool"), ({"stdout": "a", "stderr": "b"}, "a\nb", None), (None, "", None)],
)  # fmt: skip
def test_a_result_without_content_takes_the_records_own(
    read: Read, extra: Any, text: str, kind: str | None
) -> None:
    block = {"type": "tool_result", "tool_use_id": "t"}
    (trace,), _ = read(
        user("u", None),
        calls("a", "u", "t"),
        user("r", "a", [block], toolUseResult=extra),
        says("b", "r", "x"),
    )
    assert trace.turns[2].content == text
    assert trace.turns[3].tool_error == kind


def test_text_beside_results_is_a_turn_of_the_user(read: Read) -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "t", "content": "x"},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "more"},
    ]
    (trace,), _ = read(user("u", None), calls("a", "u", "t"), user("r", "a", blocks), says("b", "r", "y"))
    assert outline(trace)[2:] == ["tool: x", "user: and\nmore", "assistant: y"]


def test_an_abandoned_branch_is_left_out_and_counted(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        says("a", "u", "one"),
        user("v", "a", "wrong way"),
        calls("b", "v", "t1"),
        result("r", "b", "t1", "Exit code 1", True),
        says("c", "r", "lost"),
        user("w", "a", "right way"),
        says("d", "w", "two"),
    )
    assert outline(trace) == ["user: go on", "assistant: one", "user: right way", "assistant: two"]
    assert report.skipped["abandoned branch"] == 1
    assert report.unanswered == 0


def test_a_first_prompt_written_anew_abandons_the_old_one(read: Read) -> None:
    (trace,), report = read(
        user("u", None, "old"), says("a", "u", "one"), user("v", None, "new"), says("b", "v", "two")
    )
    assert outline(trace) == ["user: new", "assistant: two"]
    assert report.skipped["abandoned branch"] == 1


def test_a_resampled_answer_replaces_the_first(read: Read) -> None:
    (trace,), report = read(user("u", None), says("a", "u", "first"), says("b", "u", "second"))
    assert outline(trace) == ["user: go on", "assistant: second"]
    assert report.skipped["abandoned branch"] == 1


@pytest.mark.parametrize("last", ["r1", "r2", "r3"])
def test_parallel_results_beside_the_path_are_not_lost(read: Read, last: str) -> None:
    """Each result hangs on the record of its own call, and what follows continues from one of them."""
    (trace,), report = read(
        user("u", None),
        calls("a1", "u", "t1", id="m"),
        calls("a2", "a1", "t2", id="m"),
        calls("a3", "a2", "t3", id="m"),
        result("r2", "a2", "t2", "second"),
        result("r3", "a3", "t3", "third"),
        result("r1", "a1", "t1", "File does not exist.", True),
        says("b", last, "next"),
    )
    assert [call.id for call in trace.turns[1].tool_calls] == ["t1", "t2", "t3"]
    assert sorted(outline(trace)[2:5]) == ["tool: File does not exist.", "tool: second", "tool: third"]
    assert outline(trace)[5] == "assistant: next"
    assert kinds(trace) == {5: ["missing_file"]}
    assert not report.skipped


def test_a_result_given_again_on_an_abandoned_branch_is_not_taken(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        calls("a", "u", "t"),
        result("r", "a", "t", "old"),
        result("s", "a", "t", "new"),
        says("b", "s", "x"),
    )
    assert outline(trace)[2:] == ["tool: new", "assistant: x"]
    assert report.skipped["abandoned branch"] == 1


def test_the_path_goes_through_records_that_are_no_messages(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        {"type": "progress", "uuid": "p", "parentUuid": "u", "sessionId": "S", "data": {}},
        {"type": "system", "subtype": "informational", "uuid": "q", "parentUuid": "p", "sessionId": "S"},
        {"type": "hologram", "uuid": "h", "parentUuid": "q", "sessionId": "S"},
        says("a", "h", "one"),
        {"type": "system", "subtype": "turn_duration", "uuid": "d", "parentUuid": "a", "sessionId": "S"},
    )
    assert outline(trace) == ["user: go on", "assistant: one"]
    assert report.skipped == {
        "record of type 'progress'": 1,
        "record of type 'system'": 2,
        "record of unknown type 'hologram'": 1,
    }


def test_side_chains_are_traces_of_their_own(read: Read) -> None:
    side = {"isSidechain": True, "agentId": "A7"}
    traces, report = read(
        user("u", None, "main"),
        calls("a", "u", "t", name="Task"),
        user("s1", None, "do this", **side),
        calls("s2", "s1", "x", **side),
        result("s3", "s2", "x", "Exit code 1", True, **side),
        {"type": "progress", "uuid": "p", "parentUuid": "a", "sessionId": "S"},
        says("s4", "s3", "side done", **side),
        result("r", "a", "t", "side done"),
        says("b", "r", "main done"),
    )
    assert [trace.id for trace in traces] == ["S", "S/A7"]
    assert outline(traces[0]) == ["user: main", "assistant: ", "tool: side done", "assistant: main done"]
    assert outline(traces[1])[::3] == ["user: do this", "assistant: side done"]
    assert [trace.sites() for trace in traces] == [[], [3]]
    assert [trace.line for trace in traces] == [1, 3]
    assert report.skipped == {"record of type 'progress'": 1}


def test_side_chains_without_an_agent_are_told_apart_by_their_roots(read: Read) -> None:
    side = {"isSidechain": True}
    traces, _ = read(
        user("u", None, "main"),
        user("s", None, "first", **side),
        says("s1", "s", "one", **side),
        user("t", None, "second", **side),
        says("t1", "t", "two", **side),
        says("s2", "s1", "one more", **side),
        says("a", "u", "done"),
    )
    assert [outline(trace) for trace in traces] == [
        ["user: main", "assistant: done"],
        ["user: first", "assistant: one", "assistant: one more"],
        ["user: second", "assistant: two"],
    ]
    assert len({trace.id for trace in traces}) == 3


def test_a_side_chain_may_hang_on_the_main_one(read: Read) -> None:
    side = {"isSidechain": True, "agentId": "A"}
    traces, report = read(
        user("u", None, "main"),
        says("a", "u", "x"),
        user("s", "a", "do", **side),
        says("s1", "s", "y", **side),
        says("b", "a", "z"),
    )
    assert [outline(trace) for trace in traces] == [
        ["user: main", "assistant: x", "assistant: z"],
        ["user: do", "assistant: y"],
    ]
    assert not report.skipped


BOUNDARY = {
    "type": "system",
    "subtype": "compact_boundary",
    "uuid": "c",
    "parentUuid": None,
    "sessionId": "S",
}


@pytest.mark.parametrize(
    "extra", [{"logicalParentUuid": "a"}, {"logicalParentUuid": "gone"}, {}, {"parentUuid": "a"}]
)
def test_what_follows_a_compaction_is_a_trace_that_begins_with_the_summary(read: Read, extra: Record) -> None:
    traces, report = read(
        user("u", None, "long ago"),
        says("a", "u", "one"),
        {**BOUNDARY, **extra},
        user(
            "s", "c", "This session is being continued", isCompactSummary=True, isVisibleInTranscriptOnly=True
        ),
        user("v", "s", "now"),
        says("b", "v", "two"),
    )
    assert [outline(trace) for trace in traces] == [
        ["user: long ago", "assistant: one"],
        ["user: This session is being continued", "user: now", "assistant: two"],
    ]
    assert [trace.id for trace in traces] == ["S", "S#2"]
    assert report.skipped["abandoned branch"] == 0


def test_a_summary_message_without_a_boundary_starts_a_trace(read: Read) -> None:
    traces, _ = read(
        user("u", None, "old"),
        says("a", "u", "one"),
        user("s", None, "summary", isCompactSummary=True),
        says("b", "s", "two"),
    )
    assert [outline(trace)[0] for trace in traces] == ["user: old", "user: summary"]


def test_an_error_is_not_answered_across_a_compaction(read: Read) -> None:
    traces, report = read(
        user("u", None),
        calls("a", "u", "t"),
        result("r", "a", "t", "Exit code 1", True),
        {**BOUNDARY, "logicalParentUuid": "r"},
        user("s", "c", "summary", isCompactSummary=True),
        says("b", "s", "two"),
    )
    assert [trace.sites() for trace in traces] == [[], []]
    assert report.unanswered == 1


@pytest.mark.parametrize("extra", [{"logicalParentUuid": "a"}, {"parentUuid": "a"}])
def test_a_branch_abandoned_before_a_compaction_stays_out(read: Read, extra: Record) -> None:
    traces, report = read(
        user("u", None),
        says("a", "u", "kept"),
        says("x", "u", "dropped"),
        {**BOUNDARY, **extra},
        user("s", "c", "summary", isCompactSummary=True),
        says("b", "s", "two"),
    )
    assert outline(traces[0]) == ["user: go on", "assistant: kept"]
    assert report.skipped["abandoned branch"] == 1


def test_queued_and_meta_messages(read: Read) -> None:
    (trace,), report = read(
        {"type": "queue-operation", "operation": "enqueue", "content": "stop", "sessionId": "S"},
        user("k", None, "Caveat: generated by the user", isMeta=True),
        user("u", "k", "hello"),
        user("o", "u", "only for the eye", isVisibleInTranscriptOnly=True),
        says("a", "o", "one"),
        {"type": "attachment", "uuid": "q", "parentUuid": "a", "sessionId": "S", "attachment": {"type": "queued_command", "prompt": "also this"}},
        {"type": "attachment", "uuid": "p", "parentUuid": "q", "sessionId": "S", "attachment": {"type": "todo", "content": []}},
        says("b", "p", "two"),
    )  # fmt: skip
    assert outline(trace) == [
        "user: Caveat: generated by the user", "user: hello", "assistant: one", "user: also this", "assistant: two",
    ]  # fmt: skip
    assert report.skipped == {
        "record of type 'queue-operation'": 1,
        "record of type 'attachment'": 1,
        "message that the model was not shown": 1,
    }


@pytest.mark.parametrize("mark", [{"isApiErrorMessage": True}, {"model": "<synthetic>"}])
def test_what_the_program_wrote_in_the_models_name_answers_nothing(read: Read, mark: Record) -> None:
    (trace,), report = read(
        user("u", None),
        calls("a", "u", "t"),
        result("r", "a", "t", "Exit code 1", True),
        says("e", "r", "API Error: 529", **mark),
        user("v", "e", "continue"),
        says("b", "v", "I try again"),
    )
    assert "API Error: 529" not in " ".join(outline(trace))
    assert trace.sites() == [4]
    assert report.skipped == {"assistant message that no model wrote": 1}


def test_a_last_line_cut_off_is_noted_and_the_rest_is_read(read: Read) -> None:
    whole = json.dumps(says("b", "a", "lost"))
    (trace,), report = read(user("u", None), says("a", "u", "one"), whole[: len(whole) // 2])
    assert outline(trace) == ["user: go on", "assistant: one"]
    assert list(report.bad_lines.values()) == [[3]]


def test_a_broken_line_in_the_middle_does_not_lose_what_came_before(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        says("a", "u", "one"),
        '{"type": "user", "sessionId": "S", ',
        says("b", "gone", "two"),
    )
    assert outline(trace) == ["user: go on", "assistant: one", "assistant: two"]
    assert report.skipped == {"record whose parent is missing, joined to the one before": 1}


def test_records_that_all_lack_a_parent_are_read_in_order(read: Read) -> None:
    (trace,), _ = read(
        user("u", None, "one"), says("a", None, "two"), user("v", None, "three"), says("b", None, "four")
    )
    assert outline(trace) == ["user: one", "assistant: two", "user: three", "assistant: four"]


def test_an_answer_or_a_result_without_a_parent_stands_after_the_one_before(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        calls("a", "u", "t"),
        result("r", None, "t", "Exit code 1", True),
        says("b", None, "x"),
        user("v", "b"),
    )
    assert trace.sites() == [3]
    assert report.skipped == {"record whose parent is missing, joined to the one before": 2}


def test_interleaved_sessions_are_told_apart(read: Read) -> None:
    one = [
        user("u", None, "first"),
        calls("a", "u", "t"),
        result("r", "a", "t", "Exit code 1", True),
        says("b", "r", "x"),
    ]
    two = [{**item, "sessionId": "T", "uuid": f"2{item['uuid']}", "parentUuid": item["parentUuid"] and f"2{item['parentUuid']}"} for item in one]  # fmt: skip
    traces, report = read(*[item for pair in zip(one, two, strict=True) for item in pair])
    assert [trace.id for trace in traces] == ["S", "T"]
    assert [trace.sites() for trace in traces] == [[3], [3]]
    assert [trace.line for trace in traces] == [1, 2]
    assert not report.skipped


def test_bad_lines_of_interleaved_sessions_are_numbered_in_order(read: Read) -> None:
    one, two = (
        [user("u", None), says("a", "u", "x")],
        [user("v", None, sessionId="T"), says("b", "v", "y", sessionId="T")],
    )
    traces, report = read(
        one[0], two[0], '{"sessionId": "T", "cut', '{"sessionId": "S", "cut', one[1], two[1]
    )
    assert [trace.id for trace in traces] == ["S", "T"]
    assert list(report.bad_lines.values()) == [[3, 4]]


def test_a_session_that_continues_another_in_the_same_file_is_one_with_it(read: Read) -> None:
    other = {"sessionId": "T"}
    traces, report = read(
        user("u", None, "first"),
        says("a", "u", "one"),
        user("v", "a", "second", **other),
        says("b", "v", "two", **other),
    )
    assert [outline(trace) for trace in traces] == [
        ["user: first", "assistant: one", "user: second", "assistant: two"]
    ]
    assert traces[0].id == "T"
    assert not report.skipped


def test_a_session_named_inside_a_record_is_not_the_records_own(read: Read) -> None:
    # Many names: a wrong pick among two is right half of the time.
    others = [{"toolUseResult": {"sessionId": f"OTHER{n}"}, **user(f"v{n}", None, f"{n}")} for n in range(11)]
    for item in others:
        del item["parentUuid"]
    traces, _ = read(user("u", None, "first"), *others, says("b", "v10", "two"))
    assert [len(trace.turns) for trace in traces] == [13]


def test_traces_of_a_session_come_in_the_order_of_their_first_lines(read: Read) -> None:
    side = {"isSidechain": True, "agentId": "A"}
    traces, _ = read(
        user("u", None), says("a", "u", "one"), user("x", None, "do", **side), says("y", "x", "sub", **side),
        {**BOUNDARY, "logicalParentUuid": "a"}, user("s", "c", "summary", isCompactSummary=True), says("b", "s", "two"),
    )  # fmt: skip
    assert [trace.id for trace in traces] == ["S", "S/A", "S#2"]


def test_a_parent_in_a_side_chain_gives_way_to_the_record_before(read: Read) -> None:
    side = {"isSidechain": True, "agentId": "A"}
    traces, report = read(
        user("u", None, "main"), says("a", "u", "one"), user("x", None, "do", **side), says("y", "x", "sub", **side), user("v", "y"), says("b", "v", "two")
    )  # fmt: skip
    assert outline(traces[0]) == ["user: main", "assistant: one", "user: go on", "assistant: two"]
    assert report.skipped == {"record whose parent is missing, joined to the one before": 1}


def test_records_without_uuids_or_parents_are_read_in_order(read: Read) -> None:
    """The stream-json output of a headless run."""

    def stream(kind: str, content: Any, **fields: Any) -> Record:
        return {"type": kind, "message": {"role": kind, "content": content}, "session_id": "Z", **fields}

    traces, _ = read(
        {"type": "system", "subtype": "init", "session_id": "Z", "uuid": "i"},
        stream("user", "hello"),
        stream(
            "assistant",
            [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}],
            parent_tool_use_id=None,
        ),
        stream("user", "go", parent_tool_use_id="T1"),
        stream("assistant", "sub", parent_tool_use_id="T1"),
        stream(
            "user", [{"type": "tool_result", "tool_use_id": "t", "content": "Exit code 1", "is_error": True}]
        ),
        stream("assistant", "ok"),
        {"type": "result", "subtype": "success", "session_id": "Z"},
        format="auto",
    )
    assert [outline(trace) for trace in traces] == [
        ["user: hello", "assistant: ", "tool: Exit code 1", "assistant: ok"], ["user: go", "assistant: sub"],
    ]  # fmt: skip
    assert traces[0].sites() == [3]


def test_a_uuid_seen_before_is_counted_and_its_record_left_out(read: Read) -> None:
    (trace,), report = read(
        user("u", None), says("a", "u", "one"), user("u", "a", "again"), says("b", "a", "two")
    )
    assert outline(trace) == ["user: go on", "assistant: one", "assistant: two"]
    assert report.skipped == {"record whose uuid an earlier one has": 1}


def test_a_call_id_used_twice_pairs_with_the_call_before(read: Read) -> None:
    (trace,), _ = read(
        user("u", None),
        calls("a", "u", "t", name="Read"),
        result("r", "a", "t", "Exit code 1", True),
        calls("b", "r", "t", name="Bash"),
        result("s", "b", "t", "Exit code 1", True),
        says("c", "s", "x"),
    )
    assert [trace.turns[at].tool_name for at in (2, 4)] == ["Read", "Bash"]
    assert trace.sites() == [3, 5]


def test_a_result_without_a_call_is_kept_and_noted(read: Read) -> None:
    (trace,), report = read(
        user("u", None),
        says("a", "u", "x"),
        result("r", "a", "ghost", "Exit code 1", True),
        says("b", "r", "y"),
    )
    assert trace.sites() == [3]
    assert trace.turns[3].failures[0].call is None
    assert report.notes == {"tool result without a call": 1}


def test_a_circle_of_parents_is_cut(read: Read) -> None:
    (trace,), report = read(user("u", "b"), says("a", "u", "one"), says("b", "a", "two"))
    assert sorted(outline(trace)) == ["assistant: one", "assistant: two", "user: go on"]
    assert report.skipped == {"circle in parentUuid, cut": 1}


def test_a_record_that_is_its_own_parent_stands_after_the_one_before(read: Read) -> None:
    (trace,), _ = read(user("u", None), says("a", "a", "one"), says("b", "a", "two"))
    assert "assistant: two" in outline(trace)


def test_a_child_written_before_its_parent_is_still_on_the_path(read: Read) -> None:
    (trace,), _ = read(
        user("u", None), says("b", "r", "answer"), calls("a", "u", "t"), result("r", "a", "t", "out")
    )
    assert outline(trace) == ["user: go on", "assistant: ", "tool: out", "assistant: answer"]


@pytest.mark.parametrize("message", [None, [], 7, "text", {}, {"content": 5}, {"content": {"a": 1}}])
def test_a_record_with_no_message_is_counted_and_the_path_goes_on(read: Read, message: Any) -> None:
    broken = {**says("x", "u", "?"), "message": message}
    (trace,), report = read(user("u", None), broken, says("a", "x", "one"))
    assert outline(trace) == ["user: go on", "assistant: one"]
    assert sum(report.skipped.values()) == 1


def write_sessions(path: Path, sessions: int, interleaved: bool = False) -> None:
    """About 100 kB a session, of which half is ``toolUseResult``."""
    lines: list[list[str]] = []
    text = random.Random(0).choices("abcdef \n", k=4000)
    body = "".join(text)
    for number in range(sessions):
        items: list[Record] = [user("u", None)]
        parent = "u"
        for step in range(12):
            items.append(calls(f"a{step}", parent, f"t{step}"))
            parent = f"r{step}"
            items.append(
                result(parent, f"a{step}", f"t{step}", body, step % 3 == 0, toolUseResult={"stdout": body})
            )
        items.append(says("z", parent, "done"))
        lines.append([json.dumps({**item, "sessionId": f"S{number}"}) for item in items])
    with path.open("w", encoding="utf-8") as handle:
        order: Sequence[Sequence[str]] = list(zip(*lines, strict=True)) if interleaved else lines
        for group in order:
            handle.write("\n".join(group) + "\n")


@pytest.mark.parametrize("interleaved", [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, interleaved: bool) -> None:
    peaks = []
    for sessions in (5, 5, 60):
        path = tmp_path / f"{sessions}.jsonl"
        write_sessions(path, sessions, interleaved)
        tracemalloc.start()
        count = sum(len(trace.sites()) for trace in read_traces(path))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == 4 * sessions
    # One session is 0.1 MB and the larger file 6 MB. The first reading pays for imports and patterns.
    assert peaks[2] < peaks[1] + 300_000


def test_traces_come_one_at_a_time(tmp_path: Path) -> None:
    write_sessions(tmp_path / "x.jsonl", 3)
    report = ReadReport()
    stream = read_traces(tmp_path / "x.jsonl", report=report)
    assert next(stream).id == "S0"
    assert report.traces == 1
