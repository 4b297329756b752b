# ruff: noqa: F401, F811  (fixtures are imported by name)
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime_plugin.errors import ComposerError, ConfigError, ModelError, TaskError
from composer_trl_host.inspection import command, models
from composer_trl_host.inspection.help import HELP
from composer_trl_host.inspection.options import Options, parse
from tests.composer_trl_host.conftest import model, tokenizer

ERROR = "Error: no such file or directory: notes.txt"


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tokenizer, model):
    """The tiny model in the place of the embedded one."""
    monkeypatch.setattr(models, "embedded_tokenizer", lambda: (tokenizer, "tiny"))
    monkeypatch.setattr(models, "measuring_model", lambda name, device: (model, tokenizer, name))


def conversation(result: str = ERROR, recovery: str = "I list the folder.") -> dict:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "read", "arguments": '{"path": "notes.txt"}'},
    }
    return {
        "id": "chat-1",
        "messages": [
            {"role": "user", "content": "read notes.txt"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": result},
            {"role": "assistant", "content": recovery},
        ],
    }


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def test_a_site_is_shown_with_its_hint_and_tokens(tmp_path, capsys):
    path = written(tmp_path / "one.jsonl", conversation())
    assert command.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^chat-1  turn 3 → 4  missing_file  \(text: .*\)$", out, flags=re.MULTILINE)
    assert "hint: `notes.txt` does not exist" in out
    assert "sites: 1 in 1 trace; 1 kept with" in out
    assert "counted with tiny" in out
    assert "nats" not in out


def test_a_model_measures_and_a_page_is_written(tmp_path, capsys):
    path = written(tmp_path / "one.jsonl", conversation())
    page = tmp_path / "sites.html"
    assert command.main([str(path), "--model", "embedded", f"--html={page}"]) == 0
    out = capsys.readouterr().out
    assert "measured with embedded" in out
    assert f"page: {page} with 1 conversation and 1 site" in out
    text = page.read_text()
    assert 'id="data-1"' in text
    assert "mean nats" in text


def test_traces_without_errors_are_a_plain_report(tmp_path, capsys):
    path = written(tmp_path / "one.jsonl", conversation(result="the notes"))
    page = tmp_path / "sites.html"
    assert command.main([str(path), "--html", str(page)]) == 0
    captured = capsys.readouterr()
    assert "no error sites" in captured.out
    assert captured.err == ""
    assert "no error sites" in page.read_text()


def test_bad_lines_are_named_by_number(tmp_path, capsys):
    path = written(tmp_path / "one.jsonl", conversation(), "{broken", conversation(), "[1, 2")
    assert command.main([str(path)]) == 0
    assert f"unreadable: {path}, lines 2, 4" in capsys.readouterr().out


def test_the_limit_is_told(tmp_path, capsys):
    path = written(tmp_path / "one.jsonl", conversation(), {**conversation(), "id": "chat-2"})
    assert command.main([str(path), "--html", str(tmp_path / "p.html"), "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "with 1 conversation and 1 site; --limit 1 left out 1 more with error sites" in out
    assert "sites: 2 in 2 traces" in out


def test_the_hint_role_reaches_the_page(tmp_path):
    path = written(tmp_path / "one.jsonl", conversation())
    page = tmp_path / "p.html"
    command.main([str(path), "--html", str(page), "--hint-role", "system"])
    assert "role <code>system</code>" in page.read_text()


def test_a_short_limit_of_tokens_drops_or_cuts_and_says_so(tmp_path, capsys):
    path = written(tmp_path / "one.jsonl", conversation())
    assert command.main([str(path), "--seq-len", "60"]) == 0
    out = capsys.readouterr().out
    assert "0 kept" in out or "cut:" in out


def test_the_model_is_not_read_past_its_positions(tmp_path, capsys, model):
    known = model.config.max_position_embeddings
    path = written(tmp_path / "one.jsonl", conversation(result=ERROR + " x" * known))
    assert command.main([str(path), "--model", "embedded"]) == 0
    out = capsys.readouterr().out
    assert "1 left out" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "inspect needs the path"),
        (["a", "b"], "inspect takes one path; found 'a' and 'b'"),
        (["a", "--htlm", "x"], "--htlm is no option of inspect; the options are --html"),
        (["a", "--model"], "--model takes a value, and none was given"),
        (["a", "--html="], "--html takes a value, and an empty one was given"),
        (["a", "--html", "--model"], "--html takes a value, and none was given"),
        (
            ["a", "--format", "xml"],
            "--format must be one of auto, claude-code, openai, verifiers; found 'xml'",
        ),
        (["a", "--hint-role", "tool"], "--hint-role must be one of system, user, tool_result; found 'tool'"),
        (["a", "--limit", "0"], "--limit must be a whole number of at least 1; found '0'"),
        (["a", "--seq-len", "1e3"], "--seq-len must be a whole number of at least 1; found '1e3'"),
        (["a", "--include-rejected=yes"], "--include-rejected takes no value"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        command.main(words)


def test_options_are_read_in_both_spellings():
    wanted = Options("p", Path("x.html"), "m", "openai", "system", 9, True, 3, "cuda")
    words = "p --html x.html --model m --format openai --hint-role system --seq-len 9 --limit 3 --device cuda"
    assert parse([*words.split(), "--include-rejected"]) == wanted
    assert parse(["--include-rejected", *re.sub(r"(--[\w-]+) ", r"\1=", words).split()]) == wanted
    assert parse(["--", "--odd"]).path == "--odd"


def test_input_that_cannot_be_read_is_one_sentence_and_no_page(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    page = tmp_path / "p.html"
    for path in (tmp_path / "absent.jsonl", empty, binary, written(tmp_path / "none.jsonl", '{"a": 1}')):
        with pytest.raises(ComposerError) as caught:
            command.main([str(path), "--html", str(page)])
        assert isinstance(caught.value, TaskError)
        assert caught.value.exit_code == 2
        assert not page.exists()


def test_a_page_that_cannot_be_written_is_told_before_anything_is_read(tmp_path):
    for page in (tmp_path, tmp_path / "no" / "p.html"):
        with pytest.raises(ConfigError, match="--html must name a file in an existing folder"):
            command.main([str(tmp_path / "absent.jsonl"), "--html", str(page)])


def test_a_model_that_does_not_load_is_named_by_its_option(monkeypatch, tmp_path):
    monkeypatch.undo()
    path = written(tmp_path / "one.jsonl", conversation())
    with pytest.raises(ModelError, match=r"^--model must be an existing folder .*; set --model$"):
        command.main([str(path), "--model", str(tmp_path / "absent")])


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="--device must be one that torch can use here; 'gpu9' is not"):
        models.measuring_model("embedded", "gpu9")


def test_the_help_names_every_option_and_needs_no_torch():
    flags = set(re.findall(r"^  (--[\w-]+)", HELP, flags=re.MULTILINE))
    from composer_trl_host.inspection import options

    assert flags == {*options._VALUED, "--include-rejected"}
    code = (
        "import sys; from composer_trl_host.inspection.help import HELP; "
        "print([m for m in ('torch', 'transformers', 'rich', 'jinja2') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
