"""Traces of ``verifiers``, as PRIME-RL and ``verifiers`` themselves write them.

A record is an episode with ``traces`` (verifiers 0.4, PRIME-RL after 0.8), one trace with ``nodes``
(PRIME-RL 0.7 and 0.8), or a rollout with ``prompt`` and ``completion`` and no tokens (before). A trace is
a tree of messages, and each path from a root to a leaf that holds a turn of the model is a ``Trace``
of its own, as PRIME-RL trains it: a node that an earlier path holds is context in the later ones,
neither sampled nor an error site there. Token ids are taken as they are.

The group is the episode's ``group``, else ``group_id`` (in ``info`` or the record), else the task's key
or hash. The reward is the sum of score times weight; none where nothing was scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from composer_trl_host.traces.messages import Conversation
from composer_trl_host.traces.model import ReadReport, Trace, TurnTokens
from composer_trl_host.traces.openai import conversation
from composer_trl_host.traces.sites import Draft, finish
from composer_trl_host.traces.values import Refused, identifier, number, shape, string, tool_definitions

FORMAT = "verifiers"


def recognizes(value: object) -> bool:
    """Whether a record is of this format."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("traces"), list) and ("task" in value or not value["traces"]):
        return True
    if isinstance(value.get("nodes"), list):
        return True
    return isinstance(value.get("prompt"), (list, str)) and isinstance(value.get("completion"), list)


def traces(value: object, path: str, line: int, report: ReadReport) -> Iterator[Trace]:
    """The traces of one record; what is wrong with a single one is counted, not raised."""
    if not isinstance(value, dict):
        raise Refused(f"record that is {shape(value)}")
    if "traces" in value:
        yield from _episode(value, path, line, report)
    elif "nodes" in value:
        yield from _trace(value, None, path, line, report)
    else:
        yield _rollout(value, path, line, report)


def _episode(value: dict[str, Any], path: str, line: int, report: ReadReport) -> Iterator[Trace]:
    items = value["traces"]
    if not isinstance(items, list):
        raise Refused(f"episode whose traces are {shape(items)}")
    if not items:
        report.skipped["episode without a trace"] += 1
    group = value.get("group")
    name = identifier(group.get("id")) if isinstance(group, dict) else None
    for item in items:
        try:
            if not isinstance(item, dict):
                raise Refused(f"trace that is {shape(item)}")
            yield from _trace(item, name or _task_key(value), path, line, report)
        except Refused as refused:
            report.skipped[refused.reason] += 1


def _rollout(value: dict[str, Any], path: str, line: int, report: ReadReport) -> Trace:
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise Refused("record without traces, nodes, or prompt and completion")
    record = {
        **value,
        "id": value.get("rollout_id") or value.get("id"),
        "group_id": value.get("group_id") or value.get("example_id"),
        "tools": value.get("tool_defs") or value.get("oai_tools") or value.get("tools"),
    }
    return conversation(record, [*prompt, *completion], len(prompt), path, line, report, FORMAT)


def _trace(
    value: dict[str, Any], group: str | None, path: str, line: int, report: ReadReport
) -> Iterator[Trace]:
    agent = value.get("agent")
    if isinstance(agent, dict) and agent.get("trainable") is False:
        raise Refused("trace of an agent that is not trained")
    nodes = value.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise Refused("trace whose nodes are no list of objects")
    reward = _reward(value.get("rewards"))
    parents = [_parent(node, place, len(nodes)) for place, node in enumerate(nodes)]
    paths = [_path(leaf, parents) for leaf in _leaves(parents)]
    if len({place for places in paths for place in places}) < len(nodes):
        raise Refused("nodes whose parents form a circle")
    if not nodes:
        raise Refused("trace without a message")
    accepted = {link["node"] for node in nodes for link in _links(node) if link["type"] == "compaction"}
    name = identifier(value.get("id")) or f"{path}:{line}"
    shared_tools = tool_definitions(value.get("tools"))
    info = value.get("info")
    inside = identifier(info.get("group_id")) if isinstance(info, dict) else None
    drafts = _drafts(nodes, report)
    tools = {places[0]: tool_definitions(nodes[places[0]].get("tools")) for places in paths}
    seen: set[int] = set()
    for index, places in enumerate(paths):
        links = _links(nodes[places[-1]])
        if any(link["type"] == "compaction_attempt" for link in links) and places[-1] not in accepted:
            report.skipped["branch of a compaction that was not taken"] += 1
            continue
        own = [place for place in places if place not in seen and _is_turn_of_the_model(drafts[place])]
        if not own:
            report.skipped["branch without a turn of the model of its own"] += 1
            continue
        if not seen and value.get("ok") is False:
            report.notes["trace of a run that failed, kept"] += 1
        known = max((number for number, place in enumerate(places, 1) if place in seen), default=0)
        shown = [_as_context(drafts[place]) if place in seen else drafts[place] for place in places]
        seen.update(own)
        yield Trace(
            id=name if len(paths) == 1 else f"{name}/{index}",
            turns=finish(shown, report, known),
            tools=tools[places[0]] or shared_tools,
            reward=reward,
            group_id=group or inside or identifier(value.get("group_id")) or _task_key(value),
            format=FORMAT,
            path=path,
            line=line,
            rollout=name,
        )


