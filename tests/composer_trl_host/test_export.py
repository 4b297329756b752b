"""`composer-rl export`: the folder holds the weights that were trained, and its TOML lines route to PRIME-RL."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_prime_plugin import cli
from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.contract import LossContract
from composer_prime_plugin.errors import ConfigError
from composer_prime_plugin.routing import choose_backend
from composer_prime_plugin.runfile import load_run
from composer_trl_host import export
from composer_trl_host.resolved import resolved_json
from composer_trl_host.settings import HostSettings

# What peft and transformers say to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

PRIME = LossContract(fields=frozenset({"trainer_logprobs", "advantages"}), version="0.8.0")
IDS = torch.tensor([[3, 41, 99, 7, 120, 5]])
TRAINING_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json")

TOML = """
max_steps = 4
output_dir = "{out}"
model.name = "{model}"

[trainer.loss]
type = "custom"
import_path = "composer_prime_plugin.loss_fn"

[trainer.loss.kwargs.sdpo]
weight = 0.5
warmup_steps = 3
weight_start = 0.1

[trainer.loss.kwargs.trl_host]
environment = "task.py:Echo"
"""


@pytest.fixture
def run_folder(tmp_path, model, tokenizer) -> Path:
    """A run folder as the host leaves it, but for its checkpoints."""
    for piece in (model, tokenizer):
        piece.save_pretrained(tmp_path / "model")
    (tmp_path / "rl.toml").write_text(TOML.format(out=tmp_path / "out", model=tmp_path / "model"))
    folder = tmp_path / "out"
    folder.mkdir()
    write_settings(folder, settings_of(tmp_path))
    return folder


def settings_of(folder: Path) -> HostSettings:
    return HostSettings.from_run(load_run(["@", str(folder / "rl.toml")]))


def write_settings(folder: Path, settings: HostSettings) -> None:
    (folder / "config.json").write_text(resolved_json(settings))


def checkpoint(folder: Path, step: int, model, tokenizer) -> Path:
    path = folder / f"checkpoint-{step}"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    for name in TRAINING_FILES:
        (path / name).write_text("{}")
    save_file({"x": torch.zeros(1)}, path / "teacher.safetensors")
    return path


def adapted(model, scale: float = 0.3):
    """The model with an adapter that does something."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=scale)
    return peft.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def flags(printed: str) -> list[str]:
    (line,) = [line for line in printed.splitlines() if line.startswith("or add to the command: ")]
    return shlex.split(line.removeprefix("or add to the command: "))


