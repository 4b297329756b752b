"""Recorded vectors: what each release's own functions gave, for machines without PRIME-RL.

A file per release under ``parity/golden``, one line per case: a digest of the inputs, the loss, every
metric and the gradient as hexadecimal bytes. A short gradient is kept whole; a long one as a strided
sample plus the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_prime_plugin.errors import ConfigError
from parity.cases import Case, Inputs, cases, digest, tensor_bytes, zeroed
from parity.compare import Differences, Outcome, differences, differences_in_ulps, from_hex, to_hex
from parity.releases import Objective, Release, stand_in
from parity.suite import ComposerLoss, FamilyResult, loss_fn, run_objective
from parity.tolerances import Scales, scales

FOLDER = Path(__file__).parent / "golden"
SAMPLE = 32
"""Gradient values kept per case; a gradient of at most this many is kept whole."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.int64)}


@dataclass(frozen=True)
class Machine:
    """What a last bit depends on. ``exp_probe`` is a digest of ``torch.exp`` on a fixed grid:
    processors of one capability may still differ there."""

    torch: str
    cpu_capability: str
    exp_probe: str

    @classmethod
    def here(cls) -> Machine:
        grid = torch.arange(-(1 << 14), 1 << 14, dtype=torch.float32) / float(1 << 10)
        probe = tensor_bytes(torch.exp(grid)) + tensor_bytes(torch.exp(grid.bfloat16()))
        return cls(
            torch=torch.__version__,
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            exp_probe=hashlib.sha256(probe).hexdigest()[:16],
        )


@dataclass(frozen=True)
class Golden:
    """A release's file, read. ``entries`` by case id; ``scales`` are kept from run to run."""

    release: Release
    machine: Machine
    entries: dict[str, dict[str, Any]]
    scales: dict[str, Scales] = field(default_factory=dict, repr=False)

    @property
    def to_the_bit(self) -> bool:
        """Whether this machine is of the kind that recorded."""
        return self.machine == Machine.here()

    @property
    def mode(self) -> str:
        """The words of the table's last column."""
        return "golden, to the bit" if self.to_the_bit else "golden, in ulps"


def path_of(release: Release, folder: Path = FOLDER) -> Path:
    """The release's file."""
    return folder / f"{release.name}.json"


def load(release: Release, folder: Path = FOLDER) -> Golden:
    """The recorded vectors of ``release``."""
    path = path_of(release, folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        golden = Golden(release, Machine(**data["machine"]), data["cases"])
        commit = data["commit"]
    except FileNotFoundError:
        raise ConfigError(
            f"golden vectors of {release.name} must be in {path}; found no such file; record them with "
            "python -m parity record --prime-rl PATH"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} must be a file of python -m parity record; found {type(error).__name__}: {error}"
        ) from None
    if commit != release.commit:
        raise ConfigError(f"{path} must be of commit {release.commit}; found {commit}; record it again")
    return golden


def run(golden: Golden) -> list[FamilyResult]:
    """Every family of the release against its recorded vectors."""
    return [row for objective in golden.release.targets for row in run_one(golden, objective)]


def run_one(
    golden: Golden,
    objective: Objective,
    ours: ComposerLoss = loss_fn,
    samples: Iterable[tuple[Case, Inputs]] | None = None,
) -> list[FamilyResult]:
    """One objective; ``ours`` may be a mutant, ``samples`` inputs that are built already."""
    release = golden.release
    return run_objective(
        objective,
        release=release.name,
        target=release.targets[objective],
        mode=golden.mode,
        inputs_class=stand_in(release),
        fields=release.fields,
        check=_checker(golden),
        ours=ours,
        samples=samples,
    )


def _checker(golden: Golden) -> Callable[[Case, Inputs, Outcome], Differences]:
    exact = golden.to_the_bit

    def check(case: Case, inputs: Inputs, found: Outcome) -> Differences:
        entry = golden.entries.get(case.id)
        if entry is None:
            return Differences(loss=["no vector is recorded for this case; record the release again"])
        if entry["inputs"] != digest(inputs):
            recorded = f"{digest(inputs)}, recorded {entry['inputs']}"
            return Differences(loss=[f"the inputs' digest is {recorded}: the generation of inputs drifted"])
        try:
            expected = _expected(entry)
        except (KeyError, ValueError) as error:
            return Differences(loss=[f"the recorded vector cannot be read ({type(error).__name__}: {error})"])
        kept = _sample(found.gradient)
        sampled = Outcome(found.loss, found.metrics, kept)
        if not exact:
            if case.id not in golden.scales:
                scale = scales(case, zeroed(case, inputs))
                golden.scales[case.id] = Scales(scale.loss, _sample(scale.gradient))
            return differences_in_ulps(expected, sampled, golden.scales[case.id])
        out = differences(expected, sampled)
        if not out.gradient and entry["gradient_sha256"] != _sha256(found.gradient):
            out.gradient = [
                "gradient: the digest of its bytes differs, outside the positions that are recorded"
            ]
        return out

    return check


def _expected(entry: dict[str, Any]) -> Outcome:
    return Outcome(
        loss=_decode(entry["loss"]).reshape(()),
        metrics={name: _decode(text).reshape(()) for name, text in entry["metrics"].items()},
        gradient=_decode(entry["gradient"]),
    )


def _encode(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')}:{to_hex(values)}"


def _decode(text: str) -> Tensor:
    name, _, content = text.partition(":")
    return from_hex(content, _DTYPES[name])


def _sample(values: Tensor) -> Tensor:
    stride = max(1, -(-values.numel() // SAMPLE))
    return values[::stride].contiguous()


def _sha256(values: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(values)).hexdigest()


def entry(inputs: Inputs, theirs: Outcome) -> dict[str, Any]:
    """One recorded case."""
    return {
        "inputs": digest(inputs),
        "loss": _encode(theirs.loss),
        "metrics": {name: _encode(value) for name, value in theirs.metrics.items()},
        "gradient": _encode(_sample(theirs.gradient)),
        "gradient_sha256": _sha256(theirs.gradient),
    }


def write(release: Release, entries: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write the release's file, one line per case."""
    wanted = {case.id for objective in release.targets for case in cases(objective, release.fields)}
    assert entries.keys() == wanted
    head = {"release": release.name, "commit": release.commit, "machine": vars(Machine.here()), "threads": 1}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
    text = json.dumps(head, indent=1)[:-2] + ',\n "cases": {\n' + lines + "\n}}\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(release, folder)
    path.write_text(text, encoding="utf-8")
    return path
