"""What failed, by the text of a result that is known to have failed."""

from __future__ import annotations

import re

from composer_trl_host.traces.model import REJECTED

_I = re.IGNORECASE
_M = re.MULTILINE

KINDS: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = (
    # A person's words come before everything: whatever else such a result says, the model did no wrong.
    (
        REJECTED,
        ("user", "rejected", "aborted", "granted"),
        re.compile(
            r"\A(?:the )?user (?:doesn['’]t want to|rejected|denied|declined|refused|cancell?ed|aborted|interrupted|chose not to)\b"
            r"|\A\[request interrupted by user"
            r"|\A[^\n]{0,80}\b(?:rejected|denied|declined|cancell?ed|aborted|interrupted) by (?:the )?user\b"
            r"|\A(?:the )?(?:tool use|tool call|command|request) was (?:rejected|aborted before completion)"
            r"|\Acommand was aborted"
            r"|haven['’]t granted it yet",
            _I,
        ),
    ),
    # The editing tools' own words, before "not found" and "does not exist" of the general kinds.
    (
        "not_read_before_edit",
        ("been read yet", "must read", "must first read", "first", "since"),
        re.compile(
            r"(?:has not|hasn['’]t) been read yet|must (?:first )?read (?:the|this) file|read (?:it|the file) first"
            r"|(?:has been|was) (?:modified|changed) since (?:it was )?(?:last )?read",
            _I,
        ),
    ),
    (
        "edit_not_unique",
        ("replace_all is false", "string to replace", "old_str", "unique", "times", "multiple"),
        re.compile(
            r"found \d+ (?:matches|occurrences) of (?:the )?(?:string to replace|old_str)|replace_all is false"
            r"|multiple (?:occurrences|matches) of (?:the )?(?:old_str|string|text|search)"
            r"|old_str(?:ing)?\b[^\n]{0,80}(?:not unique|must be unique|appears \d+ times)"
            r"|(?:string|text|snippet)[^\n]{0,60}(?:is not unique|must be unique|appears \d+ times)",
            _I,
        ),
    ),
    (
        "edit_not_found",
        (
            "string to replace",
            "verbatim",
            "no replacement",
            "old_str",
            "exact ",
            "search block",
            "text to replace",
            "context",
            "expected lines",
            "patch",
            "hunk",
        ),
        re.compile(
            r"string to replace (?:was )?not found|did not appear verbatim|no replacement was (?:made|performed)"
            r"|old_str(?:ing)?\b[^\n]{0,80}(?:not found|does not exist|no match)"
            r"|(?:could not|couldn['’]t|failed to|cannot|can't|unable to) (?:find|locate|match)[^\n]{0,40}"
            r"(?:old_str|exact (?:text|match|string)|string to replace|search block|text to replace|context|expected lines)"
            r"|search block[^\n]{0,60}not found|patch (?:does not apply|failed)|hunk #?\d+ failed|hunks? failed to apply",
            _I,
        ),
    ),
    (
        "unknown_tool",
        ("tool", "function"),
        re.compile(
            r"no such tool|(?:unknown|invalid|unrecognized|undefined) (?:tool|function)\b(?! (?:arguments?|parameters?|input|call))"
            r"|\b(?:tool|function) ['\"`]?[\w.:-]+['\"`]? (?:was |is )?(?:not found|not available|not registered|not defined|unknown)"
            r"|\btool ['\"`]?[\w.:-]+['\"`]? does not exist|\bis not (?:a valid|a known|an available|an allowed) tool"
            r"|\btool not found\b|tool does not exist",
            _I,
        ),
    ),
    # Only words about the call itself: a program whose own JSON is broken fails in a traceback.
    (
        "invalid_json",
        ("json", "expecting "),
        re.compile(
            r"\A(?!Traceback)[^\n]{0,120}(?:invalid|malformed|bad|broken) json\b"
            r"|\A(?!Traceback)[^\n]{0,120}(?:(?:failed|unable) to|could not|couldn['’]t|cannot|can't) (?:be )?(?:parsed?|decoded?)\b[^\n]{0,80}\bjson\b"
            r"|\A(?!Traceback)[^\n]{0,120}\bnot (?:a )?valid json\b"
            r"|\A(?!Traceback)[^\n]{0,120}\bjson ?(?:decode|parse|parsing) ?error"
            r"|\A(?:json(?:\.decoder)?\.)?JSONDecodeError"
            r"|\AExpecting (?:value|property name|',' delimiter|':' delimiter)[^\n]{0,60}line \d+ column \d+",
            _I,
        ),
    ),
    (
        "wrong_argument",
        (
            "argument",
            "param",
            "option",
            "input",
            "validation error",
            "-32602",
            "exactly the same",
            "must be ",
            "invalid ",
            "git command",
            "no such ",
            "required",
            "absolute path",
        ),
        re.compile(
            r"InputValidationError|required parameter|(?:un|not )expected parameter|unknown parameter|-32602"
            r"|(?:invalid|missing|wrong|bad|unexpected|unsupported) (?:tool )?(?:arguments?|parameters?|params|input)\b"
            r"|\A(?!Traceback)[^\n]{0,200}(?:missing \d+ required (?:positional|keyword-only) argument|unexpected keyword argument)"
            r"|\A(?!Traceback)[^\n]{0,80}\d+ validation errors? for\b|missing required (?:argument|parameter|field|propert)"
            r"|the following arguments are required|unrecognized arguments?|(?:invalid|illegal|unknown|unrecognized) option\b"
            r"|are exactly the same|old_string and new_string must be different|path must be absolute|invalid (?:url|choice)\b"
            r"|is not a git command|no such (?:sub)?command|is a required (?:property|argument|parameter)|must be an absolute path",
            _I,
        ),
    ),
    (
        "output_too_long",
        ("exceed", "too large", "too long", "too big"),
        re.compile(
            r"exceeds? (?:the )?max(?:imum)? (?:allowed )?(?:tokens?|size|length|output|characters?|number of (?:tokens|characters))"
            r"|exceeds? maximum allowed|(?:output|result|response|content|file) (?:is |was )?too (?:large|long|big)\b"
            r"|maximum (?:output|response|context) (?:size|length)[^\n]{0,30}exceeded",
            _I,
        ),
    ),
    (
        "merge_conflict",
        ("conflict", "merge failed", "unmerged", "could not apply", "needs merge", "u\t"),
        re.compile(
            r"^CONFLICT \(|automatic merge failed|fix conflicts and then|you have unmerged paths|unmerged files"
            r"|^error: could not apply|^U\t|needs merge$|merge conflict in ",
            _I | _M,
        ),
    ),
    # A failing run may print any other error on its way, so its verdict comes before them.
    (
        "failing_test",
        ("fail", "not ok"),
        re.compile(
            r"^=* ?(?:\d+ [a-z]+, )*[1-9]\d* failed\b|^FAILED \((?:failures|errors)=|^FAILED \S+::|^test result: FAILED"
            r"|^--- FAIL: |^FAIL\t|^FAIL$|^FAIL +\S+\.(?:test|spec)\.|^Tests: +(?:\d+ [a-z]+, )*[1-9]\d* failed|^ +[1-9]\d* failing$"
            r"|^Failed tests?:|^[1-9]\d* tests? failed|\bTests? run: \d+, Failures: [1-9]|^not ok \d+",
            _M,
        ),
    ),
    (
        "command_not_found",
        ("not found", "not recognized", "no such file", "unknown command"),
        re.compile(
            r"command not found|\bunknown command\b|is not recognized as (?:an internal|the name of)|^\S*sh: (?:line )?\d+: [^\n:]+: not found"
            r"|^(?:make|env|exec)[^\n]{0,60}: [^\n]*(?:command not found|no such file or directory: ['\"]?\w+['\"]?$)",
            _I | _M,
        ),
    ),
    # Refused by the service, then not reached, then too slow: "connection timed out" is the network's.
    (
        "rate_limit",
        (
            "429",
            "too many requests",
            "rate limit",
            "rate-limit",
            "rate_limit",
            "ratelimit",
            "quota",
            "overloaded",
        ),
        re.compile(
            r"\b429\b[^\n]{0,40}(?:too many|rate|limit|error)|(?:status|code|http|error)[^\n]{0,12}\b429\b|too many requests"
            r"|rate[ _-]?limit|quota (?:exceeded|exhausted)|exceeded your[^\n]{0,20}quota|RateLimitError|overloaded_error",
            _I,
        ),
    ),
    (
        "network",
        (
            "resolve",
            "name or service",
            "getaddrinfo",
            "connect",
            "econn",
            "enotfound",
            "ehostunreach",
            "unreachable",
            "no route",
            "unable to access",
            "max retries",
            "ssl",
            "certificate",
            "bad gateway",
            "service unavailable",
            "504 gateway",
            "status code",
            "fetch failed",
            "hang up",
        ),
        re.compile(
            r"could not resolve (?:host|hostname)|name or service not known|temporary failure in name resolution|getaddrinfo"
            r"|connection (?:refused|reset|aborted|timed out|closed by)|ECONN(?:REFUSED|RESET|ABORTED)|ENOTFOUND|EHOSTUNREACH"
            r"|network is unreachable|no route to host|failed to connect|cannot connect to|unable to (?:connect|access 'http)|max retries exceeded"
            r"|ssl(?:error|: certificate| certificate)|certificate verify failed|\b(?:502 bad gateway|503 service unavailable|504 gateway)"
            r"|request failed with status code (?!429)\d+|fetch failed|socket hang up|(?:Connect|Connection)Error\b",
            _I,
        ),
    ),
    (
        "timeout",
        ("timeout", "timed", "time-out", "time out", "time limit", "deadline"),
        re.compile(
            r"timed[ -]?out\b|\btime-?out (?:of|after|error|exceeded|expired|reached|was)\b|\btimeout:|\btime limit exceeded|\bTimeoutE\w+|deadline exceeded|exceeded the (?:time limit|timeout)|ETIMEDOUT",
            _I,
        ),
    ),
    # What an interpreter or a compiler says, the last word of a Python traceback aside (EXCEPTIONS).
    (
        "syntax_error",
        (
            "syntax",
            "indentationerror",
            "taberror",
            "unexpected",
            "error ts1",
            "parseerror",
            "error: expected",
        ),
        re.compile(
            r"\b(?:SyntaxError|IndentationError|TabError)\b|syntax error\b|unexpected (?:EOF|token)\b|unexpected end of file"
            r"|\berror TS1\d{3}:|\bParseError\b|^error: expected |^[^\n:]+:\d+:\d+: error: expected ",
            _I | _M,
        ),
    ),
    (
        "import_error",
        ("importerror", "module", "package", "cannot import", "unresolved", "is not in", "ts2307"),
        re.compile(
            r"\b(?:ModuleNotFoundError|ImportError)\b|no module named|cannot find (?:module|package)\b|module not found:"
            r"|cannot import name|unresolved import|is not in (?:std|GOROOT)|error TS2307:|ERR_MODULE_NOT_FOUND",
            _I,
        ),
    ),
    (
        "type_error",
        (
            "typeerror",
            "error ts2",
            "mismatched",
            "incompatible type",
            "[arg-type]",
            "[assignment]",
            "[return-value]",
            "[call-arg]",
            "cannot use",
            "(report",
            "error[",
        ),
        re.compile(
            r"\bTypeError\b|\berror TS2\d{3}:|mismatched types|incompatible types?\b|\[(?:arg-type|assignment|return-value|call-arg)\]|\(report[A-Z]\w+\)|\berror\[[a-z-]{4,}\]:"
            r"|cannot use [^\n]{1,80} as [^\n]{1,40}(?: value)? in",
            _I,
        ),
    ),
    (
        "missing_file",
        (
            "no such",
            "enoent",
            "filenotfound",
            "exist",
            "not found",
            "not be found",
            "cannot find",
            "did not match",
            "a directory",
            "eisdir",
            "cannot access",
            "cannot stat",
            "cannot open",
        ),
        re.compile(
            r"no such (?:file|directory)|\bENOENT\b|FileNotFoundError|(?:file|directory|path|folder)\b[^\n]{0,200}(?:does not exist|doesn['’]t exist|not found|could not be found)"
            r"|cannot find the (?:file|path)|(?:does not|doesn['’]t) exist[^\n]{0,40}(?:working directory|cwd)|pathspec '[^\n]*' did not match"
            r"|is a directory\b|\bEISDIR\b|not a directory\b|cannot (?:access|stat|open) '",
            _I,
        ),
    ),
    (
        "permission",
        (
            "denied",
            "not permitted",
            "eacces",
            "eperm",
            "permissionerror",
            "not allowed",
            "read-only",
            "forbidden",
            "blocked",
            "approval",
        ),
        re.compile(
            r"permission denied|operation not permitted|\bEACCES\b|\bEPERM\b|PermissionError|access (?:is )?denied|not allowed\b"
            r"|permission to use [^\n]{1,200} has been denied|read-only file system|403 forbidden|\bblocked by\b|\bwas blocked\b|requires approval|denied by",
            _I,
        ),
    ),
    (
        "traceback",
        ("traceback", "panic", "exception in", "at "),
        re.compile(
            r"Traceback \(most recent call last\)|^panic: |panicked at |^Exception in thread |^\s+at [\w.$<>]+ ?\([^\n]*:\d+",
            _M,
        ),
    ),
)
"""Kind, lower-case words of which a matching text holds one (a pattern costs a hundred times more), and
what its text looks like. Specific before general; the first that matches is the kind.

The order decides, since the general words stand inside the specific messages: "String to replace not
found in file" is no missing file, "python: command not found" with status 127 no mere status, and a
failing test run prints tracebacks, time-outs and import errors of its own.
"""

