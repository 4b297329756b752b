from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import TaskError
from composer_trl_host.alignment import paired_positions
from composer_trl_host.collation import to_row
from composer_trl_host.collator import ComposerDataCollator, group_advantages
from composer_trl_host.hints import ErrorContext, Hint
from composer_trl_host.trace_messages import write_messages
from composer_trl_host.traces.model import REJECTED, ToolCall, ToolFailure, Trace, Turn
from tests.composer_trl_host.styles import STYLES, styled_tokenizer

SPELLINGS = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "</s>",
    "[/INST]",
    "<end_of_turn>",
    "<|eot_id|>",
    "<tool_call>",
]


def config(**sdpo) -> ComposerConfig:
    return ComposerConfig(sdpo={"weight": 1.0, **sdpo})


def hint(context: ErrorContext) -> Hint:
    return Hint(f"look at {context.error_kind}", f"test/{context.error_kind}")


def collator(
    style: str, *, seq_len=None, hints=hint, include_rejected=None, host=(), **sdpo
) -> ComposerDataCollator:
    table = ComposerConfig(sdpo={"weight": 1.0, **sdpo}, trl_host=dict(host))
    return ComposerDataCollator(
        styled_tokenizer(style), table, hints=hints, seq_len=seq_len, include_rejected=include_rejected
    )


def failed(turn: int, call: ToolCall, kind: str = "missing_file") -> ToolFailure:
    return ToolFailure(turn, kind, "is_error", "not found", call)


def small_trace(recoveries: int = 1, recovery: str = "I look around", trace_id: str = "t", **fields) -> Trace:
    """System, user, then for each recovery: a call, its failed result, the recovery, an answer."""
    turns = [Turn("system", "be good"), Turn("user", "fix it")]
    for number in range(recoveries):
        call = ToolCall(f"toolu_{number}", "read", json.dumps({"path": f"f{number}"}))
        turns.append(Turn("assistant", "let me read", tool_calls=(call,)))
        turns.append(Turn("tool", "not found", tool_call_id=call.id, tool_name="read", is_error=True))
        failure = failed(len(turns) - 1, call)
        turns.append(Turn("assistant", f"{recovery} {number}", failures=(failure,)))
        turns.append(Turn("user", "go on"))
    turns.append(Turn("assistant", "done"))
    return Trace(trace_id, tuple(turns), **fields)


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def site_text(batch, tokenizer, site: int, side: str) -> str:
    idx, valid = batch[f"{side}_response_idx"][site], batch[f"{side}_response_valid"][site]
    ids = (
        batch["input_ids"][batch["site_row"][site]] if side == "student" else batch["teacher_input_ids"][site]
    )
    return text_of(tokenizer, ids[idx[valid]].tolist())


ENDING = {
    "smollm2": "<|im_end|>",
    "qwen25": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}


@pytest.mark.parametrize("style", STYLES)
def test_the_recovery_turn_is_what_is_supervised_on_both_sides(style):
    tokenizer = styled_tokenizer(style)
    make = collator(style)
    batch = make([small_trace(2)])
    assert batch["site_id"] == ("t:4", "t:8")
    for site, number in ((0, 0), (1, 1)):
        for side in ("student", "teacher"):
            assert site_text(batch, tokenizer, site, side).strip() == f"I look around {number}{ENDING[style]}"
    supervised = text_of(tokenizer, batch["input_ids"][0][batch["sdpo_loss_mask"][0]].tolist())
    assert supervised.replace(" ", "") == "".join(f"Ilookaround{n}{ENDING[style]}" for n in (0, 1))
    assert make.report.sites_in == make.report.sites_kept == 2


@pytest.mark.parametrize("style", STYLES)
def test_the_student_is_the_template_s_rendering_and_the_teacher_has_the_hint_before_the_turn(style):
    tokenizer = styled_tokenizer(style)
    make = collator(style)
    [collated] = make.collate([small_trace()])
    [row] = collated.rows
    [site] = row.sites
    text = text_of(tokenizer, row.ids)
    hinted = text_of(
        tokenizer, [*row.ids[: site.splice_at], *site.hint_ids, *row.ids[site.splice_at : site.stop]]
    )
    assert "not found" in text
    assert "look at missing_file" not in text
    before, _, after = hinted.partition("look at missing_file")
    assert "not found" in before
    assert after.rstrip().endswith(f"I look around 0{ENDING[style]}")
    assert "I look around" not in before
    if style in ("smollm2", "qwen25", "llama3"):
        written = write_messages(small_trace(), make.renderer.abilities)
        assert text == tokenizer.apply_chat_template(written.messages, tokenize=False)
        whole = tokenizer.apply_chat_template(written.messages, return_dict=False)
        assert list(row.ids) == whole


