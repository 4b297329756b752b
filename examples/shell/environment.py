"""A small shell whose commands have unfamiliar names.

The model is asked in words ("remove report") and answers with one command a turn. The commands
run on a small file system in memory, and what they answer is what happened there. Their names
are not the words of the request ("trash report"), so the first try nearly always fails with an
error; the model then gets one more turn. A hint says the right command, to the teacher alone.

    user       remove report
    assistant  remove report
    tool       unknown command: remove
    assistant  trash report

Only the first line of a turn is read. Commands and names are whatever stands between blanks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from composer_prime_plugin.errors import TaskError
from composer_trl_host.environment import Reply, Split
from composer_trl_host.hints import ErrorContext, Hint, Message

LIVE_MAPPING: dict[str, str] = {"remove": "trash", "show": "view", "list": "dir", "create": "make"}
"""What a request is called in the request, and what its command is called in the live task."""

EXAMPLES: tuple[tuple[str, str, str], ...] = (
    ("lock", "seal", "plan"),
    ("count", "tally", "essay"),
    ("copy", "clone", "badge"),
)
"""Request word, command and name of the commands that the prompt shows. They run like the rest."""

PROTECTED = "kernel"
"""A file that is there in every episode and may be neither removed nor changed."""

MAX_TURNS = 2

_ECHO = 32
"""Characters of the model's own text that an error message repeats at most."""

# Common words, each one token after a blank in most vocabularies. No word is in both splits.
_TRAIN = """
report letter budget recipe invoice diary photo music garden winter summer travel school family
project meeting lesson journal picture weather market doctor dinner holiday novel script poem
speech survey resume agenda memo ticket contract sketch chart story article review poster profile
village river forest bridge castle planet rocket engine camera guitar
"""
_HELDOUT = """
island mountain ocean kitchen hospital museum library station window mirror basket bottle
candle carpet pencil pillow blanket jacket umbrella violin soccer tennis lemon butter
"""
TRAIN_NAMES: tuple[str, ...] = tuple(_TRAIN.split())
HELDOUT_NAMES: tuple[str, ...] = tuple(_HELDOUT.split())

_WORD = re.compile(r"[^\s:]+")


