"""An agent of Python's standard library that knows nothing of Stepwell: OPENAI_BASE_URL and
OPENAI_API_KEY are in its environment, as for any other program. Usage: program.py QUESTION
"""

import json
import os
import re
import sys
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 48}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request) as reply:
        message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return message


def calculate(arguments: str) -> str:
    terms = re.findall(r"[+-]?\d+", arguments.replace(" ", ""))
    return str(sum(map(int, terms))) if terms else "error: not a sum"


messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    messages.append(message := ask(messages))
    calls = message.get("tool_calls") or []
    if not calls:
        print(message["content"])
        break
    for call in calls:
        result = calculate(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
