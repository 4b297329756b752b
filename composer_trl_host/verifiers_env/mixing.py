"""Which task of which environment each prompt is."""

from __future__ import annotations

from collections.abc import Sequence


def mixed_rows(tasks: Sequence[int], ratios: Sequence[float], most: int) -> list[dict[str, int]]:
    """Rows ``{"source": number, "task": number}``, which TRL's sampler shuffles.

    ``tasks``: how many each source has; ``ratios``: weights, of which only the proportions count, as in PRIME-RL.
    One source: each of its tasks once, ``most`` of them at most. Several: ``most`` rows (at least one of each
    source) divided by the ratios, the remainders going to the largest fractions; a source with fewer tasks than its
    share repeats them from the first on.
    """
    if len(tasks) == 1:
        return [{"source": 0, "task": number} for number in range(min(tasks[0], most))]
    return [
        {"source": source, "task": number % count}
        for source, (count, share) in enumerate(zip(tasks, shares(ratios, most), strict=True))
        for number in range(share)
    ]


def shares(ratios: Sequence[float], whole: int) -> list[int]:
    """``whole`` divided by ``ratios``, at least 1 each, so that the sum is ``whole`` where it is large enough."""
    total = sum(ratios)
    exact = [whole * ratio / total for ratio in ratios]
    found = [max(int(share), 1) for share in exact]
    order = sorted(range(len(ratios)), key=lambda place: (int(exact[place]) - exact[place], place))
    for place in order:
        if sum(found) < whole and exact[place] >= 1:
            found[place] += 1
    while sum(found) > whole and max(found) > 1:  # what was raised to 1
        found[found.index(max(found))] -= 1
    return found
