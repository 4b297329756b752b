"""Episodes as verifiers 0.4 records them, with the token ids of the embedded model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from scenarios import verifiers
from scenarios.turns import Abandoned, Model, Result, Scenario, Turn, User

from formats.messages import Record, arguments, flat, tool

LogProbs = Callable[[list[int]], list[float]]
"""Token ids to the log-prob (nats) of each one after the first, given those before it."""

MODEL = "SmolLM2-135M-Instruct"
SYSTEM = (
    "Call tools as JSON between <tool_call> and </tool_call>: bash(command), read(path), "
    "edit(path, old_str, new_str)."
)
TOOLS = [
    {"type": "function"} | each
    for each in (
        tool("bash", "Run a command.", "command"),
        tool("read", "Show a file.", "path"),
        tool("edit", "Replace the one place where the old text stands.", "path", "old_str", "new_str"),
    )
]
ENVIRONMENT = "repair"
EPOCH = 1772442000.0
SCORED = {"port", "mean"}
"""Groups whose advantages the file holds: the reward less the mean of the group."""


def spoken(turn: Model) -> str:
    """What the model sampled: the embedded model's template knows no calls, so they are text."""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments(call)}}}\n</tool_call>'
        for call in turn.calls
    ]
    return "\n".join(part for part in (turn.text, *calls) if part)