def test_the_hint_of_a_template_that_takes_no_message_there_stands_at_the_end_of_the_result():
    tokenizer = styled_tokenizer("gemma")
    make = collator("gemma", hint_role="system")
    [collated] = make.collate([small_trace()])
    [site] = collated.rows[0].sites
    row = collated.rows[0].ids
    hinted = text_of(tokenizer, [*row[: site.splice_at], *site.hint_ids, *row[site.splice_at : site.stop]])
    assert (
        "not found\n</tool_response>\n\nlook at missing_file<end_of_turn>\n<start_of_turn>model\nI look around"
        in hinted
    )
    assert collated.outcomes[0].hint_role == "inline"
    assert make.report.notes['hint_role "system" has no place in this chat template: "inline" taken'] == 1


def test_a_role_that_the_template_refuses_falls_back_and_is_reported():
    make = collator("mistral", hint_role="system")
    [collated] = make.collate([small_trace()])
    assert collated.outcomes[0].hint_role in ("user", "tool_result")
    assert any(note.startswith('hint_role "system" has no place') for note in make.report.notes)
    kept = collator("llama3", hint_role="system")
    assert kept.collate([small_trace()])[0].outcomes[0].hint_role == "system"
    assert not any(note.startswith("hint_role") for note in kept.report.notes)


def test_qwen3_strips_earlier_thinking_and_the_spans_still_fit():
    tokenizer = styled_tokenizer("qwen3")
    trace = small_trace()
    turns = list(trace.turns)
    turns[4] = Turn("assistant", "I look around", thinking="why was it not there", failures=turns[4].failures)
    turns[6] = Turn("assistant", "done", thinking="all is well")
    batch = collator("qwen3")([Trace("t", tuple(turns))])
    # Behind turn 4 comes a user message, so its thinking is history; the last turn's is shown.
    assert site_text(batch, tokenizer, 0, "student") == "I look around<|im_end|>"
    text = text_of(tokenizer, batch["input_ids"][0].tolist())
    assert "why was it" not in text
    assert "<think>\nall is well\n</think>\n\ndone<|im_end|>" in text


def test_a_recovery_that_is_thinking_alone_is_dropped_once_it_is_stripped():
    trace = small_trace()
    turns = list(trace.turns)
    turns[4] = Turn("assistant", "", thinking="hm", failures=turns[4].failures)
    make = collator("qwen3", host={"strip_thinking": True})
    collated = make.collate_trace(Trace("t", tuple(turns)))
    assert collated.outcomes[0].dropped == "empty recovery turn"
    assert make.report.sites_kept == 0
    assert dict(make.report.dropped) == {"empty recovery turn": 1}


def test_calls_and_results_are_written_as_text_where_the_template_has_no_place_for_them():
    make = collator("smollm2")
    [collated] = make.collate([small_trace()])
    text = text_of(styled_tokenizer("smollm2"), collated.rows[0].ids)
    assert '<tool_call>\n{"name": "read", "arguments": {"path": "f0"}}\n</tool_call><|im_end|>' in text
    assert make.report.notes["tool calls written as text: the chat template does not show them"] == 1
    assert "tool\nnot found" in text
    gemma = collator("gemma")
    gemma.collate([small_trace()])
    assert "tool results written as user messages: the chat template has no tool role" in gemma.report.notes
    assert "system message written as a user message: the chat template refuses it" in gemma.report.notes


def test_broken_arguments_and_parallel_calls_reach_templates_that_refuse_them():
    broken = ToolCall("c1", "read", '{"path": ')
    turns = (
        Turn("user", "go"),
        Turn("assistant", "", tool_calls=(broken, ToolCall("c2", "list", "{}"))),
        Turn("tool", "bad json", tool_call_id="c1"),
        Turn("tool", "a b", tool_call_id="c2"),
        Turn("assistant", "again", failures=(failed(2, broken, "invalid_json"),)),
    )
    for style in STYLES:
        tokenizer = styled_tokenizer(style)
        batch = collator(style)([Trace("t", turns)])
        assert site_text(batch, tokenizer, 0, "teacher").endswith(f"again{ENDING[style]}")
        text = text_of(tokenizer, batch["input_ids"][0].tolist())
        assert '"path": ' in text.replace("\\", "")
        assert text.index("bad json") < text.index("a b")


