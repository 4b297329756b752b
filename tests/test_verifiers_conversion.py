"""Episodes of verifiers as rollouts. The traces are made by hand: verifiers need not be installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import TaskError
from composer_trl_host.hints import ErrorContext, Hint
from composer_trl_host.rollout import Rollout
from composer_trl_host.verifiers_env.conversion import Converter, first_error, with_stand_ins

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROW = {"task": 0, "prompt": []}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    built = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    built.chat_template = CHATML
    return built


class Layer:
    """A hint generator that answers everything and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[ErrorContext] = []

    def generate(self, context: ErrorContext) -> Hint | None:
        self.asked.append(context)
        return Hint("try again", "layer/all")


class FakeTrace:
    """What the converter reads of a ``verifiers.v1.Trace``."""

    def __init__(self, nodes: list[dict[str, Any]], reward: float = 0.0, **fields: Any) -> None:
        self.nodes, self.reward = nodes, reward
        self.ok: bool = fields.pop("ok", True)
        self.agent = SimpleNamespace(trainable=fields.pop("trainable", True))
        self.metrics: dict[str, Any] = fields.pop("metrics", {})
        self.errors: list[Any] = fields.pop("errors", [])
        self.info: dict[str, Any] = fields.pop("info", {})
        assert not fields

    def to_record(self, float_decimals: int | None) -> dict[str, Any]:
        assert float_decimals is None
        return {
            "id": "t",
            "nodes": self.nodes,
            "rewards": {"all": {"score": self.reward, "weight": 1.0}},
            "info": self.info,
            "ok": self.ok,
        }


def episode(*traces: FakeTrace, ok: bool | None = None, errors: Any = ()) -> Any:
    return SimpleNamespace(
        traces=list(traces), ok=all(t.ok for t in traces) if ok is None else ok, errors=list(errors)
    )


def make_nodes(tokenizer: Any, turns: list[tuple[str, str]], parents: list[int | None] | None = None) -> Any:
    """Nodes as the train client commits them: a turn of the model begins with its generation prompt."""
    nodes = []
    for number, (role, text) in enumerate(turns):
        if role == "assistant":
            head = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
            own = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
            call = {"id": "call_0", "name": text.split()[0], "arguments": "{}"}
            message = {"role": role, "content": None, "tool_calls": [call]}
        else:
            begin = "\n" if number and turns[number - 1][0] == "assistant" else ""
            head = tokenizer.encode(
                f"{begin}<|im_start|>{role}\n{text}<|im_end|>\n", add_special_tokens=False
            )
            own = []
            message = {"role": role, "content": text}
            if role == "tool":
                message["tool_call_id"] = "call_0"
        nodes.append(
            {
                "parent": (number - 1 if number else None) if parents is None else parents[number],
                "message": message,
                "token_ids": [*head, *own],
                "mask": [False] * len(head) + [True] * len(own),
                "sampled": role == "assistant",
                "logprobs": [-0.125 * (place + 1) for place in range(len(own))],
            }
        )
    return nodes


TURNS = [
    ("user", "do it"),
    ("assistant", "one"),
    ("tool", "fine, says the tool"),
    ("assistant", "two"),
    ("tool", "whatever"),
    ("assistant", "three"),
]


def converter(tokenizer: Any, hints: Any = None, seq_len: int | None = None) -> Converter:
    config = ComposerConfig(sdpo={"weight": 1.0})
    return Converter(tokenizer, config, hints, "shell", seq_len)


def play(tokenizer: Any, trace: FakeTrace, hints: Any = None, **how: Any) -> tuple[Rollout, Converter]:
    made = converter(tokenizer, hints, **how)
    rollout = made.rollout(episode(trace), ROW)
    assert rollout is not None
    return rollout, made


def test_ids_masks_and_log_probs_are_the_recorded_ones(tokenizer: Any) -> None:
    nodes = make_nodes(tokenizer, TURNS)
    rollout, _ = play(tokenizer, FakeTrace(nodes, 0.5, info={"tool_errors": []}))
    every = [token for node in nodes for token in node["token_ids"]]
    assert [*rollout.prompt_ids, *rollout.completion_ids] == every
    # The prompt ends with the first generation prompt, and a turn of the model follows it.
    assert tokenizer.decode(rollout.prompt_ids).endswith("<|im_start|>assistant\n")
    flags = [int(flag) for node in nodes for flag in node["mask"]]
    assert rollout.sampled == flags[len(rollout.prompt_ids) :]
    assert rollout.logprobs is not None
    taken = [value for value, flag in zip(rollout.logprobs, rollout.sampled, strict=True) if flag]
    assert taken == [value for node in nodes for value in node["logprobs"]]
    assert not any(value for value, flag in zip(rollout.logprobs, rollout.sampled, strict=True) if not flag)
    assert [tokenizer.decode(turn) for turn in rollout.turn_ids] == [
        "one<|im_end|>",
        "two<|im_end|>",
        "three<|im_end|>",
    ]
    assert (rollout.reward, rollout.sites, rollout.failed_turns) == (0.5, [], [])


