"""Rules for what the machine around the code answers: shells, files, limits, networks."""

from __future__ import annotations

from composer_trl_host.hinting.rules import rule

_Q = r"['\"`‘’“”]"

_SHELL = (
    rule(
        "command",
        "command_not_found missing_file",
        [
            r"\bcommand not found: (?P<command>\S{1,100})",
            r"(?:^|: )(?P<command>[^\s:'\"`]{1,100}): command not found\b",
            r"\bsh: (?:line )?\d{1,6}: (?P<command>[^\s:]{1,100}): not found\b",
            rf"{_Q}(?P<command>[^\n'\"`‘’]{{1,100}}){_Q} is not recognized as\b",
            rf"\benv: {_Q}?(?P<command>[^\s'\"`‘’:]{{1,100}}){_Q}?: No such file or directory",
            r"\bexec: \"(?P<command>[^\n\"]{1,100})\": executable file not found",
            rf"\b[Uu]nknown command:? {_Q}?(?P<command>[^\s'\"`:]{{1,100}})",
            rf"\bno such (?:sub)?command:? {_Q}?(?P<command>[^\s'\"`:]{{1,100}})",
            rf"{_Q}(?P<command>[\w-]{{1,100}}){_Q} is not a \w+ command\b",
        ],
        "There is no command `{command}` here. See what is available, or reach the goal another way.",
    ),
    rule(
        "build_target",
        "command_not_found nonzero_exit",
        [
            rf"\bNo rule to make target {_Q}(?P<target>[^\n'\"`]{{1,200}})",
            rf"(?i)\bmissing script: {_Q}?(?P<target>[^\s'\"`]{{1,200}})",
        ],
        "There is no target `{target}`. List the ones that the project defines and use one of them.",
    ),
    rule(
        "remote_access",
        "permission network",
        [r"\bPermission denied \((?P<method>[\w,-]{1,60})\)"],
        "The remote refused you by `{method}`. Use an address or a way that needs no such login.",
    ),
    rule(
        "denied_path",
        "permission",
        [
            r"\b(?:EACCES|EPERM|EROFS): [\w -]{1,60}, \w{1,20} '(?P<path>[^\n']{1,400})'",
            rf"\[Errno (?:1|13|30)\] [\w -]{{1,60}}: {_Q}(?P<path>[^\n'\"`]{{1,400}})",
            rf"(?:^|: |cannot [a-z ]{{1,30}}? |can't \w{{1,20}} ){_Q}?(?!cannot |can't |\w{{0,60}}[Ee]rror:|fatal:)(?P<path>[^\s:'\"`‘’][^\n:'\"`‘’]{{0,300}}?){_Q}?: (?:Permission denied|Operation not permitted|Read-only file system)",
            r"(?i)^(?:\w{1,60}: )?permission denied\b",
        ],
        "You may not do that to `{path}`. Check who may, and work in a place that is yours.",
    ),
)

_MISSING = (
    rule(
        "missing_path",
        "missing_file",
        [
            r"\bENOENT: no such file or directory, \w{1,20} '(?P<path>[^\n']{1,400})'",
            rf"\[Errno 2\] No such file or directory: {_Q}(?P<path>[^\n'\"`]{{1,400}})",
            r"\bcan't open file '(?P<path>[^\n']{1,400})'",
            rf"\bpathspec {_Q}(?P<path>[^\n'\"`]{{1,400}}){_Q} did not match",
            rf"(?i)\bno such (?:file|folder|directory)(?: or directory)?: {_Q}?(?P<path>[^\s'\"`]{{0,300}}[^\s'\"`.,;:)])",
            rf"(?:^|: |cannot [a-z ]{{1,30}}? |can't \w{{1,20}} ){_Q}?(?!cannot |can't |\w{{0,60}}[Ee]rror:|fatal:)(?P<path>[^\s:'\"`‘’][^\n:'\"`‘’]{{0,300}}?){_Q}?(?: for reading)?: No such file or directory",
            rf"(?i)\b(?:file|path|directory|folder) (?:not found|does not exist): {_Q}?(?P<path>[^\s'\"`]{{0,300}}[^\s'\"`.,;:)])",
            rf"(?i)\b(?:file|path|directory|folder):? {_Q}?(?P<path>[^\s'\"`]{{0,290}}[/.\\][^\s'\"`]{{0,290}}){_Q}? (?:does not exist|doesn't exist|was not found|not found)",
            r"(?i)\b(?:file|path|directory|folder) (?:does not exist|doesn't exist|(?:was )?not found)\b",
            r"(?i)\bcannot find the (?:file|path) specified\b",
            r"(?i)\bno such (?:file or )?directory\b",
        ],
        "`{path}` does not exist. List its folder or search for the name, then use a path that you have seen.",
        last=True,
    ),
)

