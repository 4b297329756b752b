"""The PRIME-RL releases that parity is claimed for, and how to find one in a checkout.

A checkout is named by its commit, or, without ``.git``, by the digests of two of its files. Only a loss
module whose digest is in the table counts as verified: anything newer or edited is compared where
it can be, and said to be "not verified".
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from composer_prime_plugin.errors import ConfigError

Objective = Literal["dppo", "ipo", "ipo-two"]
"""``ipo-two`` is ``ipo`` with two thresholds: what v0.5.0 calls its default loss."""

LOSS_FILE = Path("src/prime_rl/trainer/rl/loss.py")
CONFIGS_SRC = Path("packages/prime-rl-configs/src")
PYPROJECT = Path("pyproject.toml")

_TEACHER_FIELDS = ("trainer_logprobs", "inference_logprobs", "teacher_logprobs", "advantages", "loss_mask")
_REF_FIELDS = (
    "trainer_logprobs",
    "inference_logprobs",
    "ref_logprobs",
    "advantages",
    "loss_mask",
    "loss_weights",
)


@dataclass(frozen=True)
class Release:
    """``fields``: those of ``LossInputs``. ``targets``: PRIME-RL's function per objective.
    ``loss_sha256`` and ``pyproject_sha256``: digests of ``LOSS_FILE`` and ``pyproject.toml``."""

    name: str
    commit: str
    date: str
    fields: tuple[str, ...]
    targets: dict[Objective, str]
    loss_sha256: str
    pyproject_sha256: str


_LOSS_V0_7 = "102b14539a2aa7e4b807967f9c9caeaaa974373391a21602ce45b24414fb7863"
_DPPO_AND_IPO: dict[Objective, str] = {"dppo": "default_loss_fn", "ipo": "ipo_loss_fn"}

RELEASES: tuple[Release, ...] = (
    Release(
        name="v0.5.0",
        commit="63331ad8b17048b6d5f2051b2bf159e1392924b7",
        date="2026-03-30",
        fields=_TEACHER_FIELDS,
        targets={"ipo-two": "default_loss_fn"},
        loss_sha256="55dd08920b040ed8aed0745f463ac9104fc7c0abe3f6e67f36b11bc2b822aef4",
        pyproject_sha256="f6b9827ec92c286ea331575709a56800107314d09e470329cd87578fa90e4113",
    ),
    Release(
        name="v0.6.0",
        commit="38494ccb4140897b1c9e7a9ba8da59dcd8940d47",
        date="2026-06-22",
        fields=_TEACHER_FIELDS,
        targets=_DPPO_AND_IPO,
        loss_sha256="616d9f0e202a415b2c78aa60b7b8a8d5253b01dcc1407595407929721db76ecc",
        pyproject_sha256="0e19426fa5201fbba044e7d554b184b1abbd429f1011664ba5668b5e2c729d7d",
    ),
    Release(
        name="v0.7.0",
        commit="d334ea52940b47f426293a7d146239e3fbf91caa",
        date="2026-07-13",
        fields=_REF_FIELDS,
        targets=_DPPO_AND_IPO,
        loss_sha256=_LOSS_V0_7,
        pyproject_sha256="ee5bf804c838ffe30a8f8bb2c0a0f96d8864b6b3651a15735862a611dab73879",
    ),
    Release(
        name="v0.8.0",
        commit="60bc29547a8824ad1de7b9af8d265e2b27b2a72d",
        date="2026-08-06",
        fields=_REF_FIELDS,
        targets=_DPPO_AND_IPO,
        loss_sha256=_LOSS_V0_7,
        pyproject_sha256="56ecad368fb3bf89736faacd6b56071d62aa464707c178e98a8946398a0b0a61",
    ),
    Release(
        name="main-2026-08-21",
        commit="559b44772e471d1538537b8805cc77f3824a5e64",
        date="2026-08-21",
        fields=_REF_FIELDS,
        targets=_DPPO_AND_IPO,
        loss_sha256=_LOSS_V0_7,
        pyproject_sha256="203f502074dab94ff3a22d7017b16a315d25fc67241b7c6dea1d6c08e1695a24",
    ),
)


@dataclass(frozen=True)
class Identity:
    """Which release a checkout is. ``release`` is None for one that the table does not know."""

    label: str
    release: Release | None


def by_name(name: str) -> Release:
    """The release called ``name``."""
    for release in RELEASES:
        if release.name == name:
            return release
    raise ConfigError(
        f"--release must be one of {', '.join(release.name for release in RELEASES)}; found {name!r}"
    )


def check_checkout(root: Path) -> None:
    """Raise ``ConfigError`` unless ``root`` is the root of a PRIME-RL checkout."""
    if not (root / LOSS_FILE).is_file():
        raise ConfigError(
            f"--prime-rl must be the root of a PRIME-RL checkout, which holds {LOSS_FILE}; found none under "
            f"{root}; clone https://github.com/PrimeIntellect-ai/prime-rl and give that folder"
        )


def identify(root: Path, name: str | None = None) -> Identity:
    """The release of the checkout at ``root``; ``name`` is what the user says that it is."""
    loss = _sha256(root / LOSS_FILE)
    commit = _commit(root)
    if name is not None:
        release = by_name(name)
        if commit is not None and commit != release.commit:
            raise ConfigError(
                f"{root} must be at {name}'s commit {release.commit}; found {commit}; drop --release"
            )
        return _checked(release, loss)
    if commit is not None:
        known = [release for release in RELEASES if release.commit == commit]
        return _checked(known[0], loss) if known else Identity(f"commit {commit[:12]}", None)
    project = _sha256(root / PYPROJECT) if (root / PYPROJECT).is_file() else None
    for release in RELEASES:
        if (release.loss_sha256, release.pyproject_sha256) == (loss, project):
            return Identity(release.name, release)
    return Identity(root.name, None)


def identify_installed(loss_file: Path, version: str | None) -> Identity:
    """The release of an installed ``prime_rl``, by its version and its loss module's digest."""
    loss = _sha256(loss_file)
    for release in RELEASES:
        if version is not None and release.name == f"v{version}":
            return _checked(release, loss)
    return Identity(f"installed {version or 'unknown'}", None)