class _Refusal(Exception):
    """A command that did not run: the error kind and the text the model is shown."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class FileSystem:
    """Files and folders in memory, one level of folders deep, and the commands that act on them."""

    def __init__(self, files: Mapping[str, str], folders: Mapping[str, tuple[str, ...]]) -> None:
        self.files = dict(files)
        self.folders = dict(folders)
        self.locked = {PROTECTED}
        self.displayed: list[tuple[str, str]] = []
        """What was read: ``("show", name)`` for a file, ``("list", name)`` for a folder."""

    def state(self) -> tuple[Any, ...]:
        """Everything that a command may have changed, comparable with ``==``."""
        return (dict(self.files), dict(self.folders), set(self.locked), list(self.displayed))

    def remove(self, name: str) -> str:
        self._writable_file(name)
        del self.files[name]
        return f"removed {name}"

    def show(self, name: str) -> str:
        self._file(name)
        self.displayed.append(("show", name))
        return self.files[name]

    def list(self, name: str) -> str:
        if name in self.files:
            raise _Refusal("refused", f"refused: {name} is a file")
        if name not in self.folders:
            raise _Refusal("no_such_file", f"no such folder: {name[:_ECHO]}")
        self.displayed.append(("list", name))
        return " ".join(self.folders[name])

    def create(self, name: str) -> str:
        if name in self.files or name in self.folders:
            raise _Refusal("refused", f"refused: {name} exists")
        self.files[name] = ""
        return f"created {name}"

    def lock(self, name: str) -> str:
        self._writable_file(name)
        self.locked.add(name)
        return f"locked {name}"

    def count(self, name: str) -> str:
        self._file(name)
        return f"{len(self.files[name].split())} words"

    def copy(self, name: str) -> str:
        self._file(name)
        self.create(f"{name}-copy")
        return f"copied to {name}-copy"

    def _file(self, name: str) -> None:
        if name in self.folders:
            raise _Refusal("refused", f"refused: {name} is a folder")
        if name not in self.files:
            raise _Refusal("no_such_file", f"no such file: {name[:_ECHO]}")

    def _writable_file(self, name: str) -> None:
        self._file(name)
        if name in self.locked:
            raise _Refusal("refused", f"refused: {name} is protected")


class ShellHints:
    """Names the right command, whatever went wrong. The source says which error kind asked."""

    def generate(self, context: ErrorContext) -> Hint | None:
        """``hint: trash report``, or None where the task did not say what is right."""
        command = context.details.get("command")
        if not command:
            return None
        return Hint(text=f"hint: {command}", source=f"shell/{context.error_kind}")


class ShellEpisode:
    """One request, at most two turns.

    The second turn is given only after an error. A command that ran ends the episode, the right
    one or not: what is done is done.
    """

    def __init__(self, row: Mapping[str, Any], mapping: Mapping[str, str]) -> None:
        self._verb, self._name = str(row["verb"]), str(row["name"])
        others = [str(name) for name in row["others"]]
        self._right = f"{mapping[self._verb]} {self._name}"
        self._turns = 0

        files = {name: f"about {name}" for name in (PROTECTED, *others)}
        folders: dict[str, tuple[str, ...]] = {"attic": ("box", "trunk")}
        if self._verb == "list":
            folders[self._name] = tuple(others)
        elif self._verb != "create":
            files[self._name] = f"about {self._name}"
        self.system = FileSystem(files, folders)

        wanted = FileSystem(files, folders)
        getattr(wanted, self._verb)(self._name)
        self._wanted = wanted.state()

        self._commands: dict[str, Callable[[str], str]] = {
            command: getattr(self.system, verb)
            for verb, command in (*mapping.items(), *((verb, command) for verb, command, _ in EXAMPLES))
        }
        shown = "\n".join(f"{verb} {name}: {command} {name}" for verb, command, name in EXAMPLES)
        self.prompt: list[Message] = [
            {"role": "system", "content": f"Shell. One command a turn.\n{shown}"},
            {"role": "user", "content": f"{self._verb} {self._name}"},
        ]

    def step(self, turn: str) -> Reply:
        """Run the first line of ``turn`` as a command."""
        if self._turns >= MAX_TURNS:
            raise TaskError(
                f"an episode of the shell has at most {MAX_TURNS} turns, got one more: "
                "stop when the reply is done"
            )
        self._turns += 1
        try:
            answer = self._run(turn)
        except _Refusal as refusal:
            return Reply(
                messages=[{"role": "tool", "content": refusal.text}],
                tool_error=refusal.kind,
                done=self._turns >= MAX_TURNS,
                details={"command": self._right},
            )
        return Reply(messages=[{"role": "tool", "content": answer}], done=True)

    def reward(self) -> float:
        """1.0 when the file system is as the request wants it, else 0.0: there is no part of a file."""
        return float(self.solved())

    def solved(self) -> bool:
        """Whether what was asked, and nothing else, was done."""
        return self.system.state() == self._wanted

    def _run(self, turn: str) -> str:
        lines = turn.strip().splitlines()
        words = lines[0].split() if lines else []
        if not words:
            raise _Refusal("wrong_usage", "usage: COMMAND NAME")
        command, *arguments = words
        if command not in self._commands:
            raise _Refusal("unknown_command", f"unknown command: {command[:_ECHO]}")
        if len(arguments) != 1:
            raise _Refusal("wrong_usage", f"usage: {command} NAME")
        return self._commands[command](arguments[0])


class ShellEnvironment:
    """The live task. ``mapping`` names the commands; the default is the mapping to be learned."""

    name = "shell"

    def __init__(self, mapping: Mapping[str, str] | None = None) -> None:
        self.mapping: dict[str, str] = dict(LIVE_MAPPING if mapping is None else mapping)
        self.hints = ShellHints()
        if set(self.mapping) != set(LIVE_MAPPING):
            raise TaskError(
                f"the shell's mapping must name a command for each of {sorted(LIVE_MAPPING)}, "
                f"found {sorted(self.mapping)}: give all four and no other"
            )
        commands = [*self.mapping.values(), *(command for _, command, _ in EXAMPLES)]
        if len(set(commands)) != len(commands) or not all(_WORD.fullmatch(command) for command in commands):
            raise TaskError(
                f"the shell's commands must be distinct single words, found {commands}: rename the doubles"
            )

    def rows(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """``count`` requests: every verb with every name of the split in shuffled order, then again."""
        names = {"train": TRAIN_NAMES, "heldout": HELDOUT_NAMES}.get(split)
        if names is None:
            raise TaskError(f"a split of the shell must be 'train' or 'heldout', found {split!r}: name one")
        source = random.Random(f"shell/{split}/{seed}")
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            pairs = [(verb, name) for verb in LIVE_MAPPING for name in names]
            source.shuffle(pairs)
            for verb, name in pairs[: count - len(rows)]:
                others = source.sample([other for other in names if other != name], 3)
                rows.append({"verb": verb, "name": name, "others": others})
        return rows

    def episode(self, row: Mapping[str, Any]) -> ShellEpisode:
        """Open a row on a fresh file system."""
        return ShellEpisode(row, self.mapping)
