"""What no key of the TOML can change: wrappers around the hints and around the rollouts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_prime_plugin.errors import ConfigError
from composer_trl_host.alignment import build_site_batch
from composer_trl_host.hints import ErrorContext, Hint, HintGenerator
from composer_trl_host.reading import read_teacher
from composer_trl_host.rollout import Generate, Rollout, RolloutRunner


class FalseHints:
    """A generator whose hints name a wrong command of ``words`` in about ``share`` of the contexts."""

    def __init__(self, hints: HintGenerator, words: Sequence[str], share: float, seed: int) -> None:
        self.hints = hints
        self.words = tuple(words)
        self.share = share
        self.seed = seed

    def generate(self, context: ErrorContext) -> Hint | None:
        """The wrapped generator's hint, falsified or not: the same context always gets the same one."""
        hint = self.hints.generate(context)
        if hint is None:
            return None
        draw = random.Random(f"{self.seed}/{context.call}/{list(context.messages)!r}")
        if draw.random() >= self.share:
            return hint
        right = str(context.details["command"]).split()[0]
        wrong = draw.choice([word for word in self.words if word != right])
        return replace(hint, text=re.sub(rf"\b{re.escape(right)}\b", wrong, hint.text, count=1))


class Worded:
    """A generator whose hints say the right command in other words."""

    def __init__(self, hints: HintGenerator, template: str) -> None:
        self.hints = hints
        self.template = template

    def generate(self, context: ErrorContext) -> Hint | None:
        """The wrapped generator's hint with its text replaced."""
        hint = self.hints.generate(context)
        if hint is None:
            return None
        return replace(hint, text=self.template.format(command=context.details["command"]))


def agreed_length(written: Sequence[int], would: Sequence[int]) -> int:
    """How many tokens of ``written`` stand up to the first that differs from ``would``, that one
    included: there the teacher says what it wants instead; behind it, it reads what it would not
    have written."""
    pairs = enumerate(zip(written, would, strict=True), start=1)
    return next((count for count, (is_, wanted) in pairs if is_ != wanted), len(written))


class CutSites:
    """A runner whose sites end with the first token that the hinted model would not write (greedily)."""

    def __init__(self, runner: RolloutRunner, model: Any, pad_token_id: int) -> None:
        self.runner = runner
        self.model = model
        self.pad_token_id = pad_token_id

    def play(self, rows: Sequence[Mapping[str, Any]], generate: Generate, **how: Any) -> list[Rollout]:
        """Play, then shorten the sites by the weights that sampled."""
        rollouts = self.runner.play(rows, generate, **how)
        if any(rollout.sites for rollout in rollouts):
            kept = iter(self._kept(rollouts))
            for rollout in rollouts:
                rollout.sites = [replace(site, stop=site.start + next(kept)) for site in rollout.sites]
        return rollouts

    def _kept(self, rollouts: list[Rollout]) -> list[int]:
        ids = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
        sites = [rollout.sites for rollout in rollouts]
        batch = build_site_batch(ids, sites, [0] * len(ids), self.pad_token_id)
        reading, _ = read_teacher(self.model, batch.as_batch(), None)
        site, k = batch.teacher_response_valid.nonzero(as_tuple=True)
        column = batch.teacher_response_idx[site, k]
        would = reading.block(site, column - 1).argmax(dim=-1)
        written = batch.teacher_input_ids[site, column]
        counts = batch.teacher_response_valid.sum(dim=1).tolist()
        return [
            agreed_length(a.tolist(), b.tolist())
            for a, b in zip(written.split(counts), would.split(counts), strict=True)
        ]


class OneSite:
    """A runner that gives the rollouts of a group the first turn of the group's first."""

    def __init__(self, runner: RolloutRunner, group: int) -> None:
        self.runner = runner
        self.group = group

    def play(self, rows: Sequence[Mapping[str, Any]], generate: Generate, **how: Any) -> list[Rollout]:
        """Play rows that come in groups of equals."""
        first = True

        def shared(contexts: list[list[int]]) -> Any:
            nonlocal first
            turns, logprobs = generate(contexts)
            if first:
                first = False
                leaders = [i - i % self.group for i in range(len(contexts))]
                if any(contexts[i] != contexts[leader] for i, leader in enumerate(leaders)):
                    raise ConfigError(
                        f"rows must come in groups of {self.group} with one prompt; found different ones; "
                        "keep a step's rollouts in one generation batch"
                    )
                turns = [list(turns[leader]) for leader in leaders]
                logprobs = None if logprobs is None else [list(logprobs[leader]) for leader in leaders]
            return turns, logprobs

        return self.runner.play(rows, shared, **how)
