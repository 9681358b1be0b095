"""The policy's replies to the clients here: two tools at once, one tool, an answer, a last word."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.conftest import World

THOUGHT = "<think>\nWhich one?\n</think>\n\n"
TOOL_NAMES = (("calculator", "Adds."), ("lookup", "Looks it up."))
"""Name and description of each."""
EXPRESSION: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
"""The parameters of both."""


def call(name: str, **arguments: str) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


BOTH = call("calculator", expression="1 + 2") + "\n" + call("lookup", expression="three")
REPLIES = [
    THOUGHT + "I need both.\n" + BOTH,
    THOUGHT + call("calculator", expression="3 * 3"),
    THOUGHT + "It is 9.",
    THOUGHT + "You are welcome 🙂",
]


def check_one_branch(world: World, n: int) -> None:
    """`n` steps of the trajectory t1 were stored, exact, each going on from the one before."""
    world.check_exact()
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, *range(n - 1)]
    assert {s.trajectory_uid for s in steps} == {"t1"}
    assert all("branch" not in s.metadata for s in steps)
