"""What a training step takes, from a model's sizes and a batch's shape: time with SDPO over without, and memory.

    python bench/cost.py FOLDER_OR_NAME [--rows 4 --prompt 256 --completion 512 --recovery 128 --hint 48 --sites 1]
                         [--dtype float32] [--optimizer adamw] [--teacher live] [--lora-rank 0] [--checkpointing]
                         [--rate 0.22] [--entry-ns 32]

Reads a model's ``config.json`` and loads nothing. Without a model: the embedded one's sizes. ``--rate`` is what the
machine does, in 1e12 operations a second, on a step with ``sdpo.weight = 0``; ``--entry-ns`` its time for one vocabulary
entry of the divergence with its gradient. Both are of the two CPU cores that docs/performance.md was measured on; a step of
one's own gives one's own. Generation is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import GENERATION_PROMPT, Shape

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_ENTRIES = 2**23
"""Logits held at once, as in ``composer_trl_host.head``."""
OPTIMIZER_FLOATS = {"adamw": 2, "sgd": 1}
"""Float32 values that the optimizer keeps per trained weight (SGD: its momentum)."""
RATE = 0.22
ENTRY_NS = 32.0


@dataclass(frozen=True)
class Sizes:
    """A decoder of the Llama family."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    key_value: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """From a transformers ``config.json``."""
        config = config.get("text_config", config)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            query=config["num_attention_heads"] * head_dim,
            key_value=groups * head_dim,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layer(self) -> int:
        """Weights of one layer's products."""
        attention = self.hidden * (2 * self.query + 2 * self.key_value)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def body(self) -> int:
        return self.layers * self.layer

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        return self.body + self.head * (1 if self.tied else 2) + norms


EMBEDDED = Sizes(layers=30, hidden=576, intermediate=1536, query=576, key_value=192, vocab=49152, tied=True)
"""SmolLM2-135M-Instruct."""


@dataclass(frozen=True)
class Set:
    """What of the TOML changes the cost. ``teacher``: "live", or a copy of the weights ("initial", "ema").
    ``shared_prefix``: the live teacher reads behind the student's keys and values; not with checkpointing."""

    dtype: str = "float32"
    optimizer: str = "adamw"
    teacher: str = "live"
    lora_rank: int = 0
    checkpointing: bool = False

    @property
    def shared_prefix(self) -> bool:
        return self.teacher == "live" and not self.checkpointing


@dataclass(frozen=True)
class Seconds:
    """Of one step's forward and backward."""

    off: float
    on: float

    @property
    def ratio(self) -> float:
        return self.on / self.off


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step, by what holds them."""

    weights: float
    gradients: float
    optimizer: float
    teacher: float
    activations: float
    logits: float
    sdpo: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def added(self) -> float:
        """By forward and backward alone: without weights, optimizer and a teacher's copy."""
        return self.gradients + self.activations + self.logits + self.sdpo


def operations_off(sizes: Sizes, batch: Shape, options: Set) -> float:
    """Multiplications and additions of a step with ``sdpo.weight = 0``."""
    passes = 4 if options.checkpointing else 3
    body = passes * 2 * sizes.body * batch.rows * batch.total
    attention = passes * _attention(sizes, batch.rows, batch.total, batch.total / 2)
    # Formed in the forward, again in the backward, and two gradients.
    head = 4 * 2 * sizes.head * batch.rows * batch.completion
    return body + attention + head


