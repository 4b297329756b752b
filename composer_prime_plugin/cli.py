"""``composer-rl``: show which backend trains a TOML, and train it there.

PRIME-RL is started with the user's own words; the TRL host runs in this process. What the user can
put right is one line on stderr and exit code 2. Imports torch only where PRIME-RL or the host needs it.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from composer_prime_plugin import __version__
from composer_prime_plugin.errors import ComposerError, ConfigError
from composer_prime_plugin.prime_schema import SchemaVerdict, check_with_prime, prime_is_importable
from composer_prime_plugin.routing import HOST_COMMAND, PRIME_COMMAND, Route, choose_backend
from composer_prime_plugin.runfile import RunFile, load_run

if TYPE_CHECKING:
    from composer_prime_plugin.contract import LossContract

HOST_MODULE = "composer_trl_host.run"
DRY_RUN_MODULE = "composer_trl_host.dry_run"
EXPORT_MODULE = "composer_trl_host.export"
INSPECT_MODULE = "composer_trl_host.inspection.command"
INSPECT_HELP_MODULE = "composer_trl_host.inspection.help"
"""Imported by name and only when they are needed: this package does not depend on the host."""

USAGE_EXIT = 2
INTERRUPT_EXIT = 130
"""128 + SIGINT, as shells report it."""

HELP = """\
usage: composer-rl COMMAND @ rl.toml [@ more.toml ...] [--dotted.key VALUE ...]

One PRIME-RL TOML, two backends: PRIME-RL, or the TRL host where SDPO needs it.

commands:
  run      train the TOML on the backend that can
  route    show that backend and why, and start nothing
  inspect  show the error sites of recorded transcripts: what failed, which hint, which tokens
  export   write a host's checkpoint as a model folder that PRIME-RL can start from

options:
  --version  show the version
  -h, --help show this text, or after a command that command's own

example:
  composer-rl run @ examples/shell/rl.toml --max-steps 5
  composer-rl inspect examples/traces
"""

_ARGUMENTS = """\
arguments:
  @ FILE                a TOML; a later one is laid over an earlier one
  --section @ FILE      a TOML that fills one section, as in --trainer @ trainer.toml
  --dotted.key VALUE    a value that wins over every TOML, as in --trainer.optim.lr 1e-5
  --flag, --no-flag     true or false; for an optional table on or off, as in --no-wandb
"""

RUN_HELP = f"""\
usage: composer-rl run @ rl.toml [@ more.toml ...] [--dotted.key VALUE ...]

Show the backend and the reason, then train: PRIME-RL's `rl` is started with the very same arguments,
or the TRL host runs in this process.

{_ARGUMENTS}
  --dry-run             write both backends' resolved configurations into the run folder and start nothing

exit codes: 0 trained, 2 the input cannot be run, 3 a guard rail stopped the run on the TRL host
(docs/guards.md), 130 interrupted on the TRL host, else the backend's own

example:
  composer-rl run @ examples/shell/rl.toml --max-steps 5 --output-dir outputs/try
"""

ROUTE_HELP = f"""\
usage: composer-rl route @ rl.toml [@ more.toml ...] [--dotted.key VALUE ...] [--json]

Show which backend trains the TOML, the reasons, and the command that starts it. Reads the loss table alone:
what else the TOML holds is checked when it runs.

{_ARGUMENTS}
  --json                print {{"backend", "reasons", "command"}}; backend is "prime-rl" or "trl-host"

example:
  composer-rl route @ examples/shell/rl.toml --json
"""


EXPORT_HELP = """\
usage: composer-rl export RUN_FOLDER_OR_CHECKPOINT [--to FOLDER] [--merge-lora]

Write the model of a run on the TRL host, of its newest checkpoint or of the one named, as a folder of
safetensors with its tokenizer, and show what to change in the TOML so that PRIME-RL goes on from it.

arguments:
  RUN_FOLDER_OR_CHECKPOINT  as the run printed it: outputs/run, or outputs/run/checkpoint-20
  --to FOLDER               where to; default: exported-STEP in the run folder. It must be empty or absent
  --merge-lora              merge the adapter of a LoRA run into its model; without it the adapter is written

