"""The page: one HTML file that loads nothing and runs nothing but its own script.

Transcript text reaches it through jinja2's escaping alone, and the numbers through JSON whose ``<`` is
escaped. The content security policy names the hash of the one style and the one script, so that nothing
else would run even if it were there.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from composer_trl_host.inspection.conversation import Conversation, Part, conversation
from composer_trl_host.inspection.model import Inspection, RecoveryToken, Site, by_kind, by_source, mean
from composer_trl_host.inspection.table import left_out, totals, turn_numbers, verdict
from composer_trl_host.inspection.text import REMEMBERED, folded, label, segments, visible

STEPS = (0.01, 0.05, 0.1, 0.2, 0.4)
"""Where a recovery token's colour changes, in nats. The Jensen-Shannon divergence ends at ln 2 = 0.693."""

FOLD_TOKENS = 400
"""Recovery tokens shown at once; the others are folded away."""

_DIGITS = 5
"""Of a probability in the page's data: more than is shown, and the same on every machine."""


@dataclass(frozen=True)
class LeftText:
    """Parts of a recovery turn that are not among its supervised tokens."""

    name: str
    text: str


def render_page(inspection: Inspection, limit: int | None = None) -> str:
    """The page of ``inspection``'s first ``limit`` conversations. Equal inspections give equal bytes."""
    conversations: list[Conversation] = []
    site_number = 1
    for inspected in inspection.traces[:limit]:
        conversations.append(conversation(inspected, len(conversations) + 1, site_number))
        site_number += len(inspected.sites)
    style, script = _asset("page.css"), _asset("page.js")
    sites = inspection.sites
    kinds = sorted({kind for each in conversations for site in each.inspected.sites for kind in site.kinds})
    return _template().render(
        inspection=inspection,
        conversations=conversations,
        sites_on_page=site_number - 1,
        sites=sites,
        kinds=kinds,
        totals=list(totals(inspection)),
        left_out=list(left_out(inspection)),
        by_kind=by_kind(sites),
        by_source=by_source(sites),
        steps=STEPS,
        style=Markup(style),
        script=Markup(script),
        policy=(
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
    )


def level(divergence: float) -> int:
    """The number of the colour of ``divergence``, from 0."""
    return sum(divergence >= step for step in STEPS)


def token_data(site: Site) -> Markup:
    """What the page shows of a site's tokens on hover, as JSON inside a script element.

    ``labels``: texts, each once. ``tokens``: per token its label, its probability on both sides, and
    each side's likeliest tokens as label, probability, label, probability, ...
    """
    labels: dict[str, int] = {}

    def number(text: str) -> int:
        return labels.setdefault(label(text), len(labels))

    tokens: list[list[Any]] = []
    for token in site.tokens:
        reading = token.reading
        if reading is None:
            continue
        sides = [
            [part for share in side for part in (number(share.text), round(share.probability, _DIGITS))]
            for side in (reading.student, reading.teacher)
        ]
        own = [round(reading.student_probability, _DIGITS), round(reading.teacher_probability, _DIGITS)]
        tokens.append([number(token.text), *own, *sides])
    text = json.dumps({"labels": list(labels), "tokens": tokens}, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def token_span(token: RecoveryToken) -> Markup:
    """One token of the recovery, coloured by its divergence."""
    inner = _marked(token.text)
    if token.reading is None:
        return Markup('<span class="t">{}</span>').format(inner)
    nats = token.reading.divergence
    return Markup('<span class="t d{}" data-d="{:.3f}">{}</span>').format(level(nats), nats, inner)


@lru_cache(REMEMBERED)
def _marked(text: str) -> Markup:
    if not text:
        return Markup('<span class="unseen" data-mark="⋯"></span>')
    return Markup("").join(
        Markup('<span class="{}" data-mark="{}">{}</span>').format(piece.kind, piece.mark, piece.text)
        if piece.mark
        else Markup('<span class="{}">{}</span>').format(piece.kind, piece.text)
        if piece.kind
        else piece.text
        for piece in segments(text)
    )


def unsupervised(part: Part) -> list[LeftText]:
    """Thinking, text and calls of a recovery turn that its tokens do not show, so that none is lost."""
    assert part.site is not None
    shown = "".join(token.text for token in part.site.tokens)
    turn = part.turns[-1].turn
    found = [("thinking", turn.thinking), ("text", turn.content)]
    lost = [LeftText(name, text) for name, text in found if visible(text).strip() not in visible(shown)]
    return lost + [
        LeftText(f"call of {call.name}", call.arguments) for call in turn.tool_calls if call.name not in shown
    ]


def split_tokens(tokens: Sequence[RecoveryToken]) -> tuple[Sequence[RecoveryToken], Sequence[RecoveryToken]]:
    """The tokens that are shown at once and those that are folded away."""
    return (
        (tokens, ()) if len(tokens) <= FOLD_TOKENS * 5 // 4 else (tokens[:FOLD_TOKENS], tokens[FOLD_TOKENS:])
    )


@cache
def _asset(name: str) -> str:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its own element"
    return "\n" + text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["visible"] = visible
    environment.filters["nats"] = lambda value: f"{value:.3f}"
    environment.filters["thousands"] = lambda value: f"{value:,}"
    environment.globals.update(
        folded=folded,
        mean=mean,
        split_tokens=split_tokens,
        token_data=token_data,
        token_span=token_span,
        turn_numbers=turn_numbers,
        unsupervised=unsupervised,
        verdict=verdict,
    )
    return environment.get_template("page.html.j2")
