"""Two processes with gloo on this machine: the same gradient as one, and nobody left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composer_trl_host.compose import compose_loss

from .distributed_worker import ROWS as CASES
from .test_compose import config, gradient, make_batch

WORKER = Path(__file__).with_name("distributed_worker.py")
SECONDS = 120
"""Every case ends within seconds; one that waits for another rank is killed here."""


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


@pytest.fixture(scope="module")
def gradients(tmp_path_factory) -> dict:
    """Every case in one launch: starting two interpreters costs more than the cases."""
    return launch("gradients", tmp_path_factory.mktemp("gradients"), free_port())


@pytest.mark.parametrize("normalization", ["loss_tokens", "error_tokens"])
@pytest.mark.parametrize("case", CASES)
def test_ddp_gives_the_gradient_of_one_process(model, gradients, case, normalization):
    model = model.double()
    batch = make_batch(with_sites=case != "no site")
    if case == "a masked rank":
        batch["response_mask"][2] = False
    counts = {"num_loss_tokens": 12, "num_error_tokens": 7}
    wanted = gradient(
        model, compose_loss(model, {**batch, **counts}, config(normalization=normalization)).loss
    )
    torch.testing.assert_close(gradients[f"{normalization}:{case}"], wanted, rtol=1e-6, atol=1e-14)


def test_the_trainer_runs_on_two_ranks_and_logs_global_sums(tmp_path):
    result = launch("trainer", tmp_path, free_port())
    logged = json.loads(result["log"])
    assert [row["step"] for row in logged] == [1, 2]
    for row in logged:
        # 4 rollouts a rank, all of whose first tries fail and are answered.
        assert row["sdpo/sites"] == 8
        assert row["sdpo/jsd/fake/password"] == pytest.approx(row["loss/sdpo_jsd"], rel=1e-9)
    assert result["equal_weights"]
