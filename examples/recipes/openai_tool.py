"""The OpenAI SDK with a tool: the agent owns the conversation, Stepwell sees HTTP calls only.

stepwell train --config quickstart rollout.agent=examples.recipes.openai_tool:agent
"""

import json
import re
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 4
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add and subtract whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
CLIENT = AsyncOpenAI(base_url="http://set.per.rollout", api_key="none")
"""One connection pool for all rollouts; a client of its own costs each 20 ms of CPU."""


async def agent(task: Any, base_url: str, api_key: str) -> float:
    """One rollout; returns its reward: 1.0 for the right answer, 0.0 for anything else."""
    client = CLIENT.with_options(base_url=f"{base_url}/v1", api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR], temperature=1.0, max_tokens=48
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == task["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculator(call.function.arguments) if call.type == "function" else "error"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0  # it never answered


def calculator(arguments: str) -> str:
    """The model reads what this returns, errors too: they are part of what it learns from."""
    try:
        expression = json.loads(arguments)["expression"].replace(" ", "")
    except (ValueError, TypeError, KeyError, AttributeError):
        return "error: send an expression"
    if not re.fullmatch(r"-?\d+([+-]\d+)*", expression):
        return "error: not a sum"
    return str(sum(map(int, re.findall(r"[+-]?\d+", expression))))
