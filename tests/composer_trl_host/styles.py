"""Tokenizers with chat templates in the style of six model families, small and made here."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
STYLES = ("smollm2", "qwen25", "qwen3", "llama3", "gemma", "mistral")

# style: begin token, end token, other special tokens, tokens that are added but not special
_TOKENS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "smollm2": ("<|im_start|>", "<|im_end|>", (), ()),
    "qwen25": ("<|endoftext|>", "<|im_end|>", ("<|im_start|>",), ("<tool_call>", "</tool_call>")),
    "qwen3": (
        "<|endoftext|>",
        "<|im_end|>",
        ("<|im_start|>",),
        ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
    ),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>"),
        (),
    ),
    "gemma": ("<bos>", "<eos>", (), ("<start_of_turn>", "<end_of_turn>")),
    "mistral": (
        "<s>",
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        (),
    ),
}
_CORPUS = [
    "the file was not found, read it again and look for the right name\n\n",
    'I will look around. {"name": "read", "arguments": {"path": "a/b.py"}}\n',
    "assistant user tool system model error Traceback (most recent call last):\n\n    raise ValueError\n",
] * 4


@functools.cache
def styled_tokenizer(style: str) -> PreTrainedTokenizerFast:
    begin, end, special, added = _TOKENS[style]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=360, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=begin,
        eos_token=end,
        pad_token="<|pad|>",
        extra_special_tokens=list(special),
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer.chat_template = (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8")
    return tokenizer
