"""What the host touches of TRL and transformers without their promise, and why. A failure names the version."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from packaging.version import Version
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

import composer_trl_host

from . import test_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

VERSIONS = f"TRL {trl.__version__}, transformers {transformers.__version__}"

METHODS = {
    "_compute_loss": (("model", "inputs"), "the composed loss replaces it"),
    "_generate_and_score_completions": (("inputs",), "the error sites are added to its batch"),
    "_prepare_inputs": (("generation_batch",), "the step's tokens are counted behind it"),
    "_generate_single_turn": (
        ("prompt_ids", "images", "multimodal_fields", "num_generations"),
        "it samples the turns of a rollout",
    ),
    "_get_train_sampler": ((), "recorded rows come in the host's own order"),
    "_save_checkpoint": (("model", "trial"), "the teacher and the guards are saved with it"),
    "_load_from_checkpoint": (
        ("resume_from_checkpoint",),
        "the teacher and the guards are read back with it",
    ),
    "create_scheduler": (("num_training_steps",), "PRIME-RL's schedules replace it"),
    "create_model_card": ((), "no card is written"),
    "training_step": (("model", "inputs", "num_items_in_batch"), "it counts _step"),
}
"""Methods of ``GRPOTrainer`` that are overridden or relied on: the arguments they get, and what for."""

ATTRIBUTES = {
    "_tokenizer": "its pad token fills teacher sequences",
    "_step": "counts micro-batches, of which a step's first one is told",
    "_buffered_inputs": "holds the micro-batches of a step, whose tokens are counted before it begins",
    "_metrics": "is what TRL logs the means of",
    "accelerator": "reduces and gathers",
    "eos_token_ids": "end a turn",
    "temperature": "channel 1's log-probs are taken at it",
    "model_wrapped": "a gradient that is not finite is looked for in it",
}
"""Attributes of a built ``GRPOTrainer``, and what for."""

CONSTRUCTOR = ("rollout_func", "reward_funcs", "processing_class", "peft_config", "train_dataset", "args")

SETTINGS = {
    "num_iterations": 1,
    "scale_rewards": "none",
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "use_liger_kernel": False,
    "top_entropy_quantile": 1.0,
    "steps_per_generation": 1,
    "generation_batch_size": 4,
}
"""Fields of ``GRPOConfig`` and the values that the regime check compares with."""


def broken(what: str, why: str) -> str:
    return f"{VERSIONS}: {what}; the host needs it: {why}"


@pytest.fixture
def trainer(model, tokenizer, tmp_path):
    return test_trainer.build(model, tokenizer, tmp_path, micro=2)


def assert_takes(function: Callable[..., Any], names: tuple[str, ...], why: str) -> None:
    """``function`` takes ``names`` by position, and nothing else without a default."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p for p in parameters if p.kind not in kinds]
    found = tuple(p.name for p in parameters)
    required = tuple(p.name for p in parameters[len(names) :] if p.default is p.empty)
    assert found[: len(names)] == names, broken(f"{function.__qualname__} takes {found}, not {names}", why)
    assert not required, broken(f"{function.__qualname__} needs {required} too", why)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_there_and_takes_what_it_gets(name):
    arguments, why = METHODS[name]
    assert callable(getattr(GRPOTrainer, name, None)), broken(f"no GRPOTrainer.{name}", why)
    assert_takes(getattr(GRPOTrainer, name), arguments, why)


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_the_constructor_takes_what_it_gets(name):
    assert name in inspect.signature(GRPOTrainer).parameters, broken(
        f"GRPOTrainer() takes no {name}", "a run is built with it"
    )


def test_a_built_trainer_has_the_attributes(trainer):
    for name, why in ATTRIBUTES.items():
        assert hasattr(trainer, name), broken(f"a GRPOTrainer has no {name}", why)
    assert set(trainer._metrics) >= {"train", "eval"}, broken(
        "_metrics has other modes", ATTRIBUTES["_metrics"]
    )
    assert trainer._step == 0, broken("_step does not start at 0", ATTRIBUTES["_step"])
    assert trainer._tokenizer.eos_token_id in trainer.eos_token_ids, broken(
        f"turns end at {trainer.eos_token_ids}", ATTRIBUTES["eos_token_ids"]
    )


def test_the_settings_mean_what_the_regime_check_compares_with(tmp_path):
    config = GRPOConfig(
        output_dir=str(tmp_path),
        scale_rewards=False,
        num_generations=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
    )
    for name, value in SETTINGS.items():
        assert getattr(config, name, None) == value, broken(
            f"GRPOConfig.{name} is {getattr(config, name, None)!r}, not {value!r}",
            "the regime is checked by it",
        )


def test_rollouts_become_the_batch_that_the_loss_reads(trainer):
    rows = [dict(row) for row in trainer.train_dataset.select([0, 0, 1, 1])]
    output = trainer._generate_and_score_completions(rows)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"):
        assert isinstance(output.get(name), torch.Tensor), broken(
            f"the generated batch has no {name}", "the loss is computed from it"
        )
    for number, rollout in enumerate(trainer._rollouts):
        size, mask = len(rollout.completion_ids), output["completion_mask"][number].bool()
        why = "rows are cut out of the padded batch"
        assert output["prompt_ids"][number][-len(rollout.prompt_ids) :].tolist() == rollout.prompt_ids, (
            broken("prompts are not padded on the left", why)
        )
        assert output["completion_ids"][number][:size].tolist() == rollout.completion_ids, broken(
            "completions are not padded on the right", why
        )
        assert int(mask.sum()) == size, broken("completion_mask is not the completion's tokens", why)
        assert output["tool_mask"][number][mask].tolist() == rollout.sampled, broken(
            "env_mask does not come back as tool_mask", "the environment's tokens are not trained"
        )