def _checked(release: Release, loss_sha256: str) -> Identity:
    if release.loss_sha256 == loss_sha256:
        return Identity(release.name, release)
    return Identity(f"{release.name}, edited", None)


def _commit(root: Path) -> str | None:
    if not (root / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def python_path(root: Path) -> list[str]:
    """What to put on the import path for the checkout at ``root``, old or new layout."""
    folders = [root / "src", root / CONFIGS_SRC]
    return [str(folder) for folder in folders if folder.is_dir()]


def subprocess_environment(root: Path | None) -> dict[str, str]:
    """This process's environment, with ``root``'s packages first on the import path."""
    environment = dict(os.environ)
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    ours = [str(Path(__file__).resolve().parent.parent)]
    folders = ([] if root is None else python_path(root)) + ours + inherited
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment


def stand_in(release: Release) -> type[Any]:
    """A dataclass with the fields of ``release``'s ``LossInputs``, in a module with the names of its
    loss functions: what the contract reads, where PRIME-RL itself is absent."""
    module_name = f"{__name__}.stand_in.{release.name}"
    module = sys.modules.get(module_name)
    if module is None:
        module = ModuleType(module_name)
        for function in release.targets.values():
            setattr(module, function, None)
        module.LossInputs = _inputs_class(release.fields, module_name)  # type: ignore[attr-defined]
        sys.modules[module_name] = module
    inputs_class: type[Any] = module.LossInputs
    return inputs_class


def _inputs_class(fields: Iterable[str], module_name: str) -> type[Any]:
    made = dataclasses.make_dataclass("LossInputs", [(name, Any) for name in fields])
    made.__module__ = module_name
    return made
