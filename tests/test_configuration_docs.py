"""docs/configuration.md is what its generator writes, and names every key."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from composer_trl_host.prime_keys import HONOURED, HONOURED_TABLES, NOT_HONOURED

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "make_configuration.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_configuration", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(generator):
    assert generator.PAGE.read_text() == generator.page(), "run `python docs/make_configuration.py`"


def test_the_page_names_every_key_of_both_tables(generator):
    text = generator.page()
    keys = {key for row in HONOURED for key in row.keys} | {row.key for row in NOT_HONOURED}
    keys |= {table for tables in HONOURED_TABLES for table in tables}
    assert not [key for key in keys if f"`{key}`" not in text]


def test_every_row_of_a_table_has_as_many_cells_as_its_head(generator):
    width = None
    for line in generator.page().splitlines():
        cells = line.replace("\\|", "").count("|") if line.startswith("|") else None
        assert cells is None or width is None or cells == width, line
        width = cells


def test_what_the_issue_of_a_key_is_stands_in_its_row(generator):
    lines = {line.split("`")[1]: line for line in generator.page().splitlines() if line.startswith("| `")}
    assert "`num_generations`" in lines["orchestrator.group_size"]
    assert "orchestrator.rollouts_per_example" in lines["orchestrator.group_size"]
    assert "`true`, `false`" not in lines["orchestrator.token_batch_size"]
    assert "| number, at least 0, at most 1 | `0.5` |" in lines["jsd_beta"]
    assert "| required |" in lines["base_url"]