def test_control_tokens_in_a_trace_are_text_and_move_no_border():
    for style in STYLES:
        tokenizer = styled_tokenizer(style)
        trace = small_trace(recovery=f"x {ENDING[style]} y")
        turns = list(trace.turns)
        turns[3] = Turn(
            "tool", f"{ENDING[style]}\n<|im_start|>assistant\n[/INST]", tool_call_id="toolu_0", is_error=True
        )
        batch = collator(style)([Trace("t", tuple(turns))])
        assert site_text(batch, tokenizer, 0, "student").strip() == f"x {ENDING[style]} y 0{ENDING[style]}"
        recovery = batch["input_ids"][0][batch["sdpo_loss_mask"][0]].tolist()
        assert recovery.count(tokenizer.convert_tokens_to_ids(ENDING[style])) == 1


def test_placeholders_have_the_hint_s_length_and_the_teacher_has_the_hint_instead():
    for style in STYLES:
        tokenizer = styled_tokenizer(style)
        raw = collator(style).collate([small_trace(2)])[0].rows[0]
        make = collator(style, student_context="placeholder")
        [row] = make.collate([small_trace(2)])[0].rows
        cut = list(row.ids)
        for site in reversed(row.sites):
            assert site.placeholder == len(site.hint_ids)
            assert cut[site.splice_at : site.splice_at + site.placeholder] != list(site.hint_ids)
            del cut[site.splice_at : site.splice_at + site.placeholder]
        assert tuple(cut) == raw.ids
        batch = make([small_trace(2)])
        valid = batch["student_response_valid"]
        assert torch.equal(batch["student_response_idx"][valid], batch["teacher_response_idx"][valid])
        assert "look at" not in text_of(tokenizer, row.ids)


def test_a_cumulative_teacher_reads_the_earlier_hints_and_an_isolated_one_does_not():
    tokenizer = styled_tokenizer("qwen25")
    for scope, count in (("isolated", 1), ("cumulative", 2)):
        batch = collator("qwen25", hint_scope=scope)([small_trace(2)])
        second = batch["teacher_input_ids"][1][batch["teacher_attention_mask"][1].bool()].tolist()
        assert text_of(tokenizer, second).count("look at missing_file") == count
        paired_positions(batch["input_ids"], batch)


def test_a_trace_longer_than_the_limit_is_cut_at_turns_and_keeps_every_site_that_fits():
    whole = collator("qwen25").collate([small_trace(6)])[0].rows[0]
    limit = len(whole.ids) // 2
    make = collator("qwen25", seq_len=limit)
    [collated] = make.collate([small_trace(6)])
    assert [outcome.kept for outcome in collated.outcomes] == [True] * 6
    turns = [turn for row in collated.rows for turn in row.site_turns]
    assert sorted(turns) == [4, 8, 12, 16, 20, 24]
    opening = styled_tokenizer("qwen25").encode("<|im_start|>assistant\n", add_special_tokens=False)
    for number, row in enumerate(collated.rows):
        assert len(row.ids) <= limit
        assert all(site.stop + len(site.hint_ids) <= limit for site in row.sites)
        if number:
            assert list(row.ids[: len(opening)]) == opening
            assert not any(row.trained)  # their context is not the one that they were sampled in
    assert make.report.cut_rows == len(collated.rows) - 1 > 0
    assert make.report.notes["trace cut: channel 1 trains its beginning alone"] == 1


@pytest.mark.parametrize("sdpo", [{"student_context": "placeholder"}, {"hint_scope": "cumulative"}])
def test_where_hints_add_up_all_of_them_fit(sdpo):
    [whole] = collator("qwen25").collate([small_trace(4)])[0].rows
    hint_length = len(whole.sites[0].hint_ids)
    limit = len(whole.ids) + 2 * hint_length  # room for two of the four
    make = collator("qwen25", seq_len=limit, **sdpo)
    [collated] = make.collate([small_trace(4)])
    assert len(collated.rows) == 2
    assert make.report.sites_kept == 4
    batch = make.batch(collated.rows)
    assert batch["input_ids"].size(1) <= limit
    assert batch["teacher_input_ids"].size(1) <= limit


def test_a_site_that_no_row_can_hold_is_dropped_with_the_reason():
    make = collator("qwen25", seq_len=40)
    [collated] = make.collate([small_trace(2, recovery="word " * 60)])
    assert [outcome.dropped for outcome in collated.outcomes] == [
        "the failed call, the recovery and its hint do not fit seq_len"
    ] * 2
    assert make.report.sites_in == 2
    assert sum(make.report.dropped.values()) == 2


