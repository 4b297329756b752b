"""transformers' generation per row, on a model small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from composer_trl_host.serving.batching import Ticket
from composer_trl_host.serving.generation import TokenGenerator, processed_logprobs
from composer_trl_host.serving.protocol import Completion, Sampling

VOCABULARY = 40
EOS, PAD = 39, 0
LOGPROB_TOLERANCE = 2e-5
"""float32, two layers, left padding against none: up to 5e-6 seen."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.6,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config).eval()


def sample(model: LlamaForCausalLM, pairs: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    tickets = [Ticket(ids, sampling) for ids, sampling in pairs]
    found = TokenGenerator(lambda: model, [EOS], PAD)(tickets)
    assert all(turn is not None for turn in found)
    return [turn for turn in found if turn is not None]


def read_logprobs(
    model: LlamaForCausalLM, ids: list[int], turn: Completion, temperature: float
) -> list[float]:
    """The log-probs of a turn's tokens by one forward over everything, without padding or cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *turn.token_ids]])).logits[0].float()
    rows = (logits / temperature).log_softmax(-1)[len(ids) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, turn.token_ids, strict=True)]


def test_rows_of_different_lengths_get_the_log_probs_of_one_plain_forward(model: LlamaForCausalLM) -> None:
    prompts = [[5], [7, 8, 9, 10, 11, 12], [3, 4, 5]]
    temperatures = [1.0, 0.5, 2.0]
    pairs = [
        (ids, Sampling(12, temperature, seed=number, ignore_eos=True))
        for number, (ids, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    for (ids, sampling), turn in zip(pairs, sample(model, pairs), strict=True):
        assert len(turn.token_ids) == 12
        assert turn.logprobs == pytest.approx(
            read_logprobs(model, ids, turn, sampling.temperature), abs=LOGPROB_TOLERANCE
        )


def test_a_row_does_not_depend_on_the_rows_beside_it(model: LlamaForCausalLM) -> None:
    row = ([5, 6], Sampling(10, seed=11, ignore_eos=True))
    alone = sample(model, [row])[0]
    beside = sample(model, [([9] * 7, Sampling(3, seed=4)), row, ([2], Sampling(15, temperature=0))])[1]
    assert beside.token_ids == alone.token_ids


def test_rows_with_a_seed_and_greedy_ones_take_nothing_from_the_global_generator(
    model: LlamaForCausalLM,
) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    sample(model, [([5], Sampling(4, seed=2, ignore_eos=True)), ([5, 6], Sampling(4, temperature=0))])
    assert torch.equal(torch.get_rng_state(), before)
    free = ([5], Sampling(4, temperature=2.0, ignore_eos=True))
    alone = sample(model, [free])[0]
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    beside = sample(model, [([9, 8], Sampling(6, seed=4, ignore_eos=True)), free])[1]
    assert beside.token_ids == alone.token_ids


def test_logits_that_are_no_numbers_fail_for_greedy_rows_too(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        saved = model.lm_head.weight.clone()
        model.lm_head.weight[3] = float("nan")
        try:
            with pytest.raises(RuntimeError, match="finite logits"):
                TokenGenerator(lambda: model, [EOS], PAD)([Ticket([5], Sampling(1, temperature=0))])
        finally:
            model.lm_head.weight.copy_(saved)


def test_each_row_ends_where_its_own_parameters_say(model: LlamaForCausalLM) -> None:
    greedy = sample(model, [([5, 6], Sampling(8, temperature=0, ignore_eos=True))])[0].token_ids
    stop = greedy[3]
    first = greedy.index(stop)
    turns = sample(
        model,
        [
            ([5, 6], Sampling(8, temperature=0, ignore_eos=True, stop_token_ids=frozenset({stop}))),
            ([5, 6], Sampling(2, temperature=0, ignore_eos=True)),
        ],
    )
    assert turns[0].token_ids == greedy[: first + 1]
    assert turns[0].finish_reason == "stop"
    assert turns[1].token_ids == greedy[:2]
    assert turns[1].finish_reason == "length"


def test_the_models_own_end_token_ends_a_turn_unless_it_is_ignored(model: LlamaForCausalLM) -> None:
    sampling = Sampling(60, temperature=3.0, seed=1)
    ended = sample(model, [([5], sampling)])[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == EOS
    assert EOS not in ended.token_ids[:-1]
    on = sample(model, [([5], Sampling(60, temperature=3.0, seed=1, ignore_eos=True))])[0]
    assert on.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert len(on.token_ids) == 60


def test_one_seed_gives_one_turn_and_another_turn_of_the_rollout_other_draws(model: LlamaForCausalLM) -> None:
    sampling = Sampling(20, temperature=2.0, seed=5, ignore_eos=True)
    one, same = sample(model, [([5], sampling), ([5], sampling)])
    assert one.token_ids == same.token_ids
    other = sample(model, [([5], Sampling(20, temperature=2.0, seed=6, ignore_eos=True))])[0]
    assert other.token_ids != one.token_ids


def test_the_defaults_that_came_with_the_model_play_no_part(model: LlamaForCausalLM) -> None:
    plain = sample(model, [([5, 6], Sampling(10, temperature=0, ignore_eos=True))])[0]
    saved = model.generation_config
    mine = GenerationConfig(repetition_penalty=50.0, max_length=3, eos_token_id=[plain.token_ids[0]])
    model.generation_config = mine
    try:
        assert sample(model, [([5, 6], Sampling(10, temperature=0, ignore_eos=True))])[0] == plain
        assert model.generation_config is mine
    finally:
        model.generation_config = saved


def test_the_models_mode_is_given_back(model: LlamaForCausalLM) -> None:
    model.train()
    model.model.layers[0].eval()
    try:
        sample(model, [([5], Sampling(1))])
        assert model.training
        assert not model.model.layers[0].training
        assert model.model.layers[1].training
    finally:
        model.eval()


def test_weights_are_read_when_a_batch_begins(model: LlamaForCausalLM) -> None:
    generator = TokenGenerator(lambda: model, [EOS], PAD)
    sampling = Sampling(1, temperature=0)
    before = generator([Ticket([5], sampling)])[0]
    assert before is not None
    wanted = (before.token_ids[0] + 1) % VOCABULARY
    with torch.no_grad():
        head = model.lm_head.weight
        saved = head.clone()
        head[wanted] = head[before.token_ids[0]] * 2
        head[before.token_ids[0]] = 0
        after = generator([Ticket([5], sampling)])[0]
        head.copy_(saved)
    assert after is not None
    assert after.token_ids[0] != before.token_ids[0]


def test_a_row_that_is_dropped_ends_and_a_batch_of_them_ends_at_once(model: LlamaForCausalLM) -> None:
    kept, gone = Ticket([5], Sampling(5, ignore_eos=True)), Ticket([6], Sampling(100, ignore_eos=True))
    gone.drop()
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    hook = model.register_forward_hook(count)
    try:
        found = TokenGenerator(lambda: model, [EOS], PAD)([kept, gone])
    finally:
        hook.remove()
    assert found[1] is None
    assert found[0] is not None
    assert len(found[0].token_ids) == 5
    assert steps == 5


def test_log_probs_are_of_the_distribution_that_is_drawn_from() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    e = [math.exp(value) for value in (0.0, 1.0, 2.0, 3.0)]
    # Temperature 2 halves the logits.
    halves = [math.exp(value / 2) for value in (0.0, 1.0, 2.0, 3.0)]
    cases = [
        (Sampling(1), [math.log(value / sum(e)) for value in e]),
        (Sampling(1, temperature=2.0), [math.log(value / sum(halves)) for value in halves]),
        (Sampling(1, temperature=0.0, top_k=1), [math.log(value / sum(e)) for value in e]),
        # The two largest: 2 and 3.
        (
            Sampling(1, top_k=2),
            [-math.inf, -math.inf, math.log(e[2] / (e[2] + e[3])), math.log(e[3] / (e[2] + e[3]))],
        ),
        # Probabilities 0.032, 0.087, 0.237, 0.644: 0.644 is below 0.7, so the next one stays too.
        (
            Sampling(1, top_p=0.7),
            [-math.inf, -math.inf, math.log(e[2] / (e[2] + e[3])), math.log(e[3] / (e[2] + e[3]))],
        ),
        (Sampling(1, top_p=0.6), [-math.inf, -math.inf, -math.inf, 0.0]),
        # At least 0.3 of 0.644: 0.237 stays, 0.087 does not.
        (
            Sampling(1, min_p=0.3),
            [-math.inf, -math.inf, math.log(e[2] / (e[2] + e[3])), math.log(e[3] / (e[2] + e[3]))],
        ),
    ]
    for sampling, wanted in cases:
        assert processed_logprobs(logits, [sampling])[0].tolist() == pytest.approx(wanted, abs=1e-6), sampling


def test_sampled_tokens_follow_their_probabilities(model: LlamaForCausalLM) -> None:
    count = 400
    torch.manual_seed(3)
    turns = sample(model, [([5], Sampling(1, temperature=2.0, ignore_eos=True))] * count)
    with torch.no_grad():
        probabilities = (model(input_ids=torch.tensor([[5]])).logits[0, -1].float() / 2.0).softmax(-1)
    likeliest = int(probabilities.argmax())
    share = sum(turn.token_ids[0] == likeliest for turn in turns) / count
    p = float(probabilities[likeliest])
    # Five standard deviations of a share among 400.
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / count)
