"""Each preset's command line, environment and files, as a rollout has them. `make test-harness`
runs the programs themselves."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.config.harness_presets import PRESETS
from stepwell.trainer.rollout.harness import Harness, Rollout

URL = "http://127.0.0.1:8100/uid/prompt"
TASK = {"instance_id": "t", "question": 'Say "hi"; {model}'}

COMMANDS: Mapping[str, str] = {
    "claude_code": "claude -p --output-format json --model policy "
    "--dangerously-skip-permissions -- PROMPT",
    "codex": "codex exec --skip-git-repo-check --json -- PROMPT",
    "opencode": "opencode run --model stepwell/policy -- PROMPT",
    "qwen_code": "qwen --yolo --output-format json --prompt=PROMPT",
    "gemini_cli": "gemini --yolo -m policy --output-format json --prompt=PROMPT",
    "aider": "aider --model openai/policy --yes-always --no-auto-commits --no-git "
    "--no-check-update --no-show-model-warnings --no-analytics --no-show-release-notes "
    "--no-suggest-shell-commands --no-detect-urls --no-stream --no-pretty --map-tokens 0 "
    "--message=PROMPT",
    "mini_swe_agent": "mini -y --exit-immediately -m openai/policy -t PROMPT "
    "-o HOME/trajectory.json",
    "pi": "pi -p --no-session --provider stepwell --model policy \nPROMPT",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the presets' names, which are found."""
    for preset in PRESETS.values():
        program = tmp_path / "bin" / preset.command[0]
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_calls_the_gateway_and_nobody_else(
    name: str, tmp_path: Path, installed: None
) -> None:
    harness = Harness(HarnessConfig(preset=name))
    rollout = Rollout(harness, "r", tmp_path / "r", TASK)
    rollout.prepare()
    rollout.write_files(URL, "the-key")
    command = rollout.fill(harness.config.command)
    told = " ".join(part.replace(TASK["question"], "PROMPT", 1) for part in command)
    assert told.replace(str(rollout.home), "HOME") == COMMANDS[name]
    env = {k: rollout.fill_text(v) for k, v in harness.config.env.items()}
    files = {f: rollout.home / f for f in harness.config.files}
    for file, path in files.items():
        load = tomllib.loads if file.endswith(".toml") else json.loads
        load(path.read_text())
    said = " ".join([*env.values(), *(path.read_text() for path in files.values())])
    assert URL in said
    assert "the-key" in said
    assert "{" not in "".join(env.values())


def test_a_preset_alone_is_the_section_and_its_keys_go_over_the_presets() -> None:
    assert RolloutConfig.model_validate({"harness": "codex"}).harness == HarnessConfig(
        preset="codex"
    )
    mine = HarnessConfig.model_validate(
        {"preset": "codex", "command": ["codex", "exec"], "env": {"RUST_LOG": "error"}}
    )
    assert mine.command == ("codex", "exec")
    assert mine.env["RUST_LOG"] == "error"
    assert mine.env["CODEX_HOME"] == "{home}/.codex"