def test_rejected_results_are_sites_only_when_asked_for():
    trace = small_trace()
    turns = list(trace.turns)
    turns[4] = Turn("assistant", "ok", failures=(failed(3, ToolCall("c", "read", "{}"), REJECTED),))
    assert collator("qwen25").collate_trace(Trace("t", tuple(turns))).outcomes == ()
    kept = collator("qwen25", include_rejected=True).collate_trace(Trace("t", tuple(turns)))
    assert [outcome.kept for outcome in kept.outcomes] == [True]
    assert kept.rows[0].sites[0].error_kind == REJECTED


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        (None, "no hint for this error"),
        (lambda context: None, "no hint for this error"),
        (lambda context: Hint("  ", "x"), "no hint for this error"),
        (lambda context: 1 / 0, "the hint generator failed with ZeroDivisionError"),
        (lambda context: Hint("word " * 400, "x"), "hint longer than trl_host.max_hint_tokens"),
    ],
)
def test_a_site_without_a_usable_hint_is_dropped_and_counted(hints, reason):
    make = collator("qwen25", hints=hints)
    collated = make.collate_trace(small_trace())
    assert collated.outcomes[0].dropped == reason
    assert collated.rows[0].sites == ()
    assert dict(make.report.dropped) == {reason: 1}


def test_the_hint_generator_sees_every_failed_result_and_the_conversation():
    seen: list[ErrorContext] = []
    one, other = ToolCall("a", "read", '{"path": "x"}'), ToolCall("b", "list", "{}")
    failures = (
        ToolFailure(2, "missing_file", "is_error", "no x", one),
        ToolFailure(3, "permission", "is_error", "denied", other),
    )
    turns = (
        Turn("user", "go"),
        Turn("assistant", "", tool_calls=(one, other)),
        Turn("tool", "no x", tool_call_id="a"),
        Turn("tool", "denied", tool_call_id="b"),
        Turn("assistant", "again", failures=failures),
    )
    collator("qwen25", hints=lambda context: seen.append(context)).collate_trace(Trace("t", turns))
    [context] = seen
    assert context.error_kind == "missing_file"
    assert context.result == "no x\ndenied"
    assert context.call == 'read {"path": "x"}\nlist {}'
    assert [message["role"] for message in context.messages] == ["user", "assistant", "tool", "tool"]


def test_advantages_are_rewards_against_the_group_s_mean():
    traces = [
        small_trace(trace_id="a", reward=1.0, group_id="g"),
        small_trace(trace_id="b", reward=0.0, group_id="g"),
        small_trace(trace_id="c", reward=0.5, group_id="g"),
        small_trace(trace_id="d", reward=1.0, group_id="alone"),
        small_trace(trace_id="e", reward=1.0),
    ]
    # The mean of 1, 0 and 0.5 is 0.5.
    assert group_advantages(traces) == [0.5, -0.5, 0.0, None, None]
    branches = [
        small_trace(trace_id="a", reward=1.0, group_id="g", rollout="r1"),
        small_trace(trace_id="b", reward=1.0, group_id="g", rollout="r1"),
        small_trace(trace_id="c", reward=0.0, group_id="g", rollout="r2"),
        small_trace(trace_id="d", reward=1.0, group_id="h", rollout="r3"),
        small_trace(trace_id="e", reward=1.0, group_id="h", rollout="r3"),
    ]
    # Two branches of one rollout are one reward: the mean of 1 and 0; and one rollout is no group.
    assert group_advantages(branches) == [0.5, 0.5, -0.5, None, None]
    batch = collator("qwen25")([to_row(traces[0], 0.5), traces[4]])
    trained = batch["response_mask"]
    assert set(batch["advantages"][0][trained[0]].tolist()) == {0.5}
    assert batch["advantages"][~trained].abs().sum() == 0
    assert batch["advantages"][1].abs().sum() == 0


def test_a_feature_that_is_no_trace_and_a_batch_without_rows_are_errors():
    make = collator("qwen25")
    with pytest.raises(TaskError, match="must be a Trace or a row with the key trace"):
        make([{"text": "x"}])
    with pytest.raises(TaskError, match=r"must be what collation.to_row wrote"):
        make([{"trace": "{}"}])
    with pytest.raises(TaskError, match="needs at least one row"):
        make([Trace("t", (Turn("user", "x"),))])


def test_one_rendering_per_trace_however_many_sites():
    make = collator("qwen25")
    make([small_trace(8), small_trace(3)])
    assert make.renderer.renderings == 2


WORDS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=()), max_size=12),
        st.sampled_from(
            [*SPELLINGS, "assistant", "\n\n", "<think>x</think>", "xqa", "xqzj0jzqx", "{{ x }}", "\ud800"]
        ),
    ),
    max_size=4,
).map(" ".join)


