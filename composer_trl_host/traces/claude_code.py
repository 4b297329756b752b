"""Claude Code session files (``~/.claude/projects/*/*.jsonl``).

Only user and assistant records become turns, on the path that leads to the session's last message.
Each sub-agent's side chain is a trace of its own (``session/agent``), and so is each stretch after a
compaction (``session#2``), whose context began with the summary. Messages that the program marks as
meta are context the model read, and stay; queued ones stay where they reached the model. What the
program itself wrote in the model's name (an API error) is left out, and the answer after it counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from composer_trl_host.traces.claude_index import Session, index
from composer_trl_host.traces.claude_tree import SIDE, Node, Result, chains, live_segments
from composer_trl_host.traces.files import is_bad, mark_bad, parse
from composer_trl_host.traces.model import ReadReport, ToolCall, Trace
from composer_trl_host.traces.sites import Draft, finish
from composer_trl_host.traces.values import (
    Refused,
    content_text,
    identifier,
    json_text,
    label,
    part_text,
    shape,
    string,
)

FORMAT = "claude-code"
KNOWN_TYPES = frozenset(
    [
        "user",
        "assistant",
        "system",
        "summary",
        "progress",
        "attachment",
        "queue-operation",
        "file-history-snapshot",
        "last-prompt",
        "custom-title",
        "ai-title",
        "tag",
        "agent-name",
        "agent-color",
        "agent-setting",
        "mode",
        "permission-mode",
        "worktree-state",
        "pr-link",
        "attribution-snapshot",
        "speculation-accept",
        "content-replacement",
        "result",
    ]
)
_REFUSED = re.compile(r"(?:error: )?(?:the )?user rejected|\[request interrupted", re.IGNORECASE)
# Not ``code``: in a fetched page's result that is the HTTP status.
_EXIT_KEYS = ("exitCode", "exit_code", "returnCode")


def recognizes(value: object) -> bool:
    """Whether a record is of this format."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    if value["type"] in KNOWN_TYPES and any(
        key in value for key in ("sessionId", "session_id", "uuid", "parentUuid", "leafUuid", "isSidechain")
    ):
        return True
    return "sessionId" in value or value["type"] in ("file-history-snapshot", "queue-operation")


def traces(handle: BufferedReader, path: Path, report: ReadReport) -> Iterator[Trace]:
    """The traces of a file, session by session."""
    sessions, lines = index(handle)
    report.lines += lines
    for session in sessions:
        yield from _session(handle, session, path, report)


def _session(handle: BufferedReader, session: Session, path: Path, report: ReadReport) -> Iterator[Trace]:
    found: list[Trace] = []
    for chain in chains(_nodes(handle, session, path, report), report.skipped):
        for number, segment in enumerate(live_segments(chain, report.skipped), 1):
            drafts = _drafts(segment, report)
            if not any(draft.role == "assistant" for draft in drafts):
                report.skipped["conversation without a turn of the model"] += 1
                continue
            first, last = segment[0], segment[-1]
            name = last.session or path.stem
            if chain[0].chain:
                agent = first.chain if first.chain != SIDE else f"line-{chain[0].line}"
                name = f"{name}/{agent}"
            found.append(
                Trace(
                    id=name if number == 1 else f"{name}#{number}",
                    turns=finish(drafts, report),
                    format=FORMAT,
                    path=str(path),
                    line=min(node.line for node in segment),
                )
            )
    found.sort(key=lambda trace: trace.line)
    yield from found


def _nodes(handle: BufferedReader, session: Session, path: Path, report: ReadReport) -> Iterator[Node]:
    for number, line in session.lines(handle):
        if line.isspace():
            continue
        value = parse(line)
        if is_bad(value):
            mark_bad(path, number, report)
            continue
        if not isinstance(value, dict):
            report.skipped[f"record that is {shape(value)}"] += 1
            continue
        node = _node(value, number, report)
        if node is not None:
            yield node


def _node(value: dict[str, Any], line: int, report: ReadReport) -> Node | None:
    kind = value.get("type")
    queued = _queued(value) if kind == "attachment" else None
    if kind not in ("user", "assistant") and queued is None:
        known = isinstance(kind, str) and kind in KNOWN_TYPES
        report.skipped[f"record of {'type' if known else 'unknown type'} {label(kind)}"] += 1
        if string(value.get("uuid")) is None:
            return None
    node = Node(
        line=line,
        kind="other",
        uuid=string(value.get("uuid")) or f"line {line}",
        parent=_parent(value),
        session=string(value.get("sessionId")) or string(value.get("session_id")) or "",
        chain=_chain(value),
    )
    if kind == "system" and value.get("subtype") == "compact_boundary":
        node.kind, node.resume = "boundary", string(value.get("logicalParentUuid"))
    if queued is not None:
        node.kind = "user"
        node.results = [Result(queued)]
    elif kind in ("user", "assistant"):
        try:
            _fill(node, kind, value, report)
        except Refused as refused:
            report.skipped[refused.reason] += 1
        except RecursionError:
            report.skipped["record nested too deeply"] += 1
    return node


def _parent(value: dict[str, Any]) -> str | None:
    if "parentUuid" not in value:
        return ""
    return string(value["parentUuid"])


def _chain(value: dict[str, Any]) -> str:
    """``""`` for the main conversation, else the agent's id, or ``SIDE`` where there is none."""
    agent = string(value.get("parent_tool_use_id"))
    if agent is None and value.get("isSidechain") is True:
        agent = string(value.get("agentId")) or SIDE
    return agent or ""


