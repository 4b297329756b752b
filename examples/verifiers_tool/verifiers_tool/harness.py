"""The loop of the null harness in the process that serves the environment.

verifiers' own null harness starts a program per rollout, which takes two seconds of processor time before
the first turn. Nothing here needs a program: turns go through the interception, calls to the tool servers.
``env.agent.harness = { id = "null" }`` selects verifiers' own.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class InlineChat(vf.Harness[vf.HarnessConfig]):
    """Chat with tools until a turn calls none, or the rollout is stopped."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt or ""})
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, dispatch, connections = await connect_mcp(servers, stack)
            while True:
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, "tools": tools},
                )
                if answer.status_code != 200:
                    # A rollout that a limit or a @stop ended is answered so too; verifiers knows which it was.
                    return vf.ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    content = (
                        await call_mcp(connections, dispatch, name, arguments)
                        if name in dispatch
                        else f"error: unknown tool {name!r}"
                    )
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
                    )
