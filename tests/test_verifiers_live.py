"""verifiers itself: its train client on the endpoint, its rollouts of the example, with a policy that is told
what to say."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("verifiers.v1")

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import TaskError
from composer_trl_host.rollout import Rollout
from composer_trl_host.serving import BatchQueue, Completion, Ticket, TokenServer
from composer_trl_host.serving.app import TokenApp
from composer_trl_host.serving.protocol import Limits, Sampling
from composer_trl_host.verifiers_env.conversion import Converter
from composer_trl_host.verifiers_env.heldout import HeldOut, HeldOutResult, HeldOutStage
from composer_trl_host.verifiers_env.loading import load_environment, load_renderer
from composer_trl_host.verifiers_env.runner import Policy, Stage, VerifiersRunner
from composer_trl_host.verifiers_env.source import Source

pytestmark = [
    pytest.mark.timeout(240),
    # The prime client libraries that come with verifiers use pydantic's class-based configuration.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLE = Path(__file__).parents[1] / "examples" / "verifiers_tool"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RIGHT = {"remove": "trash", "show": "view", "list": "dir", "create": "make"}


def byte_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Bytes and ChatML, saved into ``folder``, where a renderer can load it from."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    built = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    built.chat_template = CHATML
    built.save_pretrained(folder)
    built.name_or_path = str(folder)
    return built


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Scripted:
    """A policy that says ``say(turns so far, request)`` and records the batches it was asked for."""

    def __init__(self, tokenizer: Any, say: Callable[[int, str], str]) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.batches: list[int] = []
        self.seeds: list[int | None] = []
        self.samplings: list[Sampling] = []

    def __call__(self, tickets: Sequence[Ticket]) -> list[Completion | None]:
        self.batches.append(len(tickets))
        return [self._turn(ticket) for ticket in tickets]

    def _turn(self, ticket: Ticket) -> Completion:
        self.seeds.append(ticket.sampling.seed)
        self.samplings.append(ticket.sampling)
        text = self.tokenizer.decode(ticket.token_ids)
        request = text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        said = self.say(text.count("<|im_start|>assistant") - 1, request)
        ids = self.tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        return Completion(tuple(ids), tuple(-0.001 * (i + 1) for i in range(len(ids))), "stop")


@pytest.fixture
def make_runner(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[VerifiersRunner, Scripted]]]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    # The tool server is a program of its own.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE), str(EXAMPLE.parents[1])]))
    made: list[VerifiersRunner] = []

    def make(say: Callable[[int, str], str], seeds: Sequence[int] = (0,)) -> tuple[VerifiersRunner, Scripted]:
        """A runner with one stage of the example per seed of the taskset, named after it."""
        renderer = {"name": "custom", "import_path": "verifiers_tool.renderer.LineRenderer"}
        agent = {"runtime": {"type": "subprocess"}, "max_turns": 2}
        stages = []
        for seed in seeds:
            taskset = {"id": "verifiers-tool", "seed": seed}
            source = Source({"taskset": taskset, "agent": agent}, renderer, f"shell-{seed}")
            environment = load_environment(source)
            converter = Converter(tokenizer, ComposerConfig(sdpo={"weight": 1.0}), None, source.name)
            stages.append(Stage(source.name, environment, list(environment.taskset)[:8], converter))
        policy = Policy(
            Limits("policy", 2048, len(tokenizer)),
            str(tokenizer.name_or_path),
            load_renderer(source),
            {"temperature": 1.0, "max_tokens": 40},
        )
        scripted = Scripted(tokenizer, say)
        runner = VerifiersRunner(stages, policy, 2, scripted)
        runner.queue.patience = 60.0
        made.append(runner)
        return runner, scripted

    yield make
    for runner in made:
        runner.close()


def test_eight_rollouts_of_the_example_with_every_kind_of_failure(
    make_runner: Callable[..., tuple[VerifiersRunner, Scripted]], tokenizer: Any
) -> None:
    # By the rollout's number: what its first turn says. The second one is always right.
    first = [
        "{verb} {name}",  # no such tool
        "trash",  # usage
        "view nothing",  # no such file
        "trash kernel",  # protected
        "{right} {name}",  # right at once
        "view attic",  # a folder
        "seal kernel\nand more",  # the first line alone counts
        "dir nowhere",  # no such folder
    ]
    requests: list[str] = []

    def say(turns: int, request: str) -> str:
        verb, name = request.split()
        if turns or request not in requests:
            return f"{RIGHT[verb]} {name}"
        return first[requests.index(request)].format(verb=verb, name=name, right=RIGHT[verb])

    threads = set(threading.enumerate())
    runner, scripted = make_runner(say)
    requests += [task.data.prompt for task in runner.stages[0].tasks]
    rollouts = runner.play([{"task": number} for number in range(8)])
    kinds = [[site.error_kind for site in rollout.sites] for rollout in rollouts]
    assert kinds == [
        ["unknown_command"],
        ["wrong_usage"],
        ["no_such_file"],
        ["refused"],
        [],
        ["refused"],
        ["refused"],
        ["no_such_file"],
    ]
    assert [rollout.reward for rollout in rollouts] == [1.0] * 8
    assert [rollout.errors for rollout in rollouts] == [1, 1, 1, 1, 0, 1, 1, 1]
    for rollout, request in zip(rollouts, requests, strict=True):
        check_recorded(rollout, request, tokenizer)
    # All first turns were one batch, all second ones the next; no two rollouts shared a seed.
    assert scripted.batches == [8, 7]
    assert len(set(scripted.seeds)) == 8
    assert runner.dropped == {}
    runner.close()
    # The loop of verifiers stays for the next run, with its workers; nothing else does.
    left = {thread.name for thread in threading.enumerate() if thread not in threads}
    assert all(name == "verifiers" or name.startswith("asyncio_") for name in left), left
    assert not any("COMPOSER_RL_API_KEY" in name for name in os.environ)


def test_two_environments_share_a_batch_and_a_third_is_held_out(
    make_runner: Callable[..., tuple[VerifiersRunner, Scripted]], tokenizer: Any
) -> None:
    def say(turns: int, request: str) -> str:
        verb, name = request.split()
        return f"{RIGHT[verb]} {name}" if turns else f"{verb} {name}"

    runner, scripted = make_runner(say, seeds=(0, 1, 2))
    *stages, held = runner.stages
    runner.stages = stages
    named: list[tuple[str, float]] = []
    runner.on_played = lambda played: named.extend(
        (name, rollout.reward) for name, rollout in played if rollout is not None
    )
    rows = [{"source": source, "task": task} for source, task in ((1, 0), (1, 1), (0, 0), (1, 2))]
    rollouts = runner.play(rows)
    assert named == [("shell-1", 1.0), ("shell-1", 1.0), ("shell-0", 1.0), ("shell-1", 1.0)]
    for row, rollout in zip(rows, rollouts, strict=True):
        check_recorded(rollout, stages[row["source"]].tasks[row["task"]].data.prompt, tokenizer)
    # The turns of both environments were sampled together.
    assert scripted.batches == [4, 4]

    held.tasks = held.tasks[:2]
    evaluation = HeldOut(
        runner, [HeldOutStage(held, 2, 5, {"temperature": 0.5, "max_tokens": 30})], seed=3, at_once=4
    )
    lines: list[str] = []
    records: list[dict[str, Any]] = []
    evaluation.say, evaluation.write = lines.append, records.append
    found = evaluation.evaluate(evaluation.stages, 0, "start")
    assert found == {"shell-2": HeldOutResult(4, 0, 4, 4, 1.0, 0)}
    assert scripted.batches == [4, 4, 4, 4]
    assert {(sampling.temperature, sampling.max_tokens) for sampling in scripted.samplings[8:]} == {(0.5, 30)}
    assert records[0]["heldout/shell-2/recovered"] == 4
    # Nothing of the evaluation is counted as training's.
    assert (len(named), runner.dropped) == (4, {})


def test_a_server_of_its_own_samples_where_it_is_named(
    make_runner: Callable[..., tuple[VerifiersRunner, Scripted]], tokenizer: Any
) -> None:
    """The token endpoint stands in for vLLM's: the same requests, without a key."""

    def say(turns: int, request: str) -> str:
        verb, name = request.split()
        return f"{RIGHT[verb]} {name}"

    runner, scripted = make_runner(say)
    runner.generate = None  # nothing is sampled here
    queue = BatchQueue(scripted, window=0.0)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            queue.run_once(0.05)

    worker = threading.Thread(target=work)
    worker.start()
    server = TokenServer(queue, runner.policy.limits)
    server.app = TokenApp(queue, server.limits, "EMPTY")
    try:
        with server:
            runner.remote = server.base_url.removesuffix("/v1")
            rollouts = runner.play([{"task": 0}, {"task": 1}])
    finally:
        ended.set()
        worker.join(5)
    for number, rollout in enumerate(rollouts):
        check_recorded(rollout, runner.stages[0].tasks[number].data.prompt, tokenizer)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert runner.queue.requests == 0
    assert sum(scripted.batches) == 2


