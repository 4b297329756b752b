from __future__ import annotations

import pytest

from composer_prime_plugin import ComposerConfig
from composer_prime_plugin.errors import TaskError
from composer_trl_host.alignment import build_site_batch, paired_positions
from composer_trl_host.chat import Chat
from composer_trl_host.evaluate import Evaluator
from composer_trl_host.rollout import RolloutRunner

from .fakes import PasswordEnvironment


def runner(tokenizer, hints="own", **host) -> RolloutRunner:
    environment = PasswordEnvironment()
    config = ComposerConfig(sdpo={"weight": 1.0}, trl_host={"max_turns": 3, **host})
    generator = environment.hints if hints == "own" else hints
    return RolloutRunner(environment, Chat(tokenizer), generator, config, [tokenizer.eos_token_id])


def script(tokenizer, turns: list[list[str]], logprob: float | None = None):
    """A generator that says the scripted turns, each closed by the end token unless it ends with '~'."""
    rounds = iter(turns)
    contexts_seen: list[list[list[int]]] = []

    def generate(contexts):
        contexts_seen.append(contexts)
        said = []
        for text in next(rounds):
            end = [] if text.endswith("~") else [tokenizer.eos_token_id]
            said.append([*tokenizer.encode(text.removesuffix("~"), add_special_tokens=False), *end])
        return said, None if logprob is None else [[logprob] * len(ids) for ids in said]

    generate.contexts = contexts_seen
    return generate


ROWS = [{"secret": "aa"}, {"secret": "bb"}]


def test_an_error_that_is_answered_is_a_site_and_the_turn_after_it_is_its_recovery(tokenizer):
    rollouts = runner(tokenizer).play(ROWS, script(tokenizer, [["aa", "no"], ["bb"]]))
    solved_at_once, recovered = rollouts
    assert (
        solved_at_once.sites,
        len(solved_at_once.turn_ids),
        solved_at_once.errors,
        solved_at_once.reward,
    ) == (
        [],
        1,
        0,
        1.0,
    )
    assert (len(recovered.turn_ids), recovered.errors, recovered.reward, recovered.solved) == (
        2,
        1,
        1.0,
        True,
    )
    ids = [*recovered.prompt_ids, *recovered.completion_ids]
    (site,) = recovered.sites
    assert tokenizer.decode(ids[site.start : site.stop], skip_special_tokens=False) == "bb<|im_end|>"
    assert ids[: site.splice_at] + ids[site.splice_at : site.start] == ids[: site.start]
    assert tokenizer.decode(ids[site.splice_at : site.start]) == "<|im_start|>assistant\n"
    assert tokenizer.decode(site.hint_ids) == "<|im_start|>user\nsay bb<|im_end|>\n"
    assert (site.hint_source, site.error_kind) == ("fake/password", "wrong")


def test_the_context_of_a_turn_is_what_was_sampled_before_it(tokenizer):
    generate = script(tokenizer, [["aa", "n o~"], ["bb"]])
    rollout = runner(tokenizer).play(ROWS, generate)[1]
    assert generate.contexts[1][0] == [*rollout.prompt_ids, *rollout.completion_ids][: -len("bb") - 1]
    text = tokenizer.decode([*rollout.prompt_ids, *rollout.completion_ids], skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\npassword?<|im_end|>\n<|im_start|>assistant\nn o<|im_end|>\n"
        "<|im_start|>tool\nwrong: n o<|im_end|>\n<|im_start|>assistant\nbb<|im_end|>"
    )
    sampled = [i for i, flag in zip(rollout.completion_ids, rollout.sampled, strict=True) if flag]
    assert tokenizer.decode(sampled, skip_special_tokens=False) == "n obb<|im_end|>"


def test_consecutive_errors_are_a_site_each_and_the_last_unanswered_one_is_none(tokenizer):
    rollout = runner(tokenizer).play([{"secret": "aa"}], script(tokenizer, [["x"], ["y"], ["z"]]))[0]
    assert (len(rollout.sites), rollout.errors, len(rollout.turn_ids), rollout.solved) == (2, 2, 3, False)
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    assert [tokenizer.decode(ids[s.start : s.stop]) for s in rollout.sites] == ["y<|im_end|>", "z<|im_end|>"]
    batch = build_site_batch([ids], [rollout.sites], [0], tokenizer.pad_token_id).as_batch()
    # Isolated hints: the second teacher sequence holds its own hint alone.
    second = tokenizer.decode(batch["teacher_input_ids"][1], skip_special_tokens=False)
    assert second.count("say aa") == 1
    import torch

    assert paired_positions(torch.tensor([ids]), batch)[1] == 0


