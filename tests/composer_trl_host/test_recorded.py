"""Traces that bring their own ids, and renderers that say whose each token is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from renderers.llama_3 import Llama3Renderer
from renderers.qwen3 import Qwen3Renderer

from composer_trl_host.chat import Chat
from composer_trl_host.collation import to_row
from composer_trl_host.collator import ComposerDataCollator
from composer_trl_host.traces.model import ToolCall, ToolFailure, Trace, Turn, TurnTokens
from tests.composer_trl_host.styles import styled_tokenizer
from tests.composer_trl_host.test_collator import collator, config, hint, site_text, small_trace, text_of


def recorded_trace(tokenizer, advantages=True) -> Trace:
    """user, a failed call, its result, the recovery; ids as a live rollout makes them."""
    chat = Chat(tokenizer)
    bridge = chat.bridge([{"role": "tool", "content": "not found"}])
    opening = bridge.generation_prompt
    prompt = chat.prompt_ids([{"role": "user", "content": "fix it"}])[: -len(opening)]
    call = ToolCall("c", "read", "{}")

    def model_turn(text: str, credit: float, **fields) -> Turn:
        # One token is sampled in another cut than the tokenizer's own: recorded ids are kept as they are.
        body = [
            *[tokenizer.encode(letter, add_special_tokens=False)[0] for letter in text],
            tokenizer.eos_token_id,
        ]
        tokens = TurnTokens(
            (*opening, *body),
            (False,) * len(opening) + (True,) * len(body),
            tuple(-0.25 * (k + 1) for k in range(len(body))),
            (credit,) * len(body) if advantages else None,
        )
        return Turn("assistant", text, tokens=tokens, **fields)

    def given(role, text, ids) -> Turn:
        return Turn(role, text, tokens=TurnTokens(tuple(ids), (False,) * len(ids)))

    turns = (
        given("user", "fix it", prompt),
        model_turn("read x", 0.5, tool_calls=(call,)),
        given("tool", "not found", bridge.messages[1:]),
        model_turn("look", -0.5, failures=(ToolFailure(2, "missing_file", "is_error", "not found", call),)),
    )
    return Trace("r", turns)


def test_recorded_ids_masks_log_probs_and_advantages_are_used_as_they_are():
    tokenizer = styled_tokenizer("smollm2")
    trace = recorded_trace(tokenizer)
    make = collator("smollm2")
    batch = make([trace])
    ids = [i for turn in trace.turns for i in turn.tokens.ids]
    assert batch["input_ids"][0].tolist() == ids
    assert make.renderer.renderings == 0
    sampled = torch.tensor([flag for turn in trace.turns for flag in turn.tokens.sampled])
    assert torch.equal(batch["response_mask"][0], sampled)
    # "read x" and its end are 7 tokens, "look" and its end 5: 1/4, 2/4, ... nats down from 0.
    wanted = [*(-0.25 * k for k in range(1, 8)), *(-0.25 * k for k in range(1, 6))]
    assert batch["inference_logprobs"][0][sampled].tolist() == wanted
    assert batch["advantages"][0][sampled].tolist() == [0.5] * 7 + [-0.5] * 5
    assert batch["logprobs_known"].tolist() == [True]
    assert site_text(batch, tokenizer, 0, "teacher") == "look<|im_end|>"
    teacher = text_of(tokenizer, batch["teacher_input_ids"][0].tolist())
    assert (
        "not found<|im_end|>\n<|im_start|>user\nlook at missing_file<|im_end|>\n<|im_start|>assistant\nlook<|im_end|>"
        in teacher
    )


def test_recorded_and_text_traces_share_a_batch_and_a_row_keeps_its_ids_through_a_dataset():
    tokenizer = styled_tokenizer("smollm2")
    recorded = recorded_trace(tokenizer, advantages=False)
    batch = collator("smollm2")([small_trace(), to_row(recorded, 0.75)])
    assert batch["logprobs_known"].tolist() == [False, True]
    assert set(batch["advantages"][1][batch["response_mask"][1]].tolist()) == {0.75}
    assert batch["site_id"] == ("t:4", "r:3")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids: [10**6, *ids[1:]], "outside this one's vocabulary"),
        (lambda ids: [*ids[:-3], ids[-3] + 1, *ids[-2:]], "do not decode to its text"),
    ],
)
def test_ids_of_another_tokenizer_are_refused_and_counted(change, reason):
    trace = recorded_trace(styled_tokenizer("smollm2"))
    last = trace.turns[3]
    tokens = dataclasses.replace(last.tokens, ids=tuple(change(list(last.tokens.ids))))
    broken = dataclasses.replace(trace, turns=(*trace.turns[:3], dataclasses.replace(last, tokens=tokens)))
    make = collator("smollm2")
    collated = make.collate_trace(broken)
    assert collated.rows == ()
    assert reason in (collated.outcomes[0].dropped or "")
    assert make.report.sites_in == sum(make.report.dropped.values()) == 1


def test_a_turn_that_another_branch_trains_is_neither_trained_nor_a_site():
    trace = recorded_trace(styled_tokenizer("smollm2"))
    last = trace.turns[3]
    tokens = TurnTokens(last.tokens.ids, (False,) * len(last.tokens.ids), (), ())
    copied = dataclasses.replace(trace, turns=(*trace.turns[:3], dataclasses.replace(last, tokens=tokens)))
    collated = collator("smollm2").collate_trace(copied)
    assert collated.outcomes[0].dropped == "no model's turn, or another branch has it"
    assert sum(collated.rows[0].trained) == 7


@pytest.mark.parametrize(("style", "renderer"), [("qwen3", Qwen3Renderer), ("llama3", Llama3Renderer)])
def test_a_typed_renderer_s_own_ids_and_spans_are_taken(style, renderer):
    tokenizer = styled_tokenizer(style)
    typed = renderer(tokenizer)
    make = ComposerDataCollator(typed, config(), hints=hint)
    batch = make([small_trace(2)])
    assert make.report.sites_kept == 2
    assert make.renderer.renderings == 1
    messages = [
        {k: v for k, v in turn.as_message().items() if k in ("role", "content", "tool_calls", "tool_call_id")}
        for turn in small_trace(2).turns
    ]
    assert batch["input_ids"][0].tolist() == typed.render_ids(messages)
    ending = tokenizer.eos_token
    for site in (0, 1):
        assert site_text(batch, tokenizer, site, "student") == f"I look around {site}{ending}"
        assert site_text(batch, tokenizer, site, "teacher") == f"I look around {site}{ending}"