def test_an_environment_that_cannot_start_is_named(
    make_runner: Callable[..., tuple[VerifiersRunner, Scripted]],
) -> None:
    class Broken:
        @asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            raise OSError("no disk")
            yield

    runner, _ = make_runner(lambda turns, request: "")
    bad = Stage("bad", Broken(), [None], runner.stages[0].converter)
    with pytest.raises(
        TaskError, match=r"bad: the environment must start; it failed with OSError\('no disk'\)"
    ):
        runner.episodes([(bad, None)])


def check_recorded(rollout: Rollout, request: str, tokenizer: Any) -> None:
    """What is trained is what was sampled, behind the prompt that the client rendered."""
    verb, name = request.split()
    assert tokenizer.decode(rollout.prompt_ids).endswith(
        f"user\n{request}<|im_end|>\n<|im_start|>assistant\n"
    )
    said = [tokenizer.decode(turn) for turn in rollout.turn_ids]
    assert said[-1] == f"{RIGHT[verb]} {name}<|im_end|>"
    assert sum(rollout.sampled) == sum(len(turn) for turn in rollout.turn_ids)
    assert rollout.logprobs is not None
    logprobs = [value for value, flag in zip(rollout.logprobs, rollout.sampled, strict=True) if flag]
    assert logprobs == pytest.approx(
        [-0.001 * (i + 1) for turn in rollout.turn_ids for i in range(len(turn))]
    )
    for site in rollout.sites:
        assert tokenizer.decode(list(site.hint_ids)).count(f"hint: {RIGHT[verb]} {name}") == 1


