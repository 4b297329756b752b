"""Rules for what an agent's own tools answer: arguments, edits, files, refusals."""

from __future__ import annotations

from composer_trl_host.hinting.rules import rule

_Q = r"['\"`‘’“”]"

_READ_FIRST = (
    rule(
        "changed_since_read",
        "not_read_before_edit",
        [
            r"(?i)\bmodified since (?:it was )?(?:last )?read\b",
            r"(?i)\bchanged since (?:it was |you )?(?:last )?read\b",
        ],
        "`{path}` changed after you read it. Read it again, then make the edit on what it says now.",
    ),
    rule(
        "not_read",
        "not_read_before_edit",
        [
            r"(?i)\b(?:has )?not (?:yet )?been read\b",
            r"(?i)\bread (?:the file )?(?P<path>[^\s'\"`]{0,300}[./][^\s'\"`]{0,300}\w) (?:first|before)\b",
            r"(?i)\bmust (?:first )?(?:use the \w+ tool to )?read (?:the|this) file\b",
            r"(?i)\bread (?:the file|it) (?:first|before)\b",
        ],
        "Read `{path}` before you edit it, and edit what you have seen there.",
        also=[r"(?i)(?P<path>[^\s'\"`]{1,300}\.\w{1,20}) has not (?:yet )?been read\b"],
    ),
)

_EDITS = (
    rule(
        "edit_count",
        "edit_not_unique",
        [
            r"(?i)\bfound (?P<count>\d{1,9}) (?:matches|occurrences|instances)\b",
            r"(?i)\b(?:appears|occurs|matches|found) (?P<count>\d{1,9}) (?:times|places|locations)\b",
        ],
        "The text to replace occurs {count} times in `{path}`. Take in neighbouring lines until one place is left.",
        "The text to replace occurs {count} times. Take in neighbouring lines until one place is left.",
    ),
    rule(
        "edit_lines",
        "edit_not_unique",
        [
            r"(?i)\bmultiple (?:occurrences|matches)[^\n]{0,400} (?:in|on|at) lines?:? \[?(?P<lines>\d{1,9}(?:, ?\d{1,9})*)"
        ],
        "The text to replace stands at lines {lines}. Take in what surrounds the one you mean.",
    ),
    rule(
        "edit_several",
        "edit_not_unique",
        [
            r"(?i)\bmultiple (?:occurrences|matches|locations)\b",
            r"(?i)\bnot unique\b",
            r"(?i)\bmore than one (?:match|place|occurrence)\b",
        ],
        "The text to replace is not unique in `{path}`. Take in neighbouring lines until one place is left.",
    ),
    rule(
        "patch_place",
        "edit_not_found",
        [r"(?i)\bpatch failed: (?P<path>[^\n:]{1,300}):(?P<line>\d{1,9})"],
        "The patch does not fit `{path}` at line {line}. Read the lines around it and write the patch against them.",
    ),
    rule(
        "patch_hunk",
        "edit_not_found",
        [r"(?i)\bhunk #(?P<count>\d{1,9}) failed at (?P<line>\d{1,9})"],
        "Hunk {count} does not fit at line {line}. Read the lines around it and write the hunk against them.",
    ),
    rule(
        "edit_text",
        "edit_not_found",
        [
            r"(?i)\bdid not appear verbatim in (?P<path>[^\n]{1,300}?)\.?$",
            r"(?i)\bfailed to find (?:the )?(?:expected lines|context)[^\n]{0,40}? in (?P<path>[^\n:]{1,300}?)[:.]?$",
            r"(?i)\b(?:string|text|old_str(?:ing)?|search (?:string|text|block))[^\n]{0,80}?(?:was )?not found in (?P<path>[^\s'\"`]*[/.][^\s'\"`]*\w)",
            r"(?i)\b(?:string|text|old_str(?:ing)?|search (?:string|text|block))[^\n]{0,80}?\bnot found\b",
            r"(?i)\bblocks? failed to match\b",
            r"(?i)\b(?:could not find|no match for|cannot find) (?:the )?(?:old |search |exact )?(?:string|text|block|lines|old_str(?:ing)?)",
        ],
        "The text to replace is not in `{path}` as you wrote it. Read that part again and copy it exactly.",
        "The text starting with `{text}` is not in the file. Read that part again and copy it exactly.",
        also=[r"^String: (?P<text>[^\n]*\S)"],
    ),
)

_TOOLS = (
    rule(
        "unknown_tool",
        "unknown_tool",
        [
            rf"(?i)\bno such tool(?: available)?:? {_Q}?(?P<tool>[\w.:-]{{0,99}}\w)",
            rf"(?i)\b(?:unknown|invalid|unavailable|unrecognized) (?:tool|function)(?: name| call)?:? {_Q}?(?P<tool>[\w.:-]{{0,99}}\w)",
            rf"(?i)\b(?:tool|function):? {_Q}?(?P<tool>[\w.:-]{{0,99}}\w){_Q}? (?:was |is )?(?:not found|not available|does not exist|doesn't exist|not registered|unknown)",
            rf"(?i)\bthere is no (?:tool|function) (?:named |called )?{_Q}?(?P<tool>[\w.:-]{{0,99}}\w)",
        ],
        "There is no tool `{tool}`. Call one of the tools that you were given, spelt as it is listed.",
    ),
    rule(
        "refused_call",
        "rejected",
        [
            r"(?i)\b(?:user|person|operator)\b[^\n]{0,40}\b(?:doesn't want|does not want|rejected|declined|refused|denied|interrupted)",
            r"(?i)\brequest interrupted by user\b",
            r"(?i)\btool use was rejected\b",
        ],
        "The user refused `{tool}`. Do not call it again like that: ask what they want, or take another way.",
    ),
    rule(
        "tool_permission",
        "permission",
        [
            r"(?i)\bpermission to use (?P<tool>[\w.:-]{1,100})\b[^\n]{0,200}\bdenied\b",
            r"(?i)\brequested permissions to (?:use|write to|read from|edit) (?P<path>[^\s,]{1,300})",
        ],
        "`{tool}` is not allowed for this. Reach the goal with a tool that is.",
        "`{path}` is not open to you. Work in a place that is, or ask for it.",
    ),
)

