from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from composer_prime_plugin.errors import ConfigError, ModelError
from composer_trl_host.loading import _merge_adapter, load_object

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

LORA = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


def test_a_merged_adapter_is_in_the_weights_and_everything_trains(model, tmp_path):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    adapted = get_peft_model(model, LORA)
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = adapted(input_ids=ids).logits.detach()
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = type(model)(model.config).eval()
    fresh.load_state_dict(state)
    merged = _merge_adapter(fresh, tmp_path / "adapter")
    torch.testing.assert_close(merged(input_ids=ids).logits.detach(), wanted, rtol=1e-5, atol=1e-6)
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_an_adapter_of_another_model_is_named(model, tmp_path):
    get_peft_model(model, LORA).save_pretrained(tmp_path / "adapter")
    config = type(model.config)(**{**model.config.to_dict(), "hidden_size": 16, "intermediate_size": 8})
    other = type(model)(config)
    with pytest.raises(ModelError, match=r"trl_host\.adapter must fit the model"):
        _merge_adapter(other, tmp_path / "adapter")


def test_objects_are_loaded_from_files_and_modules(tmp_path):
    (tmp_path / "task.py").write_text("class Thing:\n    value = 3\n")
    assert load_object("task.py:Thing", tmp_path, "key").value == 3
    assert load_object("task.py:Thing", tmp_path, "key") is load_object("task.py:Thing", tmp_path, "key")
    assert load_object("pathlib.Path", tmp_path, "key") is Path
    assert load_object("pathlib:Path", tmp_path, "key") is Path


def test_a_file_that_does_not_import_is_named_with_its_error(tmp_path):
    (tmp_path / "bad.py").write_text("raise RuntimeError('no luck')\n")
    with pytest.raises(ConfigError, match=r"key must name a file that imports; .*no luck"):
        load_object("bad.py:Thing", tmp_path, "key")