def test_the_environment_says_what_failed_and_its_hint_is_asked_first(tokenizer: Any) -> None:
    layer = Layer()
    said = [{"node": 2, "kind": "odd", "hint": "say uno"}, {"node": 4, "kind": "even"}]
    rollout, _ = play(tokenizer, FakeTrace(make_nodes(tokenizer, TURNS), info={"tool_errors": said}), layer)
    assert [(site.error_kind, site.hint_source) for site in rollout.sites] == [
        ("odd", "shell/odd"),
        ("even", "layer/all"),
    ]
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    assert [tokenizer.decode(ids[site.start : site.stop]) for site in rollout.sites] == [
        "two<|im_end|>",
        "three<|im_end|>",
    ]
    assert "say uno" in tokenizer.decode(list(rollout.sites[0].hint_ids))
    assert tokenizer.decode(ids[rollout.sites[0].splice_at :]).startswith("<|im_start|>assistant\ntwo")
    assert rollout.failed_turns == [0, 1]
    # Although both calls have the id call_0, each result is the one of the turn before it.
    assert [context.call for context in layer.asked] == ["two {}"]
    assert layer.asked[0].result == "whatever"


def test_what_the_environment_does_not_name_did_not_fail(tokenizer: Any) -> None:
    turns = [*TURNS[:2], ("tool", "Error: file not found"), *TURNS[3:]]
    nodes = make_nodes(tokenizer, turns)
    silent, _ = play(tokenizer, FakeTrace(nodes), Layer())
    assert [site.error_kind for site in silent.sites] == ["missing_file"]
    clear, _ = play(tokenizer, FakeTrace(make_nodes(tokenizer, turns), info={"tool_errors": []}), Layer())
    assert clear.sites == []


@pytest.mark.parametrize(
    "said",
    [
        "no list",
        [{"node": 1, "kind": "odd"}],
        [{"node": 9, "kind": "odd"}],
        [{"node": 2}],
        [{"node": 2, "kind": ""}],
        [{"node": 2, "kind": "odd", "hint": 3}],
        [3],
    ],
    ids=str,
)
def test_errors_that_cannot_be_read_are_the_environments_mistake(tokenizer: Any, said: Any) -> None:
    with pytest.raises(TaskError, match=r"shell: trace\.info"):
        play(tokenizer, FakeTrace(make_nodes(tokenizer, TURNS), info={"tool_errors": said}))


def test_a_failed_episode_trains_nothing_and_moves_no_advantage(tokenizer: Any) -> None:
    def trace(reward: float, **fields: Any) -> FakeTrace:
        return FakeTrace(make_nodes(tokenizer, TURNS), reward, info={"tool_errors": []}, **fields)

    error = SimpleNamespace(type="HarnessError", message="exit 1")
    made = converter(tokenizer)
    episodes = [
        episode(trace(1.0)),
        episode(trace(0.0, ok=False, errors=[error])),
        episode(trace(0.25)),
        episode(trace(9.0)),
    ]
    # The next group's rewards are its own business.
    found = [made.rollout(item, ROW) for item in [*episodes, *[episode(trace(5.0))] * 4]]
    rollouts = with_stand_ins(found, [ROW] * 8, 4, lambda: "")[:4]
    failed = rollouts[1]
    assert failed.sampled == [0]
    assert failed.logprobs == [0.0]
    # The mean of 1, 0.25 and 9 is 41/12, whether or not it stands among them once more.
    assert failed.reward == pytest.approx(41 / 12)
    assert sum(r.reward for r in rollouts) / 4 == pytest.approx(41 / 12)
    assert made.dropped == {"rollout left out: the episode failed with HarnessError": 1}


def test_a_batch_in_which_everything_failed_is_an_error_that_says_why(tokenizer: Any) -> None:
    error = SimpleNamespace(type="ToolsetError", message="no such module")
    failed = episode(ok=False, errors=[error])
    found = [converter(tokenizer).rollout(failed, ROW)] * 2
    with pytest.raises(TaskError, match=r"at least one episode .* shell: ToolsetError: no such module"):
        with_stand_ins(found, [ROW] * 2, 2, lambda: f"shell: {first_error(failed)}")


def test_an_agent_that_is_not_trained_is_left_out(tokenizer: Any) -> None:
    judge = FakeTrace(make_nodes(tokenizer, TURNS[:2]), 7.0, trainable=False)
    mine = FakeTrace(make_nodes(tokenizer, TURNS), 0.5)
    made = converter(tokenizer)
    rollout = made.rollout(episode(judge, mine), ROW)
    assert rollout is not None
    assert rollout.reward == 0.5


def test_a_second_branch_is_counted_not_trained(tokenizer: Any) -> None:
    turns = [*TURNS[:2], ("user", "again"), ("assistant", "four")]
    nodes = make_nodes(tokenizer, turns, parents=[None, 0, None, 2])
    rollout, made = play(tokenizer, FakeTrace(nodes))
    assert tokenizer.decode(rollout.turn_ids[0]) == "one<|im_end|>"
    assert made.dropped == {"branch or window left out: a rollout is one row": 1}


def test_a_rollout_longer_than_the_limit_keeps_its_beginning(tokenizer: Any) -> None:
    nodes = make_nodes(tokenizer, TURNS)
    whole = sum(len(node["token_ids"]) for node in nodes)
    rollout, _ = play(tokenizer, FakeTrace(nodes, info={"tool_errors": []}), seq_len=whole - 1)
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    assert len(ids) < whole
    assert tokenizer.decode(ids).endswith("two<|im_end|>")


def test_a_rollout_is_solved_by_the_metric_or_else_by_the_reward(tokenizer: Any) -> None:
    def solved(reward: float, **metrics: float | None) -> bool:
        return play(tokenizer, FakeTrace(make_nodes(tokenizer, TURNS), reward, metrics=dict(metrics)))[
            0
        ].solved

    assert solved(1.0)
    assert not solved(0.5)
    assert solved(0.5, solved=1.0)
    assert not solved(2.0, solved=0.0)
    assert solved(1.0, solved=None)
