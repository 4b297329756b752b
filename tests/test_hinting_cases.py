"""Error texts as tools and programs print them, and what the rules name in them."""

from __future__ import annotations

import pytest

from composer_trl_host.hinting import KINDS, RuleHints
from composer_trl_host.hinting.rule_table import RULES
from composer_trl_host.hinting.rules import plain
from composer_trl_host.hints import ErrorContext

EDIT_CALL = 'Edit {"file_path": "/app/src/core.py", "old_string": "a", "new_string": "b"}'
READ_CALL = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/app/src/core.py"}}\n</tool_call>'
BASH_CALL = '{"name": "Bash", "arguments": {"command": "cargo build\\necho done"}}'

# (error kind, what the model was shown, the call, the rule that answers, what the hint names)
# fmt: off
CASES: list[tuple[str, str, str, str, list[str]]] = [
    ("missing_file", "cat: src/app.py: No such file or directory", "", "missing_path", ["`src/app.py`"]),
    ("missing_file", "ls: cannot access 'my docs': No such file or directory", "", "missing_path", ["`my docs`"]),
    ("missing_file", "ls: cannot access build: No such file or directory", "", "missing_path", ["`build`"]),
    ("missing_file", "sed: can't read src/x.c: No such file or directory", "", "missing_path", ["`src/x.c`"]),
    ("missing_file", "bash: line 1: cd: /nope: No such file or directory", "", "missing_path", ["`/nope`"]),
    ("missing_file", "head: cannot open 'a.log' for reading: No such file or directory", "", "missing_path", ["`a.log`"]),
    ("missing_file", "Error: ENOENT: no such file or directory, open '/app/config.json'", "", "missing_path", ["`/app/config.json`"]),
    ("missing_file", "python: can't open file '/app/tool.py': [Errno 2] No such file or directory", "", "missing_path", ["`/app/tool.py`"]),
    ("missing_file", "The path /repo/lib/a.py does not exist. Please provide a valid path.", "", "missing_path", ["`/repo/lib/a.py`"]),
    ("missing_file", "error: pathspec 'featur' did not match any file(s) known to git", "", "missing_path", ["`featur`"]),
    ("missing_file", "File does not exist.", READ_CALL, "missing_path", ["`/app/src/core.py`"]),
    ("missing_file", "EISDIR: illegal operation on a directory, read", READ_CALL, "is_directory", ["core.py"]),
    ("missing_file", "IsADirectoryError: [Errno 21] Is a directory: 'src'", "", "is_directory", ["`src`"]),
    ("missing_file", "cat: src: Is a directory", "", "is_directory", ["`src`"]),
    ("missing_file", "That is a directory, not a file", READ_CALL, "is_directory", ["core.py`"]),
    ("missing_file", "Error: File not found: /app/notes.md", "", "missing_path", ["`/app/notes.md`"]),
    ("missing_file", "The system cannot find the file specified.", READ_CALL, "missing_path", ["core.py`"]),
    ("permission", "EACCES: permission denied, open '/etc/hosts'", "", "denied_path", ["`/etc/hosts`"]),
    ("permission", "PermissionError: [Errno 13] Permission denied: '/root/x'", "", "denied_path", ["`/root/x`"]),
    ("permission", "bash: ./run.sh: Permission denied", "", "denied_path", ["`./run.sh`"]),
    ("permission", "rm: cannot remove 'a/b': Operation not permitted", "", "denied_path", ["`a/b`"]),
    ("permission", "touch: cannot touch '/usr/x': Read-only file system", "", "denied_path", ["`/usr/x`"]),
    ("permission", "git@github.com: Permission denied (publickey).", "", "remote_access", ["`publickey`"]),
    ("permission", "Permission to use Bash with command rm -r x has been denied.", "", "tool_permission", ["`Bash`"]),
    ("permission", "The agent requested permissions to write to /etc/app.conf, but you haven't granted it yet.", "", "tool_permission", ["`/etc/app.conf`"]),
    ("unknown_tool", "<tool_use_error>Error: No such tool available: Grepp</tool_use_error>", "", "unknown_tool", ["`Grepp`"]),
    ("unknown_tool", "Unknown tool: read_files", "", "unknown_tool", ["`read_files`"]),
    ("unknown_tool", "Tool 'fetch_url' not found", "", "unknown_tool", ["`fetch_url`"]),
    ("unknown_tool", "Tool lookup does not exist.", "", "unknown_tool", ["`lookup`"]),
    ("unknown_tool", "There is no tool called 'browse'.", "", "unknown_tool", ["`browse`"]),
    ("wrong_argument", "InputValidationError: Read failed due to the following issue:\nThe required parameter `file_path` is missing", "", "missing_argument", ["`file_path`"]),
    ("wrong_argument", "'query' is a required property", "", "missing_argument", ["`query`"]),
    ("wrong_argument", "1 validation error for Args\npath\n  Field required [type=missing, input_value={}, input_type=dict]", "", "missing_argument", ["`path`"]),
    ("wrong_argument", "tool.py: error: the following arguments are required: --out", "", "missing_argument", ["`--out`"]),
    ("wrong_argument", "An unexpected parameter `limits` was provided", "", "unexpected_argument", ["`limits`"]),
    ("wrong_argument", "Additional properties are not allowed ('cwd' was unexpected)", "", "unexpected_argument", ["`cwd`"]),
    ("wrong_argument", "grep: unrecognized option '--fo'", "", "unexpected_argument", ["`--fo`"]),
    ("wrong_argument", "ls: invalid option -- 'z'", "", "unexpected_argument", ["`z`"]),
    ("wrong_argument", "pytest: error: unrecognized arguments: --fast", "", "unexpected_argument", ["`--fast`"]),
    ("wrong_argument", "error: unexpected argument '--all' found", "", "unexpected_argument", ["`--all`"]),
    ("wrong_argument", "The parameter `offset` type is expected as `number` but provided as `string`", "", "argument_type", ["`offset`", "number"]),
    ("wrong_argument", "'5' is not of type 'integer'", "", "argument_type", ["`5`", "integer"]),
    ("wrong_argument", "count\n  Input should be a valid integer, unable to parse", "", "argument_type", ["`count`", "integer"]),
    ("wrong_argument", "error: argument --mode: invalid choice: 'fats' (choose from 'fast', 'slow')", "", "argument_choice", ["`fats`"]),
    ("wrong_argument", "'blue' is not one of ['red', 'green']", "", "argument_choice", ["`blue`"]),
    ("wrong_argument", "Invalid enum value 'fast'", "", "argument_choice", ["`fast`"]),
    ("invalid_json", "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 3 column 15 (char 42)", "", "json_place", ["line 3", "column 15"]),
    ("invalid_json", "SyntaxError: Expected ',' or '}' after property value in JSON at position 57", "", "json_position", ["57"]),
    ("invalid_json", 'Unexpected token \'}\', ..."a": }" is not valid JSON', "", "json_token", ["`}`"]),
    ("invalid_json", "Unexpected end of JSON input", 'Write {"a": 1}', "json_cut_off", ["`Write`"]),
    ("invalid_json", "Unterminated string starting at: line 1 column 12 (char 11)", "", "json_cut_off", ["too early"]),
    ("invalid_json", "EOF while parsing a string at line 1 column 80", "", "json_cut_off", ["too early"]),
    ("invalid_json", "Bad escape, character 17", "", "json_position", ["17"]),
    ("edit_not_found", "String to replace not found in file.\nString:   return a + b", "", "edit_text", ["`return a + b`"]),
    ("edit_not_found", "String to replace not found in file.\nString: x", EDIT_CALL, "edit_text", ["`/app/src/core.py`"]),
    ("edit_not_found", "No replacement was performed, old_str `x = 1` did not appear verbatim in /repo/a.py.", "", "edit_text", ["`/repo/a.py`"]),
    ("edit_not_found", "error: patch failed: src/a.py:12\nerror: src/a.py: patch does not apply", "", "patch_place", ["`src/a.py`", "12"]),
    ("edit_not_found", "1 out of 2 hunks\nHunk #2 FAILED at 88.", "", "patch_hunk", ["2", "88"]),
    ("edit_not_found", "Failed to find expected lines in src/lib.rs:\nfn go()", "", "edit_text", ["`src/lib.rs`"]),
    ("edit_not_found", "old_string not found in src/a.py", "", "edit_text", ["`src/a.py`"]),
    ("edit_not_found", "1 SEARCH/REPLACE block failed to match!", EDIT_CALL, "edit_text", ["core.py`"]),
    ("edit_not_found", "Could not find the exact text", EDIT_CALL, "edit_text", ["core.py`"]),
    ("edit_not_unique", "Found 3 matches of the string to replace, but replace_all is false.", EDIT_CALL, "edit_count", ["3 times", "`/app/src/core.py`"]),
    ("edit_not_unique", "Found 12 matches of the string to replace", "", "edit_count", ["12 times"]),
    ("edit_not_unique", "No replacement was performed. Multiple occurrences of old_str `x` in lines [3, 9]. Please ensure it is unique", "", "edit_lines", ["3, 9"]),
    ("edit_not_unique", "old_string is not unique", EDIT_CALL, "edit_several", ["core.py"]),
    ("edit_not_unique", "The search text appears 4 times in the file", "", "edit_count", ["4 times"]),
    ("edit_not_unique", "Multiple matches. Be more specific", EDIT_CALL, "edit_several", ["core.py`"]),
    ("edit_not_unique", "More than one match", EDIT_CALL, "edit_several", ["core.py`"]),
    ("not_read_before_edit", "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>", EDIT_CALL, "not_read", ["Read `/app/src/core.py`"]),
    ("not_read_before_edit", "File has been modified since read, either by the user or by a linter.", EDIT_CALL, "changed_since_read", ["`/app/src/core.py` changed"]),
    ("not_read_before_edit", "The file changed since you read it.", EDIT_CALL, "changed_since_read", ["core.py` changed"]),
    ("not_read_before_edit", "You must read /app/x.py before you change it", "", "not_read", ["`/app/x.py`"]),
    ("not_read_before_edit", "You must use the Read tool to read the file first", EDIT_CALL, "not_read", ["core.py`"]),
    ("not_read_before_edit", "Please read it before editing", EDIT_CALL, "not_read", ["core.py`"]),
    ("command_not_found", "bash: line 1: rg: command not found", "", "command", ["`rg`"]),
    ("command_not_found", "/bin/sh: 1: pyton: not found", "", "command", ["`pyton`"]),
    ("command_not_found", "zsh: command not found: brew", "", "command", ["`brew`"]),
    ("command_not_found", "/usr/bin/env: ‘node’: No such file or directory", "", "command", ["`node`"]),
    ("command_not_found", "'ls' is not recognized as an internal or external command,\noperable program or batch file.", "", "command", ["`ls`"]),
    ("command_not_found", "git: 'comit' is not a git command. See 'git --help'.", "", "command", ["`comit`"]),
    ("command_not_found", "The term 'foo' is not recognized as the name of a cmdlet", "", "command", ["`foo`"]),
    ("command_not_found", 'exec: "ffmpeg": executable file not found in $PATH', "", "command", ["`ffmpeg`"]),
    ("command_not_found", "error: no such command: `fmtt`", "", "command", ["`fmtt`"]),
    ("nonzero_exit", "something odd\nExit code 2", BASH_CALL, "exit_status", ["`cargo build`", "status 2"]),
    ("nonzero_exit", "Exit code 127\nbash: line 2: jq: command not found", "", "command", ["`jq`"]),
    ("nonzero_exit", "make: *** No rule to make target 'tests'.  Stop.", "", "build_target", ["`tests`"]),
    ("nonzero_exit", 'npm error Missing script: "biuld"', "", "build_target", ["`biuld`"]),
    ("nonzero_exit", "subprocess.run returned non-zero exit status 3.", "", "exit_status", ["status 3"]),
    ("nonzero_exit", "Process exited with code 1", "", "exit_status", ["status 1"]),
    ("nonzero_exit", "Exit code 137", BASH_CALL, "killed", ["137"]),
    ("nonzero_exit", "src/a.ts(3,5): error TS1005: ';' expected.\nExit code 2", "", "compiler", ["`src/a.ts`", "line 3"]),
    ("nonzero_exit", "error[E0308]: mismatched types\n --> src/main.rs:5:9\n  |", "", "compiler", ["`src/main.rs`", "line 5"]),
    ("nonzero_exit", "/usr/bin/python: No module named pytest\nExit code 1", "", "module", ["`pytest`"]),
    ("nonzero_exit", "The program exited with 4", "", "exit_status", ["status 4"]),
    ("failing_test", "E   TypeError: bad\n=== short test summary info ===\nFAILED tests/test_a.py::test_sum[1-2] - TypeError: bad\n1 failed in 0.1s", "", "failing_test", ["`tests/test_a.py::test_sum[1-2]`"]),
    ("failing_test", "--- FAIL: TestParse (0.00s)\n    parse_test.go:9: got 1", "", "failing_test", ["`TestParse`"]),
    ("failing_test", "test tree::tests::inserts ... FAILED\n", "", "failing_test", ["`tree::tests::inserts`"]),
    ("failing_test", "  ✕ adds two numbers (3 ms)", "", "failing_test", ["`adds two numbers`"]),
    ("failing_test", "FAIL: test_add (test_calc.CalcTest)", "", "failing_test", ["`test_add`"]),
    ("failing_test", "not ok 4 - rounds half up", "", "failing_test", ["`rounds half up`"]),
    ("failing_test", "Tests: 2 failed, 7 passed, 9 total", "", "failing_count", ["2 failed"]),
    ("failing_test", "\x1b[31mFAILED\x1b[0m tests/test_b.py::test_x - assert 1 == 2\r\n", "", "failing_test", ["`tests/test_b.py::test_x`"]),
    ("failing_test", "  ● cart › adds an item", "", "failing_test", ["`cart › adds an item`"]),
    ("failing_test", "______________ test_round ______________", "", "failing_test", ["`test_round`"]),
    ("failing_test", "rspec ./spec/cart_spec.rb:12 # Cart adds", "", "failing_test", ["`./spec/cart_spec.rb:12`"]),
    ("traceback", 'Traceback (most recent call last):\n  File "/app/main.py", line 7, in <module>\n    go()\n  File "/app/lib.py", line 31, in go\n    return 1 / 0\nZeroDivisionError: division by zero', "", "exception", ["ZeroDivisionError", "line 31", "`/app/lib.py`"]),
    ("traceback", 'Traceback (most recent call last):\n  File "run.py", line 3, in <module>\n    open("data.csv")\nFileNotFoundError: [Errno 2] No such file or directory: \'data.csv\'', "", "missing_path", ["`data.csv`"]),
    ("traceback", "NameError: name 'resutl' is not defined. Did you mean: 'result'?", "", "missing_name", ["`resutl`"]),
    ("traceback", "AttributeError: 'list' object has no attribute 'push'", "", "missing_attribute", ["`push`"]),
    ("traceback", "KeyError: 'user_id'", "", "missing_key", ["`user_id`"]),
    ("traceback", "thread 'main' panicked at src/main.rs:14:9:\nindex out of bounds", "", "panic", ["`src/main.rs`", "14"]),
    ("traceback", 'Exception in thread "main" java.lang.NullPointerException\n\tat app.Main.go(Main.java:21)', "", "exception", ["java.lang.NullPointerException", "line 21", "`Main.java`"]),
    ("traceback", "ReferenceError: fmt is not defined", "", "missing_name", ["`fmt`"]),
    ("traceback", "TypeError [ERR_INVALID_ARG]: bad\n    at go (/app/x.js:3:9)", "", "exception", ["`/app/x.js`", "line 3"]),
    ("timeout", "Command timed out after 2m 0.0s", BASH_CALL, "timeout", ["`cargo build`", "2m 0.0s"]),
    ("timeout", "subprocess.TimeoutExpired: Command 'x' timed out after 30 seconds", "", "timeout", ["30 seconds"]),
    ("timeout", "Error: timeout of 5000ms exceeded", "", "timeout", ["5000ms"]),
    ("timeout", "The run exceeded the time limit of 60 seconds", "", "timeout", ["60 seconds"]),
    ("output_too_long", "File content (30154 tokens) exceeds maximum allowed tokens (25000). Please use offset and limit parameters", READ_CALL, "too_long", ["`/app/src/core.py`"]),
    ("output_too_long", "Output too large (51.2KB). Full output saved to: /tmp/x", "", "too_long", ["51.2KB"]),
    ("output_too_long", "... [truncated 48211 characters] ...", "", "too_long", ["48211 characters"]),
    ("network", "curl: (6) Could not resolve host: exmaple.com", "", "host", ["`exmaple.com`"]),
    ("network", "npm error getaddrinfo ENOTFOUND registry.npmjs.org", "", "host", ["`registry.npmjs.org`"]),
    ("network", "curl: (7) Failed to connect to localhost port 8080 after 0 ms", "", "host_port", ["`localhost`", "8080"]),
    ("network", "Error: connect ECONNREFUSED 127.0.0.1:5432", "", "host_port", ["`127.0.0.1`", "5432"]),
    ("network", "curl: (22) The requested URL returned error: 404", "", "http_status", ["404"]),
    ("network", "ssh: connect to host build.lan port 22: No route to host", "", "host_port", ["`build.lan`", "22"]),
    ("network", "HTTPSConnectionPool(host='pypi.org', port=443): Max retries exceeded", "", "host_port", ["`pypi.org`", "443"]),
    ("network", "dial tcp 10.0.0.7:6379: i/o timeout", "", "host_port", ["`10.0.0.7`", "6379"]),
    ("network", "NameResolutionError: Failed to resolve 'api.lan'", "", "host", ["`api.lan`"]),
    ("network", "Get x: lookup db.lan on 10.0.0.2:53: no such host", "", "host", ["`db.lan`"]),
    ("network", "urllib.error.HTTPError: HTTP Error 503: Service Unavailable", "", "http_status", ["503"]),
    ("merge_conflict", "CONFLICT (content): Merge conflict in src/a b.py\nAutomatic merge failed", "", "conflict_file", ["`src/a b.py`"]),
    ("merge_conflict", "error: Your local changes to the following files would be overwritten by merge:\n\tsrc/a.py\nPlease commit", "", "local_changes", ["`src/a.py`"]),
    ("merge_conflict", "error: could not apply 1a2b3c4... Rename field", "", "conflict_commit", ["1a2b3c4"]),
    ("merge_conflict", "<<<<<<< HEAD\na\n=======\nb\n>>>>>>> x", READ_CALL, "conflict_markers", ["core.py"]),
    ("merge_conflict", "CONFLICT (modify/delete): docs/a.md deleted in HEAD and modified in topic.", "", "conflict_file", ["`docs/a.md`"]),
    ("merge_conflict", "src/b.py: needs merge", "", "conflict_file", ["`src/b.py`"]),
    ("syntax_error", '  File "/app/a.py", line 12\n    def f(:\n          ^\nSyntaxError: invalid syntax', "", "python_syntax", ["`/app/a.py`", "line 12"]),
    ("syntax_error", "bash: -c: line 2: syntax error near unexpected token `('", "", "shell_syntax", ["`(`", "line 2"]),
    ("syntax_error", 'bash: -c: line 1: unexpected EOF while looking for matching `"\'', "", "shell_syntax", ["line 1"]),
    ("syntax_error", "/app/x.js:4\nlet a = ;\n        ^\nSyntaxError: Unexpected token ';'", "", "script_syntax", ["`/app/x.js`", "line 4"]),
    ("syntax_error", 'ERROR:  syntax error at or near "FORM"', "", "query_syntax", ["`FORM`"]),
    ("syntax_error", "main.c:10:5: error: expected ';' before 'return'", "", "compiler", ["`main.c`", "line 10"]),
    ("syntax_error", 'sh: 3: Syntax error: "fi" unexpected', "", "shell_syntax", ["`fi`", "line 3"]),
    ("syntax_error", 'sqlite3.OperationalError: near "FORM": syntax error', "", "query_syntax", ["`FORM`"]),
    ("syntax_error", 'yaml.scanner.ScannerError: mapping values are not allowed here\n  in "ci.yaml", line 3, column 9', "", "data_syntax", ["`ci.yaml`", "line 3"]),
    ("type_error", "TypeError: 'NoneType' object is not subscriptable", "", "none_value", ["`NoneType`", "subscriptable"]),
    ("type_error", "TypeError: unsupported operand type(s) for +: 'int' and 'str'", "", "operand_types", ["`+`", "`int`", "`str`"]),
    ("type_error", "TypeError: load() got an unexpected keyword argument 'strct'", "", "unexpected_argument", ["`strct`"]),
    ("type_error", "TypeError: go() missing 1 required positional argument: 'depth'", "", "missing_argument", ["`depth`"]),
    ("type_error", "TypeError: area() takes 2 positional arguments but 3 were given", "", "call_arity", ["`area`"]),
    ("type_error", "TypeError: Cannot read properties of undefined (reading 'length')", "", "undefined_read", ["`length`"]),
    ("type_error", "TypeError: items.fold is not a function", "", "not_a_function", ["`items.fold`"]),
    ("type_error", "./main.go:9:4: cannot use x (variable of type int) as string value", "", "compiler", ["line 9"]),
    ("type_error", "TypeError: argument of type 'int' is not iterable", "", "none_value", ["`int`", "iterable"]),
    ("import_error", "ModuleNotFoundError: No module named 'yaml'", "", "module", ["`yaml`"]),
    ("import_error", "ImportError: cannot import name 'Foo' from 'pkg.mod' (/app/pkg/mod.py)", "", "import_name", ["`Foo`", "`pkg.mod`"]),
    ("import_error", "Error: Cannot find module './utils/fmt'", "", "module", ["`./utils/fmt`"]),
    ("import_error", "a.c:1:10: fatal error: zlib.h: No such file or directory", "", "header", ["`zlib.h`"]),
    ("import_error", "SyntaxError: The requested module './fmt.js' does not provide an export named 'pad'", "", "import_name", ["`./fmt.js`", "`pad`"]),
    ("import_error", "Module not found: Error: Can't resolve 'lodash'", "", "module", ["`lodash`"]),
    ("import_error", "error[E0432]: unresolved import `crate::tree`", "", "module", ["`crate::tree`"]),
    ("import_error", "main.go:4:2: no required module provides package a.org/b; to add", "", "module", ["`a.org/b`"]),
    ("import_error", "A.java:3: error: package org.json does not exist", "", "module", ["`org.json`"]),
    ("import_error", "error[E0463]: can't find crate for `serde`", "", "module", ["`serde`"]),
    ("import_error", "./a: error while loading shared libraries: libfoo.so.1: cannot open shared object file", "", "header", ["`libfoo.so.1`"]),
    ("import_error", "/usr/bin/ld: cannot find -lssl: No such file or directory", "", "header", ["`ssl`"]),
    ("rate_limit", "429 Too Many Requests. Please retry after 20 seconds", "", "rate_limit", ["20 seconds"]),
    ("rate_limit", "Rate limit reached. Please try again in 1.5s.", "", "rate_limit", ["1.5s"]),
    ("rate_limit", "HTTP/1.1 429\nRetry-After: 30", "", "rate_limit", ["30"]),
    ("rejected", "The user doesn't want to proceed with this tool use.", BASH_CALL, "refused_call", ["`Bash`"]),
    ("rejected", "[Request interrupted by user for tool use]", BASH_CALL, "refused_call", ["`Bash`"]),
    ("rejected", "The tool use was rejected", BASH_CALL, "refused_call", ["`Bash`"]),
    ("unknown", "fatal: cat: notes.txt: No such file or directory", "", "missing_path", ["`notes.txt`"]),
    ("no_such_file", "no such file: report", "", "missing_path", ["`report`"]),
    ("unknown_command", "unknown command: remove", "remove report", "command", ["`remove`"]),
    ("missing_file", "/usr/bin/env: ‘node’: No such file or directory", "", "command", ["`node`"]),
    ("missing_file", "a.c:1:10: fatal error: zlib.h: No such file or directory", "", "header", ["`zlib.h`"]),
    ("syntax_error", "SyntaxError: Expected ',' or '}' after property value in JSON at position 57", "", "json_position", ["57"]),
    ("syntax_error", "SyntaxError: The requested module './a.js' does not provide an export named 'b'", "", "import_name", ["`./a.js`"]),
    ("timeout", "dial tcp 10.0.0.7:6379: i/o timeout", "", "host_port", ["`10.0.0.7`"]),
    ("type_error", "TypeError [ERR_INVALID_ARG]: bad\n    at go (/app/x.js:3:9)", "", "exception", ["`/app/x.js`", "line 3"]),
    ("traceback", "app.errors.QuotaError: too much", "", "exception_name", ["app.errors.QuotaError"]),
    ("output_too_long", "The response exceeds the maximum size of 100 KB", "", "too_long", ["100 KB"]),
    ("missing_file", "Error: No such file or directory: config.json.", "", "missing_path", ["`config.json`"]),
    ("missing_file", "Error: No such file or directory", READ_CALL, "missing_path", ["core.py`"]),
    ("missing_file", "fatal: x.py: No such file or directory", "", "missing_path", ["`x.py`"]),
    ("permission", "Error: Permission denied", READ_CALL, "denied_path", ["core.py`"]),
    ("unknown_tool", "Error: unknown tool: download. Tools: bash, read", "", "unknown_tool", ["`download`"]),
    ("not_read_before_edit", "Error: you must read the file api.py before you edit it.", "", "not_read", ["`api.py`"]),
    ("not_read_before_edit", "Error: conf.json has not been read yet.", "", "not_read", ["`conf.json`"]),
    ("not_read_before_edit", "You must read this file first", EDIT_CALL, "not_read", ["core.py`"]),
]
# fmt: on