def test_the_newest_checkpoint_is_exported_without_the_trainers_files(run_folder, model, tokenizer, capsys):
    checkpoint(run_folder, 9, model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    checkpoint(run_folder, 10, model, tokenizer)
    (run_folder / "checkpoint-11").mkdir()
    assert cli.main(["export", str(run_folder)]) == 0
    exported = run_folder / "exported-10"
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {*TRAINING_FILES, "teacher.safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(logits(loaded.eval()), logits(model))
    text = AutoTokenizer.from_pretrained(exported).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert "hi" in text
    assert str(exported) in capsys.readouterr().out


def test_the_lines_it_prints_send_the_same_toml_to_prime_rl(run_folder, model, tokenizer, capsys):
    checkpoint(run_folder, 3, model, tokenizer)
    toml = ["@", str(run_folder.parent / "rl.toml")]
    assert choose_backend(load_run(toml).config, PRIME).backend == "trl-host"
    assert (
        cli.main(["export", str(run_folder / "checkpoint-3"), "--to", str(run_folder.parent / "my model")])
        == 0
    )
    printed = capsys.readouterr().out
    changed = load_run([*toml, *flags(printed)])
    assert choose_backend(changed.config, PRIME).backend == "prime-rl"
    assert changed.document["model"]["name"] == str(run_folder.parent / "my model")
    assert f'  [model] name = "{run_folder.parent}/my model"\n' in printed
    assert "  [trainer.loss.kwargs.sdpo] weight = 0.0\n" in printed


def test_a_run_without_channel_2_changes_its_model_alone(run_folder, model, tokenizer, capsys):
    off = dataclasses.replace(settings_of(run_folder.parent), config=ComposerConfig())
    write_settings(run_folder, off)
    checkpoint(run_folder, 3, model, tokenizer)
    assert cli.main(["export", str(run_folder)]) == 0
    assert [word for word in flags(capsys.readouterr().out) if word.startswith("--")] == ["--model.name"]


def test_an_adapter_is_merged_on_request(run_folder, model, tokenizer, capsys):
    peft = adapted(model)
    expected = logits(peft)
    checkpoint(run_folder, 5, peft, tokenizer)
    assert cli.main(["export", str(run_folder), "--merge-lora"]) == 0
    exported = run_folder / "exported-5"
    assert not (exported / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(exported).eval()
    # Merging adds in another order: the largest logit is about 4.
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    with peft.disable_adapter():
        assert not torch.allclose(logits(peft), expected, atol=1e-2)
    assert "[model] name" in capsys.readouterr().out


def test_without_the_request_the_adapter_is_exported_and_no_line_is_promised(
    run_folder, model, tokenizer, capsys
):
    peft = adapted(model)
    source = checkpoint(run_folder, 5, peft, tokenizer)
    assert cli.main(["export", str(run_folder)]) == 0
    exported = run_folder / "exported-5"
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (exported, source))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    printed = capsys.readouterr().out
    assert "add --merge-lora" in printed
    assert "[model] name =" not in printed


def test_an_adapter_that_the_run_began_with_is_merged_first(run_folder, model, tokenizer, capsys):
    first = adapted(model)
    first.save_pretrained(run_folder.parent / "first")
    begun = first.merge_and_unload()
    peft = adapted(begun, scale=0.2)
    expected = logits(peft)
    checkpoint(run_folder, 5, peft, tokenizer)
    settings = settings_of(run_folder.parent)
    config = ComposerConfig(trl_host={"adapter": "first"})
    write_settings(run_folder, dataclasses.replace(settings, config=config))
    assert cli.main(["export", str(run_folder)]) == 2
    assert "add --merge-lora" in capsys.readouterr().err
    assert cli.main(["export", str(run_folder), "--merge-lora"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(run_folder / "exported-5").eval()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    assert "remove trl_host.adapter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "takes one run folder or checkpoint; found nothing"),
        (["a", "b"], "found a b"),
        (["a", "--to"], "--to takes a folder"),
        (["a", "--too", "b"], "found a --too b"),
        (["nowhere"], "found none at nowhere"),
    ],
)
def test_wrong_words_are_one_sentence(tmp_path, monkeypatch, capsys, words, part):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", *words]) == 2
    assert part in capsys.readouterr().err


def test_both_spellings_of_to():
    assert (
        export.parse(["a", "--to", "b"])
        == export.parse(["--to=b", "a"])
        == export.Request(Path("a"), Path("b"))
    )


def test_what_cannot_be_exported_says_why(run_folder, model, tokenizer):
    with pytest.raises(ConfigError, match="holds none"):
        export.find_checkpoint(run_folder)
    path = checkpoint(run_folder, 2, model, tokenizer)
    found = export.find_checkpoint(run_folder)
    with pytest.raises(ConfigError, match="holds the whole model"):
        export.export(found, run_folder / "to", merge_lora=True)
    with pytest.raises(ConfigError, match="must be an empty or absent folder"):
        export.export(found, path, merge_lora=False)
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold model\*.safetensors"):
        export.export(found, run_folder / "to", merge_lora=False)
    (path / "trainer_state.json").unlink()
    with pytest.raises(ConfigError, match=r"no trainer_state\.json"):
        export.find_checkpoint(path)
    assert not (run_folder / "to").exists()


def test_an_adapter_without_its_run_folder_is_refused(run_folder, model, tokenizer):
    checkpoint(run_folder, 5, adapted(model), tokenizer)
    (run_folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="names the model it was trained on"):
        export.export(export.find_checkpoint(run_folder), run_folder / "to", merge_lora=True)


def test_an_export_that_fails_leaves_nothing(run_folder, model, tokenizer, monkeypatch):
    checkpoint(run_folder, 5, adapted(model), tokenizer)

    def broken(*words, **names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PeftModel, "from_pretrained", broken)
    with pytest.raises(ConfigError, match="No space left on device"):
        export.export(export.find_checkpoint(run_folder), run_folder / "to", merge_lora=True)
    assert sorted(path.name for path in run_folder.iterdir()) == ["checkpoint-5", "config.json"]
