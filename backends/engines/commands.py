"""Command lines of the engines. Pure; one builder per kind, looked up in `COMMANDS`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from backends.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch adds to the configuration."""

    port: int
    model_path: str
    weight_version: str = "0"


def _common(module: str, config: EngineConfig, launch: Launch) -> list[str]:
    tokenizer = config.tokenizer_path or config.model_path
    argv = [config.python or sys.executable, "-m", module]
    argv += ["--model-path", launch.model_path, "--tokenizer-path", str(tokenizer)]
    argv += ["--host", config.host, "--port", str(launch.port)]
    argv += ["--weight-version", launch.weight_version]
    argv += ["--max-running-requests", str(config.max_running_requests), "--dtype", config.dtype]
    argv += ["--stream-interval", str(config.stream_interval)]
    if config.context_length is not None:
        argv += ["--context-length", str(config.context_length)]
    if config.tool_call_parser is not None:
        argv += ["--tool-call-parser", config.tool_call_parser]
    if config.reasoning_parser is not None:
        argv += ["--reasoning-parser", config.reasoning_parser]
    return argv


def embedded_argv(config: EngineConfig, launch: Launch) -> list[str]:
    argv = _common("backends.engines.embedded", config, launch)
    argv += ["--threads", str(config.threads), "--seed", str(config.seed)]
    return [*argv, *config.extra_args]


def sglang_argv(config: EngineConfig, launch: Launch) -> list[str]:
    """SGLang 0.5's `launch_server`. CPU-only or GPU flags come from `extra_args`."""
    argv = _common("sglang.launch_server", config, launch)
    argv += ["--random-seed", str(config.seed)]
    return [*argv, *config.extra_args]


COMMANDS: Mapping[str, Callable[[EngineConfig, Launch], list[str]]] = MappingProxyType(
    {"embedded": embedded_argv, "sglang": sglang_argv}
)
