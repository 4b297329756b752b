"""bench/cost.py: sizes against real models, the ratio and the memory against what was measured."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from composer_trl_host.head import CHUNK_ENTRIES

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def cost():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("cost")
    for name in ("cost", "shapes"):
        del sys.modules[name]


def test_the_block_of_logits_is_the_head_s(cost):
    assert cost.BLOCK_ENTRIES == CHUNK_ENTRIES


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_are_the_models(cost, tied):
    config = LlamaConfig(**SMALL, tie_word_embeddings=tied)
    assert cost.Sizes.of(config.to_dict()).parameters == LlamaForCausalLM(config).num_parameters()


def test_a_head_width_of_its_own_is_read(cost):
    config = Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config)
    norms = sum(p.numel() for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name)
    assert cost.Sizes.of(config.to_dict()).parameters == model.num_parameters() - norms


def test_the_embedded_models_sizes(cost):
    assert cost.EMBEDDED.parameters == 134_515_008


def test_the_ratio_is_the_one_that_was_measured(cost):
    # docs/performance.md: 1.15, 1.16 and 1.20 in three runs, about +2 s on 12 s.
    found = cost.seconds(cost.EMBEDDED, cost.Shape())
    assert 1.15 <= found.ratio <= 1.20
    assert found.off == pytest.approx(12.0, rel=0.1)
    assert found.on - found.off == pytest.approx(2.0, rel=0.2)


def test_a_machine_without_a_price_for_entries_pays_for_the_products_alone(cost):
    ratio = cost.seconds(cost.EMBEDDED, cost.Shape(), entry_ns=0.0).ratio
    assert 1.0 < ratio < cost.seconds(cost.EMBEDDED, cost.Shape()).ratio
    # Twice the speed halves the products' time and moves no ratio.
    fast = cost.seconds(cost.EMBEDDED, cost.Shape(), rate=2 * cost.RATE, entry_ns=0.0)
    assert fast.ratio == pytest.approx(ratio, rel=1e-12)


def test_what_moves_the_ratio(cost):
    def ratio(options=None, **changes):
        return cost.seconds(cost.EMBEDDED, dataclasses.replace(cost.Shape(), **changes), options).ratio

    base = ratio()
    assert ratio(recovery=256) > base > ratio(recovery=64)
    assert ratio(hint=200) > base
    assert base < ratio(sites=8) < base + 0.03
    assert ratio(rows=8) == pytest.approx(base, rel=1e-12)
    assert ratio(completion=1024) < base
    assert ratio(cost.Set(teacher="initial")) > base + 0.1
    assert ratio(cost.Set(teacher="initial"), sites=4) > ratio(cost.Set(teacher="initial")) + 0.5


def test_no_sites_cost_nothing(cost):
    batch = cost.Shape(recovery=0, hint=0, sites=0)
    assert cost.seconds(cost.EMBEDDED, batch).ratio == 1.0


def test_what_holds_memory(cost):
    base = cost.memory(cost.EMBEDDED, cost.Shape())
    assert base.weights == base.gradients == 134_515_008 * 4
    assert base.optimizer == 2 * base.weights
    assert base.total == sum(dataclasses.astuple(base))
    adapter = cost.memory(cost.EMBEDDED, cost.Shape(), cost.Set(lora_rank=16, teacher="initial"))
    assert adapter.teacher == 0
    assert adapter.gradients < base.gradients / 20
    copied = cost.memory(cost.EMBEDDED, cost.Shape(), cost.Set(teacher="initial", optimizer="sgd"))
    assert copied.teacher == base.weights
    assert copied.optimizer == base.weights
    kept = cost.memory(cost.EMBEDDED, cost.Shape(), cost.Set(checkpointing=True))
    assert kept.activations < base.activations / 10


def test_the_adapters_size_is_pefts(cost):
    from peft import LoraConfig, get_peft_model

    config = LlamaConfig(**SMALL)
    model = LlamaForCausalLM(config)
    with pytest.warns(FutureWarning):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained, _ = adapted.get_nb_trainable_parameters()
    assert cost._adapter(cost.Sizes.of(config.to_dict()), 4) == trained


def test_the_command_reads_a_folder(cost, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig(**SMALL).to_dict()))
    monkeypatch.setattr(sys, "argv", ["cost.py", str(tmp_path), "--rows", "2", "--lora-rank", "8"])
    assert cost.main() == 0
    printed = capsys.readouterr().out
    assert "2 rows of 768 tokens" in printed
    assert "ratio" in printed
    assert "activations" in printed