NOTHING_TO_NAME: list[tuple[str, str]] = [
    ("missing_file", "File does not exist."),
    ("permission", "You are not allowed to do this."),
    ("unknown_tool", "That is not available."),
    ("wrong_argument", "Bad input."),
    ("invalid_json", "Could not parse the arguments."),
    ("edit_not_found", "No match."),
    ("edit_not_unique", "Ambiguous edit."),
    ("not_read_before_edit", "File has not been read yet."),
    ("command_not_found", "not found"),
    ("nonzero_exit", "failed"),
    ("nonzero_exit", "Exit code 0"),
    ("failing_test", "0 failed, 3 passed"),
    ("traceback", "Traceback (most recent call last):"),
    ("timeout", "Timed out."),
    ("output_too_long", "The output is too long."),
    ("network", "Connection reset by peer"),
    ("merge_conflict", "Automatic merge failed; fix conflicts and then commit the result."),
    ("syntax_error", "SyntaxError: invalid syntax"),
    ("type_error", "TypeError"),
    ("import_error", "ImportError: DLL load failed"),
    ("rate_limit", "429 Too Many Requests"),
    ("rejected", "The user doesn't want to proceed with this tool use."),
    ("unknown", "Something went wrong."),
    ("unknown", ""),
    # A kind that says what went wrong is not read by the rules of another.
    ("permission", "cat: a.py: No such file or directory"),
]


