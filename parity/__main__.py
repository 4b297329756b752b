"""``python -m parity``: one table of releases and families; exit 1 on any difference, 2 on bad arguments."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from composer_prime_plugin.errors import ComposerError, ConfigError
from parity import golden, live, mutants
from parity.cases import FAMILIES, MASKED_NON_FINITE
from parity.releases import LOSS_FILE, RELEASES, Identity, check_checkout, identify, identify_installed
from parity.suite import FamilyResult, Quantity, one_thread

HEADER = (
    "release",
    "PRIME-RL function",
    "objective",
    "family",
    "cases",
    "loss",
    "metrics",
    "gradient",
    "mode",
)
DELIBERATE_DIFFERENCE = (
    f"Deliberate difference ({MASKED_NON_FINITE}): NaN or infinity at a masked position makes PRIME-RL's "
    "loss NaN;\nours stays finite in value and gradient, equal to the sample with those positions set to 0."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m parity --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = _Parser(prog="python -m parity", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["compare", "record"], default="compare")
    parser.add_argument(
        "--prime-rl",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="root of a PRIME-RL checkout; may be given several times",
    )
    parser.add_argument("--release", help="which release the checkout is, where it has no .git")
    parser.add_argument("--out", type=Path, default=golden.FOLDER, help="record: folder of the golden files")
    parser.add_argument(
        "--golden", type=Path, default=golden.FOLDER, help="compare: folder of the golden files"
    )
    parser.add_argument("--summary", action="store_true", help="compare: one row per release and objective")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; returns the exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        checkouts = _checkouts(options.prime_rl, options.release)
        with one_thread():
            if options.action == "record":
                return _record(checkouts, options.out)
            return _compare(checkouts, options.golden, options.summary)
    except ComposerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) is gone; without this the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _checkouts(paths: Sequence[Path], release: str | None) -> list[tuple[Path | None, Identity]]:
    if release is not None and len(paths) != 1:
        raise ConfigError(f"--release names the checkout of one --prime-rl; found {len(paths)}")
    out: list[tuple[Path | None, Identity]] = []
    for path in paths:
        root = path.expanduser().resolve()
        check_checkout(root)
        out.append((root, identify(root, release)))
    installed = _installed()
    return out + ([(None, installed)] if installed is not None and not paths else [])


def _installed() -> Identity | None:
    spec = importlib.util.find_spec("prime_rl")
    for package in (spec.submodule_search_locations or []) if spec is not None else []:
        loss_file = Path(package).parent / LOSS_FILE.relative_to("src")
        if loss_file.is_file():
            root = Path(package).parent.parent
            if (root / LOSS_FILE).is_file():
                return identify(root)
            return identify_installed(loss_file, _installed_version())
    return None


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("prime-rl")
    except importlib.metadata.PackageNotFoundError:
        return None


def _record(checkouts: list[tuple[Path | None, Identity]], folder: Path) -> int:
    if not checkouts:
        raise ConfigError("record needs a PRIME-RL; found none installed and no --prime-rl PATH")
    for root, identity in checkouts:
        path = live.record_checkout(root, identity, folder)
        print(f"recorded {identity.label} into {path} ({path.stat().st_size / 1024:.0f} KiB)")
    return 0


def _compare(checkouts: list[tuple[Path | None, Identity]], folder: Path, summary: bool) -> int:
    by_release = {release.name: golden.load(release, folder) for release in RELEASES}
    rows: list[FamilyResult] = []
    alive = {identity.release.name for _, identity in checkouts if identity.release is not None}
    for root, identity in checkouts:
        rows += live.compare_checkout(root, identity)
    for name, recorded in by_release.items():
        rows += [] if name in alive else golden.run(recorded)
    order = {release.name: number for number, release in enumerate(RELEASES)}
    rows.sort(key=lambda row: order.get(row.release, len(order)))
    print(table(_summary(rows) if summary else rows))
    print()
    _print_machine(next(iter(by_release.values())), rows)
    print(DELIBERATE_DIFFERENCE)
    for row in rows:
        for message in row.messages:
            print(f"differs: {row.release}: {message}")
    survivors = _print_mutants(folder)
    differing = sum(row.differs for row in rows)
    unverified = sorted({row.release for row in rows if row.release.endswith(live.NOT_VERIFIED)})
    if unverified:
        print(f"compared as far as possible: {', '.join(unverified)}")
    if differing or survivors:
        print(f"FAILED: {differing} rows differ, {survivors} mutants survive")
        return 1
    print("passed: no row differs, no mutant survives")
    return 0


def _print_machine(recorded: golden.Golden, rows: list[FamilyResult]) -> None:
    here, there = golden.Machine.here(), recorded.machine
    print(
        f"This machine: torch {here.torch}, CPU capability {here.cpu_capability}, exp probe {here.exp_probe}."
    )
    if any(row.mode.endswith("in ulps") for row in rows):
        print(
            f"Golden vectors were recorded on torch {there.torch}, {there.cpu_capability}, exp probe "
            f"{there.exp_probe}: they are compared within the ulps of parity/tolerances.py."
        )


def _print_mutants(folder: Path) -> int:
    verdicts = mutants.verdicts(folder)
    survivors = [verdict for verdict in verdicts if not verdict.killed_by]
    print(f"mutants: {len(verdicts) - len(survivors)} of {len(verdicts)} rejected; by which families:")
    width = max((len(verdict.mutant) for verdict in verdicts), default=0)
    for verdict in verdicts:
        families = ", ".join(verdict.killed_by) or "NONE, it survives"
        families = "every family" if len(verdict.killed_by) == len(FAMILIES) else families
        print(f"  {verdict.mutant:<{width}}  {verdict.objective:<7}  {families}")
    return len(survivors)


def _summary(rows: list[FamilyResult]) -> list[FamilyResult]:
    out: dict[tuple[str, str, str], FamilyResult] = {}
    families: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row.release, row.objective, row.mode)
        total = out.setdefault(
            key, FamilyResult(row.release, row.objective, row.target, "", row.mode, error=row.error)
        )
        families[key] = families.get(key, 0) + 1
        total.count += row.count
        for name in ("loss", "metrics", "gradient"):
            getattr(total, name).differing += getattr(row, name).differing
    for key, total in out.items():
        total.family = f"all {families[key]}" if total.error is None else "-"
    return list(out.values())


def table(rows: Sequence[FamilyResult]) -> str:
    """Plainly aligned text."""
    lines = [HEADER, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (lines[0], rule, *lines[1:])
    )


def _cells(row: FamilyResult) -> tuple[str, ...]:
    def verdict(quantity: Quantity) -> str:
        if row.error is not None:
            return "-"
        return f"{quantity.differing} differ" if quantity.differing else "equal"

    quantities = (verdict(row.loss), verdict(row.metrics), verdict(row.gradient))
    mode = row.mode if row.error is None else f"not verified: {row.error}"
    return (row.release, row.target, row.objective, row.family, str(row.count), *quantities, mode)


if __name__ == "__main__":
    sys.exit(main())
