"""`make test-harness`: an agent of Google's ADK, the real package in an environment of its own
(it wants an older google-genai than the contract tests have), against the real gateway and a
scripted engine. It thinks, calls a tool twice, and answers: one branch of exact Steps."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import World, one_thread, worlds

__all__ = ["one_thread", "worlds"]

PROGRAM = """
import asyncio, json, sys
from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.planners import BuiltInPlanner
from google.adk.runners import InMemoryRunner
from google.genai import types

def calc(expression: str) -> dict:
    '''Calculates a sum.'''
    return {"value": sum(map(int, expression.split("+")))}

async def main():
    thinks = BuiltInPlanner(thinking_config=types.ThinkingConfig(include_thoughts=True))
    agent = Agent(
        name="sums", model="gemini-any", instruction="Be brief.", tools=[calc], planner=thinks
    )
    runner = InMemoryRunner(agent=agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="u")
    told = types.Content(role="user", parts=[types.Part(text="What is 1 + 2 + 4?")])
    how = RunConfig(streaming_mode=StreamingMode[sys.argv[1]])
    seen = {"thought": "", "text": "", "values": [], "partial": 0}
    async for event in runner.run_async(
        user_id="u", session_id=session.id, new_message=told, run_config=how
    ):
        if event.partial:
            seen["partial"] += 1
            continue
        for part in event.content.parts if event.content else ():
            if part.function_response:
                seen["values"].append(part.function_response.response["value"])
            elif part.text:
                seen["thought" if part.thought else "text"] += part.text
    print(json.dumps(seen))

asyncio.run(main())
"""


def call(expression: str) -> str:
    body = json.dumps({"name": "calc", "arguments": {"expression": expression}})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize("mode", ["NONE", "SSE"])
async def test_an_agent_that_thinks_and_calls_tools_is_one_branch(
    mode: str, worlds: Callable[..., Any]
) -> None:
    world: World = await worlds(family="qwen3")
    world.say("<think>\nfirst 1 + 2\n</think>\n\n" + call("1+2"))
    world.say("<think>\nand 4\n</think>\n\n" + call("3+4"))
    world.say("It is 7.")
    adk = shutil.which("adk")
    assert adk, "make test-harness installs google-adk"
    process = await asyncio.create_subprocess_exec(
        Path(adk).with_name("python"),
        "-c",
        PROGRAM,
        mode,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GOOGLE_GEMINI_BASE_URL": world.base_url(), "GEMINI_API_KEY": "none"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    seen = json.loads(out.splitlines()[-1])
    assert (seen["values"], seen["text"]) == ([3, 7], "It is 7.")
    assert "first 1 + 2" in seen["thought"]
    assert (seen["partial"] > 0) == (mode == "SSE")
    world.check_exact()
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, 0, 1]
    assert {s.metadata["dialect"] for s in steps} == {"gemini"}