EXCEPTIONS: dict[str, str] = {
    "ModuleNotFoundError": "import_error",
    "ImportError": "import_error",
    "SyntaxError": "syntax_error",
    "IndentationError": "syntax_error",
    "TabError": "syntax_error",
    "TypeError": "type_error",
    "FileNotFoundError": "missing_file",
    "NotADirectoryError": "missing_file",
    "IsADirectoryError": "missing_file",
    "PermissionError": "permission",
    "TimeoutError": "timeout",
    "TimeoutExpired": "timeout",
    "ReadTimeout": "timeout",
    "ConnectTimeout": "network",
    "ConnectionError": "network",
    "ConnectionRefusedError": "network",
    "ConnectionResetError": "network",
    "ConnectError": "network",
    "SSLError": "network",
    "URLError": "network",
    "gaierror": "network",
    "RateLimitError": "rate_limit",
}
"""Kinds by the last exception of a Python traceback; any other is ``traceback``."""

EXIT_CODES: dict[int, str] = {124: "timeout", 126: "permission", 127: "command_not_found"}
"""What a shell's status means by itself, asked after the text."""

BEFORE_TRACEBACK = frozenset(
    {REJECTED, "not_read_before_edit", "edit_not_unique", "edit_not_found", "unknown_tool", "failing_test"}
)
"""Kinds that a traceback in the same text does not override."""
