"""Whether a result failed, by its text: asked only where the file has no flag for it."""

from __future__ import annotations

import re

_I = re.IGNORECASE

NOTHING = r"(?!\s*(?:0\b|none\b|null\b|nil\b|false\b|no(?: errors?)?\s*(?:[.,;]|\Z)|\Z))"
"""After a tag: it must not say that there was no error."""

START_TAGS: tuple[tuple[str, re.Pattern[str], bool], ...] = (
    ("<tool_use_error>", re.compile(r"<tool_use_error>"), True),
    ("<error>", re.compile(r"<(?:tool_|system[-_])?error>", _I), True),
    ("Error:", re.compile(r"\W{0,3}(?:Error|ERROR)\b\W{0,3}:" + NOTHING), True),
    ("Error executing", re.compile(r"Error (?:executing|calling|running|invoking|reading|writing|editing|opening|parsing|processing|searching|fetching)\b"), True),
    ("XError:", re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?: \[[\w]+\])?:"), True),
    ("MCP error", re.compile(r"MCP error -?\d+"), True),
    ("fatal:", re.compile(r"fatal: ", _I), True),
    ("error:", re.compile(r"(?:[\w./-]{1,60}: )?(?:[a-z]+ ){0,2}(?:error|failed)\s*:" + NOTHING, _I), False),
    ("panic", re.compile(r"panic: |thread '[^'\n]*' panicked at "), False),
    ("Failed to", re.compile(r"(?:Failed|Unable) to [a-z]+ ", _I), False),
)  # fmt: skip
"""Name, pattern at the start of a result, and whether it counts in what a reading tool returned."""

SHELL_LINE = re.compile(
    r"(?:[\w./+-]+(?:\[\d+\])?: )(?:line \d+: |\d+: )?(?:[^\n]{1,300}: )?"
    r"(?:no such file or directory|permission denied|is a directory|not a directory|command not found(?:: \S+)?|not found|operation not permitted)\.?",
    _I,
)
"""One whole line by which a shell or a core tool says that it failed."""

VERDICTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("test summary", re.compile(
        r"=* ?(?:\d+ [a-z]+, )*[1-9]\d* (?:failed|errors?)\b.* in [\d.]+ ?m?s\b.*|FAILED \((?:failures|errors)=.*|test result: FAILED.*"
        r"|FAIL(?:\t.*)?|Tests: +(?:\d+ [a-z]+, )*[1-9]\d* failed.*")),
    ("Command failed with exit code", re.compile(r".{0,60}\bcommand failed(?: with)? (?:exit (?:code|status)|code):? [1-9]\d*\W*", _I)),
    ("npm ERR!", re.compile(r"npm (?:ERR!|error) .*")),
)  # fmt: skip
"""Whole lines among the last ones of a run that say how it ended."""

STATUS_START = re.compile(
    r"\[?(?:process |command )?exit(?:ed)?(?: with)?(?:[ _-](?:code|status))\]?\s*[:=]?\s*(-?\d+)"
    r"|<(?:returncode|return_code|exit_code|exit-code|exit_status)>\s*(-?\d+)",
    _I,
)
STATUS_END = re.compile(
    r".{0,80}\bexit(?:ed|s)?(?: with)?(?:[ _-](?:code|status|value))\s*[:=]?\s*(-?\d+)\W*", _I
)
"""An exit status that the harness wrote into the text, as the first words or as the whole last line."""

READING_TOOLS = frozenset(
    [
        "read",
        "cat",
        "grep",
        "egrep",
        "rg",
        "glob",
        "search",
        "find",
        "view",
        "open",
        "list",
        "ls",
        "head",
        "tail",
        "less",
        "more",
        "fetch",
        "browse",
        "show",
        "lookup",
        "tree",
    ]
)
SHELL_TOOLS = frozenset(
    [
        "bash",
        "shell",
        "sh",
        "zsh",
        "powershell",
        "terminal",
        "console",
        "command",
        "cmd",
        "exec",
        "execute",
        "run",
    ]
)
READING_COMMAND = re.compile(
    r'"(?:command|cmd|script|input|keystrokes)"\s*:\s*(?:\[(?:\s*"[^"]{0,20}"\s*,)*\s*)?"\s*(?:cd [^&;|"]{1,200}(?:&&|;)\s*)?(?:sudo )?'
    r"(?:cat|bat|nl|head|tail|less|more|grep|egrep|fgrep|rg|ag|sed -n|awk|find|ls|tree|jq|zcat|strings|journalctl|git (?:show|log|diff|grep|blame)|(?:docker|kubectl) logs)\b"
)
"""Tools, and commands of a shell tool, that show what others wrote; and the tools that run commands."""