def test_rows_and_their_error_sites_are_shuffled_and_split_together():
    why = "error sites are a list beside tensors of rows"
    batch = {"ids": torch.arange(6), "sites": [[number] for number in range(6)], "none": None}
    shuffled = shuffle_sequence_dict(batch)
    assert [row for (row,) in shuffled["sites"]] == shuffled["ids"].tolist(), broken(
        "shuffle_sequence_dict parts lists from tensors", why
    )
    parts = split_tensor_dict(batch, 3)
    assert [part["sites"] for part in parts] == [[[0], [1]], [[2], [3]], [[4], [5]]], broken(
        "split_tensor_dict does not split lists", why
    )


def test_a_micro_batchs_loss_is_not_divided_again(trainer, monkeypatch):
    """The composed loss is divided by the whole step's tokens already."""
    weight = trainer.model.lm_head.weight
    monkeypatch.setattr(trainer, "_prepare_inputs", lambda inputs: inputs)
    monkeypatch.setattr(trainer, "_compute_loss", lambda model, inputs: weight.sum())
    trainer.current_gradient_accumulation_steps = 2
    trainer.training_step(trainer.model, {}, None)
    assert torch.equal(weight.grad, torch.ones_like(weight)), broken(
        f"a gradient of 1 becomes {float(weight.grad[0, 0])} with 2 micro-batches",
        "micro-batches' losses add up",
    )
    assert trainer._step == 1, broken("training_step does not count _step", ATTRIBUTES["_step"])


def test_what_is_put_into_metrics_is_logged_as_a_mean(trainer):
    trainer.model.train()
    trainer._metrics["train"]["loss/total"] += [1.0, 2.0]
    trainer.log({})
    assert trainer.state.log_history[-1]["loss/total"] == 1.5, broken(
        "_metrics are not logged as means", ATTRIBUTES["_metrics"]
    )
    assert not trainer._metrics["train"]["loss/total"], broken(
        "_metrics are not emptied", ATTRIBUTES["_metrics"]
    )


def test_keys_and_values_are_kept_per_layer_and_can_be_given_back(model):
    why = "the teacher reads behind the student's keys and values"
    ids = torch.arange(3, 8)[None]
    decoder = model.get_decoder()
    parameters = inspect.signature(decoder.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    assert name is not None, broken(f"the decoder takes {tuple(parameters)}", why)
    output = decoder(input_ids=ids, use_cache=True)
    layers = getattr(getattr(output, name), "layers", [])
    assert [type(layer) for layer in layers] == [DynamicLayer] * 2, broken("the cache has other layers", why)
    cache = DynamicCache()
    for number, layer in enumerate(layers):
        cache.update(layer.keys[:, :, :4], layer.values[:, :, :4], number)
    last = decoder(input_ids=ids[:, 4:], position_ids=torch.tensor([[4]]), use_cache=True, **{name: cache})
    torch.testing.assert_close(
        last.last_hidden_state[:, 0], output.last_hidden_state[:, 4], msg=lambda text: broken(text, why)
    )


def test_a_model_says_what_the_head_is_applied_by(model):
    why = "the output head is applied to hidden states in chunks"
    forward = inspect.signature(LlamaForCausalLM.forward).parameters
    for name in ("logits_to_keep", "position_ids", "use_cache"):
        assert name in forward, broken(f"a model's forward takes no {name}", why)
    assert model.get_output_embeddings() is model.lm_head, broken("no get_output_embeddings()", why)
    assert model.config.get_text_config() is model.config, broken("no get_text_config()", why)
    assert model.config._attn_implementation in ("sdpa", "eager"), broken(
        "no config._attn_implementation", why
    )
    assert any(
        isinstance(getattr(model, name, None), bool)
        for name in ("is_activation_checkpointing", "is_gradient_checkpointing")
    ), broken("a model does not say whether it checkpoints activations", why)


def test_every_private_name_of_the_trainer_is_in_the_tables(trainer):
    sources = [
        Path(composer_trl_host.__file__).with_name(f"{name}.py") for name in ("trainer", "offline", "run")
    ]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    touched = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    bodies = [item for node in nodes if isinstance(node, ast.ClassDef) for item in node.body]
    touched |= {item.name for item in bodies if isinstance(item, ast.FunctionDef)}
    own = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    } - set(ATTRIBUTES)
    theirs = set(dir(GRPOTrainer)) | set(vars(trainer)) - own
    private = {name for name in touched & theirs if name.startswith("_") and not name.startswith("__")}
    assert private <= {*METHODS, *ATTRIBUTES}


@pytest.mark.parametrize("name", ["trl", "transformers", "accelerate", "datasets", "peft", "renderers"])
def test_the_lowest_versions_that_are_tested_are_the_extras_bounds(name):
    root = Path(__file__).parents[2]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trl"]
    bounds = dict(item.split(">=") for item in extra)
    pins = (root / "constraints-lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in pins if not line.startswith("#"))
    assert Version(bounds[name]) == Version(pinned[name])