def _queued(value: dict[str, Any]) -> str | None:
    attachment = value.get("attachment")
    if not isinstance(attachment, dict) or attachment.get("type") != "queued_command":
        return None
    prompt = attachment.get("prompt")
    if isinstance(prompt, list):
        prompt = "\n".join(
            part["text"] for part in prompt if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return string(prompt)


def _fill(node: Node, kind: str, value: dict[str, Any], report: ReadReport) -> None:
    message = value.get("message")
    if not isinstance(message, dict):
        raise Refused(f"{kind} record whose message is {shape(message)}")
    content = message.get("content")
    if kind == "user":
        summary = value.get("isCompactSummary") is True
        if value.get("isVisibleInTranscriptOnly") is True and not summary:
            raise Refused("message that the model was not shown")
        node.kind, node.starts, node.meta = "user", summary, value.get("isMeta") is True
        _fill_user(node, content, value.get("toolUseResult"), report)
    elif value.get("isApiErrorMessage") is True or message.get("model") == "<synthetic>":
        raise Refused("assistant message that no model wrote")
    else:
        node.kind, node.message_id = "assistant", string(message.get("id"))
        _fill_assistant(node, content, report)


def _fill_assistant(node: Node, content: object, report: ReadReport) -> None:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Refused(f"assistant message whose content is {shape(content)}")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thought = string(block.get("thinking"))
            if thought is not None:
                node.thoughts.append(thought)
        elif kind == "tool_use":
            name = string(block.get("name"))
            if name is None:
                report.skipped["tool call without a name"] += 1
                continue
            call_id = identifier(block.get("id")) or f"{node.uuid}/{len(node.calls)}"
            node.calls.append(ToolCall(call_id, name, json_text(block.get("input"))))
        else:
            text = part_text(block, report.skipped)
            if text:
                node.texts.append(text)


def _fill_user(node: Node, content: object, extra: object, report: ReadReport) -> None:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Refused(f"user message whose content is {shape(content)}")
    blocks = sum(isinstance(block, dict) and block.get("type") == "tool_result" for block in content)
    texts: list[str] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            _close(texts, node)
            # ``toolUseResult`` belongs to the record: with several results it is no one's.
            node.results.append(_result(block, extra if blocks == 1 else None, report))
            continue
        text = part_text(block, report.skipped)
        if text:
            texts.append(text)
    _close(texts, node)


def _close(texts: list[str], node: Node) -> None:
    """Neighbouring text blocks of one record are one turn."""
    if texts:
        node.results.append(Result("\n".join(texts)))
        texts.clear()


def _result(block: dict[str, Any], extra: object, report: ReadReport) -> Result:
    flag = block.get("is_error")
    result = Result(
        content_text(block.get("content", _shown(extra)), report.skipped, "tool result"),
        identifier(block.get("tool_use_id")) or "",
        flag if isinstance(flag, bool) else None,
    )
    if isinstance(extra, str):
        if _REFUSED.match(extra):
            result.refused = True
        elif result.is_error is None and extra.startswith("Error:"):
            result.is_error = True
    elif isinstance(extra, dict):
        # A time limit interrupts as well, and says so in the text; that is no person's doing.
        result.refused = (
            extra.get("interrupted") is True and flag is not False and "timed out" not in result.text[-4096:]
        )
        for key in _EXIT_KEYS:
            code = extra.get(key)
            if isinstance(code, int) and not isinstance(code, bool):
                result.exit_code = code
                break
    return result


def _shown(extra: object) -> str:
    """What ``toolUseResult`` holds of the text, for a block that has none."""
    if isinstance(extra, dict):
        return "\n".join(text for key in ("stdout", "stderr") if (text := string(extra.get(key))))
    return extra if isinstance(extra, str) else ""


def _drafts(segment: Sequence[Node], report: ReadReport) -> list[Draft]:
    """The turns of a stretch. Records of one assistant message are one turn, also where a result of
    one of its calls was written between them."""
    drafts: list[Draft] = []
    open_turn: tuple[str, Draft, list[Node]] | None = None
    for node in segment:
        if node.kind == "assistant" and node.speaks:
            if open_turn is None or node.message_id is None or open_turn[0] != node.message_id:
                draft = Draft("assistant")
                drafts.append(draft)
                open_turn = (node.message_id or "", draft, [])
            open_turn[2].append(node)
            _merge(open_turn[1], open_turn[2])
            continue
        for result in node.results:
            if result.call_id is None:
                if not node.meta:
                    open_turn = None
                drafts.append(Draft("user", result.text))
            else:
                drafts.append(
                    Draft(
                        "tool",
                        result.text,
                        call_id=result.call_id or None,
                        is_error=result.is_error,
                        exit_code=result.exit_code,
                        refused=result.refused,
                    )
                )
    return drafts


def _merge(draft: Draft, nodes: Sequence[Node]) -> None:
    """A record may repeat what earlier records of its message hold: nothing is taken twice."""
    draft.content = "\n\n".join(dict.fromkeys(text for node in nodes for text in node.texts))
    draft.thinking = "\n\n".join(dict.fromkeys(text for node in nodes for text in node.thoughts))
    draft.calls = tuple({call.id: call for node in nodes for call in node.calls}.values())
