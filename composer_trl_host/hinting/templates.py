"""One hint per error kind: what to do next, whatever the error text says."""

from __future__ import annotations

from composer_trl_host.hints import ErrorContext, Hint

TEMPLATES: dict[str, str] = {
    "missing_file": "That path does not exist. List the folder or search for the name, then use a path that you have seen.",
    "permission": "You lack the right to do that. Work inside the places you may write to, or take a way that needs no such right.",
    "unknown_tool": "There is no tool of that name. Call one of the tools you were given, spelt exactly as it is listed.",
    "wrong_argument": "The arguments do not fit. Compare each name and type with the tool's schema and give exactly those.",
    "invalid_json": "The arguments are not valid JSON. Escape quotes and newlines inside strings and close every bracket.",
    "edit_not_found": "The text to replace is not in the file. Read that part again and copy it exactly, indentation included.",
    "edit_not_unique": "The text to replace occurs more than once. Add neighbouring lines until it fits one place alone.",
    "not_read_before_edit": "Read the file's present contents first, then edit what you have seen.",
    "command_not_found": "That command is not installed here. Look for what is available, or reach the goal with another command.",
    "nonzero_exit": "The command failed. Read its last lines for the cause and change something before you run it again.",
    "failing_test": "A test fails. Read what it expected and what it got, then mend the code that it calls, not the test.",
    "traceback": "The program raised an error. Go to the innermost frame of your own code and check the values used there.",
    "timeout": "The call ran too long. Do less in one call, narrow its input, or run it in the background and look later.",
    "output_too_long": "The output is too long to show. Ask for a part of it: a range of lines, a filter or a search.",
    "network": "The network did not answer. Check the address, and use what is available locally if there is no connection.",
    "merge_conflict": "Two changes collide. Open each conflicting file, settle every marked part, then stage it and go on.",
    "syntax_error": "The code does not parse. Look at the named line and the one before it for a bracket, quote or indent.",
    "type_error": "A value has another type than the code needs. Check where it comes from before you convert or index it.",
    "import_error": "An import fails. Check that the module is installed here and that its name and path are spelt right.",
    "rate_limit": "Too many requests. Wait before the next one, and put several questions into one request.",
    "rejected": "The user refused this call. Do not repeat it: ask what they want, or take a way that they allow.",
    "unknown": "The call failed. Read the message closely, say what it means, and change the call before you try again.",
}
"""Hint per error kind. The kinds are the ones that the readers of recorded traces tell apart."""

KINDS: tuple[str, ...] = tuple(TEMPLATES)


def known_kind(kind: str) -> str:
    """``kind``, or ``"unknown"`` for a kind that is an environment's own."""
    return kind if kind in TEMPLATES else "unknown"


class TemplateHints:
    """Always answers. The source is ``template/<kind>``."""

    def generate(self, context: ErrorContext) -> Hint | None:
        kind = known_kind(context.error_kind)
        return Hint(text=TEMPLATES[kind], source=f"template/{kind}")
