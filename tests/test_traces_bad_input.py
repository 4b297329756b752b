"""Files that are not what they should be: one clear line, or a count, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_trl_host.traces import FORMATS, ComposerError, ReadReport, TaskError, Trace, read_traces
from composer_trl_host.traces import files as trace_files

CHAT = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok"}]}
SESSION: list[dict[str, Any]] = [
    {"type": "summary", "summary": "s", "leafUuid": "b"},
    {"type": "user", "uuid": "u", "parentUuid": None, "sessionId": "S", "isSidechain": False, "isMeta": False,
     "message": {"role": "user", "content": "go"}},
    {"type": "assistant", "uuid": "a", "parentUuid": "u", "sessionId": "S", "isSidechain": False,
     "message": {"role": "assistant", "id": "m", "model": "x", "content": [
         {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "look"},
         {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "x"}}]}},
    {"type": "user", "uuid": "r", "parentUuid": "a", "sessionId": "S", "toolUseResult": {"exitCode": 1, "interrupted": False},
     "message": {"role": "user", "content": [
         {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "Exit code 1"}], "is_error": True}]}},
    {"type": "attachment", "uuid": "q", "parentUuid": "r", "sessionId": "S", "attachment": {"type": "queued_command", "prompt": "and"}},
    {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "logicalParentUuid": "q", "sessionId": "S"},
    {"type": "user", "uuid": "s", "parentUuid": "c", "sessionId": "S", "isCompactSummary": True, "message": {"role": "user", "content": "sum"}},
    {"type": "assistant", "uuid": "b", "parentUuid": "s", "sessionId": "S", "message": {"role": "assistant", "id": "n", "content": "ok"}},
    {"type": "user", "uuid": "x", "parentUuid": None, "sessionId": "S", "isSidechain": True, "agentId": "A", "message": {"content": "do"}},
    {"type": "assistant", "uuid": "y", "parentUuid": "x", "sessionId": "S", "isSidechain": True, "agentId": "A", "message": {"content": "ok"}},
]  # fmt: skip
OPENAI: list[dict[str, Any]] = [
    {"id": "i", "reward": 1.0, "group_id": "g", "tools": [{"type": "function", "function": {"name": "bash"}}], "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": None, "weight": 1, "reasoning_content": "hm",
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "name": "bash", "content": '{"exit_code": 1, "error": "x"}', "status": None, "metadata": {"exit_code": 1}},
        {"role": "assistant", "content": "ok"}]},
]  # fmt: skip
VERIFIERS: list[dict[str, Any]] = [
    {"id": "e", "task": {"key": "k", "hash": "h"}, "group": {"id": "G"}, "ok": True, "traces": [
        {"id": "t", "agent": {"trainable": True}, "tools": [], "rewards": {"a": {"score": 1.0, "weight": 0.5}}, "info": {"group_id": "i"}, "ok": False,
         "nodes": [
             {"parent": None, "tools": [{"name": "bash", "parameters": {}}], "message": {"role": "user", "content": "go"}, "token_ids": [1], "mask": [False]},
             {"parent": 0, "sampled": True, "token_ids": [2, 3], "mask": [False, True], "logprobs": [-0.5], "advantages": [0.5],
              "message": {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "name": "bash", "arguments": "{}"}]}},
             {"parent": 1, "message": {"role": "tool", "tool_call_id": "c", "content": "Exit code 1"}, "token_ids": [4], "mask": [False]},
             {"parent": 2, "sampled": True, "token_ids": [5], "mask": [True], "logprobs": [-0.5], "semantic_parents": [{"node": 1, "type": "compaction"}],
              "message": {"role": "assistant", "content": "ok"}}]}]},
    {"prompt": [{"role": "user", "content": "go"}], "completion": [{"role": "assistant", "content": "ok"}], "reward": 1, "group_id": "g"},
]  # fmt: skip
SAMPLES: dict[str, list[dict[str, Any]]] = {"claude-code": SESSION, "openai": OPENAI, "verifiers": VERIFIERS}


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def message(path: Path | str, format: str = "auto") -> str:
    """The one line of the error that reading raises."""
    with pytest.raises(TaskError) as caught:
        list(read_traces(path, format))
    text = str(caught.value)
    assert "\n" not in text
    assert "must" in text
    assert "found" in text or "none of" in text or "is " in text
    return text


def test_nothing_there(tmp_path: Path) -> None:
    assert message(tmp_path / "no.jsonl").endswith("no.jsonl; set its path")


def test_a_path_no_system_can_hold() -> None:
    message("a\0b")
    message("x" * 5000)


def test_a_path_is_checked_before_the_first_trace_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TaskError):
        read_traces(tmp_path / "no.jsonl")


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "save the stream to a file" in message(tmp_path / "pipe")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched: whoever runs as root may read everything."""
    (tmp_path / "x.jsonl").write_bytes(lines(CHAT))

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    assert "permission denied" in message(tmp_path / "x.jsonl")
    assert "permission denied" in message(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    assert "an empty file" in message(tmp_path / "x.jsonl")


def test_a_folder_without_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert message(tmp_path).startswith(
        "a folder of traces must hold *.jsonl or *.json files; found none in "
    )


@pytest.mark.parametrize("content", [b"\x7fELF\0\0\1" * 20, json.dumps(CHAT).encode("utf-16")])
def test_a_binary_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    assert "binary data" in message(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    "content", [b"hello\nworld\n", json.dumps({"a": "\u00e9"}, ensure_ascii=False).encode("latin-1")]
)
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    assert "could be parsed" in message(tmp_path / "x.jsonl")
    for name in FORMATS:
        assert "could not be parsed, the first line 1" in message(tmp_path / "x.jsonl", name)


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines({"a": 1, "b": 2}, [1], 3))
    text = message(tmp_path / "x.jsonl")
    assert "'a', 'b'" in text
    assert all(name in text for name in FORMATS)


