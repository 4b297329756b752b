"""``bench/ingest.py`` makes the same files each time, with everything in them that it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from composer_trl_host.traces import ReadReport, read_traces

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "ingest.py"


@pytest.fixture(scope="module")
def ingest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ingest", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_file_holds_what_the_reader_must_cope_with(ingest: ModuleType, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        ingest.generate(path, 0.6, session=200_000)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert 0.6e6 <= paths[0].stat().st_size < 0.9e6
    report = ReadReport()
    traces = list(read_traces(paths[0], report=report))
    main = [trace for trace in traces if "/" not in trace.id]
    assert len(main) >= 3
    assert len(traces) > len(main)
    assert sum(len(trace.sites()) for trace in main) > 5
    assert any(len(turn.tool_calls) == 2 for trace in main for turn in trace.turns)
    assert report.skipped["abandoned branch"] > 0
    assert report.skipped["record of type 'progress'"] > 0
    assert [len(numbers) for numbers in report.bad_lines.values()] == [1]
    assert not report.notes
    assert ingest.reading(paths[0])["traces"] == len(traces)


def test_the_table_is_printed(
    ingest: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speed and memory as such are not judged here: the machine may be busy."""
    monkeypatch.setattr(sys, "argv", ["ingest.py", "--megabytes", "0.1", "0.3", "--only", "reading"])
    monkeypatch.setattr(ingest, "SPEED", 0.0)
    assert ingest.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "MB/s" in lines[0]
    monkeypatch.setattr(ingest, "SPEED", 1e9)
    assert ingest.main() == 1
