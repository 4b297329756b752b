"""transformers' generation, with one set of sampling parameters, one seed and one end per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from composer_trl_host.reading import eval_mode
from composer_trl_host.serving.batching import Ticket
from composer_trl_host.serving.protocol import Completion, FinishReason, Sampling


class TokenGenerator:
    """Samples a batch of tickets with ``model()`` as its weights are at that moment.

    Contexts of different lengths are padded on the left. Log-probs are of the distribution that was drawn
    from. The model's own generation defaults (temperature, penalties) play no part.
    """

    def __init__(self, model: Callable[[], Any], eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id

    @torch.no_grad()
    def __call__(self, tickets: Sequence[Ticket]) -> list[Completion | None]:
        """One turn per ticket; None for one that was given up before it ended."""
        from transformers import GenerationConfig, StoppingCriteriaList
        from transformers.generation import LogitsProcessorList

        model = self.model()
        device = model.device
        width = max(len(ticket.token_ids) for ticket in tickets)
        padding = [width - len(ticket.token_ids) for ticket in tickets]
        ids = [
            [self.pad_token_id] * pad + ticket.token_ids for pad, ticket in zip(padding, tickets, strict=True)
        ]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        rows = RowSampler(tickets, self.eos_token_ids, device)
        config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max(ticket.sampling.max_tokens for ticket in tickets),
            pad_token_id=self.pad_token_id,
        )
        with eval_mode(model), _plain_defaults(model):
            model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                logits_processor=LogitsProcessorList([rows]),
                stopping_criteria=StoppingCriteriaList([rows.ended]),
            )
        return rows.completions()


class RowSampler:
    """A logits processor that draws each row's next token itself and leaves it as the only one.

    Greedy generation then takes the token drawn here, so every row has its own parameters and random state.
    """

    def __init__(self, tickets: Sequence[Ticket], eos_token_ids: frozenset[int], device: Any) -> None:
        self.tickets = tickets
        self._samplings = [ticket.sampling for ticket in tickets]
        self._ends = [
            sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
            for sampling in self._samplings
        ]
        self._seeds = [
            None if ticket.sampling.seed is None else torch.Generator(device).manual_seed(_turn_seed(ticket))
            for ticket in tickets
        ]
        self._ids: list[list[int]] = [[] for _ in tickets]
        self._logprobs: list[list[float]] = [[] for _ in tickets]
        self._reasons: list[FinishReason | None] = [None] * len(tickets)
        self._given_up = [False] * len(tickets)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores``: ``(B, vocab)`` logits of the next tokens."""
        logprobs = processed_logprobs(scores, self._samplings)
        chosen = self._draw(logprobs)
        taken = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        for row, (token, logprob) in enumerate(zip(chosen.tolist(), taken, strict=True)):
            if not self._running(row):
                continue
            self._ids[row].append(token)
            self._logprobs[row].append(logprob)
            if token in self._ends[row]:
                self._reasons[row] = "stop"
            elif len(self._ids[row]) == self._samplings[row].max_tokens:
                self._reasons[row] = "length"
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, chosen.unsqueeze(1), 0.0)

    def _draw(self, logprobs: Tensor) -> Tensor:
        if logprobs.isnan().any():
            raise RuntimeError("the model must give finite logits; found some that are not")
        chosen = logprobs.argmax(dim=-1)
        drawn = [row for row, sampling in enumerate(self._samplings) if sampling.temperature]
        for row in drawn:
            if self._seeds[row] is not None:
                chosen[row] = torch.multinomial(logprobs[row].exp(), 1, generator=self._seeds[row])[0]
        # Rows with a seed take nothing from the global generator: it must not depend on how requests were batched.
        unseeded = [row for row in drawn if self._seeds[row] is None]
        if unseeded:
            chosen[unseeded] = torch.multinomial(logprobs[unseeded].exp(), 1).squeeze(1)
        return chosen

    def _running(self, row: int) -> bool:
        return self._reasons[row] is None and not self._given_up[row]

    def ended(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """A stopping criterion: which rows need no further token. Rows that nobody waits for end here."""
        for row, ticket in enumerate(self.tickets):
            if self._running(row) and not ticket.alive:
                self._given_up[row] = True
        done = [not self._running(row) for row in range(len(self.tickets))]
        return torch.tensor(done, device=input_ids.device)

    def completions(self) -> list[Completion | None]:
        """What was sampled so far; None for rows that were given up."""
        return [
            None if reason is None else Completion(tuple(ids), tuple(logprobs), reason)
            for ids, logprobs, reason in zip(self._ids, self._logprobs, self._reasons, strict=True)
        ]


def _turn_seed(ticket: Ticket) -> int:
    """A client repeats its seed on every turn of a rollout, and the turns must not share their draws."""
    assert ticket.sampling.seed is not None
    return (ticket.sampling.seed + len(ticket.token_ids) * 0x9E3779B97F4A7C15) % 2**63


def processed_logprobs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """``(B, vocab)`` float32 log-probs that each row is drawn from: temperature, then min-p, top-k and
    top-p, in vLLM's order, -inf where cut off. A row of temperature 0 keeps its plain log-probs."""
    logits = logits.float()
    temperature = logits.new_tensor([sampling.temperature or 1.0 for sampling in samplings])
    logits = logits / temperature.unsqueeze(1)
    cut = [
        row
        for row, sampling in enumerate(samplings)
        if sampling.temperature and (sampling.min_p or sampling.top_k or sampling.top_p < 1)
    ]
    for row in cut:
        logits[row] = _truncated(logits[row], samplings[row])
    return logits.log_softmax(dim=-1)


def _truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """``(vocab,)`` logits with -inf where the row's truncation cuts."""
    if sampling.min_p:
        probabilities = logits.softmax(dim=-1)
        logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.max(), float("-inf"))
    ordered, order = logits.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1:
        probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(dim=-1)
        # A token stays while what stands before it holds less than top_p; so the first always stays.
        keep &= probabilities.cumsum(dim=-1) - probabilities < sampling.top_p
    kept = ordered.masked_fill(~keep, float("-inf"))
    return torch.empty_like(logits).scatter_(0, order, kept)


@contextmanager
def _plain_defaults(model: Any) -> Iterator[None]:
    """Keep the defaults that came with the model out: ``generate`` fills every unset field from them."""
    from transformers import GenerationConfig

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    holders = [model] if inner is model else [model, inner]
    saved = [(holder, holder.generation_config) for holder in holders if hasattr(holder, "generation_config")]
    for holder, _ in saved:
        holder.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for holder, config in saved:
            holder.generation_config = config
