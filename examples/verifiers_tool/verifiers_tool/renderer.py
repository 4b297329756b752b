"""ChatML with tool calls written as lines: ``trash report`` calls ``trash`` with ``name = "report"``.

A model of 135 million parameters writes no JSON calls; a line it can. The first line of a turn is the call.
"""

from __future__ import annotations

from typing import Any

from renderers.base import (
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    extract_message_tool_names,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig


class LineRendererConfig(BaseRendererConfig):
    """No options."""

    name: str = "lines"


class LineRenderer:
    """``name = "custom"`` and ``import_path = "verifiers_tool.renderer.LineRenderer"`` select it."""

    config_class = LineRendererConfig
    supports_tools = True
    is_prefix_stable = True
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: LineRendererConfig | None = None) -> None:
        self._tokenizer = tokenizer
        self.config = config or LineRendererConfig()
        self._start, self._end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        pieces = _Pieces(self)
        for index, message in enumerate(messages):
            pieces.message(index, message)
        return pieces.close(messages, add_generation_prompt)

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        text = self._tokenizer.decode([i for i in token_ids if i != self._end], skip_special_tokens=True)
        lines = text.strip().splitlines()
        if not lines:
            return ParsedResponse(content=text)
        command, *names = lines[0].split()
        call = ParsedToolCall(raw=text, name=command, arguments={"name": " ".join(names)})
        return ParsedResponse(content="", tool_calls=[call])

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        before = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {self._end}, synthesize_close=self._end
        )
        if before is None:
            return None
        pieces = _Pieces(self, before)
        pieces.add(self.encode("\n"), -1)
        for index, message in enumerate(new_messages):
            pieces.message(index, message)
        return pieces.close(new_messages, True)

    def encode(self, text: str) -> list[int]:
        """Ids of text. A control token's spelling in it stays text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


class _Pieces:
    """Ids with what each of them belongs to."""

    def __init__(self, renderer: LineRenderer, before: list[int] | None = None) -> None:
        self._renderer = renderer
        self._ids = list(before or [])
        self._indices = [-1] * len(self._ids)
        self._sampled = [False] * len(self._ids)
        self._content = [False] * len(self._ids)

    def add(self, ids: list[int], index: int, sampled: bool = False, content: bool = False) -> None:
        self._ids += ids
        self._indices += [index] * len(ids)
        self._sampled += [sampled] * len(ids)
        self._content += [content] * len(ids)

    def message(self, index: int, message: Any) -> None:
        renderer, role = self._renderer, message["role"]
        own = role == "assistant"
        self.add([renderer._start, *renderer.encode(f"{role}\n")], index)
        self.add(renderer.encode(_text(message)), index, sampled=own, content=True)
        self.add([renderer._end], index, sampled=own, content=own)
        self.add(renderer.encode("\n"), index)

    def close(self, messages: list[Any], add_generation_prompt: bool) -> RenderedTokens:
        if add_generation_prompt:
            self.add([self._renderer._start, *self._renderer.encode("assistant\n")], -1)
        return RenderedTokens(
            token_ids=self._ids,
            message_indices=self._indices,
            sampled_mask=self._sampled,
            is_content=self._content,
            message_roles=[message.get("role") or "" for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )


def _text(message: Any) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    for call in message.get("tool_calls") or []:
        function = call["function"]
        content += f"{function['name']} {_name(function['arguments'])}".rstrip()
    return content


def _name(arguments: Any) -> str:
    import json

    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(value.get("name", "")) if isinstance(value, dict) else ""
