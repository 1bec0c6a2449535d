"""Chat loop with tools in verifiers' own process: its `null` harness without a process for each episode."""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """Ask for turns until one has no tool call. It executes nothing itself: tools are the taskset's MCP servers."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
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
        messages = self._first_messages(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        # The run has a limit. The endpoint is in this process, whose event loop stands still while a taskset reads a
        # dictionary: a limit for connections ran out without anything being wrong.
        timeout = httpx.Timeout(None)
        async with AsyncExitStack() as stack:
            tools, dispatch, clients = await connect_mcp({"mcpServers": servers}, stack)
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=timeout, trust_env=False))
            request = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", headers=headers, json=request)
                if reply.is_error:  # also how a limit or a stop condition of the run arrives
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    messages.append(await _result(call, dispatch, clients))

    def _first_messages(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _result(call: dict[str, Any], dispatch: dict[str, Any], clients: dict[str, Any]) -> dict[str, Any]:
    """Run a tool call. Returns its tool message; a call that cannot be run is answered with the reason."""
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError as mistake:
        arguments = mistake
    if name not in dispatch:
        content: Any = f"error: there is no tool {name!r}; there are {', '.join(sorted(dispatch)) or 'none'}"
    elif not isinstance(arguments, dict):
        content = f"error: the arguments of {name} must be a JSON object; got {call['function']['arguments']!r:.200}"
    else:
        content = await call_mcp(clients, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
