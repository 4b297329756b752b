"""Cutting by hand: turns of 10 tokens behind 10 tokens of prompt and result each."""

from __future__ import annotations

from composer_trl_host.rendering import TurnSpan
from composer_trl_host.windows import TOO_LONG, Window, cut_windows


def spans(turns: int, prompt: int = 2) -> dict[int, TurnSpan]:
    """Turn ``n`` is at [20 n + 10, 20 n + 20); its generation prompt takes the ``prompt`` tokens before."""
    return {n: TurnSpan(20 * n + 10 - prompt, 20 * n + 10, 20 * n + 20, False) for n in range(turns)}


def test_what_fits_is_one_row_with_its_hint():
    assert cut_windows(64, spans(3), {1: 6}, 64, add_up=False) == ([Window(0, 64, (1,), True)], {})
    # The teacher of turn 2 ends at 60 and reads 6 tokens more.
    assert cut_windows(64, spans(3), {2: 6}, 66, add_up=False)[0] == [Window(0, 64, (2,), True)]
    # Without room for the hint, channel 1 keeps the whole trace and the site gets a row of its own.
    assert cut_windows(64, spans(3), {2: 6}, 65, add_up=False)[0] == [
        Window(0, 64, (), True),
        Window(8, 60, (2,), False),
    ]


def test_a_hint_that_fits_nowhere_costs_its_own_site_alone():
    windows, unfit = cut_windows(64, spans(3), {1: 100, 2: 6}, 70, add_up=False)
    assert windows == [Window(0, 64, (2,), True)]
    assert unfit == {1: TOO_LONG}


def test_hints_add_up_where_a_sequence_holds_several():
    hints = {1: 6, 2: 6}
    assert cut_windows(60, spans(3), hints, 70, add_up=False)[0] == [Window(0, 60, (1, 2), True)]
    windows, unfit = cut_windows(60, spans(3), hints, 70, add_up=True)
    # 60 + 6 fits, 60 + 12 does not: the second site reads the same beginning in a row of its own.
    assert windows == [Window(0, 60, (1,), True), Window(0, 60, (2,), False)]
    assert unfit == {}


def test_a_late_site_gets_the_longest_context_that_fits_and_no_channel_one():
    windows, unfit = cut_windows(100, spans(5), {4: 4}, 50, add_up=False)
    # [0, 40) fits. Turn 4 ends at 100: a row of at most 46 and the hint begins at turn 3's prompt (68) or
    # turn 2's (48): 100 - 48 is 52, too long.
    assert windows == [Window(0, 40, (), True), Window(68, 100, (4,), False)]
    assert unfit == {}


def test_the_failed_call_stays_in_the_row_or_the_site_is_dropped():
    # Turn 1 answers turn 0, whose prompt begins at 8: [8, 40) is 32, and the hint 4.
    assert cut_windows(200, spans(2), {1: 4}, 36, add_up=False) == (
        [Window(0, 20, (), True), Window(8, 40, (1,), False)],
        {},
    )
    assert cut_windows(200, spans(2), {1: 4}, 35, add_up=False) == ([Window(0, 20, (), True)], {1: TOO_LONG})


def test_without_a_generation_prompt_a_row_begins_behind_the_turn_before():
    # A row cannot begin with the turn itself: nothing would predict its first token.
    windows, _ = cut_windows(100, spans(5, prompt=0), {4: 4}, 50, add_up=False)
    assert windows == [Window(0, 40, (), True), Window(60, 100, (4,), False)]


def test_a_trace_without_turns_of_the_model_has_no_rows():
    assert cut_windows(30, {}, {}, 10, add_up=False) == ([], {})
