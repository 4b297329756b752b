# ruff: noqa: F401, F811  (fixtures are imported by name)
from __future__ import annotations

import pytest
import torch

from composer_prime_plugin.config import SDPOConfig
from composer_prime_plugin.divergence import token_divergence
from composer_prime_plugin.errors import ModelError
from composer_trl_host.collation import TraceRow
from composer_trl_host.inspection import measure
from composer_trl_host.inspection.measure import TOP, Measurer
from composer_trl_host.inspection.model import by_kind, by_source, mean
from composer_trl_host.inspection.tokens import TokenTexts
from composer_trl_host.traces.model import REJECTED, Trace, Turn
from tests.composer_trl_host.conftest import model, tokenizer
from tests.test_inspection_samples import calm, failing, inspection_of

# float32 on both sides, but another order of the same sums: the shared prefix and the output head in blocks.
TOLERANCE = 1e-5


def rows_of(tokenizer, *traces: Trace) -> list[TraceRow]:
    from composer_prime_plugin.config import ComposerConfig
    from composer_trl_host.collator import ComposerDataCollator
    from tests.test_inspection_samples import KindHints

    collator = ComposerDataCollator(tokenizer, ComposerConfig(), hints=KindHints())
    return [row for trace in traces for row in collator.collate_trace(trace).rows]


def twice(name: str = "two") -> Trace:
    """Two sites in one conversation."""
    first = failing(name)
    again = first.turns[3].failures[0]
    second = type(again)(turn=4, kind="timeout", rule="exit_code", result="too slow", call=None)
    return Trace(
        id=name,
        turns=(*first.turns, Turn("tool", "too slow"), Turn("assistant", "I wait.", failures=(second,))),
    )


def test_conversations_without_errors_are_counted_and_not_kept(tokenizer):
    found = inspection_of(tokenizer, calm(), failing(), calm("c2"))
    assert [trace.trace.id for trace in found.traces] == ["t1"]
    assert found.read.traces == 3


def test_a_kept_site_has_its_tokens_and_a_dropped_one_its_reason(tokenizer):
    found = inspection_of(tokenizer, failing(), failing("t2", kind="unhinted"))
    kept, dropped = found.sites
    assert "".join(token.text for token in kept.tokens).startswith("I list the folder.")
    assert len(kept.tokens) == kept.outcome.recovery_tokens
    assert kept.divergences == ()
    assert dropped.tokens == ()
    assert dropped.outcome.dropped == "no hint for this error"


def test_a_refused_call_is_a_site_only_where_it_is_asked_for(tokenizer):
    assert inspection_of(tokenizer, failing(kind=REJECTED)).sites == ()
    (site,) = inspection_of(tokenizer, failing(kind=REJECTED), include_rejected=True).sites
    assert site.kinds == (REJECTED,)


@pytest.mark.parametrize("at_once", [1, 8])
def test_readings_are_what_two_plain_forwards_give(tokenizer, model, monkeypatch, at_once):
    monkeypatch.setattr(measure, "SITES_AT_ONCE", at_once)
    with torch.no_grad():
        for parameter in model.parameters():
            # Drawn weights say almost the same behind every text.
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    (row,) = rows_of(tokenizer, twice())
    assert len(row.sites) == 2
    measured = Measurer(model, TokenTexts(tokenizer), SDPOConfig()).measure(row)
    for site, readings in zip(row.sites, measured, strict=True):
        hinted = [*row.ids[: site.splice_at], *site.hint_ids, *row.ids[site.splice_at : site.stop]]
        with torch.no_grad():
            student = model(torch.tensor([row.ids[: site.stop]])).logits[0, site.start - 1 : -1]
            shift = len(site.hint_ids)
            teacher = model(torch.tensor([hinted])).logits[0, site.start + shift - 1 : -1]
        wanted = token_divergence(student, teacher, beta=0.5).values
        got = torch.tensor([reading.divergence for reading in readings])
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert float(wanted.max()) > 1e-2
        own = torch.tensor(row.ids[site.start : site.stop])
        for side, logits in (("student", student), ("teacher", teacher)):
            shares = torch.softmax(logits, dim=-1)
            top = torch.tensor([[share.probability for share in getattr(r, side)] for r in readings])
            torch.testing.assert_close(top, shares.topk(TOP).values, rtol=TOLERANCE, atol=TOLERANCE)
            chosen = torch.tensor([getattr(r, f"{side}_probability") for r in readings])
            plain = shares.gather(1, own.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(chosen, plain, rtol=TOLERANCE, atol=TOLERANCE)
        best = int(student[0].argmax())
        assert readings[0].student[0].text == TokenTexts(tokenizer).alone(best)


def test_measuring_trains_nothing_and_leaves_no_gradient(tokenizer, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = inspection_of(tokenizer, twice(), model=model.train())
    assert all(len(site.divergences) == site.outcome.recovery_tokens for site in found.sites)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ids_that_the_model_does_not_have_are_named(tokenizer, model):
    (row,) = rows_of(tokenizer, failing())
    alien = TraceRow(**{**vars(row), "ids": (*row.ids[:-1], 999)})
    with pytest.raises(ModelError, match=r"trace t1 holds id 999 and the model has 264 tokens; set --model"):
        Measurer(model, TokenTexts(tokenizer), SDPOConfig()).measure(alien)


def test_a_row_that_does_not_fit_the_device_is_named(tokenizer, model, monkeypatch):
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measure, "read_student", full)
    with pytest.raises(ModelError, match=r"trace t1 has one that does not fit; set a shorter --seq-len"):
        inspection_of(tokenizer, failing(), model=model)


def test_tallies_count_what_is_kept(tokenizer, model):
    found = inspection_of(tokenizer, failing(), failing("t2", kind="unhinted"), failing("t3"), model=model)
    kept = [site for site in found.sites if site.outcome.kept]
    tokens = sum(site.outcome.recovery_tokens for site in kept)
    first, second = by_kind(found.sites)
    assert (first.name, first.sites, first.kept, first.tokens) == ("missing_file", 2, 2, tokens)
    assert first.mean == pytest.approx(mean(tuple(value for site in kept for value in site.divergences)))
    assert (second.name, second.sites, second.kept, second.tokens, second.mean) == ("unhinted", 1, 0, 0, None)
    assert [row.name for row in by_source(found.sites)] == ["test/missing_file", "(no hint)"]
