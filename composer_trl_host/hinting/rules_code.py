"""Rules for what code does: version control, tests, imports, compilers, interpreters."""

from __future__ import annotations

from composer_trl_host.hinting.rules import rule

_Q = r"['\"`‘’“”]"
_PATH = r"[^\s'\"`:()]{1,300}"

_VERSION_CONTROL = (
    rule(
        "conflict_file",
        "merge_conflict",
        [
            r"^CONFLICT \([^)\n]{1,60}\): Merge conflict in (?P<path>[^\n]{1,300})$",
            r"^CONFLICT \([^)\n]{1,60}\): (?P<path>[^\n]{1,300}?) (?:deleted|added|renamed) in ",
            r"^(?P<path>[^\n:]{1,300}): needs merge$",
        ],
        "`{path}` holds a conflict. Settle every part between its markers, stage it, then go on.",
    ),
    rule(
        "local_changes",
        "merge_conflict",
        [
            r"would be overwritten by (?:merge|checkout|rebase|cherry-pick)[^\n]{0,20}\n\s{1,8}(?P<path>[^\n]{1,300})"
        ],
        "Your changes to `{path}` are in the way. Commit them or put them aside first, then repeat the step.",
    ),
    rule(
        "conflict_commit",
        "merge_conflict",
        [r"\bcould not apply (?P<commit>[0-9a-f]{7,40})\b"],
        "Commit {commit} does not apply cleanly. See which files conflict, settle them, then continue.",
    ),
    rule(
        "conflict_markers",
        "merge_conflict syntax_error",
        [r"^(?:\+\+|\s{0,12}\d{0,7}[:|\t]?)?<{7} \S"],
        "`{path}` still has conflict markers. Settle each marked part and remove the markers.",
    ),
)

_TESTS = (
    rule(
        "failing_test",
        "failing_test",
        [
            r"^(?:FAILED|ERROR) (?P<test>\S{1,300}::[^\n]{1,200}?)(?: - |$)",
            r"^\s{0,16}--- FAIL: (?P<test>\S{1,200})",
            r"^test (?P<test>\S{1,200}) \.\.\. FAILED",
            r"^(?:FAIL|ERROR): (?P<test>\w{1,200}) \(",
            r"^\s{0,16}[✕✗✘×] (?P<test>[^\n]{1,200}?)(?: \(?\d+(?:\.\d+)? ?m?s\)?)?$",
            r"^\s{0,8}● (?P<test>[^\n]{1,200})$",
            r"^not ok \d{1,6} (?:- )?(?P<test>[^\n]{1,200})$",
            r"^_{3,80} (?P<test>[\w.\[\]-]{1,200}) _{3,80}$",
            r"^rspec (?P<test>\S{1,300}:\d{1,7})",
        ],
        "Test `{test}` fails. Compare what it expects with what it got, and mend the code that it calls.",
    ),
    rule(
        "failing_count",
        "failing_test",
        [r"(?i)\b(?P<count>[1-9]\d{0,6}) (?:tests? )?(?:failed|failing|failures?)\b"],
        "{count} failed. Run the first of them alone and mend what it shows before you run all again.",
    ),
)

_IMPORTS = (
    rule(
        "import_name",
        "import_error syntax_error",
        [
            rf"\bcannot import name {_Q}(?P<name>[\w.]{{1,200}}){_Q} from (?:partially initialized module )?{_Q}(?P<module>[\w.]{{1,200}})",
            rf"\bmodule {_Q}(?P<module>[^\n'\"`]{{1,200}}){_Q} (?:has no exported member|does not provide an export named) {_Q}(?P<name>[\w.$]{{1,200}})",
        ],
        "`{module}` has no `{name}` to import. Look at what it does define in the version installed here.",
        last=True,
    ),
    rule(
        "module",
        "import_error",
        [
            rf"\bNo module named {_Q}?(?P<module>[\w.]{{1,200}})",
            rf"\b[Cc]annot find (?:module|package) {_Q}(?P<module>[^\n'\"`]{{1,200}})",
            rf"\bCan't resolve {_Q}(?P<module>[^\n'\"`]{{1,200}})",
            rf"\bunresolved import {_Q}(?P<module>[\w:]{{1,200}})",
            r"\bno required module provides package (?P<module>[^\s;:]{1,200})",
            r"\bpackage (?P<module>[\w.]{1,200}) does not exist\b",
            rf"\bcan't find crate for {_Q}(?P<module>\w{{1,200}})",
        ],
        "`{module}` cannot be imported here. See whether it is installed or lies in the project under another path.",
        last=True,
    ),
    rule(
        "header",
        "import_error missing_file",
        [
            r"\bfatal error: (?P<name>[\w./+-]{1,200}\.(?:h|hh|hpp|hxx)): No such file",
            r"\berror while loading shared libraries: (?P<name>[\w.+-]{1,200})",
            r"\bcannot find -l(?P<name>[\w.+-]{1,200})",
        ],
        "`{name}` is not found. See which package brings it and whether its folder is on the search path.",
    ),
)

