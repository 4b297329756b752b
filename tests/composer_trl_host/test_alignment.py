from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_prime_plugin.errors import AlignmentError
from composer_trl_host.alignment import ErrorSite, build_site_batch, paired_positions


def site(
    start: int, stop: int, splice_at: int, hint: tuple[int, ...] = (90, 91), source: str = "s"
) -> ErrorSite:
    return ErrorSite(start, stop, splice_at, hint, source, "unknown_command")


def student(rows: list[list[int]], offsets: list[int], pad: int = 0) -> torch.Tensor:
    width = max(offset + len(row) for row, offset in zip(rows, offsets, strict=True))
    return torch.tensor(
        [[pad] * o + row + [pad] * (width - o - len(row)) for row, o in zip(rows, offsets, strict=True)]
    )


def test_the_teacher_is_the_student_with_the_hint_cut_in_up_to_the_turns_end():
    rows = [[1, 2, 3, 4, 5, 6, 7]]
    batch = build_site_batch(rows, [[site(4, 6, 3)]], [2], pad_token_id=0)
    # Worked by hand: 1 2 3 | 90 91 | 4 5 6, and token 7 lies behind the recovery turn.
    assert batch.teacher_input_ids.tolist() == [[1, 2, 3, 90, 91, 4, 5, 6]]
    assert batch.student_response_idx.tolist() == [[6, 7]]
    assert batch.teacher_response_idx.tolist() == [[6, 7]]
    pairs, left_out = paired_positions(student(rows, [2]), batch.as_batch())
    assert (pairs.row.tolist(), pairs.student.tolist(), pairs.teacher.tolist(), left_out) == (
        [0, 0],
        [6, 7],
        [6, 7],
        0,
    )


def test_ragged_sites_are_padded_with_minus_one_and_masked():
    rows = [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    batch = build_site_batch(rows, [[site(2, 3, 1)], [site(2, 5, 2, ())]], [0, 0], pad_token_id=0)
    assert batch.student_response_idx.tolist() == [[2, -1, -1], [2, 3, 4]]
    assert batch.student_response_valid.tolist() == [[True, False, False], [True, True, True]]
    assert torch.equal(batch.student_response_valid, batch.teacher_response_valid)


def test_an_empty_hint_gives_the_students_own_ids():
    rows = [[1, 2, 3, 4]]
    batch = build_site_batch(rows, [[site(2, 4, 2, ())]], [0], pad_token_id=0)
    assert batch.teacher_input_ids.tolist() == rows


def test_no_site_is_an_empty_batch():
    batch = build_site_batch([[1, 2]], [[]], [0], pad_token_id=0)
    assert batch.student_response_idx.shape == (0, 0)
    assert batch.teacher_input_ids.shape == (0, 0)


def test_a_mismatch_names_row_ids_and_positions():
    rows = [[1, 2, 3, 4, 5]]
    batch = build_site_batch(rows, [[site(3, 5, 2)]], [0], pad_token_id=0).as_batch()
    batch["teacher_input_ids"][0, 5] = 77
    with pytest.raises(
        AlignmentError, match=r"id 4 at student position 3 and id 77 at teacher position 5 in row 0"
    ):
        paired_positions(student(rows, [0]), batch)
    pairs, left_out = paired_positions(student(rows, [0]), batch, strict=False)
    assert (pairs.student.numel(), left_out) == (0, 1)


@pytest.mark.parametrize("where", ["student_response_idx", "teacher_response_idx"])
@pytest.mark.parametrize("value", [0, 99])
def test_an_index_outside_the_sequence_is_an_error(where: str, value: int):
    rows = [[1, 2, 3, 4, 5]]
    batch = build_site_batch(rows, [[site(3, 5, 2)]], [0], pad_token_id=0).as_batch()
    batch[where][0, 0] = value
    with pytest.raises(AlignmentError, match=rf"{where} must lie in \[1, \d+\).*found {value} for row 0"):
        paired_positions(student(rows, [0]), batch)


def test_validity_must_be_equal_on_both_sides():
    rows = [[1, 2, 3, 4, 5]]
    batch = build_site_batch(rows, [[site(3, 5, 2)]], [0], pad_token_id=0).as_batch()
    batch["teacher_response_valid"] = torch.tensor([[True, False]])
    with pytest.raises(AlignmentError, match=r"must be equal.*2 and 1 valid"):
        paired_positions(student(rows, [0]), batch)


def test_a_site_past_its_row_is_an_error():
    with pytest.raises(AlignmentError, match="row of 3 tokens; found stop 5"):
        build_site_batch([[1, 2, 3]], [[site(2, 5, 1)]], [0], pad_token_id=0)
    with pytest.raises(AlignmentError, match="placeholder <= start"):
        site(2, 3, 4)


@st.composite
def batches(draw: st.DrawFn):
    rows, sites, offsets = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(3, 24))
        rows.append(draw(st.lists(st.integers(1, 60), min_size=length, max_size=length)))
        offsets.append(draw(st.integers(0, 5)))
        row_sites, position = [], 1
        while position < length - 1 and draw(st.booleans()):
            splice = draw(st.integers(position, length - 2))
            start = draw(st.integers(splice, length - 2))
            stop = draw(st.integers(start + 1, length))
            hint = tuple(draw(st.lists(st.integers(61, 99), max_size=4)))
            row_sites.append(site(start, stop, splice, hint))
            position = stop
        sites.append(row_sites)
    return rows, sites, offsets


@given(batches())
def test_every_recovery_token_of_every_site_is_paired_once_with_itself(case):
    rows, sites, offsets = case
    batch = build_site_batch(rows, sites, offsets, pad_token_id=0)
    padded = student(rows, offsets)
    pairs, left_out = paired_positions(padded, batch.as_batch())
    assert left_out == 0
    wanted = sorted(
        (row, offsets[row] + position)
        for row, row_sites in enumerate(sites)
        for s in row_sites
        for position in range(s.start, s.stop)
    )
    assert sorted(zip(pairs.row.tolist(), pairs.student.tolist(), strict=True)) == wanted
    assert torch.equal(padded[pairs.row, pairs.student], batch.teacher_input_ids[pairs.site, pairs.teacher])
    flat = [(row, s) for row, row_sites in enumerate(sites) for s in row_sites]
    for number, (row, s) in enumerate(flat):
        real = batch.teacher_input_ids[number][batch.teacher_attention_mask[number].bool()].tolist()
        without_hint = real[: s.splice_at] + real[s.splice_at + len(s.hint_ids) :]
        assert without_hint == rows[row][: s.stop]
