"""Train the adapter that the live task starts from, ``warm_start/``.

The embedded model knows neither the form of a command nor what a hint is for. This teaches it
both, by supervised training on transcripts of the shell. It does not teach the mapping: every
transcript names its commands afresh, and neither the live task's commands nor the held-out names
are ever among them.

What can be known is learned as a fact: the name, and the command that a hint says, whatever
word that is. What cannot be known, a command without a hint, has a random synonym of the request
as its target. So the model tries sensible words, widely spread, and the live commands get a
chance of about one percent each. That chance matters: a Jensen-Shannon divergence hardly moves a
student that gives the teacher's word no probability. With targets drawn from all words the
chance is about a thousandth or less, and 20 steps of channel 2 teach nothing.

    python examples/shell/warm_start.py

writes the adapter in a few minutes on two cores, the same for the same seed and machine.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from environment import (
    EXAMPLES,
    HELDOUT_NAMES,
    LIVE_MAPPING,
    PROTECTED,
    TRAIN_NAMES,
    ShellEnvironment,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_trl_host.embedded import MODEL_NAME, embedded_model
from composer_trl_host.hints import ErrorContext, Message

IGNORED = -100
"""The label of a token that is context: it is read and not trained."""


@dataclass(frozen=True)
class Settings:
    """What the adapter is trained with."""

    steps: int = 120
    batch: int = 8
    """Transcripts a step."""
    learning_rate: float = 7e-4
    """At its highest: it rises over a tenth of the steps and falls to zero."""
    rank: int = 8
    """With all four attention projections this makes 1.8 MB in bfloat16."""
    hinted: float = 0.6
    """The share of transcripts whose recovery follows a hint."""
    literal: float = 0.5
    """The share of first turns that repeat the request's own word, the rest being synonyms."""
    other_errors: float = 0.15
    """The share of transcripts whose first turn is not an unknown command but a known one misused."""
    seed: int = 0


_SYNONYMS = {
    "remove": "delete erase discard drop scrap wipe clear purge dump toss clean destroy kill cut eject "
    "shred junk waste garbage trim",
    "show": "display open read print peek look see reveal present watch examine inspect glance screen "
    "expose render page preview cat scan",
    "list": "index browse catalog files tree folder path contents items table survey outline directory "
    "disk find search map tab desk ls",
    "create": "build new form touch start add generate produce write begin craft invent establish set "
    "open prepare construct compose mk raise",
}
SYNONYMS: dict[str, tuple[str, ...]] = {verb: tuple(words.split()) for verb, words in _SYNONYMS.items()}
"""Sensible guesses at what a command is called. The live task's commands are not among them."""


class Words:
    """Random command words and names."""

    def __init__(self, vocabulary: dict[str, int], source: random.Random) -> None:
        kept_out = {*LIVE_MAPPING, *LIVE_MAPPING.values(), *HELDOUT_NAMES, PROTECTED}
        kept_out.update(word for example in EXAMPLES for word in example)
        # A word that is one token both with a blank before it and without is a common one.
        self._words = sorted(
            word
            for word in vocabulary
            if word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 8
            if f"Ġ{word}" in vocabulary and word not in kept_out
        )
        self._kept_out = kept_out
        self._source = source

    def guess(self, verb: str) -> str:
        """A sensible word for a request's command."""
        return self._source.choice(SYNONYMS[verb])

    def command(self) -> str:
        """Any word, or a made-up one of two: what a hint names need not be known beforehand."""
        if self._source.random() < 0.6:
            return self._source.choice(self._words)
        made_up = "".join(self._source.choice(self._words)[:4] for _ in range(2))
        return self.command() if made_up in self._kept_out else made_up

    def mapping(self, guessable: bool) -> dict[str, str]:
        """A command for every request word, all different: guessable ones, or any."""
        commands: list[str] = []
        for verb in LIVE_MAPPING:
            command = ""
            while not command or command in commands:
                command = self.guess(verb) if guessable else self.command()
            commands.append(command)
        return dict(zip(LIVE_MAPPING, commands, strict=True))

    def name(self) -> str:
        """A training name, or any other word."""
        return self._source.choice(TRAIN_NAMES if self._source.random() < 0.5 else self._words)


