"""What a run loads: the model, its tokenizer, an adapter, objects named in the TOML."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from composer_prime_plugin.errors import ConfigError, ModelError
from composer_trl_host.embedded import embedded_model
from composer_trl_host.settings import HostSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_object(spec: str, base_dir: Path, key: str) -> Any:
    """The object that ``spec`` names: ``file.py:Name`` relative to ``base_dir``, or ``package.module.Name``.

    ``key`` is the TOML key, for the message. Raises ``ConfigError``.
    """
    if ":" in spec and spec.partition(":")[0].endswith(".py"):
        path_text, _, name = spec.partition(":")
        path = (base_dir / path_text).resolve()
        if not path.is_file():
            raise ConfigError(
                f"{key} must name an existing file; found {path}; paths are relative to the TOML"
            )
        module_name = f"composer_rl_task_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
        module = sys.modules.get(module_name)
        if module is None:
            file_spec = importlib.util.spec_from_file_location(module_name, path)
            assert file_spec is not None
            assert file_spec.loader is not None
            module = importlib.util.module_from_spec(file_spec)
            sys.modules[module_name] = module
            try:
                file_spec.loader.exec_module(module)
            except Exception as error:
                del sys.modules[module_name]
                raise ConfigError(
                    f"{key} must name a file that imports; {path} failed with {error!r}"
                ) from error
    else:
        module_path, _, name = spec.replace(":", ".").rpartition(".")
        if not module_path or "/" in spec:
            raise ConfigError(
                f"{key} must be file.py:Name, relative to the TOML, or package.module.Name; found {spec!r}"
                + (
                    ""
                    if "/" in spec
                    else "; an environment of verifiers stands under [[orchestrator.train.source]]"
                )
            )
        try:
            module = importlib.import_module(module_path)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{key} must be file.py:Name or package.module.Name; {spec!r} failed with {error!r}"
            ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{key} must name an object of its module; {spec!r} has no {name!r}")
    return getattr(module, name)


def load_model(settings: HostSettings) -> tuple[Any, Any]:
    """``(model, tokenizer)``; the adapter of ``trl_host.adapter`` is merged in.

    Without ``[model] name`` it is the embedded model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = settings.model_name or str(embedded_model())
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise ModelError(
            f"model.name must be an existing folder or a hub name; found no folder {name}; set model.name"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the model must come with a tokenizer; {name} has none that loads ({_first_line(error)}); "
            "save the tokenizer beside the weights"
        ) from error
    kwargs: dict[str, Any] = {
        "dtype": DTYPES[settings.model_dtype],
        "trust_remote_code": settings.trust_remote_code,
    }
    if settings.attn_implementation is not None:
        kwargs["attn_implementation"] = settings.attn_implementation
    try:
        model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name must be a folder or hub name of a causal language model; {name} does not load: {_first_line(error)}"
        ) from error
    adapter = settings.config.trl_host.adapter
    if adapter is not None:
        model = _merge_adapter(model, (settings.base_dir / adapter).resolve())
    return model, tokenizer


def _merge_adapter(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"trl_host.adapter must name a LoRA adapter folder, relative to the TOML; {folder} has no adapter_config.json"
        )
    try:
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"trl_host.adapter must fit the model; {folder} does not: {_first_line(error)}; remove it or use its own model"
        ) from error
    # PEFT froze the base weights, and merging leaves them frozen.
    merged.requires_grad_(True)
    return merged


def lora_config(settings: HostSettings) -> Any:
    """The PEFT configuration of ``[trainer.model.lora]``, or None."""
    if settings.lora is None:
        return None
    from peft import LoraConfig

    lora = settings.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) if lora.target_modules is not None else "all-linear",
        task_type="CAUSAL_LM",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