def test_a_format_that_does_not_exist(tmp_path: Path) -> None:
    assert "found 'parquet'" in message(tmp_path, "parquet")


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_format(tmp_path: Path, name: str) -> None:
    other = next(key for key in SAMPLES if key != name)
    (tmp_path / "x.jsonl").write_bytes(lines(*SAMPLES[other]))
    assert f"at least one {name} trace" in message(tmp_path / "x.jsonl", name)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_recognized(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(*SAMPLES[name]))
    traces = list(read_traces(tmp_path / "x.jsonl"))
    assert {trace.format for trace in traces} == {name}
    assert sum(len(trace.sites()) for trace in traces) == (0 if name == "claude-code" else 1)


def test_a_format_is_recognized_behind_bad_and_foreign_lines(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"# comment\n" + lines({"header": 1}, CHAT))
    report = ReadReport()
    assert len(list(read_traces(tmp_path / "x.jsonl", report=report))) == 1
    assert report.bad_lines == {str(tmp_path / "x.jsonl"): [1]}
    assert report.skipped == {"record that is no openai trace": 1}


@pytest.mark.parametrize("name", FORMATS)
def test_bad_lines_are_skipped_and_numbered(tmp_path: Path, name: str) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    bad = [b'{"cut": ', b"\xff\xfe", deep, b'{"n": ' + b"9" * 5000 + b"}"]
    parts = [bad[0], *lines(*SAMPLES[name]).splitlines(), bad[1], b"", bad[2], bad[3]]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(parts))
    report = ReadReport()
    assert list(read_traces(tmp_path / "x.jsonl", report=report))
    last = len(SAMPLES[name]) + 1
    assert report.bad_lines == {str(tmp_path / "x.jsonl"): [1, last + 1, last + 3, last + 4]}
    assert report.lines == last + 4


@pytest.mark.parametrize("name", FORMATS)
def test_a_byte_order_mark_crlf_and_blank_lines_are_fine(tmp_path: Path, name: str) -> None:
    plain = lines(*SAMPLES[name])
    (tmp_path / "a.jsonl").write_bytes(plain)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf\r\n  \r\n" + plain.replace(b"\n", b"\r\n\r\n"))
    report = ReadReport()
    expected = [trace.turns for trace in read_traces(tmp_path / "a.jsonl")]
    assert [trace.turns for trace in read_traces(tmp_path / "b.jsonl", report=report)] == expected
    assert not report.bad_lines


def test_a_folder_is_read_in_sorted_order_and_foreign_files_are_noted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for place, content in {
        "c.jsonl": lines(CHAT), "b/z.jsonl": lines(*SESSION), "a.json": json.dumps([CHAT], indent=1).encode(),
        "index.json": b'{"version": 1}', "empty.jsonl": b"", "notes.txt": b"x",
    }.items():  # fmt: skip
        (tmp_path / place).write_bytes(content)
    report = ReadReport()
    traces = list(read_traces(str(tmp_path), report=report))
    assert [Path(trace.path).name for trace in traces] == [
        "a.json",
        "z.jsonl",
        "z.jsonl",
        "z.jsonl",
        "c.jsonl",
    ]
    assert sorted(Path(path).name for path in report.skipped_files) == ["empty.jsonl", "index.json"]
    assert report.traces == 5


def test_a_folder_in_which_nothing_is_a_trace(tmp_path: Path) -> None:
    for name in ("a.json", "b.jsonl"):
        (tmp_path / name).write_bytes(b'{"version": 1}')
    text = message(tmp_path)
    assert "2 files" in text
    assert "a.json" in text


def test_a_file_in_which_no_trace_is_good_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines({**CHAT, "reward": "high"}, {**CHAT, "reward": "low"}))
    assert "2 x reward that is no number" in message(tmp_path / "x.jsonl")


