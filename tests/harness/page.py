"""`make test-harness`: the page "Train Claude Code on your repository" as a newcomer follows it.

Its commands, tasks and configuration are used as they are printed, with the real Claude Code; the
model is a script. In the one rollout it reads the parser, mends it, and says so; in training it
mends it in every other rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stepwell.datapool.files.trained import read_trained
from stepwell.trainer.metrics import read_metrics
from tests.gateway.conftest import QUICKSTART, Sampled, ScriptedEngine, eos_id, make_tokenizer
from tests.harness.real import ROOT, call

PARSER = "def parse(line):\n    return line.split(',') if line else None\n"
TEST = "from parser import parse\n\ndef test_an_empty_line():\n    assert parse('') == []\n"
MEND = "printf 'def parse(line):\\n    return line.split(\",\") if line else []\\n' > parser.py"


def blocks() -> list[str]:
    """The indented and fenced blocks of the page, in order."""
    page = (ROOT / "docs" / "claude-code.md").read_text()
    found = re.findall(r"```yaml\n([^`]*)```|((?:^    \S.*\n)+)", page, re.MULTILINE)
    return [
        fenced or re.sub("^    ", "", indented, flags=re.MULTILINE) for fenced, indented in found
    ]


async def run(command: str, folder: Path) -> str:
    """Output of a command of the page, which has to succeed."""
    own = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    child = await asyncio.create_subprocess_shell(
        command,
        cwd=folder,
        env={**os.environ, "PATH": own, "COLUMNS": "100"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await child.communicate()
    assert child.returncode == 0, f"{command}\n{out.decode()}"
    return out.decode()


class TrainedEngine(ScriptedEngine):
    """One that is told of new weights, and goes on as it was scripted."""

    async def commanded(self, request: web.Request) -> web.Response:
        if request.path == "/weights_checker":
            return web.Response(status=404)  # it has no weights
        if request.path == "/update_weights_from_disk":
            self.version = str((await request.json())["weight_version"])
        return web.json_response({"success": True, "message": ""})

    async def other(self, request: web.Request) -> web.Response:
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.version, "model_path": "m"})
        if request.path == "/server_info":
            return web.json_response({"version": "0.5.23"})
        return await super().other(request)


@pytest.fixture
async def followed(tmp_path: Path) -> list[str]:
    """The page's commands from its fourth step on, in a folder in which the first three are done.
    The model's prompt is short: three tools, as the page has it for little room."""
    install, template, tasks, config, *commands = blocks()
    assert install.startswith("npm install -g @anthropic-ai/claude-code")
    (tmp_path / "tests").mkdir()
    (tmp_path / "parser.py").write_text(PARSER)
    (tmp_path / "tests" / "test_parser.py").write_text(TEST)
    git = "git -c user.name=me -c user.email=me@example.com"
    await run(f"git init -q && git add . && {git} commit -q -m first", tmp_path)
    await run(f"set -e\n{template}", tmp_path)
    (tmp_path / "tasks.jsonl").write_text(tasks)
    (tmp_path / "claude.yaml").write_text(config)
    return [command.strip() for command in commands]


def sampled(text: str, version: str = "0") -> Sampled:
    tokenizer = make_tokenizer("quickstart")
    return Sampled([*map(int, tokenizer.encode(text)), eos_id(tokenizer)], version=version)


def scripted(url: str) -> str:
    return f"model.path={QUICKSTART} engine.kind=attach 'engine.urls=[{url}]'"


MENDS = call("Bash", command=MEND, description="Mend it")


async def test_one_rollout_is_tried(followed: list[str], tmp_path: Path) -> None:
    reads = call("Bash", command="cat parser.py", description="Read it")
    one_rollout = followed[0]
    engine = ScriptedEngine(version="0", context_length=200_000)
    engine.script = [sampled(text) for text in (reads, MENDS, "It returns [] now.")]
    async with engine.running() as url:
        shown = await run(f"{one_rollout} {scripted(url)}", tmp_path)
        assert "3 steps" in shown
        assert "reward 1" in shown
        engine.script = [sampled("I cannot.")]
        told = await run(f"{one_rollout} --json {scripted(url)}", tmp_path)
    (branch,) = json.loads(told.splitlines()[-1])["branches"]
    assert (len(branch["steps"]), branch["reward"]) == (1, 0.0)
    assert not engine.script


async def test_claude_code_is_trained(followed: list[str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer("quickstart")
    engine = TrainedEngine(version="0", context_length=200_000)
    begun = 0

    def said(body: dict[str, Any]) -> Sampled:
        nonlocal begun
        version = engine.version or "0"
        if "line else []" in tokenizer.decode(body["input_ids"]):
            return sampled("It returns [] now.", version)
        begun += 1
        return sampled(MENDS if begun % 2 else "I cannot.", version)

    engine.default = said
    train = followed[1]
    assert train == "stepwell train --config claude.yaml"
    async with engine.running() as url:
        short = "'rollout.harness.env.CLAUDE_CODE_SIMPLE=\"1\"'"
        few = "trainer.total_steps=2 trainer.train_batch_size=1 rollout.max_outstanding_groups=2"
        soon = "async_training.trigger_parameter_sync_step=1"
        small = f"{short} {few} {soon} rollout.n=4 logging.wandb=disabled"
        told = await run(f"{train} {scripted(url)} {small}", tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2], told
    assert all(record["grad_norm"] > 0 for record in records), records
    assert int(engine.version or 0) > 0, "new weights were published"
    for step in (1, 2):
        for each in read_trained(folder, step):
            steps = each.trajectory.steps
            mended = len(steps) == 2
            assert sum(s.reward or 0.0 for s in steps) == float(mended)
            assert [s.parent_index for s in steps] == [None, 0][: len(steps)]
