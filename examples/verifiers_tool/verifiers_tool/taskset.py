"""Requests in words ("remove report") for a shell that calls its commands otherwise ("trash report").

The first call nearly always fails; the model then gets one more turn. What the calls did decides the
reward. ``trace.info["tool_errors"]`` says which of them failed and how, with the hint that names the right
command: a trainer that has no use for it ignores it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf

from verifiers_tool.tools import PROTECTED, ShellState, ShellTools, run

COMMANDS: dict[str, str] = {"remove": "trash", "show": "view", "list": "dir", "create": "make"}
"""What a request is called in the request, and what its command is called."""

EXAMPLES = (("lock", "seal", "plan"), ("count", "tally", "essay"), ("copy", "clone", "badge"))
"""Request word, command and name of the commands that the prompt shows."""

KNOWN = frozenset({*COMMANDS.values(), *(command for _, command, _ in EXAMPLES)})

# Common words, each one token after a blank in most vocabularies.
NAMES = [
    "report",
    "letter",
    "budget",
    "recipe",
    "invoice",
    "diary",
    "photo",
    "music",
    "garden",
    "winter",
    "summer",
    "travel",
    "school",
    "family",
    "project",
    "meeting",
    "lesson",
    "journal",
    "picture",
    "weather",
    "market",
    "doctor",
    "dinner",
    "holiday",
    "novel",
    "script",
    "poem",
    "speech",
    "survey",
    "resume",
    "agenda",
    "memo",
    "ticket",
    "contract",
    "sketch",
    "chart",
    "story",
    "article",
    "review",
    "poster",
    "profile",
    "village",
    "river",
    "forest",
    "bridge",
    "castle",
    "planet",
    "rocket",
    "engine",
    "camera",
    "guitar",
]


class ShellData(vf.TaskData):
    """One request: ``verb`` and ``name``, and the files that are there besides."""

    verb: str
    name: str
    others: list[str]


class ShellTask(vf.Task[ShellData, ShellState]):
    """Sets the files up, judges the end state, and says which calls failed."""

    def start(self) -> ShellState:
        """The files and folders before the first turn."""
        data = self.data
        files = [PROTECTED, *data.others]
        if data.verb in ("remove", "show"):
            files.append(data.name)
        folders = ("attic", data.name) if data.verb == "list" else ("attic",)
        return ShellState(files=tuple(files), folders=folders)

    @property
    def right(self) -> str:
        """The command that does what is asked."""
        return f"{COMMANDS[self.data.verb]} {self.data.name}"

    async def setup(self, trace: vf.Trace) -> None:
        trace.state = self.start()

    async def finalize(self, trace: vf.Trace) -> None:
        outcomes = iter(trace.state.outcomes)
        calls: dict[str, str] = {}
        errors: list[dict[str, str | int]] = []
        for number, node in enumerate(trace.nodes):
            message = node.message
            if isinstance(message, vf.AssistantMessage):
                calls.update((call.id, call.name) for call in message.tool_calls or [])
            elif isinstance(message, vf.ToolMessage):
                known = calls.get(message.tool_call_id) in KNOWN
                kind = next(outcomes, "") if known else "unknown_command"
                if kind:
                    errors.append({"node": number, "kind": kind, "hint": f"hint: {self.right}"})
        trace.info["tool_errors"] = errors

    @vf.stop
    def ran(self, trace: vf.Trace) -> bool:
        """A command that ran ends the episode, the right one or not."""
        return bool(trace.state.done)

    @vf.reward
    async def done_as_asked(self, trace: vf.Trace) -> float:
        """1.0 where the files are as the request wants them, else 0.0."""
        wanted = self.start()
        run(wanted, *self.right.split())
        found = trace.state
        same = all(
            getattr(found, name) == getattr(wanted, name)
            for name in ("files", "folders", "locked", "displayed")
        )
        return float(same)


HELD_OUT = NAMES[::4]
"""Names that ``part = "train"`` has not, and ``part = "heldout"`` alone."""


class ShellConfig(vf.TasksetConfig):
    """``seed`` orders the requests; ``part`` is the names that they have."""

    seed: int = 0
    part: Literal["all", "train", "heldout"] = "all"
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ShellTaskset(vf.Taskset[ShellTask, ShellConfig]):
    """Every verb with every name of the part, in shuffled order."""

    def load(self) -> Iterator[ShellTask]:
        source = random.Random(f"verifiers-tool/{self.config.seed}")
        part = self.config.part
        names = [name for name in NAMES if part == "all" or (name in HELD_OUT) == (part == "heldout")]
        pairs = [(verb, name) for verb in COMMANDS for name in names]
        source.shuffle(pairs)
        shown = "\n".join(f"{word} {name}: {command} {name}" for word, command, name in EXAMPLES)
        for verb, name in pairs:
            others = source.sample([other for other in NAMES if other != name], 3)
            yield ShellTask(
                ShellData(
                    prompt=f"{verb} {name}",
                    system_prompt=f"Shell. One command a turn.\n{shown}",
                    verb=verb,
                    name=name,
                    others=others,
                ),
                self.config.task,
            )

    @classmethod
    def toolsets(cls, config: ShellConfig) -> list[vf.Toolset]:
        return [ShellTools(config.tools)]
