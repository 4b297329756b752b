"""Measuring sites: the divergence of each recovery token and the likeliest tokens of both sides.

The readings are those that training takes; one row is read at a time and cut behind its last site.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.divergence import configured_divergence
from composer_prime_plugin.errors import ModelError
from composer_trl_host.alignment import ErrorSite, build_site_batch, paired_positions
from composer_trl_host.collation import TraceRow
from composer_trl_host.inspection.model import TokenReading, TokenShare
from composer_trl_host.inspection.tokens import TokenTexts
from composer_trl_host.reading import read_student, read_teacher

TOP = 5
"""Tokens shown per side."""

SITES_AT_ONCE = 8
"""Sites of a row in one teacher forward, which may hold the whole row once per site."""


@dataclass(frozen=True)
class Measurer:
    """Reads rows with ``model``, which is put into eval mode. ``sdpo``: which divergence."""

    model: nn.Module
    texts: TokenTexts
    sdpo: SDPOConfig

    def measure(self, row: TraceRow) -> list[list[TokenReading]]:
        """Per site of ``row``, one reading for each of its recovery tokens."""
        self.model.eval()
        _check_ids(self.model, row)
        results: list[list[TokenReading]] = []
        for first in range(0, len(row.sites), SITES_AT_ONCE):
            try:
                results += self._some(row, row.sites[first : first + SITES_AT_ONCE])
            except torch.OutOfMemoryError as error:
                raise ModelError(
                    f"the device must have room for a row of {len(row.ids)} tokens and its hints; trace {row.trace_id} "
                    "has one that does not fit; set a shorter --seq-len, or --device cpu"
                ) from error
        return results

    @torch.no_grad()
    def _some(self, row: TraceRow, sites: tuple[ErrorSite, ...]) -> list[list[TokenReading]]:
        ids = row.ids[: max(site.stop for site in sites)]
        device = next(self.model.parameters()).device
        # One row without padding: the pad id fills teacher sequences behind their end alone.
        built = build_site_batch([ids], [sites], [0], pad_token_id=0).as_batch()
        batch: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in built.items()
        }
        input_ids = torch.tensor([ids], dtype=torch.long, device=device)
        batch["attention_mask"] = torch.ones_like(input_ids)
        pairs, _ = paired_positions(input_ids, batch, strict=True)
        first = int(pairs.student.min()) - 1
        student = read_student(self.model, input_ids, batch["attention_mask"], first, keep_keys_values=True)
        teacher, start = read_teacher(self.model, batch, student)
        tokens = input_ids[pairs.row, pairs.student]
        teacher_column = pairs.teacher - 1 - start[pairs.site]

        def read(logits: Tensor, block: slice) -> Tensor:
            teacher_logits = teacher.block(pairs.site[block], teacher_column[block])
            divergence = configured_divergence(logits, teacher_logits, self.sdpo).values
            columns = [divergence.unsqueeze(-1)]
            for side in (logits, teacher_logits):
                shares = torch.softmax(side.float() / self.sdpo.temperature, dim=-1)
                top = shares.topk(TOP, dim=-1)
                own = shares.gather(-1, tokens[block].unsqueeze(-1))
                # Ids below 2**24 are exact in float32, so that one tensor can hold everything.
                columns += [own, top.values, top.indices.float()]
            return torch.cat(columns, dim=-1)

        numbers = student.reading.per_token(pairs.row, pairs.student - 1, read).cpu()
        per_site: list[list[TokenReading]] = [[] for _ in sites]
        for site, values in zip(pairs.site.tolist(), numbers.tolist(), strict=True):
            per_site[site].append(self._reading(values))
        return per_site

    def _reading(self, values: list[float]) -> TokenReading:
        student, teacher = values[1 : 2 + 2 * TOP], values[2 + 2 * TOP :]
        return TokenReading(
            divergence=values[0],
            student_probability=student[0],
            teacher_probability=teacher[0],
            student=self._shares(student[1:]),
            teacher=self._shares(teacher[1:]),
        )

    def _shares(self, values: list[float]) -> tuple[TokenShare, ...]:
        return tuple(
            TokenShare(self.texts.alone(int(token)), probability)
            for probability, token in zip(values[:TOP], values[TOP:], strict=True)
        )


def _check_ids(model: nn.Module, row: TraceRow) -> None:
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    worst = max(row.ids)
    if worst >= size:
        raise ModelError(
            f"the trace's tokens must be the model's; trace {row.trace_id} holds id {worst} and the model has {size} "
            "tokens; set --model to the model that recorded it"
        )
