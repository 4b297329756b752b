"""Rules: patterns that find the thing an error text is about, and a hint that names it.

A rule belongs to error kinds. A kind that says what went wrong (``missing_file``) is read by its own
rules alone. One that only says that something did (``nonzero_exit``, ``traceback``, ``failing_test``,
``unknown`` and every kind of an environment's own) is read by all of them, special ones first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from composer_trl_host.hinting.calls import Called, failed
from composer_trl_host.hinting.templates import TEMPLATES
from composer_trl_host.hinting.text import MAX_HINT_CHARACTERS, quoted
from composer_trl_host.hints import ErrorContext, Hint

OPEN_KINDS = frozenset({"nonzero_exit", "traceback", "failing_test", "unknown"})
"""Kinds that do not say what went wrong."""

_SCANNED = 8_000
"""Characters read at each end of a result: what failed stands at an end, and a log may be megabytes."""

_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")


@dataclass(frozen=True)
class Rule:
    """One rule. Its hint's source is ``rule/<name>``.

    ``patterns``: alternatives, the first that matches decides; their named groups fill the fields of
    ``hints``. ``also``: patterns that may add groups. ``hints``: alternatives, the first whose fields
    are all filled is given; with none the rule has no hint. The fields ``path``, ``tool`` and
    ``command`` fall back on the failed call. ``last``: the last match counts, as in a traceback.
    """

    name: str
    kinds: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    hints: tuple[str, ...]
    also: tuple[re.Pattern[str], ...] = ()
    last: bool = False

    def hint(self, text: str, call: Called) -> Hint | None:
        """The rule's hint for an error text, or None where it does not match or cannot name the thing."""
        found = next(
            (groups for pattern in self.patterns if (groups := self._find(pattern, text)) is not None), None
        )
        if found is None:
            return None
        values = {"path": call.path, "tool": call.name, "command": call.command}
        for groups in (*(self._find(pattern, text) or {} for pattern in self.also), found):
            values.update((name, value) for name, value in groups.items() if value)
        values = {name: quoted(value, keep_end=name == "path") for name, value in values.items()}
        for template in self.hints:
            if all(values.get(name) for name in fields(template)):
                return Hint(text=template.format_map(values), source=f"rule/{self.name}")
        return None

    def _find(self, pattern: re.Pattern[str], text: str) -> Mapping[str, str | None] | None:
        matches = pattern.finditer(text)
        match = next(matches, None)
        if self.last:
            match = max(matches, key=re.Match.start, default=match)
        return None if match is None else match.groupdict()


def rule(
    name: str,
    kinds: str,
    patterns: Sequence[str],
    *hints: str,
    also: Sequence[str] = (),
    last: bool = False,
) -> Rule:
    """A ``Rule`` from plain strings: kinds between blanks, patterns in which ``^`` and ``$`` are a line's."""
    unknown = sorted(set(kinds.split()) - set(TEMPLATES))
    if unknown:
        raise ValueError(
            f"rule {name!r} must name known kinds; found {unknown}; known are {sorted(TEMPLATES)}"
        )
    return Rule(
        name,
        frozenset(kinds.split()),
        tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns),
        hints,
        tuple(re.compile(pattern, re.MULTILINE) for pattern in also),
        last,
    )


def fields(template: str) -> list[str]:
    """Names of the fields of a hint's template."""
    return [name for _, name, _, _ in Formatter().parse(template) if name]


class RuleHints:
    """Answers where a rule can name the thing. ``rules`` are asked in order; None: the shipped ones."""

    def __init__(self, rules: Sequence[Rule] | None = None) -> None:
        if rules is None:
            from composer_trl_host.hinting.rule_table import RULES

            rules = RULES
        self.rules = tuple(rules)

    def generate(self, context: ErrorContext) -> Hint | None:
        """The hint of the first rule that fits."""
        call, result = failed(context)
        text = plain(result)
        for one in self._asked(context.error_kind):
            hint = one.hint(text, call)
            if hint is not None and len(hint.text) <= MAX_HINT_CHARACTERS:
                return hint
        return None

    def _asked(self, kind: str) -> Iterator[Rule]:
        """Rules for ``kind`` in order. A failing test's own come first: it is the thing to name."""
        if kind in TEMPLATES and kind not in OPEN_KINDS:
            return (one for one in self.rules if kind in one.kinds)
        own_first = kind == "failing_test"
        return iter(sorted(self.rules, key=lambda one: own_first and kind not in one.kinds))


def plain(text: str) -> str:
    """Both ends of a result, without terminal colours, with plain line ends."""
    if len(text) > 2 * _SCANNED:
        text = f"{text[:_SCANNED]}\n{text[-_SCANNED:]}"
    return _COLOUR.sub("", text).replace("\r\n", "\n")
