"""Records of a Claude Code session as a tree, and the path through it that the model really went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from composer_trl_host.traces.model import ToolCall

SIDE = "side"
"""The chain of side records that name no agent."""

Kind = Literal["user", "assistant", "boundary", "other"]


@dataclass
class Result:
    """A ``tool_result`` block, or a piece of a user's text where ``call_id`` is None."""

    text: str
    call_id: str | None = None
    is_error: bool | None = None
    exit_code: int | None = None
    refused: bool = False


@dataclass
class Node:
    """What is kept of a record. ``parent``: None for a root, ``""`` where the record has no such field.
    ``starts``: the summary that a compaction put in place of what was before; ``resume``: the last
    record before it, where the boundary says so. ``meta``: the program wrote the user's text."""

    line: int
    kind: Kind
    uuid: str
    parent: str | None
    session: str = ""
    chain: str = ""
    resume: str | None = None
    starts: bool = False
    meta: bool = False
    message_id: str | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def speaks(self) -> bool:
        """Whether the record holds anything that a model read or wrote."""
        return bool(self.texts or self.thoughts or self.calls or self.results)

    @property
    def continues(self) -> bool:
        """Whether something must stand before the record."""
        return self.kind == "assistant" or any(result.call_id is not None for result in self.results)


def chains(nodes: Iterable[Node], counts: Counter[str]) -> list[list[Node]]:
    """The nodes of each conversation: the main one, and each sub-agent's.

    A side chain is known by its agent's id; older files have none, and there every root of the side
    chain begins another sub-agent. A parent in another chain, or one that the file does not hold (its
    line was broken), gives way to the record before.
    """
    found: dict[str, list[Node]] = {}
    homes: dict[str, str] = {}
    side = ""
    for node in nodes:
        if node.uuid in homes:
            counts["record whose uuid an earlier one has"] += 1
            continue
        key = node.chain
        if key == SIDE:
            home = homes.get(node.parent) if node.parent else None
            if home is not None and home.startswith(SIDE):
                side = home
            elif node.parent is None or home is not None or not side:
                side = f"{SIDE} {node.line}"
            key = side
        homes[node.uuid] = key
        found.setdefault(key, []).append(node)
    for key, chain in found.items():
        linked = any(node.parent for node in chain)
        for before, node in zip([None, *chain], chain, strict=False):
            # An answer or a result begins no conversation, and without any link there is no tree.
            rootless = node.parent is None and (not linked or node.continues)
            missing = bool(node.parent) and homes.get(node.parent or "") != key
            if before is not None and (rootless or missing):
                counts["record whose parent is missing, joined to the one before"] += 1
            if node.parent == "" or rootless or missing:
                node.parent = before.uuid if before is not None else None
    return list(found.values())


def live_segments(chain: Sequence[Node], counts: Counter[str]) -> list[list[Node]]:
    """The records that lead to the chain's last message, cut where a compaction put a summary in
    place of what came before. Everything else is an abandoned branch, and counted."""
    by_uuid = {node.uuid: place for place, node in enumerate(chain)}
    leaf = _leaf(chain)
    if leaf is None:
        return []
    segments: list[list[int]] = [[]]
    live: set[int] = set()
    at: int | None = leaf
    while at is not None:
        if at in live:
            counts["circle in parentUuid, cut"] += 1
            break
        live.add(at)
        node = chain[at]
        segments[-1].append(at)
        up = by_uuid.get(node.parent) if node.parent else None
        starts = node.kind == "boundary" or (node.starts and (up is None or chain[up].kind != "boundary"))
        if starts:
            segments.append([])
            before = by_uuid.get(node.resume) if node.resume else None
            up = before if before is not None else up
            if up is None and at > 0:
                up = at - 1
        at = up
    beside = _beside(chain, live)
    _count_abandoned(chain, by_uuid, live, counts)
    return [
        [chain[place] for place in _with_beside(reversed(segment), beside)]
        for segment in reversed(segments)
        if segment
    ]


def _leaf(chain: Sequence[Node]) -> int | None:
    """The last message of the file, or what was written before it although it answers it."""
    place = next((at for at in range(len(chain) - 1, -1, -1) if chain[at].speaks), None)
    if place is None:
        return None
    late: dict[str, int] = {}
    order = {node.uuid: at for at, node in enumerate(chain)}
    for at, node in enumerate(chain):
        if node.parent and node.speaks and order.get(node.parent, -1) > at:
            late[node.parent] = at
    seen = {place}
    while chain[place].uuid in late and late[chain[place].uuid] not in seen:
        place = late[chain[place].uuid]
        seen.add(place)
    return place


def _beside(chain: Sequence[Node], live: set[int]) -> dict[int, list[int]]:
    """Records that hang beside the path and belong to it, by the record after which they stand.

    Parallel calls are written as a chain of records of one message, each result hangs on the record
    of its own call, and what follows continues from one of them. ``live`` grows by what is found.
    """
    beside: dict[int, list[int]] = {}
    places = {chain[place].uuid: place for place in live}
    calls = {call.id: place for place in live for call in chain[place].calls}
    for place, node in enumerate(chain):
        up = places.get(node.parent) if node.parent else None
        if place in live or up is None or node.message_id is None:
            continue
        if node.message_id == chain[up].message_id and not any(call.id in calls for call in node.calls):
            beside.setdefault(up, []).append(place)
            places[node.uuid] = place
            live.add(place)
            calls.update((call.id, place) for call in node.calls)
    answered = {result.call_id for place in live for result in chain[place].results}
    for place, node in enumerate(chain):
        if place in live:
            continue
        open_calls = [r.call_id for r in node.results if r.call_id in calls and r.call_id not in answered]
        if open_calls:
            beside.setdefault(calls[open_calls[0]], []).append(place)
            live.add(place)
            answered.update(open_calls)
    return beside


def _with_beside(segment: Iterable[int], beside: dict[int, list[int]]) -> Iterator[int]:
    for place in segment:
        waiting = [place]
        while waiting:
            at = waiting.pop()
            yield at
            waiting.extend(reversed(beside.get(at, ())))


def _count_abandoned(
    chain: Sequence[Node], by_uuid: dict[str, int], live: set[int], counts: Counter[str]
) -> None:
    tops: dict[int, int] = {}
    speaking: set[int] = set()
    for place, node in enumerate(chain):
        if place in live:
            continue
        up = by_uuid.get(node.parent) if node.parent else None
        tops[place] = tops.get(up, place) if up is not None else place
        if node.speaks:
            speaking.add(tops[place])
    if speaking:
        counts["abandoned branch"] += len(speaking)