def test_the_endpoint_answers_what_the_client_of_renderers_reads(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openai import APIStatusError, AsyncOpenAI
    from renderers import CustomRendererConfig, OverlongPromptError, create_renderer
    from renderers.client import generate

    monkeypatch.syspath_prepend(str(EXAMPLE))
    renderer = create_renderer(
        tokenizer, CustomRendererConfig(import_path="verifiers_tool.renderer.LineRenderer")
    )
    scripted = Scripted(tokenizer, lambda turns, request: "trash report")
    queue = BatchQueue(scripted, window=0.0)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            queue.run_once(0.05)

    worker = threading.Thread(target=work)
    worker.start()

    async def ask(server: TokenServer, key: str, text: str, **params: Any) -> dict[str, Any]:
        async with AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0) as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": text}],
                model="policy",
                tools=[],
                sampling_params=params,
            )

    try:
        with TokenServer(queue, Limits("policy", 64, len(tokenizer))) as server:
            answer = asyncio.run(ask(server, server.key, "go", max_tokens=20, temperature=0.5))
            ids = tokenizer.encode("trash report<|im_end|>", add_special_tokens=False)
            assert answer["completion_ids"] == ids
            assert answer["completion_logprobs"] == [-0.001 * (i + 1) for i in range(len(ids))]
            assert answer["finish_reason"] == "tool_calls"
            assert [(call.name, call.arguments) for call in answer["tool_calls"]] == [
                ("trash", {"name": "report"})
            ]
            # The client learns the longest context from /v1/models and does not even ask.
            with pytest.raises(OverlongPromptError):
                asyncio.run(ask(server, server.key, "x" * 200))
            with pytest.raises(APIStatusError) as caught:
                asyncio.run(ask(server, "another key", "go"))
            assert caught.value.status_code == 401
            with pytest.raises(APIStatusError, match="presence_penalty"):
                asyncio.run(ask(server, server.key, "go", presence_penalty=1.0))
    finally:
        ended.set()
        worker.join(5)