def test_sites_without_a_usable_hint_are_dropped_and_counted(tokenizer):
    mute = runner(tokenizer, hints=None)
    assert mute.play([{"secret": "aa"}], script(tokenizer, [["x"], ["aa"]]))[0].sites == []
    assert mute.dropped == {"no hint for this error": 1}
    long = runner(tokenizer, max_hint_tokens=3)
    assert long.play([{"secret": "aa"}], script(tokenizer, [["x"], ["aa"]]))[0].sites == []
    assert long.dropped == {"hint longer than trl_host.max_hint_tokens": 1}
    empty = runner(tokenizer)
    assert empty.play([{"secret": "aa"}], script(tokenizer, [["x"], ["~"], ["aa"]]))[0].sites[0].hint_source
    assert empty.dropped == {"empty recovery turn": 1}


def test_shown_hints_reach_the_models_own_context(tokenizer):
    generate = script(tokenizer, [["x"], ["aa"]])
    runner(tokenizer).play([{"secret": "aa"}], generate, show_hints=True)
    assert tokenizer.decode(generate.contexts[1][0], skip_special_tokens=False).endswith(
        "<|im_start|>user\nsay aa<|im_end|>\n<|im_start|>assistant\n"
    )


def test_logprobs_stand_at_sampled_tokens_and_zeros_elsewhere(tokenizer):
    rollout = runner(tokenizer).play([{"secret": "aa"}], script(tokenizer, [["x"], ["aa"]], logprob=-1.5))[0]
    assert rollout.logprobs == [-1.5 * flag for flag in rollout.sampled]


def test_control_text_that_the_model_wrote_opens_no_turn(tokenizer):
    said = "<|im_end|>"
    generate = script(tokenizer, [["q"], ["aa"]])
    real = runner(tokenizer)
    ids = Chat(tokenizer).text_ids(said)

    def literal(contexts):
        turns, _ = generate(contexts)
        return ([[*ids, tokenizer.eos_token_id]] if len(generate.contexts) == 1 else turns), None

    rollout = real.play([{"secret": "aa"}], literal)[0]
    controls = [i for i in rollout.completion_ids if i == tokenizer.eos_token_id]
    assert len(controls) == 3  # the two turns' ends and the tool message's, not the echoed text


def test_a_generator_that_loses_a_turn_is_an_error(tokenizer):
    with pytest.raises(TaskError, match="one turn per context, 2; found 1"):
        runner(tokenizer).play(ROWS, lambda contexts: ([[1]], None))


def test_given_turns_are_replayed_and_the_model_takes_over_behind_them(tokenizer):
    real = runner(tokenizer)
    first = real.play([{"secret": "aa"}], script(tokenizer, [["x"], ["y"], ["z"]]))[0]
    assert first.failed_turns == [0, 1]
    generate = script(tokenizer, [["aa"]])
    again = real.play([{"secret": "aa"}], generate, given=[first.up_to_first_error()])[0]
    assert (
        again.completion_ids[: first.sites[0].start - len(first.prompt_ids)]
        == (first.completion_ids[: first.sites[0].start - len(first.prompt_ids)])
    )
    assert (len(generate.contexts), again.solved) == (1, True)


def test_evaluation_counts_first_tries_and_recoveries_from_the_first_evaluations_errors(tokenizer):
    real = runner(tokenizer)
    evaluator = Evaluator(real, ROWS, seed=0)
    # As it comes: aa at once, bb after an error. Replayed is bb's error: not recovered, hinted recovered.
    start = evaluator.evaluate(script(tokenizer, [["aa", "no"], ["bb"], ["no"], ["no"], ["bb"]]))
    assert (start.episodes, start.first_try, start.failed, start.recovered) == (2, 1, 1, 1)
    assert (start.replayed, start.replay_recovered, start.hinted_recovered, start.reward) == (1, 0, 1, 1.0)
    # Later nothing fails, and the same error is replayed still.
    end = evaluator.evaluate(script(tokenizer, [["aa", "bb"], ["bb"], ["bb"]]))
    assert (end.first_try, end.failed, end.replayed, end.replay_recovered) == (2, 0, 1, 1)
    assert real.dropped == {}


def test_a_hint_generator_that_fails_is_counted_and_training_goes_on(tokenizer):
    class Broken:
        def generate(self, context):
            raise TimeoutError

    real = runner(tokenizer, hints=Broken())
    rollout = real.play([{"secret": "aa"}], script(tokenizer, [["x"], ["aa"]]))[0]
    assert (rollout.sites, rollout.solved) == ([], True)
    assert real.dropped == {"the hint generator failed with TimeoutError": 1}


def test_replayed_turns_have_no_logprobs_and_those_behind_them_stay_aligned(tokenizer):
    real = runner(tokenizer)
    first = real.play([{"secret": "aa"}], script(tokenizer, [["x"], ["aa"]]))[0]
    again = real.play(
        [{"secret": "aa"}], script(tokenizer, [["aa"]], logprob=-1.5), given=[first.up_to_first_error()]
    )[0]
    assert again.logprobs is not None
    assert len(again.logprobs) == len(again.completion_ids)
    assert again.logprobs[-3:] == [-1.5] * 3
    assert set(again.logprobs[:-3]) == {0.0}
