"""`make test-harness`: the page "Train Claude Code on your repository" as a newcomer follows it.

Its commands, tasks and configuration are used as they are printed, with the real Claude Code, up to
its one rollout; the model is a script that reads the parser, mends it, and says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

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


async def test_the_page_can_be_followed(tmp_path: Path) -> None:
    install, template, tasks, config, one_rollout, _ = blocks()
    assert install.startswith("npm install -g @anthropic-ai/claude-code")
    (tmp_path / "tests").mkdir()
    (tmp_path / "parser.py").write_text(PARSER)
    (tmp_path / "tests" / "test_parser.py").write_text(TEST)
    git = "git -c user.name=me -c user.email=me@example.com"
    await run(f"git init -q && git add . && {git} commit -q -m first", tmp_path)
    await run(f"set -e\n{template}", tmp_path)
    (tmp_path / "tasks.jsonl").write_text(tasks)
    (tmp_path / "claude.yaml").write_text(config)

    tokenizer = make_tokenizer("quickstart")
    script = [
        call("Bash", command="cat parser.py", description="Read it"),
        call("Bash", command=MEND, description="Mend it"),
        "It returns [] now.",
    ]
    engine = ScriptedEngine(version="0", context_length=200_000)
    engine.script = [
        Sampled([*map(int, tokenizer.encode(text)), eos_id(tokenizer)]) for text in script
    ]
    async with engine.running() as url:
        scripted = f"model.path={QUICKSTART} engine.kind=attach 'engine.urls=[{url}]'"
        shown = await run(f"{one_rollout.strip()} {scripted}", tmp_path)
        assert "3 steps" in shown
        assert "reward 1" in shown
        engine.script = [Sampled([*map(int, tokenizer.encode("I cannot.")), eos_id(tokenizer)])]
        told = await run(f"{one_rollout.strip()} --json {scripted}", tmp_path)
    (branch,) = json.loads(told.splitlines()[-1])["branches"]
    assert (len(branch["steps"]), branch["reward"]) == (1, 0.0)
    assert not engine.script
