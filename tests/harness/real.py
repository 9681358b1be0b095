"""`make test-harness`: each preset's real program, against the real gateway and a scripted engine.

The model calls the harness's shell once, which writes the answer, and ends. So a rollout shows that
the command line works, the work folder is where the agent works, every Step is exact, and a linear
conversation is one branch. Programs are looked for on the PATH.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.config.harness_presets import PRESETS
from stepwell.trainer.rollout.harness import FOLDER, Harness
from tests.gateway.conftest import World, one_thread, worlds

__all__ = ["one_thread", "worlds"]

WRITE = "echo 5 > answer"
TASK = {"instance_id": "sum", "question": "Write 2 + 3 into the file answer.", "answer": "5"}


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"I write it.\n<tool_call>\n{body}\n</tool_call>"


BASH = call("bash", command=WRITE)
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
REPLIES: dict[str, list[str]] = {
    "claude_code": [call("Bash", command=WRITE, description="Write it"), "It is there."],
    "codex": [call("exec_command", cmd=WRITE), "It is there."],
    "opencode": [call("bash", command=WRITE, description="Write it"), "It is there."],
    "qwen_code": [call("run_shell_command", command=WRITE, is_background=False), "It is there."],
    "gemini_cli": [call("run_shell_command", command=WRITE), "It is there."],
    "aider": ["I write it.\n\nanswer\n```\n5\n```\n"],
    "mini_swe_agent": [BASH, call("bash", command=DONE)],
    "pi": [BASH, "It is there."],
}


@pytest.mark.parametrize("name", PRESETS)
async def test_a_rollout_of_the_real_program_is_exact_and_one_branch(
    name: str, worlds: Callable[..., Any], tmp_path: Path
) -> None:
    world: World = await worlds()
    world.engine.context_length = 200_000
    for text in REPLIES[name]:
        world.say(text)
    config = HarnessConfig.model_validate(
        {
            "preset": name,
            "timeout_s": 200,
            "scratch": tmp_path / "scratch",
            "grade": {"command": ["sh", "-c", 'test "$(cat answer)" = {task.answer}']},
        }
    )
    run = Harness(config, logs=tmp_path / "logs")
    reward = await run(TASK, world.base_url(), "none")
    (said,) = (tmp_path / "logs").iterdir()
    assert reward == 1.0, said.read_text()
    world.check_exact()
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, *range(len(steps) - 1)], said.read_text()
    assert len(steps) == len(REPLIES[name])
    assert not [*(tmp_path / "scratch" / f"{FOLDER}{os.getpid()}").iterdir()]


async def test_bubblewrap_hides_homes_and_writes_nowhere_else(
    worlds: Callable[..., Any], tmp_path: Path
) -> None:
    """`bwrap` itself, which the default suite plans only."""
    world: World = await worlds()
    script = """
        touch /usr/x 2>/dev/null && exit 3; ls ~root | grep . && exit 4
        test "$(ps -e | wc -l)" -lt 10 || exit 5
        touch "$HOME/x" "$TMPDIR/x" /tmp/x && pwd > here
    """
    config = HarnessConfig.model_validate(
        {
            "command": ["sh", "-c", script],
            "sandbox": "bubblewrap",
            "grade": {"command": ["grep", "work", "here"]},
        }
    )
    assert await Harness(config)(TASK, world.base_url(), "none") == 1.0
