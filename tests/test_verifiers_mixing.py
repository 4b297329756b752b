"""Prompts of several environments, by their ratios."""

from __future__ import annotations

import pytest

from composer_trl_host.verifiers_env.mixing import mixed_rows, shares


def test_one_source_has_each_task_once() -> None:
    assert mixed_rows([3], [5.0], 8) == [{"source": 0, "task": number} for number in range(3)]
    assert len(mixed_rows([300], [1.0], 8)) == 8


def test_rows_are_divided_by_the_ratios_and_short_sources_repeat() -> None:
    # 12 rows at 1 : 3 are 3 and 9; the second source has 4 tasks.
    rows = mixed_rows([100, 4], [0.5, 1.5], 12)
    assert [row["task"] for row in rows if row["source"] == 0] == [0, 1, 2]
    assert [row["task"] for row in rows if row["source"] == 1] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("ratios", "whole", "expected"),
    [
        ([1, 1], 256, [128, 128]),
        ([0.1, 0.1], 256, [128, 128]),
        # 10/3 each: the one that is left over goes to the first.
        ([1, 1, 1], 10, [4, 3, 3]),
        # 7 * (0.5, 0.3, 0.2) = 3.5, 2.1, 1.4
        ([0.5, 0.3, 0.2], 7, [4, 2, 1]),
        # A share below one row is one row.
        ([1, 1000], 10, [1, 9]),
        ([1, 1, 1], 2, [1, 1, 1]),
        # 10 * (1, 1, 100) / 102 = 0.1, 0.1, 9.8: what two were raised by is the largest's.
        ([1, 1, 100], 10, [1, 1, 8]),
        ([1e6, 1e-6, 1e6, 1], 4, [1, 1, 1, 1]),
    ],
)
def test_shares(ratios: list[float], whole: int, expected: list[int]) -> None:
    assert shares(ratios, whole) == expected