_JSON = (
    rule(
        "json_cut_off",
        "invalid_json",
        [
            r"(?i)\bunexpected end of (?:JSON )?(?:input|data)\b",
            r"(?i)\bEOF while parsing\b",
            r"(?i)\bUnterminated string\b",
        ],
        "The JSON for `{tool}` ends too early. Close every string and bracket, or send less in one call.",
        "The JSON ends too early. Close every string and bracket, or send less in one call.",
    ),
    rule(
        "json_place",
        "invalid_json",
        [
            r"(?i)\bline (?P<line>\d{1,9}),? column (?P<column>\d{1,9})\b",
        ],
        "The JSON breaks at line {line}, column {column}. Check the quotes, commas and escapes just before it.",
    ),
    rule(
        "json_position",
        "invalid_json syntax_error",
        [
            r"(?i)\b(?:at )?position (?P<position>\d{1,9})\b",
            r"(?i)\b(?:char(?:acter)?|offset) (?P<position>\d{1,9})\b",
        ],
        "The JSON breaks at character {position}. Check the quotes, commas and escapes just before it.",
    ),
    rule(
        "json_token",
        "invalid_json",
        [rf"(?i)\bunexpected (?:token|character) {_Q}?(?P<token>[^\s'\"`]{{1,20}})"],
        "The JSON breaks at `{token}`. Check the quotes, commas and escapes just before it.",
    ),
)

_ARGUMENTS = (
    rule(
        "missing_argument",
        "wrong_argument type_error",
        [
            rf"(?i)\brequired (?:parameter|argument|property|field)s? {_Q}(?P<argument>[\w.-]{{1,100}}){_Q} (?:is|was|are) missing",
            rf"(?i)\bmissing (?:\d+ )?required (?:keyword-only |positional )?(?:parameter|argument|property|field|option)s?:? {_Q}?(?P<argument>[\w.<>-]{{1,100}})",
            rf"{_Q}(?P<argument>[\w.-]{{1,100}}){_Q} is a required property",
            r"(?i)\bfollowing (?:required )?arguments (?:are required|were not provided):\s{1,8}(?P<argument>[^\s,]{1,100})",
            r"^(?P<argument>[\w.-]{1,100})\n\s{1,8}Field required\b",
        ],
        "The call lacks `{argument}`. Give every argument that is required, under its exact name.",
    ),
    rule(
        "unexpected_argument",
        "wrong_argument type_error nonzero_exit",
        [
            rf"(?i)\bunexpected (?:keyword |named )?(?:parameter|argument|property|field)s?:? {_Q}(?P<argument>[\w.-]{{1,100}})",
            rf"(?i)\badditional properties are not allowed \({_Q}(?P<argument>[\w.-]{{1,100}})",
            r"(?i)\bunrecognized arguments?: (?P<argument>\S{1,100})",
            rf"(?i)\b(?:unknown|unrecognized|invalid|illegal|no such) (?:option|flag|switch|argument|parameter)(?::| --)? {_Q}?(?P<argument>[\w=-]{{1,100}})",
        ],
        "`{argument}` is not accepted. Read the usage or schema and drop it, or use the name given there.",
    ),
    rule(
        "argument_type",
        "wrong_argument",
        [
            rf"(?i)\b(?:parameter|argument|field|property) {_Q}(?P<argument>[\w.-]{{1,100}}){_Q} (?:type is expected as|must be|should be|expects) (?:an? |of type )?{_Q}?(?P<wanted>\w{{1,40}})",
            rf"(?P<value>{_Q}[^\n'\"`]{{1,100}}{_Q}|\S{{1,100}}) is not of type {_Q}(?P<wanted>\w{{1,40}})",
            r"^(?P<argument>[\w.-]{1,100})\n\s{1,8}Input should be (?:an? )?(?:valid )?(?P<wanted>\w{1,40})",
        ],
        "`{argument}` must be of type {wanted}. Give the value in that form.",
        "`{value}` is not of type {wanted}. Give the value in the form that the schema asks for.",
    ),
    rule(
        "argument_choice",
        "wrong_argument nonzero_exit",
        [
            rf"(?i)\binvalid choice: {_Q}?(?P<value>[^\s'\"`]{{1,100}})",
            rf"(?P<value>{_Q}[^\n'\"`]{{1,100}}{_Q}) is not one of \[",
            rf"(?i)\binvalid (?:enum )?value:? {_Q}(?P<value>[^\n'\"`]{{1,100}})",
        ],
        "`{value}` is not one of the values allowed there. Pick one that the message or the schema lists.",
    ),
)

_FILES = (
    rule(
        "is_directory",
        "missing_file wrong_argument",
        [
            rf"\[Errno 21\] Is a directory: {_Q}(?P<path>[^\n'\"`]{{1,400}})",
            r"^[\w./-]{1,60}: (?:[\w -]{0,40}: )?(?P<path>[^\n:]{1,300}): Is a directory",
            r"\bEISDIR\b",
            r"(?i)\bis a directory, not a file\b",
        ],
        "`{path}` is a folder. List it and name the file in it that you want.",
    ),
)

TOOL_RULES = (*_READ_FIRST, *_EDITS, *_TOOLS, *_JSON, *_ARGUMENTS, *_FILES)