def operations_sdpo(sizes: Sizes, batch: Shape, options: Set) -> float:
    """Those of channel 2 on top, without the divergence itself."""
    recovery = batch.rows * batch.recovery
    if options.shared_prefix:
        read, seen = batch.teacher_tokens, batch.total
    else:
        read = batch.sites * (batch.total + batch.hint // max(batch.sites, 1) + GENERATION_PROMPT)
        seen = batch.total // 2
    body = 2 * sizes.body * batch.rows * read
    attention = _attention(sizes, batch.rows, read, seen)
    # The student's logits are formed once, since their gradients are taken there and then; the teacher's once.
    return body + attention + (3 + 1) * 2 * sizes.head * recovery


def _attention(sizes: Sizes, rows: int, read: float, seen: float) -> float:
    """Scores and weighted values of ``read`` tokens that each see ``seen`` on average."""
    return 2 * 2 * sizes.layers * sizes.query * rows * read * seen


def seconds(
    sizes: Sizes, batch: Shape, options: Set | None = None, rate: float = RATE, entry_ns: float = ENTRY_NS
) -> Seconds:
    """Forward and backward, with SDPO and without."""
    options = options or Set()
    off = operations_off(sizes, batch, options) / (rate * 1e12)
    divergence = batch.rows * batch.recovery * sizes.vocab * entry_ns * 1e-9
    return Seconds(off, off + operations_sdpo(sizes, batch, options) / (rate * 1e12) + divergence)


def memory(sizes: Sizes, batch: Shape, options: Set | None = None) -> Memory:
    """At the peak, which is where the backward begins."""
    options = options or Set()
    width = BYTES[options.dtype]
    trained = sizes.parameters if options.lora_rank == 0 else _adapter(sizes, options.lora_rank)
    layer = sizes.layers * kept_per_token(sizes) * width
    if options.checkpointing:
        layer = (sizes.layers * sizes.hidden + kept_per_token(sizes)) * width
    tokens = batch.rows * batch.total
    copied = sizes.parameters * width if options.teacher != "live" and options.lora_rank == 0 else 0
    average = trained * 4 if options.teacher == "ema" else 0
    # Keys and values of the student, copied for the teacher, and the hidden states' gradient.
    sdpo = batch.rows * (batch.total + batch.teacher_tokens) * 2 * sizes.key_value * width
    sdpo += batch.rows * (batch.completion + 2 * batch.recovery) * sizes.hidden * width
    return Memory(
        weights=sizes.parameters * width + (trained * width if options.lora_rank else 0),
        gradients=trained * width,
        optimizer=trained * 4 * OPTIMIZER_FLOATS[options.optimizer],
        teacher=copied + average,
        activations=tokens * layer,
        logits=2 * min(BLOCK_ENTRIES, batch.rows * batch.completion * sizes.vocab) * 4 + sizes.head * 4,
        sdpo=sdpo,
    )


def kept_per_token(sizes: Sizes) -> int:
    """Values that one layer keeps of a token for its backward, as transformers' Llama runs without kernels of its
    own: the inputs of two norms in float32 and their results, queries, keys and values before and after the
    rotation, the attention's result, and of the feed-forward the gate, its activation, the other branch and the product."""
    attention = 2 * sizes.query + 3 * sizes.key_value + sizes.query
    return 6 * sizes.hidden + attention + 4 * sizes.intermediate


def _adapter(sizes: Sizes, rank: int) -> int:
    """Weights of an adapter on every linear layer of the decoder."""
    attention = 2 * (sizes.hidden + sizes.query) + 2 * (sizes.hidden + sizes.key_value)
    return sizes.layers * rank * (attention + 3 * (sizes.hidden + sizes.intermediate))


def read_sizes(model: str | None) -> Sizes:
    """Of a model folder, or of a name in the hub's cache; None: the embedded model's."""
    if model is None:
        return EMBEDDED
    if Path(model).is_dir():
        return Sizes.of(json.loads((Path(model) / "config.json").read_text(encoding="utf-8")))
    from transformers import AutoConfig

    return Sizes.of(AutoConfig.from_pretrained(model).to_dict())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="a model folder or name; default: the embedded model's sizes"
    )
    for name, default in vars(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=list(BYTES), default="float32")
    parser.add_argument("--optimizer", choices=list(OPTIMIZER_FLOATS), default="adamw")
    parser.add_argument("--teacher", choices=["live", "initial", "ema"], default="live")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: the whole model is trained")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rate", type=float, default=RATE, help="1e12 operations a second")
    parser.add_argument("--entry-ns", type=float, default=ENTRY_NS)
    given = parser.parse_args()
    sizes = read_sizes(given.model)
    batch = Shape(**{name: getattr(given, name) for name in vars(Shape())})
    options = Set(given.dtype, given.optimizer, given.teacher, given.lora_rank, given.checkpointing)
    time, space = seconds(sizes, batch, options, given.rate, given.entry_ns), memory(sizes, batch, options)
    print(
        f"{sizes.parameters / 1e6:.0f}M parameters, {options.dtype}; {batch.rows} rows of {batch.total} tokens"
    )
    print(
        f"forward and backward: {time.off:.2f} s without SDPO, {time.on:.2f} s with it, ratio {time.ratio:.2f}"
    )
    for name, value in vars(space).items():
        print(f"  {name:<12}{value / GIB:9.2f} GiB")
    print(f"  {'total':<12}{space.total / GIB:9.2f} GiB, beside the libraries' own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