@pytest.mark.parametrize(
    ("kind", "result", "call", "name", "named"), CASES, ids=[f"{c[3]}-{c[1][:30]!r}" for c in CASES]
)
def test_a_rule_names_the_thing(kind, result, call, name, named):
    hint = RuleHints().generate(ErrorContext(kind, result, call))
    assert hint is not None
    assert hint.source == f"rule/{name}"
    assert all(thing in hint.text for thing in named), hint.text


@pytest.mark.parametrize(("kind", "result"), NOTHING_TO_NAME)
def test_no_rule_answers_where_there_is_nothing_to_name(kind, result):
    assert RuleHints().generate(ErrorContext(kind, result, "")) is None


def test_every_kind_has_a_case_with_and_one_without_a_thing_to_name():
    assert set(KINDS) <= {kind for kind, *_ in CASES}
    assert set(KINDS) <= {kind for kind, _ in NOTHING_TO_NAME}


@pytest.mark.parametrize("one", RULES, ids=lambda one: one.name)
def test_every_pattern_of_a_rule_decides_a_case(one):
    texts = [plain(result) for _, result, _, name, _ in CASES if name == one.name]
    for number, pattern in enumerate(one.patterns):
        deciding = [text for text in texts if pattern.search(text)]
        earlier = one.patterns[:number]
        assert [text for text in deciding if not any(other.search(text) for other in earlier)], (
            pattern.pattern
        )
