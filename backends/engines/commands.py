"""Command lines that start engines: one builder per kind, found by name (`kinds.py`).

    command_line(config, Launch(port=31000, model_path="/run/weights/v7", …))
    -> CommandLine(["python", "-m", "stepwell.backends.engines.embedded", …], {"PYTHONPATH": …})

A builder is pure but for looking around on its machine (is SGLang installed, is there a GPU) and
raises `EngineStartError` with the remedy if what it needs is not there. Does not own running it:
`supervisor.py`. The real SGLang's is in `sglang.py`, vLLM's in `vllm.py`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

from stepwell.backends.config import EngineConfig
from stepwell.backends.errors import EngineStartError

_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Launch:
    """Values that one launch adds to the configuration."""

    port: int
    model_path: str
    weight_version: str = "0"
    extra_args: tuple[str, ...] = ()
    """Flags of this launch alone, e.g. `--start-paused`; before the configuration's own."""
    on_gpu: bool | None = None
    """True: for a machine with GPUs; None: as this one is."""

    @property
    def on_cpu(self) -> bool:
        """True if the engine will see no GPU."""
        return not (has_gpu() if self.on_gpu is None else self.on_gpu)


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


def interpreter(config: EngineConfig, package: str, install: str) -> Path:
    """The Python that has the engine's `package`: `engine.python`, this one, or the one of
    `.venv-PACKAGE` in the working folder or the source checkout.

    Args:
        install: a way to get it, in words.

    Raises:
        EngineStartError: there is none.
    """
    if config.python is not None:
        return Path(config.python)
    if importlib.util.find_spec(package) is not None:
        return Path(sys.executable)
    own = [folder / f".venv-{package}" for folder in (Path.cwd(), _CHECKOUT)]
    for folder in own:
        if any(folder.glob(f"lib/python*/site-packages/{package}/__init__.py")):
            return folder / "bin" / "python"
    raise EngineStartError(
        f"engine.kind is {config.kind!r}, but the package {package} is neither installed here nor "
        f"in {own[0]}; run `make install-{package}` in the source checkout, or {install}, or set "
        "engine.python to an interpreter that has it"
    )


def torch_version(python: str) -> str:
    """Version of the torch that the interpreter `python` has; empty if it has none."""
    ask = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def has_gpu() -> bool:
    """True if an engine started here would see a GPU. Looks at device files: to ask torch takes
    seconds and hundreds of MB, and the answer is of this environment's torch, not the engine's."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(name) in ("", "-1"):  # as Ray sets it for an actor without a GPU
            return False
    devices = (*Path("/dev").glob("nvidia[0-9]*"), Path("/dev/kfd"), Path("/dev/dxg"))
    return any(device.exists() for device in devices)
