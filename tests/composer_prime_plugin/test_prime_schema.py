"""PRIME-RL's own schema is asked in a process of its own: stand-ins for it, and the real one where there is one."""

from __future__ import annotations

import textwrap
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.prime_schema import (
    SchemaVerdict,
    check_with_prime,
    findings_of,
    prime_is_importable,
)
from composer_prime_plugin.runfile import load_run

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").rglob("rl.toml"))

STAND_IN = """
    from typing import Literal

    from pydantic import BaseModel, ConfigDict, model_validator

    print("a library that talks while it is imported")

    class Optim(BaseModel):
        lr: float = 1e-6

    class RLConfig(BaseModel):
        model_config = ConfigDict(extra="forbid")
        max_steps: int | None = None
        optim: Optim = Optim()
        source: str | None = None

        @model_validator(mode="after")
        def _source(self):
            if self.source is not None:
                raise ModuleNotFoundError(f"taskset {self.source!r} not found")
            return self
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a `prime_rl` of one's own in front of the path."""

    def put(code: str) -> None:
        (tmp_path / "prime_rl" / "configs").mkdir(parents=True)
        for folder in ("prime_rl", "prime_rl/configs"):
            (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / "prime_rl" / "configs" / "rl.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    return put


def test_what_it_accepts_comes_back_resolved(stand_in):
    stand_in(STAND_IN)
    assert check_with_prime({"max_steps": 3}) == SchemaVerdict(
        {"max_steps": 3, "optim": {"lr": 1e-6}, "source": None}
    )


def test_what_it_refuses_is_an_error_with_its_findings(stand_in):
    stand_in(STAND_IN)
    with pytest.raises(ConfigError) as caught:
        check_with_prime({"max_steps": 3, "optim": {"lr": "fast"}, "batch_size": 5})
    message = str(caught.value)
    assert message.startswith(
        "PRIME-RL's own RLConfig must accept the TOML; it says: optim.lr: Input should be"
    )
    assert "found 'fast'; batch_size: Extra inputs are not permitted, found 5" in message


@pytest.mark.parametrize(
    ("code", "document", "part"),
    [
        (STAND_IN, {"source": "wordle"}, "ModuleNotFoundError: taskset 'wordle' not found"),
        (
            "import a_package_that_is_not_there",
            {},
            "importing prime_rl.configs.rl failed with ModuleNotFoundError",
        ),
        ("import os; os._exit(9)", {}, "exit code 9"),
    ],
)
def test_what_it_cannot_check_is_no_refusal(stand_in, code, document, part):
    stand_in(code)
    verdict = check_with_prime(document)
    assert verdict.resolved is None
    assert part in verdict.unable


def test_findings_are_few_and_short():
    class Model(BaseModel):
        numbers: list[int]

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Model.model_validate({"numbers": ["x" * 5000] * 9})
    text = findings_of(caught.value)
    assert text.startswith("numbers.0: ")
    assert text.endswith("; and 6 more")
    assert len(text) < 1000


needs_prime = pytest.mark.skipif(
    not prime_is_importable(),
    reason="prime_rl is not importable; put a checkout's src and packages/prime-rl-configs/src on PYTHONPATH",
)


@needs_prime
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_prime_rl_accepts_every_example_and_what_a_dry_run_makes_of_it(path, tmp_path):
    from composer_trl_host.dry_run import merged_document
    from composer_trl_host.resolved import resolved_document
    from composer_trl_host.settings import HostSettings

    run = load_run(["@", str(path)])
    verdict = check_with_prime(merged_document(run))
    if verdict.unable is not None and "taskset" in verdict.unable:
        pytest.skip(f"the example's own package is not installed: {verdict.unable}")
    assert verdict.unable is None
    assert verdict.resolved["max_steps"] == run.document["max_steps"]
    host = HostSettings.from_run(run)
    verdict = check_with_prime(resolved_document(host))
    assert verdict.unable is None
    trainer, orchestrator = verdict.resolved["trainer"], verdict.resolved["orchestrator"]
    assert (trainer["optim"]["lr"], orchestrator["batch_size"]) == (host.lr, host.batch_size)


@needs_prime
def test_the_host_knows_every_key_of_prime_rls_schema():
    from prime_rl.configs.rl import RLConfig

    from composer_trl_host.prime_keys import HONOURED, NOT_HONOURED

    known = {key for row in HONOURED for key in row.keys} | {row.key for row in NOT_HONOURED}
    known |= {"trainer.loss.type", "trainer.loss.import_path", "trainer.loss.kwargs"}
    known |= {f"{table}.dir" for table in ("resume", "trainer.resume", "orchestrator.resume")}
    leaves = set(_leaves(RLConfig, "", ()))
    assert len(leaves) > 200
    unknown = {leaf for leaf in leaves if not any(leaf == key or leaf.startswith(f"{key}.") for key in known)}
    assert not {leaf for leaf in unknown if not leaf.startswith("trainer.loss.")}


def _leaves(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]):
    for name, field in model.model_fields.items():
        inner = [kind for kind in _models(field.annotation) if kind not in above]
        for kind in inner:
            yield from _leaves(kind, f"{prefix}{name}.", (*above, kind))
        if not inner:
            yield f"{prefix}{name}"


def _models(annotation) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models(inner)]