class Rollout:
    """The nodes and calls of one trace, with the ids that a live rollout would have made."""

    def __init__(self, chat: Any, number: int, scenario: Scenario, logprobs: LogProbs) -> None:
        self.chat = chat
        self.number = number
        self.end: int = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.opening = list(chat.bridge([]).generation_prompt)
        self.start: int = chat.tokenizer.convert_tokens_to_ids("<|im_start|>")
        self.ids: list[int] = []
        self.path: list[int] = []
        self.read = 0
        """Tokens of the prompts, each counted once."""
        self.written = 0
        """Tokens of the model's turns, once for each branch, as verifiers adds them up."""
        self.nodes: list[Record] = []
        self.calls: list[Record] = []
        self._logprobs = logprobs
        self._counted = 0
        self._tools = 0
        self._waiting: list[tuple[str, str]] = []
        self._new: list[tuple[Record, str]] = []
        system = {"role": "system", "content": SYSTEM}
        self._new.append((system, SYSTEM))
        self._play(scenario.turns)
        self._end_branch()

    def _play(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if isinstance(turn, Abandoned):
                self._commit()
                before = self.ids[:], self.path[:], self._waiting[:], self._counted
                self._play(turn.turns)
                self._end_branch()
                self.ids, self.path, self._waiting, self._counted = before
                continue
            for each, given in flat([turn]):
                if isinstance(each, Model) and not given:
                    self._sample(each)
                else:
                    self._new.append(self._message(each))

    def _end_branch(self) -> None:
        """Count the branch, and give the nodes on it their log-probs where they have none yet."""
        usage = [call["usage"] for call in self.calls if call["node"] in self.path]
        self.written += sum(each["completion_tokens"] for each in usage)
        measured = [0.0, *self._logprobs(self.ids)]
        at = 0
        for node in (self.nodes[place] for place in self.path):
            stop = at + len(node["token_ids"])
            pairs = zip(measured[at:stop], node["mask"], strict=True)
            node.setdefault("logprobs", [round(value, 4) for value, sampled in pairs if sampled])
            at = stop

    def _message(self, turn: User | Model | Result) -> tuple[Record, str]:
        """The typed message and the text that the template shows of it."""
        match turn:
            case User(text):
                return {"role": "user", "content": text}, text
            case Result(text):
                called, name = self._waiting.pop(0)
                return {"role": "tool", "tool_call_id": called, "content": text, "name": name}, text
            case Model():
                message: Record = {"role": "assistant"}
                if turn.text:
                    message["content"] = turn.text
                for call in turn.calls:
                    self._tools += 1
                    self._waiting.append((f"call_{self.number:02d}_{self._tools}", call.name))
                    entry = {"id": self._waiting[-1][0], "type": "function", "name": call.name}
                    message.setdefault("tool_calls", []).append(entry | {"arguments": arguments(call)})
                return message, spoken(turn)

    def _commit(self) -> None:
        """The nodes of the messages that the model has not answered yet."""
        shown = [{"role": message["role"], "content": text} for message, text in self._new]
        if self.ids:
            ids = self.chat.after_turn(self.ids, self.chat.bridge(shown), [self.end])
        else:
            ids = self.chat.prompt_ids(shown)[: -len(self.opening)]
        for (message, _), own in zip(self._new, self._split(ids), strict=True):
            self._node(message, own, [False] * len(own))
        self._new = []

    def _sample(self, turn: Model) -> None:
        if self._new:
            self._commit()
        opening = self.opening
        message, text = self._message(turn)
        sampled = [*self.chat.text_ids(text), self.end]
        context = len(self.ids) + len(opening)
        self.read += context - self._counted
        self._counted = context + len(sampled)
        self._node(message, opening + sampled, [False] * len(opening) + [True] * len(sampled))
        self.calls.append(
            {
                "node": len(self.nodes) - 1,
                "model": MODEL,
                "endpoint": "/chat/completions",
                "finish_reason": "tool_calls" if turn.calls else "stop",
                "usage": {"prompt_tokens": context, "completion_tokens": len(sampled)},
                "time": {"start": 0.0, "end": 0.0},
            }
        )

    def _split(self, ids: list[int]) -> list[list[int]]:
        """One piece for each message. What closes the turn before is part of the first."""
        starts = [place for place, token in enumerate(ids) if token == self.start]
        edges = [0, *starts[1:], len(ids)]
        return [ids[a:b] for a, b in pairwise(edges)]

    def _node(self, message: Record, ids: list[int], mask: list[bool]) -> None:
        number = len(self.nodes)
        node: Record = {"parent": self.path[-1]} if self.path else {"tools": TOOLS}
        self.nodes.append(
            node
            | {
                "semantic_parents": [],
                "message": message,
                "sampled": any(mask),
                "timestamp": EPOCH + 100.0 * self.number + number,
                "token_ids": ids,
                "mask": mask,
                "is_content": [],
            }
        )
        self.ids += ids
        self.path.append(number)


def _span() -> Record:
    return {"start": 0.0, "end": 0.0}


def _trace(scenario: Scenario, rollout: Rollout, task: Record, advantage: float | None) -> Record:
    if advantage is not None:
        for node in rollout.nodes:
            if node["sampled"]:
                node["advantages"] = [round(advantage, 4)] * sum(node["mask"])
    sampled = sum(call["usage"]["completion_tokens"] for call in rollout.calls)
    idle = {"duration": 0.0}
    return {
        "version": 1,
        "id": f"{rollout.number:032x}",
        "verifiers": {"version": "0.4.0"},
        "task": task,
        "agent": {
            "config": {
                "harness": {
                    "id": "tools",
                    "env": {},
                    "forward_env": [],
                    "mcp_header_env": {},
                    "tool_timeout": 600.0,
                    "skills": [],
                },
                "runtime": {"type": "subprocess"},
                "model": MODEL,
                "sampling": {"temperature": 1.0},
                "timeout": {},
                "retries": {"max_retries": 0, "rules": []},
                "network_notice": True,
            },
            "name": "agent",
            "trainable": True,
        },
        "tools": TOOLS,
        "nodes": rollout.nodes,
        "calls": rollout.calls,
        "mm_token_type_id_map": {},
        "request_rewrites": [],
        "response_rewrites": [],
        "rewards": {"checks": {"score": scenario.reward, "weight": 1.0}},
        "metrics": {},
        "info": {},
        "extra_usage": [],
        "is_completed": True,
        "ok": True,
        "stop_condition": "agent_completed",
        "is_timeout": False,
        "errors": [],
        "timing": {
            "start": EPOCH + 100.0 * rollout.number,
            "boot": _span(),
            "setup": _span(),
            "agent": _span() | {"model": idle, "harness": idle},
            "finalize": _span(),
            "scoring": _span(),
        },
        "num_input_tokens": rollout.read,
        "num_output_tokens": rollout.written,
        "num_total_tokens": rollout.read + sampled,
    }


def _episode(number: int, group: str, task: Record, traces: list[Record], errors: list[Record]) -> Record:
    totals = ("num_input_tokens", "num_output_tokens", "num_total_tokens")
    work = {"type": "train", "step": 1, "policy": {"start": 0, "end": 0}}
    return {
        "id": f"{0xE0000 + number:032x}",
        "env": {"id": ENVIRONMENT, "name": ENVIRONMENT},
        "task": task,
        "group": {"id": group},
        "run": {"type": "train", "id": "run-1", "work": work},
        "ok": not errors,
        "is_timeout": False,
        "errors": errors,
        "traces": traces,
    } | {name: sum(trace[name] for trace in traces) for name in totals}


def records(chat: Any, logprobs: LogProbs) -> Iterator[Record]:
    """One episode for each scenario, and one that failed before it had a trace."""
    groups: dict[str, list[Scenario]] = defaultdict(list)
    for scenario in verifiers.SCENARIOS:
        groups[scenario.group].append(scenario)
    number = 0
    task: Record = {}
    for index, (group, members) in enumerate(groups.items()):
        mean = sum(scenario.reward for scenario in members) / len(members)
        for scenario in members:
            number += 1
            request = next(turn.text for turn in scenario.turns if isinstance(turn, User))
            data = {
                "idx": index,
                "prompt": request,
                "skills": [],
                "network_allow": ["*"],
                "network_block": [],
                "artifacts": [],
                "artifact_max_bytes": 32 * 2**20,
                "timeout": {},
                "resources": {},
            }
            task = {"type": "RepairTask", "data": data}
            rollout = Rollout(chat, number, scenario, logprobs)
            advantage = scenario.reward - mean if group in SCORED else None
            yield _episode(number, group, task, [_trace(scenario, rollout, task, advantage)], [])
    error = {"type": "SandboxError", "message": "the sandbox did not start"}
    yield _episode(number + 1, group, task, [], [error])


def embedded() -> tuple[Any, LogProbs]:
    """The chat template and the log-probs of the embedded model, in float32 at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from composer_trl_host.chat import Chat
    from composer_trl_host.embedded import embedded_model

    folder = embedded_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(ids: list[int]) -> list[float]:
        everything = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
        values: list[float] = everything.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return values

    return Chat(AutoTokenizer.from_pretrained(folder)), logprobs
