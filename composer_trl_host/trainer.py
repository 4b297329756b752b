"""``ComposerGRPOTrainer``: TRL's GRPO trainer with the composed loss.

Inherited from TRL: generation, rewards, advantages, the data loader, logging, checkpoints, PEFT, vLLM
and the distributed set-up. Replaced: ``_compute_loss`` (the loss), and around it the counting of
tokens per optimizer step and the rollouts' error sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from composer_prime_plugin.config import ComposerConfig
from composer_prime_plugin.errors import ConfigError
from composer_trl_host._compat import load_root_adapter
from composer_trl_host.alignment import ErrorSite, build_site_batch
from composer_trl_host.compose import ComposedLoss, compose_loss
from composer_trl_host.guard_rules import StepFigures
from composer_trl_host.guards import FiniteGradients, GuardWatch, StopOnGuard, load_guards, save_guards
from composer_trl_host.non_finite import FiniteStop
from composer_trl_host.reading import FUNCTIONAL_NOISE
from composer_trl_host.rollout import Player, Rollout
from composer_trl_host.teachers import build_teacher, load_teacher, save_teacher

SITES_KEY = "error_sites"
COUNTS_KEY = "composer_counts"
KNOWN_KEY = "logprobs_known"


def make_dr_grpo_config(**overrides: Any) -> GRPOConfig:
    """A ``GRPOConfig`` in the Dr. GRPO regime (arXiv:2503.20783; arXiv:2603.24477, section 4.1).

    One pass per prompt (``num_iterations=1``), advantages without a standard deviation
    (``scale_rewards="none"``), no length factor (``loss_type="dr_grpo"``; the composed loss divides
    by the step's token count anyway), AdamW, no reference model (``beta=0``: the KL is the plugin's,
    against the sampling policy), no dropout. Overrides that break the regime raise ``ConfigError``.
    """
    settings: dict[str, Any] = {
        "num_iterations": 1,
        "scale_rewards": "none",
        "loss_type": "dr_grpo",
        "optim": "adamw_torch",
        "beta": 0.0,
        "disable_dropout": True,
        "remove_unused_columns": False,
        "report_to": "none",
        # Buffers are equal on all ranks. Broadcasting them would make every forward one that all ranks must
        # join, the teacher's of a rank with error sites too.
        "ddp_broadcast_buffers": False,
    }
    settings.update(overrides)
    config = GRPOConfig(**settings)
    _check_regime(config)
    return config


def _check_regime(args: GRPOConfig) -> None:
    """Refuse settings under which the composed loss would not be what it says."""
    # TRL stores scale_rewards=False as the string "none"; any other string scales.
    found = {
        "num_iterations": (args.num_iterations, 1, "a prompt is trained once"),
        "scale_rewards": (args.scale_rewards, "none", "advantages carry no standard deviation"),
        "beta": (args.beta, 0.0, "the KL term is policy.kl_tau's, against the sampling policy"),
        "multi_objective_aggregation": (args.multi_objective_aggregation, "sum_then_normalize", "as above"),
        "mask_truncated_completions": (
            args.mask_truncated_completions,
            False,
            "a cut-off turn is trained too",
        ),
        "use_liger_kernel": (args.use_liger_kernel, False, "the composed loss reads logits itself"),
        "top_entropy_quantile": (args.top_entropy_quantile, 1.0, "every sampled token is trained"),
        "remove_unused_columns": (
            args.remove_unused_columns,
            False,
            "the environment reads the row's columns",
        ),
    }
    for name, (value, wanted, reason) in found.items():
        if value != wanted:
            raise ConfigError(
                f"{name} must be {wanted!r}, since {reason}; found {value!r}; use make_dr_grpo_config()"
            )
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ConfigError(
            "steps_per_generation must be a multiple of gradient_accumulation_steps, so that a step's tokens are "
            f"known when it begins; found {args.steps_per_generation} and {args.gradient_accumulation_steps}"
        )


class ComposerGRPOTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` whose loss is ``policy + sdpo_weight(step) * sdpo``.

    ``composer_config`` is the table ``[trainer.loss.kwargs]``. ``runner`` plays live rollouts; give
    it and ``train_dataset`` rows of its environment with a ``prompt`` column. Differs from the base
    class in ``_compute_loss``; ``_generate_and_score_completions`` and ``_prepare_inputs`` call the
    base class and add the error sites and the step's token counts. Gradients do not depend on how a
    step is cut into micro-batches. ``lr_factor(step)`` replaces the base class's schedule where given.
    """

    plays_live = True

    def __init__(
        self,
        *args: Any,
        composer_config: ComposerConfig,
        runner: Player | None = None,
        lr_factor: Callable[[int], float] | None = None,
        **kwargs: Any,
    ) -> None:
        self.composer_config = composer_config
        self.runner = runner
        self._lr_factor = lr_factor
        self._rows: list[dict[str, Any]] = []
        self._rollouts: list[Rollout] = []
        self._window: list[ComposedLoss] = []
        self._window_batches: list[dict[str, Any]] = []
        self._advantage_sums: list[Tensor] = []
        config = kwargs.get("args")
        if config is None:
            raise ConfigError("args must be given; found none; use make_dr_grpo_config(...)")
        _check_regime(config)
        refuse_unbuilt(composer_config, self.plays_live)
        if runner is not None:
            kwargs["rollout_func"] = self._roll_out
            kwargs.setdefault("reward_funcs", [episode_reward])
        super().__init__(*args, **kwargs)
        silence_functional_dropout(self.model)
        self.add_callback(FiniteGradients(self._stop_for_gradient))
        self.teacher = build_teacher(self.model, composer_config.sdpo)
        self.add_callback(_AfterStep(self))
        self.guards = GuardWatch(composer_config)
        if not self.accelerator.is_main_process:
            self.guards.say = lambda line: None
        self.add_callback(StopOnGuard(self.guards))
        self._finite = FiniteStop(
            self.accelerator, Path(self.args.output_dir), composer_config, self._compose
        )

    # Rollouts

    def _roll_out(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's rollout function. TRL hands over prompts alone; the rows were kept just before."""
        assert self.runner is not None
        if len(prompts) != len(self._rows):
            raise RuntimeError(
                f"one row per prompt must be known; found {len(self._rows)} rows, {len(prompts)} prompts"
            )
        self._rollouts = self.runner.play(self._rows, self.sample_turns)
        logprobs = [rollout.logprobs for rollout in self._rollouts]
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in self._rollouts],
            "completion_ids": [rollout.completion_ids for rollout in self._rollouts],
            "logprobs": None if any(values is None for values in logprobs) else logprobs,
            "env_mask": [rollout.sampled for rollout in self._rollouts],
            "episode_reward": [rollout.reward for rollout in self._rollouts],
        }

    def sample_turns(self, contexts: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        """One sampled turn per context, by TRL's generation with the live weights."""
        try:
            turns, logprobs = self._generate_single_turn(contexts, None, {}, 1)
        except RuntimeError:
            self.blame_sampling(contexts)
            raise
        return turns, logprobs

    def blame_sampling(self, contexts: Sequence[Sequence[int]]) -> None:
        """Raise ``NonFiniteError`` where sampling from ``contexts`` failed because logits are not finite."""
        self._finite.sampling(self.model, contexts, self.state.global_step + 1)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows, self._rollouts = inputs, []
        output = super()._generate_and_score_completions(inputs)
        output[SITES_KEY] = [rollout.sites for rollout in self._rollouts] or [[] for _ in inputs]
        if self.model.training and self._rollouts:
            self._log_rollouts()
        return output

    def _log_rollouts(self) -> None:
        failed = [float(rollout.errors > 0) for rollout in self._rollouts]
        solved = [float(rollout.solved) for rollout in self._rollouts]
        recovered = sum(f * s for f, s in zip(failed, solved, strict=True))
        first = sum(s for f, s in zip(failed, solved, strict=True) if not f)
        totals = torch.tensor(
            [sum(failed), recovered, first, float(len(failed))], device=self.accelerator.device
        )
        failures, recoveries, firsts, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        metrics = self._metrics["train"]
        metrics["rollout/first_try"].append(firsts / count)
        if failures:
            metrics["rollout/recovery"].append(recoveries / failures)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """PRIME-RL's schedule instead of transformers' where one is given."""
        if self._lr_factor is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if getattr(self, "lr_scheduler", None) is None:
            self.lr_scheduler: Any = LambdaLR(
                self.optimizer if optimizer is None else optimizer, self._lr_factor
            )
        return self.lr_scheduler

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL's card names a hub model that a run here does not have."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            save_teacher(self.teacher, folder)
            save_guards(self.guards, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_root_adapter(self.model, Path(resume_from_checkpoint))
        load_teacher(self.teacher, Path(resume_from_checkpoint))
        load_guards(self.guards, Path(resume_from_checkpoint))

    # Counting

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            inputs[COUNTS_KEY] = self._global_counts([inputs])
            return inputs
        steps = self.current_gradient_accumulation_steps
        index = self._step % self.args.steps_per_generation
        if self._window_begins():
            window = self._buffered_inputs[index : index + steps]
            self._window_counts = self._global_counts(window)
            self._window_batches = window
        inputs[COUNTS_KEY] = self._window_counts
        return inputs

    def _window_begins(self) -> bool:
        return self._step % self.args.gradient_accumulation_steps == 0

    def _window_ends(self) -> bool:
        return bool(self.accelerator.sync_gradients)

    def _global_counts(self, batches: list[dict[str, Any]]) -> tuple[int, int]:
        """Trained tokens and error tokens of a whole optimizer step, over all ranks."""
        tokens = sum(int(_loss_mask(batch).sum()) for batch in batches)
        errors = sum(
            site.stop - site.start for batch in batches for sites in batch[SITES_KEY] for site in sites
        )
        counts = torch.tensor([tokens, errors], dtype=torch.float64, device=self.accelerator.device)
        counts = self.accelerator.reduce(counts, reduction="sum")
        return int(counts[0]), int(counts[1])

    # Loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        batch = self._batch(inputs)
        result = self._finite.loss(model, batch)
        # The loss with its graph would keep the teacher's hidden states alive until the window ends.
        self._window.append(replace(result, loss=result.loss.detach()))
        self._advantage_sums.append(_advantage_sum(batch))
        if not training or self._window_ends():
            self._flush_metrics("train" if training else "eval", *inputs[COUNTS_KEY])
        # Ranks' gradients are averaged behind this; the counts are sums over ranks.
        return result.loss * self.accelerator.num_processes if training else result.loss

    def _compose(self, model: Any, batch: Mapping[str, Any], config: ComposerConfig) -> ComposedLoss:
        return compose_loss(model, batch, config, teacher=self.teacher, autocast=self.accelerator.autocast)

    def _stop_for_gradient(self, found: str) -> None:
        batches = [self._batch(inputs) for inputs in self._window_batches]
        self._finite.gradient(self.model_wrapped, batches, found, self.state.global_step + 1)

    def _batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prompt_ids, completion_ids = inputs["prompt_ids"], inputs["completion_ids"]
        prompt_mask, completion_mask = inputs["prompt_mask"], inputs["completion_mask"]
        input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)
        no_prompt = torch.zeros_like(prompt_mask, dtype=torch.bool)
        inference = inputs.get("sampling_per_token_logps")
        if inference is None:
            inference = inputs.get("old_per_token_logps")
        if inference is not None:
            inference = _for_row(inference, prompt_ids)
        loss_tokens, error_tokens = inputs[COUNTS_KEY]
        batch: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "completion_mask": torch.cat([no_prompt, completion_mask.bool()], dim=1),
            "response_mask": torch.cat([no_prompt, _loss_mask(inputs)], dim=1),
            "advantages": _for_row(inputs["advantages"], prompt_ids),
            "inference_logprobs": inference,
            "logprobs_known": inputs.get(KNOWN_KEY),
            "num_loss_tokens": loss_tokens,
            "num_error_tokens": error_tokens,
            "step": self.state.global_step,
            "temperature": self.temperature,
        }
        sites: list[list[ErrorSite]] = inputs[SITES_KEY]
        if self.composer_config.sdpo.active and any(sites):
            batch.update(self._site_batch(input_ids, attention_mask, sites))
        return batch

    def _site_batch(
        self, input_ids: Tensor, attention_mask: Tensor, sites: list[list[ErrorSite]]
    ) -> Mapping[str, Any]:
        # Prompts are padded on the left and completions on the right, so a row's real tokens are
        # one run and its offset is the padding before it.
        mask = attention_mask.bool()
        rows = [input_ids[row][mask[row]].tolist() for row in range(input_ids.size(0))]
        offsets = mask.int().argmax(dim=1).tolist()
        scope = self.composer_config.sdpo.hint_scope
        batch = build_site_batch(rows, sites, offsets, self._tokenizer.pad_token_id, scope).as_batch()
        return {
            key: value.to(input_ids.device) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    # Metrics

    def _flush_metrics(self, mode: str, loss_tokens: int, error_tokens: int) -> None:
        """Reduce the step's sums over micro-batches and ranks and hand them to TRL's buffers, once."""
        window, self._window = self._window, []
        advantages, self._advantage_sums = self._advantage_sums, []
        sources = _merge_sources(window)
        names = sorted({name for part in gather_object([sorted(sources)]) for name in part})
        sums = [
            sum(float(part.policy_sum) for part in window),
            sum(float(part.policy_kl_sum) for part in window),
            sum(float(part.sdpo_sum) for part in window),
            float(sum(part.sdpo_tokens for part in window)),
            float(sum(part.sdpo_sites for part in window)),
            float(sum(part.sdpo_clipped for part in window)),
            float(sum(part.sites_left_out for part in window)),
            sum(float(part) for part in advantages),
        ]
        for name in names:
            sums.extend(sources.get(name, (0.0, 0)))
        reduced = torch.tensor(sums, dtype=torch.float64, device=self.accelerator.device)
        policy, kl, sdpo, tokens, sites, clipped, left_out, advantage, *rest = self.accelerator.reduce(
            reduced, reduction="sum"
        ).tolist()
        rl_tokens = max(loss_tokens, 1)
        per_error = max(tokens, 1.0)
        by_errors = self.composer_config.sdpo.normalization == "error_tokens"
        weight = window[-1].weight
        weighted = weight * sdpo / (max(error_tokens, 1) if by_errors else rl_tokens)
        metrics = {
            "loss/policy": policy / rl_tokens,
            "loss/policy_kl": kl / rl_tokens,
            "loss/sdpo_jsd": sdpo / per_error,
            "loss/sdpo_weighted": weighted,
            "loss/total": policy / rl_tokens + weighted,
            "sdpo/weight": weight,
            "sdpo/error_tokens": tokens,
            "sdpo/sites": sites,
            "sdpo/clip_fraction": clipped / per_error,
        }
        if left_out:
            metrics["sdpo/sites_left_out"] = left_out
        for name, total, count in zip(names, rest[::2], rest[1::2], strict=True):
            metrics[f"sdpo/jsd/{name}"] = total / max(count, 1.0)
        metrics.update(self._policy_metrics(window))
        if mode == "train":
            figures = StepFigures(
                step=self.state.global_step + 1,
                weight=weight,
                policy=policy / rl_tokens,
                advantage=advantage / rl_tokens,
                weighted=weighted,
                divergence=sdpo,
                tokens=tokens,
                clipped=clipped,
                sites=sites,
                sources=dict(zip(names, zip(rest[::2], rest[1::2], strict=True), strict=True)),
            )
            metrics.update(self.guards.update(figures))
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _policy_metrics(self, window: list[ComposedLoss]) -> dict[str, float]:
        """The objective's own metrics as a mean over samples, as PRIME-RL logs them."""
        rows = [row for part in window for row in part.policy_metrics]
        names = sorted(rows[0])
        sums = torch.stack([torch.stack([row[name].double() for row in rows]).sum() for name in names])
        sums = torch.cat([sums, sums.new_tensor([float(len(rows))])])
        *values, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        return {f"policy/{name}": value / count for name, value in zip(names, values, strict=True)}


class _AfterStep(TrainerCallback):
    """Moves the teacher's average after every optimizer step."""

    def __init__(self, trainer: ComposerGRPOTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.trainer.teacher is not None:
            self.trainer.teacher.after_step(self.trainer.model)


def episode_reward(episode_reward: list[float], **_: Any) -> list[float]:
    """TRL reward function: the reward that the environment gave to each rollout."""
    return episode_reward


def _loss_mask(batch: Mapping[str, Any]) -> Tensor:
    mask = batch["completion_mask"].bool()
    tool_mask = batch.get("tool_mask")
    return mask if tool_mask is None else mask & tool_mask.bool()


def _advantage_sum(batch: Mapping[str, Any]) -> Tensor:
    """``|advantage|`` summed over the trained tokens."""
    mask, advantages = batch["response_mask"], batch["advantages"].abs()
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(mask.shape)
    return torch.where(mask, advantages, torch.zeros_like(advantages)).sum()


def _for_row(values: Tensor, prompt_ids: Tensor) -> Tensor:
    """Values per completion token as values per token of the row; values per row as they are."""
    if values.dim() == 1:
        return values
    return torch.cat([torch.zeros_like(prompt_ids, dtype=values.dtype), values], dim=1)


def _merge_sources(window: list[ComposedLoss]) -> dict[str, tuple[float, int]]:
    merged: dict[str, tuple[float, int]] = {}
    for part in window:
        for name, (total, count) in part.sources.items():
            before = merged.get(name, (0.0, 0))
            merged[name] = (before[0] + total, before[1] + count)
    return merged


def silence_functional_dropout(model: Any) -> None:
    """Zero the noise that no dropout module stands for and that TRL's ``disable_dropout`` does not reach."""
    for module in model.modules():
        for name in FUNCTIONAL_NOISE:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def refuse_unbuilt(config: ComposerConfig, plays_live: bool = True) -> None:
    """Raise ``ConfigError`` for options of the schema that this host does not have."""
    if config.replay.weight != 0.0:
        raise ConfigError(
            f"replay.weight must be 0.0: this version of the host has nothing else; found {config.replay.weight!r}"
        )
    if plays_live and config.sdpo.student_context == "placeholder":
        raise ConfigError(
            "sdpo.student_context = 'placeholder' must come with trl_host.traces: a live rollout is trained as it was "
            "sampled; set student_context = 'raw'"
        )
