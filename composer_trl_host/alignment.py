"""Which student position answers to which teacher position.

A site is an error and the turn that recovers from it. The teacher's sequence is the student's with
the hint's ids spliced in and cut after the recovery turn, so both sides' positions come from one
pairing of the same tokens: equal K, equal validity, equal ids, by construction and checked again
before the loss reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_prime_plugin.config import HintScope
from composer_prime_plugin.errors import AlignmentError

PAD_INDEX = -1
"""Fills index rows shorter than the longest. Never gathered with: it does not wrap, it is masked."""


@dataclass(frozen=True)
class ErrorSite:
    """One error and its recovery, in positions of the row's real tokens (prompt and completion,
    without padding).

    ``start`` and ``stop`` bound the recovery turn's sampled tokens, ``splice_at`` is where the
    hint's message goes (``splice_at <= start``), ``hint_ids`` are its tokens. ``hint_source`` names
    who wrote the hint, ``error_kind`` what failed. ``placeholder``: tokens of the row from
    ``splice_at`` on that stand where the teacher has the hint; 0 where the row is as it was.
    """

    start: int
    stop: int
    splice_at: int
    hint_ids: tuple[int, ...]
    hint_source: str
    error_kind: str
    placeholder: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.splice_at <= self.splice_at + self.placeholder <= self.start < self.stop):
            raise AlignmentError(
                "a site must have 0 < splice_at <= splice_at + placeholder <= start < stop; found "
                f"splice_at {self.splice_at}, placeholder {self.placeholder}, start {self.start}, stop {self.stop}"
            )


@dataclass(frozen=True)
class SiteBatch:
    """The teacher's side of a batch of ``B`` rows holding ``S`` sites.

    ``teacher_input_ids``, ``teacher_attention_mask``: ``(S, T_teacher)`` long, padded on the right.
    ``site_row``: ``(S,)`` long, the student row of each site. ``student_response_idx``,
    ``teacher_response_idx``: ``(S, K)`` long, positions **of** the recovery tokens in the padded
    sequences (the loss reads the logits one earlier), padded with -1; ``*_valid``: ``(S, K)`` bool.
    ``teacher_prefix``, ``student_prefix``: ``(S,)`` long, where the first hint begins in the teacher's
    sequence and the same boundary's column in the padded student row; what stands before is shared.
    ``hint_source``: one name per site.
    """

    teacher_input_ids: Tensor
    teacher_attention_mask: Tensor
    site_row: Tensor
    student_response_idx: Tensor
    teacher_response_idx: Tensor
    student_response_valid: Tensor
    teacher_response_valid: Tensor
    teacher_prefix: Tensor
    student_prefix: Tensor
    hint_source: tuple[str, ...]

    def as_batch(self) -> dict[str, Any]:
        """The keys that ``compose_loss`` reads."""
        return dict(vars(self))


def build_site_batch(
    rows: Sequence[Sequence[int]],
    sites: Sequence[Sequence[ErrorSite]],
    offsets: Sequence[int],
    pad_token_id: int,
    hint_scope: HintScope = "isolated",
) -> SiteBatch:
    """The teacher sequences and the paired indices of a batch.

    ``rows`` are each row's real token ids, ``sites`` its sites, ``offsets`` the padding that stands
    before the row in the padded student tensor. With ``hint_scope = "cumulative"`` a site's teacher
    also reads the hints of the row's earlier sites. Raises ``AlignmentError`` for a site that reaches
    past its row, and for sites of one row that are not in order.
    """
    teacher: list[list[int]] = []
    student_idx: list[list[int]] = []
    teacher_idx: list[list[int]] = []
    site_row: list[int] = []
    prefix: list[int] = []
    student_prefix: list[int] = []
    sources: list[str] = []
    for row, (ids, row_sites, offset) in enumerate(zip(rows, sites, offsets, strict=True)):
        for site in row_sites:
            if site.stop > len(ids):
                raise AlignmentError(
                    f"a site must end inside its row of {len(ids)} tokens; found stop {site.stop} in row {row}; "
                    "build the site from the ids that were sampled"
                )
            read = [earlier for earlier in row_sites if earlier.splice_at < site.splice_at]
            if any(earlier.stop > site.splice_at for earlier in read):
                raise AlignmentError(
                    f"a row's sites must not overlap; found one that begins at {site.splice_at} before an earlier one ends, in row {row}"
                )
            hinted = [*read, site] if hint_scope == "cumulative" else [site]
            sequence: list[int] = []
            end = 0
            for each in hinted:
                sequence += [*ids[end : each.splice_at], *each.hint_ids]
                end = each.splice_at + each.placeholder
            shift = len(sequence) - end
            teacher.append([*sequence, *ids[end : site.stop]])
            student_idx.append([offset + position for position in range(site.start, site.stop)])
            teacher_idx.append([shift + position for position in range(site.start, site.stop)])
            site_row.append(row)
            prefix.append(hinted[0].splice_at)
            student_prefix.append(offset + hinted[0].splice_at)
            sources.append(site.hint_source)
    student_response_idx, student_valid = _pad_indices(student_idx)
    teacher_response_idx, teacher_valid = _pad_indices(teacher_idx)
    width = max((len(ids) for ids in teacher), default=0)
    return SiteBatch(
        teacher_input_ids=torch.tensor(
            [ids + [pad_token_id] * (width - len(ids)) for ids in teacher], dtype=torch.long
        ).reshape(len(teacher), width),
        teacher_attention_mask=torch.tensor(
            [[1] * len(ids) + [0] * (width - len(ids)) for ids in teacher], dtype=torch.long
        ).reshape(len(teacher), width),
        site_row=torch.tensor(site_row, dtype=torch.long),
        student_response_idx=student_response_idx,
        teacher_response_idx=teacher_response_idx,
        student_response_valid=student_valid,
        teacher_response_valid=teacher_valid,
        teacher_prefix=torch.tensor(prefix, dtype=torch.long),
        student_prefix=torch.tensor(student_prefix, dtype=torch.long),
        hint_source=tuple(sources),
    )


def _pad_indices(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=0)
    idx = torch.full((len(rows), width), PAD_INDEX, dtype=torch.long)
    for i, row in enumerate(rows):
        idx[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return idx, idx != PAD_INDEX


@dataclass(frozen=True)
class Pairs:
    """The ``N`` paired positions of a batch, flat. ``site``, ``row``, ``student``, ``teacher``: ``(N,)`` long."""

    site: Tensor
    row: Tensor
    student: Tensor
    teacher: Tensor


def paired_positions(input_ids: Tensor, batch: dict[str, Any], strict: bool = True) -> tuple[Pairs, int]:
    """The pairs that the loss reads, after every check, and the number of sites left out.

    ``input_ids`` is the padded student batch ``(B, T)``; ``batch`` holds ``SiteBatch``'s keys. A
    site whose tokens differ between the sides is an ``AlignmentError`` that names the row, the two
    ids and the two positions; with ``strict=False`` it is left out and counted. Indices outside
    the sequences and masks that differ are errors either way.
    """
    teacher_ids = batch["teacher_input_ids"]
    s_idx, t_idx = batch["student_response_idx"], batch["teacher_response_idx"]
    s_valid, t_valid = batch["student_response_valid"], batch["teacher_response_valid"]
    rows = batch.get("site_row")
    rows = torch.arange(s_idx.size(0), device=s_idx.device) if rows is None else rows
    _check_shapes(input_ids, teacher_ids, s_idx, t_idx, s_valid, t_valid, rows)
    site, k = s_valid.nonzero(as_tuple=True)
    pairs = Pairs(site, rows[site], s_idx[site, k], t_idx[site, k])
    for name, positions, length in (
        ("student_response_idx", pairs.student, input_ids.size(1)),
        ("teacher_response_idx", pairs.teacher, teacher_ids.size(1)),
    ):
        bad = ((positions < 1) | (positions >= length)).nonzero()
        if bad.numel():
            where = int(bad[0])
            raise AlignmentError(
                f"{name} must lie in [1, {length}) at valid positions, since the logits are read one position earlier; "
                f"found {int(positions[where])} for row {int(pairs.row[where])}"
            )
    student_tokens = input_ids[pairs.row, pairs.student]
    teacher_tokens = teacher_ids[pairs.site, pairs.teacher]
    different = (student_tokens != teacher_tokens).nonzero()
    if not different.numel():
        return pairs, 0
    if strict:
        where = int(different[0])
        raise AlignmentError(
            f"paired tokens must be equal; found id {int(student_tokens[where])} at student position "
            f"{int(pairs.student[where])} and id {int(teacher_tokens[where])} at teacher position "
            f"{int(pairs.teacher[where])} in row {int(pairs.row[where])}; splice the hint into the sampled ids "
            "instead of rendering the conversation again, or set sdpo.strict = false to leave such sites out"
        )
    broken = pairs.site[different[:, 0]].unique()
    keep = ~torch.isin(pairs.site, broken)
    return Pairs(pairs.site[keep], pairs.row[keep], pairs.student[keep], pairs.teacher[keep]), int(
        broken.numel()
    )


def _check_shapes(
    input_ids: Tensor,
    teacher_ids: Tensor,
    s_idx: Tensor,
    t_idx: Tensor,
    s_valid: Tensor,
    t_valid: Tensor,
    rows: Tensor,
) -> None:
    if (
        s_idx.shape != t_idx.shape
        or s_idx.dim() != 2
        or s_valid.shape != s_idx.shape
        or t_valid.shape != t_idx.shape
    ):
        raise AlignmentError(
            "student_response_idx, teacher_response_idx and their *_valid masks must share one (sites, K) shape; found "
            f"{tuple(s_idx.shape)}, {tuple(t_idx.shape)}, {tuple(s_valid.shape)}, {tuple(t_valid.shape)}"
        )
    if s_valid.dtype != torch.bool or t_valid.dtype != torch.bool:
        raise AlignmentError(f"*_response_valid must be bool; found {s_valid.dtype} and {t_valid.dtype}")
    if teacher_ids.dim() != 2 or teacher_ids.size(0) != s_idx.size(0) or rows.shape != s_idx.shape[:1]:
        raise AlignmentError(
            f"there must be one teacher sequence and one site_row per site ({s_idx.size(0)}); found "
            f"{tuple(teacher_ids.shape)} and {tuple(rows.shape)}"
        )
    if not torch.equal(s_valid, t_valid):
        raise AlignmentError(
            f"both *_response_valid masks must be equal, since they pair the same tokens; found {int(s_valid.sum())} and "
            f"{int(t_valid.sum())} valid positions"
        )
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < input_ids.size(0)):
        raise AlignmentError(f"site_row must lie in [0, {input_ids.size(0)}); found {rows.tolist()}")
