"""Which results failed, how, and by which rule."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_trl_host.traces import ERROR_KINDS, classify
from composer_trl_host.traces.error_kinds import KINDS
from composer_trl_host.traces.errors import WINDOW

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    main()\n'


def flagged(text: str, exit_code: int | None = None, tool: str = "Edit") -> str:
    found = classify(text, is_error=True, exit_code=exit_code, tool_name=tool)
    assert found is not None
    assert found[1] == "is_error"
    return found[0]


def unflagged(text: str, tool: str | None = "bash", arguments: str = "") -> tuple[str, str] | None:
    return classify(text, is_error=None, exit_code=None, tool_name=tool, arguments=arguments)


FLAGGED = [
    ("missing_file", "File does not exist. Current working directory: /repo"),
    ("missing_file", "Exit code 1\ncat: notes.txt: No such file or directory"),
    ("missing_file", "Exit code 2\nls: cannot access 'build': No such file or directory"),
    ("missing_file", "ENOENT: no such file or directory, open '/repo/x.json'"),
    ("missing_file", "Exit code 1\n" + TRACE + "FileNotFoundError: [Errno 2] No such file or directory: 'x'"),
    ("missing_file", "EISDIR: illegal operation on a directory, read"),
    ("missing_file", "Exit code 1\nerror: pathspec 'dev' did not match any file(s) known to git"),
    ("missing_file", "Path does not exist: /repo/src"),
    ("missing_file", "Exit code 127\nbash: ./run.sh: No such file or directory"),
    ("permission", "Exit code 1\ntouch: cannot touch '/etc/x': Permission denied"),
    ("permission", "EACCES: permission denied, open '/root/x'"),
    ("permission", "Permission to use Bash with command rm -rf / has been denied."),
    ("permission", "Exit code 1\n" + TRACE + "PermissionError: [Errno 13] Permission denied: '/x'"),
    ("unknown_tool", "<tool_use_error>Error: No such tool available: Grepp</tool_use_error>"),
    ("unknown_tool", "Error: tool 'serch' not found"),
    ("unknown_tool", "Unknown tool: frobnicate"),
    ("unknown_tool", "find_files is not a valid tool, try one of [search, view]."),
    ("wrong_argument", "<tool_use_error>InputValidationError: Read failed due to the following issue:\nThe required parameter `file_path` is missing</tool_use_error>"),
    ("wrong_argument", "MCP error -32602: Invalid arguments for tool search"),
    ("wrong_argument", "Error: search() missing 1 required positional argument: 'query'"),
    ("wrong_argument", "Error: search() got an unexpected keyword argument 'q'"),
    ("wrong_argument", "Exit code 2\nusage: run.py [-h] --out OUT\nrun.py: error: the following arguments are required: --out"),
    ("wrong_argument", "Exit code 1\nls: invalid option -- 'z'"),
    ("wrong_argument", "No changes to make: old_string and new_string are exactly the same."),
    ("wrong_argument", "2 validation errors for SearchInput\nquery\n  Field required"),
    ("invalid_json", "Error: tool arguments are not valid JSON: Expecting ',' delimiter: line 1 column 9 (char 8)"),
    ("invalid_json", "Failed to parse tool arguments as JSON"),
    ("invalid_json", "Expecting value: line 1 column 1 (char 0)"),
    ("edit_not_found", "<tool_use_error>String to replace not found in file.\nString: return 1</tool_use_error>"),
    ("edit_not_found", "No replacement was performed, old_str `x = 1` did not appear verbatim in /repo/a.py."),
    ("edit_not_found", "Exit code 1\nerror: patch failed: a.py:3\nerror: a.py: patch does not apply"),
    ("edit_not_unique", "Found 3 matches of the string to replace, but replace_all is false. To replace all occurrences, set replace_all to true."),
    ("edit_not_unique", "No replacement was performed. Multiple occurrences of old_str `x` in lines [1, 9]. Please ensure it is unique"),
    ("not_read_before_edit", "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"),
    ("not_read_before_edit", "File has been modified since read, either by the user or by a linter. Read it again before attempting to write it."),
    ("command_not_found", "Exit code 127\n/bin/bash: line 1: pyhton: command not found"),
    ("command_not_found", "Exit code 127\n(eval):1: command not found: rg"),
    ("command_not_found", "Exit code 127\nsh: 1: jq: not found"),
    ("command_not_found", "Exit code 1\n'make' is not recognized as an internal or external command"),
    ("nonzero_exit", "Exit code 1"),
    ("nonzero_exit", "Exit code 3\nnothing to see"),
    ("failing_test", "Exit code 1\nE   TypeError: x\nE   ModuleNotFoundError: y\n==== 2 failed, 7 passed in 1.31s ===="),
    ("failing_test", "Exit code 1\n" + TRACE + "AssertionError: 1 != 2\n\nRan 3 tests in 0.1s\n\nFAILED (failures=1)"),
    ("failing_test", "Exit code 101\ntest result: FAILED. 3 passed; 1 failed; 0 ignored"),
    ("failing_test", "Exit code 1\n--- FAIL: TestAdd (0.00s)\nFAIL\tpkg/add\t0.01s"),
    ("failing_test", "Exit code 1\nTests:       1 failed, 4 passed, 5 total"),
    ("traceback", "Exit code 1\n" + TRACE + "KeyError: 'name'"),
    ("traceback", "Exit code 1\n" + TRACE + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    ("traceback", "Exit code 101\nthread 'main' panicked at src/main.rs:4:5:\nindex out of bounds"),
    ("timeout", "Command timed out after 2m 0.0s\nstill building"),
    ("timeout", "Exit code 1\n" + TRACE + "subprocess.TimeoutExpired: Command 'x' timed out after 5 seconds"),
    ("timeout", "MCP error -32001: Request timed out"),
    ("output_too_long", "File content (31337 tokens) exceeds maximum allowed tokens (25000). Please use offset and limit parameters"),
    ("output_too_long", "Error: result is too large to show"),
    ("network", "Exit code 6\ncurl: (6) Could not resolve host: example.invalid"),
    ("network", "Exit code 128\nfatal: unable to access 'https://x/': Failed to connect to x port 443: Connection timed out"),
    ("network", "Exit code 1\n" + TRACE + "requests.exceptions.ConnectionError: Max retries exceeded"),
    ("merge_conflict", "Exit code 1\nAuto-merging a.py\nCONFLICT (content): Merge conflict in a.py\nAutomatic merge failed; fix conflicts and then commit the result."),
    ("syntax_error", 'Exit code 1\n  File "a.py", line 1\n    x = (\nSyntaxError: \'(\' was never closed'),
    ("syntax_error", "Exit code 2\nbash: -c: line 1: syntax error near unexpected token `)'"),
    ("syntax_error", "Exit code 1\n" + TRACE + "IndentationError: unexpected indent"),
    ("type_error", "Exit code 1\n" + TRACE + "TypeError: unsupported operand type(s) for +: 'int' and 'str'"),
    ("type_error", "Exit code 2\nsrc/a.ts(3,5): error TS2322: Type 'string' is not assignable to type 'number'."),
    ("type_error", 'Exit code 1\na.py:3: error: Incompatible types in assignment  [assignment]'),
    ("import_error", "Exit code 1\n" + TRACE + "ModuleNotFoundError: No module named 'numpy'"),
    ("import_error", "Exit code 1\nError: Cannot find module 'express'\nRequire stack:"),
    ("type_error", '  /repo/a.py:184:17 - error: Type of "x" is unknown (reportUnknownVariableType)\n1 error, 0 warnings'),
    ("type_error", "error[call-non-callable]: Object of type `X` is not callable\n427 |   except PermissionError:"),
    ("rate_limit", "Error: 429 Too Many Requests"),
    ("rate_limit", "Exit code 1\n" + TRACE + "openai.RateLimitError: Error code: 429"),
    ("rejected", "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit, the new_string was NOT written to the file)."),
    ("rejected", "The user doesn't want to take this action right now. STOP what you are doing"),
    ("rejected", "[Request interrupted by user for tool use]"),
    ("rejected", "<error>Command was aborted before completion</error>"),
    ("rejected", "Claude requested permissions to use Bash, but you haven't granted it yet."),
    ("wrong_argument", "Exit code 1\ngit: 'comit' is not a git command. See 'git --help'."),
    ("wrong_argument", "Exit code 2\nrun.py: error: argument mode: invalid choice: 'fast'"),
    ("wrong_argument", "Error: old_string and new_string must be different"),
    ("command_not_found", "unknown command: remove"),
    ("permission", "File is in a directory that is denied by your permission settings."),
    ("permission", "ls in '~/x' was blocked. For security, files may be listed in the working directories only"),
    ("network", "Exit code 1\nCannot connect to the Docker daemon at unix:///var/run/docker.sock."),
    ("nonzero_exit", "Exit code 1\nsrc/a.py:3: timeout=30"),
    ("nonzero_exit", "Exit code 128\nfatal: not a git repository (or any of the parent directories): .git"),
    ("nonzero_exit", "Exit code 2\nmake: *** No rule to make target 'x'.  Stop."),
    ("traceback", "Exit code 1\nReferenceError: x is not defined\n    at Object.<anonymous> (/repo/x.js:1:1)"),
    ("unknown", "<tool_use_error>Cancelled</tool_use_error>"),
    ("unknown", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"), FLAGGED, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(FLAGGED)]
)
def test_kind_of_a_flagged_failure(kind: str, text: str) -> None:
    assert flagged(text) == kind


def test_a_flagged_command_that_says_no_more_failed_by_its_status() -> None:
    for tool in ("Bash", "execute_bash", "run_command", "local_shell"):
        assert flagged("==== no tests collected (205 deselected) in 0.39s ====", tool=tool) == "nonzero_exit"
    assert flagged("Shell dce0af is not running", tool="Kill") == "unknown"


def test_every_kind_has_a_flagged_case() -> None:
    assert {kind for kind, _ in FLAGGED} == set(ERROR_KINDS)


def test_the_kinds_are_the_agreed_ones() -> None:
    agreed = (
        "missing_file permission unknown_tool wrong_argument invalid_json edit_not_found edit_not_unique"
        " not_read_before_edit command_not_found nonzero_exit failing_test traceback timeout output_too_long"
        " network merge_conflict syntax_error type_error import_error rate_limit rejected unknown"
    )
    assert set(ERROR_KINDS) == set(agreed.split())
    assert len(ERROR_KINDS) == len(set(ERROR_KINDS))


@pytest.mark.parametrize(("kind", "words", "pattern"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_the_quick_words_of_a_kind_never_hide_a_match(
    kind: str, words: tuple[str, ...], pattern: object
) -> None:
    assert all(word == word.lower() for word in words)
    for _, text in FLAGGED:
        if pattern.search(text):  # type: ignore[attr-defined]
            assert any(word in text.lower() for word in words), text


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, "nonzero_exit"),
        (-9, "nonzero_exit"),
        (124, "timeout"),
        (126, "permission"),
        (127, "command_not_found"),
    ],
)
def test_exit_status_alone_is_a_failure(code: int, kind: str) -> None:
    assert classify("some output", is_error=None, exit_code=code, tool_name="bash") == (kind, "exit_code")


def test_what_the_text_says_is_more_specific_than_the_status() -> None:
    text = "bash: ./run.sh: No such file or directory"
    assert classify(text, is_error=None, exit_code=127, tool_name="bash") == ("missing_file", "exit_code")


@pytest.mark.parametrize("text", [text for _, text in FLAGGED])
def test_a_flag_that_says_no_error_is_not_overruled(text: str) -> None:
    assert classify(text, is_error=False, exit_code=None, tool_name="Bash") is None
    assert classify(text, is_error=False, exit_code=1, tool_name="Bash") is None
    assert classify(text, is_error=None, exit_code=0, tool_name="Bash") is None


UNFLAGGED = [
    ("missing_file", "<tool_use_error>", "<tool_use_error>File does not exist.</tool_use_error>", "Read"),
    ("missing_file", "Error:", "Error: file a.py not found", "view"),
    ("wrong_argument", "<error>", "<error>missing required parameter 'path'</error>", "lookup"),
    ("unknown", "Error:", "ERROR: it broke", None),
    ("traceback", "Traceback", TRACE + "KeyError: 'x'", "python"),
    ("import_error", "Traceback", "Loading...\nstep 1\n" + TRACE + "ModuleNotFoundError: No module named 'x'", "python"),
    ("unknown", "XError:", "ToolError: the page has no such button", "click"),
    ("missing_file", "Error:", "Error: no such file or directory", "view"),
    ("timeout", "Error executing", "Error executing tool fetch: timed out after 30 s", "fetch"),
    ("nonzero_exit", "exit status", "Exit code 2\nsome words", "bash"),
    ("nonzero_exit", "exit status", "Exit code: 1\nWall time: 0.1 seconds\nOutput:\nsome words", "shell"),
    ("nonzero_exit", "exit status", "some words\nexit status 1", "bash"),
    ("command_not_found", "exit status", "<returncode>127</returncode>\n<output>bash: foo: command not found</output>", "bash"),
    ("nonzero_exit", "exit status", "some words\n[The command completed with exit code 1.]", "execute_bash"),
    ("nonzero_exit", "Command failed with exit code", "yarn run v1\nerror Command failed with exit code 1.\ninfo Visit https://yarnpkg.com", "bash"),
    ("missing_file", "npm ERR!", "npm ERR! code ENOENT\nnpm ERR! syscall open\nnpm ERR! A complete log of this run can be found in: /x", "bash"),
    ("command_not_found", "shell message", "bash: foo: command not found", "bash"),
    ("command_not_found", "shell message", "zsh: command not found: foo", "bash"),
    ("missing_file", "shell message", "cat: x.txt: No such file or directory", "bash"),
    ("permission", "shell message", "bash: ./x: Permission denied", "bash"),
    ("failing_test", "test summary", "F..\n==== FAILURES ====\n1 failed, 2 passed in 0.05s", "bash"),
    ("failing_test", "test summary", "ok a\nFAIL\tpkg/a\t0.1s\nFAIL", "bash"),
    ("unknown", "error", '{"error": "the page is gone"}', "open_page"),
    ("rate_limit", "error", '{"error": {"code": 429, "message": "Too Many Requests"}}', "web_search"),
    ("unknown", "isError", '{"content": [{"type": "text", "text": "no"}], "isError": true}', "search"),
    ("nonzero_exit", "exit_code", '{"output": "x", "exit_code": 2}', "bash"),
    ("nonzero_exit", "exit_code", '{"output": "x", "metadata": {"exit_code": 1}}', "shell"),
    ("unknown", "success: false", '{"success": false, "result": null}', "click"),
    ("unknown", "status", '{"status": "error", "message": "no"}', "click"),
    ("wrong_argument", "MCP error", "MCP error -32602: Invalid params", "search"),
    ("unknown", "fatal:", "fatal: not a git repository (or any of the parent directories): .git", "bash"),
    ("rejected", "rejected", "The user doesn't want to proceed with this tool use.", "Edit"),
    ("rejected", "rejected", "aborted by user after 3.1s", "shell"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rule", "text", "tool"), UNFLAGGED, ids=[f"{n}-{case[1]}" for n, case in enumerate(UNFLAGGED)]
)
def test_text_decides_where_there_is_no_flag(kind: str, rule: str, text: str, tool: str | None) -> None:
    assert unflagged(text, tool) == (kind, f"text: {rule}")


NUMBERED = "     1\tdef f():\n     2\t    raise ValueError('x')\n     3\t# Traceback (most recent call last):\n     4\t# Error: no"
PASSED = "a.py .....                                  [100%]\n\n============ 5 passed in 0.12s ============"
QUOTES = [
    ("a file that was read and quotes a traceback", "Read", NUMBERED),
    ("a log that was read", "read_file", "start\n" + TRACE + "KeyError: 'x'"),
    ("a file that begins with a failure", "read_file", "Failed to load 3 items\nrest of the log"),
    ("a log that begins with a panic", "view", "panic: runtime error\nrest of the log"),
    ("a traceback that a passing run ends with", "bash", "run\n" + TRACE + "KeyError: 'x'\n3 passed in 0.10s"),
    ("a traceback with much after it", "bash", "run\n" + TRACE + "KeyError: 'x'\na\nb\nc\nd\ne"),
    ("a search that found errors", "Grep", "a.py:3:    raise TypeError('Error: x')\nb.py:9:Traceback (most recent call last):"),
    ("a search of a shell message", "search_files", "docs.md:1: bash: foo: command not found"),
    ("a passing run that prints a traceback", "bash", "test_error ...\n" + TRACE + "KeyError: 'x'\nhandled\n\n" + PASSED),
    ("a passing run that mentions errors", "bash", "tests/test_errors.py::test_error_is_raised PASSED\n" + PASSED),
    ("a passing run with an expected failure", "bash", "1 passed, 1 xfailed in 0.1s"),
    ("no failure in the summary", "bash", "Tests:       0 failed, 4 passed, 4 total"),
    ("a status of 0 in front", "shell", "Exit code: 0\nOutput:\n" + TRACE + "KeyError: 'x'"),
    ("a status of 0 behind", "bash", "Error: retried\nfine\n[The command completed with exit code 0.]"),
    ("a status of 0 in tags", "bash", "<returncode>0</returncode><output>Error: x</output>"),
    ("no error in JSON", "search", '{"error": null, "hits": 3}'),
    ("an empty error in JSON", "click", '{"error": "", "ok": true}'),
    ("the word none in JSON", "click", '{"error": "none", "result": 1}'),
    ("isError false", "click", '{"isError": false, "content": [{"type": "text", "text": "Error: quoted"}]}'),
    ("exit_code 0 in JSON", "bash", '{"exit_code": 0, "output": "Error: quoted"}'),
    ("a JSON file that was read", "read_file", '{"error": "bad", "users": [1, 2]}'),
    ("success true", "click", '{"success": true, "error": "deprecated call"}'),
    ("a listing of files named after errors", "bash", "errors.py\ntraceback.py\ntest_error.py"),
    ("a heading", "web_fetch", "Error handling in Python\n\nWhen an Error: is raised, a Traceback is printed."),
    ("no errors at the start", "bash", "Error: 0\nWarnings: 2"),
    ("no error in words", "lint", "Error: none"),
    ("an error field without one", "lint", "error: no errors."),
    ("errors counted", "bash", "Errors: 0, Warnings: 0"),
    ("a sentence that begins with error", "bash", "Errors were found and fixed"),
    ("a partial refusal of find", "bash", "find: '/root': Permission denied\n./a.py\n./b.py"),
    ("an exit status inside", "bash", "The job sets exit status 1 when it fails.\nDone."),
    ("a script that was shown", "cat", "#!/bin/sh\nfoo || exit 1"),
    ("an edit's success", "Edit", "The file /repo/errors.py has been updated. Error: lines are kept."),
    ("a commit message", "bash", "[main 1a2b3c] Fix Traceback (most recent call last): in parser\n 1 file changed"),
    ("empty output", "bash", ""),
    ("white space", "bash", " \n\t\n"),
    ("a number", "calculator", "42"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "text"), [case[1:] for case in QUOTES], ids=[case[0] for case in QUOTES])
def test_quoting_an_error_is_none(tool: str, text: str) -> None:
    assert unflagged(text, tool) is None


@pytest.mark.parametrize(
    "command",
    ["cat app.log", "cd /repo && tail -5 app.log", "grep -rn Error .", "git log -3", "sed -n 1,20p a.log"],
)
def test_a_shell_command_that_shows_a_file_reads(command: str) -> None:
    log = "12:00 start\n" + TRACE + "KeyError: 'x'"
    assert unflagged(log, "bash", json.dumps({"command": command})) is None
    assert unflagged(log, "bash", json.dumps({"command": ["bash", "-lc", command]})) is None
    assert unflagged(log, "bash", json.dumps({"command": "python app.py"})) == (
        "traceback",
        "text: Traceback",
    )


def test_a_reading_command_that_itself_fails_is_an_error() -> None:
    arguments = json.dumps({"command": "cat x.log"})
    found = unflagged("cat: x.log: No such file or directory", "bash", arguments)
    assert found == ("missing_file", "text: shell message")


def test_terminal_colours_do_not_hide_a_tag() -> None:
    assert unflagged("\x1b[31mError:\x1b[0m no route to host") == ("network", "text: Error:")


def test_a_result_of_megabytes_is_judged_by_its_ends() -> None:
    middle = "x" * 3_000_000
    assert unflagged(f"{middle}\nexit status 1") == ("nonzero_exit", "text: exit status")
    assert unflagged(f"{middle}\nError: quoted\n{middle}") is None
    assert flagged(f"Exit code 1\n{middle}\nNo such file or directory\n{middle}") == "nonzero_exit"
    assert flagged("a" * WINDOW + "\n" + middle + "\nNo such file or directory") == "missing_file"


@given(
    st.text(max_size=400),
    st.sampled_from([None, True, False]),
    st.none() | st.integers(),
    st.none() | st.text(max_size=9),
)
@settings(max_examples=300, deadline=None)
def test_any_text_gives_a_known_kind_or_none(
    text: str, is_error: bool | None, code: int | None, tool: str | None
) -> None:
    found = classify(text, is_error=is_error, exit_code=code, tool_name=tool)
    if is_error:
        assert found is not None
    if is_error is False:
        assert found is None
    assert found is None or found[0] in ERROR_KINDS