@pytest.mark.parametrize("name", FORMATS)
def test_lone_surrogates_are_replaced(tmp_path: Path, name: str) -> None:
    text = lines(*SAMPLES[name]).replace(b'"go"', rb'"g\ud800o"').replace(b'"ok"', rb'"\udfffk \ud83d\ude00"')
    (tmp_path / "x.jsonl").write_bytes(
        text.replace(b"Bash", rb"B\ud800").replace(b'"bash"', rb'"b\ud800"').replace(b'"S"', rb'"S\ud800"')
    )
    traces = list(read_traces(tmp_path / "x.jsonl"))
    for trace in traces:
        encode(trace)
    contents = {turn.content for trace in traces for turn in trace.turns}
    assert {"g\ufffdo", "\ufffdk \U0001f600"} <= contents


@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_of_a_million_characters(tmp_path: Path, name: str) -> None:
    long = "word " * 400_000
    (tmp_path / "x.jsonl").write_bytes(lines(*SAMPLES[name]).replace(b'"Exit code 1"', b'"Exit code 1 ' + long.encode() + b'"').replace(b'"ok"', b'"' + long.encode() + b'"'))  # fmt: skip
    assert any(turn.content == long for trace in read_traces(tmp_path / "x.jsonl") for turn in trace.turns)


@pytest.mark.parametrize("depth", [400, 900, 980, 1000, 3000])
@pytest.mark.parametrize("name", FORMATS)
def test_arguments_nested_as_deeply_as_the_parser_goes(tmp_path: Path, name: str, depth: int) -> None:
    value = b"[" * depth + b"]" * depth
    text = lines(*SAMPLES[name], *SAMPLES["openai"]).replace(
        b'"input": {"command": "x"}', b'"input": ' + value
    )
    (tmp_path / "x.jsonl").write_bytes(text.replace(b'"arguments": "{}"', b'"arguments": ' + value))
    report = ReadReport()
    with contextlib.suppress(ComposerError):
        list(read_traces(tmp_path / "x.jsonl", name, report=report))
    assert report.traces or report.bad_lines or report.skipped


def test_a_document_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "_LONGEST", 100_000)
    (tmp_path / "x.json").write_bytes(b"[\n" + json.dumps(CHAT).encode() + b",\n{" + b'"a": 1,' * 100_000)
    report = ReadReport()
    assert len(list(read_traces(tmp_path / "x.json", report=report))) == 1
    assert report.bad_lines == {str(tmp_path / "x.json"): [2]}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, itself included."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*at, key))
    elif isinstance(value, list):
        for key, item in enumerate(value):
            yield from places(item, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    value = copy.copy(value)
    value[at[0]] = replaced(value[at[0]], at[1:], new)
    return value


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(
        ["user", "assistant", "tool_use", "tool_result", "text", "u", "a", "\ud800", 10**400, -1, "", "{", "[{}]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "content", "id", "role", "message", "name"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def encode(trace: Trace) -> None:
    """Fails where any text in the trace is none that a tokenizer takes."""
    json.dumps(dataclasses.asdict(trace), ensure_ascii=False).encode()


def attempt(path: Path, format: str) -> list[Trace]:
    """What reading gives, or nothing where it refuses with one line."""
    try:
        return list(read_traces(path, format))
    except ComposerError as error:
        text = str(error)
    assert "\n" not in text
    return []


def read_anything(path: Path, records: Any, format: str) -> None:
    path.write_bytes(b"\n".join(json.dumps(record).encode() for record in records))
    traces = attempt(path, format)
    for trace in traces:
        trace.sites()
        encode(trace)
        json.dumps([turn.as_message() for turn in trace.turns])
        assert any(turn.role == "assistant" for turn in trace.turns)
        for turn in trace.turns:
            if turn.tokens is not None:
                assert len(turn.tokens.ids) == len(turn.tokens.sampled)


@pytest.mark.parametrize("format", ["named", "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_value_in_place_of_a_field_raises_anything_else(tmp_path: Path, name: str, format: str) -> None:
    sample = SAMPLES[name]
    everywhere = [at for at in places(sample) if at]
    odd: list[Any] = [
        None,
        True,
        0,
        -1.5,
        10**400,
        float("nan"),
        "",
        "x",
        "\ud800",
        [],
        [None],
        [[]],
        {},
        {"type": 1},
        [{"type": []}],
    ]
    for at in everywhere:
        for new in odd:
            read_anything(
                tmp_path / "x.jsonl", replaced(sample, at, new), name if format == "named" else "auto"
            )


@given(data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.parametrize("name", FORMATS)
def test_fuzzed_records_raise_nothing_else(tmp_path: Path, name: str, data: st.DataObject) -> None:
    records: Any = SAMPLES[name]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from(sorted((at for at in places(records) if at), key=repr)))
        records = replaced(records, at, data.draw(ANY))
    read_anything(tmp_path / "x.jsonl", records, name)


@given(
    content=st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_any_bytes_raise_nothing_else(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    for name in ("auto", *FORMATS):
        attempt(path, name)


def test_the_readers_need_nothing_but_the_standard_library(tmp_path: Path) -> None:
    code = "import sys, composer_trl_host.traces; print([m for m in ('torch', 'transformers', 'trl', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