def _is_turn_of_the_model(draft: Draft) -> bool:
    return draft.role == "assistant" and draft.sampled


def _drafts(nodes: Sequence[dict[str, Any]], report: ReadReport) -> list[Draft]:
    """One for each node, shared by the branches that hold it."""
    with_ids = any(node.get("token_ids") for node in nodes)
    drafts = []
    for node in nodes:
        draft = Conversation(report).add(node.get("message"))
        draft.tokens = _tokens(node) if with_ids else None
        if draft.role == "assistant":
            draft.sampled = node.get("sampled") is True
        drafts.append(draft)
    return drafts


def _as_context(draft: Draft) -> Draft:
    tokens = draft.tokens
    if tokens is not None:
        tokens = TurnTokens(tokens.ids, (False,) * len(tokens.ids), (), ())
    return replace(draft, sampled=False, tokens=tokens)


def _tokens(node: dict[str, Any]) -> TurnTokens:
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise Refused("node whose token_ids are no list of whole numbers")
    if not isinstance(mask, list) or not all(isinstance(item, bool) for item in mask):
        raise Refused("node whose mask is no list of booleans")
    if len(mask) != len(ids):
        raise Refused("node whose mask is not as long as its token_ids")
    sampled = sum(mask)
    return TurnTokens(
        tuple(ids),
        tuple(mask),
        _per_sampled(node.get("logprobs"), sampled, "logprobs"),
        _per_sampled(node.get("advantages"), sampled, "advantages"),
    )


def _per_sampled(values: object, sampled: int, name: str) -> tuple[float, ...] | None:
    """One number per sampled token. verifiers writes an empty list where it has none."""
    if sampled == 0 and values in (None, []):
        return ()
    if values is None or values == []:
        return None
    if not isinstance(values, list):
        raise Refused(f"node whose {name} are {shape(values)}")
    if len(values) != sampled:
        raise Refused(f"node whose {name} are not one per sampled token")
    return tuple(number(item, f"node with a number among its {name}") for item in values)


def _reward(values: object) -> float | None:
    if values is None:
        return None
    if not isinstance(values, dict):
        raise Refused(f"trace whose rewards are {shape(values)}")
    total = None
    for item in values.values():
        if item is None:
            continue
        given = item if isinstance(item, dict) else {"score": item}
        part = number(given.get("score"), "reward") * number(given.get("weight", 1.0), "reward weight")
        total = number((total or 0.0) + part, "reward")
    return total


def _task_key(value: dict[str, Any]) -> str | None:
    task = value.get("task")
    if not isinstance(task, dict):
        return None
    return string(task.get("key")) or string(task.get("hash"))


def _parent(node: dict[str, Any], place: int, count: int) -> int | None:
    parent = node.get("parent")
    if parent is None:
        return None
    if type(parent) is not int or not 0 <= parent < count or parent == place:
        raise Refused("node whose parent is no other node")
    return parent


def _leaves(parents: Sequence[int | None]) -> list[int]:
    inner = set(parents)
    return [place for place in range(len(parents)) if place not in inner]


def _path(leaf: int, parents: Sequence[int | None]) -> list[int]:
    places: list[int] = []
    at: int | None = leaf
    while at is not None:
        places.append(at)
        if len(places) > len(parents):
            raise Refused("nodes whose parents form a circle")
        at = parents[at]
    return places[::-1]


def _links(node: dict[str, Any]) -> list[dict[str, Any]]:
    links = node.get("semantic_parents")
    if not isinstance(links, list):
        return []
    return [
        link
        for link in links
        if isinstance(link, dict) and isinstance(link.get("type"), str) and isinstance(link.get("node"), int)
    ]
