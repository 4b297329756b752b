"""OpenAI-style chat files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_trl_host.traces import ReadReport, Trace, read_traces

Record = dict[str, Any]


def read(
    path: Path, *records: Any, format: str = "auto", name: str = "chat.jsonl"
) -> tuple[list[Trace], ReadReport]:
    file = path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    report = ReadReport()
    return list(read_traces(file, format, report=report)), report


def call(name: str = "bash", arguments: Any = '{"command": "x"}', **fields: Any) -> Record:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def chat(*messages: Record, **fields: Any) -> Record:
    return {"messages": list(messages), **fields}


USER = {"role": "user", "content": "go"}
FAILED = {"role": "tool", "tool_call_id": "c1", "content": "bash: x: command not found"}


def asks(*calls: Record) -> Record:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def says(text: str = "ok", **fields: Any) -> Record:
    return {"role": "assistant", "content": text, **fields}


def test_a_conversation_with_everything(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {}}}
    (trace,), report = read(
        tmp_path,
        chat(
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]},
            {**asks(call(id="c1"), call("view", '{"path": ', id="c2")), "reasoning_content": "hm"},
            FAILED,
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "Error: arguments are not valid JSON"}]},
            says("sorry"),
            tools=[tool], reward=1, group_id=7, id="x1",
        ),
    )  # fmt: skip
    assert (trace.id, trace.reward, trace.group_id, trace.format, trace.line) == ("x1", 1.0, "7", "openai", 1)
    assert trace.tools == (tool,)
    assert [turn.role for turn in trace.turns] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert trace.turns[1].content == "look\n[image]"
    assert (trace.turns[2].content, trace.turns[2].thinking) == ("", "hm")
    assert [made.arguments for made in trace.turns[2].tool_calls] == ['{"command": "x"}', '{"path": ']
    assert [turn.tool_name for turn in trace.turns[3:5]] == ["bash", "view"]
    assert trace.sites() == [5]
    assert [(f.turn, f.kind, f.rule) for f in trace.turns[5].failures] == [
        (3, "command_not_found", "text: shell message"), (4, "invalid_json", "text: Error:"),
    ]  # fmt: skip
    assert (report.traces, report.unanswered) == (1, 0)
    assert not report.skipped


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"is_error": True}, ("nonzero_exit", "is_error")),
        ({"isError": True}, ("nonzero_exit", "is_error")),
        ({"status": "error"}, ("nonzero_exit", "is_error")),
        ({"exit_code": 2}, ("nonzero_exit", "exit_code")),
        ({"metadata": {"exit_code": 2}}, ("nonzero_exit", "exit_code")),
        ({"is_error": False}, None),
        ({"status": "success"}, None),
        ({"exit_code": 0}, None),
        (
            {"is_error": "yes", "exit_code": "2", "status": 3, "metadata": 4},
            ("nonzero_exit", "text: exit status"),
        ),
    ],
)
def test_flags_of_a_tool_message(tmp_path: Path, fields: Record, failure: tuple[str, str] | None) -> None:
    message = {"role": "tool", "tool_call_id": "c1", "content": "Exit code 2", **fields}
    (trace,), _ = read(tmp_path, chat(USER, asks(call(id="c1")), message, says()))
    assert [(f.kind, f.rule) for f in trace.turns[3].failures] == ([failure] if failure else [])


def test_results_without_ids_answer_the_open_calls_in_order(tmp_path: Path) -> None:
    (trace,), report = read(
        tmp_path,
        chat(
            USER,
            asks(call("view"), call("bash")),
            {"role": "tool", "name": "bash", "content": "fine"},
            {"role": "tool", "content": "Error: file not found"},
            says(),
        ),
    )
    made = trace.turns[1].tool_calls
    assert len({one.id for one in made}) == 2
    assert [turn.tool_call_id for turn in trace.turns[2:4]] == [made[1].id, made[0].id]
    assert [turn.tool_name for turn in trace.turns[2:4]] == ["bash", "view"]
    assert trace.turns[4].failures[0].call == made[0]
    assert not report.notes


def test_two_results_without_ids_are_not_both_the_first_calls(tmp_path: Path) -> None:
    results = [{"role": "tool", "content": "fine"}, {"role": "tool", "content": "Error: file not found"}]
    (trace,), _ = read(tmp_path, chat(USER, asks(call("view"), call("bash")), *results, says()))
    assert [turn.tool_name for turn in trace.turns[2:4]] == ["view", "bash"]


def test_calls_in_other_spellings(tmp_path: Path) -> None:
    (trace,), _ = read(
        tmp_path,
        chat(
            USER,
            asks({"id": "a", "name": "f", "arguments": {"x": 1}}, json.dumps({"id": "b", "name": "g", "arguments": "{}"})),
            {"role": "assistant", "content": "", "function_call": {"name": "h", "arguments": "{}"}},
            {"role": "function", "name": "h", "content": "Error: bad"},
            says(),
        ),
    )  # fmt: skip
    assert [(c.id, c.name, c.arguments) for c in trace.turns[1].tool_calls] == [
        ("a", "f", '{"x": 1}'),
        ("b", "g", "{}"),
    ]
    assert trace.turns[2].tool_calls[0].name == "h"
    assert (trace.turns[3].role, trace.turns[3].tool_name, trace.sites()) == ("tool", "h", [4])


def test_a_message_of_weight_zero_is_no_turn_of_the_model(tmp_path: Path) -> None:
    (trace,), report = read(tmp_path, chat(USER, asks(call(id="c1")), FAILED, says(weight=0), USER, says()))
    assert [turn.sampled for turn in trace.turns if turn.role == "assistant"] == [True, False, True]
    assert trace.sites() == []
    assert report.unanswered == 1


def test_an_error_at_the_end_is_unanswered(tmp_path: Path) -> None:
    (trace,), report = read(tmp_path, chat(USER, asks(call(id="c1")), FAILED))
    assert trace.sites() == []
    assert report.unanswered == 1


def test_a_trace_without_an_id_is_named_by_its_place(tmp_path: Path) -> None:
    traces, _ = read(tmp_path, chat(USER, says()), chat(USER, says()))
    assert [trace.id.rsplit(":", 1)[1] for trace in traces] == ["1", "2"]
    assert [trace.line for trace in traces] == [1, 2]


def test_a_bare_list_of_messages_is_a_trace(tmp_path: Path) -> None:
    traces, _ = read(tmp_path, [USER, says()], [USER, says("two")])
    assert [trace.turns[1].content for trace in traces] == ["ok", "two"]


@pytest.mark.parametrize("text", [
    json.dumps([chat(USER, says("ä"), id=1), chat(USER, says("b"), id=2)]),
    json.dumps([chat(USER, says("ä"), id=1), chat(USER, says("b"), id=2)], indent=2, ensure_ascii=False),
    "[\n" + ",\n".join(json.dumps(chat(USER, says(text), id=n)) for n, text in enumerate("äb", 1)) + "\n]\n",
    "\n".join(json.dumps(chat(USER, says(text), id=n), indent=1) for n, text in enumerate("äb", 1)),
])  # fmt: skip
@pytest.mark.parametrize("name", ["chat.json", "chat.jsonl"])
def test_one_json_document_is_read_like_lines(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert [(trace.id, trace.turns[1].content) for trace in read_traces(path)] == [("1", "ä"), ("2", "b")]


def test_a_document_larger_than_a_chunk_keeps_its_characters(tmp_path: Path) -> None:
    long = "aé漢😀" * 40_000
    path = tmp_path / "chat.json"
    path.write_text(
        json.dumps([chat(USER, says(long), id=n) for n in range(3)], indent=1, ensure_ascii=False),
        encoding="utf-8",
    )
    assert [trace.turns[1].content == long for trace in read_traces(path)] == [True] * 3


def test_a_document_that_breaks_off_gives_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    whole = json.dumps([chat(USER, says(), id=n) for n in range(3)], indent=1)
    path.write_text(whole[:-40])
    report = ReadReport()
    assert [trace.id for trace in read_traces(path, report=report)] == ["0", "1"]
    assert report.bad_lines == {str(path): [3]}


def test_tools_in_other_spellings(tmp_path: Path) -> None:
    bare = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": bare}
    for tools in (
        [bare],
        json.dumps([whole]),
        [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    ):
        (trace,), _ = read(tmp_path, chat(USER, says(), tools=tools))
        assert trace.tools == (whole,)
    (trace,), _ = read(tmp_path, chat(USER, says(), tools=None))
    assert trace.tools == ()


def test_turns_become_messages_again(tmp_path: Path) -> None:
    messages = [
        USER,
        {**asks(call(id="c1")), "content": "", "reasoning_content": "hm"},
        {**FAILED, "name": "bash"},
        says(),
    ]
    (trace,), _ = read(tmp_path, chat(*messages))
    assert [turn.as_message() for turn in trace.turns] == messages


REFUSED = [
    ("message whose role is 'narrator'", chat({"role": "narrator", "content": "x"}, says())),
    ("message whose role is null", chat({"content": "x"}, says())),
    ("message that is a string", chat("hello", says())),  # type: ignore[arg-type]
    ("user message whose content is a number", chat({"role": "user", "content": 3}, says())),
    ("tool_calls that are an object", chat(USER, {**says(), "tool_calls": {"id": 1}})),
    ("tool_calls that are a string", chat(USER, {**says(), "tool_calls": "f()"})),
    ("tool call without a name", chat(USER, asks({"id": "c", "function": {"arguments": "{}"}}))),
    ("tool call that is a number", chat(USER, {**says(), "tool_calls": [4]})),
    ("tool call that is no JSON", chat(USER, {**says(), "tool_calls": ["f()"]})),
    ("tools that are no list of objects", chat(USER, says(), tools={"f": 1})),
    ("tools that are no JSON", chat(USER, says(), tools="[f]")),
    ("reward that is no number", chat(USER, says(), reward="high")),
    ("reward that is no number", chat(USER, says(), reward=[1])),
    ("reward that is not finite", chat(USER, says(), reward=float("nan"))),
    ("reward that is not finite", chat(USER, says(), reward=float("-inf"))),
    ("reward that is not finite", chat(USER, says(), reward=10**400)),
    ("trace without a turn of the model", chat(USER)),
    ("trace without a turn of the model", chat()),
    ("tool_use block where only text belongs", chat(USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}]})),
    ("record that is no openai trace", {"text": "hello"}),
    ("record that is no openai trace", {"messages": "hello"}),
    ("record that is no openai trace", 7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "record"), REFUSED, ids=[f"{n}-{reason[:40]}" for n, (reason, _) in enumerate(REFUSED)]
)
def test_a_trace_that_breaks_the_format_is_left_out_and_counted(
    tmp_path: Path, reason: str, record: Any
) -> None:
    traces, report = read(tmp_path, chat(USER, says("good")), record, chat(USER, says("good too")))
    assert [trace.turns[-1].content for trace in traces] == ["good", "good too"]
    assert report.skipped == {reason: 1}


def test_content_parts_that_are_no_text_are_counted(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "input_audio", "input_audio": {}}, 7, "and"]
    (trace,), report = read(tmp_path, chat({"role": "user", "content": parts}, says()))
    assert trace.turns[0].content == "see\nand"
    assert report.skipped == {"content part of type 'input_audio'": 1, "content part that is a number": 1}
