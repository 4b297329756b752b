"""``composer-rl export``: the model of a run on the host as a folder that PRIME-RL can start from.

A checkpoint of a whole model is copied, file by file. That of a LoRA run is an adapter, which is copied too, or
merged into the model it was trained on.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError, ModelError
from composer_trl_host.resolved import RESOLVED_FILE, read_resolved
from composer_trl_host.settings import HostSettings

USAGE = "composer-rl export outputs/run [--to FOLDER] [--merge-lora]"
ADAPTER_CONFIG = "adapter_config.json"
_MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".py"})
_TRAINING_FILES = frozenset({"trainer_state.json", "teacher.safetensors"})
"""Of those suffixes, but the trainer's."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of the host. ``settings``: of its run, None where it lies in no run folder."""

    folder: Path
    step: int
    settings: HostSettings | None

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class Request:
    """The command line."""

    source: Path
    to: Path | None = None
    merge_lora: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run ``composer-rl export`` with ``arguments``. Returns the exit code."""
    request = parse(arguments)
    checkpoint = find_checkpoint(request.source)
    folder = request.to or checkpoint.folder.with_name(f"exported-{checkpoint.step}")
    export(checkpoint, folder, request.merge_lora)
    merged = " with its adapter merged" if checkpoint.is_adapter and request.merge_lora else ""
    print(f"exported: {checkpoint.folder}{merged} to {folder}")
    for line in what_to_change(checkpoint, folder, request.merge_lora):
        print(line)
    return 0


def parse(arguments: Sequence[str]) -> Request:
    """The request that ``arguments`` are. Raises ``ConfigError``."""
    words = list(arguments)
    merge_lora = "--merge-lora" in words
    words = [word for word in words if word != "--merge-lora"]
    to = None
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--to":
            following = [value] if equals else words[position + 1 : position + 2]
            if not following or not following[0]:
                raise ConfigError(f"--to takes a folder, and none was given; write {USAGE}")
            to = Path(following[0])
            del words[position : position + (1 if equals else 2)]
            break
    if len(words) != 1 or words[0].startswith("-"):
        found = shlex.join(words) if words else "nothing"
        raise ConfigError(f"export takes one run folder or checkpoint; found {found}; write {USAGE}")
    return Request(Path(words[0]), to, merge_lora)


def find_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint ``source``, or the newest one of the run folder ``source``. Raises ``ConfigError``."""
    if not source.is_dir():
        raise ConfigError(f"export takes an existing folder; found none at {source}; write {USAGE}")
    if source.resolve().name.startswith("checkpoint-"):
        folder = source.resolve()
    else:
        found = {
            int(path.name.rpartition("-")[2]): path for path in source.glob("checkpoint-*") if _complete(path)
        }
        if not found:
            raise ConfigError(
                f"export needs a complete checkpoint; {source} holds none (checkpoint-N with a trainer_state.json); name "
                "the run folder that the run printed"
            )
        folder = found[max(found)].resolve()
    if not _complete(folder):
        raise ConfigError(
            f"export needs a complete checkpoint; {folder} has no step in its name or no trainer_state.json; name another one"
        )
    resolved = folder.parent / RESOLVED_FILE
    settings = read_resolved(resolved) if resolved.is_file() else None
    return Checkpoint(folder, int(folder.name.rpartition("-")[2]), settings)


def _complete(folder: Path) -> bool:
    return folder.name.rpartition("-")[2].isdigit() and (folder / "trainer_state.json").is_file()


def export(checkpoint: Checkpoint, folder: Path, merge_lora: bool) -> None:
    """Write the model into ``folder``, which appears only when it is complete."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--to must be an empty or absent folder; {folder} is not; name another one or remove it"
        )
    if merge_lora and not checkpoint.is_adapter:
        raise ConfigError(
            f"--merge-lora is for checkpoints of a LoRA run; {checkpoint.folder} holds the whole model; leave it out"
        )
    if not checkpoint.is_adapter and not list(checkpoint.folder.glob("model*.safetensors")):
        raise ModelError(
            f"a checkpoint must hold model*.safetensors or {ADAPTER_CONFIG} to be exported; {checkpoint.folder} holds "
            "neither; sharded checkpoints are put together by the library that wrote them"
        )
    _refuse_a_lost_base(checkpoint, merge_lora)
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        if merge_lora:
            _merge(checkpoint, scratch)
        else:
            _copy(checkpoint.folder, scratch)
        if folder.is_dir():
            folder.rmdir()
        scratch.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"--to must be a folder that can be written; {folder} fails with {error.strerror or error}; name another one"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_a_lost_base(checkpoint: Checkpoint, merge_lora: bool) -> None:
    """An adapter is of use only with the weights that it was trained on."""
    if not checkpoint.is_adapter:
        return
    if checkpoint.settings is None:
        raise ConfigError(
            f"an adapter is exported from its run folder, whose {RESOLVED_FILE} names the model it was trained on; "
            f"{checkpoint.folder.parent} has none; put the checkpoint back there"
        )
    start = checkpoint.settings.config.trl_host.adapter
    if start is not None and not merge_lora:
        raise ConfigError(
            f"this adapter was trained on a model into which trl_host.adapter = {start!r} had been merged, so it fits no "
            "model that can be named; add --merge-lora"
        )


def _copy(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _MODEL_SUFFIXES and path.name not in _TRAINING_FILES:
            shutil.copy2(path, folder / path.name)


def _merge(checkpoint: Checkpoint, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from composer_trl_host.loading import load_model

    assert checkpoint.settings is not None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, _ = load_model(checkpoint.settings)
    PeftModel.from_pretrained(model, str(checkpoint.folder)).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(
        checkpoint.folder, trust_remote_code=checkpoint.settings.trust_remote_code
    ).save_pretrained(folder)


def what_to_change(checkpoint: Checkpoint, folder: Path, merge_lora: bool) -> list[str]:
    """The lines of the TOML that PRIME-RL needs changed, and the same as overrides."""
    if checkpoint.is_adapter and not merge_lora:
        base = json.loads((checkpoint.folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))[
            "base_model_name_or_path"
        ]
        return [
            f"this is the adapter alone, for {base}; PRIME-RL's [model] name takes a whole model: add --merge-lora"
        ]
    config = ComposerConfig() if checkpoint.settings is None else checkpoint.settings.config
    changes = {"model.name": (json.dumps(str(folder.resolve())), str(folder.resolve()))}
    if config.sdpo.active or checkpoint.settings is None:
        changes["trainer.loss.kwargs.sdpo.weight"] = ("0.0", "0.0")
    if config.sdpo.warmup_steps > 0 and config.sdpo.weight_start > 0:
        changes["trainer.loss.kwargs.sdpo.weight_start"] = ("0.0", "0.0")
    lines = ["to go on from it in PRIME-RL, set in the TOML:"]
    for key, (toml, _) in changes.items():
        table, _, name = key.rpartition(".")
        lines.append(f"  [{table}] {name} = {toml}")
    overrides = " ".join(
        f"--{key.replace('_', '-')} {shlex.quote(word)}" for key, (_, word) in changes.items()
    )
    lines.append(f"or add to the command: {overrides}")
    lines.append(
        "a new output_dir and no [resume]: the optimizer starts anew. PRIME-RL takes its tasks from [orchestrator.train.source]"
    )
    if config.trl_host.adapter is not None:
        lines.append("for a run on the TRL host also remove trl_host.adapter: it is merged into this model")
    return lines