_LIMITS = (
    rule(
        "rate_limit",
        "rate_limit",
        [
            r"(?i)\b(?:retry|try again) (?:after|in):? (?P<duration>\d{1,9}(?:\.\d{1,9})? ?(?:ms|milliseconds?|seconds?|minutes?|hours?|[smh])\b)",
            r"(?i)\bretry-after:? (?P<duration>\d{1,9})\b",
        ],
        "The limit is reached for {duration}. Wait at least that long, or ask for more at once and less often.",
    ),
    rule(
        "timeout",
        "timeout",
        [
            r"(?i)\btime[d-]?[ -]?out (?:after|of):? (?P<duration>\d{1,9}(?:\.\d{1,9})? ?(?:ms|milliseconds?|seconds?|minutes?|hours?|[smh])(?: ?\d{1,3}(?:\.\d{1,6})?s)?\b)",
            r"(?i)\b(?:exceeded|exceeds) (?:the )?(?:time ?(?:out|limit)) (?:of )?(?P<duration>\d{1,9}(?:\.\d{1,9})? ?(?:ms|seconds?|minutes?|[smh])\b)",
        ],
        "`{command}` was stopped after {duration}. Do less in one call, or run it in the background and look later.",
        "The call was stopped after {duration}. Do less in one call, or run it in the background and look later.",
    ),
    rule(
        "too_long",
        "output_too_long",
        [
            r"(?i)\((?P<limit>\d[\d,._]{0,12} ?(?:tokens|characters|chars|bytes|lines|[KM]?i?B))\) exceeds\b",
            r"(?i)\bexceeds (?:the )?(?:maximum|max|limit)[^\n]{0,40}?\(?(?P<limit>\d[\d,._]{0,12} ?(?:tokens|characters|chars|bytes|lines|[KM]?i?B)?\b)",
            r"(?i)\b(?:output|result|response|file|content)[^\n]{0,20} too (?:large|long)\b[^\n]{0,20}?\(?(?P<limit>\d[\d,._]{0,12} ?(?:tokens|characters|chars|bytes|lines|[KM]?i?B)\b)",
            r"(?i)\btruncated[^\n]{0,40}?(?P<limit>\d[\d,._]{0,12} (?:tokens|characters|chars|bytes|lines))",
        ],
        "`{path}` does not fit into one result ({limit}). Read a range of it, or search it for what you need.",
        "The output does not fit ({limit}). Narrow it with a filter, a range or a search.",
    ),
)

_NETWORK = (
    rule(
        "host_port",
        "network timeout",
        [
            r"(?i)\bfailed to connect to (?P<host>[\w.:-]{1,200}?) port (?P<port>\d{1,5})",
            r"\bECONN(?:REFUSED|RESET) (?P<host>[\w.:-]{1,200}):(?P<port>\d{1,5})",
            r"(?i)\bconnect to host (?P<host>[\w.-]{1,200}) port (?P<port>\d{1,5})",
            r"(?i)ConnectionPool\(host='(?P<host>[^\n']{1,200})', port=(?P<port>\d{1,5})\)",
            r"(?i)\bdial tcp (?P<host>[\w.:\[\]-]{1,200}):(?P<port>\d{1,5}): ",
        ],
        "`{host}` does not answer on port {port}. Check that the address is right and that something listens there.",
    ),
    rule(
        "host",
        "network",
        [
            rf"(?i)\bcould not resolve host:? {_Q}?(?P<host>[\w.-]{{1,200}})",
            r"\b(?:ENOTFOUND|EAI_AGAIN) (?P<host>[\w.-]{1,200})",
            rf"(?i)\bfailed to resolve {_Q}(?P<host>[\w.-]{{1,200}})",
            r"(?i)\blookup (?P<host>[\w.-]{1,200})(?: on [\w.:-]{1,200})?: no such host",
        ],
        "The name `{host}` does not resolve. Check its spelling, and whether there is a network here at all.",
    ),
    rule(
        "http_status",
        "network",
        [
            r"(?i)\breturned error: (?P<status>[45]\d\d)\b",
            r"(?i)\b(?:HTTP(?:/[\d.]{1,3})?|status(?: code)?|HTTP Error)[ :=]{1,3}(?P<status>[45]\d\d)\b",
        ],
        "The server answered {status}. Check the address and what you sent before you ask again.",
    ),
)

SYSTEM_RULES = (*_SHELL, *_MISSING, *_LIMITS, *_NETWORK)