_SYNTAX = (
    rule(
        "shell_syntax",
        "syntax_error",
        [
            r"\bline (?P<line>\d{1,7}): syntax error near unexpected token [`'](?P<token>[^\n']{1,40})'",
            r"\bline (?P<line>\d{1,7}): unexpected EOF while looking for matching [`'](?P<token>[^\n]{1,4}?)'",
            r"\b(?P<line>\d{1,7}): [Ss]yntax error: (?P<token>[^\n]{1,20}?) unexpected",
        ],
        "The shell stumbles over `{token}` at line {line}. Check the quoting and what should have been closed before it.",
    ),
    rule(
        "python_syntax",
        "syntax_error",
        [r"^(?:E\s{1,8})?(?:SyntaxError|IndentationError|TabError): "],
        "`{path}` does not parse at line {line}. Look at that line and the one before it.",
        also=[r"File \"(?P<path>[^\n\"]{1,300})\", line (?P<line>\d{1,9})"],
        last=True,
    ),
    rule(
        "script_syntax",
        "syntax_error",
        [r"^(?:Uncaught )?SyntaxError: "],
        "`{path}` does not parse at line {line}. Look at that line and the one before it.",
        also=[rf"^(?:file://)?(?P<path>{_PATH}):(?P<line>\d{{1,9}})(?::\d+)?$"],
    ),
    rule(
        "query_syntax",
        "syntax_error",
        [
            rf"(?i)\bsyntax error (?:at or )?near {_Q}(?P<token>[^\n'\"`]{{1,60}})",
            rf"(?i)\bnear {_Q}(?P<token>[^\n'\"`]{{1,60}}){_Q}: syntax error",
        ],
        "The statement breaks near `{token}`. Check what must stand just before it.",
    ),
    rule(
        "data_syntax",
        "syntax_error",
        [rf"\bin {_Q}(?P<path>[^\n'\"`]{{1,300}}){_Q}, line (?P<line>\d{{1,9}})"],
        "`{path}` does not parse at line {line}. Check the indentation and the quotes there.",
    ),
    rule(
        "compiler",
        "syntax_error type_error",
        [
            rf"^(?P<path>{_PATH}):(?P<line>\d{{1,9}}):(?:\d+:)? (?:fatal )?error\b",
            rf"^(?P<path>{_PATH})\((?P<line>\d{{1,9}}),\d+\): error\b",
            rf"^(?:error|warning)[^\n]{{0,300}}\n\s{{0,12}}--> (?P<path>{_PATH}):(?P<line>\d{{1,9}})",
            rf"^(?P<path>{_PATH}\.go):(?P<line>\d{{1,9}}):\d+: ",
        ],
        "The first error stands in `{path}` at line {line}. Mend that one first: later ones may follow from it.",
    ),
)

