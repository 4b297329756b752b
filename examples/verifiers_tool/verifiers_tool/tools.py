"""The shell's commands as tools. One server process has them for every rollout.

A rollout's files live in its ``ShellState``, which verifiers brings along with each call and takes back
after it. A command that does not run answers why, and notes in the state what kind of failure it was.

    unknown_command   no tool has that name (the harness answers; the server never sees the call)
    wrong_usage       a command without its one name
    no_such_file      the name is nowhere
    refused           the name is a folder, is protected, or exists already
"""

from __future__ import annotations

import verifiers.v1 as vf

PROTECTED = "kernel"
"""A file that may be neither removed nor changed."""

_ECHO = 32
"""Characters of the model's own text that an answer repeats at most."""


class ShellState(vf.State):
    """What the commands of one rollout act on. ``outcomes``: per call, in order, the kind of its failure,
    or an empty string."""

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    locked: tuple[str, ...] = (PROTECTED,)
    displayed: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    done: bool = False


class Refusal(Exception):
    """A command that did not run: the kind of failure and the text for the model."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class ShellTools(vf.Toolset[vf.SharedToolsetConfig, ShellState]):
    """The shell. Tools carry no prefix: their names are the commands."""

    TOOL_PREFIX = None

    @vf.tool
    def trash(self, name: str = "") -> str:
        """Remove a file."""
        return self._run("trash", name)

    @vf.tool
    def view(self, name: str = "") -> str:
        """Show a file."""
        return self._run("view", name)

    @vf.tool
    def dir(self, name: str = "") -> str:
        """List a folder."""
        return self._run("dir", name)

    @vf.tool
    def make(self, name: str = "") -> str:
        """Create a file."""
        return self._run("make", name)

    @vf.tool
    def seal(self, name: str = "") -> str:
        """Lock a file."""
        return self._run("seal", name)

    @vf.tool
    def tally(self, name: str = "") -> str:
        """Count a file's words."""
        return self._run("tally", name)

    @vf.tool
    def clone(self, name: str = "") -> str:
        """Copy a file."""
        return self._run("clone", name)

    def _run(self, command: str, name: str) -> str:
        state = self.state
        try:
            answer = run(state, command, name)
        except Refusal as refusal:
            state.outcomes = (*state.outcomes, refusal.kind)
            return refusal.text
        state.outcomes = (*state.outcomes, "")
        state.done = True
        return answer


def run(state: ShellState, command: str, name: str) -> str:
    """Run one command on ``state``. Raises ``Refusal``."""
    if len(name.split()) != 1:
        raise Refusal("wrong_usage", f"usage: {command} NAME")
    if command == "make":
        if name in state.files or name in state.folders:
            raise Refusal("refused", f"refused: {name} exists")
        state.files = (*state.files, name)
        return f"created {name}"
    if command == "dir":
        if name in state.files:
            raise Refusal("refused", f"refused: {name} is a file")
        if name not in state.folders:
            raise Refusal("no_such_file", f"no such folder: {name[:_ECHO]}")
        state.displayed = (*state.displayed, name)
        return "box trunk"
    if name in state.folders:
        raise Refusal("refused", f"refused: {name} is a folder")
    if name not in state.files:
        raise Refusal("no_such_file", f"no such file: {name[:_ECHO]}")
    if command in ("trash", "seal") and name in state.locked:
        raise Refusal("refused", f"refused: {name} is protected")
    if command == "trash":
        state.files = tuple(file for file in state.files if file != name)
        return f"removed {name}"
    if command == "seal":
        state.locked = (*state.locked, name)
        return f"locked {name}"
    if command == "clone":
        return run(state, "make", f"{name}-copy")
    state.displayed = (*state.displayed, name)
    return f"about {name}" if command == "view" else "2 words"


if __name__ == "__main__":
    ShellTools.run()