@dataclass(frozen=True)
class Transcript:
    """A conversation and, for each of its assistant turns, whether it is to be learned."""

    messages: list[Message]
    learned: list[bool]


def transcript(words: Words, source: random.Random, settings: Settings) -> Transcript:
    """One episode of a shell with random commands: a failed turn, perhaps a hint, a recovery."""
    hinted = source.random() < settings.hinted
    environment = ShellEnvironment(words.mapping(guessable=not hinted or source.random() < 0.3))
    verb = source.choice(list(LIVE_MAPPING))
    name = words.name()
    others = source.sample([other for other in TRAIN_NAMES if other != name], 3)
    episode = environment.episode({"verb": verb, "name": name, "others": others})
    right = f"{environment.mapping[verb]} {name}"

    learn_first = source.random() < 1 - settings.other_errors
    if learn_first:
        first = f"{verb if source.random() < settings.literal else words.guess(verb)} {name}"
    else:
        # The other error kinds: hints are followed after them too, the mistakes are not learned.
        command = source.choice(list(environment.mapping.values()))
        first = source.choice([command, f"{command} {name} {others[0]}", f"{command} {words.name()}x"])
    messages: list[Message] = [*episode.prompt, {"role": "assistant", "content": first}]
    reply = episode.step(first)
    if reply.tool_error is None:
        return Transcript(messages, [learn_first])
    messages.extend(reply.messages)
    if hinted:
        hint = environment.hints.generate(
            ErrorContext(reply.tool_error, messages[-1]["content"], first, messages, reply.details)
        )
        assert hint is not None  # every error of the shell has one
        messages.append({"role": "user", "content": hint.text})
    messages.append({"role": "assistant", "content": right})
    return Transcript(messages, [learn_first, True])


def encode(tokenizer: Any, sample: Transcript) -> tuple[list[int], list[int]]:
    """Token ids and labels. Turns are cut where sampling cuts them, so ids match those of a rollout."""
    ids: list[int] = []
    labels: list[int] = []
    rendered = ""
    learned = iter(sample.learned)
    for index, message in enumerate(sample.messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            sample.messages[:index], tokenize=False, add_generation_prompt=True
        )
        context = tokenizer.encode(before.removeprefix(rendered), add_special_tokens=False)
        turn = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        ids += context + turn
        labels += [IGNORED] * len(context) + (turn if next(learned) else [IGNORED] * len(turn))
        rendered = before + message["content"] + tokenizer.eos_token
    return ids, labels


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest row."""
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows]),
    }


def train(settings: Settings, out: Path) -> None:
    """Train and write the adapter."""
    torch.manual_seed(settings.seed)
    source = random.Random(settings.seed)
    folder = embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, adapter)
    model.train()
    words = Words(tokenizer.get_vocab(), source)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)
    for step in range(settings.steps):
        warm = min(1.0, (step + 1) / (0.1 * settings.steps))
        optimizer.param_groups[0]["lr"] = settings.learning_rate * warm * (1 - step / settings.steps)
        rows = [encode(tokenizer, transcript(words, source, settings)) for _ in range(settings.batch)]
        loss = model(**collate(rows, tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1} of {settings.steps}, loss {loss.item():.3f}", flush=True)
    save(model, out)


def save(model: Any, out: Path) -> None:
    """Write the adapter in bfloat16, with a config that names the model and no place."""
    model.save_pretrained(out)
    weights = out / "adapter_model.safetensors"
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    config = out / "adapter_config.json"
    fields = json.loads(config.read_text())
    fields["base_model_name_or_path"] = MODEL_NAME
    fields["target_modules"] = sorted(fields["target_modules"])  # peft writes a set, in any order
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    (out / "README.md").unlink(missing_ok=True)  # peft's model card is an empty form


def main() -> None:
    """The command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description="Train the adapter that the shell task starts from.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "warm_start")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    chosen = parser.parse_args()
    train(Settings(steps=chosen.steps, seed=chosen.seed), chosen.out)


if __name__ == "__main__":
    main()
