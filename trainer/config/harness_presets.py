"""Harnesses that `rollout.harness` knows by name: their command lines, and what they need.

Each speaks to the gateway in its own dialect, asks nobody, and sends no telemetry, titles and
updates where it has a switch for that. A prompt that begins as an option does, a list for
instance, is none. Texts have the placeholders of `rollout.harness`. Tried with
the real programs by `make test-harness`. Does not own how they are run (`rollout/harness.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Preset:
    """A known harness."""

    title: str
    command: tuple[str, ...]
    install: str
    """Command that installs it."""
    needs: str
    """Requirement of that command."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    gave_up: tuple[int, ...] = ()


_CODEX = """\
model = "{model}"
model_provider = "stepwell"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.stepwell]
name = "stepwell"
base_url = "{base_url}/v1"
env_key = "STEPWELL_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
_OPENCODE = """\
{
  "model": "stepwell/{model}",
  "small_model": "stepwell/{model}",
  "autoupdate": false,
  "share": "disabled",
  "permission": "allow",
  "agent": { "title": { "disable": true } },
  "provider": { "stepwell": {
    "npm": "@ai-sdk/openai-compatible",
    "options": { "baseURL": "{base_url}/v1", "apiKey": "{api_key}" },
    "models": { "{model}": { "tool_call": true } }
  } }
}
"""
_QWEN = """\
{
  "security": { "auth": { "selectedType": "openai" } },
  "telemetry": { "enabled": false },
  "privacy": { "usageStatisticsEnabled": false },
  "general": { "enableAutoUpdate": false },
  "memory": { "enableManagedAutoMemory": false, "enableManagedAutoDream": false }
}
"""
_GEMINI = """\
{
  "security": { "auth": { "selectedType": "gemini-api-key" } },
  "privacy": { "usageStatisticsEnabled": false },
  "general": { "enableAutoUpdate": false }
}
"""
_PI = """\
{ "providers": { "stepwell": {
  "baseUrl": "{base_url}/v1", "api": "openai-completions", "apiKey": "{api_key}",
  "models": [ { "id": "{model}", "reasoning": false, "input": ["text"],
                "contextWindow": 131072, "maxTokens": 8192 } ]
} } }
"""

PRESETS: Final[Mapping[str, Preset]] = {
    "claude_code": Preset(
        "Claude Code",
        (
            "claude",
            "-p",
            "--output-format",
            "json",
            "--model",
            "{model}",
            "--dangerously-skip-permissions",
            "--",
            "{task.prompt}",
        ),
        "npm install -g @anthropic-ai/claude-code",
        "Node 22 or later",
        env={
            "ANTHROPIC_BASE_URL": "{base_url}",
            "ANTHROPIC_AUTH_TOKEN": "{api_key}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # root, of a container, may skip permissions too
        },
    ),
    "codex": Preset(
        "Codex CLI",
        ("codex", "exec", "--skip-git-repo-check", "--json", "--", "{task.prompt}"),
        "npm install -g @openai/codex",
        "Node 18 or later",
        env={"CODEX_HOME": "{home}/.codex", "STEPWELL_API_KEY": "{api_key}"},
        files={".codex/config.toml": _CODEX},
    ),
    "opencode": Preset(
        "opencode",
        ("opencode", "run", "--model", "stepwell/{model}", "--", "{task.prompt}"),
        "npm install -g opencode-ai",
        "Node 18 or later",
        env={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": _OPENCODE},
    ),
    "qwen_code": Preset(
        "Qwen Code",
        ("qwen", "--yolo", "--output-format", "json", "--prompt={task.prompt}"),
        "npm install -g @qwen-code/qwen-code",
        "Node 22 or later",
        env={
            "OPENAI_BASE_URL": "{base_url}/v1",
            "OPENAI_API_KEY": "{api_key}",
            "OPENAI_MODEL": "{model}",
        },
        files={".qwen/settings.json": _QWEN},
    ),
    "gemini_cli": Preset(
        "Gemini CLI",
        ("gemini", "--yolo", "-m", "{model}", "--output-format", "json", "--prompt={task.prompt}"),
        "npm install -g @google/gemini-cli",
        "Node 20 or later",
        env={
            "GOOGLE_GEMINI_BASE_URL": "{base_url}",
            "GEMINI_API_KEY": "{api_key}",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        files={".gemini/settings.json": _GEMINI},
    ),
    "aider": Preset(
        "aider",
        (
            "aider",
            "--model",
            "openai/{model}",
            "--yes-always",
            "--no-auto-commits",
            "--no-git",
            "--no-check-update",
            "--no-show-model-warnings",
            "--no-analytics",
            "--no-show-release-notes",
            "--no-suggest-shell-commands",
            "--no-detect-urls",
            "--no-stream",
            "--no-pretty",
            "--map-tokens",
            "0",
            "--message={task.prompt}",
        ),
        "uv tool install aider-chat   (or pip install aider-chat in an environment of its own)",
        "Python 3.10 to 3.12",
        env={"OPENAI_API_BASE": "{base_url}/v1", "OPENAI_API_KEY": "{api_key}"},
    ),
    "mini_swe_agent": Preset(
        "mini-swe-agent",
        (
            "mini",
            "-y",
            "--exit-immediately",
            "-m",
            "openai/{model}",
            "-t",
            "{task.prompt}",
            "-o",
            "{home}/trajectory.json",
        ),
        "uv tool install mini-swe-agent   (or pip install mini-swe-agent)",
        "Python 3.10 or later",
        env={
            "OPENAI_API_BASE": "{base_url}/v1",
            "OPENAI_API_KEY": "{api_key}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
    "pi": Preset(
        "Pi",
        (
            "pi",
            "-p",
            "--no-session",
            "--provider",
            "stepwell",
            "--model",
            "{model}",
            "\n{task.prompt}",  # it knows no "--", and takes "@…" for a file
        ),
        "npm install -g @earendil-works/pi-coding-agent",
        "Node 20 or later",
        env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
        files={".pi/agent/models.json": _PI},
    ),
}
"""By the name in `rollout.harness`."""