_TYPES = (
    rule(
        "call_arity",
        "type_error wrong_argument",
        [r"\b(?P<function>[\w.<>]{1,200})\(\) takes [\w ]{1,40}positional arguments?\b[^\n]{0,60}\bgiven"],
        "`{function}` takes another number of arguments. Look at its definition and call it accordingly.",
        last=True,
    ),
    rule(
        "none_value",
        "type_error",
        [
            rf"{_Q}(?P<type>[\w.]{{1,100}}){_Q} object (?:is not|does not support|cannot be) (?P<use>[\w ]{{1,60}})",
            rf"\bargument of type {_Q}(?P<type>[\w.]{{1,100}}){_Q} (?:is not|cannot be) (?P<use>[\w ]{{1,60}})",
        ],
        "A value of type `{type}` is not {use}. Find where it comes from and why it is not what you expect.",
        last=True,
    ),
    rule(
        "operand_types",
        "type_error",
        [
            rf"\bunsupported operand type\(s\) for (?P<operator>[^\n:]{{1,20}}): {_Q}(?P<type>[\w.]{{1,60}}){_Q} and {_Q}(?P<other>[\w.]{{1,60}})"
        ],
        "`{operator}` does not join `{type}` and `{other}`. Find out which of the two values should be of another type.",
        last=True,
    ),
    rule(
        "undefined_read",
        "type_error",
        [
            r"\bCannot (?:read|set) propert(?:ies|y) of (?P<value>undefined|null) \((?:reading|setting) '(?P<name>[^\n']{1,100})'\)",
        ],
        "What holds `{name}` is {value}. Find where it should have been set.",
    ),
    rule(
        "not_a_function",
        "type_error",
        [r"\bTypeError: (?P<name>[\w.$]{1,200}) is not a (?:function|constructor)\b"],
        "`{name}` cannot be called. Look at what it really is and how it is exported.",
    ),
)

_RAISED = (
    rule(
        "missing_name",
        "traceback",
        [
            rf"\bNameError: (?:global )?name {_Q}(?P<name>\w{{1,100}}){_Q} is not defined",
            r"\bReferenceError: (?P<name>[\w$]{1,100}) is not defined",
        ],
        "`{name}` is not defined there. Define or import it before its first use, or check the spelling.",
        last=True,
    ),
    rule(
        "missing_attribute",
        "traceback",
        [rf"\bAttributeError: [^\n]{{0,200}}has no attribute {_Q}(?P<name>\w{{1,100}})"],
        "There is no attribute `{name}` on that object. Look at what the object is and what it offers.",
        last=True,
    ),
    rule(
        "missing_key",
        "traceback",
        [r"\bKeyError: (?P<name>[^\n]{1,200})"],
        "There is no key `{name}`. Look at the keys that are there before you ask for one.",
        last=True,
    ),
)

CODE_RULES = (*_VERSION_CONTROL, *_IMPORTS, *_SYNTAX, *_TESTS, *_TYPES, *_RAISED)

CATCH_ALL_RULES = (
    rule(
        "panic",
        "traceback",
        [rf"\bpanicked at (?:'[^\n]{{0,200}}', )?(?P<path>{_PATH}):(?P<line>\d{{1,9}})"],
        "The program panicked in `{path}` at line {line}. Check which assumption about the values fails there.",
        last=True,
    ),
    rule(
        "exception",
        "traceback type_error",
        [
            r"^(?:E\s{1,8})?(?P<error>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Exit|Interrupt|Warning))(?::|$)",
            r"^(?:Exception in thread \"[^\n\"]{0,100}\" |Caused by: )(?P<error>[\w.$]{1,200})",
            r"^(?:Uncaught )?(?P<error>[A-Z]\w{0,60}Error)(?: \[\w{1,60}\])?: ",
        ],
        "{error} at line {line} of `{path}`. Check the values that this line uses before you change anything.",
        also=[
            r"^\s{0,12}at [^\n(]{0,200}\((?P<path>[^\n():]{1,300}):(?P<line>\d{1,9})",
            r"File \"(?P<path>[^\n\"]{1,300})\", line (?P<line>\d{1,9})",
        ],
        last=True,
    ),
    rule(
        "exception_name",
        "traceback",
        [r"^(?:E\s{1,8})?(?P<error>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception))(?::|$)"],
        "{error} was raised. Find the innermost frame of your own code and check the values used there.",
        last=True,
    ),
    rule(
        "killed",
        "nonzero_exit",
        [
            r"(?i)\bexit(?:ed)?(?: with)?(?: non-zero)?(?: exit)? (?:code|status)[: ]{1,3}(?P<status>137|139|-9|-11)\b"
        ],
        "Status {status}: the process was killed, often for memory or a bad access. Give it less to do at once.",
    ),
    rule(
        "exit_status",
        "nonzero_exit",
        [
            r"(?i)\bexit(?:ed)?(?: with)?(?: non-zero)?(?: exit)? (?:code|status)[: ]{1,3}(?P<status>-?[1-9]\d{0,9})\b",
            r"(?i)\bexited with (?P<status>-?[1-9]\d{0,9})\b",
        ],
        "`{command}` ended with status {status}. Read its last lines for the cause before you run it again.",
        "The command ended with status {status}. Read its last lines for the cause before you run it again.",
    ),
)