@st.composite
def traces(draw) -> Trace:
    turns: list[Turn] = []
    if draw(st.booleans()):
        turns.append(Turn("system", draw(WORDS)))
    turns.append(Turn("user", draw(WORDS)))
    pending: tuple[ToolFailure, ...] = ()
    for number in range(draw(st.integers(1, 6))):
        calls = tuple(
            ToolCall(
                f"call_{number}_{k}",
                "read",
                draw(st.sampled_from(['{"path": "x"}', "{}", "{broken", '"text"'])),
            )
            for k in range(draw(st.integers(0, 2)))
        )
        turns.append(
            Turn(
                "assistant",
                draw(WORDS),
                thinking=draw(st.sampled_from(["", "hm"])),
                tool_calls=calls,
                failures=pending,
            )
        )
        pending = ()
        for call in calls:
            turns.append(Turn("tool", draw(WORDS), tool_call_id=call.id, tool_name="read"))
            if draw(st.booleans()):
                pending = (
                    *pending,
                    failed(len(turns) - 1, call, draw(st.sampled_from(["missing_file", REJECTED]))),
                )
        if not calls:
            turns.append(Turn("user", draw(WORDS)))
    if draw(st.booleans()):
        turns.append(Turn("assistant", draw(WORDS), failures=pending))
    return Trace("t", tuple(turns))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    trace=traces(),
    style=st.sampled_from(STYLES),
    seq_len=st.sampled_from([None, 60, 120, 400]),
    role=st.sampled_from(["user", "system", "tool_result"]),
    context=st.sampled_from(["raw", "placeholder"]),
    scope=st.sampled_from(["isolated", "cumulative"]),
)
def test_whatever_the_trace_every_site_is_whole_paired_and_accounted_for(
    trace, style, seq_len, role, context, scope
):
    sdpo = {"hint_role": role, "student_context": context, "hint_scope": scope}
    make = collator(style, seq_len=seq_len, **sdpo)
    collated = make.collate_trace(trace)
    plain = collator(style, hints=None).collate_trace(trace)
    report = make.report
    assert report.sites_in == len(trace.sites()) == len(collated.outcomes)
    assert report.sites_in == report.sites_kept + sum(report.dropped.values())
    kept = [outcome.turn for outcome in collated.outcomes if outcome.kept]
    assert sorted(turn for row in collated.rows for turn in row.site_turns) == kept
    spelled = [site for row in collated.rows for site in row.sites]
    assert len(spelled) == len(kept)
    if plain.rows and collated.rows:
        whole = list(plain.rows[0].ids)
        for row in collated.rows:
            student = list(row.ids)
            for site in reversed(row.sites):
                del student[site.splice_at : site.splice_at + site.placeholder]
            assert any(
                whole[at : at + len(student)] == student for at in range(len(whole) - len(student) + 1)
            )
    for row in collated.rows:
        flags = torch.tensor(row.sampled)
        for site in row.sites:
            assert bool(flags[site.start : site.stop].all())  # nothing outside a turn of the model
            assert site.start == 0 or not flags[site.start - 1]  # and the whole of it
            assert site.stop == len(row.ids) or not flags[site.stop] or style == "mistral"
            if seq_len is not None:
                assert len(row.ids) <= seq_len
                assert site.stop - site.placeholder + len(site.hint_ids) <= seq_len
    if not collated.rows:
        return
    batch = make.batch(collated.rows)
    pairs, left_out = paired_positions(batch["input_ids"], batch)
    assert left_out == 0
    assert torch.equal(batch["student_response_valid"], batch["teacher_response_valid"])
    tokens = sum(site.stop - site.start for row in collated.rows for site in row.sites)
    assert pairs.site.numel() == tokens
    assert int(batch["sdpo_loss_mask"].sum()) == tokens
    assert not (batch["sdpo_loss_mask"] & ~batch["completion_mask"]).any()
    assert not (batch["response_mask"] & ~batch["completion_mask"]).any()
    if scope == "isolated":
        sites = [(row, site) for row in collated.rows for site in row.sites]
        for number, (row, site) in enumerate(sites):
            teacher = batch["teacher_input_ids"][number][
                batch["teacher_attention_mask"][number].bool()
            ].tolist()
            hint_length = len(site.hint_ids)
            assert tuple(teacher[site.splice_at : site.splice_at + hint_length]) == site.hint_ids
            del teacher[site.splice_at : site.splice_at + hint_length]
            student = list(row.ids[: site.stop])
            del student[site.splice_at : site.splice_at + site.placeholder]
            assert teacher == student
