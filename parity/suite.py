"""Runs the cases of one release and objective against an expectation, and gathers them by family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from composer_prime_plugin.plugin import loss_fn
from parity.cases import FAMILIES, Case, Inputs, build, cases
from parity.compare import Differences, Outcome, case_note, outcome
from parity.releases import Objective

KEPT_MESSAGES = 5
"""Messages kept per family and quantity; the counts are complete."""

Check = Callable[[Case, Inputs, Outcome], Differences]
"""How what our loss gave on a case differs from what is expected."""

ComposerLoss = Callable[..., Any]
"""``composer_prime_plugin.loss_fn``, or a mutant of it."""


@dataclass
class Quantity:
    """Loss, metrics or gradient over a family: how many cases differ, and the first few messages."""

    differing: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, case: Case, found: list[str]) -> None:
        self.differing += bool(found)
        self.messages += [case_note(case, message) for message in found][: KEPT_MESSAGES - len(self.messages)]


@dataclass
class FamilyResult:
    """One row of the table. ``error`` is why nothing could be compared."""

    release: str
    objective: str
    target: str
    family: str
    mode: str
    count: int = 0
    loss: Quantity = field(default_factory=Quantity)
    metrics: Quantity = field(default_factory=Quantity)
    gradient: Quantity = field(default_factory=Quantity)
    error: str | None = None

    @property
    def differs(self) -> bool:
        """Whether any case of the family differs."""
        return bool(self.loss.differing or self.metrics.differing or self.gradient.differing)

    @property
    def messages(self) -> list[str]:
        """What differs, first messages of each quantity."""
        return self.loss.messages + self.metrics.messages + self.gradient.messages

    def as_dict(self) -> dict[str, Any]:
        """Plain data for another process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FamilyResult:
        """The inverse of ``as_dict``."""
        quantities = {name: Quantity(**data[name]) for name in ("loss", "metrics", "gradient")}
        return cls(**{**data, **quantities})


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: the order of a long sum depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def composer_outcome(
    case: Case, inputs: Inputs, inputs_class: type[Any], fields: tuple[str, ...], ours: ComposerLoss = loss_fn
) -> Outcome:
    """``loss_fn`` on ``case``, through the release's own ``LossInputs``."""
    return outcome(lambda sample: ours(sample, **case.kwargs), inputs, inputs_class, fields)


def run_objective(
    objective: Objective,
    *,
    release: str,
    target: str,
    mode: str,
    inputs_class: type[Any],
    fields: tuple[str, ...],
    check: Check,
    ours: ComposerLoss = loss_fn,
    samples: Iterable[tuple[Case, Inputs]] | None = None,
) -> list[FamilyResult]:
    """One row per family: ``ours`` on every case, ``check``-ed. An exception of ours is a difference.
    ``samples``: the cases with their inputs, where they are built already."""
    rows = {
        family: FamilyResult(release=release, objective=objective, target=target, family=family, mode=mode)
        for family in FAMILIES
    }
    if samples is None:
        samples = ((case, build(case)) for case in cases(objective, fields))
    for case, inputs in samples:
        row = rows[case.family]
        row.count += 1
        try:
            found = composer_outcome(case, inputs, inputs_class, fields, ours)
        except Exception as error:
            row.loss.add(case, [f"loss_fn raised {type(error).__name__}: {error}"])
            continue
        result = check(case, inputs, found)
        row.loss.add(case, result.loss)
        row.metrics.add(case, result.metrics)
        row.gradient.add(case, result.gradient)
    return [row for row in rows.values() if row.count]