example:
  composer-rl export outputs/shell
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit code.

    Where PRIME-RL takes the run, it takes the place of this process and ``main`` does not return.
    """
    environment = dict(os.environ)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words, environment)
    except ComposerError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain(_interrupted(words))
        return INTERRUPT_EXIT


def _dispatch(words: list[str], environment: Mapping[str, str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else USAGE_EXIT
    if words[0] == "--version":
        print(f"composer-rl {__version__}")
        return 0
    command, arguments = words[0], words[1:]
    if command not in _COMMANDS:
        names = list(_COMMANDS)
        raise ConfigError(
            f"the first word must be a command, {', '.join(names[:-1])} or {names[-1]}; found {command!r}; "
            "write for example composer-rl run @ rl.toml"
        )
    help_text, function = _COMMANDS[command]
    if "-h" in arguments or "--help" in arguments:
        print(help_text if isinstance(help_text, str) else help_text(), end="")
        return 0
    return function(arguments, environment)


def _route(arguments: list[str], environment: Mapping[str, str]) -> int:
    as_json = "--json" in arguments
    own = [word for word in arguments if word != "--json"]
    _, route = _routed(own)
    if as_json:
        fields = {"backend": route.backend, "reasons": list(route.reasons), "command": route.command}
        print(json.dumps(fields, indent=2))
    else:
        _show(route)
    return 0


def _run(arguments: list[str], environment: Mapping[str, str]) -> int:
    run, route = _routed(arguments)
    _show(route)
    sys.stdout.flush()
    dry = bool(run.document.get("dry_run"))
    if route.backend == "prime-rl" and not dry:
        _become_prime(run.arguments, environment)
    verdict = _checked_by_prime(run, environment)
    if dry:
        return int(_host_module(DRY_RUN_MODULE).dry_run(run, route.backend, verdict.resolved))
    return _run_host(run)


def _checked_by_prime(run: RunFile, environment: Mapping[str, str]) -> SchemaVerdict:
    """What PRIME-RL's own schema says, where there is one; of several processes the first asks."""
    if not prime_is_importable() or environment.get("RANK", "0") != "0":
        return SchemaVerdict()
    verdict = check_with_prime(run.document)
    if verdict.unable is not None:
        print(f"note:    PRIME-RL's RLConfig did not check this TOML: {verdict.unable}", flush=True)
    return verdict


def _export(arguments: list[str], environment: Mapping[str, str]) -> int:
    return int(_host_module(EXPORT_MODULE).main(arguments))


def _inspect(arguments: list[str], environment: Mapping[str, str]) -> int:
    return int(_host_module(INSPECT_MODULE).main(arguments))


def _inspect_help() -> str:
    return str(_host_module(INSPECT_HELP_MODULE).HELP)


_COMMANDS: dict[str, tuple[str | Callable[[], str], Callable[[list[str], Mapping[str, str]], int]]] = {
    "run": (RUN_HELP, _run),
    "route": (ROUTE_HELP, _route),
    "inspect": (_inspect_help, _inspect),
    "export": (EXPORT_HELP, _export),
}


def _routed(arguments: list[str]) -> tuple[RunFile, Route]:
    run = load_run(arguments)
    return run, choose_backend(run.config, _installed_contract(), shlex.join(run.arguments))


def _installed_contract() -> LossContract | None:
    """The contract of the installed PRIME-RL; torch is imported only where there is one."""
    if not prime_is_importable():
        return None
    from composer_prime_plugin.contract import BrokenPrimeRLError, LossContract

    try:
        return LossContract.installed()
    except BrokenPrimeRLError as error:
        raise ConfigError(str(error)) from error


def _show(route: Route) -> None:
    print(f"backend: {route.backend}")
    for reason in route.reasons:
        print(f"reason:  {reason}")
    print(f"command: {route.command}")


def _become_prime(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Put PRIME-RL's ``rl`` in the place of this process, with ``arguments`` unchanged.

    It keeps the process id, so every signal, the terminal and the exit code are its own, with nothing
    in between that could deliver Ctrl-C twice or lose it.
    """
    beside = Path(sys.executable).with_name(PRIME_COMMAND)
    executable = str(beside) if os.access(beside, os.X_OK) else shutil.which(PRIME_COMMAND)
    if executable is None:
        raise ConfigError(
            f"PRIME-RL trains this run, so its executable `{PRIME_COMMAND}` must be beside {sys.executable} "
            "or on PATH; found none; install PRIME-RL with its scripts or activate its environment"
        )
    sys.stderr.flush()
    # Python ignores it, and an ignored signal would stay ignored in `rl` and all it starts.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execve(executable, [executable, *arguments], dict(environment))
    except OSError as error:
        raise ConfigError(
            f"PRIME-RL's executable must start; {executable} does not ({error.strerror}); "
            "repair that installation"
        ) from error


def _run_host(run: RunFile) -> int:
    return int(_host_module(HOST_MODULE).run_host(run))


def _host_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        found = f"there is no module {missing}" if missing else f"importing it failed with: {error}"
        raise ConfigError(
            f"the TRL host needs its packages; {found}; run `pip install 'composer-rl[trl]'`"
        ) from error


def _interrupted(words: list[str]) -> str:
    # Once training begins the host says itself how to go on.
    if words[:1] in (["inspect"], ["export"]):
        return "interrupted"
    return f"interrupted before training began; start again with `{HOST_COMMAND} {shlex.join(words[1:])}`"


def _complain(message: str) -> None:
    """One line on stderr."""
    print(f"composer-rl: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
