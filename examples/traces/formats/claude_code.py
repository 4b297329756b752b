"""A session of Claude Code: a record for each block, each behind its parent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scenarios import claude_code
from scenarios.turns import Abandoned, Call, Model, Note, Result, Turn, User

Record = dict[str, Any]

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
"""One grey pixel."""


class Session:
    """The records of one session, each behind its parent."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.records: list[Record] = []
        self.parent: str | None = None
        self.agent: str | None = None
        self._uuids = 0
        self._messages = 0
        self._tools = 0
        self._seconds = 0
        self._open: list[tuple[str, str, Call]] = []

    @property
    def id(self) -> str:
        return f"00000000-0000-4000-8000-{self.number:012d}"

    def _uuid(self) -> str:
        self._uuids += 1
        return f"{self.number:08d}-0000-4000-8000-{self._uuids:012d}"

    def _time(self) -> str:
        self._seconds += 5
        minutes, seconds = divmod(self._seconds, 60)
        return f"2026-03-02T{8 + self.number:02d}:{minutes:02d}:{seconds:02d}.000Z"

    def add(self, kind: str, parent: str | None, **fields: Any) -> str:
        """Append one record of the chain and return its uuid."""
        record: Record = {
            "parentUuid": parent,
            "isSidechain": self.agent is not None,
            "userType": "external",
            "cwd": f"/srv/{self.name}",
            "sessionId": self.id,
            "version": "2.0.14",
            "gitBranch": "main",
        }
        if self.agent is not None:
            record["agentId"] = self.agent
        record |= {"type": kind, **fields, "uuid": self._uuid(), "timestamp": self._time()}
        self.records.append(record)
        self.parent = record["uuid"]
        return self.parent

    def play(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            match turn:
                case User(text):
                    self.add("user", self.parent, message={"role": "user", "content": text})
                case Note():
                    self._note(turn)
                case Model():
                    self._model(turn)
                case Result():
                    self._result(turn)
                case Abandoned(inner):
                    before = self.parent
                    self.play(inner)
                    self.parent = before
                case _:
                    raise ValueError(f"a session has no {type(turn).__name__}")

    def _note(self, note: Note) -> None:
        message = {"role": "user", "content": note.text}
        if note.kind == "meta":
            self.add("user", self.parent, message=message, isMeta=True)
        elif note.kind == "command":
            self.add("user", self.parent, message=message)
        else:
            queued = {"type": "queue-operation", "sessionId": self.id}
            self.records.append(
                {**queued, "operation": "enqueue", "content": note.text, "timestamp": self._time()}
            )
            self.records.append({**queued, "operation": "remove", "timestamp": self._time()})
            self.add("attachment", self.parent, attachment={"type": "queued_command", "prompt": note.text})

    def _model(self, turn: Model) -> None:
        """One record for each block, as the program writes them while they arrive."""
        self._messages += 1
        blocks: list[Record] = []
        if turn.thinking:
            blocks.append({"type": "thinking", "thinking": turn.thinking, "signature": "c2lnbmF0dXJl"})
        if turn.text:
            blocks.append({"type": "text", "text": turn.text})
        for call in turn.calls:
            self._tools += 1
            name = f"toolu_{self.number:02d}{self._tools:04d}"
            blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": call.arguments})
        for block in blocks:
            message = {
                "id": f"msg_{self.number:02d}{self._messages:04d}",
                "type": "message",
                "role": "assistant",
                "model": "example-model",
                "content": [block],
                "stop_reason": "tool_use" if turn.calls else "end_turn",
                "stop_sequence": None,
            }
            uuid = self.add("assistant", self.parent, message=message)
            if block["type"] == "tool_use":
                self._open.append((uuid, block["id"], Call(block["name"], block["input"])))

    def _result(self, result: Result) -> None:
        """A result hangs on the record of its own call, so all but the last of parallel ones end a side path."""
        called, tool, call = self._open.pop(0)
        if result.side_chain:
            self._side_chain(result.side_chain)
        block: Record = {"type": "tool_result", "tool_use_id": tool, "content": result.text}
        detail: Any = None
        if result.image:
            block["content"] = [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
            ]
        elif result.side_chain:
            block["content"] = [{"type": "text", "text": result.text}]
            detail = {"status": "completed", "agentId": self._agent_id(), "content": block["content"]}
        if result.error:
            block["is_error"] = True
            rejected = result.text == claude_code.REJECTED
            detail = "User rejected tool use" if rejected else f"Error: {result.text}"
        elif call.name == "Bash":
            block["is_error"] = False
            detail = {"stdout": result.text, "stderr": "", "interrupted": False, "isImage": False}
        fields = {} if detail is None else {"toolUseResult": detail}
        message = {"role": "user", "content": [block]}
        self.add("user", called, message=message, sourceToolAssistantUUID=called, **fields)

    def _agent_id(self) -> str:
        return f"{self.number:08x}"

    def _side_chain(self, turns: Sequence[Turn]) -> None:
        kept = self._open
        self.agent, self.parent, self._open = self._agent_id(), None, []
        self.play(turns)
        self.agent, self._open = None, kept


def records() -> Iterator[Record]:
    for number, scenario in enumerate(claude_code.SCENARIOS, start=1):
        session = Session(number, scenario.name)
        session.play(scenario.turns)
        if scenario.title:
            yield {"type": "summary", "summary": scenario.title, "leafUuid": session.parent}
        yield from session.records
