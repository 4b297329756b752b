"""Layers of hint generators, asked in order until one answers.

The shipped order is rules, judge, templates. A rule that can name the thing is exact, free and always
the same, so it is asked first. The judge costs seconds and tokens and is asked only where no rule knows
more. A template always answers, so whatever stood behind it would never be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.hinting.judge import JudgeHints
from composer_trl_host.hinting.rules import RuleHints
from composer_trl_host.hinting.templates import TemplateHints, known_kind
from composer_trl_host.hinting.text import CHARACTERS_PER_TOKEN, MAX_HINT_CHARACTERS, estimated_tokens
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator

MAX_HINT_TOKENS = MAX_HINT_CHARACTERS // CHARACTERS_PER_TOKEN


class LayeredHints:
    """A ``HintGenerator`` over named layers.

    A layer that raises, or gives a hint that is empty, too long or no ``Hint``, is skipped and counted
    in ``failures`` as ``(layer, reason)``; having no hint is no failure. ``answered`` counts hints per
    source. ``without`` names layers (``"judge"``) and sources (``"rule/timeout"``) to leave out: what
    the next layer says is given instead. ``count_tokens`` is the tokenizer's own count; without it
    length is estimated.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, HintGenerator]],
        *,
        max_hint_tokens: int = MAX_HINT_TOKENS,
        count_tokens: Callable[[str], int] | None = None,
        without: Collection[str] = (),
    ) -> None:
        if max_hint_tokens < 1:
            raise ConfigError(
                f"max_hint_tokens must be at least 1; found {max_hint_tokens}; set a higher limit"
            )
        names = [name for name, _ in layers]
        if len(set(names)) != len(names):
            raise ConfigError(f"hint layers must have distinct names; found {names}; rename the doubles")
        wrong = [name for name, layer in layers if not isinstance(layer, HintGenerator)]
        if wrong:
            raise ConfigError(
                f"a hint layer must have generate(context); {', '.join(wrong)} lacks it; give a HintGenerator"
            )
        self.layers = tuple(layers)
        self.max_hint_tokens = max_hint_tokens
        self.count_tokens = count_tokens or estimated_tokens
        self.without = frozenset(without)
        self._failures: Counter[tuple[str, str]] = Counter()
        self.answered: Counter[str] = Counter()

    def generate(self, context: ErrorContext) -> Hint | None:
        """The first hint that a layer has for ``context``."""
        for name, layer in self.layers:
            # The judge's and the templates' source is known before they are asked, and asking may cost.
            if not self.without.isdisjoint({name, f"{name}/{known_kind(context.error_kind)}"}):
                continue
            try:
                hint = layer.generate(context)
                if hint is None:
                    continue
                reason = self._refusal(hint)
            except Exception as error:
                self._failures[name, f"raised {type(error).__name__}"] += 1
                continue
            if reason:
                self._failures[name, reason] += 1
            elif hint.source not in self.without:
                self.answered[hint.source] += 1
                return hint
        return None

    @property
    def failures(self) -> Counter[tuple[str, str]]:
        """Failures as ``(layer, reason)``, with those that a layer counts by reason itself."""
        total = Counter(self._failures)
        for name, layer in self.layers:
            own = getattr(layer, "failures", None)
            if isinstance(own, Counter):
                total.update({(name, str(reason)): count for reason, count in own.items()})
        return total

    def as_collator_hook(self) -> Callable[[ErrorContext], Hint | None]:
        """``generate`` as a plain function, for a collator that takes one."""
        return self.generate

    def _refusal(self, hint: Hint) -> str:
        """Why a hint cannot be used, or an empty string."""
        if not isinstance(hint, Hint):
            return f"gave {type(hint).__name__}, no Hint"
        if not hint.text.strip():
            return "empty hint"
        return "hint too long" if self.count_tokens(hint.text) > self.max_hint_tokens else ""


def default_layered(
    judge_client: Any = None,
    *,
    first: Sequence[tuple[str, HintGenerator]] = (),
    max_hint_tokens: int = MAX_HINT_TOKENS,
    count_tokens: Callable[[str], int] | None = None,
    without: Collection[str] = (),
    **judge: Any,
) -> LayeredHints:
    """Rules, the judge if there is one, templates; ``first`` (a task's own hints) before them.

    ``judge_client`` is a ``JudgeHints``, or an ``openai.OpenAI`` with ``model`` and the other options of
    ``JudgeHints`` in ``judge``.
    """
    if judge and (judge_client is None or isinstance(judge_client, HintGenerator)):
        raise ConfigError(
            f"the judge's options need an openai.OpenAI as judge_client; found {type(judge_client).__name__} with "
            f"{', '.join(judge)}; give the client, or drop them"
        )
    layers: list[tuple[str, HintGenerator]] = [*first, ("rule", RuleHints())]
    if isinstance(judge_client, HintGenerator):
        layers.append(("judge", judge_client))
    elif judge_client is not None:
        if not judge.get("model"):
            raise ConfigError(
                "the judge must have a model; found none; give model=, its name at the endpoint"
            )
        judge = {"max_hint_tokens": max_hint_tokens, "count_tokens": count_tokens, **judge}
        layers.append(("judge", JudgeHints(judge_client, **judge)))
    layers.append(("template", TemplateHints()))
    return LayeredHints(layers, max_hint_tokens=max_hint_tokens, count_tokens=count_tokens, without=without)
