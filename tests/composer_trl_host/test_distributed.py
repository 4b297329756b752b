"""Two processes with gloo on this machine: the gradient and the figures of one, and nobody left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from . import distributed_worker, test_splits
from .distributed_worker import SPLITS

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

WORKER = Path(__file__).with_name("distributed_worker.py")
SECONDS = 480
"""For all cases of a launch, most of it for starting. The worker ends each case by itself."""


def launch(case: str, tmp_path: Path, port: int) -> dict:
    """Run the worker on two ranks and return what rank 0 wrote."""
    out = tmp_path / "result.pt"
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.composer_trl_host.distributed_worker",
            case,
            str(out),
        ]
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=WORKER.parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = []
    try:
        for process in processes:
            printed.append(process.communicate(timeout=SECONDS)[0])
    except subprocess.TimeoutExpired:
        pytest.fail(f"case {case!r} did not end within {SECONDS} s: a rank waits for another")
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    result: dict = torch.load(out, weights_only=True)
    return result


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@cache
def launched(backend: str) -> tuple[dict, str]:
    """Every case of ``SPLITS`` in one launch, since starting two interpreters costs more than the cases:
    the results of those that ended, and what the ranks printed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return launch(backend, Path(folder), free_port()), ""
        except (AssertionError, pytest.fail.Exception) as error:
            out = Path(folder) / "result.pt"
            return torch.load(out, weights_only=True) if out.exists() else {}, str(error)


@cache
def one_process(*case) -> tuple[torch.Tensor, dict[str, float]]:
    return test_splits.one_process(*case, (tuple(range(test_splits.ROWS)),))


# The first case of a backend waits for its launch.
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_two_ranks_give_the_gradient_and_the_figures_of_one_process(backend, case):
    results, printed = launched(backend)
    if case not in results:
        pytest.fail(
            f"{case!r} under {backend} did not end within {distributed_worker.CASE_SECONDS} s, or comes behind the case "
            f"that did not:\n{printed}"
        )
    split = SPLITS[case]
    wanted, sums = one_process(split.objective, split.normalization, split.adapter, split.with_sites)
    torch.testing.assert_close(
        results[case]["gradient"], wanted, rtol=test_splits.RTOL, atol=test_splits.ATOL
    )
    assert results[case]["figures"] == pytest.approx(sums, rel=test_splits.RTOL, abs=test_splits.ATOL)


def test_the_ranks_cuts_cover_every_row_once():
    for split in SPLITS.values():
        rows = sorted(row for rank in split.cut for part in rank for row in part)
        assert rows == list(range(test_splits.ROWS))
        assert len({len(rank) for rank in split.cut}) == 1


def test_the_trainer_runs_on_two_ranks_and_logs_global_sums(tmp_path):
    result = launch("trainer", tmp_path, free_port())
    logged = json.loads(result["log"])
    assert [row["step"] for row in logged] == [1, 2]
    for row in logged:
        # 4 rollouts a rank, all of whose first tries fail and are answered.
        assert row["sdpo/sites"] == 8
        assert row["sdpo/jsd/fake/password"] == pytest.approx(row["loss/sdpo_jsd"], rel=1e-9)
    assert result["equal_weights"]
