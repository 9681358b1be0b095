"""Command lines that start engines: one builder per kind, found by name (`ENGINES`).

    command_line(config, Launch(port=31000, model_path="/run/weights/v7", …))
    -> CommandLine(["python", "-m", "stepwell.backends.engines.embedded", …], {"PYTHONPATH": …})

A builder is pure but for looking around on its machine (is SGLang installed, is there a GPU) and
raises `EngineStartError` with the remedy if what it needs is not there. Does not own running it:
`supervisor.py`. The real SGLang's is in `sglang.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

from stepwell.backends.config import EngineConfig
from stepwell.backends.errors import BackendConfigError, BackendError, EngineStartError
from stepwell.backends.registry import ENGINE_NAMES, Registry, first_line


@dataclass(frozen=True, slots=True)
class Launch:
    """Values that one launch adds to the configuration."""

    port: int
    model_path: str
    weight_version: str = "0"
    extra_args: tuple[str, ...] = ()
    """Flags of this launch alone, e.g. `--start-paused`; before the configuration's own."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A process to start."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Set over the supervisor's environment; `PYTHONPATH` is put before the one found there."""


Builder: TypeAlias = Callable[[EngineConfig, Launch], CommandLine]


def common_flags(config: EngineConfig, launch: Launch) -> list[str]:
    """Flags that the embedded engine and SGLang's `launch_server` both understand."""
    argv = ["--model-path", launch.model_path, "--tokenizer-path", str(config.model_path)]
    argv += ["--host", config.host, "--port", str(launch.port)]
    argv += ["--weight-version", launch.weight_version]
    argv += ["--max-running-requests", str(config.max_running_requests), "--dtype", config.dtype]
    argv += ["--stream-interval", str(config.stream_interval)]
    if config.context_length is not None:
        argv += ["--context-length", str(config.context_length)]
    return argv


def embedded(config: EngineConfig, launch: Launch) -> CommandLine:
    """Stepwell's own server over transformers, for a machine without GPUs."""
    argv = [config.python or sys.executable, "-m", "stepwell.backends.engines.embedded"]
    argv += common_flags(config, launch)
    argv += ["--threads", str(config.threads), "--seed", str(config.seed)]
    package_root = Path(str(files("stepwell"))).parent
    return CommandLine(
        [*argv, *launch.extra_args, *config.extra_args], {"PYTHONPATH": str(package_root)}
    )


def command_line(config: EngineConfig, launch: Launch) -> CommandLine:
    """Build the command line of an engine of `config.kind`, built in or a plug-in's.

    Raises:
        EngineStartError: what it needs is not there.
        BackendConfigError: there is no such kind here, or its builder fails.
    """
    builder = ENGINES.load(config.kind)
    try:
        line = builder(config, launch)
    except BackendError:
        raise
    except Exception as e:  # a plug-in's code
        raise BackendConfigError(
            f"engine.kind is {config.kind!r}, whose builder failed: {type(e).__name__}: {e}; "
            "`stepwell backends` names its package"
        ) from e
    if not isinstance(line, CommandLine):
        raise BackendConfigError(
            f"engine.kind is {config.kind!r}, whose builder returned {line!r:.80}; it should "
            "return a CommandLine"
        )
    return line


def _lacks(name: str, builder: Builder) -> str | None:
    """A command line is made for a model that is not there: builders look at the machine only."""
    config = EngineConfig(kind=name, model_path=Path("model"))
    try:
        command_line(config, Launch(port=1, model_path="model"))
    except EngineStartError as e:
        return str(e)
    return None


ENGINES: Registry[Builder] = Registry(
    ENGINE_NAMES,
    wanted="function (EngineConfig, Launch) -> CommandLine",
    fits=callable,
    lacks=_lacks,
    about=first_line,
)
