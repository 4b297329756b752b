"""The teacher behind the student's keys and values, and what happens where that cannot be."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from composer_prime_plugin.errors import ModelError
from composer_trl_host import reading
from composer_trl_host.compose import compose_loss
from composer_trl_host.reading import HiddenReading, LogitsReading, read_student, read_teacher

from .test_compose import config, gradient, make_batch

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

SMALL = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 258,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def teacher_logits(model, batch, shared: bool) -> torch.Tensor:
    """The teacher's logits at every pair, ``(N, vocab)``."""
    student = read_student(model, batch["input_ids"], batch["attention_mask"], 0, keep_keys_values=shared)
    assert (student.keys_values is not None) == shared
    read, start = read_teacher(model, batch, student)
    site, k = batch["teacher_response_valid"].nonzero(as_tuple=True)
    return read.block(site, batch["teacher_response_idx"][site, k] - 1 - start[site])


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_the_shared_prefix_gives_the_full_teachers_logits(model, dtype, atol):
    """Left padding, several sites per row, different splice points, a row without a site. Not to the
    bit: the products have other shapes, so their sums round in another order."""
    model = model.to(dtype)
    batch = make_batch(extra_pad=3)
    shared, full = (teacher_logits(model, batch, share) for share in (True, False))
    assert shared.shape == (7, 264)
    torch.testing.assert_close(shared, full, rtol=0, atol=atol)


def test_the_teacher_reads_the_hint_and_the_recovery_alone(model):
    widths: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: widths.append(kwargs["input_ids"].size(1)), with_kwargs=True
    )
    compose_loss(model, make_batch(), config())
    # Sites, by hand: 1 re-read token + hint + generation prompt + recovery = 1+1+0+1, 1+3+1+3, 1+2+1+3.
    assert widths == [11, 8]


@pytest.mark.parametrize("limit", [1, 30, 2**16])
def test_sites_may_be_read_in_several_forwards(model, monkeypatch, limit):
    model = model.double()
    wanted = compose_loss(model, make_batch(), config()).loss
    monkeypatch.setattr(reading, "TEACHER_TOKENS", limit)
    torch.testing.assert_close(compose_loss(model, make_batch(), config()).loss, wanted, rtol=1e-10, atol=0)


def loss_and_gradient(model, plain: bool, monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(reading, "_parts", lambda _model: (None, None))
        loss = compose_loss(model, make_batch(), config()).loss
        return loss.detach(), gradient(model, loss)


HEADS = {
    "gemma-2 (soft cap, sliding layers)": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL, head_dim=8, final_logit_softcapping=3.0, sliding_window=4, attn_implementation="eager"
        )
    ),
    "granite (logits divided)": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "cohere (logits multiplied)": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "mistral (sliding window)": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_other_architectures_give_the_plain_loss_and_gradient(kind, monkeypatch):
    torch.manual_seed(0)
    model = HEADS[kind]().eval()
    # Gemma 2's eager attention gives NaN on left padding in float64, with or without this code.
    exact = not kind.startswith("gemma")
    model = model.double() if exact else model
    mine, my_grad = loss_and_gradient(model, False, monkeypatch)
    wanted, want_grad = loss_and_gradient(model, True, monkeypatch)
    torch.testing.assert_close(mine, wanted, rtol=1e-9 if exact else 1e-5, atol=0)
    torch.testing.assert_close(
        my_grad, want_grad, rtol=1e-7 if exact else 1e-3, atol=1e-11 if exact else 1e-6
    )


def test_sliding_windows_keep_the_teacher_on_its_whole_sequence():
    torch.manual_seed(0)
    model = HEADS["mistral (sliding window)"]().eval()
    batch = make_batch()
    assert read_student(model, batch["input_ids"], batch["attention_mask"], 0, True).keys_values is None


def test_a_head_that_is_not_understood_falls_back_to_the_models_own_logits_and_says_so(
    model, caplog, monkeypatch
):
    model = model.double()
    own = type(model).forward

    def doubled(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(type(model), "forward", doubled)
    batch = make_batch()
    read = read_student(model, batch["input_ids"], batch["attention_mask"], 0, True)
    assert isinstance(read.reading, LogitsReading)
    mine, my_grad = loss_and_gradient(model, False, monkeypatch)
    wanted, want_grad = loss_and_gradient(model, True, monkeypatch)
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(my_grad, want_grad, rtol=1e-9, atol=1e-12)
    assert caplog.text.count("its output head is not W h + b") == 1


def test_activation_checkpointing_falls_back_to_a_full_teacher_and_says_so_once(model, caplog):
    model = model.double()
    wanted = compose_loss(model, make_batch(), config()).loss
    model.gradient_checkpointing_enable()
    model.train()
    for _ in range(2):
        torch.testing.assert_close(
            compose_loss(model, make_batch(), config()).loss, wanted, rtol=1e-9, atol=0
        )
    assert caplog.text.count("the teacher reads its whole sequence: activation checkpointing") == 1


def test_lora_reads_through_the_adapter(model, monkeypatch):
    torch.manual_seed(0)
    wrapped = get_peft_model(
        model.double(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    wrapped.double().eval()
    loss = compose_loss(wrapped, make_batch(), config()).loss
    batch = make_batch()
    read = read_student(wrapped, batch["input_ids"], batch["attention_mask"], 0, True)
    assert isinstance(read.reading, HiddenReading)
    assert read.keys_values is not None
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    mine = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
    monkeypatch.setattr(reading, "_parts", lambda _model: (None, None))
    plain = compose_loss(wrapped, make_batch(), config()).loss
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(plain, trained)])
    torch.testing.assert_close(loss, plain, rtol=1e-9, atol=0)
    torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-12)
    assert float(wanted.abs().max()) > 0


def test_functional_dropout_is_seen(model, caplog):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    batch = make_batch()
    assert read_student(model, batch["input_ids"], batch["attention_mask"], 0, True).keys_values is None
    assert "dropout is on" in caplog.text


def test_prompt_tuning_is_refused(model):
    from peft import PromptTuningConfig

    wrapped = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ModelError, match="must not be prompt or prefix tuning"):
        compose_loss(wrapped, make_batch(), config())
