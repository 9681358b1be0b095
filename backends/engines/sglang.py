"""Launch line of a real SGLang server, with GPUs and on a machine without one.

    command(EngineConfig(kind="sglang", model_path="/models/base"), Launch(31000, "/weights/v7"))
    with GPUs     python -m sglang.launch_server --model-path /weights/v7 … + extra_args
    without one   the same + `CPU_FLAGS`, and `sglang_cpu/` on its PYTHONPATH

Interpreter: `engine.python`; else this one if it has SGLang; else `.venv-sglang/bin/python`, in the
working folder or the source checkout, which `make install-sglang` builds. SGLang pins its own torch
and transformers, so an environment of its own is the usual case.

Tested against SGLang 0.5.23 by `make test-sglang`. Owns the flags. Does not own running the process
(`supervisor.py`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.commands import CommandLine, Launch, common_flags
from stepwell.backends.errors import EngineStartError

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parents[1]

CPU_MAX_TOTAL_TOKENS = 32_768
"""Tokens of KV cache without a GPU: 128 rollouts of 256. `engine.extra_args` may say otherwise."""

CPU_FLAGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--sleep-on-idle",  # its scheduler polls: idle, it would hold a core
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--mem-fraction-static",
    "0.3",
    "--max-total-tokens",
    str(CPU_MAX_TOTAL_TOKENS),
)
"""The torch path of a dense model: no kernel package is called."""

MEMORY_FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
"""Flags that let SGLang lend its memory and come back with its weights."""

CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A server whose scheduler crashed waits a minute for the dump before it ends.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONPATH": str(_HERE / "sglang_cpu"),
}


def command(config: EngineConfig, launch: Launch) -> CommandLine:
    """A real SGLang server, with GPUs or without.

    Raises:
        EngineStartError: no interpreter here has SGLang; the message says how to get one.
    """
    on_cpu = not has_gpu()
    if on_cpu and config.dtype == "auto":  # SGLang's own `auto` turns float32 into float16
        config = config.model_copy(update={"dtype": "float32"})
    argv = [str(interpreter(config)), "-m", "sglang.launch_server", *common_flags(config, launch)]
    # A line per request in the log would push out what an error shows of it.
    argv += ["--random-seed", str(config.seed), "--log-level-http", "warning"]
    if on_cpu:
        argv += CPU_FLAGS
    elif config.release_memory:  # without a GPU the endpoints are there and free nothing
        argv += MEMORY_FLAGS
    return CommandLine([*argv, *launch.extra_args, *config.extra_args], CPU_ENV if on_cpu else {})


def interpreter(config: EngineConfig) -> Path:
    """The Python that has SGLang.

    Raises:
        EngineStartError: there is none.
    """
    if config.python is not None:
        return Path(config.python)
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    own = [folder / ".venv-sglang" for folder in (Path.cwd(), _CHECKOUT)]
    for folder in own:
        if any(folder.glob("lib/python*/site-packages/sglang/__init__.py")):
            return folder / "bin" / "python"
    raise EngineStartError(
        f"engine.kind is 'sglang', but the package sglang is neither installed here nor in "
        f"{own[0]}; run `make install-sglang` in the source checkout, or pip install "
        "'sglang>=0.5.23', or set engine.python to an interpreter that has it"
    )


def has_gpu() -> bool:
    """True if an engine started here would see a GPU. Looks at device files: to ask torch takes
    seconds and hundreds of MB, and the answer is of this environment's torch, not SGLang's."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(name) in ("", "-1"):  # as Ray sets it for an actor without a GPU
            return False
    devices = (*Path("/dev").glob("nvidia[0-9]*"), Path("/dev/kfd"), Path("/dev/dxg"))
    return any(device.exists() for device in devices)
