"""Comparison with PRIME-RL's own functions, in a process of its own per release.

``python -m parity.live`` is that process: it imports ``prime_rl`` from the path it is given, so
several releases can be compared by one command.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from composer_prime_plugin.errors import ConfigError
from parity import golden
from parity.cases import Case, Inputs, build, cases, zeroed
from parity.compare import Differences, LossCall, Outcome, differences, loss_inputs, outcome
from parity.releases import Identity, Objective, Release, by_name, subprocess_environment
from parity.suite import FamilyResult, one_thread, run_objective

LOSS_MODULE = "prime_rl.trainer.rl.loss"
CONFIG_MODULE = "prime_rl.configs.trainer"
CONFIG_CLASSES = {"default_loss_fn": "DefaultLossConfig", "ipo_loss_fn": "IPOLossConfig"}
LIVE = "live, to the bit"
NOT_VERIFIED = "(not verified)"
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Target:
    """A release's function for an objective, with its own configuration class."""

    objective: Objective
    name: str
    function: Any
    config_class: type[Any]

    def call(self, case: Case) -> LossCall:
        """The function with ``case``'s knobs, and the release's own defaults for the others."""
        knobs = {_spelt(knob, self.config_class): value for knob, value in case.knobs.items()}
        config = self.config_class(**knobs)
        return lambda sample: self.function(sample, config)


def _spelt(knob: str, config_class: type[Any]) -> str:
    # PRIME-RL's pull request 3418 renames ipo_threshold.
    fields = config_class.model_fields
    return "eps" if knob == "ipo_threshold" and knob not in fields and "eps" in fields else knob


def compare_checkout(root: Path | None, identity: Identity) -> list[FamilyResult]:
    """Every family against the PRIME-RL at ``root`` (None: the installed one), in a new process."""
    return [FamilyResult.from_dict(row) for row in _work(root, identity, "compare")]


def record_checkout(root: Path | None, identity: Identity, folder: Path) -> Path:
    """Record the vectors of the PRIME-RL at ``root`` into ``folder``."""
    if identity.release is None:
        raise ConfigError(
            f"only a release of parity/releases.py can be recorded; found {identity.label}; add it there"
        )
    entries = _work(root, identity, "record")
    return golden.write(identity.release, entries, folder)


def _work(root: Path | None, identity: Identity, action: str) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", "parity.live", action, str(answer), identity.label]
        command += [] if identity.release is None else ["--release", identity.release.name]
        done = subprocess.run(
            command,
            env=subprocess_environment(root),
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode != 0 or not answer.is_file():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(
                f"the process for {identity.label} must end by itself; found exit {done.returncode}: {last}"
            )
        data = json.loads(answer.read_text(encoding="utf-8"))
    if "missing" in data:
        place = "the installed prime_rl" if root is None else f"the checkout at {root}"
        raise ConfigError(
            f"{place} must be importable; found no module named {data['missing']!r}; install what its loss "
            "module imports: pip install 'composer-rl[parity-live]'"
        )
    if "failed" in data:
        raise ConfigError(f"prime_rl of {identity.label} must be importable; found {data['failed']}")
    return data["result"]


def targets(module: ModuleType, release: Release | None) -> Iterator[Target | str]:
    """The functions to compare with; a string says why one cannot be. A release outside the table is
    read by its configurations' fields, as no list of its functions exists."""
    configs = importlib.import_module(CONFIG_MODULE)
    known = None if release is None else {name: objective for objective, name in release.targets.items()}
    for function_name, config_name in CONFIG_CLASSES.items():
        function, config_class = getattr(module, function_name, None), getattr(configs, config_name, None)
        if known is not None and function_name not in known:
            continue
        if function is None or config_class is None:
            yield f"no {function_name if function is None else config_name}"
            continue
        yield Target(
            known[function_name] if known is not None else _objective_of(function_name, config_class),
            function_name,
            function,
            config_class,
        )


def _objective_of(function_name: str, config_class: type[Any]) -> Objective:
    if function_name == "ipo_loss_fn":
        return "ipo"
    return "ipo-two" if "ipo_mask_low" in config_class.model_fields else "dppo"


def compare(module: ModuleType, label: str, release: Release | None) -> list[FamilyResult]:
    """One row per objective and family against ``module``'s functions."""
    inputs_class = module.LossInputs
    fields = tuple(item.name for item in dataclasses.fields(inputs_class))
    shown = label if release is not None else f"{label} {NOT_VERIFIED}"
    rows: list[FamilyResult] = []
    for target in targets(module, release):
        if isinstance(target, str):
            rows.append(FamilyResult(shown, "-", "-", "-", "live", error=target))
            continue
        try:
            rows += run_objective(
                target.objective,
                release=shown,
                target=target.name,
                mode=LIVE,
                inputs_class=inputs_class,
                fields=fields,
                check=_checker(target, inputs_class, fields),
            )
        except Exception as error:
            # A release outside the table may have changed its function's contract.
            if release is not None:
                raise
            why = f"{target.name} raised {type(error).__name__}: {error}"
            rows.append(FamilyResult(shown, target.objective, target.name, "-", "live", error=why))
    return rows


def _checker(target: Target, inputs_class: type[Any], fields: tuple[str, ...]) -> Any:
    def check(case: Case, inputs: Inputs, found: Outcome) -> Differences:
        call = target.call(case)
        out = differences(outcome(call, zeroed(case, inputs), inputs_class, fields), found)
        if case.poison is None:
            return out
        sample, _ = loss_inputs(inputs, inputs_class, fields)
        if bool(torch.isfinite(call(sample).loss)):
            out.loss.append(
                f"{target.name} is finite here: the deliberate difference is gone, take it off the list"
            )
        return out

    return check


def record(module: ModuleType, release: Release) -> dict[str, dict[str, Any]]:
    """What the release's functions give on every case; on the zeroed sample for the deliberate difference."""
    entries: dict[str, dict[str, Any]] = {}
    for target in targets(module, release):
        if isinstance(target, str):
            raise ConfigError(f"{release.name} must have the functions of parity/releases.py; found {target}")
        for case in cases(target.objective, release.fields):
            inputs = build(case)
            theirs = outcome(target.call(case), zeroed(case, inputs), module.LossInputs, release.fields)
            entries[case.id] = golden.entry(inputs, theirs)
    return entries


def main() -> None:
    """Answer one question about the importable ``prime_rl`` in a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m parity.live")
    parser.add_argument("action", choices=["compare", "record"])
    parser.add_argument("answer", type=Path)
    parser.add_argument("label")
    parser.add_argument("--release")
    arguments = parser.parse_args()
    release = None if arguments.release is None else by_name(arguments.release)
    answer: dict[str, Any]
    try:
        module = importlib.import_module(LOSS_MODULE)
    except ModuleNotFoundError as error:
        answer = {"missing": error.name}
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    else:
        with one_thread():
            if arguments.action == "compare":
                answer = {"result": [row.as_dict() for row in compare(module, arguments.label, release)]}
            else:
                assert release is not None
                answer = {"result": record(module, release)}
    arguments.answer.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
